"""Show an application's queues and who works on them (`info`), and look for faults (`doctor`)."""

from collections import Counter
from typing import TYPE_CHECKING

import click

from celery5.cli.commands.autoscale import format_scaling
from celery5.cli.commands.event import count_waiting, format_waiting
from celery5.cli.commands.limit import format_suspensions
from celery5.cli.commands.queue import format_unread_warning
from celery5.cli.terminal.errors import EXIT_FAILED
from celery5.cli.terminal.flags import Duration
from celery5.cli.terminal.output import (
    echo,
    format_cell,
    format_duration,
    format_fields,
    format_table,
    to_json,
)
from celery5.cli.terminal.partial import ReachedBrokers, skip_unreachable
from celery5.cli.terminal.target import Target
from celery5.errors import BrokerError, Misconfigured
from celery5.protocol.masking import get_error_text

if TYPE_CHECKING:
    from celery5.app import App
    from celery5.protocol.health.broker_diagnosis import Finding
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


@click.command()
@click.option("--json", "wants_json", is_flag=True, help="For programs.")
@click.option(
    "--limit",
    type=Duration(0.1, 600),
    default=15.0,
    show_default=True,
    metavar="SECONDS",
    help="How long each check may take.",
)
@click.pass_obj
def doctor(target: Target, *, wants_json: bool, limit: float) -> int:
    """Look at the application, its settings, broker, keys and workers, at systemd's units, and at Python.

    A line for each: ok, warn or fail, and what to do. Exits with 1 when one fails.
    """
    from celery5.config.settings import InvalidSettings
    from celery5.doctor.examination import get_checks, get_host_checks, run_checks
    from celery5.protocol.health.broker_diagnosis import Finding

    found: list[Finding] = []
    try:
        checks = get_checks(target.load(serves=True))
    except (Misconfigured, BrokerError) as error:
        if not target.name:
            raise
        why = get_error_text(error)
        which = "settings" if isinstance(error, InvalidSettings) else "application"
        found.append(Finding(which, "fail", why, "correct it: all else needs the application"))
        checks = get_host_checks()
    for each in found:
        _show_finding(each, wants_json)
    for each in run_checks(checks, limit=limit):
        _show_finding(each, wants_json)
        found.append(each)
    if wants_json:
        echo(to_json(found))
    else:
        counts = Counter(each.state for each in found)
        echo(f"\n{counts['ok']} ok, {counts['warn']} warn, {counts['fail']} fail")
    return EXIT_FAILED if any(each.state == "fail" for each in found) else 0


def _show_finding(each: "Finding", wants_json: bool) -> None:
    """A line as soon as it is known, and below it what to do."""
    if wants_json:
        return
    echo(f"{each.state:4}  {each.check:12}  {format_cell(each.says)}")
    if each.state != "ok" and each.remedy:
        echo(f"{'':20}{format_cell(each.remedy)}")
