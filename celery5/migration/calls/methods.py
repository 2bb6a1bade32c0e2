"""Change the calls of methods of applications, tasks, results and remote control."""

import ast

from celery5.migration.calls.attributes import answer_name
from celery5.migration.calls.by_name import change_by_name, check_declared, is_celerys
from celery5.migration.calls.call_options import NewCall, check_options_of
from celery5.migration.calls.functions import MADE_IN_A_FUNCTION
from celery5.migration.calls.project_tests import is_test_module
from celery5.migration.calls.sending import render_arguments, render_operand
from celery5.migration.project.context import FileContext
from celery5.migration.project.index import get_dotted


def check_periodic_task(context: FileContext, call: ast.Call, _receiver: ast.expr) -> None:
    """Report what `add_periodic_task` becomes."""
    if len(call.args) < 2:
        context.report(call, "app", "add_periodic_task")
        return
    when, what = context.render(call.args[0]), context.render(call.args[1])
    named = {option.arg: option for option in call.keywords}
    options = ", ".join(context.render(option) for name, option in named.items() if name != "name")
    match call.args[1]:
        case ast.Call(func=ast.Attribute(attr="s" | "si", value=task)) as signature if options:
            arguments = ", ".join(render_arguments(context, signature))
            what = f"{context.render(task)}.options({options}).s({arguments})"
        case _ if options:
            what = f"{what} with options({options}) of its task"
        case _:
            pass
    name = f", {context.render(named['name'])}" if "name" in named else ""
    context.by_hand(call, "add_periodic_task", f"app.schedule({what}, {when}{name}) in the module")


def change_app_call(context: FileContext, call: ast.Call, method: str, receiver: ast.expr) -> None:
    """Change a call of a method of an application."""
    app = context.render_app(receiver)
    if call.args and method in ("send_task", "signature", "subtask"):
        check_declared(context, call.args[0])
    if call.args and (method == "send_task" or (method in ("signature", "subtask") and is_celerys(call))):
        change_by_name(context, call, app, is_sent=method == "send_task")
    elif method == "AsyncResult" and call.args:
        context.replace(call, f"{app}.result({context.render(call.args[0])})")
        context.changed(call, "AsyncResult", f"{app}.result(...)")
    elif method == "task" and id(call) not in context.decorators:
        context.by_hand(call, "app.task(...) in a function", MADE_IN_A_FUNCTION)
    elif method in ("config_from_object", "autodiscover_tasks", "task"):
        return  # statements and decorators
    else:
        answer_name(context, call, "app", method, receiver, call="()")


def change_control(context: FileContext, call: ast.Call, method: str, receiver: ast.expr) -> None:
    """Change a call of remote control: `revoke` becomes that of a result."""
    app = context.render_app(receiver.value) if isinstance(receiver, ast.Attribute) else "app"
    if (
        method == "revoke"
        and len(call.args) == 1
        and {option.arg for option in call.keywords} <= {"terminate", "signal"}
    ):
        value = call.args[0]
        if not isinstance(value, ast.List | ast.Tuple | ast.ListComp | ast.Starred):
            text = f"{app}.result({context.render(value)}).revoke()"
            context.replace(call, text)
            context.changed(call, "control.revoke", text)
            return
    answer_name(context, call, "control", method, receiver)


def change_result(context: FileContext, call: ast.Call, method: str, receiver: ast.expr) -> None:
    """Change a call of a method of a result."""
    if method == "get":
        for option in call.keywords:
            if option.arg and option.arg != "timeout":
                context.report(option, "result option", option.arg, f"get({option.arg}=)")
        if not (call.args or call.keywords or context.is_written or is_test_module(context)):
            text = f"{render_operand(context, receiver)}.get(timeout=None)"
            context.replace(call, text)
            context.changed(call, "get()", "get(timeout=None), since get() waits 10 s")
    elif method == "revoke" and call.keywords:
        context.replace(call, f"{render_operand(context, receiver)}.revoke()")
        context.changed(call, "revoke", "revoke(), which stops a running job")
    else:
        answer_name(context, call, "result", method, receiver, call="()")


def check_task_call(context: FileContext, call: ast.Call, method: str, receiver: ast.expr) -> None:
    """Change or report a call of a method of a task."""
    if method == "options":
        options = [
            f"queue={context.render(option.value)}" for option in call.keywords if option.arg == "queue"
        ]
        new = NewCall(options=options)
        check_options_of(context, new, context.find_task(receiver))
        for name, advice in new.problems:
            context.by_hand(call, name, advice)
    elif method == "AsyncResult" and call.args:
        task = context.render(receiver)
        context.replace(call, f"{task}.app.result({context.render(call.args[0])}, task={task})")
        context.changed(call, "AsyncResult", f"{task}.app.result(..., task={task})")
    elif method == "chunks":
        context.by_hand(
            call,
            "chunks",
            "task.chunks(items, n) passes each item as the first argument; starmap has several",
        )
    elif method == "delay" and context.is_async and context.is_sure_task(receiver):
        context.by_hand(call, "delay in async def", f"await {context.render(receiver)}.adelay(...)")
    else:
        answer_name(context, call, "task", method, receiver, call="()")


def check_canvas_call(context: FileContext, call: ast.Call, method: str, receiver: ast.expr) -> None:
    """Report a call of a method of a signature, a workflow or `inspect`."""
    answer_name(context, call, context.kind_of(receiver), method, receiver, call="()")


_TASK_FAILED = (
    "get() raises TaskFailed for every error of the task: write except TaskFailed as error; error.type is the name of "
    'the error\'s class, such as "ValueError" (celery5 docs results)'
)
_ALL_ERRORS = {
    "Exception",
    "BaseException",
    "TimeoutError",
    "OSError",
    "ConnectionError",
    "KeyboardInterrupt",
}
"""Errors that `except` around `get` still catches with celery5, or that are caught for another reason."""


def check_handlers(context: FileContext, node: ast.Try) -> None:
    """Report `except ValueError` around `get`: Celery raises the error of the task there, celery5 raises TaskFailed."""
    waits = any(
        isinstance(inner, ast.Call)
        and isinstance(inner.func, ast.Attribute)
        and inner.func.attr == "get"
        and context.kind_of(inner.func.value) == "result"
        for statement in node.body
        for inner in ast.walk(statement)
    )
    for handler in node.handlers if waits else ():
        kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
        for kind in kinds:
            name = get_dotted(kind).rpartition(".")[2] if kind is not None else ""
            if kind is None or not name or name in _ALL_ERRORS:
                continue
            if not (context.celery_name(kind) or context.new_name(kind)):
                context.note(kind, "decide", f"except {name} around get()", _TASK_FAILED)


_TWINS: dict[tuple[str, str], tuple[str, str]] = {
    **{("result", method): (method, f"a{method}") for method in ("get", "revoke", "forget", "status")},
    **dict.fromkeys((("signature", name) for name in ("delay", "apply_async")), ("delay", "adelay")),
    **dict.fromkeys((("workflow", name) for name in ("start", "delay", "apply_async")), ("start", "astart")),
    ("app", "send_task"): ("delay", "adelay"),
    ("control", "revoke"): ("revoke", "arevoke"),
}
"""Methods that wait for Redis, by kind of object: their name in celery5, and the name of their async twin."""


_AWAITED = "await {}(...): on a running event loop, a method that waits for Redis raises an error"


def check_blocking(context: FileContext, call: ast.Call) -> None:
    """Report a call in an `async def` that waits for Redis: celery5 refuses that on a running event loop."""
    if not context.is_async:
        return
    match call.func:
        case ast.Attribute(attr=method, value=receiver):
            names = _TWINS.get((context.kind_of(receiver), method))
        case ast.Call() as made if context.kind_of(made) == "workflow":
            names = _TWINS["workflow", "start"]
        case _:
            names = None
    if names:
        context.by_hand(call, f"{names[0]} in async def", _AWAITED.format(names[1]))
