"""StatsD: what is written of a report."""

import pytest

from celery5.errors import Misconfigured
from celery5.protocol.observability.report import Measurements, MetricsReport, Series
from celery5.protocol.observability.sketch import Sketch
from celery5.protocol.observability.statsd import (
    MAX_DATAGRAM,
    make_datagrams,
    parse_optional_statsd_address,
    parse_statsd_address,
)


def a_report(tasks: int = 1) -> MetricsReport:
    """A report with one of each kind."""
    sketch = Sketch()
    sketch.add(0.5)
    counters: dict[Series, float] = {
        ("celery5_jobs_total", "state", "SUCCESS", "task", f"shop.pay{n or ''}"): 3.0 for n in range(tasks)
    }
    gauges: dict[Series, float] = {("celery5_jobs_running",): 2.5}
    sketches: dict[Series, Sketch] = {("celery5_job_run_seconds", "task", "a|b:c,d"): sketch}
    return MetricsReport("p", "worker", 1, Measurements(counters, gauges, sketches))


def lines(report: MetricsReport, *, has_tags: bool = False) -> list[str]:
    """The lines of all datagrams."""
    return b"\n".join(make_datagrams(report, has_tags=has_tags)).decode().split("\n")


def test_labels_are_parts_of_the_name() -> None:
    assert lines(a_report()) == [
        "celery5.jobs_total.SUCCESS.shop_pay:3|c",
        "celery5.jobs_running:2.500000|g",
        "celery5.job_run_seconds.a_b_c_d.count:1|c",
        *(f"celery5.job_run_seconds.a_b_c_d.{name}:0.478353|g" for name in ("p50", "p95", "p99")),
    ]


def test_labels_are_tags_where_they_can_be() -> None:
    found = lines(a_report(), has_tags=True)
    assert found[0] == "celery5.jobs_total:3|c|#state:SUCCESS,task:shop.pay"
    assert found[2] == "celery5.job_run_seconds.count:1|c|#task:a_b_c_d"


def test_datagrams_fit_into_a_packet() -> None:
    datagrams = list(make_datagrams(a_report(200), has_tags=False))
    assert len(datagrams) > 5
    assert max(map(len, datagrams)) <= MAX_DATAGRAM
    assert sum(datagram.count(b"\n") + 1 for datagram in datagrams) == 205


def test_addresses() -> None:
    assert parse_statsd_address("udp://10.0.0.1:8125") == ("10.0.0.1", 8125, False)
    assert parse_statsd_address("udp://stats:8125?tags=dogstatsd") == ("stats", 8125, True)
    assert parse_optional_statsd_address("") is None


@pytest.mark.parametrize(
    "text", ["stats:8125", "tcp://a:1", "udp://a", "udp://a:x", "udp://:8125", "udp://a:1?tags=influx"]
)
def test_what_is_no_address_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(Misconfigured, match="give udp://host:port"):
        parse_statsd_address(text)
