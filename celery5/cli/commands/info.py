"""Info: the command that shows an application's queues and who works on them."""

from typing import TYPE_CHECKING

import click

from celery5.cli.commands.autoscale import format_scaling
from celery5.cli.commands.event import count_waiting, format_waiting
from celery5.cli.commands.limit import format_suspensions
from celery5.cli.commands.queue import format_unread_warning
from celery5.cli.terminal.output import echo, format_duration, format_fields, format_table, to_json
from celery5.cli.terminal.partial import ReachedBrokers, skip_unreachable
from celery5.cli.terminal.target import Target

if TYPE_CHECKING:
    from celery5.app import App
    from celery5.results.job_details import AppState


@click.command()
@click.option("--queue", help="This queue alone.")
@click.option("--json", "wants_json", is_flag=True, help="For programs.")
@click.pass_obj
def info(target: Target, queue: str | None, *, wants_json: bool) -> None:
    """Show the queues, what is in them, who works on them, and the Routers, Schedulers, Controllers and publishers that
    live."""
    app = target.load()
    with skip_unreachable(app, wants_json=wants_json, queues=[queue] if queue else []) as reached:
        state = app.info(queue)
        if wants_json:
            echo(to_json(_plain(app, state, reached)))
        else:
            _show(app, state)


def _plain(app: "App", state: "AppState", reached: ReachedBrokers) -> dict[str, object]:
    """For programs."""
    return {
        "app": state.app,
        "broker": app.connections.masked_url,
        "queues": state.queues,
        "scaling": state.scaling,
        "events": count_waiting(state.events),
        "routers": state.routers,
        "schedulers": state.schedulers,
        "controllers": state.controllers,
        "leader": state.leader,
        "publishers": state.publishers,
        "unreachable": reached.unreachable(),
    }


def _show(app: "App", state: "AppState") -> None:
    """For people."""
    echo(f"{state.app} at {app.connections.masked_url}\n")
    echo(format_table(_queues(state), empty="no queues yet: nothing was sent"))
    if undelivered := _documents(state):
        echo("\n" + format_table(undelivered, empty=""))
    beside = _beside(state, events=app.events.has_own_events)
    if named := format_suspensions(app):
        beside["suspended"] = named
    if named := format_unread_warning(app, list(state.queues.values())):
        beside["unread"] = named
    if beside:
        echo("\n" + format_fields(beside))
    if state.queues:
        echo("\n" + format_table(_workers(state), empty="no workers"))
    if state.scaling is not None:
        echo("\n" + format_fields(format_scaling(state.scaling, state.schedulers)))


def _beside(state: "AppState", *, events: bool) -> dict[str, object]:
    """What there is besides queues and workers."""
    wait = format_waiting(state.events)
    return {
        **({"events": wait or "none wait"} if wait or events else {}),
        **({"routers": ", ".join(state.routers) or "none lives"} if state.routers or wait or events else {}),
        **({"schedulers": ", ".join(state.schedulers)} if state.schedulers else {}),
        **({"controllers": ", ".join(_controllers(state))} if state.controllers else {}),
        **({"publishers": ", ".join(state.publishers)} if state.publishers else {}),
    }


def _controllers(state: "AppState") -> list[str]:
    return [f"{each} (leads)" if each == state.leader else each for each in state.controllers]


def _queues(state: "AppState") -> list[dict[str, object]]:
    return [
        {
            "queue": each.queue,
            "waiting": each.waiting,
            "oldest": "" if each.oldest_waiting is None else f"{format_duration(each.oldest_waiting)} ago",
            "running": each.running,
            "held": each.held,
            "scheduled": each.scheduled,
            "next due": "" if each.next_due is None else f"in {format_duration(each.next_due)}",
            "dead": each.dead,
            "oldest dead": "" if each.oldest_dead is None else f"{format_duration(each.oldest_dead)} ago",
            "keys": each.keys,
            "workers": sum(one.alive for one in each.workers),
            "paused": "yes" if each.paused else "",
        }
        for each in state.queues.values()
    ]


def _documents(state: "AppState") -> list[dict[str, object]]:
    return [
        {"sink": sink, "queue": each.queue, "documents": number}
        for each in state.queues.values()
        for sink, number in each.documents.items()
        if number
    ]


def _workers(state: "AppState") -> list[dict[str, object]]:
    return [
        {
            "worker": one.name,
            "queue": each.queue,
            "running": one.running,
            "lease": f"{format_duration(one.lease)} to go"
            if one.alive
            else "lapsed: its jobs are about to be recovered",
        }
        for each in state.queues.values()
        for one in each.workers
    ]
