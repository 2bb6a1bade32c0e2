"""Reports: what has changed since the one before, sent again as it was when nobody knows whether it has arrived."""

import bz2
import random
import tracemalloc
import zlib
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from celery5.protocol.observability import report as report_module
from celery5.protocol.observability.families import MetricFamily, make_counter, make_gauge, make_histogram
from celery5.protocol.observability.report import (
    MAX_PACKED,
    MAX_SERIES,
    Measurements,
    MetricsReport,
    ReportMaker,
    compress,
    unpack_report,
)
from celery5.protocol.observability.sketch import Sketch

JOBS = ("celery5_jobs_total", "state", "SUCCESS", "task", "pay")


class Process:
    """A process whose numbers a test sets."""

    def __init__(self) -> None:
        self.maker = ReportMaker("host:1:ab")
        self.jobs = 0.0
        self.running = 0.0
        self.sketch = Sketch()

    def families(self) -> list[MetricFamily]:
        """What it measures."""
        return [
            make_counter("celery5_jobs_total", "h", (self.jobs, {"task": "pay", "state": "SUCCESS"})),
            make_gauge("celery5_jobs_running", "h", self.running),
            make_gauge("celery5_loop_lag_seconds", "h", 0.5, merge="max"),
            make_gauge("celery5_worker_info", "h", 1, merge=""),
            make_histogram("celery5_job_run_seconds", "h", (self.sketch, {"task": "pay"}, None)),
        ]

    def report(self) -> MetricsReport:
        """Its next report, as it comes out of Redis."""
        report = unpack_report(self.maker.make(self.families(), kind="worker").pack())
        assert report is not None
        return report


def test_a_report_has_what_has_changed() -> None:
    process = Process()
    process.jobs, process.running = 5, 2
    process.sketch.add(0.2)
    first = process.report()
    assert first.measurements.counters == {JOBS: 5}
    assert first.measurements.gauges == {("celery5_jobs_running",): 2, ("celery5_loop_lag_seconds",): 0.5}
    assert first.largest == {"celery5_loop_lag_seconds"}
    process.maker.acknowledge()
    process.jobs, process.running = 7, 0
    process.sketch.add(9.0)
    second = process.report()
    assert second.number == first.number + 1
    assert second.measurements.counters == {JOBS: 2}
    (sketch,) = second.measurements.sketches.values()
    assert sketch.count == 1
    # A gauge that has become 0 is said once, or the last number would stand for ever.
    assert second.measurements.gauges[("celery5_jobs_running",)] == 0
    process.maker.acknowledge()
    assert ("celery5_jobs_running",) not in process.report().measurements.gauges


def test_a_report_that_may_have_arrived_is_sent_again_as_it_was() -> None:
    process = Process()
    process.jobs = 5
    first = process.report()
    process.jobs = 9
    assert process.report() == first
    process.maker.acknowledge()
    assert process.report().measurements.counters == {JOBS: 4}


def test_a_counter_that_begins_anew_counts_from_zero() -> None:
    process = Process()
    process.jobs = 5
    process.report()
    process.maker.acknowledge()
    process.jobs = 3
    assert process.report().measurements.counters == {JOBS: 3}


def test_labels_without_end_do_not_fill_a_report() -> None:
    maker = ReportMaker("host:1:ab")
    family = make_counter("celery5_x_total", "h", *[(1.0, {"id": str(n)}) for n in range(MAX_SERIES + 500)])
    assert len(maker.make([family], kind="worker").measurements.counters) == MAX_SERIES


@pytest.mark.parametrize(
    "packed",
    [
        b"",
        b"x",
        zlib.compress(b"\xc1"),
        zlib.compress(msgspec.msgpack.encode({"a": 1})),
        zlib.compress(b"\x00" * (MAX_PACKED + 1)),
        compress([1, "p", "worker"]),
        compress([2, "p", "worker", 1, [], [], [], []]),
        compress([1, 7, "worker", 1, [], [], [], []]),
        compress([1, "p", "worker", "1", [], [], [], []]),
    ],
)
def test_what_is_no_report_is_none(packed: bytes) -> None:
    assert unpack_report(packed) is None


def make_list_of(item: bytes) -> bytes:
    """Return as much of a list of one item as may be unpacked."""
    count = (MAX_PACKED - 20) // len(item)
    return b"\xdd" + count.to_bytes(4, "big") + item * count


HEAD = b"\x99\x01\xa1p\xa6worker\x01"
"""How a report begins that is right so far."""


@pytest.mark.parametrize(
    ("head", "pack", "item"),
    [
        (b"", zlib.compress, b"\x80"),
        (b"", zlib.compress, b"\x92\x90\x90"),
        (b"", bz2.compress, b"\x90"),
        (HEAD, zlib.compress, b"\x90"),
        (HEAD, zlib.compress, b"\x81\xc0\x80"),
        (HEAD, bz2.compress, b"\x91\x90"),
    ],
)
def test_a_small_report_costs_little_memory_whatever_is_in_it(
    head: bytes, pack: Callable[[bytes], bytes], item: bytes
) -> None:
    packed = pack(head + make_list_of(item))
    assert len(packed) < 50_000
    assert report_module.decompress(packed) is None  # as `unpack_report` calls it
    tracemalloc.start()
    try:
        assert unpack_report(packed) is None
        assert tracemalloc.get_traced_memory()[1] < 30_000_000
    finally:
        tracemalloc.stop()


def test_a_report_with_as_many_series_as_may_be_is_read() -> None:
    maker = ReportMaker("host:1:ab")
    labels = [
        {"queue": f"queue-{n}", "task": f"shop.tasks.task_{n}", "state": "success"} for n in range(MAX_SERIES)
    ]
    family = make_counter("celery5_jobs_total", "h", *[(1.0, label) for label in labels])
    report = maker.make([family], kind="worker")
    packed = report.pack()
    assert len(zlib.decompress(packed)) > 300_000
    assert unpack_report(packed) == report


@pytest.mark.parametrize(
    "series",
    [
        None,
        "x",
        [None],
        [[]],
        [["a"]],
        [["a", "b", 1]],
        [["a" * 400, 1]],
        [["a", "x"]],
        [["a", float("nan")]],
        [["a", -1]],
    ],
)
def test_what_is_no_series_is_left_out(series: Any) -> None:
    assert Measurements.unpack([series, [], []]) == Measurements()
    assert Measurements.unpack([[], [], series]) == Measurements()


def test_random_bytes_are_read_with_tolerance() -> None:
    rng = random.Random(1)
    good = Process().maker.make(Process().families(), kind="worker").pack()
    for _ in range(2000):
        broken = bytearray(zlib.decompress(good))
        for _ in range(rng.randint(1, 4)):
            broken[rng.randrange(len(broken))] = rng.randrange(256)
        unpack_report(zlib.compress(bytes(broken)))
