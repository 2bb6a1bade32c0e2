"""Windows in a processor: exact through crashes, rebalances and failures, in virtual time."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from celery5 import App, RetryPolicy
from celery5.protocol.streams.groups import Commit
from celery5.services.streams.owned_partition import OwnedPartition
from celery5.streams import Hopping, Stream, StreamEvents, Tumbling, Window, windows
from celery5.testing.streams import ProcessorDriver
from tests.night import examples
from tests.pure.streams.test_windows import naive


class Reading(msgspec.Struct):
    sensor: str
    at: float
    value: int = 1


class Station:
    """An application whose processor sends each window that closes."""

    def __init__(self, shape: Any = None, *, processor: Any = None, **options: Any) -> None:
        self.app = App("station")
        self.readings: Stream[Reading] = self.app.stream("readings", Reading, by="sensor", partitions=1)
        self.closed: Stream[list[Any]] = self.app.stream("closed", list)
        self.missed: Stream[Reading] = self.app.stream("missed", Reading)
        self.yielded = list[Window[str, list[int]]]()
        self.failures = 0
        self.late = 0

        def append(values: list[int], reading: Reading) -> list[int]:
            return [*values, reading.value]

        @self.app.processor(self.readings, into=self.closed, **(processor or {}))
        async def gather(events: StreamEvents[Reading]) -> None:
            initial: list[int] = []
            settings = {"time": lambda reading: reading.at, **options}
            found = events.windows(shape or Tumbling(60), initial=initial, add=append, **settings)
            async for window in found:
                self.yielded.append(window)
                events.send([window.start, window.end, window.key, window.value])
                self.late = found.late
                if self.failures:
                    self.failures -= 1
                    raise ValueError("once more")

        self.gather = gather

    def drive(self) -> ProcessorDriver[Reading]:
        return ProcessorDriver(self.app, self.gather)


def read(*times: float, sensor: str = "a") -> list[Reading]:
    """Readings at these times, whose values are their numbers."""
    return [Reading(sensor, at, number) for number, at in enumerate(times)]


def test_a_window_closes_when_a_record_of_a_later_one_comes() -> None:
    station = Station()
    with station.drive() as driver:
        driver.feed(*read(0, 10, 59.999))
        driver.advance(3600)
        assert driver.sent(station.closed) == []
        driver.feed(*read(60))
        assert driver.sent(station.closed) == [[0, 60, "a", [0, 1, 2]]]
        driver.feed(*read(600))
        assert driver.sent(station.closed)[1:] == [[60, 120, "a", [0]]]
        assert driver.state == {}


def test_each_key_has_windows_of_its_own_which_the_time_of_the_partition_closes() -> None:
    station = Station()
    with station.drive() as driver:
        driver.feed(*read(1, 2, sensor="a"), *read(3, sensor="b"), *read(60, sensor="c"))
        assert sorted(driver.sent(station.closed)) == [[0, 60, "a", [0, 1]], [0, 60, "b", [0]]]


def test_a_record_is_in_all_hopping_windows_around_it() -> None:
    station = Station(Hopping(60, every=30))
    with station.drive() as driver:
        driver.feed(*read(40, 70, 1000))
        assert driver.sent(station.closed)[:3] == [
            [0, 60, "a", [0]],
            [30, 90, "a", [0, 1]],
            [60, 120, "a", [1]],
        ]


def test_records_after_the_lateness_are_counted_and_go_to_on_late() -> None:
    station = Station(lateness=5)
    with station.drive() as driver:
        driver.feed(*read(50, 64, 58))
        assert driver.sent(station.closed) == []
        driver.feed(*read(65, 59))
        assert driver.sent(station.closed) == [[0, 60, "a", [0, 2]]]
        driver.rebalance()
        driver.feed(*read(1000))
        assert station.late == 1

    late = list[Reading]()
    station = Station(on_late=late.append)
    with station.drive() as driver:
        driver.feed(*read(50, 70, 51))
        assert late == [Reading("a", 51, 2)]


def test_without_records_windows_close_by_the_clock_once_and_stay_closed() -> None:
    station = Station(idle=10, lateness=5)
    with station.drive() as driver:
        driver.feed(*read(50))
        driver.advance(14.9)
        assert driver.sent(station.closed) == []
        driver.advance(0.2)
        driver.commit()
        assert driver.sent(station.closed) == [[0, 60, "a", [0]]]
        driver.crash()
        driver.advance(3600)
        driver.feed(*read(59))
        driver.feed(*read(125))
        assert driver.sent(station.closed) == [[0, 60, "a", [0]]]


def test_uncommitted_window_closes_again_after_a_crash() -> None:
    station = Station(idle=10, processor={"commit_within": 5})
    with station.drive() as driver:
        driver.feed(*read(50))
        driver.advance(11)
        assert len(station.yielded) == 1
        assert driver.sent(station.closed) == []
        driver.crash()
        driver.advance(60)
        assert len(station.yielded) == 2
        assert driver.sent(station.closed) == [[0, 60, "a", [0]]]


def test_a_failure_while_windows_close_by_the_clock_is_tried_again() -> None:
    station = Station(idle=10, processor={"on_error": RetryPolicy(max_retries=3, backoff=1)})
    station.failures = 2
    with station.drive() as driver:
        driver.feed(*read(50))
        driver.advance(60)
        assert len(station.yielded) == 3
        assert driver.sent(station.closed) == [[0, 60, "a", [0]]]


def test_many_windows_close_in_several_commits_and_none_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, begin_commit = list[int](), OwnedPartition.begin_commit

    def note_size(partition: OwnedPartition) -> Commit:
        commit = begin_commit(partition)
        sizes.append(len(commit.outputs))
        return commit

    monkeypatch.setattr(windows, "CLOSINGS_PER_COMMIT", 10)
    monkeypatch.setattr(OwnedPartition, "begin_commit", note_size)
    station = Station()
    with station.drive() as driver:
        driver.feed(*(Reading(f"s{number}", 1) for number in range(35)))
        driver.feed(*read(60))
        assert len({key for _, _, key, _ in driver.sent(station.closed)}) == 35
        assert len(driver.sent(station.closed)) == 35
        assert max(sizes) == 10


def test_a_record_that_would_open_too_many_windows_fails_in_one_clear_line() -> None:
    station = Station(max_open=3)
    with station.drive() as driver:
        driver.feed(*(Reading(f"s{number}", 1) for number in range(4)))
        (why,) = driver.quarantined.values()
        assert "3 windows of partition 0 are open, and max_open is 3" in why


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lateness": -1}, "lateness=-1"),
        ({"idle": 0}, "idle=0"),
        ({"max_open": 0}, "max_open=0"),
        ({"shape": 60}, "give Tumbling"),
        ({"processor": {"concurrency": 2}}, "concurrency=1"),
        ({"time": lambda _: datetime(2026, 1, 1)}, "time zone"),
        ({"by": lambda _: 1.5}, "give a text or an int"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], words: str) -> None:
    station = Station(options.pop("shape", None), **options)
    with station.drive() as driver:
        driver.feed(*read(0))
        (why,) = driver.quarantined.values()
        assert words in why


class Sum(msgspec.Struct):
    count: int
    total: int


def test_windows_take_class_values_int_keys_and_the_time_of_sending() -> None:
    app, sums = App("station"), list[Window[int, Sum]]()
    readings = app.stream("readings", Reading, by="sensor", partitions=1)

    def add(total: Sum, reading: Reading) -> Sum:
        return Sum(total.count + 1, total.total + reading.value)

    @app.processor(readings)
    async def gather(events: StreamEvents[Reading]) -> None:
        async for window in events.windows(
            Tumbling(60), initial=Sum(0, 0), add=add, by=lambda reading: reading.value // 10
        ):
            sums.append(window)

    with ProcessorDriver(app, gather, start_time=datetime(2026, 1, 1, tzinfo=UTC).timestamp()) as driver:
        driver.feed(Reading("a", 0, 11), Reading("a", 0, 12))
        driver.crash()
        driver.feed(Reading("a", 0, 13))
        driver.advance(60)
        driver.feed(Reading("a", 0, 20))
        (window,) = sums
        assert (window.key, window.value) == (1, Sum(3, 36))
        assert window.end - window.start == 60


times = st.lists(st.integers(0, 60_000), min_size=1, max_size=25)
incidents = st.dictionaries(st.integers(0, 24), st.sampled_from(["crash", "rebalance", "commit", "fail"]))


@settings(max_examples=examples(40), deadline=None)
@given(
    st.sampled_from([Tumbling(10), Hopping(10, 4), Tumbling(7, 2)]),
    st.integers(0, 8),
    times,
    incidents,
    st.integers(1, 3),
)
def test_each_window_is_sent_once_with_all_records_at_random(
    shape: Any, lateness: int, ms: Sequence[int], what: dict[int, str], at_once: int
) -> None:
    station = Station(
        shape,
        lateness=lateness,
        processor={"on_error": RetryPolicy(max_retries=50, backoff=0), "commit_every": 3},
    )
    with station.drive() as driver:
        for first in range(0, len(ms), at_once):
            incident = what.get(first)
            station.failures = 1 if incident == "fail" else 0
            driver.feed(
                *(
                    Reading("a", ms[number] / 1000, number)
                    for number in range(first, min(len(ms), first + at_once))
                ),
                commit=incident == "commit",
            )
            if incident == "crash":
                driver.crash()
            elif incident == "rebalance":
                driver.rebalance()
        driver.commit()
        expected, _ = naive(shape, lateness * 1000, [(at, "a") for at in ms])
        assert sorted(driver.sent(station.closed)) == sorted(
            [start / 1000, end / 1000, key, list(content)]
            for closings in expected
            for start, end, key, content in closings
        )
