"""Find what changes a call: by the function, or by the method and its object."""

import ast
from collections.abc import Callable

from celery5.migration.calls.canvas import change_canvas
from celery5.migration.calls.functions import ERRORS, change_function
from celery5.migration.calls.methods import (
    change_app_call,
    change_control,
    change_result,
    check_canvas_call,
    check_periodic_task,
    check_task_call,
)
from celery5.migration.calls.sending import change_apply_async, change_set, change_signature
from celery5.migration.calls.signals import check_connection
from celery5.migration.calls.unknown_tasks import check_unknown_task
from celery5.migration.project.context import FileContext


def change_call(context: FileContext, call: ast.Call) -> None:
    """Change a call, after those inside of it."""
    name = context.celery_name(call.func)
    if name == "connect" and isinstance(call.func, ast.Attribute):
        check_connection(context, call, call.func.value)
    elif name or context.new_name(call.func) in ERRORS:
        change_function(context, call, name or context.new_name(call.func))
    elif not change_canvas(context, call) and isinstance(call.func, ast.Attribute):
        _change_method(context, call, call.func.attr, call.func.value)


def _change_method(context: FileContext, call: ast.Call, method: str, receiver: ast.expr) -> None:
    """Change a call of a method, by the names of the method and of its object."""
    kind = context.kind_of(receiver)
    if method in _BY_METHOD:
        _BY_METHOD[method](context, call, receiver)
    elif method in ("on_error", "link_error", "link") and _is_linked(context, call, kind):
        context.report(call, "workflow" if kind == "workflow" else "signature", method)
        for value in call.args:
            context.keep_immutable(value)
    elif method == "apply_async_on_commit" and kind == "task":
        change_apply_async(context, call, receiver, method="delay_on_commit")
    elif method in ("signature", "subtask") and context.find_task(receiver) is not None:
        change_signature(context, call, receiver)
    elif method == "set" and kind == "signature":
        change_set(context, call, receiver)
    elif method == "delay" and kind == "signature" and (call.args or call.keywords):
        context.by_hand(
            call, "delay(...) of a signature", "give all arguments to task.delay(...): delay() takes none"
        )
    elif not check_unknown_task(context, call, method, receiver) and kind in _BY_KIND:
        _BY_KIND[kind](context, call, method, receiver)


def _is_linked(context: FileContext, call: ast.Call, kind: str) -> bool:
    """Return whether `link` or `on_error` is called on a signature, or with one."""
    return kind in ("signature", "workflow") or (
        len(call.args) == 1 and context.kind_of(call.args[0]) == "signature"
    )


_BY_METHOD: dict[str, Callable[[FileContext, ast.Call, ast.expr], None]] = {
    "add_periodic_task": check_periodic_task,
    "apply_async": change_apply_async,
}
"""What changes the calls of methods that only Celery has."""
_BY_KIND: dict[str, Callable[[FileContext, ast.Call, str, ast.expr], None]] = {
    "app": change_app_call,
    "control": change_control,
    "result": change_result,
    "task": check_task_call,
    "signature": check_canvas_call,
    "workflow": check_canvas_call,
    "inspect": check_canvas_call,
}
"""What changes the calls of methods, by what they are methods of."""
