"""Workflows: compose calls of tasks or declare them as functions, start runs of them, and look after these runs."""

from typing import TYPE_CHECKING

from celery5.lazy import exports
from celery5.lazy_modules import load_lazily

if TYPE_CHECKING:
    from celery5.protocol.workflows.status import NodeState, Outcome, RunState, RunStatus, StepFailure
    from celery5.workflows.compose import Partial
    from celery5.workflows.declared import DeclaredWorkflow, Flow, WorkflowOptions
    from celery5.workflows.graph import GraphNode, RunGraph
    from celery5.workflows.registry import Workflows
    from celery5.workflows.results import Results
    from celery5.workflows.run import WorkflowRun

__all__ = [
    "DeclaredWorkflow",
    "Flow",
    "GraphNode",
    "NodeState",
    "Outcome",
    "Partial",
    "Results",
    "RunGraph",
    "RunState",
    "RunStatus",
    "StepFailure",
    "WorkflowOptions",
    "WorkflowRun",
    "Workflows",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = exports(
        __name__,
        {
            "DeclaredWorkflow": "celery5.workflows.declared",
            "Flow": "celery5.workflows.declared",
            "GraphNode": "celery5.workflows.graph",
            "NodeState": "celery5.protocol.workflows.status",
            "Outcome": "celery5.protocol.workflows.status",
            "Partial": "celery5.workflows.compose",
            "Results": "celery5.workflows.results",
            "RunGraph": "celery5.workflows.graph",
            "RunState": "celery5.protocol.workflows.status",
            "RunStatus": "celery5.protocol.workflows.status",
            "StepFailure": "celery5.protocol.workflows.status",
            "WorkflowOptions": "celery5.workflows.declared",
            "WorkflowRun": "celery5.workflows.run",
            "Workflows": "celery5.workflows.registry",
        },
    )

load_lazily(__name__, "compiler", "graph", "results", "run", "staging", "values")
