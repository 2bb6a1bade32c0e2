"""Cluster observer: take snapshots of the waiting jobs and the workers on all brokers.

All brokers are asked at the same time. Without the default broker nothing can be decided. Any other that does
not answer is left out, and logged once.
"""

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import trio

from celery5.broker.call import Call
from celery5.broker.calls import commands, limits, queues
from celery5.broker.calls import scaling as scaling_calls
from celery5.broker.calls.limits import StoredOverrides
from celery5.broker.driver import AsyncDriver
from celery5.broker.keys import Keys, QueueKeys
from celery5.broker.routing.broker_router import run_all_async
from celery5.errors import BrokerError, BrokerUnavailable
from celery5.logs.log import Log
from celery5.protocol.brokers import DEFAULT_BROKER
from celery5.protocol.counts import format_count
from celery5.protocol.limits import DeclaredLimits
from celery5.protocol.scaling.snapshot import (
    BrokerVisibility,
    ClusterSnapshot,
    make_snapshot,
    make_task_constraints,
    merge_snapshots,
    update_visibility,
)
from celery5.protocol.shards import get_queue_of_shard, take_queues

REPLY_TIMEOUT = 2.0
"""Seconds in which a broker must answer."""
UNREACHABLE_PAUSE = 1.0
"""Seconds for which a broker that did not answer is not asked again."""

T = TypeVar("T")


class TimeLimitedDriver:
    """A driver of one broker with a time limit.

    A broker that exceeds it counts as unreachable: BrokerUnavailable is raised.
    """

    def __init__(self, *, redis: AsyncDriver, broker: str) -> None:
        self._redis = redis
        self._broker = broker
        self._rests_until = 0.0

    async def perform(self, call: Call[T], /) -> T:
        """Perform one call."""
        return await self._in_time(lambda: self._redis.perform(call))

    async def perform_all(self, calls: Sequence[Call[T]], /) -> list[T]:
        """Perform several calls in one write."""
        return await self._in_time(lambda: self._redis.perform_all(calls))

    async def _in_time(self, trip: Callable[[], Awaitable[T]]) -> T:
        if trio.current_time() >= self._rests_until:
            with trio.move_on_after(REPLY_TIMEOUT):
                return await trip()
            self._rests_until = trio.current_time() + UNREACHABLE_PAUSE
        raise BrokerUnavailable(f"broker {self._broker} has not answered within {REPLY_TIMEOUT:g} s")


MAX_QUEUES = 64
"""The most queues of one broker that are read."""
SETTLE_SECONDS = scaling_calls.REPORT_TTL
"""Seconds after its return for which a broker still counts as unseen: until then all its workers have reported."""


class ClusterObserver:
    """Observes one application.

    Args:
        broker_connections: the drivers of the brokers by name, the default one first.
        find_broker: returns the name of a queue's broker.
    """

    def __init__(
        self,
        *,
        broker_connections: Mapping[str, AsyncDriver],
        find_broker: Callable[[str], str],
        keys: Keys,
        kinds: Mapping[str, str],
        declared_limits: Mapping[str, DeclaredLimits],
        known_queues: Collection[str],
        log: Log,
    ) -> None:
        self._brokers = broker_connections
        self._find_broker = find_broker
        self._keys = keys
        self._kinds = kinds
        self._declared_limits = declared_limits
        self._known_queues = known_queues
        self._log = log
        self._queues: dict[str, QueueKeys] = {}
        self._looked_at: dict[str, int] = {}
        self._too_many: dict[str, int] = {}
        self._visibility = BrokerVisibility()

    @property
    def max_queues_observed(self) -> int:
        """Return the largest number of queues read from one broker."""
        return max(self._looked_at.values(), default=0)

    def reset(self) -> None:
        """Forget what was seen: another Scheduler had the turn."""
        self._visibility = BrokerVisibility()

    async def take_snapshot(self) -> ClusterSnapshot:
        """Return the snapshot of all brokers. Raises BrokerError without the default broker."""
        found = await run_all_async([partial(self._observe_broker, broker) for broker in self._brokers])
        parts: list[ClusterSnapshot] = []
        unreachable: dict[str, BrokerError] = {}
        for broker, part in zip(self._brokers, found, strict=True):
            if not isinstance(part, BrokerError):
                parts.append(part)
            elif broker == DEFAULT_BROKER:
                raise part
            else:
                unreachable[broker] = part
        self._update_visibility(unreachable)
        return merge_snapshots(parts, self._visibility.unreachable)

    def _update_visibility(self, unreachable: Mapping[str, BrokerError]) -> None:
        before, now = self._visibility, trio.current_time()
        self._visibility = update_visibility(before, unreachable, now, settle_seconds=SETTLE_SECONDS)
        for broker in self._visibility.until.keys() - before.until.keys():
            self._log.event(
                "autoscale:broker-lost",
                "warning",
                broker=broker,
                why=str(unreachable[broker]),
                hint=_MEANWHILE,
            )
        for broker in before.until.keys() - self._visibility.until.keys():
            self._log.event("autoscale:broker-recovered", "info", broker=broker)

    async def _observe_broker(self, broker: str) -> ClusterSnapshot:
        """Return the snapshot of one broker."""
        redis, keys = self._brokers[broker], self._keys
        calls: list[Call[Any]] = [
            queues.list_queues(keys),
            commands.list_paused_queues(keys),
            limits.list_overrides(keys),
        ]
        names, paused, imposed = await redis.perform_all(calls)
        censuses = await redis.perform_all(
            [
                scaling_calls.measure_load(keys, self._queue(name))
                for name in self._select_queues(broker, names)
            ]
        )
        workers = sorted({name for census in censuses for name in census.workers})
        reports = await redis.perform(scaling_calls.get_reports(keys, workers)) if workers else {}
        overrides: StoredOverrides = imposed
        constraints = make_task_constraints(
            self._kinds,
            self._declared_limits,
            limits=overrides.effective_limits,
            suspended=overrides.suspended,
            paused=paused,
        )
        return make_snapshot(censuses, reports, constraints)

    def _select_queues(self, broker: str, names: Sequence[str]) -> list[str]:
        """Return which of the queues known to a broker are read.

        A queue that has moved is read only where it is served.
        """
        here = [name for name in names if self._find_broker(name) == broker]
        known = sorted(here, key=lambda name: get_queue_of_shard(name) not in self._known_queues)
        looked_at = take_queues(known, MAX_QUEUES)
        if len(here) > len(looked_at) and self._too_many.get(broker) != len(here):
            why = f"{format_count(len(here), 'queue')}: only {MAX_QUEUES} of them are looked at"
            self._log.event("autoscale:failed", "warning", of="queues", broker=broker, why=why)
        self._too_many[broker], self._looked_at[broker] = len(here), len(looked_at)
        return looked_at

    def _queue(self, name: str) -> QueueKeys:
        return self._queues.setdefault(name, self._keys.for_queue(name))


_MEANWHILE = "decided by what is on the others; there will be no fewer workers before it is seen again"
