"""Find values that arrive as text in a task whose parameters have no annotations, and did not with Celery."""

import ast
from collections.abc import Iterable, Iterator

from celery5.migration.files.findings import CeleryUse
from celery5.migration.files.source import SourceFile
from celery5.migration.project.context import FileContext
from celery5.migration.project.index import Function, KnownTask, ProjectIndex, get_dotted

_ADVICE = (
    "annotate the parameter with this type: arguments are JSON, and without an annotation the task gets text, where "
    "Celery gives the value back (celery5 docs types)"
)
_MODELS = (
    "arguments are JSON: pass the key, such as order.pk, and read the object from the database in the task"
)
_GETTING = {
    "get",
    "create",
    "first",
    "last",
    "latest",
    "earliest",
    "all",
    "filter",
    "exclude",
    "aget",
    "acreate",
}
"""Methods of a manager and of a query that return an object of the database, or a query."""
_MAKERS = {
    "datetime.datetime": "datetime",
    "datetime.date": "date",
    "datetime.time": "time",
    "datetime.timedelta": "timedelta",
    "django.utils.timezone.now": "datetime",
    "django.utils.timezone.localtime": "datetime",
    "django.utils.timezone.localdate": "date",
    "decimal.Decimal": "Decimal",
    "uuid.UUID": "UUID",
    **{f"uuid.uuid{version}": "UUID" for version in (1, 3, 4, 5)},
}
"""What makes a value of a type that JSON does not have."""
_METHODS = {
    **dict.fromkeys(
        ("now", "utcnow", "today", "fromtimestamp", "fromisoformat", "strptime", "combine", "astimezone"), ""
    ),
    "replace": "",
    "date": "date",
    "time": "time",
}
"""Methods of these types that return a value of the same type (''), or of another."""
_SENDING = {
    "delay",
    "s",
    "si",
    "partial",
    "delay_on_commit",
    "apply_async",
    "apply_async_on_commit",
    "signature",
}
_PACKED = {"apply_async", "apply_async_on_commit", "signature"}
"""Methods that take the arguments of the task as a tuple and a dictionary."""
_UNANNOTATED = "parameters without annotations"
_ANNOTATE = (
    "annotate those that take a datetime, date, time, timedelta, Decimal, UUID or bytes: else they arrive as text "
    "(celery5 docs types)"
)


def check_argument_types(context: FileContext, call: ast.Call) -> None:
    """Report a datetime and the like that a call sends to a parameter without an annotation."""
    called = call.func
    if not (isinstance(called, ast.Attribute) and called.attr in _SENDING):
        return
    task = context.find_task(called.value)
    if task is None:
        return
    for name, value in _list_arguments(call, called.attr, task):
        if context.index.is_django and _is_model(context, value, call):
            context.by_hand(call, f"an object of the database for {task.name}({name})", _MODELS)
            continue
        kind = _find_type(context, value, call)
        if kind and name in task.unannotated:
            context.by_hand(call, f"{kind} for {task.name}({name})", _ADVICE)


def find_unannotated(file: SourceFile, tree: ast.Module, index: ProjectIndex) -> Iterator[CeleryUse]:
    """Yield the tasks of a file that have parameters without annotations whose type may matter."""
    task_names = {
        task.name
        for tasks in index.tasks.values()
        for task in tasks
        if task.module == file.module and _may_matter(task)
    }
    for node in ast.walk(tree):
        if isinstance(node, Function) and node.name in task_names - index.errbacks:
            yield CeleryUse(node.lineno, "decide", _UNANNOTATED, _ANNOTATE)


def _may_matter(task: KnownTask) -> bool:
    """Return whether a task has a parameter without annotation that is not surely an id."""
    return any(
        name not in ("pk", "id", "ids") and not name.endswith(("_id", "_pk", "_ids"))
        for name in task.unannotated
    )


def _list_arguments(call: ast.Call, method: str, task: KnownTask) -> Iterator[tuple[str, ast.expr]]:
    """Yield the arguments that a call sends to a task, by the names of its parameters."""
    if method not in _PACKED:
        yield from zip(task.positional, call.args, strict=False)
        yield from ((option.arg, option.value) for option in call.keywords if option.arg)
        return
    packed = dict(zip(("args", "kwargs"), call.args, strict=False))
    packed |= {option.arg: option.value for option in call.keywords if option.arg in ("args", "kwargs")}
    match packed.get("args"):
        case ast.Tuple(elts=values) | ast.List(elts=values):
            yield from zip(task.positional, values, strict=False)
        case _:
            pass
    match packed.get("kwargs"):
        case ast.Dict(keys=keys, values=values):
            for key, value in zip(keys, values, strict=True):
                if isinstance(key, ast.Constant):
                    yield str(key.value), value
        case _:
            pass


def _find_type(context: FileContext, value: ast.expr, call: ast.Call) -> str:
    """Return the type of an expression, `datetime`; '' for types of JSON, and where the syntax does not show it."""
    match value:
        case ast.Constant(value=bytes()):
            return "bytes"
        case ast.Call(func=called):
            return _find_made(context, called, call)
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub()):
            return _find_type(context, left, call)
        case ast.Name(id=name) if name not in context.origins:
            kinds = {_find_type(context, assigned, call) for assigned in _find_assigned(context, name, call)}
            return kinds.pop() if len(kinds) == 1 else ""
        case _:
            return ""


def _is_model(context: FileContext, value: ast.expr, call: ast.Call) -> bool:
    """Return whether an expression is certainly a model object of Django, or a query."""
    match value:
        case ast.Await(value=inner):
            return _is_model(context, inner, call)
        case ast.Call(func=ast.Name(id="get_object_or_404")):
            return True
        case ast.Call(func=ast.Attribute(attr=method) as called) if method in _GETTING:
            return any(
                isinstance(node, ast.Attribute) and node.attr == "objects" for node in ast.walk(called)
            )
        case ast.Attribute(attr="user", value=ast.Name(id="request")):
            return True
        case ast.Name(id=name) if name not in context.origins:
            found = [
                value for value in _find_assigned(context, name, call) if not isinstance(value, ast.Name)
            ]
            return bool(found) and all(_is_model(context, assigned, call) for assigned in found)
        case _:
            return False


def _find_made(context: FileContext, called: ast.expr, call: ast.Call) -> str:
    kind = _MAKERS.get(context.origin_of(called), "")
    if kind or not isinstance(called, ast.Attribute) or called.attr not in _METHODS:
        return kind
    of = _MAKERS.get(context.origin_of(called.value), "") or _find_type(context, called.value, call)
    return of and (_METHODS[called.attr] or of)


def _find_assigned(context: FileContext, name: str, call: ast.Call) -> Iterator[ast.expr]:
    """Yield what a variable is assigned to above a call, in the innermost function around it or in the module."""
    around: list[ast.AST] = [
        node
        for node in ast.walk(context.tree)
        if isinstance(node, Function) and node.lineno <= call.lineno <= (node.end_lineno or 0)
    ]
    inside: Iterable[ast.AST] = ast.walk(around[-1]) if around else context.tree.body
    for node in inside:
        if isinstance(node, ast.Assign) and node.lineno < call.lineno:
            for target in node.targets:
                if get_dotted(target) == name:
                    yield node.value
