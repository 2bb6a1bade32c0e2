"""Make a digest of what a function takes, so that workers with different code can tell that theirs differ.

It covers the parameters, their annotations, and the classes in these: fields, which of them are required, and the
methods, since a validator is a part of what is taken. Nothing of it depends on the process: no addresses, no order of a
set. Two digests may differ without need, and that does little harm: one more worker looks at a job that is bad for all.
"""

import inspect
import sys
from collections.abc import Iterator, Mapping
from enum import Enum
from hashlib import sha256
from types import CodeType, FunctionType
from typing import Any, cast, get_args, get_origin, get_type_hints

MAX_CLASSES = 1000
"""The most classes that are described for one function."""
_DIGEST_LENGTH = 12
_PLAIN = (str, bytes, int, float, complex, bool, type(None), type(...))
_WRAPPED = ("__func__", "fget", "func", "wrapped")
"""Where a class method, a property and the decorators of libraries keep their function."""


def digest_signature(signature: inspect.Signature, types: Mapping[str, Any]) -> str:
    """Return the digest of a function's parameters, whose resolved annotations are `types`."""
    visited: set[type[Any]] = set()
    words: list[str] = []
    for name, parameter in signature.parameters.items():
        words += (name, str(parameter.kind), str(parameter.default is parameter.empty))
        words += _describe(types.get(name, Any), visited)
    return sha256("\0".join(words).encode(errors="backslashreplace")).hexdigest()[:_DIGEST_LENGTH]


def digest_class(kind: object) -> str:
    """Return the digest of what a class takes, as `digest_signature` does for an annotation."""
    words = "\0".join(_describe(kind, set()))
    return sha256(words.encode(errors="backslashreplace")).hexdigest()[:_DIGEST_LENGTH]


def _describe(annotation: Any, visited: set[type[Any]]) -> Iterator[str]:
    """Yield words for an annotation, and for the classes in it that were not visited before."""
    arguments = get_args(annotation)
    if arguments:
        yield str(get_origin(annotation))
        for argument in (*arguments, *getattr(annotation, "__metadata__", ())):
            yield from _describe(argument, visited)
        yield ")"
    elif isinstance(annotation, type):
        yield f"{annotation.__module__}.{annotation.__qualname__}"
        if _is_own(annotation) and annotation not in visited and len(visited) < MAX_CLASSES:
            visited.add(annotation)
            yield from _describe_class(annotation, visited)
    else:
        yield _show(annotation)


def _is_own(kind: type[Any]) -> bool:
    """Return whether a class may differ between versions of an application."""
    return kind.__module__.partition(".")[0] not in sys.stdlib_module_names


def _describe_class(kind: type[Any], visited: set[type[Any]]) -> Iterator[str]:
    if issubclass(kind, Enum):
        yield from (f"{member.name}={_show(member.value)}" for member in kind)
    try:
        parameters = inspect.signature(kind).parameters.values()
        yield from (
            f"{parameter.name} {parameter.kind} {parameter.default is parameter.empty}"
            for parameter in parameters
        )
    except (TypeError, ValueError):  # it has none that can be told
        pass
    for name, annotation in sorted(_read_hints(kind).items()):
        yield name
        yield from _describe(annotation, visited)
    for ancestor in kind.__mro__:
        if _is_own(ancestor):
            yield from _describe_methods(ancestor)


def _read_hints(kind: type[Any]) -> Mapping[str, Any]:
    try:
        return get_type_hints(kind, include_extras=True)
    except Exception:  # a name that does not exist, or code of the user's
        try:
            return inspect.get_annotations(kind)
        except Exception:  # the same, where annotations are evaluated late
            return {}


def _describe_methods(kind: type[Any]) -> Iterator[str]:
    for name, value in sorted(vars(kind).items()):
        function: Any = value
        for attribute in _WRAPPED:
            inner = inspect.getattr_static(function, attribute, None)
            if isinstance(inner, FunctionType):
                function = inner
        if isinstance(function, FunctionType):
            yield name
            yield from _describe_code(function.__code__)


def _describe_code(code: CodeType) -> Iterator[str]:
    yield code.co_code.hex()
    yield from code.co_names
    yield from map(_show, code.co_consts)


def _show(value: Any) -> str:
    """Return a value as text, the same in every process."""
    if isinstance(value, CodeType):
        return " ".join(_describe_code(value))
    if isinstance(value, (frozenset, tuple, list)):
        items = [_show(item) for item in cast("tuple[Any, ...]", value)]
        return f"({', '.join(sorted(items) if isinstance(value, frozenset) else items)})"
    if isinstance(value, _PLAIN):
        return repr(value)
    try:
        text = repr(value)
    except Exception:  # code of the user's
        text = " at 0x"
    return str(cast("Any", type(value))) if " at 0x" in text else text
