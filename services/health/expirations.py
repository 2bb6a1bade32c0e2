"""Expirations: tells the workers when the periods of health checks have lapsed.

Of several Schedulers one takes the turn of a check for each period. A worker that is told looks, and its own timer
waits for as long as it is told again: so the timer is there when no Scheduler lives, or the inbox is off, and never
both.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import trio

from celery5.app import App
from celery5.broker.calls import health
from celery5.broker.driver import AsyncDriver
from celery5.broker.keys import Keys
from celery5.errors import BrokerReplied, BrokerUnavailable
from celery5.health.health_check import HealthCheck
from celery5.logs.log import Log
from celery5.protocol.commands.definitions import CHECK_EXPIRED, get_inbox_name
from celery5.results.job_details import read_app_state
from celery5.services.commands.inbox import InboxAddress

TOGETHER = 0.05
"""The share of its period by which a check may be told of earlier, together with others."""


class CheckCommandSender(Protocol):
    """Posts signed commands."""

    async def send(
        self, inbox: str, command: str, parameters: Mapping[str, Any], /, *, expires: float
    ) -> bool: ...


class CheckExpirations:
    """The clock of the health checks of an application. Without an inbox it does nothing."""

    def __init__(
        self,
        *,
        redis: AsyncDriver,
        app: App,
        keys: Keys,
        command_sender: CheckCommandSender,
        address: InboxAddress,
        checks: Mapping[str, HealthCheck],
        log: Log,
    ) -> None:
        self._redis = redis
        self._app = app
        self._keys = keys
        self._orders = command_sender
        self._open = address.is_open
        self._checks = {each.name: each for each in checks.values() if each.is_polled}
        self._log = log
        self._due: dict[str, float] = {}

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Tell of each check when its period has lapsed, until cancelled."""
        task_status.started()
        if not (self._open and self._checks):
            await trio.sleep_forever()
        began = trio.current_time()
        self._due = {name: began + each.period for name, each in self._checks.items()}
        while True:
            await trio.sleep_until(min(self._due.values()))
            try:
                await self.send_expired(self._lapsed())
            except (BrokerUnavailable, BrokerReplied) as error:
                self._log.event("expirations:interrupted", "debug", why=str(error))

    async def send_expired(self, names: Sequence[str]) -> None:
        """Tell every worker that lives of these checks, but for those that another Scheduler tells of."""
        asked = [health.claim_notice(self._keys, each, self._checks[each].period) for each in names]
        turns = await self._redis.perform_all(asked)
        ours = [name for name, turn in zip(names, turns, strict=True) if turn]
        if not ours:
            return
        state = await read_app_state(self._app, self._redis, None)
        good_for = min(self._checks[each].period for each in ours)
        for inbox in sorted({get_inbox_name(each) for each in state.workers}):
            await self._orders.send(inbox, CHECK_EXPIRED.name, {"checks": ours}, expires=good_for)

    def _lapsed(self) -> list[str]:
        """The checks whose period has lapsed, or is about to. Those that were forgotten for a while are told of
        once."""
        now, found = trio.current_time(), list[str]()
        for name, check in self._checks.items():
            if self._due[name] <= now + TOGETHER * check.period:
                found.append(name)
                self._due[name] = max(self._due[name] + check.period, now + check.period / 2)
        return found
