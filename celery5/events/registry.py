"""Events: the events of an application: which there are, how they are sent in bulk, and how they do in Redis (C5)."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, cast

import msgspec

from celery5.broker.call import Call
from celery5.broker.calls import events as trips
from celery5.broker.calls.jobs import QueueState, get_queue_state
from celery5.broker.coroutines import BlockingDriverAdapter, run_blocking
from celery5.broker.driver import AsyncDriver
from celery5.broker.keys import EVENTS, Keys
from celery5.errors import Misconfigured
from celery5.events.event import (
    Event,
    EventDeclaration,
    SentEvent,
    get_event_declaration,
    list_event_declarations,
)
from celery5.protocol.events.messages import (
    Subscription,
    format_subject,
    group_by_subject,
    parse_subscription,
    subscription_name,
)
from celery5.protocol.job.job import Job

if TYPE_CHECKING:
    from celery5.application import Application


class Subscriber(msgspec.Struct, frozen=True):
    """A task that is subscribed to an event: its application, its name, the queue that its jobs go to, and the fields
    that it `takes`; None for all that there are."""

    app: str
    task: str
    queue: str
    takes: tuple[str, ...] | None


class WithdrawnSubscription(msgspec.Struct, frozen=True):
    """A subscription that was taken back, and is not in force though workers may declare it."""

    app: str
    task: str


class EventState(msgspec.Struct, frozen=True):
    """How one version of an event does: its subscribers, how many are `kept` since nobody wanted them, and how many
    nobody has wanted in the last week (`unclaimed`). `fields` are those that are declared here, None if none is; `of`
    names the application whose event it is. Subscriptions that were `taken_back` are to all of its versions."""

    event: str
    version: int
    subscribers: tuple[Subscriber, ...]
    kept: int
    unclaimed: int
    fields: tuple[str, ...] | None
    of: str
    taken_back: tuple[WithdrawnSubscription, ...] = ()


class Events(Mapping[str, type[Event]]):
    """The events that an application has declared, by name: the newest version of each."""

    REACHED_AS: ClassVar[str] = "app.events."

    def __init__(self, app: "Application") -> None:
        self._app = app
        self._all: dict[tuple[str, int], EventDeclaration] = {}

    def __getitem__(self, name: str) -> type[Event]:
        versions = self.versions(name)
        if not versions:
            raise KeyError(name)
        return versions[max(versions)]

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(name for name, _ in self._all))

    def __len__(self) -> int:
        return len({name for name, _ in self._all})

    def versions(self, name: str) -> dict[int, type[Event]]:
        """The versions of one event that are declared, in their order."""
        return {
            version: self._all[name, version].kind for known, version in sorted(self._all) if known == name
        }

    def make_event(self, kind: type[Event], said: Mapping[str, object]) -> Event:
        """An event whose fields are said as in JSON: a UUID as text, for instance. Raises BadArguments."""
        return get_event_declaration(kind).parse_event(said)

    @property
    def has_own_events(self) -> bool:
        """Whether one of them is the application's own, so that it needs a Router."""
        return any(each.of == self._app.name for each in self._all.values())

    def add(self, declared: EventDeclaration) -> None:
        """Remember an event. Raises Misconfigured when another class has its name and version."""
        known = self._all.setdefault((declared.name, declared.version), declared)
        if known.kind is not declared.kind:
            raise Misconfigured(
                f"two events are named {declared.name!r}, version {declared.version}: give one of them "
                "@event(name=...) or another version"
            )

    def group_subscriptions(self) -> dict[str, list[Subscription]]:
        """What the application's tasks are subscribed to, by the application whose events those are."""
        found: dict[str, list[Subscription]] = {}
        for each in list_event_declarations():
            subscribed = each.list_subscriptions(self._app)
            if subscribed:
                of = self._app.name if each.everywhere else each.of
                found.setdefault(of, []).extend(subscribed)
        return found

    def list_queues(self) -> set[str]:
        """The queues that those subscriptions name."""
        return {each.job.queue for subscribed in self.group_subscriptions().values() for each in subscribed}

    def send(self, events: Sequence[Event]) -> list[SentEvent]:
        """Send many events in few round trips; gives their handles in order. For plain Python.

        Raises TypeError for what is no event, MessageTooLarge, and Misconfigured for another application's event,
        before anything is sent. When Redis is not there: as `App.send_many`.
        """
        jobs = self._jobs(events)
        self._app.dispatch(jobs)
        return _sent(events, jobs)

    async def asend(self, events: Sequence[Event]) -> list[SentEvent]:
        """`send`, from Trio or asyncio."""
        jobs = self._jobs(events)
        await self._app.adispatch(jobs)
        return _sent(events, jobs)

    def waiting(self) -> QueueState:
        """How many events wait for a Router, and which Routers live: its `workers`. For plain Python."""
        return self._app.perform(get_queue_state(self._app.queue(EVENTS)))

    async def awaiting(self) -> QueueState:
        """`waiting`, from Trio or asyncio."""
        return await self._app.aperform(get_queue_state(self._app.queue(EVENTS)))

    def state(self) -> list[EventState]:
        """How the application's events do, in Redis and here. For plain Python."""
        return run_blocking(self._state(BlockingDriverAdapter(self._app.connections.get_blocking_driver())))

    async def astate(self) -> list[EventState]:
        """`state`, from Trio or asyncio."""
        return await self._state(await self._app.connections.get_async_driver())

    def unsubscribe(self, event: str, task: str, *, app: str = "") -> bool:
        """Take the subscription of a task back, at once and for good: whoever still declares it gets nothing. `app` is
        the task's application, this one unless it is said. Gives whether there was one in force. For plain Python."""
        call = self._taking_back(event, task, app, back=True)
        return self._app.perform(call)

    async def aunsubscribe(self, event: str, task: str, *, app: str = "") -> bool:
        """`unsubscribe`, from Trio or asyncio."""
        return await self._app.aperform(self._taking_back(event, task, app, back=True))

    def resubscribe(self, event: str, task: str, *, app: str = "") -> bool:
        """Allow a subscription again that was taken back: its workers declare it within a minute. Gives whether it was
        taken back. For plain Python."""
        call = self._taking_back(event, task, app, back=False)
        return self._app.perform(call)

    async def aresubscribe(self, event: str, task: str, *, app: str = "") -> bool:
        """`resubscribe`, from Trio or asyncio."""
        return await self._app.aperform(self._taking_back(event, task, app, back=False))

    def _taking_back(self, event: str, task: str, app: str, *, back: bool) -> Call[bool]:
        of = next((each.of for (name, _), each in self._all.items() if name == event), self._app.name)
        name = subscription_name(event, app or self._app.name, task)
        return trips.set_unsubscribed(
            Keys(of), name, ttl=self._app.settings.subscription_ttl, unsubscribed=back
        )

    def _jobs(self, events: Sequence[Event]) -> list[Job]:
        if isinstance(events, Event) or not isinstance(cast("object", events), Iterable):
            raise TypeError(f"events.send takes a list of events, got {events!r}")
        jobs: list[Job] = []
        for each in events:
            if not isinstance(cast("object", each), Event):
                raise TypeError(f"events.send takes events, got {each!r}: make one with its class")
            declared = get_event_declaration(type(each))
            if not declared.everywhere and declared.app is not self._app:
                raise Misconfigured(
                    f"event {declared.name} is of application {declared.app.name!r}: send it there"
                )
            jobs.append(declared.make_job(each, self._app))
        return jobs

    async def _state(self, redis: AsyncDriver) -> list[EventState]:
        others = sorted({each.of for each in self._all.values()} - {self._app.name})
        return [each for of in (self._app.name, *others) for each in await self._state_of(redis, of)]

    async def _state_of(self, redis: AsyncDriver, of: str) -> list[EventState]:
        """Of one application: of this one all that Redis knows; of another what is declared here."""
        keys = Keys(of)
        registry = await redis.perform(trips.get_subscribers(keys, b""))
        counts = await redis.perform(trips.count_unclaimed(keys))
        back = [each.split("\n") for each in registry.unsubscribed]
        read = [
            parse_subscription(value, self._app.settings.message_limit)
            for value in (registry.entries or {}).values()
        ]
        subscribed = group_by_subject(each for each in read if each is not None)
        own = {key: each for key, each in self._all.items() if each.of == of}
        declared = {format_subject(*key) for key in own}
        subjects = sorted(declared if of != self._app.name else {*subscribed, *counts, *declared})
        kept = (
            await redis.perform_all([trips.count_kept_events(keys, each) for each in subjects])
            if subjects
            else []
        )
        states = [
            _state_of(subject, subscribed.get(subject, ()), many, counts.get(subject, 0), own, of)
            for subject, many in zip(subjects, kept, strict=True)
        ]
        return [msgspec.structs.replace(each, taken_back=_taken_back(each.event, back)) for each in states]


def _state_of(
    subject: str,
    subscribed: Sequence[Subscription],
    kept: int,
    unclaimed: int,
    own: Mapping[tuple[str, int], EventDeclaration],
    of: str,
) -> EventState:
    name, _, number = subject.rpartition(" ")
    version = int(number) if number.isdigit() else 0
    declared = own.get((name, version))
    subscribers = [Subscriber(each.job.app, each.job.task, each.job.queue, each.takes) for each in subscribed]
    ordered = sorted(subscribers, key=lambda each: (each.app, each.task))
    fields = None if declared is None else declared.fields
    return EventState(name, version, tuple(ordered), kept, unclaimed, fields, of)


def _taken_back(event: str, names: Iterable[list[str]]) -> tuple[WithdrawnSubscription, ...]:
    """Those to one event, of all names in the registry whose subscription was taken back."""
    return tuple(
        WithdrawnSubscription(*each[1:]) for each in sorted(names) if len(each) == 3 and each[0] == event
    )


def _sent(events: Sequence[Event], jobs: Sequence[Job]) -> list[SentEvent]:
    return [
        SentEvent(job.id, job.task, get_event_declaration(type(each)).version)
        for job, each in zip(jobs, events, strict=True)
    ]
