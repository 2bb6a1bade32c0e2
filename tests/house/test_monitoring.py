"""The rules for Prometheus and the dashboard for Grafana use what the code exposes, and the alerts fire in time."""

import importlib
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.house.log_events import collect_metrics

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "celery5/observability/monitoring"
RULES = FOLDER / "celery5-rules.yml"
DASHBOARD = FOLDER / "celery5-dashboard.json"
yaml: Any = importlib.import_module("yaml")  # it has no types

NAME = re.compile(r"\b(?:celery5|process)[_:][a-z0-9_:]+")
SELECTED = re.compile(r"\{([^}]*)\}")
GROUPED = re.compile(r"\b(?:by|on) \(([^)]*)\)")
LABEL = re.compile(r"([a-z_]+) *(?:=~|!~|!=|=)")
BY_SCRAPING = {"job", "instance", "le"}
"""Labels that Prometheus adds, and that of buckets."""
ROW = re.compile(r"`(celery5_[a-z_]+)(?:\{([a-z,_]+)\})?`")
PROMTOOL = shutil.which("promtool")


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def dashboard() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(DASHBOARD.read_text())
    return loaded


def panels() -> list[dict[str, Any]]:
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def expressions() -> Iterator[str]:
    """Yield all expressions of the rules and of the dashboard."""
    yield from (rule["expr"] for rule in rules())
    yield from (target["expr"] for panel in panels() for target in panel["targets"])
    yield from (variable.get("definition", "") for variable in dashboard()["templating"]["list"])


def documented_labels() -> set[str]:
    """The labels of all metrics, as the guide lists them for each metric."""
    found = ROW.findall((ROOT / "docs/guide/probes.md").read_text())
    return {label for _, labels in found for label in labels.split(",") if label}


def test_rules_and_dashboard_use_only_metrics_that_exist() -> None:
    known = set(collect_metrics(ROOT)) | {rule["record"] for rule in rules() if "record" in rule}
    known |= {f"{name}_bucket" for name, (kind, _) in collect_metrics(ROOT).items() if kind == "histogram"}
    used = {name for expression in expressions() for name in NAME.findall(expression)}
    assert len(used) > 20
    assert used - known == set()


def test_they_use_only_labels_that_exist() -> None:
    used = {
        label
        for expression in expressions()
        for braces in SELECTED.findall(expression)
        for label in LABEL.findall(braces)
    }
    used |= {
        label.strip()
        for expression in expressions()
        for names in GROUPED.findall(expression)
        for label in names.split(",")
    }
    assert {"queue", "task", "state", "stream"} <= used
    assert used - documented_labels() - BY_SCRAPING == set()


def test_the_rules_record_each_percentile() -> None:
    recorded = {rule["record"]: rule["expr"] for rule in rules() if "record" in rule}
    for what in ("run", "wait"):
        for name, fraction in {"p50": "0.5", "p95": "0.95", "p99": "0.99"}.items():
            expression = f"histogram_quantile({fraction}, celery5:job_{what}_seconds_bucket:rate5m)"
            assert recorded[f"celery5:job_{what}_seconds:{name}"] == expression


def test_each_alert_says_what_is_wrong_and_what_to_do_and_is_in_the_guide() -> None:
    guide = (ROOT / "docs/guide/metrics.md").read_text()
    alerts = [rule for rule in rules() if "alert" in rule]
    for rule in alerts:
        assert {"summary", "description"} == rule["annotations"].keys()
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert f"`{rule['alert']}`" in guide
    assert {rule["alert"] for rule in alerts} == set(re.findall(r"Celery5[A-Za-z]+", guide)) == set(SERIES)


def test_the_dashboard_can_be_imported() -> None:
    board = dashboard()
    assert board["schemaVersion"] >= 36
    assert [field["name"] for field in board["__inputs"]] == ["DS_PROMETHEUS"]
    assert {variable["name"] for variable in board["templating"]["list"]} == {"datasource", "job", "queue"}
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


@pytest.mark.parametrize("panel", panels(), ids=lambda panel: str(panel["title"]))
def test_each_panel_has_a_title_a_unit_and_the_data_source_that_was_chosen(panel: dict[str, Any]) -> None:
    chosen = {"type": "prometheus", "uid": "${datasource}"}
    assert panel["title"]
    assert panel["description"]
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert panel["datasource"] == chosen
    for target in panel["targets"]:
        assert target["datasource"] == chosen
        assert 'job=~"$job"' in target["expr"]


INFO = {
    'celery5_worker_info{job="shop",instance="a"}': "1x60",
    'celery5_worker_info{job="shop",instance="b"}': "1x60",
}
"""What makes of two instances two processes. Without it they are two answers for one cluster."""
WORKERS = {'celery5_slots{job="shop",instance="a",kind="thread"}': "8x60"}

Samples = dict[str, str]
SERIES: dict[str, tuple[Samples, Samples]] = {
    "Celery5QueueBehind": (
        {'celery5_queue_oldest_seconds{job="shop",instance="a",queue="q"}': "301x60"},
        {'celery5_queue_oldest_seconds{job="shop",instance="a",queue="q"}': "299x60"},
    ),
    "Celery5JobsFail": (
        {
            'celery5_jobs_total{job="shop",instance="a",queue="q",task="t",state="SUCCESS"}': "0+80x60",
            'celery5_jobs_total{job="shop",instance="a",queue="q",task="t",state="DEAD"}': "0+20x60",
        },
        {
            'celery5_jobs_total{job="shop",instance="a",queue="q",task="t",state="SUCCESS"}': "0+95x60",
            'celery5_jobs_total{job="shop",instance="a",queue="q",task="t",state="DEAD"}': "0+5x60",
            'celery5_jobs_total{job="shop",instance="a",queue="q",task="rare",state="DEAD"}': "0+1x60",
        },
    ),
    "Celery5NoWorkers": (
        {'celery5_queue_depth{job="shop",instance="c",queue="q"}': "5x20 _x40"},
        {'celery5_queue_depth{job="shop",instance="a",queue="q"}': "5x60", **WORKERS},
    ),
    "Celery5DeadLettersGrow": (
        {'celery5_queue_dead{job="shop",instance="a",queue="q"}': "3x50 4x10"},
        {'celery5_queue_dead{job="shop",instance="a",queue="q"}': "9x50 4x10"},
    ),
    "Celery5JobKillsWorkers": (
        {'celery5_worker_deaths{job="shop",instance="a",queue="q",task="t"}': "_x50 1x10"},
        {
            'celery5_worker_deaths{job="shop",instance="a",queue="q",task="t"}': "4x60",
            'celery5_worker_deaths{job="shop",instance="b",queue="q",task="t"}': "_x50 4x10",
        },
    ),
    "Celery5WorkerLost": (
        {'celery5_queue_workers_lost{job="shop",instance="a",queue="q"}': "0x50 1x10"},
        {
            'celery5_queue_workers_lost{job="shop",instance="a",queue="q"}': "4x60",
            'celery5_queue_workers_lost{job="shop",instance="b",queue="q"}': "_x50 4x10",
        },
    ),
    "Celery5MemberMissing": (
        {'celery5_members_missing{job="shop",instance="a",kind="worker",group="mail"}': "0x50 1x10"},
        {'celery5_members_missing{job="shop",instance="a",kind="worker",group="mail"}': "1x50 0x10"},
    ),
    "Celery5BrokerMemoryFull": (
        {'celery5_broker_memory_used_share{job="shop",instance="a",broker="default"}': "0.95x60"},
        {'celery5_broker_memory_used_share{job="shop",instance="a",broker="default"}': "0.85x60"},
    ),
    "Celery5StreamBehind": (
        {'celery5_stream_lag_seconds{job="shop",instance="a",stream="s",group="g"}': "400x60"},
        {'celery5_stream_lag_seconds{job="shop",instance="a",stream="s",group="g"}': "400x50 10x10"},
    ),
    "Celery5StreamQuarantined": (
        {
            'celery5_stream_partitions{job="shop",instance="a",stream="s",group="g",state="quarantined"}': "1x60"
        },
        {'celery5_stream_partitions{job="shop",instance="a",stream="s",group="g",state="unowned"}': "1x60"},
    ),
    "Celery5LoopBlocked": (
        {'celery5_loop_blocked_seconds_total{job="shop",instance="a",task="t"}': "0+1x60"},
        {'celery5_loop_blocked_seconds_total{job="shop",instance="a",task="t"}': "0+0.2x60"},
    ),
    "Celery5LoopHangs": (
        {'celery5_loop_blocked_seconds{job="shop",instance="a"}': "31x60"},
        {'celery5_loop_blocked_seconds{job="shop",instance="a"}': "3x60"},
    ),
    "Celery5BreakerOpen": (
        {'celery5_breaker_state{job="shop",instance="a",of="webhook:alerts",mode="delay"}': "2x60"},
        {
            'celery5_breaker_state{job="shop",instance="a",of="t",mode="delay"}': "1x60",
            'celery5_breaker_state{job="shop",instance="a",of="w",mode="watch"}': "2x60",
        },
    ),
    "Celery5RedisBreakerOpen": (
        {'celery5_breaker_state{job="shop",instance="a",of="connection:push",mode="delay"}': "2x60"},
        {'celery5_breaker_state{job="shop",instance="a",of="connection:push",mode="delay"}': "1x60"},
    ),
    "Celery5NotReady": (
        {
            'celery5_process_alive{job="shop",instance="a"}': "1x60",
            'celery5_process_ready{job="shop",instance="a"}': "0x60",
        },
        {
            'celery5_process_alive{job="shop",instance="a"}': "3x60",
            'celery5_process_ready{job="shop",instance="a"}': "3x60",
        },
    ),
}
"""For each alert, series of an hour by minutes that make it fire, and such that do not."""


DEEP = {'celery5_queue_depth{job="shop",instance="a",queue="q"}': "5x60"}
UNREAD: list[tuple[Samples, bool]] = [
    ({**DEEP, 'celery5_queue_workers{job="shop",instance="a",queue="q"}': "0x60", **WORKERS}, True),
    ({**DEEP, 'celery5_queue_workers{job="shop",instance="a",queue="other"}': "1x60", **WORKERS}, True),
    ({**DEEP, 'celery5_queue_workers{job="shop",instance="a",queue="other"}': "1x60"}, True),
    ({**DEEP, 'celery5_queue_workers{job="shop",instance="b",queue="q"}': "1x60", **WORKERS}, False),
    ({**DEEP, 'celery5_queue_workers{job="shop",instance="b",queue="q"}': "1x60"}, False),
]
"""Jobs wait on a queue, and whether no worker reads it, whatever workers of other queues there are."""


def run_promtool(folder: Path, series: Samples, *expected: dict[str, Any]) -> None:
    """Evaluate the rules over an hour of these series, and compare expressions at its end."""
    if PROMTOOL is None:
        pytest.skip(
            "THE RULES WERE NOT EVALUATED: there is no promtool; install Debian's package `prometheus`"
        )
    test = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [{"eval_time": "59m", **alert} for alert in expected],
    }
    path = folder / "test.yml"
    path.write_text(json.dumps({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": [test]}))
    ended = subprocess.run(
        [PROMTOOL, "test", "rules", str(path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr


def is_worth(expression: str, *samples: tuple[str, float]) -> dict[str, Any]:
    return {
        "expr": expression,
        "exp_samples": [{"labels": labels, "value": value} for labels, value in samples],
    }


FIRING = 'count by (alertname) (ALERTS{alertstate="firing"})'


@pytest.mark.parametrize("alert", SERIES)
def test_an_alert_fires_when_it_should_and_no_other_with_it(tmp_path: Path, alert: str) -> None:
    firing, quiet = SERIES[alert]
    run_promtool(tmp_path, firing, is_worth(FIRING, (f'{{alertname="{alert}"}}', 1)))
    run_promtool(tmp_path, quiet, is_worth(FIRING))


@pytest.mark.parametrize(("series", "fires"), UNREAD)
def test_a_queue_is_unread_whoever_reads_other_queues(tmp_path: Path, series: Samples, fires: bool) -> None:
    run_promtool(tmp_path, series, is_worth(FIRING, *[('{alertname="Celery5NoWorkers"}', 1)][:fires]))


def test_a_cluster_with_fewer_ready_processes_than_live_ones_is_not_ready(tmp_path: Path) -> None:
    fires = is_worth(FIRING, ('{alertname="Celery5NotReady"}', 1))
    alive, ready = ('celery5_process_%s{job="shop",instance="a"}' % what for what in ("alive", "ready"))  # noqa: UP031
    run_promtool(tmp_path, {alive: "3x60", ready: "2x60"}, fires)
    run_promtool(tmp_path, {alive: "3x60"}, fires)


@pytest.mark.parametrize(
    ("info", "total"), [(INFO, 2.0), ({}, 1.0)], ids=["of each process", "of the cluster"]
)
def test_processes_are_added_up_and_answers_for_the_cluster_are_not(
    tmp_path: Path, info: Samples, total: float
) -> None:
    labels = 'job="shop",instance="%s",queue="q",task="t"'
    series = dict(info)
    for instance in ("a", "b"):
        of = labels % instance
        series[f'celery5_jobs_total{{{of},state="SUCCESS"}}'] = "0+30x60"
        series[f'celery5_jobs_total{{{of},state="RETRY"}}'] = "0+30x60"
        series[f'celery5_jobs_running{{job="shop",instance="{instance}"}}'] = "4x60"
        for what in ("run", "wait"):
            for le, values in {"1": "0+30x60", "2": "0+60x60", "+Inf": "0+60x60"}.items():
                series[f'celery5_job_{what}_seconds_bucket{{{of},le="{le}"}}'] = values
    by = '{job="shop", queue="q", task="t"}'
    percentiles = [
        is_worth(f"round(celery5:job_{what}_seconds:{name}, 0.01)", (by, value))
        for what in ("run", "wait")
        for name, value in {"p50": 1.0, "p95": 1.9, "p99": 1.98}.items()
    ]
    run_promtool(
        tmp_path,
        series,
        is_worth("sum(celery5:jobs:rate5m)", ("{}", total)),
        is_worth("celery5:jobs_failed:ratio5m + 0", (by, 0.5)),
        is_worth("celery5:jobs_running:sum + 0", ('{job="shop"}', 4 * total)),
        *percentiles,
    )
