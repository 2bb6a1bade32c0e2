"""Show an application's queues and who works on them (`info`), and look for faults (`doctor`)."""

import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import click
from msgspec.structs import replace

from celery5.cli.commands.autoscale import format_scaling
from celery5.cli.commands.event import count_waiting, format_waiting
from celery5.cli.commands.limit import format_rule_limits, format_suspensions
from celery5.cli.commands.queue import format_flow, format_missing, format_unread_warning, format_verdict
from celery5.cli.commands.stream import make_rows, make_summaries
from celery5.cli.terminal.errors import EXIT_FAILED, ReachedBrokers, skip_unreachable
from celery5.cli.terminal.flags import Duration
from celery5.cli.terminal.output import (
    INVOCATION,
    as_called,
    echo,
    format_fields,
    format_table,
    to_json,
    to_one_line,
)
from celery5.cli.terminal.target import Target
from celery5.cli.terminal.unknown_application import warn_of_unknown_application
from celery5.errors import BrokerError, Misconfigured
from celery5.observability.alerts import summarize_alerts
from celery5.protocol.commands.definitions import get_inbox_name
from celery5.protocol.counts import format_count
from celery5.protocol.durations import format_age, format_duration
from celery5.protocol.masking import get_error_text
from celery5.protocol.observability.overview import describe_loss, describe_repaired, select_unrepaired
from celery5.protocol.observability.queue_depth import AT_LIMITS
from celery5.protocol.process.missing import list_missing_lines
from celery5.protocol.process.standing import make_lost
from celery5.similar_names import join_names

if TYPE_CHECKING:
    from celery5.app import App
    from celery5.broker.calls.queues import WorkerState
    from celery5.protocol.health.broker_diagnosis import Finding
    from celery5.protocol.health.server_memory import ServerMemory
    from celery5.protocol.health.server_nodes import PrimaryView
    from celery5.protocol.observability.overview import WorkerOverview, WorkersOverview
    from celery5.results.job_details import AppState


LOST_LISTED = 5
"""Lost workers that `info` names."""


@click.command()
@click.option("--queue", help="This queue alone.")
@click.option("--json", "wants_json", is_flag=True, help="For programs.")
@click.pass_obj
def info(target: Target, queue: str | None, *, wants_json: bool) -> None:
    """Show the queues, what is in them, who works on them, the streams and their groups, and the Routers, Schedulers,
    Controllers and publishers that live."""
    app = target.load()
    with skip_unreachable(app, wants_json=wants_json, queues=[queue] if queue else []) as reached:
        state = app.info(queue)
        standings = app.metrics.workers(None if queue else state)
        streams = [] if queue else app.streams.info()
        servers = _read_servers(app)
        if wants_json:
            fields = {**_to_json_fields(app, state, reached), "servers": servers, "lost": standings.lost}
            echo(to_json({**fields, "streams": make_summaries(streams)}))
        else:
            _show(app, state, standings)
            if servers:
                echo("\n" + format_table(_make_server_rows(servers), empty=""))
            if streams:
                echo("\n" + format_table(make_rows(streams), empty=""))
        if not (state.queues or queue or streams):
            warn_of_unknown_application(app)


def _read_servers(app: "App") -> list["PrimaryView"]:
    """Return the servers of brokers that are clusters or have sentinels, as far as they answer."""
    found: list[PrimaryView] = []
    from celery5.broker.topologies import find_endpoint

    for name in app.brokers.names:
        endpoint = find_endpoint(app.brokers.get(name).endpoint)
        if endpoint.topology != "server":
            from celery5.doctor.server_nodes import read_primary_views

            with suppress(BrokerError):
                found += read_primary_views(endpoint, name)
    return found


def _make_server_rows(servers: Sequence["PrimaryView"]) -> list[dict[str, object]]:
    """Return a row for each primary, and below it one for each of its replicas."""
    rows: list[dict[str, object]] = []
    for primary in servers:
        address = primary.address or "the primary"
        state = "cannot be asked" if primary.error else ""
        rows.append(_make_server_row(address, "primary", " ".join(primary.slots), state))
        rows += [
            _make_server_row(replica.address, f"replica of {address}", "", replica.describe_lag())
            for replica in primary.replicas
        ]
    return rows


def _make_server_row(address: str, role: str, slots: str, lag: str) -> dict[str, object]:
    return {"server": address, "is": role, "slots": slots, "lag": lag}


def _to_json_fields(app: "App", state: "AppState", reached: ReachedBrokers) -> dict[str, object]:
    """Return the state for programs."""
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
        "missing": state.missing,
        "recycling": state.recycling,
        "publishers": state.publishers,
        "memory": [memory for memory in app.metrics.memory() if memory.is_almost_full],
        "unreachable": reached.unreachable(),
    }


def _show(app: "App", state: "AppState", standings: "WorkersOverview") -> None:
    """Print the state for people."""
    echo(f"{state.app} at {app.connections.masked_url}\n")
    if missing := list_missing_lines(state.missing, state.further_missing, time.time()):
        echo("\n".join(as_called(to_one_line(line)) for line in missing) + "\n")
    echo(format_table(_queues(state), empty="no queues yet: nothing was sent"))
    if undelivered := _documents(state):
        echo("\n" + format_table(undelivered, empty=""))
    if fields := _format_state(app, state):
        echo("\n" + format_fields(fields))
    if lost := _make_lost_rows(standings):
        echo("\n" + format_table(lost, empty=""))
    if repaired := describe_repaired(standings.lost):
        echo(f"\n{repaired}: {as_called('celery5 worker list shows them')}")
    if state.queues:
        echo("\n" + format_table(_workers(state, standings), empty="no workers"))
    if state.scaling is not None:
        echo("\n" + format_fields(format_scaling(state.scaling, state.schedulers)))


def _format_state(app: "App", state: "AppState") -> dict[str, object]:
    """Return fields about processes, runs, limits, alerts and unread queues; none where there is nothing to say."""
    fields = _format_processes(state, events=app.events.has_own_events)
    if state.runs:
        fields["workflows"] = f"{format_count(state.runs, 'live run')}: {as_called('celery5 workflow list')}"
    alerts = summarize_alerts(app.alerts.list())
    full = [memory for memory in app.metrics.memory() if memory.is_almost_full]
    texts = {
        "memory": "; ".join(_format_memory(memory, app.brokers.names) for memory in full),
        "suspended": format_suspensions(app),
        "limited": format_rule_limits(app),
        **format_missing(state.queues.values()),
        "alerts": f"{alerts}: {as_called('celery5 alert list')}" if alerts else "",
        "unread": format_unread_warning(app, list(state.queues.values())),
    }
    return fields | {name: text for name, text in texts.items() if text}


def _format_memory(memory: "ServerMemory", brokers: Sequence[str]) -> str:
    """Return how full the memory of a broker is, with its name when there are several."""
    broker = f"broker {memory.broker} is " if len(brokers) > 1 else ""
    return f"{broker}{memory.describe()}: {as_called('celery5 doctor')}"


def _make_lost_rows(standings: "WorkersOverview") -> list[dict[str, object]]:
    """Return a row for each of the last processes that were lost in the last hour."""
    lost = select_unrepaired(standings.lost)
    rows: list[dict[str, object]] = [
        {
            "lost": f"{process.kind} {process.name}",
            "when": process.health,
            "what it held": describe_loss(process),
        }
        for process in lost[:LOST_LISTED]
    ]
    if more := len(lost) - len(rows) + standings.further_lost:
        rows.append(
            {"lost": f"{more} more", "when": "", "what it held": as_called("celery5 worker list shows all")}
        )
    return rows


def _format_processes(state: "AppState", *, events: bool) -> dict[str, object]:
    """Return fields about events, Routers, Schedulers, Controllers and publishers."""
    waiting_events = format_waiting(state.events)
    return {
        **({"events": waiting_events or "none wait"} if waiting_events or events else {}),
        **(
            {"routers": ", ".join(state.routers) or "none is alive"}
            if state.routers or waiting_events or events
            else {}
        ),
        **({"schedulers": ", ".join(state.schedulers)} if state.schedulers else {}),
        **({"controllers": ", ".join(_controllers(state))} if state.controllers else {}),
        **({"publishers": ", ".join(state.publishers)} if state.publishers else {}),
        **({"recycling": state.recycling} if state.recycling else {}),
    }


def _controllers(state: "AppState") -> list[str]:
    return [f"{name} (leads)" if name == state.leader else name for name in state.controllers]


def _queues(state: "AppState") -> list[dict[str, object]]:
    return [
        {
            "queue": queue.queue,
            "backlog": queue.backlog,
            "oldest": "" if queue.oldest_waiting is None else format_age(0.0, queue.oldest_waiting),
            "waiting": queue.waiting,
            **format_flow(queue),
            "running": queue.running,
            AT_LIMITS: queue.held,
            "held by": queue.held_by,
            "scheduled": queue.scheduled,
            "next due": "" if queue.next_due is None else f"in {format_duration(queue.next_due)}",
            "dead": queue.dead,
            "oldest dead": "" if queue.oldest_dead is None else format_age(0.0, queue.oldest_dead),
            "keys": queue.keys,
            "workers": queue.live_workers,
            "verdict": format_verdict(queue),
            "paused": "yes" if queue.paused else "",
        }
        for queue in state.queues.values()
    ]


def _documents(state: "AppState") -> list[dict[str, object]]:
    return [
        {"sink": sink, "queue": queue.queue, "documents": number}
        for queue in state.queues.values()
        for sink, number in queue.documents.items()
        if number
    ]


def _workers(state: "AppState", standings: "WorkersOverview") -> list[dict[str, object]]:
    seen = {worker.name: worker for worker in standings.workers}

    def get(worker: "WorkerState") -> "WorkerOverview | None":
        return seen.get(get_inbox_name(worker.name)) if worker.alive else None

    def describe(worker: "WorkerState") -> str:
        if not worker.alive:
            return "" if worker.lapsed is None else make_lost(worker.lapsed).text
        known = get(worker)
        return "working" if known is None or known.standing == "working" else known.health

    return [
        {
            "worker": worker.name,
            "standing": describe(worker),
            "report": format_age(0.0, known.reported) if (known := get(worker)) and known.reported else "",
            "queues": _join_queue_names(queues),
            "running": running,
            "lease": f"{format_duration(worker.lease)} to go"
            if worker.alive
            else "lapsed: its jobs are about to be recovered",
        }
        for worker, queues, running in _join_queues(state)
    ]


MAX_QUEUES_WIDTH = 40
"""Characters of the names of the queues of a worker: further queues are counted. No name is cut."""


def _join_queue_names(names: Sequence[str]) -> str:
    """Return whole names, as many as fit into MAX_QUEUES_WIDTH and one at least, and how many more there are."""
    shown, width = 1, len(names[0])
    while shown < len(names) and (width := width + 2 + len(names[shown])) <= MAX_QUEUES_WIDTH:
        shown += 1
    return join_names(names, shown)


def _join_queues(state: "AppState") -> "list[tuple[WorkerState, list[str], int]]":
    """Return each worker once, with its queues and the jobs that it runs on all of them."""
    found: dict[tuple[str, bool], tuple[WorkerState, list[str], int]] = {}
    for queue in state.queues.values():
        for worker in queue.workers:
            key = worker.name, worker.alive
            _, queues, running = found.get(key, (worker, list[str](), 0))
            found[key] = worker, [*queues, queue.queue], running + worker.running
    return list(found.values())


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
    from celery5.doctor.examination import get_checks, get_host_checks, run_checks

    app, code = _examine_code(target)
    findings = [] if code is None else [replace(code, remedy=as_called(code.remedy))]
    if app is None:
        checks = get_host_checks()
    else:
        checks = [check for check in get_checks(app) if not findings or check.name != findings[0].check]
    for finding in findings:
        _show_finding(finding, wants_json)
    for checked in run_checks(checks, limit=limit):
        finding = replace(checked, remedy=as_called(checked.remedy))
        _show_finding(finding, wants_json)
        findings.append(finding)
    if wants_json:
        echo(to_json(findings))
    else:
        counts = Counter(finding.state for finding in findings)
        echo(f"\n{counts['ok']} ok, {counts['warn']} warn, {counts['fail']} fail")
    return EXIT_FAILED if any(finding.state == "fail" for finding in findings) else 0


def _examine_code(target: Target) -> "tuple[App | None, Finding | None]":
    """Return the application, without its code where that cannot be loaded, and what was found about its code.

    None for the application: not even its name is known. None for the finding: its code is loaded.
    """
    from celery5.protocol.health.broker_diagnosis import Finding

    if not target.app_name:
        try:
            return target.load(serves=True), None
        except (Misconfigured, BrokerError) as error:
            if not target.name:
                raise
            return _find_without_code(error, target.other)
    app = target.load()
    try:
        if target.other:
            Target(target.other).load(serves=True)
    except (Misconfigured, BrokerError) as error:
        return app, _describe_failed_code(error, is_known=True)
    return app, Finding("application", "ok", f"{app.name}, without its code, as --app-name says")


def _find_without_code(error: Exception, app_name: str) -> "tuple[App | None, Finding]":
    """Return the application whose code cannot be loaded, as far as it is known, and the finding on that."""
    from celery5.cli.terminal.loading import CannotLoad

    app = error.app if isinstance(error, CannotLoad) else None
    if app is None and app_name and isinstance(error, CannotLoad):
        app = Target("", app_name).load()
    return app, _describe_failed_code(error, is_known=app is not None)


def _describe_failed_code(error: Exception, *, is_known: bool) -> "Finding":
    """Return the finding on code that cannot be loaded. `is_known`: the application can be examined without it."""
    from celery5.config.settings import InvalidSettings
    from celery5.protocol.health.broker_diagnosis import Finding

    if isinstance(error, InvalidSettings):
        return Finding(
            "settings", "fail", get_error_text(error), "correct it: all else needs the application"
        )
    remedy = "correct it: until then no process can start or be reloaded"
    if not is_known:
        program = INVOCATION.get().program
        remedy += f"; {program} --app-name NAME doctor looks at Redis and all else meanwhile"
    return Finding("application", "fail", get_error_text(error), remedy)


def _show_finding(finding: "Finding", wants_json: bool) -> None:
    """Print a finding at once, and below it what to do."""
    if wants_json:
        return
    echo(f"{finding.state:4}  {finding.check:12}  {to_one_line(finding.summary)}")
    if finding.state != "ok" and finding.remedy:  # whole: half of a command is another command
        echo(f"{'':20}{to_one_line(finding.remedy)}")
