"""Metrics: the text that Prometheus reads, and how jobs are counted."""

import math
import re
from bisect import bisect_left

from celery5.protocol.health.metrics import (
    BUCKET_BOUNDS,
    HISTOGRAM_BUCKETS,
    JobTally,
    format_exposition,
    make_gauge,
)

LINE = re.compile(r'[a-z_0-9]+(\{([a-z_]+="([^"\\\n]|\\.)*",?)+\})? ([+-]Inf|NaN|[0-9.e+-]+)')


def counted(tally: JobTally, state: str, task: str, *seconds: float) -> None:
    """What the Judgement does."""
    for each in seconds:
        one = tally.get_tallies(state)[task]
        one[bisect_left(HISTOGRAM_BUCKETS, each)] += 1
        one[0] += each


def test_every_line_is_one_that_prometheus_reads() -> None:
    tally = JobTally()
    counted(tally, "SUCCESS", 'odd "name"\\\nhere', 0.5)
    text = format_exposition(
        [
            *tally.metric_families(),
            make_gauge("x", "Of\nall \\ kinds.", math.inf, math.nan, -math.inf, 1e300, 2),
        ]
    )
    lines = text.decode().splitlines()
    assert [line for line in lines if not line.startswith("# ") and not LINE.fullmatch(line)] == []
    assert "# HELP x Of\\nall \\\\ kinds." in lines
    assert 'celery5_jobs_total{task="odd \\"name\\"\\\\\\nhere",state="SUCCESS"} 1' in lines


def test_durations_are_counted_in_buckets_up_to_their_bound() -> None:
    tally = JobTally()
    counted(tally, "SUCCESS", "t", 0.0, BUCKET_BOUNDS[0], 0.02, 1e6)
    counted(tally, "DEAD", "t", 0.02)
    lines = format_exposition(tally.metric_families()).decode().splitlines()
    assert 'celery5_job_seconds_bucket{task="t",le="0.001"} 2' in lines
    assert 'celery5_job_seconds_bucket{task="t",le="0.05"} 4' in lines
    assert 'celery5_job_seconds_bucket{task="t",le="1800"} 4' in lines
    assert 'celery5_job_seconds_bucket{task="t",le="+Inf"} 5' in lines
    assert 'celery5_job_seconds_count{task="t"} 5' in lines
    assert tally.count_jobs() == {("t", "SUCCESS"): 4, ("t", "DEAD"): 1}
    assert tally.count_by_state() == {"SUCCESS": 4, "DEAD": 1}


def test_a_name_that_two_know_something_of_is_declared_once() -> None:
    text = format_exposition(
        [make_gauge("x", "Help.", (1, {"of": "a"})), make_gauge("x", "Help.", (2, {"of": "b"}))]
    ).decode()
    assert text.count("# TYPE x gauge") == 1
    assert 'x{of="a"} 1\nx{of="b"} 2\n' in text
