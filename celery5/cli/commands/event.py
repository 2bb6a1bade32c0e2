"""Show, send and subscribe events (`event`)."""

from contextlib import suppress
from typing import TYPE_CHECKING

import click

from celery5.cli.terminal.operation_commands import CommandView, Finished, make_group, perform
from celery5.cli.terminal.output import echo, format_table, to_json, to_one_line
from celery5.cli.terminal.target import Target
from celery5.errors import BrokerError
from celery5.operations.events import EVENT_OPERATIONS, NewEvent
from celery5.protocol.text_values import parse_parameter

if TYPE_CHECKING:
    from celery5.broker.calls.queues import QueueState
    from celery5.events.registry import EventState


def _show_list(finished: Finished) -> None:
    """Print the events, and what waits for a Router."""
    app, states = finished.app, finished.result
    queue_state = app.events.waiting()
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
    if finished.wants_json:
        echo(to_json({"events": states, **count_waiting(queue_state), "routers": _routers(queue_state)}))
    else:
        echo(format_table(rows, empty="no events: none is declared or sent"))
        if rows or format_waiting(queue_state):
            echo(f"\nfor a Router: {to_one_line(format_waiting(queue_state)) or 'none wait'}")
    if app.events.has_own_events or queue_state.waiting:
        _warn_without_router(app.name, queue_state)


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


event = make_group(
    "event",
    "An event says that something happened; tasks subscribe to events.",
    [operation for operation in EVENT_OPERATIONS if operation.verb != "send"],
    {
        "list": CommandView(show=_show_list),
        "show": CommandView(
            text=lambda versions: "\n\n".join(map(_format_event, versions)),
            help="Show EVENT: each version, its fields, and who is subscribed. Exits with 1 when it is not known.",
        ),
        "unsubscribe": CommandView(
            would=lambda asked: f"withdraw the subscription of {asked.task} to {asked.event} for good",
            help="""Withdraw the subscription of TASK to EVENT, at once and for good.

No Router makes jobs for it any more, also while workers still declare it. Jobs that were made stay.
""",
        ),
    },
)


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
    operation = next(candidate for candidate in EVENT_OPERATIONS if candidate.verb == "send")
    asked = NewEvent(name, dict(parse_parameter(field) for field in fields), version)
    sent = perform(app, operation, asked).value
    echo(to_json(sent) if wants_json else sent.id)
    with suppress(BrokerError):  # it is sent: the warning may fail
        _warn_without_router(app.name, app.events.waiting())
