"""Leases: the Heartbeat keeps this worker's own alive, the Recoverer puts back the jobs of workers whose lease ended.

Should a job block the loop, or hold the interpreter's lock, the beats stay away, and the sidecar process renews the
lease instead (`processes/watch/sidecar.py`). So a long job on a live worker is never given to another.

Whether a worker has died is decided in `protocol/process/liveness.py`, from the answers to this worker's own
heartbeats, and only when one was just answered: while Redis does not answer, no worker is judged. The script decides
once more, for each worker, from that heartbeat (`HeartbeatEvidence`).
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import trio

from celery5.broker.call import Call
from celery5.broker.calls import jobs
from celery5.broker.calls.jobs import HeartbeatEvidence, HeartbeatReply
from celery5.broker.driver import AsyncDriver
from celery5.broker.keys import QueueKeys
from celery5.errors import BrokerError, BrokerReplied, BrokerUnavailable, LeaseLost
from celery5.logs.log import Log
from celery5.protocol.process.liveness import Heartbeats
from celery5.services.process.broker_outages import is_transient
from celery5.services.process.shared_memory import SidecarMemory

_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


MARGIN_FRACTION = 1 / 20
"""The last part of a lease, in which a worker acts as if the lease had ended: it cancels the jobs that must not outlast
the lease, and they have this time to end."""
CHECK_INTERVAL = 1.0
"""Seconds between looks at the clock, at least: a timer fires late on a machine that was suspended."""

now = partial(time.clock_gettime, _CLOCK)
"""Seconds on a clock that goes on while the machine is suspended, where there is one."""


class Lease:
    """This worker's right to settle jobs: how long it lasts unrenewed, in seconds, and whether it was lost.

    `until` is when it ends unless it is renewed, on the clock of `now()`. A worker that was frozen for longer wakes
    with jobs in its hands that others may have finished long ago: it begins none before it is `sure` of its lease (I3).
    """

    def __init__(self, *, seconds: float, sidecar_memory: SidecarMemory | None = None) -> None:
        self.seconds = seconds
        self.is_lost = False
        self.expires_at = 0.0
        self._black_box = sidecar_memory
        self._renewed = trio.Event()

    def mark_renewed(self, requested_at: float) -> None:
        """Redis has renewed it, and was `asked` to at that time (`now()`)."""
        self.expires_at = max(self.expires_at, requested_at + self.seconds)
        self._renewed.set()
        self._renewed = trio.Event()

    async def wait_until_valid(self) -> None:
        """Return once the lease is known to last; for ever in a worker that has lost it."""
        while self.is_lost or not self.is_valid():
            await self._renewed.wait()

    def is_valid(self) -> bool:
        """Whether it is known to last. While a job blocked the loop, the sidecar process may have renewed it."""
        if self._black_box is not None:
            self.expires_at = max(self.expires_at, self._black_box.lease_until)
        return now() < self.expires_at

    async def wait_for_expiry(self) -> None:
        """Return when the lease is about to end, or has ended, as far as this worker's clock says."""
        margin = self.seconds * MARGIN_FRACTION
        while self.is_valid() and (left := self.expires_at - margin - now()) > 0:  # noqa: ASYNC110  the clock changes
            await trio.sleep(min(left, max(margin, CHECK_INTERVAL)))

    def mark_lost(self, why: str) -> LeaseLost:
        """The lease is gone. Gives the error to raise."""
        self.is_lost = True
        return LeaseLost(why)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerIdentity:
    """One incarnation of a worker, as its queues know it."""

    # The name of the incarnation, under which it is a consumer of its queues.
    worker: str
    # Its right to settle what it reads.
    lease: Lease
    # The queues that it consumes.
    consumed: Sequence[QueueKeys]


BEATS_PER_LEASE = 3
"""Beats in one lease."""
LAPSE_DELAY = 0.02
"""Seconds after a lapse that it is looked for."""
MIN_INTERVAL = 0.05
"""Seconds between two beats at least."""
RETRY_INTERVAL = 0.2
"""Seconds between attempts while Redis is away."""


class SidecarBeats(Protocol):
    """Steps in when the beats stay away."""

    def report_beat(self, worker: str, queues: tuple[str, ...], /) -> bool:
        """The leases were renewed. False, once, when there is no sidecar process any more."""
        ...


HeartbeatListener = Callable[[QueueKeys, HeartbeatReply], float | None]
"""Called with each answer. Returns the seconds after which it needs the next one; None for the usual pause."""


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
        self._wake = heartbeat_listeners
        self._missed = False
        self._lapse_in = self._wanted_in = math.inf
        self._asked = trio.Event()

    def beat_now(self) -> None:
        """There is news that a beat brings: beat now."""
        self._asked.set()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Beat until cancelled. Raises LeaseLost when others have taken this worker for dead."""
        await self.beat()
        task_status.started()
        while True:
            with trio.move_on_after(self._pause()):
                await self._asked.wait()
            self._asked = trio.Event()
            while not await self._beaten_now():  # noqa: ASYNC110  it is Redis that changes
                await trio.sleep(min(RETRY_INTERVAL, self._lease.seconds / BEATS_PER_LEASE))

    async def beat(self) -> None:
        """Renew every lease, and pass on what Redis tells of due jobs and lapsed workers."""
        asked = now()
        pulses = await self._redis.perform_all(self._calls())
        self._lapse_in = min(
            [each.lapse_in for each in pulses if each.lapse_in is not None], default=math.inf
        )
        self._wanted_in = math.inf
        for keys, pulse in zip(self._consumed, pulses, strict=True):
            if not pulse.alive:
                raise self._lease.mark_lost(
                    f"{self._worker} was silent for longer than its lease on queue {keys.queue}"
                )
            for tell in self._wake:
                wanted = tell(keys, pulse)
                self._wanted_in = self._wanted_in if wanted is None else min(self._wanted_in, wanted)
        self._lease.mark_renewed(asked)
        if self._sidecar is not None and not self._sidecar.report_beat(self._worker, self._queues):
            self._log.event("sidecar:lost", "warning", hint=_ALONE)

    def _pause(self) -> float:
        """Seconds until the next beat: sooner when another's lease would lapse before, which a live worker's never
        does, or when somebody wants it. So a death is noticed when it can be known, and not up to a third of a lease
        later."""
        sooner = min(self._lapse_in + LAPSE_DELAY, self._wanted_in)
        return min(self._lease.seconds / BEATS_PER_LEASE, max(sooner, MIN_INTERVAL))

    async def _beaten_now(self) -> bool:
        """Beat; False when Redis is away. It is told once: jobs wait for the beat after an outage (`Lease.sure`)."""
        try:
            await self.beat()
        except BrokerError as error:
            if not is_transient(error):
                raise
            self._log.event("heartbeat:missed", "debug" if self._missed else "warning", why=str(error))
            self._missed = True
            return False
        self._missed = False
        return True

    def _calls(self) -> list[Call[HeartbeatReply]]:
        return [jobs.renew_lease(keys, self._worker, lease=self._lease.seconds) for keys in self._consumed]


_ALONE = "a job that blocks the loop for longer than the lease is given to others, until this process is started anew"


RECOVERY_BATCH = 16
"""Jobs in one trip: Redis does nothing else meanwhile. One that held a slot costs about 10 commands."""


class Recoverer:
    """Recovers lapsed workers on the queues that this worker consumes."""

    def __init__(
        self,
        *,
        redis: AsyncDriver,
        consumed: Sequence[QueueKeys],
        lease: Lease,
        log: Log,
        worker: str,
        max_deliveries: int,
        results_ttl: float,
        message_limit: int,
    ) -> None:
        self._redis = redis
        self._consumed = consumed
        self._lease = lease
        self._log = log
        self._worker = worker
        self._max_deliveries = max_deliveries
        self._ttl = results_ttl
        self._message_limit = message_limit
        # For each queue: in a cluster each may be on a server of its own.
        self._heartbeats = {keys.queue: Heartbeats(lease=lease.seconds) for keys in consumed}
        self._pulses: dict[str, HeartbeatReply] = {}
        self._lapsed = trio.Event()

    def on_heartbeat(self, keys: QueueKeys, pulse: HeartbeatReply) -> float | None:
        """Take the Heartbeat's answer for one queue. Return the seconds after which this worker may judge those whose
        lease has lapsed by now."""
        now = trio.current_time()
        heartbeats = self._heartbeats[keys.queue].with_answer(now, at=pulse.at / 1000)
        self._heartbeats[keys.queue], self._pulses[keys.queue] = heartbeats, pulse
        if self._judge_on(keys) is not None:
            self._lapsed.set()
            return None
        return heartbeats.seconds_until_judging(now) if pulse.lapsed else None

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Recover whenever a lease has lapsed and its worker counts as dead."""
        task_status.started()
        while True:
            await self._lapsed.wait()
            self._lapsed = trio.Event()
            try:
                await self.recover()
            except (BrokerUnavailable, BrokerReplied) as error:
                self._log.event("recoverer:failed", "warning", why=str(error))

    async def recover(self) -> int:
        """Make one pass over all queues. Return how many jobs were put back or buried."""
        total = 0
        for keys in self._consumed:
            # Decided anew for each trip, which takes one worker, or a portion of what it held.
            while (judge := self._judge_on(keys)) is not None:
                call = jobs.recover(
                    keys,
                    worker="",
                    max_deliveries=self._max_deliveries,
                    limit=RECOVERY_BATCH,
                    ttl=self._ttl,
                    message_limit=self._message_limit,
                    evidence=judge,
                )
                done = await self._redis.perform(call)
                if not done.worker:
                    break
                total += done.requeued + done.dead_lettered
                self._log.event(
                    "recoverer:recovered",
                    "warning",
                    dead_worker=done.worker,
                    queue=keys.queue,
                    requeued=done.requeued,
                    dead_lettered=done.dead_lettered,
                )
        return total

    def _judge_on(self, keys: QueueKeys) -> HeartbeatEvidence | None:
        """Return this worker as a judge of others on a queue; None while no lease has lapsed or it may judge nobody."""
        pulse = self._pulses.get(keys.queue)
        if pulse is None or not pulse.lapsed or self._lease.is_lost:
            return None
        if not self._heartbeats[keys.queue].may_judge(trio.current_time()):
            return None
        return HeartbeatEvidence(self._worker, pulse.at, self._lease.seconds)
