"""Show, send and subscribe events (`event`)."""

from contextlib import suppress
from typing import TYPE_CHECKING

import click

from celery5.cli.terminal.output import echo, format_table, to_json, to_one_line
from celery5.cli.terminal.target import Target
from celery5.errors import BrokerError, CeleryError
from celery5.protocol.text_values import parse_parameter
from celery5.sending.sender import without_backlog
from celery5.similar_names import find_similar

if TYPE_CHECKING:
    from celery5.app import App
    from celery5.broker.calls.queues import QueueState
    from celery5.events.event import Event
    from celery5.events.registry import EventState, Subscriber


class UnknownEvent(CeleryError):
    """The application has no event of that name."""


@click.group(no_args_is_help=False)
def event() -> None:
    """An event says that something happened; tasks subscribe to events."""


@event.command("list")
@click.option("--json", "wants_json", is_flag=True, help="For programs.")
@click.pass_obj
def list_events(target: Target, *, wants_json: bool) -> None:
    """Show each event: how many tasks are subscribed, how many are kept, and how many nobody wanted in a week."""
    app = target.load()
    states, queue_state = app.events.state(), app.events.waiting()
    foreign = any(state.of != app.name for state in states)
    rows: list[dict[str, object]] = [
        {
            "event": state.event,
            **({"of": state.of} if foreign else {}),
            "version": state.version,
            "subscribers": len(state.subscribers),
            "kept": state.kept,
            "unclaimed": state.unclaimed,
        }
        for state in states
    ]
    if wants_json:
        echo(to_json({"events": states, **count_waiting(queue_state), "routers": _routers(queue_state)}))
    else:
        echo(format_table(rows, empty="no events: none is declared or sent"))
        if rows or format_waiting(queue_state):
            echo(f"\nfor a Router: {to_one_line(format_waiting(queue_state)) or 'none wait'}")
    if app.events.has_own_events or queue_state.waiting:
        _warn_without_router(app.name, queue_state)


@event.command()
@click.argument("name", metavar="EVENT")
@click.option("--json", "wants_json", is_flag=True, help="For programs.")
@click.pass_obj
def show(target: Target, name: str, *, wants_json: bool) -> None:
    """Show EVENT: each version, its fields, and who is subscribed. Exits with 1 when it is not known."""
    states = target.load().events.state()
    versions = [state for state in states if state.event == name]
    if not versions:
        raise _make_unknown_error(name, [state.event for state in states])
    echo(to_json(versions) if wants_json else "\n\n".join(_format_event(state) for state in versions))


@event.command()
@click.argument("name", metavar="EVENT")
@click.argument("fields", metavar="FIELD=VALUE...", nargs=-1)
@click.option("--version", type=int, help="Which version; default: the newest.")
@click.option("--json", "wants_json", is_flag=True, help="For programs.")
@click.pass_obj
def send(
    target: Target, /, *, name: str, fields: tuple[str, ...], version: int | None, wants_json: bool
) -> None:
    """Send EVENT with these fields. A VALUE is JSON, or a text if it is none."""
    app = target.load(needs_code=True)
    kind = _find_event(app, name, version)
    values = dict(parse_parameter(field) for field in fields)
    with without_backlog():  # this process ends: it says that the event is sent only if it is
        sent = app.events.send([app.events.make_event(kind, values)])[0]
    echo(to_json(sent) if wants_json else sent.id)
    how = {"event": sent.id, "version": sent.version}
    app.audit.record_sending("event:send", name, how)
    with suppress(BrokerError):  # it is sent: the warning may fail
        _warn_without_router(app.name, app.events.waiting())


@event.command()
@click.argument("name", metavar="EVENT")
@click.argument("task")
@click.option("--subscriber", default="", metavar="APP", help="The task's application; default: this one.")
@click.pass_obj
def unsubscribe(target: Target, *, name: str, task: str, subscriber: str) -> None:
    """Withdraw the subscription of TASK to EVENT, at once and for good.

    No Router makes jobs for it any more, also while workers still declare it. Jobs that were made stay.
    """
    app = target.load()
    states = app.events.state()
    subscribers = [listed for state in states if state.event == name for listed in state.subscribers]
    if not any((listed.app, listed.task) == (subscriber or app.name, task) for listed in subscribers):
        if name not in (known := [state.event for state in states]):
            raise _make_unknown_error(name, known)
        raise UnknownEvent(f"{task} is not subscribed to {name}{_suggest_subscriber(task, subscribers)}")
    app.events.unsubscribe(name, task, app=subscriber)
    echo(f"{to_one_line(task)} gets no more {to_one_line(name)}")


@event.command()
@click.argument("name", metavar="EVENT")
@click.argument("task")
@click.option("--subscriber", default="", metavar="APP", help="The task's application; default: this one.")
@click.pass_obj
def resubscribe(target: Target, *, name: str, task: str, subscriber: str) -> None:
    """Allow a subscription again that was withdrawn: workers that declare it do so within a minute."""
    if not target.load().events.resubscribe(name, task, app=subscriber):
        raise UnknownEvent(f"no subscription of {task} to {name} was withdrawn")
    echo(f"{to_one_line(task)} gets {to_one_line(name)} as soon as a worker declares it")


def count_waiting(state: "QueueState") -> dict[str, int]:
    """Return how many events wait, are held by Routers, are scheduled and are dead letters, for programs."""
    return {"waiting": state.waiting, "held": state.held, "scheduled": state.scheduled, "dead": state.dead}


def format_waiting(state: "QueueState") -> str:
    """Return the numbers of `count_waiting` for people; '' when there are none."""
    words = {"waiting": "wait", "held": "at Routers", "scheduled": "scheduled", "dead": "dead letters"}
    return ", ".join(f"{count} {words[name]}" for name, count in count_waiting(state).items() if count)


def _routers(state: "QueueState") -> list[str]:
    return [worker.name for worker in state.workers if worker.alive]


def _warn_without_router(app: str, state: "QueueState") -> None:
    if not _routers(state):
        echo(f"no Router of {app} is running: events wait", err=True)


def _find_event(app: "App", name: str, version: int | None) -> "type[Event]":
    versions = app.events.versions(name)
    if not versions:
        raise _make_unknown_error(name, list(app.events))
    wanted = max(versions) if version is None else version
    if wanted not in versions:
        known_versions = ", ".join(map(str, versions))
        raise UnknownEvent(f"event {name!r} has no version {wanted} here; there is {known_versions}")
    return versions[wanted]


def _make_unknown_error(name: str, known: list[str]) -> UnknownEvent:
    similar = find_similar(name, known)
    hint = (
        f": did you mean {similar!r}?"
        if similar
        else f"; those that are: {', '.join(sorted(set(known))) or 'none'}"
    )
    return UnknownEvent(f"no event {name!r} is known{hint}")


def _suggest_subscriber(task: str, subscribers: "list[Subscriber]") -> str:
    """Return the subscriber with a similar name, or else all subscribers, as the end of a message."""
    if similar := find_similar(task, [subscriber.task for subscriber in subscribers]):
        app = next(subscriber.app for subscriber in subscribers if subscriber.task == similar)
        return f": did you mean {similar!r} of {app}?"
    return f"; those that are: {', '.join(sorted({f'{other.task} of {other.app}' for other in subscribers})) or 'none'}"


def _format_event(state: "EventState") -> str:
    fields = ", ".join(state.fields or ()) if state.fields is not None else "not declared here"
    rows: list[dict[str, object]] = [
        {
            "subscriber": subscriber.task,
            "of": subscriber.app,
            "queue": subscriber.queue,
            "takes": "all" if subscriber.takes is None else ", ".join(subscriber.takes),
        }
        for subscriber in state.subscribers
    ]
    head = f"{state.event}, version {state.version}\nfields: {fields}\nkept: {state.kept}\nunclaimed: {state.unclaimed}"
    if state.taken_back:
        head += f"\nwithdrawn: {', '.join(f'{task.task} of {task.app}' for task in state.taken_back)}"
    return f"{head}\n{format_table(rows, empty='nobody is subscribed')}"
