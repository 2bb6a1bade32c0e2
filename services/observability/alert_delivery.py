"""Log the notifications of alerts, and send them to a webhook, from the process that has decided on them last."""

import time
from collections.abc import Sequence
from typing import ClassVar

import trio

from celery5.broker.calls import alerts as calls
from celery5.broker.calls.alerts import WaitingNotification
from celery5.broker.driver import AsyncDriver
from celery5.broker.keys import Keys
from celery5.errors import BrokerError
from celery5.logs.log import Log
from celery5.observability.webhook import AlertWebhook, WebhookRefused
from celery5.protocol.observability.alert_messages import make_alert_message
from celery5.protocol.observability.alerting import AlertTransition
from celery5.services.observability.alert_evaluator import AlertEvaluator
from celery5.services.process.broker_outages import OutageLog

READ_AT_ONCE = 50
"""Notifications that are read in one trip."""
DELIVERY_TIMEOUT = 10.0
"""Seconds that one try may take."""
RETRY_DELAYS = (1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
"""Seconds before the second try and those after it. Then the notification is dropped."""

MAX_AGE = 3600.0
"""Seconds after which a notification is tried once and no more."""


class AlertDelivery:
    """Sends notifications in their order, each at least once, with an id by which a receiver drops repetitions.

    A notification stays in Redis until the receiver has taken it, or all tries have failed. So another process goes on
    when this one is killed.

    Args:
        metrics_redis: The default broker, where the notifications are.
        alert_evaluator: Says when notifications may be sent.
        alert_webhook: Where they are sent; None: they are logged only.
    """

    only_observes: ClassVar = True

    def __init__(
        self,
        *,
        metrics_redis: AsyncDriver,
        keys: Keys,
        alert_evaluator: AlertEvaluator,
        alert_webhook: AlertWebhook | None,
        log: Log,
    ) -> None:
        self._redis = metrics_redis
        self._keys = keys
        self._evaluated = alert_evaluator.evaluated
        self._webhook = alert_webhook
        self._log = log
        self._outages = OutageLog(log, "alerts:delivery-interrupted", level="debug")
        # The notification that is tried, how often it was, and from when it may be tried again.
        self._tried, self._tries, self._due = "", 0, 0.0
        self._is_failing = False
        # The notification that this process has logged last.
        self._logged = ""

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Deliver until cancelled."""
        task_status.started()
        async for _ in self._evaluated:
            try:
                await self._deliver()
            except BrokerError as error:
                self._outages.record_error(error)
            else:
                self._outages.record_recovery()

    async def _deliver(self) -> None:
        """Log what was not logged, then send what waits, up to one that fails or is not due."""
        waiting = await self._redis.perform(calls.read_outbox(self._keys, count=READ_AT_ONCE))
        if not waiting:
            return
        stored = await self._log_new(waiting)
        for one in waiting:
            if self._webhook is None and _split_id(one.id) > _split_id(stored):
                return  # it is in the log of this process, and perhaps not written yet
            if not await self._send(one):
                return
            await self._redis.perform(calls.remove_from_outbox(self._keys, one.id))

    async def _log_new(self, waiting: Sequence[WaitingNotification]) -> str:
        """Log what nobody has logged; return the last notification that counts as logged in Redis.

        That it is logged is stored a round later: a process that is killed takes the lines with it that its log has
        not written yet, and then another process logs them.
        """
        stored = await self._redis.perform(calls.read_logged(self._keys))
        if _split_id(self._logged) > _split_id(stored):
            await self._redis.perform(calls.set_logged(self._keys, self._logged))
            stored = self._logged
        for one in waiting:
            if one.transition is not None and _split_id(one.id) > _split_id(stored):
                self._log_transition(one.transition)
                self._logged = one.id
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

    async def _send(self, one: WaitingNotification) -> bool:
        """Send a notification. Return whether it is done with: it has arrived, or is given up."""
        if self._webhook is None or one.transition is None:
            return True
        if one.id != self._tried:
            self._tried, self._tries, self._due = one.id, 0, 0.0
        if trio.current_time() < self._due:
            return False
        body = make_alert_message(self._keys.app, one.transition)
        try:
            await self._post(self._webhook, one.transition.id, body)
        except (WebhookRefused, trio.TooSlowError) as error:
            why = str(error) or "it did not answer in time"
            return self._count_failure(one, one.transition, self._webhook, why)
        self._is_failing = False
        return True

    async def _post(self, webhook: AlertWebhook, name: str, body: bytes) -> None:
        with trio.fail_after(DELIVERY_TIMEOUT):
            await trio.to_thread.run_sync(webhook.post, name, body, time.time(), abandon_on_cancel=True)

    def _count_failure(
        self, one: WaitingNotification, transition: AlertTransition, webhook: AlertWebhook, why: str
    ) -> bool:
        """Return whether the notification is given up after this failure."""
        if not self._is_failing:
            self._is_failing = True
            self._log.event("alerts:webhook-failed", "warning", to=webhook.masked_url, why=why)
        self._tries += 1
        if self._tries > len(RETRY_DELAYS) or time.time() - one.at > MAX_AGE:
            self._log.event(
                "alerts:notification-dropped",
                "error",
                alert=transition.name,
                subject=transition.subject,
                tries=self._tries,
                why=why,
            )
            return True
        self._due = trio.current_time() + RETRY_DELAYS[self._tries - 1]
        return False


def _split_id(entry: str) -> tuple[int, int]:
    """Return the two numbers of the id of an entry, to compare; the least for none."""
    ms, _, number = entry.partition("-")
    return (int(ms), int(number)) if ms.isdigit() and number.isdigit() else (-1, -1)
