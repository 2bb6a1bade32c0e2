"""Formats: each filter shows any value, and anything can be JSON."""

import math
import re
import time
from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given, settings

from celery5.commands.control import Reply
from celery5.dashboard.formats import FILTERS, encode_json
from celery5.operations.answers import SHAPES, has_shape
from tests.night import examples

ODD: list[Any] = [
    math.nan,
    math.inf,
    -math.inf,
    2**2000,
    1e308,
    -1e18,
    2**63,
    -5,
    None,
    "",
    "text",
    b"\xff",
    [],
    {},
    True,
]


@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("value", ODD, ids=lambda value: repr(value)[:12])
def test_a_filter_shows_any_value_in_a_bounded_text(name: str, value: Any) -> None:
    assert len(str(FILTERS[name](value))) < 1000


def nest(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    "value",
    [2**64, -(2**70), "\ud800", {"\udfff": 1}, {1: 2}, nest(100_000), math.nan, b"\xff"],
    ids=range(8),
)
def test_any_value_can_be_json(value: Any) -> None:
    msgspec.json.decode(encode_json({"value": value}).replace(b"\\ud800", b"x").replace(b"\\udfff", b"x"))
    assert len(FILTERS["json"]({"value": value})) < 500


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=10,
)


@given(command=st.sampled_from(sorted(SHAPES)), answer=json_values)
@settings(max_examples=examples(200), deadline=None)
def test_an_answer_of_any_shape_is_checked_without_an_error(command: str, answer: Any) -> None:
    reply = Reply(worker="w", ok=True, answer=answer)
    assert has_shape(command, reply) in (True, False)


def test_an_answer_of_another_shape_is_none() -> None:
    for command, wrong in (
        ("active", [{"id": 3}]),
        ("active", {"a": 1}),
        ("health", {"checks": 5}),
        ("members", {"members": [{"name": "w"}]}),
        ("stack", {"stacks": "x"}),
        ("stats", None),
    ):
        assert not has_shape(command, Reply(worker="w", ok=True, answer=wrong)), command
    assert has_shape("active", Reply(worker="w", ok=True, answer=[]))
    assert has_shape("stack", Reply(worker="w", ok=False, why="no"))


@pytest.mark.parametrize(
    ("share", "shown"),
    [
        (0.0, "0 %"),
        (0.00001, "under 0.1 %"),
        (0.0042, "0.4 %"),
        (1 / 3, "33 %"),
        (0.9999, "99.9 %"),
        (1.0, "100 %"),
    ],
)
def test_only_all_is_shown_as_100_percent_and_only_none_as_0(share: float, shown: str) -> None:
    assert FILTERS["share"](share) == shown


def test_a_time_names_its_zone_and_can_be_kept_going() -> None:
    shown = FILTERS["moment"](time.time() - 0.2)
    assert re.fullmatch(
        r'<time data-age datetime="\S+\+00:00" title="[-\d]+ [:\d]+ UTC">just now</time>', shown
    )
    assert FILTERS["time"](1.75e9) == "15:06:40 UTC"
