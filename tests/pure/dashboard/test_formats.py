"""Formats: each filter shows any value, and anything can be JSON."""

import math
from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given, settings

from celery5.commands.control import Reply
from celery5.dashboard.answers import SHAPES, has_shape
from celery5.dashboard.formats import FILTERS, encode_json

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
@settings(max_examples=200, deadline=None)
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
