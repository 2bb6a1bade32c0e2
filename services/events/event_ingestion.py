"""Event Ingestion: makes of each event one job for each of its subscribers.

First the jobs are published, then the event is ended. Should the Router die between the two, another one gets the event
and publishes the same jobs, whose ids follow from the event's: they are known already (`claim.lua`), and stay known
until the event has ended, however long that takes.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import trio

from celery5.broker.call import Call
from celery5.broker.calls import events as trips
from celery5.broker.calls import jobs as jobs_calls
from celery5.broker.calls.events import EventOutcome
from celery5.broker.calls.jobs import Entry
from celery5.broker.connection.parked import ParkedRedis
from celery5.broker.driver import AsyncDriver
from celery5.broker.keys import Keys, QueueKeys
from celery5.errors import BrokerError, BrokerReplied, BrokerUnavailable, Corrupt
from celery5.logs.log import Level, Log
from celery5.protocol.brokers import DEFAULT_BROKER
from celery5.protocol.events.messages import (
    EventMessage,
    Subscription,
    encode,
    group_by_subject,
    make_event_job,
    parse_event,
    parse_subscription,
)
from celery5.protocol.job.job import DEDUPLICATION_GRACE, Job
from celery5.protocol.job.messages import read_job_id
from celery5.sending.publisher import PublishPlanner
from celery5.services.events.event_actions import EventActions
from celery5.services.process.broker_outages import OutageLog, is_outage, retry_until_available
from celery5.services.worker.lease import Lease

AT_ONCE = 200
"""Events read in one trip."""
RETRY_DELAY = 0.5
"""Seconds until another attempt, when AsyncDriver does not serve."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class EventReading:
    """Where a Router reads events, and under which name."""

    # The connection for blocking reads.
    reader: ParkedRedis
    # The queue of events, alone.
    consumed: Sequence[QueueKeys]
    # Seconds that a read waits for events at most.
    read_block: float
    # The name of the Router as a consumer.
    worker: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EventHandling:
    """What a Router does with an event."""

    # What it does itself, by subject.
    event_actions: EventActions
    # Seconds that events without subscribers are kept.
    event_retention: float
    # Bytes that a message has at most.
    message_limit: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EventBrokers:
    """The brokers that the jobs of events go to."""

    # Reaches the broker of each queue.
    broker_router: AsyncDriver
    # Returns the broker of an application's queue.
    find_broker: "BrokerLookup"


class EventIngestion:
    """Routes the events that this Router reads. `routed`: events that had subscribers, jobs that were made of them,
    events that nobody wanted, events that were buried."""

    def __init__(
        self,
        *,
        redis: AsyncDriver,
        event_brokers: EventBrokers,
        event_handling: EventHandling,
        event_reading: EventReading,
        keys: Keys,
        lease: Lease,
        log: Log,
        clock: "Clock",
    ) -> None:
        self._redis = redis
        self._routed = event_brokers.broker_router
        self._home = event_brokers.find_broker
        self._away: set[str] = set()
        self._held_until = math.inf
        self._reader = event_reading.reader
        self._keys = keys
        (self._events,) = event_reading.consumed
        self._lease = lease
        self._log = log
        self._waits = OutageLog(log, "events:interrupted", "events:resumed")
        self._router = event_reading.worker
        self._block = event_reading.read_block
        self._retention = event_handling.event_retention
        self._limit = event_handling.message_limit
        self._clock = clock
        self._acts = event_handling.event_actions.actions
        self._state = b""
        self._subscribed: Mapping[str, Sequence[Subscription]] = {}
        self._publishers: dict[str, PublishPlanner] = {}
        self._look = True
        self.counts = {"events": 0, "jobs": 0, "unclaimed": 0, "buried": 0}

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Route until cancelled. What is under way then is another Router's soon, and doubles nothing."""
        self._look = True
        task_status.started()
        while True:
            await retry_until_available(self._route_new, self._waits, RETRY_DELAY, even_refused=True)

    async def _route_new(self) -> None:
        try:
            if entries := await self._read():
                await self._route_all(entries)
        except (BrokerUnavailable, BrokerReplied):
            self._look = True  # the reply that was lost may have carried events
            raise

    async def _read(self) -> list[Entry]:
        if trio.current_time() >= self._held_until:
            self._look, self._held_until = True, math.inf
        if self._look:
            found = await self._redis.perform(
                jobs_calls.read_pending(self._events, self._router, after=b"0", count=AT_ONCE)
            )
            self._look = bool(found)
            if found:
                return found
        return await self._reader.perform(
            jobs_calls.read_jobs([self._events], self._router, count=AT_ONCE, block_seconds=self._block)
        )

    async def _route_all(self, entries: Sequence[Entry]) -> None:
        """Route these; when the server refuses, one by one, so that one that cannot be routed holds up no other."""
        try:
            await self.route(entries)
        except BrokerReplied as error:
            if is_outage(error):
                raise
            for each in entries:
                await self._route_or_bury(each)

    async def _route_or_bury(self, entry: Entry) -> None:
        try:
            await self.route([entry])
        except BrokerReplied as error:
            if is_outage(error):
                raise
            self._log.event("events:dead-lettered", "error", id=read_job_id(entry.message), why=str(error))
            await self._finish([_buried(entry, str(error))])

    async def route(self, entries: Sequence[Entry]) -> None:
        """Publish the jobs of these events, then end the events."""
        await self._lease.wait_until_valid()
        await self._learn()
        decided = [await self._decided(entry) for entry in entries]
        await self._lease.wait_until_valid()  # whoever was frozen since may have been taken for dead
        held = await self._publish([job for _, jobs in decided for job in jobs])
        if held:  # their events stay this Router's, who tries again, and reads others meanwhile
            self._look, self._held_until = False, trio.current_time() + RETRY_DELAY
        sent = [(ending, jobs) for ending, jobs in decided if held.isdisjoint(job.id for job in jobs)]
        ended = await self._finish([ending for ending, _ in sent])
        # An event that another Router has by now may come again: its jobs must be remembered.
        mine = [jobs for (_, jobs), is_mine in zip(sent, ended, strict=True) if is_mine]
        await self._forget([job for jobs in mine for job in jobs])

    async def _learn(self) -> None:
        """Who is subscribed now: asked after the events were read, so whoever subscribed before they were sent is
        there."""
        known = await self._redis.perform(trips.get_subscribers(self._keys, self._state))
        if known.retired:
            names = [name.replace("\n", " ") for name in known.retired]
            self._log.event("subscription:expired", "warning", subscriptions=names, why=_RETIRED)
        if known.entries is not None:
            read = {name: parse_subscription(value, self._limit) for name, value in known.entries.items()}
            for name in (name for name, each in read.items() if each is None):
                self._log.event("subscription:read-failed", "error", subscription=name.replace("\n", " "))
            self._subscribed = group_by_subject(each for each in read.values() if each is not None)
        self._state = known.state

    async def _decided(self, entry: Entry) -> tuple[EventOutcome, list[Job]]:
        """How an event ends, and the jobs that are to be there before. What the Router itself does at it is done."""
        try:
            event = parse_event(entry.message, self._limit)
            act = self._acts.get(event.subject)
            if act is not None:
                await act(event)
        except Corrupt as error:
            self._log.event("events:dead-lettered", "error", id=read_job_id(entry.message), why=str(error))
            return _buried(entry, str(error)), []
        subscribed = self._subscribed.get(event.subject, ())
        if not subscribed and act is None:
            return EventOutcome("keep", entry.id, event.id, event.subject, entry.message), []
        return EventOutcome("done", entry.id, event.id, event.subject, b""), self._jobs(event, subscribed)

    def _jobs(self, event: EventMessage, subscribed: Iterable[Subscription]) -> list[Job]:
        now = self._clock()
        return [make_event_job(event, each, now=now) for each in subscribed]

    async def _publish(self, jobs: Sequence[Job]) -> set[str]:
        """All of them, each queue's in one script or a few. They are there when this returns, but for those whose ids
        it gives: their broker is another one than the events', and away."""
        held = set[str]()
        for (app, broker), mine in self._apart(jobs).items():
            publisher = self._publishers.setdefault(app, PublishPlanner(keys=Keys(app)))
            redis = self._redis if broker == DEFAULT_BROKER else self._routed
            try:
                publisher.record_published(mine, await redis.perform_all(publisher.plan_calls(mine)))
            except BrokerUnavailable as error:
                if broker == DEFAULT_BROKER:
                    raise
                level: Level = "debug" if broker in self._away else "warning"
                self._log.event("events:delayed", level, broker=broker, jobs=len(mine), why=str(error))
                self._away.add(broker)
                held |= {job.id for job in mine}
            else:
                self._away.discard(broker)
                self.counts["jobs"] += len(mine)
        return held

    def _apart(self, jobs: Iterable[Job]) -> dict[tuple[str, str], list[Job]]:
        """The jobs by application and broker."""
        found: dict[tuple[str, str], list[Job]] = {}
        for job in jobs:
            found.setdefault((job.app, self._home(job.app, job.queue)), []).append(job)
        return found

    async def _finish(self, endings: Sequence[EventOutcome]) -> list[bool]:
        """End them; gives which of them have ended by that."""
        call = trips.finish_events(
            self._keys,
            self._events,
            self._router,
            endings,
            known_state=self._state,
            retention=self._retention,
        )
        ended = await self._redis.perform(call)
        for ending, how in zip(endings, ended, strict=True):
            if how == 1:
                self.counts[_COUNTED[ending.verb]] += 1
            elif how == -1:
                self._look = True  # somebody has subscribed meanwhile: it is still ours, and routed once more
        return [how == 1 for how in ended]

    async def _forget(self, jobs: Sequence[Job]) -> None:
        """The events have ended: their jobs need not be remembered for long. If this is missed, they are for longer."""
        made: list[Call[Any]] = []
        for app, mine in _by_app(jobs).items():
            queues: dict[str, list[str]] = {}
            for job in mine:
                queues.setdefault(job.queue, []).append(job.lock)
            keys = self._publishers[app]
            made += [
                trips.shorten_windows(keys.queue(queue), locks, ttl=DEDUPLICATION_GRACE)
                for queue, locks in queues.items()
            ]
        try:
            await self._routed.perform_all(made)
        except BrokerError as error:
            self._log.event("events:forget-failed", "debug", why=str(error))


class Clock(Protocol):
    """Tells the time, in seconds since 1970."""

    def __call__(self) -> float: ...


class BrokerLookup(Protocol):
    """Tells which broker a queue is on."""

    def __call__(self, app: str, queue: str, /) -> str: ...


def _by_app(jobs: Iterable[Job]) -> dict[str, list[Job]]:
    found: dict[str, list[Job]] = {}
    for job in jobs:
        found.setdefault(job.app, []).append(job)
    return found


def _buried(entry: Entry, why: str) -> EventOutcome:
    document = {
        "v": 1,
        "id": read_job_id(entry.message),
        "state": "DEAD",
        "reason": "corrupt",
        "failure": {"message": why},
    }
    return EventOutcome("bury", entry.id, read_job_id(entry.message), "", entry.message, encode(document))


_COUNTED = {"done": "events", "keep": "unclaimed", "bury": "buried"}
_RETIRED = "no worker has declared them for as long as the setting subscription_ttl says"
