"""The events of an application: the declared ones, sending in bulk, and their state in Redis."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, cast

import msgspec

from celery5.audit.recording import perform_audited
from celery5.broker.call import Call
from celery5.broker.calls import events as trips
from celery5.broker.calls.queues import QueueState, get_queue_state
from celery5.broker.colour import blocking
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
from celery5.protocol.bounded_decoding import read_whole
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
    """A task that is subscribed to an event."""

    app: str
    task: str
    # The queue of its jobs.
    queue: str
    # The fields that it takes; None for all.
    takes: tuple[str, ...] | None


class WithdrawnSubscription(msgspec.Struct, frozen=True):
    """A subscription that was withdrawn: it is not in force, whatever workers declare."""

    app: str
    task: str


class EventState(msgspec.Struct, frozen=True):
    """The state of one version of an event."""

    event: str
    version: int
    subscribers: tuple[Subscriber, ...]
    # How many events are kept because there was no subscriber.
    kept: int
    # How many events had no subscriber in the last week.
    unclaimed: int
    # The fields that this process declares; None if it declares none.
    fields: tuple[str, ...] | None
    # The application whose event it is.
    of: str
    # Withdrawn subscriptions, to all versions of the event.
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
        """Return the declared versions of one event, sorted."""
        return {
            version: self._all[name, version].kind
            for declared_name, version in sorted(self._all)
            if declared_name == name
        }

    def make_event(self, kind: type[Event], fields: Mapping[str, object]) -> Event:
        """Return an event from fields in their JSON form: a UUID as text, for instance. Raises BadArguments."""
        return get_event_declaration(kind).parse_event(fields)

    @property
    def has_own_events(self) -> bool:
        """Whether an event belongs to this application, so that it needs a Router."""
        return any(declaration.of == self._app.name for declaration in self._all.values())

    def add(self, declaration: EventDeclaration) -> None:
        """Add an event. Raises Misconfigured when a different class has its name and version."""
        first = self._all.setdefault((declaration.name, declaration.version), declaration)
        if first.kind is not declaration.kind:
            raise Misconfigured(
                f"two events are named {declaration.name!r}, version {declaration.version}: give one of them "
                "@event(name=...) or another version"
            )

    def group_subscriptions(self) -> dict[str, list[Subscription]]:
        """Return the subscriptions of the application's tasks, by the application whose events those are."""
        subscriptions: dict[str, list[Subscription]] = {}
        for declaration in list_event_declarations():
            subscribed = declaration.list_subscriptions(self._app)
            if subscribed:
                of = self._app.name if declaration.is_of_every_application else declaration.of
                subscriptions.setdefault(of, []).extend(subscribed)
        return subscriptions

    def list_queues(self) -> set[str]:
        """Return the queues of these subscriptions."""
        return {
            subscription.job.queue
            for subscribed in self.group_subscriptions().values()
            for subscription in subscribed
        }

    async def asend(self, events: Sequence[Event]) -> list[SentEvent]:
        """Send many events in few round trips; return their handles in order.

        Raises:
            TypeError: Before anything is sent: an item is no event.
            MessageTooLarge: Before anything is sent.
            Misconfigured: Before anything is sent: an event belongs to a different application.
            BrokerUnavailable: As in `App.send_many`.
            BacklogFull: As in `App.send_many`.
        """
        jobs = self._make_jobs(events)
        await self._app.adispatch(jobs)
        return _make_handles(events, jobs)

    @blocking(asend)
    def send(self) -> None: ...

    async def awaiting(self) -> QueueState:
        """Return how many events wait for a Router, and the live Routers as its `workers`."""
        return await self._app.aperform(get_queue_state(self._app.queue(EVENTS)))

    @blocking(awaiting)
    def waiting(self) -> None: ...

    async def astate(self) -> list[EventState]:
        """Return the state of the application's events."""
        redis = await self._app.connections.get_async_driver()
        return await _read_states(self._app, redis, self._all)

    @blocking(astate)
    def state(self) -> None: ...

    async def aunsubscribe(self, event: str, task: str, *, app: str = "") -> bool:
        """Withdraw the subscription of a task at once, whatever workers declare.

        Args:
            app: The task's application; '' for this one.

        Returns:
            Whether there was a subscription in force.
        """
        call = self._set_withdrawn(event, task, app, withdrawn=True)
        subscriber = _describe_subscriber(task, app)
        redis = await self._app.connections.get_async_driver()
        return await perform_audited(self._app, redis, call, "event:unsubscribe", event, subscriber)

    @blocking(aunsubscribe)
    def unsubscribe(self) -> None: ...

    async def aresubscribe(self, event: str, task: str, *, app: str = "") -> bool:
        """Allow a withdrawn subscription again: its workers declare it within a minute.

        Returns:
            Whether it was withdrawn.
        """
        call = self._set_withdrawn(event, task, app, withdrawn=False)
        subscriber = _describe_subscriber(task, app)
        redis = await self._app.connections.get_async_driver()
        return await perform_audited(self._app, redis, call, "event:resubscribe", event, subscriber)

    @blocking(aresubscribe)
    def resubscribe(self) -> None: ...

    def _set_withdrawn(self, event: str, task: str, app: str, *, withdrawn: bool) -> Call[bool]:
        owner = next(
            (declaration.of for (name, _), declaration in self._all.items() if name == event), self._app.name
        )
        name = subscription_name(event, app or self._app.name, task)
        ttl = self._app.settings.subscription_ttl
        return trips.set_unsubscribed(Keys(owner), name, ttl=ttl, unsubscribed=withdrawn)

    def _make_jobs(self, events: Sequence[Event]) -> list[Job]:
        if isinstance(events, Event) or not isinstance(cast("object", events), Iterable):
            raise TypeError(f"events.send takes a list of events, got {events!r}")
        jobs: list[Job] = []
        for event in events:
            if not isinstance(cast("object", event), Event):
                raise TypeError(f"events.send takes events, got {event!r}: make one with its class")
            declaration = get_event_declaration(type(event))
            if not declaration.is_of_every_application and declaration.app is not self._app:
                raise Misconfigured(
                    f"event {declaration.name} is of application {declaration.app.name!r}: send it there"
                )
            jobs.append(declaration.make_job(event, self._app))
        return jobs


def _describe_subscriber(task: str, app: str) -> dict[str, object]:
    """Return the subscriber, for the audit trail."""
    return {"task": task, "app": app}


_Declarations = Mapping[tuple[str, int], EventDeclaration]


async def _read_states(
    app: "Application", redis: AsyncDriver, declarations: _Declarations
) -> list[EventState]:
    others = sorted({declaration.of for declaration in declarations.values()} - {app.name})
    return [
        state
        for owner in (app.name, *others)
        for state in await _read_states_of(app, redis, declarations, owner)
    ]


async def _read_states_of(
    app: "Application", redis: AsyncDriver, declarations: _Declarations, owner: str
) -> list[EventState]:
    """Return the state of all known events of this application, or of the declared ones of a foreign `owner`."""
    keys = Keys(owner)
    registry = await redis.perform(trips.get_subscribers(keys, b""))
    unclaimed = await redis.perform(trips.count_unclaimed(keys))
    withdrawn = [name.split("\n") for name in registry.unsubscribed]
    stored = [
        parse_subscription(value, app.settings.message_limit) for value in (registry.entries or {}).values()
    ]
    subscriptions = group_by_subject(subscription for subscription in stored if subscription is not None)
    own = {key: declaration for key, declaration in declarations.items() if declaration.of == owner}
    declared = {format_subject(*key) for key in own}
    subjects = sorted(declared if owner != app.name else {*subscriptions, *unclaimed, *declared})
    calls = [trips.count_kept_events(keys, subject) for subject in subjects]
    kept_counts = await redis.perform_all(calls) if calls else []
    return [
        _make_state(
            subject,
            subscriptions.get(subject, ()),
            kept=kept,
            unclaimed=unclaimed.get(subject, 0),
            own=own,
            owner=owner,
            withdrawn=withdrawn,
        )
        for subject, kept in zip(subjects, kept_counts, strict=True)
    ]


def _make_state(
    subject: str,
    subscriptions: Sequence[Subscription],
    *,
    kept: int,
    unclaimed: int,
    own: _Declarations,
    owner: str,
    withdrawn: Iterable[list[str]],
) -> EventState:
    name, _, number = subject.rpartition(" ")
    version = read_whole(number)
    declaration = own.get((name, version))
    subscribers = [
        Subscriber(subscription.job.app, subscription.job.task, subscription.job.queue, subscription.takes)
        for subscription in subscriptions
    ]
    return EventState(
        name,
        version,
        tuple(sorted(subscribers, key=lambda subscriber: (subscriber.app, subscriber.task))),
        kept,
        unclaimed,
        None if declaration is None else declaration.fields,
        owner,
        _get_withdrawn(name, withdrawn),
    )


def _get_withdrawn(event: str, names: Iterable[list[str]]) -> tuple[WithdrawnSubscription, ...]:
    """Return the withdrawn subscriptions to one event."""
    return tuple(
        WithdrawnSubscription(*parts[1:]) for parts in sorted(names) if len(parts) == 3 and parts[0] == event
    )


def _make_handles(events: Sequence[Event], jobs: Sequence[Job]) -> list[SentEvent]:
    return [
        SentEvent(job.id, job.task, get_event_declaration(type(event)).version)
        for job, event in zip(jobs, events, strict=True)
    ]
