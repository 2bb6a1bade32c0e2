"""Text values: durations, sizes, rates, ranges and lists are written in one way everywhere, and have one error."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any, get_type_hints

import pytest

from celery5 import App, Misconfigured
from celery5.config.settings import LoadedConfiguration, Settings, parse_value, read_settings
from celery5.protocol.cluster.description import parse_cluster
from celery5.protocol.scaling.autoscale import parse_autoscale
from celery5.protocol.text_values import (
    COUNT,
    DURATION,
    HOST_AND_PORT,
    NAMES,
    RANGE,
    RATE,
    SIZE,
    HostAndPort,
    TextKind,
    WrittenRange,
    WrittenRate,
    parse_assignments,
    parse_json_array,
    parse_parameter,
)


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (DURATION, "90", 90.0),
        (DURATION, "1.5", 1.5),
        (DURATION, "30s", 30.0),
        (DURATION, "15m", 900.0),
        (DURATION, "2h", 7200.0),
        (DURATION, "1d12h", 129600.0),
        (DURATION, " 1W ", 604800.0),
        (SIZE, "1048576", 2**20),
        (SIZE, "500 MiB", 500 * 2**20),
        (SIZE, "500MiB", 500 * 2**20),
        (SIZE, "512M", 512 * 2**20),
        (SIZE, "1.5 GiB", 3 * 2**29),
        (SIZE, "2 gb", 2 * 10**9),
        (SIZE, "64 KiB", 2**16),
        (SIZE, "0", 0),
        (RATE, "50", WrittenRate(50, 1)),
        (RATE, "90/m", WrittenRate(90, 60)),
        (RATE, "3/10s", WrittenRate(3, 10)),
        (RATE, "1000/H", WrittenRate(1000, 3600)),
        (COUNT, "10", 10),
        (RANGE, "2", WrittenRange(2, None)),
        (RANGE, "2..8", WrittenRange(2, "8")),
        (RANGE, "2..", WrittenRange(2, "")),
        (HOST_AND_PORT, "box:70", HostAndPort("box", 70)),
        (HOST_AND_PORT, "[::1]:70", HostAndPort("::1", 70)),
        (NAMES, "mail, bulk,,mail", ("mail", "bulk")),
    ],
)
def test_a_value_is_written_as_people_write_it(kind: TextKind[Any], text: str, value: Any) -> None:
    assert kind.parse(text) == value


@pytest.mark.parametrize(
    ("kind", "error", "texts"),
    [
        (DURATION, "is not a duration: write 30s, 15m, 2h", ("soon", "", "-1", "5 minutes", "m", "1e3", "1h 5m")),
        (SIZE, "is not a size: write 500 MiB", ("lots", "", "500 MiBs", "-1", "1 2", "MiB", "1e9", "\u0665 MiB")),
        (RATE, "is not a rate: write 50/s", ("fast", "0/s", "5/0s", "5/y", "-1/s", "\u0663/s", "9" * 5000)),
        (COUNT, "is not a whole number: write", ("-1", "\u0663", "\u00b2", "9" * 5000, "many", "1.5")),
        (RANGE, "is not a range: write 2, 2..8", ("..8", "x..8", "")),
        (HOST_AND_PORT, "is not HOST:PORT: write 127.0.0.1:7070", ("7070", ":7070", "box", "box:99999", "box:x")),
        (NAMES, "is not a list of names", ("", " , ")),
    ],
)  # fmt: skip
def test_what_is_not_of_a_kind_is_refused_with_how_to_write_one(
    kind: TextKind[Any], error: str, texts: tuple[str, ...]
) -> None:
    for text in texts:
        with pytest.raises(Misconfigured) as refused:
            kind.parse(text)
        assert str(refused.value).startswith(f"{text!r} {error}")


def test_an_empty_text_is_no_value_where_none_is_needed() -> None:
    assert SIZE.parse_optional("  ") is None
    assert SIZE.parse_optional("1k") == 1024


def _cluster(text: str) -> object:
    return parse_cluster({"hung_after": text, "workers": {"default": {}}}).hung_after


@pytest.mark.parametrize(
    "parse",
    [
        lambda text: App("shop", lease=text).settings.lease,
        lambda text: read_settings({}, {"CELERY5_LEASE": text}).lease,
        lambda text: getattr(parse_autoscale(f"maximum=2 cooldown={text}"), "cooldown"),  # noqa: B009
        _cluster,
    ],
)
def test_durations_have_one_spelling_in_all_settings(
    parse: Callable[[str], object],
) -> None:
    assert (parse("2m"), parse("120")) == (120.0, 120.0)
    with pytest.raises(Misconfigured, match="'soon' is not a duration: write 30s, 15m, 2h"):
        parse("soon")


def test_every_setting_in_seconds_takes_a_unit_and_its_bounds_hold() -> None:
    for name, kind in get_type_hints(Settings).items():
        if kind in (float, float | None) and name not in ("alert_failures", "alert_memory"):  # shares
            assert parse_value(name, "20s") == parse_value(name, timedelta(seconds=20)) == 20.0
    assert parse_value("message_limit", "2 MiB") == 2 * 2**20
    assert parse_value("publisher_backlog_bytes", "2GiB") == 2 * 2**30
    assert parse_value("time_limit", "null") is None
    with pytest.raises(Misconfigured, match="Expected `float` <= 30"):
        parse_value("read_block", "5m")


def test_a_span_of_seconds_is_a_timedelta_wherever_python_sets_it() -> None:
    configured = LoadedConfiguration("CELERY5 of Django's settings", {"results_ttl": timedelta(hours=6)})
    assert read_settings({}, {}, configured).results_ttl == 21600.0
    app = App("shop", results_ttl=timedelta(hours=6), lease=timedelta(seconds=5))
    app.configure(time_limit=timedelta(minutes=1))
    assert (app.settings.results_ttl, app.settings.lease, app.settings.time_limit) == (21600.0, 5.0, 60.0)
    for name, value in (("lease", timedelta(0)), ("max_jobs", timedelta(hours=1))):
        with pytest.raises(Misconfigured, match=f"{name}.*: Expected `"):
            read_settings({name: value}, {})


def test_a_value_of_the_wrong_type_is_refused_with_how_to_write_one() -> None:
    for name, error in (
        ("lease", "Expected `float`, got `array`; write 30s, 15m, 2h, 1d12h or a number of seconds"),
        ("message_limit", "Expected `int`, got `array`; write 500 MiB, 2 GiB or a number of bytes"),
    ):
        with pytest.raises(Misconfigured) as refused:
            parse_value(name, [6])
        assert str(refused.value) == error


def test_assignments_are_parted_by_spaces_or_commas_and_each_name_stands_once() -> None:
    assert parse_assignments("a=1, b=2 c=x:y", "write a=1") == {"a": "1", "b": "2", "c": "x:y"}
    assert parse_assignments("strict mail=1", "write a=1", nameless=True) == {"": "strict", "mail": "1"}
    for text, error in (
        ("a", "'a' is not"),
        ("a=", "'a=' is not"),
        ("=1", "'=1' is not"),
        ("a=1 a=2", "'a' twice"),
    ):
        with pytest.raises(Misconfigured, match=f"{error}.*: write a=1"):
            parse_assignments(text, "write a=1")


def test_json_of_a_flag_has_the_right_kind() -> None:
    assert parse_json_array("[1]", "--args") == [1]
    assert parse_parameter('a={"b": 1}') == ("a", {"b": 1})
    assert parse_parameter("a=b=c") == ("a", "b=c")
    for text, error in (
        ("{", "--args is not JSON: "),
        ("{}", "--args must be a JSON array"),
        ("[" * 9999, "is not JSON"),
    ):
        with pytest.raises(Misconfigured, match=error):
            parse_json_array(text, "--args")
    with pytest.raises(Misconfigured, match="'a' is not a parameter: write name=value"):
        parse_parameter("a")
