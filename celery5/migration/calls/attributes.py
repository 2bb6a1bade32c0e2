"""Answer attributes that are read of Celery's objects: applications, tasks, signatures, workflows and results."""

import ast
from collections.abc import Mapping

from celery5.hints import CELERY, NameKind, find_equivalent
from celery5.migration.calls.unknown_tasks import check_unknown_task
from celery5.migration.project.context import FileContext, ValueKind
from celery5.tasks.declaration import TaskOptions
from celery5.tasks.task import Signature, Task

_OF_OUR_TASK = {
    *("name", "schedule", "loop", "deduplicate", "checks", "abandon_on_cancel", "continue_without_lease"),
    *(name for name in dir(Task) if not name.startswith("_")),
}
_OF_OUR_SIGNATURE = {name for name in dir(Signature) if not name.startswith("_")}
_OPTION = "an option of the declaration, which task.options(...) changes for one call: the task has no such attribute"
_STATUS = (
    'result.status(), a method. It returns "DEAD" for FAILURE, "EXECUTING" for STARTED and for your own states such as '
    'PROGRESS, and "SENT" or "SCHEDULED" for PENDING. For a run of a workflow, which start() and '
    'app.workflows.find(id) return, use run.status().state and "FAILED"'
)
_AWAITED_STATUS = _STATUS.replace("result.status()", "await result.astatus()").replace(
    "run.status().state", "(await run.astatus()).state"
)
_TABLES: Mapping[ValueKind, NameKind] = {
    "app": "app",
    "control": "control",
    "inspect": "inspect",
    "result": "result",
}
"""The tables of the objects of which celery5 has no attribute by a name in the table."""


def check_attribute(context: FileContext, node: ast.Attribute) -> None:
    """Change or report an attribute of Celery's that is read. The methods that are called are reported as calls."""
    if id(node) in context.handled:
        return
    kind = context.kind_of(node.value)
    if kind == "result" and node.attr == "task_id":
        context.replace(node, f"{context.render(node.value)}.id")
        context.changed(node, "result.task_id", "result.id")
    elif kind == "result" and node.attr in ("status", "state"):
        context.by_hand(node, f"result.{node.attr}", _AWAITED_STATUS if context.is_async else _STATUS)
    elif not answer_name(context, node, kind, node.attr, node.value):
        check_unknown_task(context, node, node.attr, node.value)


def answer_name(
    context: FileContext, node: ast.expr, kind: ValueKind, name: str, of: ast.expr, *, call: str = ""
) -> bool:
    """Report what celery5 has for a name of one of Celery's objects.

    Args:
        node: The attribute, or the call of the method.
        kind: What the object is.
        of: The object.
        call: `()` for a method that is called.

    Returns:
        Whether there is an answer; there is none for names that celery5's object has, too.
    """
    shown = f"{context.render(of)}.{name}{call}"
    if kind == "task":
        return _answer_task_name(context, node, name, of, f"{name}()" if call else shown)
    if kind in ("signature", "workflow"):
        table: NameKind = "workflow" if kind == "workflow" and name in CELERY["workflow"] else "signature"
        is_ours = kind == "signature" and name in _OF_OUR_SIGNATURE
        shown = f"{name}{call} of a {kind}"
    elif kind in _TABLES:
        table, is_ours = _TABLES[kind], False
        shown = shown if kind == "app" and call else f"{kind}.{name}{call}"
    else:
        return False
    if (table, name) == ("app", "events"):  # celery5's App has other `events`
        context.report(node, "command", name, shown)
        return True
    if is_ours or name not in CELERY[table]:
        return False
    context.report(node, table, name, shown)
    return True


def _answer_task_name(context: FileContext, node: ast.expr, name: str, of: ast.expr, shown: str) -> bool:
    """Report what celery5 has for a name of a task that is surely one: a method, a handler of its class, an option."""
    is_replaced = (
        isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and name in CELERY["task"]
    )
    if name in _OF_OUR_TASK or is_replaced or not context.is_sure_task(of):  # see `check_replaced`
        return False
    for thing in ("task", "task class"):
        if name in CELERY[thing]:
            context.report(node, thing, name, shown)
            return True
    if not (find_equivalent("option", name) or name in TaskOptions.__optional_keys__):
        return False
    context.report(node, "option", name, shown, default=_OPTION)
    return True
