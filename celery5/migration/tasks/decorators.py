"""Change the decorators that declare tasks."""

import ast

from celery5.hints import find_equivalent
from celery5.migration.project.context import FileContext
from celery5.migration.project.index import DECORATORS, Function, find_maker, find_task_decorator, get_dotted
from celery5.migration.tasks.options import (
    CHECK_OPTIONS,
    TASK_OPTIONS,
    change_options,
    change_priority,
    change_serializer,
    check_on_failure,
    check_rate,
    report_option,
)

MAX_WIDTH = 98
"""The longest call that is written on one line."""
_ERRBACK = (
    "on_failure=, which replaces link_error, calls it with one argument: failures: list[StepFailure] (from "
    "celery5.workflows import StepFailure), each with id, task, type and message of the error, state and reason; the "
    "traceback is in the dead letter: celery5 dlq read. Further arguments are bound: on_failure=task.partial(1)"
)


def change_decorator(context: FileContext, function: Function, decorator: ast.expr) -> None:
    """Change the decorator that makes a task of a function."""
    call = decorator if isinstance(decorator, ast.Call) else None
    called = call.func if call else decorator
    _check_errback(context, function, call)
    if is_written(context, decorator):
        _check_declaration(context, function, call)
        return
    name = get_dotted(called)
    is_shared = context.celery_name(called) == "shared_task"
    if not is_changed(context, decorator):
        return
    if called.attr == "periodic_task" if isinstance(called, ast.Attribute) else False:
        context.by_hand(
            decorator, "periodic_task", '@app.task(schedule="0 3 * * *"), or schedule=every(minutes=5)'
        )
        return
    new_name = name
    if is_shared or context.celery_name(called.value if isinstance(called, ast.Attribute) else called):
        new_name = context.need("task", instead=get_dotted(called).rpartition(".")[2])
    uses_retry = find_bound_name(function, call) is not None and _calls_retry(
        function, find_bound_name(function, call)
    )
    options = change_options(context, function, call, uses_retry)
    text = _write_call(context, decorator, new_name, options)
    before = context.source.decode(context.source.start_of(decorator), context.source.end_of(decorator))
    if text != before:
        context.replace(decorator, text)
        context.changed(decorator, f"@{name}", f"@{new_name}(...)" if options else f"@{new_name}")


def is_changed(context: FileContext, decorator: ast.expr) -> bool:
    """Return whether a decorator is one of those that are changed: `shared_task`, or a method of an application."""
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    return context.celery_name(called) == "shared_task" or (
        isinstance(called, ast.Attribute) and context.kind_of(called.value) == "app"
    )


def is_written(context: FileContext, decorator: ast.expr) -> bool:
    """Return whether a task is already declared by celery5, by an earlier run or by its authors."""
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    if not isinstance(called, ast.Attribute):
        return context.new_name(called) == "task"
    has_celery = "celery.Celery" in context.origins.values()
    return context.is_written and not has_celery and context.kind_of(called.value) == "app"


def _check_declaration(context: FileContext, function: Function, call: ast.Call | None) -> None:
    """Report what is left to do in a task that celery5 already declares."""
    for option in call.keywords if call else ():
        if option.arg is None:
            context.by_hand(option, "**options", CHECK_OPTIONS)
        elif option.arg == "serializer":
            change_serializer(context, option, {})
        elif option.arg == "priority":
            change_priority(context, option, {})
        elif option.arg == "on_failure":
            check_on_failure(context, option)
        elif option.arg == "rate_limit":
            check_rate(context, option)
        elif option.arg not in TASK_OPTIONS:
            report_option(context, option, option.arg)


def _check_errback(context: FileContext, function: Function, call: ast.Call | None) -> None:
    """Report that a task called for failed jobs gets other arguments than with Celery."""
    parameters = [*function.args.posonlyargs, *function.args.args][
        1 if find_bound_name(function, call) else 0 :
    ]
    if function.name not in context.index.errbacks or not parameters:
        return
    first = parameters[0]
    if first.arg != "failures" and not (first.annotation and "StepFailure" in ast.unparse(first.annotation)):
        names = ", ".join(parameter.arg for parameter in parameters)
        context.by_hand(function, f"{function.name}({names}) of link_error", _ERRBACK)


def _write_call(context: FileContext, node: ast.expr, name: str, options: list[str]) -> str:
    """Return a call with these options, on several lines if it is long."""
    if not options:
        return name
    text = f"{name}({', '.join(options)})"
    if len(text) <= MAX_WIDTH:
        return text
    indentation = context.source.indentation_at(context.source.start_of(node))
    lines = "".join(f"\n{indentation}    {option}," for option in options)
    return f"{name}({lines}\n{indentation})"


def find_bound_name(function: Function, call: ast.Call | None) -> str | None:
    """Return the name of the parameter that is the running job; None for a task that is not bound."""
    for option in call.keywords if call else ():
        if option.arg == "bind" and isinstance(option.value, ast.Constant) and option.value.value is True:
            arguments = [*function.args.posonlyargs, *function.args.args]
            return arguments[0].arg if arguments else None
    return None


def _calls_retry(function: Function, name: str | None) -> bool:
    return any(
        isinstance(node, ast.Attribute)
        and node.attr == "retry"
        and isinstance(node.value, ast.Name)
        and node.value.id == name
        for node in ast.walk(function)
    )


def check_made_task(context: FileContext, function: Function) -> None:
    """Report the options of Celery on a task that a function of the project makes."""
    maker = find_maker(function, context.index)
    if maker is None:
        return
    own = context.index.makers[get_dotted(maker.func).rpartition(".")[2]]
    for option in maker.keywords:
        name = option.arg or ""
        equivalent = find_equivalent("option", name)
        if equivalent and name not in own and name not in TASK_OPTIONS:
            advice = (
                f"leave it out{equivalent.removeprefix('nothing')}"
                if equivalent.startswith("nothing")
                else equivalent
            )
            context.by_hand(option, f"{get_dotted(maker.func)}({name}=)", advice)
    _check_errback(context, function, maker)


def is_task_decorator(context: FileContext, function: Function) -> ast.expr | None:
    """Return the decorator by which a function is a task of Celery; None for none."""
    decorator = find_task_decorator(function)
    if decorator is None:
        return None
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    if context.celery_name(called) in DECORATORS or context.new_name(called) == "task":
        return decorator
    return decorator if isinstance(called, ast.Attribute) and context.kind_of(called.value) == "app" else None
