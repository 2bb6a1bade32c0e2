"""Metrics on the command line: the files for Prometheus and Grafana, and a table for people."""

import json
from pathlib import Path

from celery5.cli.commands import metrics as command
from celery5.observability.metrics import HistoryPoint, TaskNumbers
from tests.story.cli.commands import celery5
from tests.story.conftest import Desk

FOLDER = Path(__file__).parents[3] / "celery5/observability/monitoring"


def test_it_prints_the_files_that_are_shipped_without_an_application(tmp_path: Path) -> None:
    for name, file in {"rules": "celery5-rules.yml", "dashboard": "celery5-dashboard.json"}.items():
        assert celery5("metrics", name, cwd=tmp_path).out == (FOLDER / file).read_text()


def test_it_says_that_nothing_is_stored(desk: Desk) -> None:
    assert desk("metrics", "show") == "no jobs have ended in that time, as far as metrics are stored\n"
    assert json.loads(desk("metrics", "show", "default", "--json")) == []


def test_a_row_has_the_attempts_by_state_the_share_that_fails_and_percentiles() -> None:
    percentiles = {"p50": 0.012, "p95": 2.5, "p99": 200.0}
    task = TaskNumbers(task="pay", counts={"SUCCESS": 90, "DEAD": 10}, run=percentiles, wait=None)
    assert command._make_row("slow", task) == {
        "queue": "slow",
        "task": "pay",
        "attempts": "10 DEAD, 90 SUCCESS",
        "failed": "10 %",
        "run p50, p95, p99": "12 ms, 2.5 s, 3 min",
        "wait p50, p95, p99": "",
    }
    (fields,) = [command._get_fields(HistoryPoint(at=0, seconds=60, tasks=[task]))["tasks"]]
    assert isinstance(fields, list)
    assert fields[0]["failed_share"] == 0.1
