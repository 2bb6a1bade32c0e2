"""The rollup: reports become minutes and hours, each counted once."""

import random
from itertools import count

import pytest

from celery5.protocol.observability import report as report_module
from celery5.protocol.observability.report import Measurements, MetricsReport, Series, compress
from celery5.protocol.observability.rollup import (
    CLUSTER,
    HOURS,
    MAX_GROUP_SERIES,
    MINUTES,
    STALE_AFTER,
    MetricsGroup,
    ReportId,
    Rollup,
    pack_chunk,
    read_index,
    read_report_id,
    sum_points,
    unpack_chunk,
)
from celery5.protocol.observability.sketch import Sketch

NOON = 1_700_000_040.0 // 3600 * 3600
JOBS: Series = ("celery5_jobs_total", "queue", "slow", "state", "SUCCESS", "task", "pay")
NUMBERS = count(1)
IN_GROUP: Series = ("celery5_jobs_total", "state", "SUCCESS", "task", "pay")


def report(
    process: str, jobs: float = 0, gauges: dict[Series, float] | None = None, largest: str = ""
) -> MetricsReport:
    """A report of this many jobs."""
    counters = {JOBS: jobs} if jobs else {}
    return MetricsReport(
        process, "worker", 1, Measurements(counters, gauges or {}, {}), frozenset({largest} - {""})
    )


def rollup_of(*queues: str) -> Rollup:
    """A rollup that knows these groups."""
    rollup = Rollup()
    for name in (CLUSTER, *queues):
        rollup.groups[name] = MetricsGroup()
    return rollup


def add(rollup: Rollup, at: float, one: MetricsReport, report_id: ReportId | None = None) -> None:
    """Add a report, with an id of the stream."""
    rollup.add_report(at, one, rollup.split(one), report_id or (int(at * 1000), next(NUMBERS)))


def merge(rollup: Rollup, at: float) -> dict[Series, float]:
    """The gauges of the cluster."""
    merged: dict[Series, float] = {}
    for _ in rollup.merge_gauges(at, merged):
        pass
    return merged


def test_a_minute_has_what_came_in_it_and_is_closed_once() -> None:
    rollup = rollup_of("slow")
    add(rollup, NOON, report("a", 3))
    add(rollup, NOON + 59, report("b", 4))
    assert list(rollup.close_minutes(NOON + 59.9)) == []
    (closed,) = rollup.close_minutes(NOON + 60)
    assert (closed.group, closed.at, closed.measurements.counters) == ("slow", int(NOON), {IN_GROUP: 7})
    assert list(rollup.close_minutes(NOON + 500)) == []
    assert rollup.groups["slow"].totals.counters == {IN_GROUP: 7}


def test_reports_that_have_waited_are_not_all_of_one_minute() -> None:
    rollup = rollup_of("slow")
    for minute in range(5):
        add(rollup, NOON + 60 * minute, report("a", 1 + minute))
    closed = list(rollup.close_minutes(NOON + 600))
    assert [(point.at - NOON, point.measurements.counters[IN_GROUP]) for point in closed] == [
        (60 * minute, 1 + minute) for minute in range(5)
    ]


def test_what_belongs_to_no_known_queue_counts_for_the_cluster() -> None:
    rollup = rollup_of()
    add(rollup, NOON, report("a", 3))
    assert rollup.groups[CLUSTER].totals.counters == {IN_GROUP: 3}


def test_gauges_are_summed_or_their_maximum_taken_while_reported() -> None:
    rollup = rollup_of()
    running: Series = ("celery5_jobs_running",)
    lag: Series = ("celery5_loop_lag_seconds",)
    for process, number in (("a", 2.0), ("b", 5.0)):
        add(rollup, NOON, report(process, 0, {running: number, lag: number}, lag[0]))
    assert merge(rollup, NOON) == {running: 7, lag: 5}
    add(rollup, NOON + 30, report("a", 0, {running: 1}))
    assert merge(rollup, NOON + STALE_AFTER + 1) == {running: 1}


def test_series_without_end_do_not_fill_a_group() -> None:
    rollup = rollup_of("slow")
    many: dict[Series, float] = {
        ("celery5_x_total", "id", str(n), "queue", "slow"): 1.0 for n in range(MAX_GROUP_SERIES + 100)
    }
    add(rollup, NOON, MetricsReport("a", "worker", 1, Measurements(counters=dict(many))))
    group = rollup.groups["slow"]
    assert len(group.totals.counters) == len(group.current.counters) == MAX_GROUP_SERIES


def test_a_group_is_the_same_when_another_process_goes_on_with_it() -> None:
    rollup = rollup_of("slow")
    sketch = Sketch()
    sketch.add(0.3)
    one = report("a", 3)
    one.measurements.sketches["celery5_job_run_seconds", "queue", "slow", "task", "pay"] = sketch
    add(rollup, NOON, one)
    packed = {name: group.pack() for name, group in rollup.take_changed().items()}
    assert set(packed) == {"slow"}
    other = Rollup()
    other.groups = {name: MetricsGroup.unpack(content) for name, content in packed.items()}
    add(other, NOON + 30, report("a", 1))
    (closed,) = other.close_minutes(NOON + 60)
    assert closed.measurements.counters == {IN_GROUP: 4}
    assert closed.measurements.sketches["celery5_job_run_seconds", "task", "pay"].count == 1
    assert MetricsGroup.unpack(b"nothing like it") == MetricsGroup()
    assert MetricsGroup.unpack(None) == MetricsGroup()


def test_an_hour_is_the_sum_of_its_minutes_and_the_peak_of_its_gauges() -> None:
    depth: Series = ("celery5_queue_depth",)
    points = [(60 * n, Measurements({IN_GROUP: 2}, {depth: float(n % 7)}, {})) for n in range(60)]
    read = unpack_chunk(pack_chunk(MINUTES, points))
    assert read == points
    whole = sum_points([point for _, point in read])
    assert (whole.counters, whole.gauges) == ({IN_GROUP: 120}, {depth: 6})
    assert unpack_chunk(b"nothing like it") == []


def test_packed_points_keep_their_percentiles() -> None:
    rng = random.Random(3)
    series: Series = ("celery5_job_run_seconds", "task", "pay")
    for number in (1, 3, 39, 40, 400, 20_000):
        sketch = Sketch()
        for _ in range(number):
            sketch.add(rng.lognormvariate(-3, 1))
        for tier in (MINUTES, HOURS):
            ((_, point),) = unpack_chunk(pack_chunk(tier, [(0, Measurements(sketches={series: sketch}))]))
            packed = point.sketches[series]
            for fraction in (0.5, 0.95, 0.99):
                exact = sketch.quantile(fraction)
                assert exact is not None
                # Rounded counts may move a percentile to the next bucket where the hour is packed in short.
                near = 0.01 if tier is MINUTES else 0.1
                assert packed.quantile(fraction) == pytest.approx(exact, rel=near), (
                    number,
                    tier.name,
                    fraction,
                )
            assert packed.count == pytest.approx(number, rel=0.04)


def test_an_index_is_read_with_tolerance() -> None:
    assert read_index(compress(["slow", 7, "bad"])) == ["slow", "bad"]
    assert read_index(b"") == read_index(b"nothing like it") == []


@pytest.mark.parametrize("has_bz2", [True, False])
def test_rollup_leaves_out_broken_and_oversized_entries(
    monkeypatch: pytest.MonkeyPatch, has_bz2: bool
) -> None:
    value = [[number, "celery5_jobs_total"] for number in range(2000)]
    small = report_module.compress_for_long(value)
    assert small[:3] == b"BZh"
    assert report_module.decompress(small) == value
    assert report_module.decompress(small[:-9]) is None
    assert report_module.decompress(b"BZh nonsense") is None
    monkeypatch.setattr(report_module, "MAX_PACKED", 1000)
    assert report_module.decompress(small) is None
    monkeypatch.undo()
    monkeypatch.setattr(report_module, "HAS_BZ2", has_bz2)
    assert report_module.decompress(report_module.compress_for_long(value)) == value
    assert (report_module.decompress(small) == value) is has_bz2


def test_a_report_counts_only_in_the_groups_that_were_saved_without_it() -> None:
    rollup = rollup_of("slow", "fast")
    both = report("a", 3)
    both.measurements.counters["celery5_jobs_total", "queue", "fast", "state", "SUCCESS", "task", "pay"] = 5
    add(rollup, NOON, both, (7, 0))
    slow = rollup.groups["slow"]
    assert slow.advance_mark() == ""
    assert slow.mark == "7-0/1"
    other = rollup_of("fast")
    other.groups["slow"] = MetricsGroup.unpack(slow.pack(), slow.mark.encode())
    add(other, NOON, both, (7, 0))
    add(other, NOON, report("b", 1), (7, 1))
    assert other.groups["slow"].totals.counters == {IN_GROUP: 4}
    assert other.groups["fast"].totals.counters == {IN_GROUP: 5}
    assert other.groups["slow"].waiting == slow.waiting


def test_an_id_that_is_none_is_before_all_others() -> None:
    assert read_report_id("12-3") == (12, 3)
    assert read_report_id("") == read_report_id("x-1") == read_report_id("5") == (0, 0)
