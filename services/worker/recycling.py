"""Restart a worker process after a number of jobs, or when it takes too much memory.

If its parent or its Controller can do so, it starts the next process first. Then the worker stops reading, and releases
the jobs that have not started. Everything else continues, also the heartbeats and systemd's watchdog, until the running
jobs have ended and are settled. Then the worker stops as usual. Its parent starts it again, or it replaces itself.

One worker of the application is recycled at a time: it has the turn, a lease in Redis. The turn ends when the next
process has taken its place and reads jobs. If none does, it ends when the lease has lapsed.
"""

import random
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import trio

from celery5.broker.calls import cluster
from celery5.broker.driver import AsyncDriver
from celery5.broker.keys import Keys
from celery5.errors import BrokerError
from celery5.health.machine import used_memory
from celery5.logs.log import Log
from celery5.protocol.observability.job_tally import JobTally
from celery5.protocol.process.recycling import RecyclingLimits, format_mib, get_recycle_reason, jitter_limits
from celery5.services.health.vitals import ProcessStatus
from celery5.services.job.in_flight import InFlightJobs
from celery5.services.job.resource_slots import ResourceSlots
from celery5.services.process.broker_outages import RETRY_INTERVAL
from celery5.services.process.systemd_notify import SystemdNotify
from celery5.services.worker.consumer import Consumer

CHECK_INTERVAL = 1.0
"""Seconds between readings of the memory."""
DRAIN_TIMEOUT = 3600.0
"""Seconds that running jobs have to end. After that the worker stops as usual, with its grace period."""
TURN_LEASE = 30.0
"""Seconds of the lease. It is taken when the turn begins, and again when the process ends. Both together are at most
TURN_TIMEOUT, so that other workers still get a turn when this worker is lost.
"""
TURN_TIMEOUT = 60.0
"""The most seconds to wait for the turn: the memory may keep growing, and there may be many workers."""
SUCCESSOR_TIMEOUT = 60.0
"""The most seconds to wait for the process that takes the place of this one, or for a word of the Controller."""
PERMIT_CHECK_INTERVAL = 0.5
"""Seconds between two questions whether this worker may be recycled."""


class Successor(msgspec.Struct, frozen=True):
    """The process that a parent starts in place of this one, before this one stops reading."""

    # Asks the parent to start it.
    request: Callable[[], None]
    # Readable when it consumes.
    ready: int


class RestartMode(msgspec.Struct):
    """Whether and how a process is started again after it has been recycled."""

    # Whether it may be recycled; without that there are no limits.
    is_requested: bool = False
    # The process executes itself again; otherwise its parent starts the next one.
    in_place: bool = False
    # This process is such a next one.
    is_restarted: bool = False
    # The working directory at the first start, where the next one begins.
    start_folder: str = ""
    # Seconds within which several signals count as one.
    duplicate_window: float = 0.0
    # The process that takes its place before it ends; None if there is none.
    successor: Successor | None = None
    # Its Controller starts such a process if it is asked to.
    asks_controller: bool = False
    # It is such a process of a Controller, which tells it when it is needed no more.
    is_spare: bool = False
    # The process ends to be started again, so its end is no failure and no stop.
    is_due: bool = False

    def set_successor(self, successor: Successor) -> None:
        """Set the process that takes the place of this process before it ends."""
        self.successor = successor

    def request_restart(self) -> None:
        """Record that the process ends to be started again."""
        self.is_due = True


class Recycling:
    """Drains this process when it has reached a limit, and sets `stop_requested` then.

    Args:
        recycling_name: The owner of its turn. The process that takes its place has the same one.
    """

    def __init__(
        self,
        *,
        redis: AsyncDriver,
        consumer: Consumer,
        in_flight: InFlightJobs,
        tally: JobTally,
        recycle_at: RecyclingLimits,
        restart_mode: RestartMode,
        keys: Keys,
        recycling_name: str,
        process_status: ProcessStatus,
        systemd: SystemdNotify,
        stop_requested: trio.Event,
        resource_slots: ResourceSlots,
        log: Log,
        memory: Callable[[], int] = used_memory,
    ) -> None:
        self._redis = redis
        self._keys = keys
        self._name = recycling_name
        self._process_status = process_status
        self._systemd = systemd
        self._limits = (
            jitter_limits(recycle_at, random.random) if restart_mode.is_requested else RecyclingLimits()
        )
        self._restart_mode = restart_mode
        self._consumer = consumer
        self._in_flight = in_flight
        self._tally = tally
        self._stop_requested = stop_requested
        self._log = log
        self._memory = memory
        # The resources of its jobs must be free before another process gives them to its own jobs.
        self._successor = None if resource_slots.capacity else restart_mode.successor
        self._asks_controller = restart_mode.asks_controller and not resource_slots.capacity
        self._due = trio.Event()
        self._is_draining = False
        self._is_replaced = False  # its successor consumes already
        self._is_dismissed = False  # it was a spare, and is needed no more

    @property
    def ended_jobs(self) -> int:
        """The number of attempts that have ended in this process."""
        return sum(self._tally.count_by_state().values())

    def get_status(self) -> Mapping[str, Any]:
        """Return what became of jobs in this process, and the limits at which it is recycled; None: it is not."""
        return {
            "jobs": self._tally.count_by_state(),
            "done": self.ended_jobs,
            "max_jobs": self._limits.jobs or None,
            "max_memory": self._limits.memory or None,
            "recycling": self._is_draining,
        }

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Wait until a limit is reached, then drain this process."""
        self._due, self._is_draining, self._is_replaced = trio.Event(), False, False
        self._is_dismissed = False
        async with trio.open_nursery() as nursery:
            if self._limits.memory:
                self._check_memory_limit()
                nursery.start_soon(self._watch_memory)
            if self._limits.jobs:
                nursery.start_soon(self._watch_jobs)
            if self._limits.jobs or self._limits.memory:
                nursery.start_soon(self._end_turn)  # the turn of the process whose place this one has taken
            if self._restart_mode.is_spare:
                nursery.start_soon(self._watch_dismissal)
            task_status.started()
            await self._due.wait()
            nursery.cancel_scope.cancel()
        await self._drain(_DISMISSED if self._is_dismissed else await self._prepare_end())
        await trio.sleep_forever()

    async def _prepare_end(self) -> str:
        """Wait for the turn and for the next process. Jobs run meanwhile: return the reason, computed again."""
        reason = self._get_reason()
        await self._take_turn()
        if self._is_dismissed:
            return _DISMISSED
        reason = self._get_reason() or reason
        if self._successor is not None:
            await self._start_successor(self._successor, reason)
        elif self._asks_controller:
            await self._ask_controller(reason)
        return self._get_reason() or reason

    async def _ask_controller(self, reason: str) -> None:
        """Wait until the Controller permits the end of this process: another one has taken its place.

        If none can be started this takes as long as that lasts. It ends after SUCCESSOR_TIMEOUT without a word of the
        Controller: it may be of a kind that does not read the status of its members.
        """
        await self._delete_permit()
        self._log.event("worker:successor-requested", why=reason, jobs=self.ended_jobs)
        self._process_status.mark_awaiting_successor(reason)
        self._systemd.send_status()
        heard_at = trio.current_time()
        while True:
            permit = await self._read_permit()
            if permit:
                self._is_replaced = True
                await self._end_turn()
                return
            if permit is not None:
                heard_at = trio.current_time()
            elif trio.current_time() - heard_at >= SUCCESSOR_TIMEOUT:
                self._log.event("worker:successor-missing", "warning", after=SUCCESSOR_TIMEOUT)
                return
            await trio.sleep(PERMIT_CHECK_INTERVAL)

    async def _watch_dismissal(self) -> None:
        """Wait until the Controller needs this spare no more."""
        await self._delete_permit()
        while not await self._read_permit():  # noqa: ASYNC110  it is Redis that changes
            await trio.sleep(PERMIT_CHECK_INTERVAL)
        self._is_dismissed = self._is_replaced = True
        self._due.set()

    async def _read_permit(self) -> bool | None:
        """Return whether this process may be recycled; None if it has heard nothing.

        While Redis is unreachable the Controller counts as heard: no job could be settled.
        """
        try:
            return await self._redis.perform(cluster.get_recycling_permit(self._keys, self._name))
        except BrokerError:
            return False

    async def _delete_permit(self) -> None:
        """Delete what was told to the process before this one."""
        while True:
            try:
                await self._redis.perform(cluster.delete_recycling_permit(self._keys, self._name))
            except BrokerError:
                await trio.sleep(RETRY_INTERVAL)
            else:
                return

    async def _start_successor(self, successor: Successor, reason: str) -> None:
        """Wait until another process has taken the place of this one, which goes on meanwhile."""
        self._log.event("worker:successor-requested", why=reason, jobs=self.ended_jobs)
        successor.request()
        with trio.move_on_after(SUCCESSOR_TIMEOUT) as timeout:
            await trio.lowlevel.wait_readable(successor.ready)
        if timeout.cancelled_caught:
            self._log.event("worker:successor-missing", "warning", after=SUCCESSOR_TIMEOUT)
        else:
            self._is_replaced = True
            await self._end_turn()

    async def _take_turn(self) -> None:
        """Wait until no other worker is recycled, or until this one is needed no more; for TURN_TIMEOUT at most."""
        with trio.move_on_after(TURN_TIMEOUT):
            while (wait := await self._request_turn()) > 0:
                if self._restart_mode.is_spare and await self._read_permit():
                    self._is_dismissed = self._is_replaced = True
                    return
                await trio.sleep(min(wait, RETRY_INTERVAL))

    async def _request_turn(self) -> float:
        """Acquire the turn for TURN_LEASE. Return 0 if this worker has it; else after how many seconds to try again.

        While Redis is unreachable there is no turn: no job could be settled.
        """
        try:
            reply = await self._redis.perform(
                cluster.acquire_lease(self._keys.recycling, self._name, lease=TURN_LEASE)
            )
        except BrokerError:
            return RETRY_INTERVAL
        return reply.wait

    async def _end_turn(self) -> None:
        """Release the turn, if this worker or the process before it has it."""
        with trio.move_on_after(TURN_LEASE):  # after that it has lapsed
            while True:
                try:
                    await self._redis.perform(cluster.release_lease(self._keys.recycling, self._name))
                except BrokerError:
                    await trio.sleep(RETRY_INTERVAL)
                else:
                    return

    def _check_memory_limit(self) -> None:
        """Drop a limit that is reached before the first job: the process would be restarted for ever."""
        memory = self._memory()
        if memory >= self._limits.memory:
            self._log.event(
                "worker:memory-limit-dropped",
                "error",
                memory=format_mib(memory),
                max_memory=format_mib(self._limits.memory),
                why=_NEVER_BELOW,
            )
            self._limits = self._limits._replace(memory=0)

    async def _watch_memory(self) -> None:
        while self._limits.memory:
            await trio.sleep(CHECK_INTERVAL)
            if self._get_reason():
                self._due.set()

    async def _watch_jobs(self) -> None:
        missing = 1
        while missing > 0:
            await self._in_flight.wait_settled(self._in_flight.settled_count + missing)
            missing = self._limits.jobs - self.ended_jobs  # not all that was settled was an attempt
        self._due.set()

    def _get_reason(self) -> str:
        return get_recycle_reason(self._limits, jobs=self.ended_jobs, memory=self._memory())

    async def _drain(self, reason: str) -> None:
        """Stop reading, wait until all jobs are settled, and request the end of this process."""
        running = sum(1 for delivery in self._in_flight if delivery.started and not delivery.finished)
        self._log.event(
            "worker:recycle-requested",
            why=reason,
            jobs=self.ended_jobs,
            memory=format_mib(self._memory()),
            running=running,
        )
        self._is_draining = True
        self._process_status.mark_recycling(reason)
        if self._restart_mode.asks_controller:
            self._systemd.send_status()
        self._consumer.stop_reading()
        with trio.move_on_after(DRAIN_TIMEOUT) as timeout:
            while len(self._in_flight):
                await self._in_flight.wait_settled(self._in_flight.settled_count + 1)
        if timeout.cancelled_caught:
            self._log.event(
                "worker:recycle-delayed", "warning", running=len(self._in_flight), after=DRAIN_TIMEOUT
            )
        if not self._is_replaced:
            # Keep the turn until the next process has started. If another worker has it, nothing changes.
            await self._request_turn()
        self._restart_mode.request_restart()
        self._stop_requested.set()


_DISMISSED = "the worker in whose place it has worked is up again"
_NEVER_BELOW = (
    "a worker takes as much before its first job: give max_memory more; it is not recycled for memory"
)
