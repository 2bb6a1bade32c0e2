"""The reports of many workers: one rollup keeps up with them in memory that stays the same, and loses none."""

import json
import subprocess
import sys
from pathlib import Path

SIMULATOR = Path(__file__).parents[3] / "benchmarks" / "reports.py"


def test_a_rollup_of_many_workers_keeps_up_and_does_not_grow() -> None:
    options = ["--workers", "200", "--queues", "100", "--interval", "1", "--seconds", "24", "--json"]
    done = subprocess.run(
        [sys.executable, str(SIMULATOR), *options], capture_output=True, text=True, timeout=120, check=True
    )
    figures = json.loads(done.stdout)
    assert figures["jobs counted"] == figures["jobs sent"] > 0
    assert figures["rss MiB, at the end"] < figures["rss MiB, at half time"] + 8
    assert figures["behind, at the end, s"] < 12
    assert max(figures["longest calls above 1 ms, ms"].values(), default=0) < 100
