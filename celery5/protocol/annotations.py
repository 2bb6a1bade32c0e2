"""The annotations of functions: the types that they name, and what is passed to a task in place of an argument."""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace, UnionType
from typing import Any, NamedTuple, cast, get_origin, get_type_hints

from celery5.errors import Misconfigured


def resolve_hint(annotation: object, function: Callable[..., Any]) -> Any:
    """Return the type that an annotation of a function names; Any when it cannot be resolved yet."""
    alone = SimpleNamespace(__annotations__={"it": annotation})
    try:
        return get_type_hints(alone, getattr(function, "__globals__", {}), include_extras=True)["it"]
    except Exception:
        return Any


def contradicts(given: Any, wanted: Any) -> bool:
    """Return whether no value of one type is plainly one of the other. It is decided for two classes alone.

    Of generic classes the arguments do not count. Protocols, unions, `Any` and the like contradict nothing.
    """
    classes = [get_origin(kind) or kind for kind in (given, wanted)]
    if not all(map(_is_plain_class, classes)):
        return False
    first, second = classes
    if second in _PROMOTED.get(first, ()):
        return False
    try:
        return not (issubclass(first, second) or issubclass(second, first))
    except TypeError:  # a TypedDict, say
        return False


def _is_plain_class(kind: Any) -> bool:
    return (
        isinstance(kind, type)
        and kind not in (cast("type", Any), UnionType)
        and not getattr(kind, "_is_protocol", False)
    )


_PROMOTED: Mapping[type, tuple[type, ...]] = {int: (float, complex), float: (complex,), bytearray: (bytes,)}
"""The classes that type checkers take for others."""


class Injectable:
    """What the annotation of a parameter names, to have something passed to a task: a resource."""


class InjectedParameter(NamedTuple):
    """A parameter to which something is passed."""

    type: Any  # of what the function expects there, as it is annotated
    item: Injectable


def find_injected(function: Callable[..., Any]) -> dict[str, InjectedParameter]:
    """Return such parameters of a function, by name. An annotation whose text names no type yet is left out."""
    found: dict[str, InjectedParameter] = {}
    for name, annotation in getattr(function, "__annotations__", {}).items():
        hint = resolve_hint(annotation, function) if isinstance(annotation, str) else annotation
        named = [item for item in getattr(hint, "__metadata__", ()) if isinstance(item, Injectable)]
        if named and name != "return":
            found[name] = InjectedParameter(hint.__origin__, named[0])
    return found


def refuse_injected(function: object, where: str) -> None:
    """Raise Misconfigured when a function that is no task takes a resource: it would get the default in its place.

    Args:
        function: What is called. Of a task, a bound method, a `partial` or a class, that is what is behind it.
        where: The beginning of the message.
    """
    for called in _unfold(function):
        for name in find_injected(called):
            raise Misconfigured(
                f"{where}: parameter {name!r} takes a resource, which only tasks get: let it send a job, or open what "
                "it needs in a boot step"
            )


def _unfold(function: Any) -> list[Any]:
    """Return the functions whose annotations count: those of what is called, and what it stands for."""
    function = inspect.unwrap(function.func if isinstance(function, partial) else function)
    if isinstance(function, type):
        return [
            getattr(function, name) for name in ("__init__", "run", "__call__") if hasattr(function, name)
        ]
    if not hasattr(function, "__code__") and not inspect.isroutine(function):
        kind = cast("Any", type(function))
        return [getattr(kind, name) for name in ("run", "__call__") if hasattr(kind, name)]
    return [function]
