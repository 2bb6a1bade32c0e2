"""Windows: to which a record belongs and when they close, against a naive reference."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery5.errors import Misconfigured
from celery5.protocol.streams.windows import (
    Hopping,
    OpenWindow,
    Placement,
    TooManyOpen,
    Tumbling,
    WindowShape,
    WindowTracker,
    find_windows,
)

Closed = tuple[int, int, str, tuple[int, ...]]
"""A window as the tests compare it: start, end, key, the numbers of its records."""

seconds = st.integers(1, 40).map(lambda tenths: tenths / 10)
tumbling = st.builds(Tumbling, seconds, seconds)
hopping = st.tuples(seconds, seconds, seconds).map(
    lambda value: Hopping(max(value[:2]), min(value[:2]), value[2])
)
shapes = st.one_of(tumbling, hopping)
records = st.lists(st.tuples(st.integers(-5_000, 20_000), st.sampled_from("ab")), max_size=60)


def naive_windows(shape: WindowShape, at: int) -> list[tuple[int, int]]:
    """All windows that hold a time, by looking at every one that begins somewhere near."""
    size, offset = round(shape.size * 1000), round(shape.offset * 1000)
    every = round(shape.every * 1000) if isinstance(shape, Hopping) else size
    near = range((at - size - offset) // every - 2, (at - offset) // every + 3)
    starts = [number * every + offset for number in near]
    return [(start, start + size) for start in starts if start <= at < start + size]


def naive(
    shape: WindowShape, lateness: int, times: Sequence[tuple[int, str]]
) -> tuple[list[list[Closed]], int]:
    """The windows that close at each record, and how many records were late, with no index and no heap."""
    content: dict[tuple[int, int, str], list[int]] = {}
    latest, late, closings = -(10**9), 0, list[list[Closed]]()
    for number, (at, key) in enumerate(times):
        windows = naive_windows(shape, at)
        late += any(end <= latest - lateness for _, end in windows)
        for start, end in windows:
            if end > latest - lateness:
                content.setdefault((start, end, key), []).append(number)
        latest = max(latest, at)
        over = [window for window in content if window[1] <= latest - lateness]
        closings.append(
            sorted((start, end, key, tuple(content.pop((start, end, key)))) for start, end, key in over)
        )
    return closings, late


class Stored:
    """What is stored of a tracker and of its windows: it may be taken up by another tracker at any time."""

    def __init__(self, shape: WindowShape, lateness: int) -> None:
        self.shape, self.lateness = shape, lateness
        self.windows: dict[int, tuple[OpenWindow, list[int]]] = {}
        self.tracker = WindowTracker(shape, lateness=lateness, max_open=10_000)

    def restore(self) -> None:
        head = self.tracker.head
        assert all(head.first <= number < head.next for number in self.windows)
        self.tracker = WindowTracker(
            self.shape,
            lateness=self.lateness,
            max_open=10_000,
            head=head,
            windows=[(number, window) for number, (window, _) in self.windows.items()],
        )

    def add(self, number: int, at: int, key: str) -> list[Closed]:
        placement = self.tracker.add(at, key)
        assert isinstance(placement, Placement)
        for place, window, is_new in placement.windows:
            assert is_new == (place not in self.windows)
            self.windows.setdefault(place, (window, []))[1].append(number)
        closed = list[Closed]()
        while (over := self.tracker.close_next()) is not None:
            place, window = over
            content = self.windows.pop(place)[1]
            closed.append((window.start, window.end, str(window.key), tuple(content)))
        assert [closed_window[1] for closed_window in closed] == sorted(
            closed_window[1] for closed_window in closed
        )
        return sorted(closed)


@given(shapes, st.integers(-30_000, 30_000))
def test_a_time_is_in_the_windows_around_it(shape: WindowShape, at: int) -> None:
    assert find_windows(shape, at) == sorted(naive_windows(shape, at))


@given(shapes, st.integers(0, 6_000), records, st.sets(st.integers(0, 59)))
def test_windows_close_as_the_naive_reference_says_wherever_a_restart_comes_between(
    shape: WindowShape, lateness: int, times: list[tuple[int, str]], restarts: set[int]
) -> None:
    stored, closings = Stored(shape, lateness), list[list[Closed]]()
    for number, (at, key) in enumerate(times):
        if number in restarts:
            stored.restore()
        closings.append(stored.add(number, at, key))
    expected, late = naive(shape, lateness, times)
    assert closings == expected
    assert stored.tracker.late == late


@given(shapes, records)
def test_no_record_is_late_when_lateness_covers_the_disorder(
    shape: WindowShape, times: list[tuple[int, str]]
) -> None:
    stored = Stored(shape, 25_000)
    for number, (at, key) in enumerate(times):
        stored.add(number, at, key)
    assert stored.tracker.late == 0


def test_the_watermark_never_goes_back() -> None:
    tracker = WindowTracker(Tumbling(1), lateness=500, max_open=10)
    assert tracker.watermark is None
    tracker.add(5_000, "a")
    tracker.add(2_000, "a")
    assert tracker.watermark == 4_500


def test_no_more_windows_are_open_than_may_be() -> None:
    tracker = WindowTracker(Hopping(3, 1), lateness=0, max_open=5)
    assert isinstance(tracker.add(10_000, "a"), Placement)
    assert tracker.add(10_000, "b") == TooManyOpen(3)
    assert isinstance(tracker.add(10_500, "a"), Placement)
    assert tracker.open_count == 3


def test_without_records_time_goes_on_with_the_clock_after_a_while() -> None:
    tracker = WindowTracker(Tumbling(60), lateness=5_000, max_open=10)
    assert tracker.get_idle_limit(10) is None
    tracker.add(50_000, "a")
    assert tracker.get_idle_limit(10) == 15
    assert tracker.get_idle_limit(100) == 100
    assert tracker.close_next() is None
    tracker.pass_idle_time(15)
    assert tracker.close_next() == (0, OpenWindow(0, 60_000, "a"))
    assert tracker.watermark == 60_000
    assert tracker.get_idle_limit(10) is None


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Tumbling(0), "give seconds"),
        (lambda: Tumbling(float("nan")), "give seconds"),
        (lambda: Hopping(10, 20), "to the size, 10 s"),
        (lambda: Hopping(10, 0.005), "more than 1,000 windows"),
    ],
)
def test_shapes_that_make_no_sense_are_refused(make: object, words: str) -> None:
    assert callable(make)
    with pytest.raises(Misconfigured, match=words):
        make()
