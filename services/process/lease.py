"""Renew this worker's leases by heartbeats.

While a job blocks the loop or holds the interpreter's lock there are no heartbeats, and the sidecar process renews the
lease instead (`processes/watch/sidecar.py`). So a long job on a live worker is never given to another worker.
"""

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from random import random
from typing import Protocol

import trio

from celery5.broker.call import Call
from celery5.broker.calls import leases
from celery5.broker.calls.leases import HeartbeatReply
from celery5.broker.driver import AsyncDriver
from celery5.broker.keys import QueueKeys
from celery5.errors import LeaseLost
from celery5.logs.log import Log
from celery5.protocol.job.delivery import Delivery
from celery5.protocol.process.wake_ups import get_spread
from celery5.services.process.broker_outages import SHORT_RETRY_INTERVAL, OutageLog, retry_until_available
from celery5.services.process.shared_memory import SidecarMemory

_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


MARGIN_FRACTION = 1 / 20
"""The last part of a lease, in which a worker acts as if the lease had ended: it cancels the jobs that must not outlast
the lease, and they have this time to end."""
CHECK_INTERVAL = 1.0
"""The most seconds between readings of the clock: a timer fires late on a machine that was suspended."""

now = partial(time.clock_gettime, _CLOCK)
"""Seconds on a clock that goes on while the machine is suspended, where there is one."""


class Lease:
    """This worker's right to settle jobs: how long it lasts unrenewed, in seconds, and whether it was lost.

    `expires_at` is when it ends unless it is renewed, on the clock of `now()`. A worker that was frozen for longer
    holds jobs that others may have finished long ago: it starts none before its lease is valid again.
    """

    def __init__(self, *, seconds: float, sidecar_memory: SidecarMemory | None = None) -> None:
        self.seconds = seconds
        self.is_lost = False
        self.expires_at = 0.0
        self._sidecar_memory = sidecar_memory
        self._renewed = trio.Event()

    def mark_renewed(self, requested_at: float) -> None:
        """Note that Redis has renewed the lease, by a call that was sent at `requested_at` (`now()`)."""
        self.expires_at = max(self.expires_at, requested_at + self.seconds)
        self._renewed.set()
        self._renewed = trio.Event()

    async def wait_until_valid(self) -> None:
        """Wait until the lease is known to be valid; for ever in a worker that has lost it."""
        while self.is_lost or not self.is_valid():
            await self._renewed.wait()

    def is_valid(self) -> bool:
        """Return whether the lease is valid. The sidecar may have renewed it while a job blocked the loop."""
        if self._sidecar_memory is not None:
            self.expires_at = max(self.expires_at, self._sidecar_memory.lease_until)
        return now() < self.expires_at

    async def wait_for_expiry(self) -> None:
        """Wait until the lease is about to end, or has ended, by this worker's clock."""
        margin = self.seconds * MARGIN_FRACTION
        while self.is_valid() and (left := self.expires_at - margin - now()) > 0:  # noqa: ASYNC110  the clock changes
            await trio.sleep(min(left, max(margin, CHECK_INTERVAL)))

    def mark_lost(self, why: str) -> LeaseLost:
        """Mark the lease as lost, and return the error to raise."""
        self.is_lost = True
        return LeaseLost(why)


HEARTBEATS_PER_LEASE = 3
"""Heartbeats in one lease."""
LAPSE_DELAY = 0.02
"""Seconds after the end of another worker's lease at which a heartbeat checks it."""
MIN_INTERVAL = 0.05
"""The least seconds between two heartbeats."""


class SidecarBeats(Protocol):
    """Renews the leases when there are no heartbeats."""

    def report_beat(self, worker: str, queues: tuple[str, ...], /) -> bool:
        """Report a renewal. Return False, once, when there is no sidecar process any more."""
        ...


class RedisClock:
    """The clock of Redis, as far as the replies to heartbeats tell: jobs are dated by it."""

    def __init__(self) -> None:
        self._ahead = 0.0
        """Seconds by which it is ahead of the clock of this machine."""

    def on_heartbeat(self, keys: QueueKeys, reply: HeartbeatReply) -> None:
        """Take the time of the reply to a heartbeat."""
        self._ahead = reply.at / 1000 - time.time()

    def measure_wait(self, delivery: Delivery) -> float:
        """Return the seconds between the entry of a job on its stream and its start; never less than 0.

        The entry is made when the job may run: a countdown or the delay of a retry is over then, and a limit has
        admitted it.
        """
        try:
            entered = int(delivery.entry[:13])  # ms; it has 13 digits until the year 2286
        except ValueError:  # it was put there by hand
            return 0.0
        wait = delivery.started + self._ahead - entered / 1000
        return max(0.0, wait)  # max() would take longer than all the rest


HeartbeatListener = Callable[[QueueKeys, HeartbeatReply], float | None]
"""Called with each reply. Returns the seconds after which it needs the next one; None for the usual interval."""


class Heartbeat:
    """Renews the leases of one worker on all of its queues, three times in each lease."""

    def __init__(
        self,
        *,
        redis: AsyncDriver,
        sidecar: SidecarBeats | None,
        consumed: Sequence[QueueKeys],
        lease: Lease,
        log: Log,
        worker: str,
        heartbeat_listeners: Sequence[HeartbeatListener],
    ) -> None:
        self._redis = redis
        self._sidecar = sidecar
        self._consumed = consumed
        self._queues = tuple(keys.queue for keys in consumed)
        self._lease = lease
        self._log = log
        self._worker = worker
        self._listeners = heartbeat_listeners
        self._outages = OutageLog(log, "heartbeat:missed", logs_repeats=True)
        self._lapse_in = self._requested_in = math.inf
        self._workers = 1
        self._draw = random()
        self._requested = trio.Event()

    def beat_now(self) -> None:
        """Send a heartbeat now: its reply has news."""
        self._requested.set()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Send heartbeats until cancelled.

        Raises:
            LeaseLost: Other workers have taken this one for dead.
        """
        await self.beat()
        task_status.started()
        while True:
            with trio.move_on_after(self._get_interval()):
                await self._requested.wait()
            self._requested = trio.Event()
            retry_interval = min(SHORT_RETRY_INTERVAL, self._lease.seconds / HEARTBEATS_PER_LEASE)
            await retry_until_available(self.beat, self._outages, retry_interval)

    async def beat(self) -> None:
        """Renew every lease, and pass the replies to the listeners."""
        sent_at = now()
        replies = await self._redis.perform_all(self._make_calls())
        self._lapse_in = min(
            [reply.lapse_in for reply in replies if reply.lapse_in is not None], default=math.inf
        )
        self._workers = max((reply.workers for reply in replies), default=1)
        self._requested_in = math.inf
        for keys, reply in zip(self._consumed, replies, strict=True):
            if not reply.alive:
                raise self._lease.mark_lost(
                    f"{self._worker} was silent for longer than its lease on queue {keys.queue}"
                )
            for listener in self._listeners:
                delay = listener(keys, reply)
                self._requested_in = self._requested_in if delay is None else min(self._requested_in, delay)
        self._lease.mark_renewed(sent_at)
        if self._sidecar is not None and not self._sidecar.report_beat(self._worker, self._queues):
            self._log.event("sidecar:lost", "warning", hint=_HINT)

    def _get_interval(self) -> float:
        """Return the seconds until the next heartbeat.

        It is early when a listener wants it, or when another worker's lease would end before, which that of a live
        worker never does. So a death is noticed at once, and not up to a third of a lease later. All workers notice it,
        so they spread their heartbeats.
        """
        sooner = min(self._lapse_in + LAPSE_DELAY, self._requested_in) + get_spread(self._workers, self._draw)
        return min(self._lease.seconds / HEARTBEATS_PER_LEASE, max(sooner, MIN_INTERVAL))

    def _make_calls(self) -> list[Call[HeartbeatReply]]:
        return [leases.renew_lease(keys, self._worker, lease=self._lease.seconds) for keys in self._consumed]


_HINT = "a job that blocks the loop for longer than the lease is given to others, until this process is started again"
