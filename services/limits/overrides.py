"""Apply the limits and suspensions that were imposed on tasks, and suspend tasks whose circuit breaker opens.

They are stored in Redis and outlive workers. A worker reads them when it starts, after each lost connection, and at
every third heartbeat; so an idle worker sends less than one command in a second.
"""

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import trio

from celery5.broker.calls import limits
from celery5.broker.calls.leases import HeartbeatReply
from celery5.broker.driver import AsyncDriver
from celery5.broker.keys import Keys, QueueKeys
from celery5.broker.transient_errors import is_key_corrupt
from celery5.errors import BrokerError, BrokerUnavailable
from celery5.logs.log import Log
from celery5.protocol.limits import KIND_PREFIX, LimitOverride, Suspension
from celery5.protocol.process.wake_ups import get_next_tick
from celery5.protocol.task_kinds import TASK_KINDS
from celery5.services.health.circuits import BreakerTrip, CircuitBreakers
from celery5.services.limits.admission_state import AdmissionState
from celery5.services.process.broker_outages import retry_until_available
from celery5.services.process.lease import Lease
from celery5.tasks.task import Task

CORRUPT_KEY_DELAY = 5.0
"""Seconds until a key is read again that another program has overwritten."""
HEARTBEATS_PER_CHECK = 3
LAPSE_MARGIN = 0.2
"""Seconds after the Scheduler's limits should have lapsed when they are read again."""
BREAKER_NAME = "breaker"
"""The name under which a circuit breaker suspends a task."""


class LimitOverrides:
    """The limits and suspensions that operators and the Scheduler impose on the tasks of one worker."""

    def __init__(
        self,
        *,
        worker: str,
        consumed: Sequence[QueueKeys],
        redis: AsyncDriver,
        keys: Keys,
        tasks: Mapping[str, Task[..., Any]],
        admission: AdmissionState,
        circuit_breakers: CircuitBreakers,
        log: Log,
        breaker_suspends: bool,
        lease: Lease,
    ) -> None:
        self._redis = redis
        self._lease = lease
        self._keys = keys
        self._first_queue = consumed[0].queue if consumed else ""
        self._tasks = tasks
        self._admission = admission
        self._log = log
        self._worker = worker
        self._limits: Mapping[str, LimitOverride] = {}
        self._suspended: Mapping[str, Suspension] = {}
        self._imposed_until = math.inf
        self._tripped: dict[str, Suspension] = {}
        self._changed = trio.Event()
        self._heartbeat_count = 0
        self._is_idle = False
        self._breaker_trips = circuit_breakers.open_trips_channel() if breaker_suspends else None

    @property
    def channels(self) -> list[str]:
        """The channels to listen to."""
        return [self._keys.limits]

    def on_message(self, _channel: bytes, _payload: bytes) -> None:
        """Read the overrides: one was set or removed."""
        self._changed.set()

    def recheck(self) -> None:
        """Read the overrides: a message may have been missed while the connection was down."""
        self._changed.set()

    def on_heartbeat(self, keys: QueueKeys, _pulse: HeartbeatReply) -> None:
        """Read the overrides once in a lease, once for all queues, in case a message was lost.

        That is at every third heartbeat. An idle worker, one of many, sends few heartbeats and reads with each.
        """
        if keys.queue == self._first_queue:
            self._heartbeat_count += 1
            was_idle, self._is_idle = self._is_idle, self._lease.idle_interval > 0
            is_due = self._heartbeat_count % HEARTBEATS_PER_CHECK == 0 and not self._is_idle
            begins_to_idle = self._is_idle and not was_idle  # from then on `_get_wait` says when
            if is_due or begins_to_idle:
                self._changed.set()

    async def _receive_trips(self, trips: trio.MemoryReceiveChannel[BreakerTrip]) -> None:
        """Note each task whose circuit breaker has opened: no worker may run it until the breaker tries again."""
        by = f"{BREAKER_NAME} of {self._worker}"
        async for trip in trips:
            now = time.time()
            until = now + trip.open_until - trio.current_time()
            self._tripped[trip.task] = Suspension(
                why=trip.why, by=by, since=round(now, 3), until=round(until, 3)
            )
            self._changed.set()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Follow the overrides until cancelled."""
        await self._read_overrides()
        async with trio.open_nursery() as nursery:
            if self._breaker_trips is not None:
                nursery.start_soon(self._receive_trips, self._breaker_trips)
            task_status.started()
            await self._follow()

    async def _follow(self) -> None:
        while True:
            with trio.move_on_after(self._get_wait()):
                await self._changed.wait()
            self._changed = trio.Event()
            await retry_until_available(self._apply_changes, None)

    async def _apply_changes(self) -> None:
        try:
            await self._suspend_tasks()
            await self._read_overrides()
            await self._resume_tasks()
        except BrokerUnavailable:
            raise
        except BrokerError as error:
            self._log.event("limits:read-failed", "warning", why=str(error))
            if is_key_corrupt(error):
                await trio.sleep(CORRUPT_KEY_DELAY)
                self._changed.set()

    async def _suspend_tasks(self) -> None:
        for task, suspension in list(self._tripped.items()):
            before = self._suspended.get(task)
            if before is None or before.until:  # a suspension by an operator stays
                await self._redis.perform(limits.suspend_if_unchanged(self._keys, task, suspension, before))
            self._tripped.pop(task, None)

    async def _read_overrides(self) -> None:
        overrides = await self._redis.perform(limits.list_overrides(self._keys))
        effective = overrides.effective_limits
        self._imposed_until = (
            trio.current_time() + overrides.lapse + LAPSE_MARGIN if overrides.imposed.rules else math.inf
        )
        if effective == self._limits and overrides.suspended == self._suspended:
            return
        for task in (*self._tasks, *(KIND_PREFIX + kind for kind in TASK_KINDS)):
            self._log_changes(task, effective.get(task), overrides.suspended.get(task))
        self._limits, self._suspended = effective, overrides.suspended
        self._admission.set_overrides(self._limits, self._suspended)

    async def _resume_tasks(self) -> None:
        """Remove the suspensions that are over. Any worker may be the first to do so."""
        ended = [(task, suspension) for task, suspension in self._suspended.items() if _is_over(suspension)]
        for task, suspension in ended:
            await self._redis.perform(limits.resume_task(self._keys, task, suspension))
        if ended:
            await self._read_overrides()

    def _log_changes(self, task: str, limit: LimitOverride | None, suspended: Suspension | None) -> None:
        if limit != self._limits.get(task):
            fields = (
                {"limit": limit.limit, "rate": limit.rate, "by": limit.by} if limit else {"limit": "its own"}
            )
            self._log.event("task:limited", "warning", task=task, **fields)
        before = self._suspended.get(task)
        if suspended is not None and before is None:
            self._log.event("task:suspended", "warning", task=task, why=suspended.why, by=suspended.by)
        elif suspended is None and before is not None:
            self._log.event("task:resumed", "warning", task=task)

    def _get_wait(self) -> float:
        """Return the seconds until the first suspension that has an end is over, or the Scheduler's limits lapse.

        An idle worker, one of many, reads them no later than at its next heartbeat.
        """
        ends = [suspension.until - time.time() for suspension in self._suspended.values() if suspension.until]
        now = trio.current_time()
        ends.append(self._imposed_until - now)
        if interval := self._lease.idle_interval:
            ends.append(get_next_tick(now, interval) - now)
        return max(0.0, min(ends, default=math.inf))


def _is_over(suspension: Suspension) -> bool:
    return bool(suspension.until) and suspension.until <= time.time()
