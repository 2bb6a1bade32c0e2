"""Autoscale words: how an application is scaled, in one line of text or by name; what makes no sense is refused."""

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery5 import App, Misconfigured
from celery5.config.configuration import check_usable
from celery5.config.scaling import get_autoscale, get_prioritisation, is_scaled
from celery5.config.settings import read_settings
from celery5.protocol.scaling.autoscale import Autoscale, Load, Scale, parse_autoscale
from celery5.protocol.scaling.prioritisation import STRATEGIES, parse_strategy
from celery5.protocol.scaling.snapshot import ClusterSnapshot

HERE = __name__


def mine(_load: Load) -> Scale:
    """A strategy of one's own."""
    return Scale(1)


def first(_situation: ClusterSnapshot) -> dict[str, float]:
    """One for priorities."""
    return {}


@pytest.mark.parametrize(
    ("said", "means"),
    [
        ("", None),
        ({}, None),
        ("maximum=5", Autoscale(minimum=1, maximum=5)),
        ("minimum=0, maximum=10 prefetch=8", Autoscale(minimum=0, maximum=10, prefetch=8.0)),
        ({"minimum": 2, "maximum": 2}, Autoscale(minimum=2, maximum=2)),
        (
            {"maximum": 3, "cooldown": 5, "longest_cooldown": 90.5, "quiet": 0, "shrink_after": 10},
            Autoscale(minimum=1, maximum=3, cooldown=5, longest_cooldown=90.5, quiet=0, shrink_after=10),
        ),
        ({"maximum": 3, "strategy": mine}, Autoscale(minimum=1, maximum=3, strategy=mine)),
    ],
)
def test_it_is_said_in_one_line_or_by_name(said: Any, means: Autoscale | None) -> None:
    assert parse_autoscale(said) == means
    assert get_autoscale(App("shop", autoscale=said).settings) == means


def test_a_strategy_is_named_by_its_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CELERY5_AUTOSCALE", f"maximum=3 strategy={HERE}:mine")
    monkeypatch.setenv("CELERY5_PRIORITISE", f"{HERE}:first")
    settings = App("shop").settings
    scaled = get_autoscale(settings)
    assert scaled is not None
    assert scaled.strategy is mine
    assert get_prioritisation(settings) is first
    assert is_scaled(settings)


def test_strategies_are_named_and_autoscaling_is_off_by_default() -> None:
    for name, strategy in STRATEGIES.items():
        assert get_prioritisation(App("shop", prioritise=name).settings) is strategy
    settings = App("shop").settings
    assert (get_autoscale(settings), get_prioritisation(settings), is_scaled(settings)) == (None, None, False)


@pytest.mark.parametrize(
    ("said", "says"),
    [
        ("minimum=1", "autoscale needs a maximum, the most worker processes there may be"),
        ("10", "'10' is not understood: write minimum=1 maximum=10"),
        ("maximum=", "'maximum=' is not understood"),
        ("maximum=3 maximum=4", "has 'maximum' twice"),
        ("maximun=3", "autoscale has 'maximun', which it does not know: did you mean 'maximum'?"),
        ("zzz=3 maximum=1", "which it does not know: there are minimum, maximum, prefetch"),
        ("minimum=5 maximum=4", "the minimum, 5, is over the maximum, 4"),
        ("maximum=many", "maximum is 'many': give a number of worker processes, 1 or more"),
        ({"maximum": 2.5}, "maximum is 2.5: give a number of worker processes"),
        ({"maximum": True}, "maximum is True"),
        ("maximum=99999", "maximum is 99999"),
        ("minimum=-1 maximum=2", "minimum is '-1': give a number of worker processes, 0 or more"),
        ("maximum=2 prefetch=0.5", "prefetch is '0.5': give a factor from 1 to 16"),
        ("maximum=2 prefetch=nan", "prefetch is 'nan'"),
        ("maximum=2 cooldown=0", "cooldown is 0.0: give seconds from 0.1 to 604800"),
        ({"maximum": 2, "quiet": None}, "quiet is None: give seconds from 0 to"),
        ({"maximum": 2, "shrink_after": "soon"}, "shrink_after: 'soon' is not a duration: write 30s"),
        ({"maximum": 2, "strategy": 7}, "strategy is 7: give a function that takes a Load and gives a Scale"),
        ("maximum=2 strategy=mine", "strategy is 'mine': write module:function"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused_in_one_line(said: Any, says: str) -> None:
    with pytest.raises(Misconfigured) as refused:
        App("shop", autoscale=said)
    assert says in str(refused.value)
    assert str(refused.value).startswith("setting autoscale=")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("said", "says"),
    [
        ("shortset", "there are shortest, longest, rarest, saturation: did you mean 'shortest'?"),
        ("mine", "or write module:function for one of your own"),
        (":mine", "no strategy ':mine'"),
    ],
)  # fmt: skip
def test_a_strategy_that_nobody_knows_is_refused_with_what_was_meant(said: str, says: str) -> None:
    with pytest.raises(Misconfigured) as refused:
        read_settings({}, {"CELERY5_PRIORITISE": said})
    assert says in str(refused.value)
    assert parse_strategy("") is None


@pytest.mark.parametrize(
    ("said", "says"),
    [
        ("no_such_module:mine", "cannot be loaded: ModuleNotFoundError: No module named 'no_such_module'"),
        (f"{HERE}:yours", "cannot be loaded: AttributeError"),
        (f"{HERE}:HERE", "name a function, or an object that can be called"),
        (f"{HERE}:Scale", "name a function"),
    ],
)
def test_a_name_without_a_function_is_told_of_in_one_line(said: str, says: str) -> None:
    with pytest.raises(Misconfigured) as refused:
        get_prioritisation(App("shop", prioritise=said).settings)
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


def test_strategy_that_cannot_be_loaded_replaces_no_other() -> None:
    app = App("shop")
    for said in ({"autoscale": "maximum=1 strategy=nowhere:mine"}, {"prioritise": "nowhere:mine"}):
        settings = read_settings(said, {})
        with pytest.raises(Misconfigured, match="strategy 'nowhere:mine' cannot be loaded"):
            check_usable(settings, app.name, settings.broker)


@given(st.text(max_size=40))
def test_any_text_is_either_understood_or_refused(text: str) -> None:
    for read in (parse_autoscale, parse_strategy):
        with suppress(Misconfigured):
            read(text)
