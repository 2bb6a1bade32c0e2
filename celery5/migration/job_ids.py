"""Find code that takes the id of a job for a UUID: routes, patterns, fields and conversions."""

import ast
import re
from collections.abc import Collection, Iterator, Mapping, Sequence

from celery5.migration.files.findings import CeleryUse
from celery5.migration.files.source import SourceFile
from celery5.migration.project.index import Function, get_dotted

_JOB = re.compile(r"(?i)(?:^|_)(?:tasks?|jobs?|celery)(?:_?(?:id|uuid|pk|key)s?)?(?:_|$)")
"""The name of a parameter or of a field that may hold the id of a job."""
_ROUTE = re.compile(r"<uuid:(\w+)>|\{(\w+):uuid\}")
"""A parameter of a route that matches nothing but a UUID, in Django, Flask and Starlette."""
_PATTERN = re.compile(r"[\])\w]\{(?:36|8)\}")
"""The part of a regular expression for a UUID that counts characters: 36, or the first 8."""
_ADVICE = (
    'the id of a job is no UUID in celery5: it has 22 letters, digits, "-" and "_"; write <str:...> in a route, str in '
    "place of UUID, CharField in place of UUIDField (celery5 docs from-celery)"
)


def find_uuid_ids(files: Sequence[SourceFile]) -> Iterator[tuple[str, CeleryUse]]:
    """Yield the places that expect the id of a job to be a UUID, each with the name of its file."""
    trees = [(file.name, file.tree) for file in files if file.tree is not None]
    views: dict[str, set[str]] = {}
    for _, tree in trees:
        _add_views(tree, views)
    for name, tree in trees:
        for line, shown in _find_in_tree(tree, views):
            yield name, CeleryUse(line, "decide", shown, _ADVICE)


def _add_views(tree: ast.Module, views: dict[str, set[str]]) -> None:
    """Add the parameters that functions and classes use as ids of jobs, by the name of the function or class."""
    for node in ast.walk(tree):
        if isinstance(node, Function | ast.ClassDef):
            found = {
                name for call in ast.walk(node) if isinstance(call, ast.Call) for name in _find_ids(call)
            }
            if found:
                views.setdefault(node.name, set()).update(found)


def _find_ids(call: ast.Call) -> Iterator[str]:
    """Yield the names in the first argument of `AsyncResult(...)` and `app.result(...)`."""
    dotted = get_dotted(call.func)
    if call.args and dotted.rpartition(".")[2] in ("AsyncResult", "result") and dotted != "result":
        for node in ast.walk(call.args[0]):
            match node:
                case ast.Name(id=name) | ast.Constant(value=str(name)) | ast.Attribute(attr=name):
                    yield name
                case _:
                    pass


def _find_in_tree(tree: ast.Module, views: Mapping[str, Collection[str]]) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each place that expects a UUID."""
    ids: dict[int, set[str]] = {}  # parameters that are ids of jobs, by id() of the node of their route
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            parts = {part for argument in node.args[1:] for part in _list_names(argument)}
            _add_ids(ids, node, {name for part in parts for name in views.get(part, ())})
        elif isinstance(node, Function):
            own = views.get(node.name, ())
            for decorator in node.decorator_list:
                _add_ids(ids, decorator, own)
            yield from _check_annotations(node, own)
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str(text)):
                yield from ((node.lineno, shown) for shown in _check_route(text, ids.get(id(node), ())))
            case ast.Call(func=called, args=[argument, *_]) if (
                get_dotted(called).rpartition(".")[2] == "UUID"
            ):
                if any(_JOB.search(name) for name in _list_names(argument)):
                    yield node.lineno, ast.unparse(node)
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=ast.Call(func=called))
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.Call(func=called))
            ) if get_dotted(called).endswith("UUIDField") and _JOB.search(name):
                yield node.lineno, f"{name} = {get_dotted(called)}(...)"
            case _:
                pass


def _list_names(node: ast.expr) -> list[str]:
    """Return the names in an expression: `status` of `views.status`, `Status` of `Status.as_view()`."""
    names = [inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)]
    return names + [inner.attr for inner in ast.walk(node) if isinstance(inner, ast.Attribute)]


def _add_ids(ids: dict[int, set[str]], node: ast.expr, names: Collection[str]) -> None:
    """Record which parameters of the route, the first argument of a call, are ids of jobs."""
    if isinstance(node, ast.Call) and node.args and names:
        ids.setdefault(id(node.args[0]), set()).update(names)


def _check_route(text: str, names: Collection[str]) -> Iterator[str]:
    """Yield the parts of a route, or the pattern, that match only a UUID in the place of an id of a job."""
    for match in _ROUTE.finditer(text):
        name = match[1] or match[2]
        if name in names or _JOB.search(name):
            yield match[0]
    if _PATTERN.search(text) and (
        names or any(_JOB.search(word) for word in re.findall(r"[A-Za-z_]+", text))
    ):
        yield text[:60]


def _check_annotations(function: Function, names: Collection[str]) -> Iterator[tuple[int, str]]:
    """Yield the parameters of a view that are ids of jobs and are annotated as UUID."""
    arguments = function.args
    for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
        annotation = argument.annotation
        if annotation is not None and argument.arg in names and "UUID" in _list_names(annotation):
            yield argument.lineno, f"{argument.arg}: {ast.unparse(annotation)}"
