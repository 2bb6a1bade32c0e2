"""List the calls of what may be a task: names that no file which was read declares as one."""

import ast

from celery5.migration.project.context import FileContext
from celery5.migration.project.index import get_dotted

_SENDS = (
    "is this a task? delay(...) stays as it is for a task of celery5; one that Celery's workers run is declared by "
    "@celery_task (celery5 docs beside-celery)"
)
_RUNS = "is this a task? Then write task(...), which runs the function here: tasks of celery5 have no run and no apply"
_OPTIONS = (
    "task.options(countdown=5).delay(...), where this is a task; one that Celery's workers run is declared by "
    "@celery_task (celery5 docs beside-celery)"
)
_SIGNATURE = "is this a task? Then write task.s(...), with its arguments one by one"
_IMMUTABLE = "task.s(...), where this is a task, and a >> b, which passes no value to b"
_POOLS = {"multiprocessing", "billiard", "multiprocess", "pathos"}
"""Packages whose pools have a method `apply_async`, too."""


def check_unknown_task(context: FileContext, call: ast.expr, method: str, receiver: ast.expr) -> bool:
    """Report a call of a method that tasks have, of an object that is not known to be a task.

    `delay`, `apply_async` and `si` are methods of tasks. `run` and the others are common: they are reported where the
    object has a name with `task` in it. A method that is not called, but passed on, is reported where it is
    `apply_async`.
    """
    if not isinstance(call, ast.Call) and method != "apply_async":
        return False
    if method not in ("delay", "apply_async", "si", "run", "apply", "signature", "subtask"):
        return False
    if _is_known(context, receiver):
        return False
    shown = f"{_shorten(ast.unparse(receiver))}.{method}"
    if method == "apply_async":
        if not _is_pool(context, receiver):
            context.by_hand(call, shown, _OPTIONS)
    elif method == "si":
        context.by_hand(call, shown, _IMMUTABLE)
    elif method == "delay":
        context.note(call, "decide", shown, _SENDS)
    elif "task" in f"{ast.unparse(receiver)} {context.origin_of(receiver)}".lower():
        context.note(call, "decide", shown, _SIGNATURE if method in ("signature", "subtask") else _RUNS)
    return True


MAX_SHOWN = 60
"""The longest object that is shown."""


def _shorten(text: str) -> str:
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def _is_known(context: FileContext, receiver: ast.expr) -> bool:
    """Return whether an object is a task that was found, something else of Celery's, or an event of celery5."""
    kind = context.kind_of(receiver)
    if kind not in ("task", ""):
        return True
    called = receiver.func if isinstance(receiver, ast.Call) else receiver
    name = get_dotted(called).rpartition(".")[2]
    if name in context.index.events or context.new_name(called):
        return True
    return kind == "task" and (context.is_sure_task(receiver) or _is_of_unread_module(context, receiver))


def _is_of_unread_module(context: FileContext, receiver: ast.expr) -> bool:
    """Return whether a name comes from a module of the same project that was not read: `migrate shop/views.py`."""
    origin = context.origin_of(receiver)
    if origin.startswith("."):
        return not context.index.has_read(origin.lstrip("."))
    return len(context.index.modules) == 1 and not context.index.has_read(origin)


def _is_pool(context: FileContext, receiver: ast.expr) -> bool:
    packages = {origin.partition(".")[0] for origin in context.origins.values()}
    return bool(packages & _POOLS) or "pool" in ast.unparse(receiver).lower()
