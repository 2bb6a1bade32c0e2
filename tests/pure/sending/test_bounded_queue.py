"""The one queue of messages in memory that producers and Publishers share."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery5.errors import BacklogFull
from celery5.sending.bounded_queue import BacklogCapacity, BoundedQueue


def make_queue(*added: tuple[str, str, int]) -> BoundedQueue[str]:
    """Return a queue of up to 10 messages and 100 bytes with these in it."""
    queue = BoundedQueue[str](BacklogCapacity(10, 100))
    for name, item_id, size in added:
        queue.add(name, item_id, size, item_id)
    return queue


@given(st.lists(st.tuples(st.sampled_from("ab"), st.text("xyz", min_size=1, max_size=2), st.integers(0, 9))))
def test_each_queue_keeps_its_order_and_each_id_once_and_what_is_used_adds_up(
    added: list[tuple[str, str, int]],
) -> None:
    queue = make_queue(*added)
    sizes: dict[tuple[str, str], int] = {}
    for name, item_id, size in added:
        sizes.setdefault((name, item_id), size)
    assert len(queue) == queue.capacity.used_messages == len(sizes)
    assert queue.capacity.used_bytes == sum(sizes.values())
    for name in queue.queues:
        assert [item.value for item in queue.first(name, limit=1000)] == [i for n, i in sizes if n == name]
    queue.remove([item.number for name in queue.queues for item in queue.first(name, limit=1000)])
    assert (len(queue), queue.queues, queue.capacity.used_bytes) == (0, [], 0)


def test_a_portion_is_limited_in_number_and_bytes_but_has_one_item_at_least() -> None:
    queue = make_queue(("a", "1", 50), ("a", "2", 5), ("a", "3", 5), ("a", "4", 5))
    assert [item.id for item in queue.first("a", limit=2)] == ["1", "2"]
    assert [item.id for item in queue.first("a", limit=9, max_bytes=10)] == ["1"]
    assert [item.id for item in queue.first("a", limit=9, max_bytes=10, after=1)] == ["2", "3"]


def test_what_does_not_fit_is_refused_by_number_and_by_bytes() -> None:
    capacity = make_queue(("a", "1", 60)).capacity
    assert capacity.has_space(9, 40)
    for messages, size in ((10, 0), (1, 41)):
        with pytest.raises(BacklogFull, match="none of these was kept, send them later"):
            capacity.check(messages, size)


def test_numbers_are_never_reused_and_ids_only_after_they_have_left() -> None:
    queue = make_queue(("a", "1", 1))
    queue.remove([1, 1, 7])
    assert not queue.has_id("a", "1")
    queue.add("a", "1", 1, "again")
    assert [item.number for item in queue.first("a", limit=9)] == [2]
