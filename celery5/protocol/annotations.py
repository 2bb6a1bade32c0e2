"""Read the annotations of functions: the types that they name, and the parameters that get a resource."""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace, UnionType
from typing import Any, NamedTuple, cast, get_origin, get_type_hints

from celery5.errors import Misconfigured


def resolve_hint(annotation: object, function: Callable[..., Any]) -> Any:
    """Return the type that an annotation of a function names; Any when it cannot be resolved yet."""
    holder = SimpleNamespace(__annotations__={"it": annotation})
    try:
        return get_type_hints(holder, getattr(function, "__globals__", {}), include_extras=True)["it"]
    except Exception:
        return Any


def contradicts(given: Any, wanted: Any) -> bool:
    """Return whether no value can have both types. Only two classes can contradict each other.

    The arguments of generic classes are ignored. Protocols, unions, `Any` and the like contradict nothing.
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
"""Classes, and those in whose place type checkers accept them."""


class Injectable:
    """The base of resources: named in the annotation of a parameter, it is passed to the task."""


class InjectedParameter(NamedTuple):
    """A parameter that gets an `Injectable`."""

    type: Any  # the type that the function expects, from the annotation
    item: Injectable


def find_injected(function: Callable[..., Any]) -> dict[str, InjectedParameter]:
    """Return the injected parameters of a function, by name. Annotations that cannot be resolved yet are left out."""
    found: dict[str, InjectedParameter] = {}
    for name, annotation in getattr(function, "__annotations__", {}).items():
        hint = resolve_hint(annotation, function) if isinstance(annotation, str) else annotation
        named = [item for item in getattr(hint, "__metadata__", ()) if isinstance(item, Injectable)]
        if named and name != "return":
            found[name] = InjectedParameter(hint.__origin__, named[0])
    return found


def refuse_injected(function: object, where: str) -> None:
    """Raise Misconfigured if a function that is no task takes a resource: it would get the default value instead.

    Args:
        function: A callable. For a task, bound method, `partial` or class, its own function is checked.
        where: The beginning of the message.
    """
    for called in _list_functions(function):
        for name in find_injected(called):
            raise Misconfigured(
                f"{where}: parameter {name!r} takes a resource, which only tasks get: let it send a job, or open what "
                "it needs in a boot step"
            )


def _list_functions(function: Any) -> list[Any]:
    """Return the functions behind a callable, whose annotations count."""
    function = inspect.unwrap(function.func if isinstance(function, partial) else function)
    if isinstance(function, type):
        return [
            getattr(function, name) for name in ("__init__", "run", "__call__") if hasattr(function, name)
        ]
    if not hasattr(function, "__code__") and not inspect.isroutine(function):
        kind = cast("Any", type(function))
        return [getattr(kind, name) for name in ("run", "__call__") if hasattr(kind, name)]
    return [function]
