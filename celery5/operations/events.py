"""See events and who is subscribed to them; send them, and withdraw subscriptions."""

from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from celery5.operations.operation import Changed, Effect, NotFound, Operation
from celery5.operations.parameters import Nothing, Text, about
from celery5.similar_names import find_similar

if TYPE_CHECKING:
    from celery5.app import App
    from celery5.events.registry import EventState, Subscriber


async def list_events(app: "App", _: Nothing) -> "list[EventState]":
    """Show each event: which tasks are subscribed, how many are kept, and how many nobody wanted in a week."""
    return await app.events.astate()


class OneEvent(msgspec.Struct, frozen=True):
    """An event."""

    event: Annotated[Text, about("The event.")]


async def show_event(app: "App", asked: OneEvent) -> "list[EventState]":
    """Show each version of an event, its fields, and who is subscribed."""
    states = await app.events.astate()
    versions = [state for state in states if state.event == asked.event]
    if not versions:
        raise _make_unknown(asked.event, [state.event for state in states])
    return versions


class NewEvent(msgspec.Struct, frozen=True):
    """An event to send."""

    event: Annotated[Text, about("The event.")]
    fields: Annotated[dict[str, Any], about("Its fields.")] = {}
    version: Annotated[int | None, about("Which version; default: the newest.")] = None


async def send_event(app: "App", asked: NewEvent) -> Changed:
    """Send an event with these fields."""
    from celery5.sending.sender import without_backlog

    versions = app.events.versions(asked.event)
    if not versions:
        raise _make_unknown(asked.event, list(app.events))
    version = max(versions) if asked.version is None else asked.version
    if version not in versions:
        others = ", ".join(map(str, versions))
        raise NotFound(f"event {asked.event!r} has no version {version} here; there is {others}")
    made = app.events.make_event(versions[version], asked.fields)
    with without_backlog():  # it says that the event is sent only if it is
        (sent,) = await app.events.asend([made])
    await app.audit.arecord_sending("event:send", asked.event, {"event": sent.id, "version": version})
    return Changed(summary=f"event {sent.id} is sent", count=1, value=sent)


class OneSubscription(msgspec.Struct, frozen=True):
    """The subscription of a task to an event."""

    event: Annotated[Text, about("The event.")]
    task: Annotated[Text, about("The task that is subscribed.")]
    subscriber: Annotated[str, about("The task's application; default: this one.", metavar="APP")] = ""


async def unsubscribe(app: "App", asked: OneSubscription) -> Changed:
    """Withdraw the subscription of a task to an event, at once and for good."""
    states = await app.events.astate()
    subscribers = [
        subscriber for state in states if state.event == asked.event for subscriber in state.subscribers
    ]
    wanted = (asked.subscriber or app.name, asked.task)
    if not any((subscriber.app, subscriber.task) == wanted for subscriber in subscribers):
        if asked.event not in (known := [state.event for state in states]):
            raise _make_unknown(asked.event, known)
        raise NotFound(
            f"{asked.task} is not subscribed to {asked.event}{_suggest_subscriber(asked.task, subscribers)}"
        )
    done = await app.events.aunsubscribe(asked.event, asked.task, app=asked.subscriber)
    return Changed(summary=f"{asked.task} gets no more {asked.event}", count=int(done))


async def resubscribe(app: "App", asked: OneSubscription) -> Changed:
    """Allow a subscription again that was withdrawn: workers that declare it do so within a minute."""
    if not await app.events.aresubscribe(asked.event, asked.task, app=asked.subscriber):
        raise NotFound(f"no subscription of {asked.task} to {asked.event} was withdrawn")
    return Changed(summary=f"{asked.task} gets {asked.event} as soon as a worker declares it", count=1)


def _make_unknown(name: str, known: list[str]) -> NotFound:
    if similar := find_similar(name, known):
        return NotFound(f"no event {name!r} is known: did you mean {similar!r}?")
    others = ", ".join(sorted(set(known))) or "none"
    return NotFound(f"no event {name!r} is known; those that are: {others}")


def _suggest_subscriber(task: str, subscribers: "list[Subscriber]") -> str:
    """Return the subscriber with a similar name, or else all subscribers, as the end of a message."""
    if similar := find_similar(task, [subscriber.task for subscriber in subscribers]):
        app = next(subscriber.app for subscriber in subscribers if subscriber.task == similar)
        return f": did you mean {similar!r} of {app}?"
    others = ", ".join(sorted({f"{other.task} of {other.app}" for other in subscribers})) or "none"
    return f"; those that are: {others}"


EVENT_OPERATIONS = (
    Operation("event:list", list_events, result_module="celery5.events.registry"),
    Operation("event:show", show_event, result_module="celery5.events.registry"),
    Operation("event:send", send_event, Effect.SEND_EVENTS),
    Operation("event:unsubscribe", unsubscribe, Effect.DELETE),
    Operation("event:resubscribe", resubscribe, Effect.ADJUST),
)
"""The operations on events."""
