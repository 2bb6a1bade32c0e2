"""Elect the worker process of the cluster that runs the timers with `on_leader`."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager

import trio

from celery5.broker.driver import AsyncDriver
from celery5.broker.keys import Keys
from celery5.errors import BrokerError
from celery5.logs.log import Log
from celery5.protocol.scheduling.timers import TimerStanding
from celery5.scheduling.timers import Timer
from celery5.services.process.broker_outages import OutageLog, last_try, retry_until_available
from celery5.services.process.exclusive_lease import ExclusiveLease


class TimerLeadership:
    """The lead as one worker process sees it: a lease in Redis, which another process gets when this one is dead.

    Without a timer that needs it, it does nothing. It asks for the lead after `begin`, when timers can run here.

    Args:
        default_redis: The connection to the default broker, which all workers share.
        timer_standing: Whether this process has asked before, kept over its incarnations.
    """

    def __init__(
        self,
        *,
        declared_timers: Sequence[Timer],
        default_redis: AsyncDriver,
        keys: Keys,
        worker: str,
        timer_standing: TimerStanding,
        log: Log,
    ) -> None:
        self._is_needed = any(timer.on_leader for timer in declared_timers)
        self._standing = timer_standing
        self._log = log
        self._outages = OutageLog(log, "timer:acquire-failed")
        self._lease = ExclusiveLease(
            redis=default_redis,
            key=keys.timer_leader,
            candidates=keys.timer_candidates,
            holder=worker,
            on_renew_failed=self._report_renew_failed,
        )
        self._can_run = trio.Event()
        self._cluster_started = trio.Event()
        self._runs = set[trio.CancelScope]()

    @property
    def is_leader(self) -> bool:
        """Return whether this process leads at this moment."""
        return self._lease.is_held

    def begin(self) -> None:
        """Ask for the lead from now on: the timers of this process can run."""
        self._can_run.set()

    async def wait_cluster_started(self) -> None:
        """Return once if the cluster has started with this process, which leads; else wait for ever."""
        await self._cluster_started.wait()

    @contextmanager
    def cancel_when_lost(self) -> Generator[trio.CancelScope]:
        """Cancel the block when this process does not lead any more."""
        with trio.CancelScope() as scope:
            self._runs.add(scope)
            try:
                yield scope
            finally:
                self._runs.discard(scope)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Lead, or wait for the lead, until cancelled; then give it up."""
        task_status.started()
        await self._can_run.wait()
        if not self._is_needed:
            await trio.sleep_forever()
        try:
            while True:
                # Even if Redis refuses: whatever becomes of timers, the jobs go on.
                is_start = await retry_until_available(self._ask, self._outages, even_refused=True)
                await self._lead(is_start=is_start)
        finally:
            with last_try(self._log, "timer:release-failed"):
                await self._lease.release()

    async def _ask(self) -> bool:
        """Wait until this process leads. Return whether the cluster has started with it."""
        reply = await self._lease.renew()
        is_start = self._standing.record_request(is_leader=not reply.wait, others=reply.others)
        if reply.wait:
            await self._lease.wait_acquired()
        return is_start

    async def _lead(self, *, is_start: bool) -> None:
        self._log.event("timer:lead-acquired", cluster_started=is_start)
        if is_start:
            self._cluster_started.set()
        try:
            await self._lease.run_while_held(trio.sleep_forever)
            self._log.event("timer:lead-lost", "warning", hint=_LOST)
        finally:
            # Also when it is cancelled: no run outlasts the lease.
            for scope in list(self._runs):
                scope.cancel()

    def _report_renew_failed(self, error: BrokerError) -> None:
        self._log.event("timer:renew-failed", "warning", why=str(error))


_LOST = (
    "another process may run the timers with on_leader now; this one cancels its runs, and waits for the lead"
)
