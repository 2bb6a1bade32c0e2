"""Metrics: the text that Prometheus reads, and how jobs are counted."""

import math
import re

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from celery5.protocol.observability.exposition import accepts_openmetrics, format_exposition
from celery5.protocol.observability.families import make_gauge
from celery5.protocol.observability.job_tally import JobTally

LINE = re.compile(r'[a-z_0-9]+(\{([a-z_]+="([^"\\\n]|\\.)*",?)+\})? ([+-]Inf|NaN|[0-9.e+-]+)')


def counted(tally: JobTally, state: str, task: str, *seconds: float) -> None:
    """What is done for each job that ends."""
    one = tally.tallies["default", task]
    for duration in seconds:
        one.counts[state] += 1
        one.run_times.add(duration)


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
    assert 'celery5_jobs_total{queue="default",task="odd \\"name\\"\\\\\\nhere",state="SUCCESS"} 1' in lines


def test_durations_are_counted_in_buckets_up_to_their_bound() -> None:
    tally = JobTally()
    counted(tally, "SUCCESS", "t", 0.0, 2.0**-10, 0.02, 1e6)
    counted(tally, "DEAD", "t", 0.02)
    lines = format_exposition(tally.metric_families()).decode().splitlines()
    name = 'celery5_job_run_seconds_bucket{queue="default",task="t"'
    assert f'{name},le="0.0009765625"}} 2' in lines
    assert f'{name},le="0.03125"}} 4' in lines
    assert f'{name},le="4096"}} 4' in lines
    assert f'{name},le="+Inf"}} 5' in lines
    assert 'celery5_job_run_seconds_count{queue="default",task="t"} 5' in lines
    assert tally.count_jobs() == {("t", "SUCCESS"): 4, ("t", "DEAD"): 1}
    assert tally.count_by_state() == {"SUCCESS": 4, "DEAD": 1}


def test_openmetrics_parser_reads_exemplars_on_their_buckets() -> None:
    tally = JobTally()
    counted(tally, "SUCCESS", 'odd "name"\\\nhere', 0.001, 0.3, 7200.0)
    trace = f"00-{'a' * 32}-{'b' * 16}"
    one = tally.tallies["default", 'odd "name"\\\nhere']
    one.set_exemplar(f"{trace}-01", 0.3, 1e9)
    one.set_exemplar(f"{trace}-00", 7200.0, 1e9)  # nobody records that trace
    families = [*tally.metric_families(), make_gauge("x", 'Of\nall "kinds".', 1.5, 3)]
    text = format_exposition(families, openmetrics=True).decode()
    parsed = {family.name: family for family in text_string_to_metric_families(text)}  # type: ignore[no-untyped-call]
    assert set(parsed) == {"celery5_jobs", "celery5_job_run_seconds", "celery5_job_wait_seconds", "x"}
    exemplars = {
        sample.labels["le"]: sample.exemplar
        for sample in parsed["celery5_job_run_seconds"].samples
        if sample.exemplar
    }
    assert set(exemplars) == {"0.5"}
    assert exemplars["0.5"].labels == {"trace_id": "a" * 32, "span_id": "b" * 16}
    assert (exemplars["0.5"].value, float(exemplars["0.5"].timestamp)) == (0.3, 1e9)


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        ("", False),
        ("*/*", False),
        ("text/plain", False),
        ("application/openmetrics-text", True),
        ("application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1", True),
        ("application/openmetrics-text;q=0.2,text/plain;q=0.5", False),
        ("application/openmetrics-text;q=0", False),
        ("application/openmetrics-text;q=x", False),
    ],
)
def test_openmetrics_is_written_for_whoever_prefers_it(accept: str, expected: bool) -> None:
    assert accepts_openmetrics(accept) is expected


def test_a_name_that_two_know_something_of_is_declared_once() -> None:
    text = format_exposition(
        [make_gauge("x", "Help.", (1, {"of": "a"})), make_gauge("x", "Help.", (2, {"of": "b"}))]
    ).decode()
    assert text.count("# TYPE x gauge") == 1
    assert 'x{of="a"} 1\nx{of="b"} 2\n' in text
