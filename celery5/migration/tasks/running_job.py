"""Change what a bound task does with `self`, which is the running job."""

import ast
from typing import TypeGuard

from celery5.hints import RESOURCE, find_equivalent
from celery5.migration.project.context import FileContext
from celery5.migration.project.index import Function, find_maker, get_dotted
from celery5.migration.tasks.decorators import find_bound_name, is_changed, is_written
from celery5.migration.tasks.options import get_constant
from celery5.runners.context import CurrentJob

_OF_THE_CLASS = (
    "self is the job, not an object of the task's class: a method of that is a function of the module, and "
    + RESOURCE
)
_PASSED_SELF = (
    "the function gets the running job: id, task, queue, attempt, worker, retry(), no options of the task"
)
_OF_A_JOB = {name for name in dir(CurrentJob) if not name.startswith("_")}


def change_bound(context: FileContext, function: Function, decorator: ast.expr | None) -> None:
    """Change the first parameter of a bound task, and its uses.

    Comes before the calls in the task: who changes `other.apply_async((self.request.id,))` takes over what is in it.

    Args:
        decorator: What makes a task of the function; None where a function of the project may do so.
    """
    maker = find_maker(function, context.index) if decorator is None else None
    if decorator is not None and not (is_written(context, decorator) or is_changed(context, decorator)):
        return
    made = maker or (decorator if isinstance(decorator, ast.Call) else None)
    if not find_bound_name(function, made):
        return
    first = [*function.args.posonlyargs, *function.args.args][0]
    if first.annotation is not None and context.celery_name(first.annotation) == "Task":
        context.replace(first.annotation, context.need("CurrentJob", "celery5.tasks"))
    _change_self(context, function, first.arg)


def _change_self(context: FileContext, function: Function, name: str) -> None:
    """Change what a bound task does with the running job."""
    parents = {id(child): node for node in ast.walk(function) for child in ast.iter_child_nodes(node)}
    kept: set[str] = set()  # of the task's class: each is named once
    for node in ast.walk(function):
        if isinstance(node, ast.Call):
            _check_passed_self(context, node, name)
        if not (
            isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == name
        ):
            continue
        parent = parents.get(id(node))
        if node.attr == "request" and isinstance(parent, ast.Attribute):
            _change_request(context, name, parent, parents.get(id(parent)))
        elif node.attr == "name":
            context.replace(node, f"{name}.task")
            context.changed(node, f"{name}.name", f"{name}.task")
        elif node.attr == "retry":
            _check_retry(context, parent)
        elif node.attr not in (*_OF_A_JOB, *kept):
            of_the_class = _OPTION_OF_SELF if find_equivalent("option", node.attr) else _OF_THE_CLASS
            advice = _SELF.get(node.attr, of_the_class)
            if advice == of_the_class:
                kept.add(node.attr)
            context.by_hand(
                node, f"{name}.{node.attr}", advice.replace("TASK", function.name).replace("SELF", name)
            )


_OF_A_RUNNING_JOB = "nothing: a running job knows its id, task, queue, attempt, worker and run_id"
_OPTION_OF_SELF = "the value itself: a job does not know the options of its task"
_SELF = {
    "request": "SELF itself is the job: SELF.id, SELF.attempt, SELF.queue",
    "max_retries": "TASK.policy.max_retries; the last attempt is where SELF.attempt > TASK.policy.max_retries",
    "update_state": "progress(done, total, note): from celery5 import progress",
    "replace": "return the workflow, from a task with dynamic=True",
    "add_to_chord": "return the workflow, from a task with dynamic=True",
    "send_event": "the log, or @app.event",
    "is_aborted": "trio.from_thread.check_cancelled() in a def task, which ends a job that was revoked",
    "MaxRetriesExceededError": "nothing is raised: a job without retries left becomes a dead letter",
    "apply_async": "TASK.options(...).delay(...): the job is not the task",
    **{attribute: f"TASK.{attribute}: the job is not the task" for attribute in ("delay", "s", "si")},
}
"""The replacements of the attributes of a bound task."""


def _check_passed_self(context: FileContext, call: ast.Call, name: str) -> None:
    """Report that a bound task passes itself to a function, which gets the job."""
    called = get_dotted(call.func).rpartition(".")[2]
    if called in ("print", "repr", "str", "isinstance"):
        return
    if any(isinstance(value, ast.Name) and value.id == name for value in call.args):
        context.by_hand(call, f"{called}({name})" if called else f"({name})", _PASSED_SELF)


def _change_request(context: FileContext, name: str, node: ast.Attribute, parent: ast.AST | None) -> None:
    attribute = node.attr
    equivalent = find_equivalent("request", attribute)
    whole: ast.expr = node
    if attribute == "retries" and _is_plus_one(parent, node):
        whole, text = parent, f"{name}.attempt"
    elif attribute == "retries":
        text = f"{name}.attempt - 1"
        if not isinstance(parent, ast.FormattedValue | ast.keyword | ast.Assign | ast.Return | ast.Call):
            text = f"({text})"
    elif equivalent.isidentifier():
        text = f"{name}.{equivalent}"
    else:
        context.report(node, "request", attribute, f"{name}.request.{attribute}", default=_OF_A_RUNNING_JOB)
        return
    context.replace(whole, text)
    context.changed(node, f"{name}.request.{attribute}", text)


def _is_plus_one(parent: ast.AST | None, node: ast.expr) -> TypeGuard[ast.BinOp]:
    """Return whether an expression is `node + 1`."""
    match parent:
        case ast.BinOp(left=left, op=ast.Add(), right=ast.Constant(value=1)):
            return left is node
        case _:
            return False


def _check_retry(context: FileContext, call: ast.AST | None) -> None:
    """Report the arguments of `self.retry` that celery5 does not have."""
    if not isinstance(call, ast.Call):
        return
    for option in call.keywords:
        if option.arg == "eta":
            context.by_hand(option, "retry(eta=)", "countdown, in seconds")
        elif option.arg == "max_retries" and get_constant(option) is None:
            context.by_hand(option, "retry(max_retries=None)", "a number: no job is tried again for ever")
        elif option.arg is None:
            context.by_hand(
                option, "retry(**options)", "retry(exc=, countdown=, max_retries=): it takes no others"
            )
        elif option.arg not in ("exc", "countdown", "max_retries"):
            context.by_hand(
                option,
                f"retry({option.arg}=)",
                "a retry is the same job with the same arguments: send another job",
            )
    if call.args:
        context.by_hand(
            call, "retry(args)", "a retry is the same job with the same arguments: send another job"
        )
