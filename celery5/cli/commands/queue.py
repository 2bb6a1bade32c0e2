"""List queues, purge them, and show what they take in Redis (`queue`)."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from celery5.cli.commands.limit import format_suspensions
from celery5.cli.terminal.errors import skip_unreachable
from celery5.cli.terminal.output import echo, format_cell, format_table, to_json, to_one_line
from celery5.cli.terminal.target import Target
from celery5.connections.brokers import SIMILARITY_CUTOFF
from celery5.errors import Misconfigured
from celery5.protocol.byte_counts import format_bytes
from celery5.protocol.durations import format_duration
from celery5.protocol.observability.overview import format_rate
from celery5.similar_names import find_similar

if TYPE_CHECKING:
    from celery5.app import App
    from celery5.broker.calls.queues import QueueState
    from celery5.protocol.observability.storage import QueueStorage, ServerStorage


@click.group(no_args_is_help=False)
def queue() -> None:
    """Queues hold jobs until a worker takes them."""


@queue.command("list")
@click.option("--json", "wants_json", is_flag=True, help="For programs.")
@click.pass_obj
def list_queues(target: Target, *, wants_json: bool) -> None:
    """Show each queue: its backlog and the age of its oldest job, waiting, running, held, scheduled and dead jobs, and
    whether it is paused for all workers; also what holds jobs, and which queues have jobs and no worker.

    The backlog is what could run by now: jobs that wait, that limits hold, and scheduled ones that are overdue. Of the
    waiting ones, `high` and `low` have such a priority. `in` and `out` are how fast jobs come and leave,
    measured over the time `over` up to now.
    """
    app = target.load()
    with skip_unreachable(app, wants_json=wants_json):
        states = list(app.info().queues.values())
        rows = _rows(states, wants_json=wants_json)
        echo(to_json(rows) if wants_json else format_table(rows, empty="no queues yet: nothing was sent"))
        if not wants_json and (suspended := format_suspensions(app)):
            echo(f"\nsuspended  {to_one_line(suspended)}")
        if not wants_json and (unread := format_unread_warning(app, states)):
            echo(f"\nunread  {to_one_line(unread)}")


def format_unread_warning(app: "App", states: "Sequence[QueueState]") -> str:
    """Return which queues have jobs and no worker, each with a similar queue that may have been meant; '' for none.

    Any name is a valid queue, so this is where a misspelt one shows.
    """
    used_queues = {
        *app.brokers.used_queues(),
        *(state.queue for state in states if any(worker.alive for worker in state.workers)),
    }
    warnings: list[str] = []
    for state in states:
        if state.unread:
            similar = find_similar(state.queue, used_queues - {state.queue}, cutoff=SIMILARITY_CUTOFF)
            hint = f", did you mean {similar}?" if similar and state.queue not in used_queues else ""
            jobs = "1 job" if state.unread == 1 else f"{state.unread} jobs"
            warnings.append(f"{state.queue} ({jobs}, no worker{hint})")
    return format_cell("; ".join(warnings))


@queue.command()
@click.argument("name", metavar="QUEUE")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.pass_obj
def purge(target: Target, /, name: str, *, yes: bool) -> None:
    """Revoke all jobs that wait on QUEUE, also scheduled and held ones. Running and dead jobs stay.

    Pause the queue first (celery5 worker pause-queue): a job that begins meanwhile is stopped.
    """
    app = target.load()
    with skip_unreachable(app, queues=[name]):
        if not yes:
            _confirm_purge(app, name)
        revoked = app.empty(name)
        echo(f"{name}: {revoked} job{'' if revoked == 1 else 's'} revoked")


def _confirm_purge(app: "App", name: str) -> None:
    """Ask before the jobs of a queue are revoked; of a name that no queue has nothing is asked. Raises UnknownQueue."""
    state = app.info(name).queues[name]
    if not sys.stdin.isatty():
        raise Misconfigured(f"this would revoke all jobs that wait on {name}: add --yes")
    waiting = state.count_unbegun()
    click.confirm(f"Revoke all jobs that wait on {name} ({waiting} now)?", err=True, abort=True)


@queue.command("storage")
@click.option("--json", "wants_json", is_flag=True, help="For programs.")
@click.pass_obj
def show_storage(target: Target, *, wants_json: bool) -> None:
    """Show what Redis holds: its memory and settings, and what each queue and stream takes.

    Bytes are estimates from a few entries of each key. Of queues the 200 with the most entries are shown.
    """
    storage = target.load().metrics.storage()
    if wants_json:
        echo(to_json(storage))
        return
    echo(format_table([_make_server_row(server) for server in storage.servers], empty=""))
    for server in storage.servers:
        for finding in (server.memory, server.persistence):
            if finding is not None and finding.state != "ok":
                echo(f"\n{server.broker}  {finding.state}  {finding.summary}: {finding.remedy}")
    queues = [_make_storage_row(row) for row in storage.queues]
    echo("\n" + format_table(queues, empty="no queues yet: nothing was sent"))
    streams = [
        {"stream": row.stream, "records": row.records, "total": format_bytes(row.total_bytes)}
        for row in storage.streams
    ]
    if streams:
        echo("\n" + format_table(streams, empty=""))
    echo("\n" + ", ".join(f"{name} {format_bytes(size)}" for name, size in storage.others.items()))
    if storage.queues_left_out or storage.streams_left_out:
        echo(f"not shown: {storage.queues_left_out} queues, {storage.streams_left_out} streams")


def _make_server_row(server: "ServerStorage") -> dict[str, object]:
    if server.unreachable:
        return {"broker": server.broker, "server": to_one_line(server.unreachable)}
    return {
        "broker": server.broker,
        "server": server.version,
        "used": format_bytes(server.used),
        "of": "no limit" if server.limit is None else format_bytes(server.limit),
        "peak": format_bytes(server.peak),
        "keys": server.keys,
        "evicted": server.evicted,
        "memory": server.memory.summary if server.memory else "",
        "persistence": server.persistence.summary if server.persistence else "",
    }


def _make_storage_row(row: "QueueStorage") -> dict[str, object]:
    return {
        "queue": row.queue,
        "total": format_bytes(row.total_bytes),
        "jobs": f"{row.jobs} in {format_bytes(row.stream_bytes)}",
        "waiting": f"{row.scheduled + row.held} in {format_bytes(row.waiting_bytes)}",
        "dead": f"{row.dead} in {format_bytes(row.dead_bytes)}",
        "index": format_bytes(row.index_bytes),
    }


def format_flow(state: "QueueState", *, wants_json: bool = False) -> dict[str, object]:
    """Return how fast jobs come to a queue and leave it, and whether it keeps up: cells, or fields for programs."""
    flow, verdict = state.flow, state.verdict
    if wants_json:
        return {"flow": flow, "idle": state.idle, "verdict": verdict}
    come, leave, over = ("", "", "")
    if flow is not None:
        come, leave = format_rate(flow.incoming), format_rate(flow.outgoing)
        over = format_duration(round(flow.seconds))
    return {"in": come, "out": leave, "over": over, "verdict": to_one_line(verdict.text.partition(":")[0])}


def _format_age(seconds: float | None) -> str:
    return "" if seconds is None else format_duration(seconds)


def _rows(states: "list[QueueState]", *, wants_json: bool) -> list[dict[str, object]]:
    by_priority = wants_json or any(state.high or state.low for state in states)
    any_held = any(state.held_by for state in states)
    return [
        {
            "queue": state.queue,
            "backlog": state.backlog,
            "oldest": state.oldest_waiting if wants_json else _format_age(state.oldest_waiting),
            "waiting": state.waiting,
            **({"high": state.high, "low": state.low} if by_priority else {}),
            "running": state.running,
            "held": state.held,
            **(
                {"held_by": state.held_by}
                if wants_json
                else {"held by": to_one_line(state.held_by)}
                if any_held
                else {}
            ),
            "scheduled": state.scheduled,
            **({"overdue": state.overdue} if wants_json else {}),
            "dead": state.dead,
            **format_flow(state, wants_json=wants_json),
            "paused": state.paused if wants_json else "yes" if state.paused else "",
            **({"workers": sum(worker.alive for worker in state.workers)} if wants_json else {}),
            **({"documents": state.documents} if wants_json and state.documents else {}),
        }
        for state in states
    ]
