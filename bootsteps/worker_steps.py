"""Steps of a worker: join and leave its queues, subscribe to channels, lend its connection."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

import trio

from celery5.app import App
from celery5.broker.calls import events as events_calls
from celery5.broker.calls import leases, queues
from celery5.broker.driver import AsyncDriver
from celery5.broker.drivers.on_trio import TrioRedis
from celery5.broker.endpoint import Endpoint
from celery5.broker.keys import Keys, QueueKeys
from celery5.broker.translate import is_memory_refusal
from celery5.connections.brokers import find_meant_queue
from celery5.errors import BrokerError
from celery5.logs.log import Log
from celery5.protocol.shards import get_queue_of_shard
from celery5.services.job.in_flight import InFlightJobs
from celery5.services.process.incarnation_end import IncarnationEnd
from celery5.services.process.lease import Lease
from celery5.services.process.step_status import StepStatus

LEAVE_TIMEOUT = 5.0
"""Seconds that leaving may take; a worker that cannot leave is recovered when its lease ends."""


class SidecarLeaves(Protocol):
    """Renews this worker's leases until it has left, and requeues the jobs that it held once it has ended."""

    def report_left(self, *, holding: bool) -> None:
        """Renew no lease of this worker any more. `holding`: it may have left jobs to requeue."""
        ...

    def report_failed(self, begun_entries: Mapping[str, Sequence[bytes]], /) -> None:
        """Take the end of this process for a death, of which these entries are blamed, by queue."""
        ...


class OwnRecovery(Protocol):
    """Puts back the jobs of this worker itself."""

    async def recover_own(self, begun_entries: Mapping[str, Sequence[bytes]], /) -> None:
        """Put back what this worker holds; these entries, by queue, count as having taken it down."""
        ...


class WorkerDeparture:
    """Tells the sidecar process how this worker has left: in order, or by an error, which is a death."""

    def __init__(
        self,
        *,
        consumed: Sequence[QueueKeys],
        lease: Lease,
        incarnation_end: IncarnationEnd,
        in_flight: InFlightJobs,
        recoverer: OwnRecovery,
        sidecar: SidecarLeaves | None,
        log: Log,
    ) -> None:
        self._consumed = consumed
        self._lease = lease
        self._incarnation_end = incarnation_end
        self._in_flight = in_flight
        self._recoverer = recoverer
        self._sidecar = sidecar
        self._log = log

    @property
    def is_death(self) -> bool:
        """Whether an error ends this worker, which still has its lease."""
        return self._incarnation_end.has_failed and not self._lease.is_lost

    def report_left(self, *, holding: bool) -> None:
        """Report that the queues were left. `holding`: jobs may be left behind."""
        if self._sidecar is not None:
            self._sidecar.report_left(holding=holding)

    async def report_death(self) -> None:
        """Have the jobs put back, and those that had begun counted: by the sidecar, once this process has ended."""
        begun: dict[str, list[bytes]] = {keys.queue: [] for keys in self._consumed}
        for delivery in self._in_flight:
            if delivery.started and delivery.queue in begun:
                begun[delivery.queue].append(delivery.entry)
        count = sum(map(len, begun.values()))
        self._log.event("queues:abandoned", "error", begun=count, held=len(self._in_flight))
        if self._sidecar is not None:
            self._sidecar.report_failed(begun)
            return
        try:
            await self._recoverer.recover_own(begun)
        except BrokerError as error:
            self._log.event("queues:leave-failed", "warning", why=str(error), hint=_WHEN_UNREACHABLE)


class QueueMembership:
    """Makes this worker a consumer of its queues, and removes it when it stops.

    When an error ends it, it does not leave in order: it has died, and the jobs that had begun are counted.
    """

    def __init__(
        self,
        *,
        worker: str,
        lease: Lease,
        consumed: Sequence[QueueKeys],
        redis: AsyncDriver,
        keys: Keys,
        departure: WorkerDeparture,
        log: Log,
        used: Collection[str],
        doubted: set[str],
        recipients: Mapping[str, str],
    ) -> None:
        self._departure = departure
        self._redis = redis
        self._keys = keys
        self._consumed = consumed
        self._lease = lease
        self._log = log
        self._worker = worker
        self._used = used
        self._doubted = doubted
        self._recipients = recipients

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Join, stay until cancelled, leave."""
        try:
            await self._join()
            task_status.started()
            await trio.sleep_forever()
        except trio.Cancelled:  # also while it joins: Redis may have run the call, and it would count as lost
            with trio.move_on_after(LEAVE_TIMEOUT, shield=True):
                await self._leave()
            raise

    async def _join(self) -> None:
        joins = [leases.join_queue(keys, self._worker, lease=self._lease.seconds) for keys in self._consumed]
        await self._redis.perform_all(joins)
        announced = await self._register_queues()
        if self._recipients:
            await self._redis.perform_all(
                [events_calls.declare_recipients(keys, self._recipients) for keys in self._consumed]
            )
        await self._warn_of_misspelt(announced)

    async def _register_queues(self) -> Sequence[int]:
        """Register the queues, and return of each whether it is new: 0 when Redis refuses it, since its memory is full.

        Who sends the first job to a queue registers it, too. So what is not registered has no jobs that wait.
        """
        registrations = [queues.register_queue(self._keys, keys.queue) for keys in self._consumed]
        try:
            return await self._redis.perform_all(registrations)
        except BrokerError as error:
            if not is_memory_refusal(error):
                raise
            return [0] * len(registrations)

    async def _warn_of_misspelt(self, new: Sequence[int]) -> None:
        """Warn once of each queue that may be misspelt.

        Neither a task nor a setting names it, it has no jobs, and it is `new` or similar to one that they name.
        """
        for keys, is_new in zip(self._consumed, new, strict=True):
            queue = get_queue_of_shard(keys.queue)
            if queue in self._used or queue in self._doubted:
                continue
            meant = find_meant_queue(queue, self._used)
            if is_new or (meant and not await self._has_jobs(keys)):
                self._doubted.add(queue)
                suggestion = (
                    f"did you mean {meant!r}?" if meant else f"they name {', '.join(sorted(self._used))}"
                )
                hint = f"no task or setting of this application names the queue {queue!r}; {suggestion}"
                self._log.event("worker:queue-not-used", "warning", queue=queue, hint=hint)

    async def _has_jobs(self, keys: QueueKeys) -> bool:
        depth = await self._redis.perform(queues.get_queue_depth(keys))
        return bool(depth.unfinished or depth.dead)

    async def _leave(self) -> None:
        """Leave the queues, and report that to the sidecar process in any case."""
        if self._departure.is_death:
            await self._departure.report_death()
            return
        holding = True
        try:
            holding = await leave_queues(
                self._redis, self._consumed, lease=self._lease, worker=self._worker, log=self._log
            )
        finally:
            self._departure.report_left(holding=holding)


async def leave_queues(
    redis: AsyncDriver, consumed: Sequence[QueueKeys], *, lease: Lease, worker: str, log: Log
) -> bool:
    """Leave these queues as a consumer. Return whether jobs may be left behind."""
    if lease.is_lost:  # other workers have recovered its jobs
        return True
    try:
        held = await redis.perform_all([leases.leave_queue(keys, worker) for keys in consumed])
    except BrokerError as error:
        log.event("queues:leave-failed", "warning", why=str(error), hint=_WHEN_UNREACHABLE)
        return True
    log.event("queues:left", left_behind=sum(held))
    return any(held)


_WHEN_UNREACHABLE = "what it still holds, if anything, goes to others when its lease lapses"


ChannelHandler = Callable[[bytes, bytes], None]
"""Called with a channel and a message on it. Must be quick and must not block."""


class SubscriberConnection(Protocol):
    """A connection that listens."""

    async def subscribe(self, *channels: str | bytes) -> None: ...


class ChannelSubscriptions:
    """Subscribes once to every channel that has a handler; the connection renews its subscriptions by itself."""

    def __init__(
        self, *, push: SubscriberConnection, channel_handlers: Mapping[bytes, ChannelHandler]
    ) -> None:
        self._push = push
        self._handlers = channel_handlers

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Subscribe, and return."""
        await self._push.subscribe(*self._handlers)
        task_status.started()


class LentConnection:
    """Lends the worker's connection to the application: its `adelay` uses it in this Trio run."""

    def __init__(self, *, app: App, redis: TrioRedis, endpoint: Endpoint) -> None:
        self._app = app
        self._redis = redis
        self._endpoint = endpoint

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Lend the connection until cancelled."""
        with self._app.connections.lend_driver(self._redis, self._endpoint):
            task_status.started()
            await trio.sleep_forever()


class EventsMembership:
    """Joins and leaves the queue of the events, which is not among those of the tasks.

    When an error ends the process it does not leave: it has died, and what it held is counted when its lease ends.
    """

    def __init__(
        self,
        *,
        redis: AsyncDriver,
        consumed: Sequence[QueueKeys],
        lease: Lease,
        log: Log,
        worker: str,
        step_status: StepStatus,
    ) -> None:
        self._incarnation_end = step_status.incarnation_end
        self._redis = redis
        self._consumed = consumed
        self._lease = lease
        self._log = log
        self._worker = worker

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Join, stay until cancelled, leave."""
        try:
            await self._redis.perform_all(
                [leases.join_queue(keys, self._worker, lease=self._lease.seconds) for keys in self._consumed]
            )
            task_status.started()
            await trio.sleep_forever()
        except trio.Cancelled:  # also while it joins: Redis may have run the call, and it would count as lost
            with trio.move_on_after(0 if self._incarnation_end.has_failed else LEAVE_TIMEOUT, shield=True):
                await leave_queues(
                    self._redis, self._consumed, lease=self._lease, worker=self._worker, log=self._log
                )
            raise
