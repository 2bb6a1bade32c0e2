"""Expirations: tells the workers when the periods of health checks have lapsed (C28).

Floor: services. Reads: which workers live. Writes: the workers' inboxes; whose turn it is.

Of several Schedulers one takes the turn of a check for each period. A worker that is told looks, and its own timer
waits for as long as it is told again: so the timer is there when no Scheduler lives, or the inbox is off, and never
both.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import trio

from celery5.app import App
from celery5.broker import check_states
from celery5.broker.call import Call
from celery5.broker.keys import Keys
from celery5.errors import BrokerReplied, BrokerUnavailable
from celery5.health import HealthCheck
from celery5.log import Log
from celery5.overview import state_of_app
from celery5.protocol.orders import inbox_of
from celery5.services.inbox import Address

TOGETHER = 0.05
"""The share of its period by which a check may be told of earlier, together with others."""


class Redis(Protocol):
    """The Scheduler's own connection."""

    async def perform(self, call: Call[Any], /) -> Any: ...

    async def perform_all(self, calls: Sequence[Call[Any]], /) -> list[Any]: ...


class Orders(Protocol):
    """Posts signed commands."""

    async def post(
        self, inbox: str, command: str, parameters: Mapping[str, Any], /, *, expires: float
    ) -> bool: ...


class Expirations:
    """The clock of the health checks of an application. Without an inbox it does nothing."""

    def __init__(
        self,
        *,
        redis: Redis,
        app: App,
        keys: Keys,
        orders: Orders,
        address: Address,
        checks: Mapping[str, HealthCheck],
        log: Log,
    ) -> None:
        self._redis = redis
        self._app = app
        self._keys = keys
        self._orders = orders
        self._open = address.open
        self._checks = {each.name: each for each in checks.values() if each.is_looked_at}
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
                await self.tell(self._lapsed())
            except (BrokerUnavailable, BrokerReplied) as error:
                self._log.event("expirations:waiting", "debug", why=str(error))

    async def tell(self, names: Sequence[str]) -> None:
        """Tell every worker that lives of these checks, but for those that another Scheduler tells of."""
        asked = [check_states.take_telling(self._keys, each, self._checks[each].period) for each in names]
        turns = await self._redis.perform_all(asked)
        ours = [name for name, turn in zip(names, turns, strict=True) if turn]
        if not ours:
            return
        state = await state_of_app(self._app, self._redis, None)
        good_for = min(self._checks[each].period for each in ours)
        for inbox in sorted({inbox_of(each) for each in state.workers}):
            await self._orders.post(inbox, "check-expired", {"checks": ours}, expires=good_for)

    def _lapsed(self) -> list[str]:
        """The checks whose period has lapsed, or is about to. Those that were forgotten for a while are told of
        once."""
        now, found = trio.current_time(), list[str]()
        for name, check in self._checks.items():
            if self._due[name] <= now + TOGETHER * check.period:
                found.append(name)
                self._due[name] = max(self._due[name] + check.period, now + check.period / 2)
        return found
