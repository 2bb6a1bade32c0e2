"""Many workers that report, and a dashboard beside them: they keep up, do not grow, and lose nothing."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from celery5.observability.storage import MAX_SCANS

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
LIMIT = 150
"""MiB that a dashboard, or a process that rolls reports up, may have."""


def run(benchmark: str, *options: str, timeout: float) -> dict[str, Any]:
    """Run a benchmark, and return its figures."""
    command = [sys.executable, str(BENCHMARKS / benchmark), *options, "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            output, _ = process.communicate(timeout=timeout)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)  # it has processes of its own
            raise
    assert process.returncode == 0
    figures: dict[str, Any] = json.loads(output)
    return figures


def test_a_rollup_of_many_workers_keeps_up_and_does_not_grow() -> None:
    options = ("--workers", "300", "--queues", "100", "--interval", "1", "--seconds", "16")
    figures = run("reports.py", *options, timeout=120)
    assert figures["jobs counted"] == figures["jobs sent"] > 0
    assert figures["rss MiB, at the end"] < figures["rss MiB, at half time"] + 8
    assert figures["behind, at the end, s"] < 12
    assert max(figures["longest calls above 1 ms, ms"].values(), default=0) < 100


def test_the_dashboard_of_a_small_cluster_is_measured_too() -> None:
    figures = run(
        "dashboard.py", "--queued", "200", "--dead", "20", "--tabs", "2", "--seconds", "3", timeout=120
    )
    assert figures["looks"] > 0
    assert figures["commands that walk all keys"] == 0
    assert figures["scans a look at the storage"] <= MAX_SCANS  # a sample of the keys, however many there are


@pytest.mark.skipif("CELERY5_SCALE" not in os.environ, reason="takes minutes: nox -s scale")
@pytest.mark.timeout(1800)
def test_dashboard_of_10000_workers_and_100000_dead_jobs_does_not_grow() -> None:
    seconds = float(os.environ["CELERY5_SCALE"])
    simulated = ("--workers", "10000", "--queues", "200", "--seconds", str(seconds))
    figures = run("dashboard.py", "--queued", "1000000", "--dead", "100000", *simulated, timeout=1500)
    sys.stdout.write(json.dumps(figures, indent=1) + "\n")
    workers, sizes = figures["workers"], figures["memory, MiB"]
    assert workers["jobs counted"] == workers["jobs sent"] > seconds / 600 * 50_000_000
    assert len(sizes) >= 10
    assert max(workers["rss MiB, at the end"], *sizes) < LIMIT
    if seconds >= 600:  # until then caches fill up
        assert workers["rss MiB, at the end"] < workers["rss MiB, at half time"] + 8
        assert max(sizes[-3:]) < max(sizes[-6:-3]) + 8
    assert figures["looks"] > 0
    assert figures["commands that walk all keys"] == 0
    assert figures["scans a look at the storage"] <= MAX_SCANS  # a sample of the keys, however many there are
