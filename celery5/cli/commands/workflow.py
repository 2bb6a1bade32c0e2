"""Show runs of workflows, and cancel, retry and signal them (`workflow`)."""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click
from msgspec.structs import asdict

from celery5.cli.terminal.errors import skip_unreachable
from celery5.cli.terminal.output import echo, format_fields, format_table, format_time, to_json
from celery5.cli.terminal.target import Target
from celery5.errors import CeleryError
from celery5.protocol.durations import format_duration
from celery5.protocol.text_values import parse_json

if TYPE_CHECKING:
    from celery5.app import App
    from celery5.protocol.workflows.status import RunStatus
    from celery5.workflows.run import WorkflowRun

JSON_FLAG = click.option("--json", "wants_json", is_flag=True, help="For programs.")
RUN_ARGUMENT = click.argument("run_id", metavar="ID")


class UnknownRun(CeleryError):
    """Nothing is known of a run: it was never started, or its results have expired."""


class RunNotChanged(CeleryError):
    """A run had ended before it could be cancelled, or signalled."""


@click.group(no_args_is_help=False)
def workflow() -> None:
    """Runs of workflows."""


@workflow.command("list")
@click.option("--live", is_flag=True, help="Only runs that have not ended.")
@click.option(
    "--count", type=click.IntRange(1, 1000), default=50, show_default=True, help="So many runs at most."
)
@JSON_FLAG
@click.pass_obj
def list_runs(target: Target, *, live: bool, count: int, wants_json: bool) -> None:
    """Show live runs, and those that have ended lately, the newest first."""
    app = target.load()
    with skip_unreachable(app, wants_json=wants_json):
        runs = app.workflows.list_runs(count=count, live_only=live)
        if wants_json:
            echo(to_json(runs))
            return
        rows: list[dict[str, object]] = [
            {
                "run": run.id,
                "workflow": run.name,
                "state": run.state.value,
                "done": f"{run.done} of {run.total}",
                "failed": run.failed,
                "age": format_duration(max(0.0, time.time() - run.created)),
                "error": "; ".join(filter(None, (run.failure, run.undo))),
            }
            for run in runs
        ]
        echo(format_table(rows, empty="no runs of workflows"))


@workflow.command()
@RUN_ARGUMENT
@JSON_FLAG
@click.pass_obj
def show(target: Target, run_id: str, *, wants_json: bool) -> None:
    """Show the state of the run ID, and what it waits for. Exits with 1 when nothing is known of it."""
    run = _find(target.load(), run_id)
    status = run.status()
    waiting = [node.name for node in run.graph().nodes if node.state.value == "WAITING"]
    waits = [name.removeprefix("wait for ") for name in waiting]
    if wants_json:
        echo(to_json({**asdict(status), "waits_for": waits}))
    else:
        echo(format_fields(dict(_fields(status, waits))))


def _fields(status: "RunStatus", waits: Sequence[str]) -> list[tuple[str, object]]:
    fields: list[tuple[str, object]] = [
        ("run", status.id),
        ("workflow", status.name),
        ("state", status.state.value),
        ("home", status.home),
        ("jobs", status.total),
        ("done", status.done),
        ("failed", status.failed),
        ("skipped", status.skipped),
        ("active", status.active),
        ("held", status.held),
        ("pending", status.pending),
        ("waits for", ", ".join(waits)),
        ("started", format_time(status.created)),
        ("ended", format_time(status.ended or 0)),
        ("deadline", format_time(status.deadline or 0)),
        ("part of", status.parent),
        ("error", status.failure),
        ("undo", status.undo),
    ]
    return [(name, value) for name, value in fields if value != ""]


@workflow.command()
@RUN_ARGUMENT
@click.pass_obj
def cancel(target: Target, run_id: str) -> None:
    """Cancel the run ID: nothing of it begins any more, what runs is revoked. Exits with 1 when it had ended before."""
    run = _find(target.load(), run_id)
    if not run.cancel():
        raise RunNotChanged(f"run {run_id} is not cancelled: it is {run.status().state.value}")
    echo(f"{run_id}: cancelled")


@workflow.command()
@RUN_ARGUMENT
@click.pass_obj
def retry(target: Target, run_id: str) -> None:
    """Start what has failed in the run ID again, and what depends on it."""
    _find(target.load(), run_id).retry()
    echo(f"{run_id}: running again")


@workflow.command()
@RUN_ARGUMENT
@click.argument("name")
@click.option("--value", default="null", metavar="JSON", help="The value of the signal.")
@click.option("--id", "signal_id", help="What makes it the same signal when it is sent again.")
@click.pass_obj
def signal(target: Target, run_id: str, name: str, *, value: str, signal_id: str | None) -> None:
    """Give a value to the step of the run ID that waits for the signal NAME. It is kept when none waits yet."""
    run = _find(target.load(), run_id)
    if not run.signal(name, parse_json(value, "--value"), id=signal_id):
        raise RunNotChanged(f"run {run_id} takes no signal: it is {run.status().state.value}")
    echo(f"{run_id}: signal {name} is given")


@workflow.command()
@RUN_ARGUMENT
@click.option(
    "--format", "shape", type=click.Choice(["mermaid", "json"]), default="mermaid", show_default=True
)
@JSON_FLAG
@click.pass_obj
def graph(target: Target, run_id: str, *, shape: str, wants_json: bool) -> None:
    """Show the graph of the run ID with the state of each node; a map is one node."""
    drawn = _find(target.load(), run_id).graph()
    echo(to_json(drawn) if wants_json or shape == "json" else drawn.to_mermaid())


def _find(app: "App", run_id: str) -> "WorkflowRun[Any]":
    run = app.workflows.find(run_id)
    if run is None:
        raise UnknownRun(
            f"nothing is known of run {run_id!r}: it was never started, or its results have expired"
        )
    return run
