"""Return full names of functions, classes and errors that are the same in every process."""

import builtins
import sys
from collections.abc import Iterable, Mapping
from pathlib import PurePath
from typing import Any, cast

from celery5.errors import Misconfigured


def get_module_name(thing: Any) -> str:
    """Return the module of a function or a class. A script has the name by which a worker imports it."""
    return resolve_module_name(thing.__module__)


def resolve_module_name(module: str) -> str:
    """Return the name of a module by which other processes import it."""
    if module == "__main__" and module in sys.modules:
        main = sys.modules[module]
        spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
        module = spec.name if spec else PurePath(file).stem if file else module
    return module


def get_module_file(module: str) -> str:
    """Return the file from which this process has loaded a module, or "" where it has none."""
    return getattr(sys.modules.get(module), "__file__", None) or ""


SHARD_MARK = "#"
"""Separates the name of a queue and the number of a shard. No name of a queue contains it."""


def is_queue_name(name: object) -> bool:
    """Return whether a queue may have this name: 1 to 200 characters without spaces, commas, braces or #."""
    return (
        isinstance(name, str)
        and 0 < len(name) <= 200
        and not any(character.isspace() or character in "{},#" for character in name)
    )


def get_error_name(error: str | type[BaseException]) -> str:
    """Return the full name of an error's class, as in policies and messages. Raises Misconfigured."""
    if isinstance(error, str):
        if "." not in error:
            meant = f"'builtins.{error}'" if hasattr(builtins, error) else "'module.Name'"
            raise Misconfigured(
                f"{error!r} is no full name: give the class itself, or its full name, as {meant}"
            )
        return error
    if not isinstance(cast("object", error), type) or not issubclass(
        cast("type[object]", error), BaseException
    ):
        raise Misconfigured(f"{error!r} is no class of errors: give classes of errors, or their full names")
    return f"{get_module_name(error)}.{error.__qualname__}"


def get_error_names(errors: Iterable[str | type[BaseException]]) -> tuple[str, ...]:
    """Return the full names of several errors. Raises Misconfigured, also for a single one."""
    if isinstance(errors, str | type) or not isinstance(cast("object", errors), Iterable):
        raise Misconfigured(
            f"{errors!r} is no list: give a list of classes of errors, or of their full names"
        )
    return tuple(map(get_error_name, errors))


def get_class_names(error: BaseException) -> tuple[str, ...]:
    """Return the full names of an error's class and its bases, which a policy may name. Never raises.

    Python itself is asked for them: a metaclass may have redefined the attributes.
    """
    kinds: tuple[type, ...] = _BASES.__get__(type(error))[:-1]  # all but object
    return tuple(f"{_get_own_module(kind)}.{_QUALNAME.__get__(kind)}" for kind in kinds)


def get_qualified_name(value: object) -> str:
    """Return the qualified name of a value's class, as Python itself knows it. Never raises."""
    return str(_QUALNAME.__get__(type(value)))


def _get_own_module(kind: type) -> str:
    module: object = _MODULE.__get__(kind)
    return resolve_module_name(module) if type(module) is str else "?"  # a class may have set it to anything


_OF_CLASSES: Mapping[str, Any] = vars(type)
_BASES, _QUALNAME, _MODULE = (_OF_CLASSES[name] for name in ("__mro__", "__qualname__", "__module__"))
