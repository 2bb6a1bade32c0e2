"""Recoverer: puts back the jobs of workers that died (I1, I3).

The Heartbeat says when a lease has lapsed. Whether its worker has died is decided in
`protocol/process/liveness.py`, from the
answers to this worker's own heartbeats, and only when one was just answered: while Redis does not answer, no worker
is judged. The script decides once more, for each worker, from that heartbeat (`calls.HeartbeatEvidence`).
"""

from collections.abc import Sequence

import trio

from celery5.broker.calls import jobs
from celery5.broker.calls.jobs import HeartbeatEvidence, HeartbeatReply
from celery5.broker.driver import AsyncDriver
from celery5.broker.keys import QueueKeys
from celery5.errors import BrokerReplied, BrokerUnavailable
from celery5.logs.log import Log
from celery5.protocol.process.liveness import Heartbeats
from celery5.services.worker.lease import Lease

BATCH = 16
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
                    limit=BATCH,
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
