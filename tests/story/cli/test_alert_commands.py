"""Alerts on the command line: what fires, the rules, silences, the history, and a test of the webhook."""

import json
import time
from pathlib import Path

import redis
import trio

from celery5.broker.calls.alerts import note_delivery, read_outbox, save_alerts
from celery5.protocol.observability.alert_rules import StoredAlerts
from celery5.protocol.observability.alerting import (
    AlertReading,
    AlertRule,
    AlertTransition,
    UndeliveredNotification,
    decide_alerts,
)
from tests.redis.dashboard.site import browsing, read_text
from tests.redis.observability.alerted import Receiver
from tests.story.cli.commands import celery5
from tests.story.conftest import Desk


def fire(desk: Desk, client: "redis.Redis", name: str) -> None:
    """Have the alert of a built-in rule fire, as the process would whose turn it is."""
    rule: AlertRule = next(alert_rule for alert_rule in desk.app.alerts.rules() if alert_rule.name == name)
    readings = {(name, "queue mail"): AlertReading(12, "12 jobs wait on queue mail, and no worker reads it")}
    now = time.time()
    pending = decide_alerts({name: rule}, (), readings, {}, now - rule.for_)
    decision = decide_alerts({name: rule}, pending.instances, readings, {}, now)
    transitions: tuple[AlertTransition, ...] = decision.transitions
    assert [transition.change for transition in transitions] == ["fired"]
    client.set(desk.app.keys.metrics_turn, "test", px=60_000)
    assert desk.app.perform(
        save_alerts(desk.app.keys, "test", "", StoredAlerts(decision.instances), transitions)
    )


def test_an_alert_that_fires_is_listed_and_fails_a_check(desk: Desk, redis_client: "redis.Redis") -> None:
    assert "no-workers" in desk("alert", "list", "--check")
    fire(desk, redis_client, "no-workers")
    ended = celery5("-A", "shop", "alert", "list", "--check", cwd=desk.folder)
    assert ended.code == 1
    row = next(line for line in ended.out.splitlines() if line.startswith("no-workers"))
    assert row.split()[:5] == ["no-workers", "queue", "mail", "firing", "critical"]
    assert "12 jobs wait on queue mail, and no worker reads it" in row
    states = json.loads(desk("alert", "list", "--json"))
    assert [state["name"] for state in states if state["status"] == "firing"] == ["no-workers"]
    assert "no-workers (queue mail): celery5 -A shop alert list" in desk("info")
    doctor = celery5("-A", "shop", "doctor", cwd=desk.folder).out
    assert next(line for line in doctor.splitlines() if " alerts " in line).startswith("warn")


def test_undelivered_notification_is_shown_with_the_alerts(desk: Desk, redis_client: "redis.Redis") -> None:
    fire(desk, redis_client, "no-workers")
    (waiting,) = desk.app.perform(read_outbox(desk.app.keys))
    failure = UndeliveredNotification(
        name="no-workers",
        subject="queue mail",
        change="fired",
        at=time.time(),
        tries=3,
        tried_at=time.time(),
        why="the receiver answered with status 500",
    )
    desk.app.perform(note_delivery(desk.app.keys, waiting, failure))
    what = "fired: the receiver answered with status 500 (3 tries, sent again)"
    assert what in desk("alert", "list")
    (state,) = [entry for entry in json.loads(desk("alert", "list", "--json")) if entry["undelivered"]]
    assert (state["subject"], state["undelivered"]["tries"]) == ("queue mail", 3)
    summary = "the webhook has not taken the last notification of 1 alert"
    assert summary in desk("info")
    assert summary in celery5("-A", "shop", "doctor", cwd=desk.folder).out

    async def look() -> list[str]:
        async with browsing(desk.app) as client:
            pages = [await client.get(f"/{desk.app.name}{path}") for path in ("/alerts", "")]
            return [read_text(page.text) for page in pages]

    alerts, overview = trio.run(look)
    assert f"not delivered {what}" in alerts
    assert "The webhook has not taken the last notification of 1 alert" in overview
    assert what in overview
    desk.app.perform(note_delivery(desk.app.keys, waiting))
    assert "the webhook has not taken" not in desk("info")


def test_a_silenced_alert_passes_a_check_until_the_silence_is_ended(
    desk: Desk, redis_client: "redis.Redis"
) -> None:
    fire(desk, redis_client, "no-workers")
    assert desk("alert", "silence", "no-workers", "--for", "2h").startswith("no-workers: silenced until ")
    assert "silenced" in desk("alert", "list", "--check")
    assert desk("alert", "unsilence", "no-workers") == "no-workers: not silenced any more\n"
    assert celery5("-A", "shop", "alert", "list", "--check", cwd=desk.folder).code == 1
    ended = celery5("-A", "shop", "alert", "unsilence", "no-workers", cwd=desk.folder)
    assert (ended.code, ended.err) == (1, "Error: no-workers was not silenced\n")


def test_the_history_and_the_rules_are_shown(desk: Desk, redis_client: "redis.Redis") -> None:
    assert desk("alert", "history") == "no alert has fired\n"
    fire(desk, redis_client, "no-workers")
    assert "fired" in desk("alert", "history")
    (entry,) = json.loads(desk("alert", "history", "--json"))
    assert (entry["name"], entry["change"]) == ("no-workers", "fired")
    assert [entry["name"] for entry in json.loads(desk("alert", "rules", "--json"))][:2] == [
        "oldest-job",
        "failure-rate",
    ]
    rows = [line.split() for line in desk("alert", "rules").splitlines()]
    assert ["oldest-job", "oldest", "all", "300", "60", "s", "240", "warning"] in rows


def test_a_test_notification_arrives_or_the_command_fails(desk: Desk) -> None:
    with Receiver() as receiver:
        env = {f"CELERY5_{name.upper()}": value for name, value in receiver.settings.items()}
        assert desk("alert", "test", **env).startswith("sent alert_test_")
        assert [request.body["type"] for request in receiver.received] == ["alert.test"]
        receiver.status = 500
        ended = celery5("-A", "shop", "alert", "test", cwd=desk.folder, env=env)
    assert ended.code == 1
    assert "the receiver answered with status 500" in ended.err
    (entry,) = desk.app.audit.list()
    assert (entry.action, entry.source, entry.count) == ("alert:test", "cli", 1)


def test_a_webhook_without_a_secret_is_refused_in_one_line(desk: Desk, tmp_path: Path) -> None:
    env = {"CELERY5_ALERT_WEBHOOK": "https://ops.example.com/celery5"}
    ended = celery5("-A", "shop", "alert", "test", cwd=tmp_path, env=env)
    assert ended.code != 0
    assert "alert_webhook needs alert_webhook_secret; give whsec_" in ended.err
    assert ended.err.count("\n") == 1
