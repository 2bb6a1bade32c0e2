"""Show runs of workflows, and cancel, retry and signal them (`workflow`)."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click
from msgspec.structs import asdict

from celery5.cli.terminal.operation_commands import CommandView, Finished, make_group
from celery5.cli.terminal.output import echo, format_fields, format_time, to_json
from celery5.operations.workflows import WORKFLOW_OPERATIONS

if TYPE_CHECKING:
    from celery5.protocol.workflows.status import RunStatus


def _show_run(finished: Finished) -> None:
    """Print the state of a run, and what it waits for."""
    status: RunStatus = finished.result
    run = finished.app.workflows.find(status.id)
    nodes = run.graph().nodes if run is not None else ()
    waits = [node.name.removeprefix("wait for ") for node in nodes if node.state.value == "WAITING"]
    if finished.wants_json:
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


def _show_graph(finished: Finished) -> None:
    """Print the graph of a run, as Mermaid or as JSON."""
    wants_json = finished.wants_json or finished.flags["format"] == "json"
    echo(to_json(finished.result) if wants_json else finished.result.to_mermaid())


_FORMAT = click.Option(
    ["--format"], type=click.Choice(["mermaid", "json"]), default="mermaid", show_default=True
)

workflow = make_group(
    "workflow",
    "Runs of workflows.",
    WORKFLOW_OPERATIONS,
    {
        "list": CommandView(empty="no runs of workflows", skips_unreachable=True),
        "show": CommandView(
            show=_show_run,
            help="Show the state of the run ID, and what it waits for. Exits with 1 when nothing is known of it.",
        ),
        "cancel": CommandView(
            done="{id}: cancelled",
            asks=False,
            help="Cancel the run ID: nothing of it begins any more, what runs is revoked. "
            "Exits with 1 when it had ended before.",
        ),
        "retry": CommandView(done="{id}: running again"),
        "signal": CommandView(done="{id}: signal {name} is given"),
        "graph": CommandView(show=_show_graph, flags=(_FORMAT,)),
    },
)
