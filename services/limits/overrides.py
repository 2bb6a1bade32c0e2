"""Impositions: keeps this worker at what was imposed on its tasks from outside, and has a task suspended for all
workers when its circuit breaker opens (C97, C98).

What is imposed lies in Redis and outlives workers: one that begins, or whose connection was away, asks for
it; so does
every worker at each third beat of its heart: an idle one sends less than a command in a second.
"""

import math
import time
from collections.abc import Mapping
from typing import Any, TypeVar

import trio

from celery5.broker.calls import limits
from celery5.broker.calls.jobs import HeartbeatReply
from celery5.broker.driver import AsyncDriver
from celery5.broker.keys import Keys, QueueKeys
from celery5.errors import BrokerError, BrokerUnavailable
from celery5.logs.log import Log
from celery5.protocol.limits import LimitOverride, Suspension
from celery5.services.health.circuits import BreakerTrip, CircuitBreakers
from celery5.services.limits.admission_state import AdmissionState
from celery5.services.process.broker_outages import is_key_corrupt
from celery5.services.worker.lease import WorkerIdentity
from celery5.tasks.task import Task

AGAIN = 1.0
"""Seconds until AsyncDriver is asked again, when it did not serve."""
REPAIRED = 5.0
"""Seconds until a key is read again that another program has spoilt."""
HEARTBEATS_PER_CHECK = 3
BREAKER_NAME = "breaker"
"""Who suspends a task whose circuit breaker has opened."""

T = TypeVar("T")


class LimitOverrides:
    """What was imposed on the tasks of one worker."""

    def __init__(
        self,
        *,
        identity: WorkerIdentity,
        redis: AsyncDriver,
        keys: Keys,
        tasks: Mapping[str, Task[..., Any]],
        admission: AdmissionState,
        circuit_breakers: CircuitBreakers,
        log: Log,
        breaker_suspends: bool,
    ) -> None:
        self._redis = redis
        self._keys = keys
        self._first = identity.consumed[0].queue if identity.consumed else ""
        self._tasks = tasks
        self._turnstile = admission
        self._log = log
        self._worker = identity.worker
        self._limits: Mapping[str, LimitOverride] = {}
        self._suspended: Mapping[str, Suspension] = {}
        self._tripped: dict[str, Suspension] = {}
        self._news = trio.Event()
        self._beats = 0
        self._trips = circuit_breakers.open_trips_channel() if breaker_suspends else None

    @property
    def channels(self) -> list[str]:
        """The channels to listen to."""
        return [self._keys.limits]

    def on_message(self, _channel: bytes, _payload: bytes) -> None:
        """Something was imposed, or taken back."""
        self._news.set()

    def recheck(self) -> None:
        """The connection was away: something may have been missed."""
        self._news.set()

    def on_heartbeat(self, keys: QueueKeys, _pulse: HeartbeatReply) -> None:
        """At each third beat of the heart, once for all queues: what was missed is made good."""
        if keys.queue == self._first:
            self._beats += 1
            if self._beats % HEARTBEATS_PER_CHECK == 0:
                self._news.set()

    async def _receive_trips(self, trips: trio.MemoryReceiveChannel[BreakerTrip]) -> None:
        """Note each task whose circuit breaker has opened: no worker is to run it for as long."""
        by = f"{BREAKER_NAME} of {self._worker}"
        async for trip in trips:
            now = time.time()
            until = now + trip.open_until - trio.current_time()
            self._tripped[trip.task] = Suspension(
                why=trip.why, by=by, since=round(now, 3), until=round(until, 3)
            )
            self._news.set()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Know what is imposed, until cancelled."""
        await self._look()
        async with trio.open_nursery() as nursery:
            if self._trips is not None:
                nursery.start_soon(self._receive_trips, self._trips)
            task_status.started()
            await self._follow()

    async def _follow(self) -> None:
        while True:
            with trio.move_on_after(self._next()):
                await self._news.wait()
            self._news = trio.Event()
            try:
                await self._suspend()
                await self._look()
                await self._resume()
            except BrokerUnavailable:
                await trio.sleep(AGAIN)
                self._news.set()
            except BrokerError as error:
                self._log.event("limits:read-failed", "warning", why=str(error))
                if is_key_corrupt(error):
                    await trio.sleep(REPAIRED)
                    self._news.set()

    async def _suspend(self) -> None:
        for task, what in list(self._tripped.items()):
            before = self._suspended.get(task)
            if before is None or before.until:  # what an operator has suspended stays so
                await self._redis.perform(limits.suspend_if_unchanged(self._keys, task, what, before))
            self._tripped.pop(task, None)

    async def _look(self) -> None:
        found = await self._redis.perform(limits.list_overrides(self._keys))
        if found.limits == self._limits and found.suspended == self._suspended:
            return
        for task in self._tasks:
            self._tell(task, found.limits.get(task), found.suspended.get(task))
        self._limits, self._suspended = found.limits, found.suspended
        self._turnstile.set_overrides(self._limits, self._suspended)

    async def _resume(self) -> None:
        """Suspensions that were for a while are taken back, by whoever comes first."""
        found = [(task, what) for task, what in self._suspended.items() if _is_over(what)]
        for task, what in found:
            await self._redis.perform(limits.resume_task(self._keys, task, what))
        if found:
            await self._look()

    def _tell(self, task: str, limit: LimitOverride | None, suspended: Suspension | None) -> None:
        if limit != self._limits.get(task):
            told = (
                {"limit": limit.limit, "rate": limit.rate, "by": limit.by} if limit else {"limit": "its own"}
            )
            self._log.event("task:limited", "warning", task=task, **told)
        before = self._suspended.get(task)
        if suspended is not None and before is None:
            self._log.event("task:suspended", "warning", task=task, why=suspended.why, by=suspended.by)
        elif suspended is None and before is not None:
            self._log.event("task:resumed", "warning", task=task)

    def _next(self) -> float:
        """Seconds until the first suspension that is for a while is over."""
        ends = [what.until - time.time() for what in self._suspended.values() if what.until]
        return max(0.0, min(ends, default=math.inf))


def _is_over(what: Suspension) -> bool:
    return bool(what.until) and what.until <= time.time()
