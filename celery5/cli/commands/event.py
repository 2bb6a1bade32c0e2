"""Event: the commands about events."""

from contextlib import suppress
from typing import TYPE_CHECKING

import click

from celery5.cli.terminal.output import echo, format_table, to_json, to_one_line
from celery5.cli.terminal.target import Target
from celery5.errors import BrokerError, CeleryError
from celery5.protocol.similar_names import find_similar
from celery5.protocol.text_values import parse_parameter

if TYPE_CHECKING:
    from celery5.app import App
    from celery5.broker.calls.jobs import QueueState
    from celery5.events.event import Event
    from celery5.events.registry import EventState, Subscriber


class UnknownEvent(CeleryError):
    """No event of that name is known here."""


@click.group(no_args_is_help=False)
def event() -> None:
    """Events tell that something happened; tasks are subscribed to them."""


@event.command("list")
@click.option("--json", "wants_json", is_flag=True, help="For programs.")
@click.pass_obj
def list_events(target: Target, *, wants_json: bool) -> None:
    """Show each event: how many tasks are subscribed, how many are kept, and how many nobody wanted in a week."""
    app = target.load()
    found, there = app.events.state(), app.events.waiting()
    foreign = any(each.of != app.name for each in found)
    rows: list[dict[str, object]] = [
        {
            "event": each.event,
            **({"of": each.of} if foreign else {}),
            "version": each.version,
            "subscribers": len(each.subscribers),
            "kept": each.kept,
            "unclaimed": each.unclaimed,
        }
        for each in found
    ]
    if wants_json:
        echo(to_json({"events": found, **count_waiting(there), "routers": _routers(there)}))
    else:
        echo(format_table(rows, empty="no events: none is declared or sent"))
        if rows or format_waiting(there):
            echo(f"\nfor a Router: {to_one_line(format_waiting(there)) or 'none wait'}")
    if app.events.has_own_events or there.waiting:
        _warn(app.name, there)


@event.command()
@click.argument("name", metavar="EVENT")
@click.option("--json", "wants_json", is_flag=True, help="For programs.")
@click.pass_obj
def show(target: Target, name: str, *, wants_json: bool) -> None:
    """Show EVENT: each version, its fields, and who is subscribed. Exits with 1 when it is not known."""
    all_of_them = target.load().events.state()
    found = [each for each in all_of_them if each.event == name]
    if not found:
        raise _unknown(name, [each.event for each in all_of_them])
    echo(to_json(found) if wants_json else "\n\n".join(_told(each) for each in found))


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
    kind = _named(app, name, version)
    said = dict(parse_parameter(each) for each in fields)
    sent = app.events.send([app.events.make_event(kind, said)])[0]
    echo(to_json(sent) if wants_json else sent.id)
    with suppress(BrokerError):  # it is sent, or in the backlog: that nobody can be asked now changes nothing
        _warn(app.name, app.events.waiting())


@event.command()
@click.argument("name", metavar="EVENT")
@click.argument("task")
@click.option("--subscriber", default="", metavar="APP", help="The task's application; default: this one.")
@click.pass_obj
def unsubscribe(target: Target, *, name: str, task: str, subscriber: str) -> None:
    """Take the subscription of TASK to EVENT back, at once and for good.

    No Router makes jobs for it any more, also while workers still declare it. Jobs that were made stay.
    """
    app = target.load()
    states = app.events.state()
    there = [each for state in states if state.event == name for each in state.subscribers]
    if not any((each.app, each.task) == (subscriber or app.name, task) for each in there):
        if name not in (known := [each.event for each in states]):
            raise _unknown(name, known)
        raise UnknownEvent(f"{task} is not subscribed to {name}{_meant(task, there)}")
    app.events.unsubscribe(name, task, app=subscriber)
    echo(f"{to_one_line(task)} gets no more {to_one_line(name)}")


@event.command()
@click.argument("name", metavar="EVENT")
@click.argument("task")
@click.option("--subscriber", default="", metavar="APP", help="The task's application; default: this one.")
@click.pass_obj
def resubscribe(target: Target, *, name: str, task: str, subscriber: str) -> None:
    """Allow a subscription again that was taken back: workers that declare it do so within a minute."""
    if not target.load().events.resubscribe(name, task, app=subscriber):
        raise UnknownEvent(f"no subscription of {task} to {name} was taken back")
    echo(f"{to_one_line(task)} gets {to_one_line(name)} as soon as a worker declares it")


def count_waiting(there: "QueueState") -> dict[str, int]:
    """The events that wait for a Router, that one is at, that wait for their time, that are buried: for programs."""
    return {"waiting": there.waiting, "held": there.held, "scheduled": there.scheduled, "dead": there.dead}


def format_waiting(there: "QueueState") -> str:
    """The same for people; '' when there are none."""
    words = {"waiting": "wait", "held": "at Routers", "scheduled": "scheduled", "dead": "buried"}
    return ", ".join(f"{count} {words[name]}" for name, count in count_waiting(there).items() if count)


def _routers(there: "QueueState") -> list[str]:
    return [one.name for one in there.workers if one.alive]


def _warn(app: str, there: "QueueState") -> None:
    if not _routers(there):
        echo(f"no Router of {app} lives: events wait", err=True)


def _named(app: "App", name: str, version: int | None) -> "type[Event]":
    found = app.events.versions(name)
    if not found:
        raise _unknown(name, list(app.events))
    wanted = max(found) if version is None else version
    if wanted not in found:
        known = ", ".join(map(str, found))
        raise UnknownEvent(f"event {name!r} has no version {wanted} here; there is {known}")
    return found[wanted]


def _unknown(name: str, known: list[str]) -> UnknownEvent:
    near = find_similar(name, known)
    meant = (
        f": did you mean {near!r}?"
        if near
        else f"; those that are: {', '.join(sorted(set(known))) or 'none'}"
    )
    return UnknownEvent(f"no event {name!r} is known{meant}")


def _meant(task: str, there: "list[Subscriber]") -> str:
    """Which of the subscribers was meant by `task`, or who they are."""
    if near := find_similar(task, [each.task for each in there]):
        whose = next(each.app for each in there if each.task == near)
        return f": did you mean {near!r} of {whose}?"
    return (
        f"; those that are: {', '.join(sorted({f'{each.task} of {each.app}' for each in there})) or 'none'}"
    )


def _told(state: "EventState") -> str:
    fields = ", ".join(state.fields or ()) if state.fields is not None else "not declared here"
    rows: list[dict[str, object]] = [
        {
            "subscriber": each.task,
            "of": each.app,
            "queue": each.queue,
            "takes": "all" if each.takes is None else ", ".join(each.takes),
        }
        for each in state.subscribers
    ]
    head = f"{state.event}, version {state.version}\nfields: {fields}\nkept: {state.kept}\nunclaimed: {state.unclaimed}"
    if state.taken_back:
        head += f"\ntaken back: {', '.join(f'{each.task} of {each.app}' for each in state.taken_back)}"
    return f"{head}\n{format_table(rows, empty='nobody is subscribed')}"
