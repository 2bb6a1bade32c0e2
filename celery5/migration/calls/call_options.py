"""Read what `apply_async` and its like are given: the arguments of the task, and the options of one call."""

import ast
import keyword
from dataclasses import dataclass, field

from celery5.hints import find_equivalent
from celery5.migration.project.context import FileContext
from celery5.migration.project.index import KnownTask
from celery5.migration.values.priorities import describe_priority

_KEPT = {
    "countdown",
    "eta",
    "expires",
    "queue",
    "ignore_result",
    "time_limit",
    "soft_time_limit",
    "max_retries",
}
"""Options of a call that mean the same."""


@dataclass
class NewCall:
    """What becomes of the arguments of `apply_async`."""

    arguments: list[str] = field(default_factory=list)
    options: list[str] = field(default_factory=list)
    problems: list[tuple[str, str]] = field(default_factory=list)  # what is to be changed by hand, and how


def expand_arguments(
    context: FileContext, call: ast.Call, positional: tuple[str, ...] = ("args", "kwargs", "task_id")
) -> NewCall:
    """Return what becomes of the arguments of `apply_async` and of those like it."""
    new = NewCall()
    named: list[tuple[str | None, ast.expr]] = list(zip(positional, call.args, strict=False))
    if len(call.args) > len(positional) or any(isinstance(argument, ast.Starred) for argument in call.args):
        new.problems.append(
            ("apply_async", "task.options(...).delay(...): the arguments cannot be read here")
        )
    named += [(option.arg, option.value) for option in call.keywords]
    for name, value in sorted(named, key=lambda item: item[0] == "kwargs"):
        if name == "args":
            new.arguments += _spread(context, value)
        elif name in ("kwargs", "kwarg"):
            new.arguments += _spread_named(context, value)
        elif name == "name" and "name" in positional:
            continue
        else:
            _add_option(context, new, name, value)
    return new


def check_options_of(context: FileContext, new: NewCall, task: KnownTask | None) -> None:
    """Report options that a call of this task cannot have, or that mean something else with it."""
    if task is None:
        return
    _check_queue(new, task)
    if context.index.calls_on_failure(task):
        advice = _TWO_HANDLERS.replace("TASK", task.name)
        new.problems = [(name, advice if name == "link_error" else said) for name, said in new.problems]


_TWO_HANDLERS = (
    "options(on_failure=task) for link_error, and Middleware.running for what on_failure of TASK did (job.outcome is "
    "Dead(reason, error)): of two on_failure= only that of the call is called"
)


def _check_queue(new: NewCall, task: KnownTask) -> None:
    """Report a task with a rate that is sent to another queue: celery5 refuses that. Its own queue is fine."""
    if not task.is_limited:
        return
    for option in [option for option in new.options if option.startswith("queue=")]:
        new.options.remove(option)
        if not task.queue or option[len("queue=") :].strip("'\"") != task.queue:
            new.problems.append(
                (
                    f"{option} of {task.name}, which has a rate_limit",
                    "a rate is counted on the queue of the task, and no job of it goes to another: name the queue in "
                    "the declaration, @app.task(queue=...), and leave it out here (celery5 docs limits)",
                )
            )


def _spread(context: FileContext, value: ast.expr) -> list[str]:
    if isinstance(value, ast.Constant) and value.value is None:
        return []
    if isinstance(value, ast.List | ast.Tuple):
        return [context.render(element) for element in value.elts]
    return [f"*{_in_parentheses(context, value)}"]


def _spread_named(context: FileContext, value: ast.expr) -> list[str]:
    if isinstance(value, ast.Constant) and value.value is None:
        return []
    if isinstance(value, ast.Dict):
        names = [key.value if isinstance(key, ast.Constant) else None for key in value.keys]
        if all(
            isinstance(name, str) and name.isidentifier() and not keyword.iskeyword(name) for name in names
        ):
            return [
                f"{name!s}={context.render(item)}" for name, item in zip(names, value.values, strict=True)
            ]
    return [f"**{_in_parentheses(context, value)}"]


def _in_parentheses(context: FileContext, value: ast.expr) -> str:
    text = context.render(value)
    simple = ast.Name | ast.Attribute | ast.Call | ast.Subscript | ast.List | ast.Dict | ast.ListComp
    return text if isinstance(value, simple) else f"({text})"


def _add_option(context: FileContext, new: NewCall, name: str | None, value: ast.expr) -> None:
    """Add an option of a call, or the problem that there is with it."""
    if name in ("link", "link_error"):
        context.keep_immutable(value)
    text = context.render(value)
    constant = value.value if isinstance(value, ast.Constant) else ...
    if name is None:
        advice = "task.options(**options).delay(...), with the names of celery5"
        new.problems.append(("apply_async(**options)", advice))
    elif constant is None or (name in ("serializer", "compression") and constant in ("json", ...)):
        return
    elif name == "task_id":
        new.options.append(f"id={text}")
    elif name in _KEPT:
        new.options.append(f"{name}={text}")
        if name in ("eta", "expires") and _is_naive(value):
            new.problems.append((f"{name}={text}", "a time with its zone: datetime.now(UTC)"))
    elif name == "priority":
        shown, advice = describe_priority(value, context.index.transport)
        new.problems.append((shown, f"options({advice.replace(':', '):', 1)}"))
    else:
        advice = _ADVICE.get(name, "").replace("TEXT", text) or find_equivalent("option", name)
        if name in _ADVICE or not advice.startswith(("nothing", "not needed")):
            new.problems.append((name, advice or _NO_OPTION))


_NO_OPTION = "leave it out, or pass it to the task as an argument: a call has no such option"
_ADVICE = {
    "serializer": "annotate the parameters: arguments and results are JSON",
    "compression": "leave it out: arguments and results are JSON",
    "link": "(task.s(...) | TEXT).start()",
    "retry_policy": "leave it out: a lost connection is retried; retry_policy of celery5 is about failed jobs",
    "link_error": "options(on_failure=task), which is called with a list of StepFailure, in place of the task's own: "
    "Celery calls both",
}
"""What is to be written instead of options that cannot be changed as they stand."""


def _is_naive(value: ast.expr) -> bool:
    """Return whether an expression surely makes a time without a zone."""
    return any(
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and (node.func.attr == "utcnow" or (node.func.attr == "now" and _is_datetime(node) and not node.args))
        for node in ast.walk(value)
    )


def _is_datetime(call: ast.Call) -> bool:
    of = call.func.value if isinstance(call.func, ast.Attribute) else None
    last = of.attr if isinstance(of, ast.Attribute) else of.id if isinstance(of, ast.Name) else ""
    return last == "datetime" and not call.keywords
