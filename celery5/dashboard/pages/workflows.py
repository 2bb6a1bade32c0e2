"""The pages of workflows: their runs, and the graph of one."""

from collections.abc import Mapping
from typing import Any

from celery5.dashboard.graph import draw_graph
from celery5.dashboard.page import Page, PageRequest


async def load_runs(request: PageRequest) -> Mapping[str, Any]:
    """Return live runs, and those that have ended lately."""
    live = request.query.get("live")
    return {"runs": await request.read("workflow:list", live=live, count=100), "live": live == "true"}


async def load_run(request: PageRequest) -> Mapping[str, Any]:
    """Return the state of a run, and its graph."""
    run_id = request.path["id"]
    graph = await request.read("workflow:graph", id=run_id)
    return {
        "run": await request.read("workflow:show", id=run_id),
        "graph": graph,
        "drawing": draw_graph(graph.nodes),
        "mermaid": graph.to_mermaid(),
    }


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
