"""The pages of workflows: their runs, and the graph of one."""

import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

from celery5.dashboard.graph import NODE_HEIGHT, NODE_WIDTH, draw_graph
from celery5.dashboard.page import Page, PageRequest
from celery5.observability.job_search import JobPage
from celery5.operations.operation import NotFound
from celery5.protocol.job.history import JobRecord
from celery5.protocol.job.story import JobDetails
from celery5.protocol.workflows.member_ids import get_run_id
from celery5.protocol.workflows.status import NodeState, RunStatus

RUNS_READ = 500
"""Runs that are counted by their states."""
RUNS_SHOWN = 100
NODES_SHOWN = 200
"""Nodes in the table: those that failed first."""
FAILURES_SHOWN = 20
FAILURES_READ = 500
"""Dead jobs among which those of a run are looked for."""


async def load_runs(request: PageRequest) -> Mapping[str, Any]:
    """Return live runs, and those that have ended lately; how many of them are in each state."""
    chosen = request.choose("live", "state", "name")
    runs = await request.read("workflow:list", live=chosen.get("live"), limit=RUNS_READ)
    named = [run for run in runs if chosen.get("name", "") in run.name or chosen.get("name", "") in run.id]
    shown = [run for run in named if chosen.get("state", run.state.value) == run.state.value]
    return {
        "runs": shown[:RUNS_SHOWN],
        "left_out": len(shown) - len(shown[:RUNS_SHOWN]),
        "is_cut": len(runs) == RUNS_READ,
        "counts": Counter(run.state.value for run in named),
        "chosen": chosen,
    }


async def load_run(request: PageRequest) -> Mapping[str, Any]:
    """Return the state of a run, its graph, and what has failed in it."""
    run_id = request.path["id"]
    graph = await request.read("workflow:graph", id=run_id)
    run = await request.read("workflow:show", id=run_id)
    failures = await _find_failures(request, run) if run.failed else []
    return {
        "run": run,
        "parent_run": get_run_id(run.parent),
        "graph": graph,
        "nodes": sorted(graph.nodes, key=lambda node: node.state is not NodeState.FAILED)[:NODES_SHOWN],
        "drawing": draw_graph(graph.nodes),
        "node_width": NODE_WIDTH,
        "node_height": NODE_HEIGHT,
        "mermaid": graph.to_mermaid(),
        "failures": failures,
        "traceback": await _read_traceback(request, failures[0]) if failures else "",
    }


async def _find_failures(request: PageRequest, run: RunStatus) -> list[JobRecord]:
    """Return the last failures of a run, from the dead letters and the history, each job once."""
    since = max(1.0, time.time() - run.created + 60)  # clocks may differ
    found: JobPage = await request.read("task:search", state="DEAD", since=since, limit=FAILURES_READ)
    of_run = {
        job.id: job
        for job in reversed(found.jobs)
        # The job that has failed first may be one of a workflow that a step has returned.
        if run.id in (job.run, get_run_id(job.id)) or job.id == run.failed_job
    }
    return sorted(of_run.values(), key=lambda job: -job.ended)[:FAILURES_SHOWN]


async def _read_traceback(request: PageRequest, record: JobRecord) -> str:
    try:
        job: JobDetails = await request.read("task:show", id=record.id, queue=record.queue)
    except NotFound:
        return ""
    return job.failure.traceback if job.failure else ""


WORKFLOW_PAGES = (
    Page(
        path="workflows",
        template="workflows.html",
        title="Workflows",
        load=load_runs,
        nav="Workflows",
        refresh=3.0,
    ),
    Page(path="workflows/{id:path}", template="run.html", title="Run {id}", load=load_run, refresh=3.0),
)
"""The pages of workflows."""
