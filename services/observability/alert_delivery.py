"""Log the notifications of alerts, and send them to a webhook, from the process that has decided on them last."""

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import ClassVar, NamedTuple

import msgspec
import trio

from celery5.broker.calls import alerts as calls
from celery5.broker.calls.alerts import WaitingNotification
from celery5.broker.driver import AsyncDriver
from celery5.broker.keys import Keys
from celery5.errors import BrokerError
from celery5.health.circuit_breaker import CircuitBreaker
from celery5.logs.log import Log
from celery5.observability import webhook as webhooks
from celery5.protocol.health.breaker import WEBHOOK_PREFIX, BreakerPolicy
from celery5.protocol.observability.alert_messages import make_alert_message
from celery5.protocol.observability.alerting import AlertKey, AlertTransition, UndeliveredNotification
from celery5.protocol.observability.families import MetricFamily, make_gauge
from celery5.services.health.circuits import CircuitBreakers
from celery5.services.observability.alert_evaluator import AlertEvaluator
from celery5.services.process.broker_outages import OutageLog

DELIVERY_TIMEOUT = 10.0
"""Seconds that one try may take."""
LAST_TIMEOUT = 2.0
"""Seconds that it may take to note what was logged, while the process stops."""
ROUND_TIMEOUT = 30.0
"""Seconds after which no further notification of a round is begun, so that new ones are logged in time."""
RETRY_DELAYS = (1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
"""Seconds before the second try and those after it. Then the notification is dropped."""

MAX_AGE = 3600.0
"""Seconds after which a notification is tried once and no more."""
WEBHOOK_BREAKER = BreakerPolicy(threshold=3, reset=10.0, growth="exponential", longest=300.0)
"""Opens after three tries in a row without an answer. A refusal is an answer."""


class _Attempts(msgspec.Struct, frozen=True):
    """How often the first notification of an alert was tried, and when it may be tried again, on Trio's clock."""

    notification: str
    tries: int = 0
    due: float = 0.0


class _Receiver(NamedTuple):
    """The webhook, and its circuit breaker."""

    webhook: "webhooks.AlertWebhook"
    circuit: CircuitBreaker


class AlertDelivery:
    """Sends the notifications of each alert in their order, at least once, with an id by which repetitions are dropped.

    A notification stays in Redis until the receiver has taken it, will never take it, or all tries have failed. So
    another process goes on when this one is killed. One that fails holds up later ones of the same rule and subject
    only; while the receiver does not answer at all, a circuit breaker holds up all.

    Args:
        default_redis: The default broker, where the notifications are.
        alert_evaluator: Says when notifications may be sent.
        alert_webhook: Where they are sent; None: they are logged only.
    """

    only_observes: ClassVar = True

    def __init__(
        self,
        *,
        default_redis: AsyncDriver,
        keys: Keys,
        alert_evaluator: AlertEvaluator,
        alert_webhook: "webhooks.AlertWebhook | None",
        circuit_breakers: CircuitBreakers,
        log: Log,
    ) -> None:
        self._redis = default_redis
        self._keys = keys
        self._evaluated = alert_evaluator.evaluated
        self._log = log
        self._outages = OutageLog(log, "alerts:delivery-interrupted", level="debug")
        self._attempts: dict[AlertKey, _Attempts] = {}
        self._receiver = None
        if alert_webhook is not None:
            circuit = circuit_breakers.add(
                f"{WEBHOOK_PREFIX}alerts", WEBHOOK_BREAKER, effect="notifications of alerts wait in Redis"
            )
            self._receiver = _Receiver(alert_webhook, circuit)
        # The notification that this process has logged last.
        self._logged = ""

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Deliver until cancelled."""
        task_status.started()
        try:
            async for _ in self._evaluated:
                with self._outages.suppressing():
                    await self._deliver()
        finally:
            with trio.move_on_after(LAST_TIMEOUT, shield=True), suppress(BrokerError):
                await self._note_logged()

    async def _deliver(self) -> None:
        """Log what was not logged, then send what waits, but for what fails or is not due, and what is behind it."""
        waiting = await self._redis.perform(calls.read_outbox(self._keys))
        waiting_ids = {undelivered.id for undelivered in waiting}
        self._attempts = {
            key: attempts for key, attempts in self._attempts.items() if attempts.notification in waiting_ids
        }
        if not waiting:
            return
        stored = await self._log_new(waiting)
        held_up = set[AlertKey]()
        end = trio.current_time() + ROUND_TIMEOUT
        for notification in waiting:
            if self._receiver is None and _split_id(notification.id) > _split_id(stored):
                return  # it is in the log of this process, and perhaps not written yet
            if notification.alert in held_up:
                continue
            if trio.current_time() >= end:
                return
            if not await self._deliver_one(notification):
                held_up.add(notification.alert)

    async def _deliver_one(self, notification: WaitingNotification) -> bool:
        """Send a notification if it is due. Return whether it is done with: it was taken, or is dropped."""
        failure: UndeliveredNotification | None = None
        if self._receiver is not None and notification.transition is not None:
            attempts = self._attempts.get(notification.alert, _Attempts(notification.id))
            if trio.current_time() < attempts.due or self._receiver.circuit.try_pass(self) is not None:
                return False
            why, is_permanent = await self._try_to_send(self._receiver, notification.transition)
            if why:
                failure = self._count_failure(
                    notification, notification.transition, why, is_permanent=is_permanent
                )
            else:
                self._attempts.pop(notification.alert, None)  # the next one of the alert has not failed yet
        await self._redis.perform(calls.note_delivery(self._keys, notification, failure))
        return failure is None or failure.is_dropped

    async def _try_to_send(self, receiver: "_Receiver", transition: AlertTransition) -> tuple[str, bool]:
        """Send a notification. Return why it was not taken, '' if it was, and whether it never will be."""
        body = make_alert_message(self._keys.app, transition)
        outcome, has_answered = ("", False), None
        try:
            with trio.fail_after(DELIVERY_TIMEOUT):
                await trio.to_thread.run_sync(
                    receiver.webhook.post, transition.id, body, time.time(), abandon_on_cancel=True
                )
            has_answered = True
        except webhooks.WebhookRefused as error:
            outcome, has_answered = (str(error), error.is_permanent), error.status is not None
        except trio.TooSlowError:
            outcome, has_answered = ("it did not answer in time", False), False
        finally:
            receiver.circuit.record_result(self, succeeded=has_answered, why=outcome[0])
        return outcome

    def _count_failure(
        self, notification: WaitingNotification, transition: AlertTransition, why: str, *, is_permanent: bool
    ) -> UndeliveredNotification:
        """Return what is known of a notification after a try has failed, and set when it is tried again."""
        attempts = self._attempts.get(notification.alert, _Attempts(notification.id))
        attempts = msgspec.structs.replace(attempts, tries=attempts.tries + 1)
        now = time.time()
        is_dropped = is_permanent or attempts.tries > len(RETRY_DELAYS) or now - notification.at > MAX_AGE
        alert, subject = transition.name, transition.subject
        if attempts.tries == 1 and self._receiver is not None:
            to = self._receiver.webhook.masked_url
            self._log.event("alerts:webhook-failed", "warning", alert=alert, subject=subject, to=to, why=why)
        if is_dropped:
            self._attempts.pop(notification.alert, None)
            self._log.event(
                "alerts:notification-dropped",
                "error",
                alert=alert,
                subject=subject,
                tries=attempts.tries,
                why=why,
            )
        else:
            due = trio.current_time() + RETRY_DELAYS[attempts.tries - 1]
            self._attempts[notification.alert] = msgspec.structs.replace(attempts, due=due)
        return UndeliveredNotification(
            name=transition.name,
            subject=transition.subject,
            change=transition.change,
            at=transition.at,
            tries=attempts.tries,
            tried_at=now,
            why=why,
            is_dropped=is_dropped,
        )

    def conditions(self) -> Mapping[str, str]:
        """Return no problem: the process does its work without a webhook."""
        return {}

    def metric_families(self) -> Iterable[MetricFamily]:
        """Yield what waits for the webhook after a failure."""
        if self._receiver is None:
            return
        yield make_gauge(
            "celery5_alert_notifications_failing",
            "Alerts whose notification the webhook has not taken, and that is sent again.",
            (float(len(self._attempts)), {}),
            merge="max",
        )

    async def _log_new(self, waiting: Sequence[WaitingNotification]) -> str:
        """Log what nobody has logged; return the last notification that counts as logged in Redis.

        That it is logged is stored a round later, or when the process ends in order: one that is killed takes the lines
        with it that its log has not written yet, and then another process logs them.
        """
        stored = await self._note_logged()
        for undelivered in waiting:
            if undelivered.transition is not None and _split_id(undelivered.id) > _split_id(stored):
                self._log_transition(undelivered.transition)
                self._logged = undelivered.id
        return stored

    async def _note_logged(self) -> str:
        """Note in Redis what this process has logged; return the last notification that counts as logged there."""
        stored = await self._redis.perform(calls.read_logged(self._keys))
        if _split_id(self._logged) > _split_id(stored):
            await self._redis.perform(calls.set_logged(self._keys, self._logged))
            stored = self._logged
        return stored

    def _log_transition(self, transition: AlertTransition) -> None:
        if transition.change == "resolved":
            self._log.event(
                "alert:resolved",
                "info",
                alert=transition.name,
                subject=transition.subject,
                severity=transition.severity,
                value=transition.value,
                why=transition.description,
            )
            return
        self._log.event(
            "alert:fired",
            "error" if transition.severity == "critical" else "warning",
            alert=transition.name,
            subject=transition.subject,
            severity=transition.severity,
            value=transition.value,
            why=transition.description,
        )


def _split_id(entry: str) -> tuple[int, int]:
    """Return the two numbers of the id of an entry, to compare; the least for none."""
    ms, _, number = entry.partition("-")
    return (int(ms), int(number)) if ms.isdigit() and number.isdigit() else (-1, -1)
