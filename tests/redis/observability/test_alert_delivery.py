"""Notifications of alerts arrive at a real HTTP server, signed, whatever it does, and are logged."""

from typing import Any

import pytest
import redis

from celery5 import App
from celery5.broker.calls.alerts import read_logged, read_outbox
from celery5.observability import UndeliveredNotification, WebhookRefused, no_workers
from celery5.protocol.health.breaker import BreakerPolicy
from celery5.services.observability import alert_delivery
from tests.redis.observability.alerted import QUICK, Receiver, declare, get_changes
from tests.redis.worker.workers import Lines, until, until_async, working


def use(app: App, receiver: Receiver) -> Any:
    """Declare a rule whose alerts go to a receiver, and the task whose jobs make it fire."""
    app.configure(**QUICK, **receiver.settings)
    declare(app, no_workers())

    @app.task(name="work", queue="lonely")
    async def work() -> None: ...

    return work


async def test_a_notification_is_signed_sent_and_logged_once(app: App, redis_client: "redis.Redis") -> None:
    with Receiver() as receiver, Lines() as lines:
        work = use(app, receiver)
        await work.adelay()
        async with working(app, queues=["default"]):
            await until(lambda: len(receiver.received) == 1)
            async with working(app, queues=["lonely"], name="late"):
                await until(lambda: len(receiver.received) == 2)
            await until_async(lambda: is_sent(app))
    fired, resolved = receiver.received
    assert receiver.forged == 0
    assert [notification.change for notification in receiver.received] == [
        ("alert.fired", "queue lonely"),
        ("alert.resolved", "queue lonely"),
    ]
    assert fired.body["data"] == {
        "app": app.name,
        "name": "tested",
        "subject": "queue lonely",
        "severity": "warning",
        "status": "firing",
        "description": "1 job waits on queue lonely, and no worker reads it",
        "value": 1.0,
        "above": 0.0,
        "since": fired.body["data"]["since"],
    }
    assert resolved.id != fired.id
    assert redis_client.xlen(app.keys.alert_outbox) == 0
    (logged,) = lines.of("alert:fired")
    assert (logged["alert"], logged["subject"], logged["severity"]) == ("tested", "queue lonely", "warning")
    assert len(lines.of("alert:resolved")) == 1


async def send_to_unread_queues(app: App, *queues: str) -> None:
    """Send a job to each of some queues that nobody reads, so that an alert fires for each."""

    if "work" not in app.tasks:

        @app.task(name="work")
        async def work() -> None: ...

    for queue in queues:
        await app.tasks["work"].options(queue=queue).adelay()


async def get_undelivered(app: App) -> dict[str, UndeliveredNotification]:
    """Return what the webhook has not taken, by subject."""
    return {state.subject: state.undelivered for state in await app.alerts.alist() if state.undelivered}


@pytest.mark.parametrize(
    "status", [500, 401, 400, 422], ids=["broken", "forbidden", "bad-request", "invalid"]
)
async def test_a_refused_notification_holds_up_no_alert_of_another_subject(app: App, status: int) -> None:
    with Receiver() as receiver, Lines() as lines:
        receiver.statuses = {"queue a": status, "queue b": status}
        app.configure(**QUICK, **receiver.settings)
        declare(app, no_workers())
        await send_to_unread_queues(app, "a", "b", "c", "d")
        async with working(app, queues=["default"]):
            await until(lambda: len(receiver.received) == 2)
            await until_async(lambda: is_undelivered(app, {"queue a", "queue b"}))
            undelivered = await get_undelivered(app)
    assert sorted(sent_notification.change[1] for sent_notification in receiver.received) == [
        "queue c",
        "queue d",
    ]
    is_dropped = status in (400, 422)
    for notification in undelivered.values():
        assert (notification.change, notification.is_dropped) == ("fired", is_dropped)
        assert notification.why == f"the receiver answered with status {status}"
    assert len(lines.of("alerts:notification-dropped")) == (2 if is_dropped else 0)
    if is_dropped:  # it said that it will never take them
        assert (receiver.tried.count("queue a"), receiver.tried.count("queue b")) == (1, 1)


async def is_undelivered(app: App, subjects: set[str]) -> bool:
    """Whether the webhook has not taken the notifications of these subjects."""
    return set(await get_undelivered(app)) == subjects


async def test_what_a_process_has_logged_before_it_ends_in_order_no_other_logs_again(app: App) -> None:
    with Receiver() as receiver, Lines() as lines:
        work = use(app, receiver)
        receiver.status = 0  # no second round, in which it would be noted
        await work.adelay()
        async with working(app, queues=["default"]):
            await until(lambda: bool(lines.of("alert:fired")))
        (waiting,) = await app.aperform(read_outbox(app.keys))
        assert await app.aperform(read_logged(app.keys)) == waiting.id
        receiver.hung.set()


async def test_notifications_of_one_alert_stay_in_order_and_are_forgotten_once_taken(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alert_delivery, "RETRY_DELAYS", (0.01,) * 1000)
    with Receiver() as receiver:
        receiver.status = 503
        work = use(app, receiver)
        await work.adelay()
        async with working(app, queues=["default"]):
            await until(lambda: receiver.attempts >= 1)
            async with working(app, queues=["lonely"], name="late"):
                changes = [("fired", "queue lonely"), ("resolved", "queue lonely")]
                await until_async(lambda: are_changes(app, changes))
                (state,) = [state for state in await app.alerts.alist() if state.undelivered]
                assert (state.subject, state.status) == ("queue lonely", "inactive")
                receiver.status = 200
                await until(lambda: len(receiver.received) == 2)
                await until_async(lambda: is_undelivered(app, set()))
    assert [notification.change[0] for notification in receiver.received] == ["alert.fired", "alert.resolved"]


async def test_each_notification_of_an_alert_has_tries_of_its_own(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alert_delivery, "RETRY_DELAYS", (0.01,) * 1000)
    with Receiver() as receiver, Lines() as lines:
        receiver.status = 503
        work = use(app, receiver)
        await work.adelay()
        async with working(app, queues=["default"]):
            await until(lambda: receiver.attempts >= 3)
            receiver.status = 200
            await until(lambda: len(receiver.received) == 1)
            receiver.status = 503
            async with working(app, queues=["lonely"], name="late"):
                await until(lambda: len(lines.of("alerts:webhook-failed")) == 2)
                (state,) = [state for state in await app.alerts.alist() if state.undelivered]
                assert state.undelivered is not None
                assert state.undelivered.change == "resolved"


async def test_a_receiver_that_does_not_answer_is_tried_by_a_probe_only(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alert_delivery, "DELIVERY_TIMEOUT", 0.2)
    with Receiver() as receiver, Lines() as lines:
        receiver.status = 0
        app.configure(**QUICK, **receiver.settings)
        declare(app, no_workers())
        queues = [f"q{number}" for number in range(12)]
        await send_to_unread_queues(app, *queues)
        async with working(app, queues=["default"]):
            await until(lambda: lines.of("breaker:tripped") != [])
            at_the_trip = receiver.attempts
            evaluated = len(await app.alerts.ahistory())
            await send_to_unread_queues(app, "later")
            await until_async(lambda: has_fired(app, evaluated + 1))
            assert receiver.attempts == at_the_trip
        receiver.hung.set()
    (tripped,) = lines.of("breaker:tripped")
    assert (tripped["breaker"], tripped["effect"]) == (
        "webhook:alerts",
        "notifications of alerts wait in Redis",
    )
    assert at_the_trip == 3


async def has_fired(app: App, count: int) -> bool:
    """Whether so many alerts have fired or resolved."""
    return len(await get_changes(app)) >= count


async def is_sent(app: App) -> bool:
    """Whether no notification waits."""
    return not await app.aperform(read_outbox(app.keys, count=1))


async def test_a_receiver_that_refuses_gets_the_same_notification_again_until_it_takes_it(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alert_delivery, "RETRY_DELAYS", (0.01,) * 100)
    with Receiver() as receiver:
        receiver.status = 503
        work = use(app, receiver)
        await work.adelay()
        async with working(app, queues=["default"]):
            await until(lambda: receiver.attempts >= 3)
            assert receiver.received == []
            receiver.status = 200
            await until(lambda: len(receiver.received) == 1)
            await until_async(lambda: is_sent(app))
    assert len(receiver.received) == 1


async def test_a_receiver_that_hangs_holds_up_no_evaluation(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alert_delivery, "DELIVERY_TIMEOUT", 0.3)
    monkeypatch.setattr(alert_delivery, "WEBHOOK_BREAKER", BreakerPolicy(reset=0.05))
    monkeypatch.setattr(alert_delivery, "RETRY_DELAYS", (0.01,) * 100)
    with Receiver() as receiver:
        receiver.status = 0
        work = use(app, receiver)
        await work.adelay()
        async with working(app, queues=["default"]):
            await until(lambda: receiver.attempts >= 1)
            async with working(app, queues=["lonely"], name="late"):
                changes = [("fired", "queue lonely"), ("resolved", "queue lonely")]
                await until_async(lambda: are_changes(app, changes))
                receiver.status = 200
                await until(lambda: len({notification.id for notification in receiver.received}) == 2)
        assert receiver.received[0].change[0] == "alert.fired"
        assert receiver.received[-1].change[0] == "alert.resolved"
        receiver.hung.set()


async def are_changes(app: App, changes: list[tuple[str, str]]) -> bool:
    """Whether this has fired and resolved."""
    return await get_changes(app) == changes


async def test_undelivered_notification_is_dropped_and_logged_once(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alert_delivery, "RETRY_DELAYS", (0.01, 0.01))
    with Receiver() as receiver, Lines() as lines:
        receiver.status = 500
        work = use(app, receiver)
        await work.adelay()
        async with working(app, queues=["default"]):
            await until(lambda: receiver.attempts == 3)
            await until_async(lambda: is_sent(app))
    assert receiver.attempts == 3
    (failed,) = lines.of("alerts:webhook-failed")
    assert failed["to"].startswith("http://127.0.0.1:")
    assert "/alerts" not in failed["to"]
    (dropped,) = lines.of("alerts:notification-dropped")
    assert (dropped["alert"], dropped["tries"]) == ("tested", 3)


async def test_a_test_notification_is_sent_from_where_it_is_asked_for(app: App) -> None:
    with Receiver() as receiver:
        app.configure(**receiver.settings)
        name = await app.alerts.atest()
        (received,) = receiver.received
        assert received.id == name
        assert received.body["type"] == "alert.test"
        receiver.status = 404
        with pytest.raises(WebhookRefused, match=r"^the receiver answered with status 404$"):
            await app.alerts.atest()


async def test_the_secret_and_the_path_of_the_webhook_are_masked(app: App) -> None:
    with Receiver() as receiver:
        app.configure(**receiver.settings)
    shown = repr(app.settings)
    assert receiver.settings["alert_webhook_secret"] not in shown
    assert "/alerts" not in shown
