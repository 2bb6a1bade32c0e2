"""See runs of workflows, cancel them, retry them, and give them signals."""

import time
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta

from celery5.errors import CeleryError
from celery5.operations.columns import ResultColumn
from celery5.operations.operation import Changed, Effect, NotFound, Operation
from celery5.operations.parameters import Limit, Text, about
from celery5.protocol.workflows.status import RunStatus

if TYPE_CHECKING:
    from celery5.app import App
    from celery5.workflows.graph import RunGraph
    from celery5.workflows.run import WorkflowRun


class RunEnded(CeleryError):
    """The run had ended before it could be changed."""


class RunFilter(msgspec.Struct, frozen=True):
    """Which runs."""

    live: Annotated[bool, about("Only runs that have not ended.")] = False
    limit: Annotated[Limit, about("Runs at most.")] = 50


async def list_runs(app: "App", asked: RunFilter) -> list[RunStatus]:
    """Show live runs, and those that have ended lately, the newest first."""
    return await app.workflows.alist_runs(limit=asked.limit, live_only=asked.live)


class OneRun(msgspec.Struct, frozen=True):
    """A run of a workflow."""

    id: Annotated[Text, about("The run.")]


async def show_run(app: "App", asked: OneRun) -> RunStatus:
    """Show the state of a run."""
    return await (await _find(app, asked.id)).astatus()


async def show_graph(app: "App", asked: OneRun) -> "RunGraph":
    """Show the graph of a run with the state of each node; a map is one node."""
    return await (await _find(app, asked.id)).agraph()


async def cancel_run(app: "App", asked: OneRun) -> Changed:
    """Cancel a run: nothing of it begins any more, what runs is revoked."""
    run = await _find(app, asked.id)
    if not await run.acancel():
        raise RunEnded(f"run {asked.id} is not cancelled: it is {(await run.astatus()).state.value}")
    return Changed(summary=f"run {asked.id} is cancelled", count=1)


async def retry_run(app: "App", asked: OneRun) -> Changed:
    """Start what has failed in a run again, and what depends on it."""
    await (await _find(app, asked.id)).aretry()
    return Changed(summary=f"run {asked.id} runs again", count=1)


class NewSignal(msgspec.Struct, frozen=True):
    """A signal for a run."""

    id: Annotated[Text, about("The run.")]
    name: Annotated[Text, about("The name of the signal.")]
    value: Annotated[Any, about("The value of the signal.", metavar="JSON")] = None
    signal_id: Annotated[
        str, Meta(max_length=200), about("What makes it the same signal when it is sent again.", flag="--id")
    ] = ""


async def signal_run(app: "App", asked: NewSignal) -> Changed:
    """Give a value to the step of a run that waits for it; it is kept when none waits yet."""
    run = await _find(app, asked.id)
    if not await run.asignal(asked.name, asked.value, id=asked.signal_id or None):
        raise RunEnded(f"run {asked.id} takes no signal: it is {(await run.astatus()).state.value}")
    return Changed(summary=f"signal {asked.name} is given to run {asked.id}", count=1)


async def _find(app: "App", run_id: str) -> "WorkflowRun[Any]":
    run = await app.workflows.afind(run_id)
    if run is None:
        raise NotFound(
            f"nothing is known of run {run_id!r}: it was never started, or its results have expired"
        )
    return run


LISTED = (
    ResultColumn("id", "id"),
    ResultColumn("workflow", "name"),
    ResultColumn("state", lambda run: run.state.value),
    ResultColumn("done", lambda run: f"{run.done} of {run.total}"),
    ResultColumn("failed", "failed"),
    ResultColumn("age", lambda run: max(0.0, time.time() - run.created), "duration"),
    ResultColumn("error", lambda run: "; ".join(filter(None, (run.failure, run.undo)))),
)
"""What a table shows of a run."""
WORKFLOW_OPERATIONS = (
    Operation("workflow:list", list_runs, columns=LISTED),
    Operation("workflow:show", show_run),
    Operation("workflow:graph", show_graph, result_module="celery5.workflows.graph"),
    Operation("workflow:retry", retry_run, Effect.SEND_JOBS),
    Operation("workflow:signal", signal_run, Effect.SIGNAL),
    Operation("workflow:cancel", cancel_run, Effect.STOP_NAMED),
)
"""The operations on runs of workflows."""
