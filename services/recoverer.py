"""Recoverer: puts back the jobs of workers that died (I1, I3).

Floor: services. Reads: the queues' leases and pending jobs. Writes: what `recover.lua` says.

The Heartbeat says when a lease has lapsed. After an outage all leases may have lapsed while their workers live, so
nobody is judged until this worker's own heart has beaten steadily for a while: whatever kept it from beating, be it a
lost connection or a server that refused, may have kept others too.
"""

import math
from collections.abc import Sequence
from typing import Protocol

import trio

from celery5.broker import calls
from celery5.broker.call import Call
from celery5.broker.calls import Pulse, Recovered
from celery5.broker.keys import QueueKeys
from celery5.errors import BrokerReplied, BrokerUnavailable
from celery5.log import Log
from celery5.services.lease import Lease

PORTION = 100
"""Jobs in one trip."""
RETURNING = 5.0
"""Seconds that live workers get to come back after an outage before they are judged."""
STEADY = 0.7
"""Part of a lease. With three beats in each, a longer silence is a beat that was missed."""


class Performs(Protocol):
    """Makes one trip to Redis."""

    async def perform(self, call: Call[Recovered], /) -> Recovered: ...


class Recoverer:
    """Recovers lapsed workers on the queues that this worker consumes."""

    def __init__(
        self,
        *,
        redis: Performs,
        consumed: Sequence[QueueKeys],
        lease: Lease,
        log: Log,
        max_deliveries: int,
        results_ttl: float,
    ) -> None:
        self._redis = redis
        self._consumed = consumed
        self._wait = min(lease.seconds, RETURNING)
        self._silence = lease.seconds * STEADY
        self._steady_since = self._heard = -math.inf
        self._log = log
        self._max_deliveries = max_deliveries
        self._ttl = results_ttl
        self._lapsed = trio.Event()

    def hear(self, keys: QueueKeys, pulse: Pulse) -> None:
        """The Heartbeat's news of one queue."""
        now = trio.current_time()
        if now > self._heard + self._silence:
            self._steady_since = now
        self._heard = now
        if pulse.lapsed:
            self._lapsed.set()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Recover whenever a lease has lapsed."""
        task_status.started()
        while True:
            await self._lapsed.wait()
            self._lapsed = trio.Event()
            while trio.current_time() < self._steady_since + self._wait:  # noqa: ASYNC110  it moves
                await trio.sleep_until(self._steady_since + self._wait)
            try:
                await self.recover()
            except (BrokerUnavailable, BrokerReplied) as error:
                self._log.event("recoverer:failed", "warning", why=str(error))

    async def recover(self) -> int:
        """One pass over all queues. Gives how many jobs were put back or buried."""
        total = 0
        for keys in self._consumed:
            call = calls.recover(
                keys, worker="", max_deliveries=self._max_deliveries, limit=PORTION, ttl=self._ttl
            )
            while (done := await self._redis.perform(call)).worker:
                total += done.back + done.buried
                self._log.event(
                    "recoverer:recovered",
                    "warning",
                    dead_worker=done.worker,
                    queue=keys.queue,
                    put_back=done.back,
                    buried=done.buried,
                )
        return total
