"""Make a job of each event for each of its subscribers.

First the jobs are published, then the event is finished. If the Router dies between the two, another one publishes the
same jobs again. Their ids are derived from the event's, so Redis recognises them as duplicates until the event is
finished (`publish_unique.lua`), however long that takes.
"""

import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import msgspec
import trio

from celery5.broker.call import Call
from celery5.broker.calls import events as trips
from celery5.broker.calls import jobs as jobs_calls
from celery5.broker.calls import limits
from celery5.broker.calls.events import EventOutcome
from celery5.broker.calls.jobs import Entry
from celery5.broker.driver import AsyncDriver
from celery5.broker.drivers.parked import ParkedRedis
from celery5.broker.keys import Keys, QueueKeys
from celery5.broker.transient_errors import is_outage
from celery5.errors import BrokerError, BrokerReplied, BrokerUnavailable, Corrupt
from celery5.logs.log import Level, Log
from celery5.protocol.brokers import DEFAULT_BROKER
from celery5.protocol.events.messages import (
    EventMessage,
    Subscription,
    encode,
    format_subject,
    group_by_subject,
    make_event_job,
    parse_event,
    parse_subscription,
)
from celery5.protocol.job.job import DEDUPLICATION_GRACE, Job
from celery5.protocol.job.messages import read_headers, read_job_id
from celery5.protocol.limits import Suspension
from celery5.runners.operations import operating
from celery5.sending.publisher import PublishPlanner
from celery5.services.process.broker_outages import RETRY_INTERVAL, OutageLog, retry_until_available
from celery5.services.process.lease import Lease

READ_BATCH = 200
"""The most events read in one trip."""


EventAction = Callable[[EventMessage], Awaitable[None]]
"""Takes the event. Raises Corrupt for invalid fields, and BrokerError."""


class _Suspended(msgspec.Struct):
    task: str
    why: str = ""


class _Resumed(msgspec.Struct):
    task: str


EventFields = TypeVar("EventFields", _Suspended, _Resumed)


class EventActions:
    """What a Router itself does at some events: it suspends and resumes tasks.

    Each action may be repeated, if its Router dies before the event is finished.
    """

    def __init__(self, *, redis: AsyncDriver, keys: Keys, log: Log) -> None:
        self._redis = redis
        self._keys = keys
        self._log = log

    @property
    def actions(self) -> Mapping[str, EventAction]:
        """Return the actions by subject: an event and its version."""
        return {
            format_subject("celery5.TaskSuspended", 1): self._suspend,
            format_subject("celery5.TaskResumed", 1): self._resume,
        }

    async def _suspend(self, event: EventMessage) -> None:
        fields = _parse_fields(event, _Suspended)
        suspension = Suspension(why=fields.why, by=f"event {event.id}", since=event.sent)
        await self._redis.perform(limits.suspend_task(self._keys, fields.task, suspension))
        self._log.event("events:task-suspended", "warning", task=fields.task, why=fields.why)

    async def _resume(self, event: EventMessage) -> None:
        fields = _parse_fields(event, _Resumed)
        await self._redis.perform(limits.resume_task(self._keys, fields.task))
        self._log.event("events:task-resumed", task=fields.task)


def _parse_fields(event: EventMessage, kind: type[EventFields]) -> EventFields:
    try:
        return msgspec.json.decode(msgspec.json.encode(event.fields), type=kind)
    except (ValueError, RecursionError) as error:
        raise Corrupt(f"event {event.event}: {error}") from None


class EventIngestion:
    """Routes the events that this Router reads.

    `counts` has events with subscribers, jobs made of them, events without subscribers, and dead-lettered events.
    """

    def __init__(
        self,
        *,
        redis: AsyncDriver,
        broker_router: AsyncDriver,
        find_broker: "BrokerLookup",
        event_actions: EventActions,
        event_retention: float,
        message_limit: int,
        reader: ParkedRedis,
        consumed: Sequence[QueueKeys],
        read_block: float,
        worker: str,
        keys: Keys,
        lease: Lease,
        log: Log,
        clock: "Clock",
    ) -> None:
        self._redis = redis
        self._broker_router = broker_router
        self._find_broker = find_broker
        self._unreachable: set[str] = set()
        self._delayed_until = math.inf
        self._reader = reader
        self._keys = keys
        (self._events,) = consumed
        self._lease = lease
        self._log = log
        self._outages = OutageLog(log, "events:interrupted", "events:resumed")
        self._router = worker
        self._block = read_block
        self._retention = event_retention
        self._limit = message_limit
        self._clock = clock
        self._actions = event_actions.actions
        self._state = b""
        self._subscribed: Mapping[str, Sequence[Subscription]] = {}
        self._publishers: dict[str, PublishPlanner] = {}
        self._may_have_pending = True
        self.counts = {"events": 0, "jobs": 0, "unclaimed": 0, "buried": 0}

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Route until cancelled. Another Router then takes over unfinished events; no job runs twice."""
        self._may_have_pending = True
        task_status.started()
        while True:
            await retry_until_available(self._route_new, self._outages, even_refused=True)

    async def _route_new(self) -> None:
        try:
            if entries := await self._read():
                await self._route_all(entries)
        except (BrokerUnavailable, BrokerReplied):
            self._may_have_pending = True  # a lost reply may have contained events
            raise

    async def _read(self) -> list[Entry]:
        if trio.current_time() >= self._delayed_until:
            self._may_have_pending, self._delayed_until = True, math.inf
        if self._may_have_pending:
            pending = await self._redis.perform(
                jobs_calls.read_pending(self._events, self._router, after=b"0", count=READ_BATCH)
            )
            self._may_have_pending = bool(pending)
            if pending:
                return pending
        return await self._reader.perform(
            jobs_calls.read_jobs([self._events], self._router, count=READ_BATCH, block_seconds=self._block)
        )

    async def _route_all(self, entries: Sequence[Entry]) -> None:
        """Route these events; if the server refuses, one by one, so that a faulty one does not hold up the others."""
        try:
            await self.route(entries)
        except BrokerReplied as error:
            if is_outage(error):
                raise
            for entry in entries:
                await self._route_or_dead_letter(entry)

    async def _route_or_dead_letter(self, entry: Entry) -> None:
        try:
            await self.route([entry])
        except BrokerReplied as error:
            if is_outage(error):
                raise
            self._log.event("events:dead-lettered", "error", id=read_job_id(entry.message), why=str(error))
            await self._finish([_make_dead_event(entry, str(error))])

    async def route(self, entries: Sequence[Entry]) -> None:
        """Publish the jobs of these events, then finish the events."""
        with operating(
            "deliver", "events", "events", len(entries), lambda: [_find_headers(entry) for entry in entries]
        ):
            await self._route(entries)

    async def _route(self, entries: Sequence[Entry]) -> None:
        await self._lease.wait_until_valid()
        await self._read_subscribers()
        routed = [await self._route_one(entry) for entry in entries]
        await self._lease.wait_until_valid()  # this Router may have been frozen, and counted as dead
        unpublished = await self._publish([job for event in routed for job in event.jobs])
        if unpublished:  # their events stay pending, and are tried again; others are read
            self._may_have_pending, self._delayed_until = False, trio.current_time() + RETRY_INTERVAL
        published = [event for event in routed if unpublished.isdisjoint(job.id for job in event.jobs)]
        finished = await self._finish([event.outcome for event in published])
        # An event that another Router has now may be read again: the ids of its jobs must stay known.
        ours = [event.jobs for event, is_ours in zip(published, finished, strict=True) if is_ours]
        await self._forget([job for jobs in ours for job in jobs])

    async def _read_subscribers(self) -> None:
        """Read the current subscriptions.

        They are read after the events, so they include all that were declared before those events were sent.
        """
        reply = await self._redis.perform(trips.get_subscribers(self._keys, self._state))
        if reply.retired:
            names = [name.replace("\n", " ") for name in reply.retired]
            self._log.event("subscription:expired", "warning", subscriptions=names, why=_RETIRED)
        if reply.entries is not None:
            parsed = {name: parse_subscription(value, self._limit) for name, value in reply.entries.items()}
            for name in (name for name, subscription in parsed.items() if subscription is None):
                self._log.event("subscription:read-failed", "error", subscription=name.replace("\n", " "))
            self._subscribed = group_by_subject(
                subscription for subscription in parsed.values() if subscription is not None
            )
        self._state = reply.state

    async def _route_one(self, entry: Entry) -> "_RoutedEvent":
        """Perform the Router's own action for an event; return its outcome, and the jobs to publish before."""
        try:
            event = parse_event(entry.message, self._limit)
            action = self._actions.get(event.subject)
            if action is not None:
                await action(event)
        except Corrupt as error:
            self._log.event("events:dead-lettered", "error", id=read_job_id(entry.message), why=str(error))
            return _RoutedEvent(_make_dead_event(entry, str(error)))
        subscribed = self._subscribed.get(event.subject, ())
        if not subscribed and action is None:
            return _RoutedEvent(EventOutcome("keep", entry.id, event.id, event.subject, entry.message))
        now = self._clock()
        jobs = [make_event_job(event, subscription, now=now) for subscription in subscribed]
        return _RoutedEvent(EventOutcome("done", entry.id, event.id, event.subject, b""), jobs)

    async def _publish(self, jobs: Sequence[Job]) -> set[str]:
        """Publish the jobs, those of each queue in one script or a few.

        Return the ids of those that could not be published because their broker is unreachable. Raises
        BrokerUnavailable if that is the broker of the events.
        """
        unpublished = set[str]()
        for (app, broker), of_broker in self._group_by_broker(jobs).items():
            publisher = self._publishers.setdefault(app, PublishPlanner(keys=Keys(app)))
            redis = self._redis if broker == DEFAULT_BROKER else self._broker_router
            try:
                replies = await redis.perform_all(publisher.plan_calls(of_broker))
                publisher.record_published(of_broker, replies)
            except BrokerUnavailable as error:
                if broker == DEFAULT_BROKER:
                    raise
                level: Level = "debug" if broker in self._unreachable else "warning"
                self._log.event("events:delayed", level, broker=broker, jobs=len(of_broker), why=str(error))
                self._unreachable.add(broker)
                unpublished |= {job.id for job in of_broker}
            else:
                self._unreachable.discard(broker)
                self.counts["jobs"] += len(of_broker)
        return unpublished

    def _group_by_broker(self, jobs: Iterable[Job]) -> dict[tuple[str, str], list[Job]]:
        """Return the jobs by application and broker."""
        groups: dict[tuple[str, str], list[Job]] = {}
        for job in jobs:
            groups.setdefault((job.app, self._find_broker(job.app, job.queue)), []).append(job)
        return groups

    async def _finish(self, outcomes: Sequence[EventOutcome]) -> list[bool]:
        """Finish events; return for each whether this call finished it."""
        call = trips.finish_events(
            self._keys,
            self._events,
            self._router,
            outcomes,
            known_state=self._state,
            retention=self._retention,
        )
        replies = await self._redis.perform(call)
        for outcome, reply in zip(outcomes, replies, strict=True):
            if reply == 1:
                self.counts[_COUNTER_NAMES[outcome.verb]] += 1
            elif reply == -1:
                self._may_have_pending = (
                    True  # it has a subscriber now: it is still pending, and routed again
                )
        return [reply == 1 for reply in replies]

    async def _forget(self, jobs: Sequence[Job]) -> None:
        """Shorten the time for which the ids of these jobs stay known: their events are finished.

        If this fails, they stay known for longer.
        """
        locks_by_queue: dict[tuple[str, str], list[str]] = {}
        for job in jobs:
            locks_by_queue.setdefault((job.app, job.queue), []).append(job.lock)
        calls: list[Call[Any]] = [
            trips.shorten_windows(self._publishers[app].queue(queue), locks, ttl=DEDUPLICATION_GRACE)
            for (app, queue), locks in locks_by_queue.items()
        ]
        try:
            await self._broker_router.perform_all(calls)
        except BrokerError as error:
            self._log.event("events:forget-failed", "debug", why=str(error))


class Clock(Protocol):
    """Returns the time, in seconds since 1970."""

    def __call__(self) -> float: ...


class BrokerLookup(Protocol):
    """Returns the name of a queue's broker."""

    def __call__(self, app: str, queue: str, /) -> str: ...


class _RoutedEvent(msgspec.Struct, frozen=True):
    outcome: EventOutcome
    # The jobs to publish before the event is finished.
    jobs: Sequence[Job] = ()


def _find_headers(entry: Entry) -> dict[str, str]:
    try:
        return read_headers(entry.message)
    except Exception:  # it is no message, and will be a dead event
        return {}


def _make_dead_event(entry: Entry, why: str) -> EventOutcome:
    document = {
        "v": 1,
        "id": read_job_id(entry.message),
        "state": "DEAD",
        "reason": "corrupt",
        "failure": {"message": why},
    }
    return EventOutcome("bury", entry.id, read_job_id(entry.message), "", entry.message, encode(document))


_COUNTER_NAMES = {"done": "events", "keep": "unclaimed", "bury": "buried"}
_RETIRED = "no worker has declared them for as long as the setting subscription_ttl says"
