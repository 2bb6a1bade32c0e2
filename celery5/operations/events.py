"""See events and who is subscribed to them; send them, and withdraw subscriptions."""

from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from celery5.operations.operation import Changed, Effect, NotFound, Operation
from celery5.operations.parameters import Nothing, Text, about
from celery5.similar_names import did_you_mean

if TYPE_CHECKING:
    from celery5.app import App
    from celery5.events.registry import EventState


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
        hint = did_you_mean(asked.event, [state.event for state in states])
        raise NotFound(f"no event {asked.event!r} is known; {hint}".rstrip("; "))
    return versions


class NewEvent(msgspec.Struct, frozen=True):
    """An event to send."""

    event: Annotated[Text, about("The event.")]
    fields: Annotated[dict[str, Any], about("Its fields.")] = {}
    version: Annotated[int | None, about("Which version; default: the newest.")] = None


async def send_event(app: "App", asked: NewEvent) -> Changed:
    """Send an event with these fields."""
    versions = app.events.versions(asked.event)
    version = max(versions, default=0) if asked.version is None else asked.version
    if version not in versions:
        raise NotFound(f"event {asked.event!r} is not declared here, or not in this version")
    (sent,) = await app.events.asend([app.events.make_event(versions[version], asked.fields)])
    how = {"event": sent.id, "version": version}
    await app.audit.arecord_sending("event:send", asked.event, how)
    return Changed(summary=f"event {sent.id} is sent", count=1)


class OneSubscription(msgspec.Struct, frozen=True):
    """The subscription of a task to an event."""

    event: Annotated[Text, about("The event.")]
    task: Annotated[Text, about("The task that is subscribed.")]
    subscriber: Annotated[str, about("The task's application; default: this one.", metavar="APP")] = ""


async def unsubscribe(app: "App", asked: OneSubscription) -> Changed:
    """Withdraw the subscription of a task to an event, at once and for good."""
    done = await app.events.aunsubscribe(asked.event, asked.task, app=asked.subscriber)
    return Changed(summary=f"{asked.task} gets no more {asked.event}", count=int(done))


async def resubscribe(app: "App", asked: OneSubscription) -> Changed:
    """Allow a subscription again that was withdrawn: workers that declare it do so within a minute."""
    if not await app.events.aresubscribe(asked.event, asked.task, app=asked.subscriber):
        raise NotFound(f"no subscription of {asked.task} to {asked.event} was withdrawn")
    return Changed(summary=f"{asked.task} gets {asked.event} as soon as a worker declares it", count=1)


EVENT_OPERATIONS = (
    Operation("event:list", list_events),
    Operation("event:show", show_event),
    Operation("event:send", send_event, Effect.SEND_EVENTS),
    Operation("event:unsubscribe", unsubscribe, Effect.DELETE),
    Operation("event:resubscribe", resubscribe, Effect.ADJUST),
)
"""The operations on events."""
