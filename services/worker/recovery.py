"""Recover the jobs of workers whose lease has ended.

Whether a worker has died is decided in `protocol/process/liveness.py`, from the replies to this worker's own
heartbeats, and only just after one: while Redis does not reply, no worker is taken for dead. The script decides once
more, for each worker, from that heartbeat (`HeartbeatEvidence`).
"""

from collections.abc import Mapping, Sequence

import trio

from celery5.broker.calls import leases
from celery5.broker.calls.leases import HeartbeatEvidence, HeartbeatReply
from celery5.broker.driver import AsyncDriver
from celery5.broker.keys import QueueKeys
from celery5.errors import BrokerReplied, BrokerUnavailable
from celery5.logs.log import Log
from celery5.protocol.process.liveness import Heartbeats
from celery5.services.job.job_middleware import JobMiddleware
from celery5.services.process.lease import Lease

RECOVERY_BATCH = 16
"""Jobs in one call: Redis does nothing else in that time. One that held a slot costs about 10 commands."""


class Recoverer:
    """Recovers lapsed workers on the queues that this worker consumes."""

    def __init__(
        self,
        *,
        redis: AsyncDriver,
        worker: str,
        lease: Lease,
        consumed: Sequence[QueueKeys],
        job_middleware: JobMiddleware,
        log: Log,
        max_deliveries: int,
        results_ttl: float,
        message_limit: int,
    ) -> None:
        self._redis = redis
        self._consumed = consumed
        self._lease = lease
        self._job_middleware = job_middleware
        self._log = log
        self._worker = worker
        self._max_deliveries = max_deliveries
        self._results_ttl = results_ttl
        self._message_limit = message_limit
        # For each queue: in a cluster each may be on its own server.
        self._heartbeats = {keys.queue: Heartbeats(lease=lease.seconds) for keys in consumed}
        self._replies: dict[str, HeartbeatReply] = {}
        self._lapsed = trio.Event()

    def on_heartbeat(self, keys: QueueKeys, reply: HeartbeatReply) -> float | None:
        """Take the reply for one queue. Return the seconds until this worker may judge those that have lapsed."""
        now = trio.current_time()
        steady_for = reply.steady_for if self._lease.idle_interval else 0.0
        heartbeats = self._heartbeats[keys.queue].with_answer(now, at=reply.at / 1000, steady_for=steady_for)
        self._heartbeats[keys.queue], self._replies[keys.queue] = heartbeats, reply
        if self._make_evidence(keys) is not None:
            self._lapsed.set()
            return None
        return heartbeats.seconds_until_judging(now) if reply.lapsed or reply.strays else None

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Recover whenever a lease has lapsed and its worker counts as dead."""
        task_status.started()
        while True:
            await self._lapsed.wait()
            self._lapsed = trio.Event()
            try:
                await self.recover()
            except (BrokerUnavailable, BrokerReplied) as error:
                self._log.event(
                    "recoverer:failed",
                    "debug" if self._log.lost_connections.explains(error) else "warning",
                    why=str(error),
                )

    async def recover(self) -> int:
        """Recover jobs on all queues. Return how many were requeued or dead-lettered."""
        total = 0
        for keys in self._consumed:
            # Decided again for each call, which recovers one worker, or a part of what it held.
            while (evidence := self._make_evidence(keys)) is not None:
                call = leases.recover(
                    keys,
                    worker="",
                    max_deliveries=self._max_deliveries,
                    limit=RECOVERY_BATCH,
                    ttl=self._results_ttl,
                    message_limit=self._message_limit,
                    evidence=evidence,
                    with_strays=self._replies[keys.queue].strays > 0,
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
                self._job_middleware.note_recovered(
                    done.worker, keys.queue, done.requeued + done.dead_lettered
                )
        return total

    async def recover_own(self, begun_entries: Mapping[str, Sequence[bytes]], /) -> None:
        """Put back what this worker itself holds, because an error ends it and nobody else notices that.

        Args:
            begun_entries: The entries that had begun, by queue: only these count as having taken it down.
        """
        for keys in self._consumed:
            call = leases.recover(
                keys,
                worker=self._worker,
                max_deliveries=self._max_deliveries,
                limit=RECOVERY_BATCH,
                ttl=self._results_ttl,
                message_limit=self._message_limit,
                begun_entries=begun_entries.get(keys.queue, ()),
            )
            while (await self._redis.perform(call)).has_more:
                pass

    def _make_evidence(self, keys: QueueKeys) -> HeartbeatEvidence | None:
        """Return the evidence for judging other workers on a queue; None while there is none or no lease has lapsed."""
        reply = self._replies.get(keys.queue)
        if reply is None or not (reply.lapsed or reply.strays) or self._lease.is_lost:
            return None
        if not self._heartbeats[keys.queue].may_judge(trio.current_time()):
            return None
        return HeartbeatEvidence(self._worker, reply.at, self._lease.seconds)
