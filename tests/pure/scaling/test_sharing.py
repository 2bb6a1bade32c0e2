"""Sharing: whoever shares by weights gets its share in the long run, and nobody waits for ever."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery5.errors import Misconfigured
from celery5.protocol.scaling.read_order import FairSplit, QueueOrder, parse_priorities, parse_queue_order

weights = st.dictionaries(st.sampled_from("abcd"), st.integers(1, 20).map(float), min_size=1)


@given(weights, st.lists(st.integers(0, 300), min_size=1, max_size=60))
def test_each_worker_has_its_share_to_within_one_in_any_portions(
    weights: dict[str, float], counts: list[int]
) -> None:
    split, had, total = FairSplit(), Counter[str](), sum(weights.values())
    for count in counts:
        dealt = split.divide(count, weights)
        assert sum(dealt.values()) == count
        assert min(dealt.values()) >= 0
        had.update(dealt)
    for name, weight in weights.items():
        assert abs(had[name] - sum(counts) * weight / total) < len(weights)


@given(st.lists(st.tuples(st.integers(0, 50), weights), max_size=60))
def test_what_is_dealt_adds_up_whoever_comes_and_goes(trips: list[tuple[int, dict[str, float]]]) -> None:
    split = FairSplit()
    for count, shares in trips:
        dealt = split.divide(count, shares)
        assert dealt.keys() == shares.keys()
        assert sum(dealt.values()) == count
        assert min(dealt.values()) >= 0


def test_who_had_no_use_for_its_share_has_saved_nothing_up() -> None:
    split = FairSplit()
    for _ in range(100):
        split.divide(1, {"a": 1.0, "b": 1.0})  # and nobody took what was a's
    later = [split.divide(1, {"a": 1.0, "b": 1.0})["a"] for _ in range(20)]
    assert sum(later) == 10


def test_levels_and_orders_are_said_in_a_line() -> None:
    levels = parse_priorities("4:2:1 mail=strict bulk=10:1:1")
    assert levels.get_weights("anything") == {"h": 4.0, "": 2.0, "l": 1.0}
    assert levels.get_weights("mail") is None
    assert levels.get_weights("bulk") == {"h": 10.0, "": 1.0, "l": 1.0}
    assert parse_priorities("").get_weights("mail") is parse_priorities("strict").get_weights("mail") is None
    assert parse_queue_order("urgent > mail > bulk") == QueueOrder(names=("urgent", "mail", "bulk"))
    assert parse_queue_order("urgent=4 mail=2") == QueueOrder(weights={"urgent": 4.0, "mail": 2.0})
    assert parse_queue_order("a=b=3") == QueueOrder(weights={"a=b": 3.0})
    assert parse_queue_order("") == QueueOrder()
    assert [parse_queue_order("urgent > mail").get_rank(queue) for queue in ("mail", "other", "urgent")] == [
        1,
        2,
        0,
    ]


@pytest.mark.parametrize(
    "text", ["4:2", "4:2:0", "fair", "mail=", "mail=fair", "4:2:1 1:1:1", "a=strict a=4:2:1", "-1:2:3"]
)
def test_what_says_no_levels_is_refused(text: str) -> None:
    with pytest.raises(Misconfigured, match=r"write strict, 4:2:1"):
        parse_priorities(text)


@pytest.mark.parametrize(
    "text", ["mail", "a > ", "> a", "a > > b", "a b > c", "a=0", "a=x", "a=1 > b", "a=1 a=2", "a > a"]
)
def test_what_says_no_order_is_refused(text: str) -> None:
    with pytest.raises(Misconfigured, match=r"write urgent > mail|names a queue twice"):
        parse_queue_order(text)
