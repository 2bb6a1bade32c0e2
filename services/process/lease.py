"""Renew this worker's leases by heartbeats: three in each lease, and fewer while it is idle and one of many.

An idle worker sends them up to a minute apart, and its lease in Redis lasts for three of these intervals. The
worker itself treats this lease as not valid: before it begins a job, it renews the lease for the usual time. So a
lease in Redis is long only while no job depends on it.

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
from celery5.protocol.process.wake_ups import (
    HEARTBEATS_PER_LEASE,
    get_heartbeat_interval,
    get_next_tick,
    get_spread,
)
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
    `idle_interval`: the seconds between its renewals while it is idle and one of many workers; else 0.
    """

    def __init__(self, *, seconds: float, sidecar_memory: SidecarMemory | None = None) -> None:
        self.seconds = seconds
        self.is_lost = False
        self.expires_at = 0.0
        self.idle_interval = 0.0
        self._sidecar_memory = sidecar_memory
        self._idle_until = 0.0
        self._renewed = trio.Event()
        self._requested = trio.Event()

    def request_renewal(self) -> None:
        """Request a renewal of the lease now."""
        self._requested.set()

    async def wait_until_requested(self) -> None:
        """Wait until a renewal is requested."""
        await self._requested.wait()
        self._requested = trio.Event()

    def mark_idle(self, requested_at: float, interval: float) -> None:
        """Note that Redis keeps the lease for three such intervals, but that no job may begin before the next renewal.

        Args:
            requested_at: When the call was sent (`now()`).
            interval: Seconds until it is renewed again, at most.
        """
        self.expires_at = requested_at
        self.idle_interval = interval
        self._idle_until = requested_at + HEARTBEATS_PER_LEASE * interval

    def mark_renewed(self, requested_at: float) -> None:
        """Note that Redis has renewed the lease, by a call that was sent at `requested_at` (`now()`)."""
        self.expires_at = max(self.expires_at, requested_at + self.seconds)
        self.idle_interval = self._idle_until = 0.0
        self._renewed.set()
        self._renewed = trio.Event()

    async def wait_until_valid(self) -> None:
        """Wait until the lease is known to be valid; for ever in a worker that has lost it."""
        while self.is_lost or not self.is_valid():
            await self._renewed.wait()

    async def confirm(self) -> None:
        """Wait until the lease is known to be valid, and have it renewed if it is not."""
        if not self.is_valid():
            self.request_renewal()
        await self.wait_until_valid()

    @property
    def is_held(self) -> bool:
        """Whether Redis has the lease, as far as this worker knows. An idle worker's lease is held, but not valid."""
        return not self.is_lost and (self.is_valid() or now() < self._idle_until)

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


IDLE_LEASES = 3
"""A worker is idle after so many leases without a job."""
LAPSE_DELAY = 0.02
"""Seconds after the end of another worker's lease at which a heartbeat checks it."""
MIN_INTERVAL = 0.05
"""The least seconds between two heartbeats."""


class SidecarBeats(Protocol):
    """Renews the leases when there are no heartbeats."""

    def report_beat(self, worker: str, queues: tuple[str, ...], interval: float, /) -> bool:
        """Report a renewal; the next one comes in `interval` seconds.

        Return False, once, when there is no sidecar process any more.
        """
        ...


class CountsJobs(Protocol):
    """Counts the jobs of a worker."""

    settled_count: int

    def __len__(self) -> int:
        """Return how many it holds."""
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
        """Return the seconds between the time from which a job could have run and its start; never less than 0.

        That is the time of its entry, when a countdown or the delay of a retry is over. Where something else has held
        it until the entry, such as a limit, the entry says since when.
        """
        try:
            # In ms. The time of an entry has 13 digits until the year 2286.
            entered = delivery.since or int(delivery.entry[:13])
        except ValueError:  # it was put there by hand
            return 0.0
        wait = delivery.started + self._ahead - entered / 1000
        return max(0.0, wait)  # max() would take longer than all the rest


HeartbeatListener = Callable[[QueueKeys, HeartbeatReply], float | None]
"""Called with each reply. Returns the seconds after which it needs the next one; None for the usual interval."""


class Heartbeat:
    """Renews the leases of one worker on all of its queues.

    Args:
        counted_jobs: The jobs of this worker: without any it sends fewer heartbeats. None: something else needs its
            heartbeats, so it always sends three in a lease.
    """

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
        counted_jobs: CountsJobs | None,
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
        self._workers = self._fewest_workers = 1
        self._draw = random()
        self._jobs = counted_jobs
        self._settled_count = 0
        self._busy_at = now()
        self._next_at = 0.0

    def beat_now(self) -> None:
        """Send a heartbeat now: its reply has news."""
        self._lease.request_renewal()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Send heartbeats until cancelled.

        Raises:
            LeaseLost: Other workers have taken this one for dead.
        """
        await self.beat()
        task_status.started()
        while True:
            with trio.move_on_at(self._get_next_time()):
                await self._lease.wait_until_requested()
            retry_interval = min(SHORT_RETRY_INTERVAL, self._lease.seconds / HEARTBEATS_PER_LEASE)
            await retry_until_available(self.beat, self._outages, retry_interval)

    async def beat(self) -> None:
        """Renew every lease, and pass the replies to the listeners."""
        sent_at, idle_interval = now(), self._get_idle_interval()
        replies = await self._redis.perform_all(self._make_calls(idle_interval))
        self._lapse_in = min(
            [reply.lapse_in for reply in replies if reply.lapse_in is not None], default=math.inf
        )
        self._workers = max((reply.workers for reply in replies), default=1)
        self._fewest_workers = min((reply.workers for reply in replies), default=1)
        self._requested_in = math.inf
        for keys, reply in zip(self._consumed, replies, strict=True):
            if not reply.alive:
                raise self._lease.mark_lost(
                    f"{self._worker} was silent for longer than its lease on queue {keys.queue}"
                )
            for listener in self._listeners:
                delay = listener(keys, reply)
                self._requested_in = self._requested_in if delay is None else min(self._requested_in, delay)
        if not idle_interval:
            self._lease.mark_renewed(sent_at)
        elif not self._jobs:
            self._lease.mark_idle(sent_at, idle_interval)
        else:  # a job has come meanwhile: Redis must not keep the lease for longer than this worker does
            self._lease.request_renewal()
        replied_at = trio.current_time()
        self._next_at = (
            get_next_tick(replied_at, idle_interval)
            if idle_interval
            else replied_at + self._lease.seconds / HEARTBEATS_PER_LEASE
        )
        if self._sidecar is not None and not self._sidecar.report_beat(
            self._worker, self._queues, self._next_at - replied_at
        ):
            self._log.event("sidecar:lost", "warning", hint=_HINT)

    def _get_idle_interval(self) -> float:
        """Return the seconds until the next heartbeat if this worker is idle and one of many; else 0."""
        if self._jobs is None:
            return 0.0
        settled_count = self._jobs.settled_count
        if len(self._jobs) or settled_count != self._settled_count:
            self._settled_count, self._busy_at = settled_count, now()
        if now() < self._busy_at + IDLE_LEASES * self._lease.seconds:
            return 0.0
        interval = get_heartbeat_interval(self._fewest_workers, lease=self._lease.seconds, is_idle=True)
        return interval if interval > self._lease.seconds / HEARTBEATS_PER_LEASE else 0.0

    def _get_next_time(self) -> float:
        """Return when the next heartbeat is sent, on Trio's clock.

        It is early when a listener wants it, or when another worker's lease would end before, which that of a live
        worker never does. So a death is noticed at once, and not up to a third of a lease later. All workers notice it,
        so they spread their heartbeats.
        """
        # Another idle worker notices it: together they send thirty heartbeats in a lease.
        lapse_in = math.inf if self._lease.idle_interval else self._lapse_in + LAPSE_DELAY
        sooner = min(lapse_in, self._requested_in) + get_spread(self._workers, self._draw)
        return min(self._next_at, trio.current_time() + max(sooner, MIN_INTERVAL))

    def _make_calls(self, idle_interval: float) -> list[Call[HeartbeatReply]]:
        lease, idle_lease = self._lease.seconds, HEARTBEATS_PER_LEASE * idle_interval or None
        return [
            leases.renew_lease(keys, self._worker, lease=lease, idle_lease=idle_lease)
            for keys in self._consumed
        ]


_HINT = "a job that blocks the loop for longer than the lease is given to others, until this process is started again"
