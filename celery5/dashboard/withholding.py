"""Withhold from viewers what only operators may see: lines of source code, and records as a whole."""

from collections.abc import Mapping
from functools import cache
from typing import Any, cast, get_args, get_type_hints

import msgspec

from celery5.protocol.job.error_text import remove_source_lines

CONFIDENTIAL = ("traceback", "record")
"""The fields of results that viewers do not see as they are, wherever they stand."""
FOR_OPERATORS = "for operators"
"""Stands for a value that was withheld."""


def withhold(value: Any, hint: Any) -> Any:
    """Return the result of an operation as a viewer sees it: tracebacks without source lines, and no records.

    Args:
        value: The result.
        hint: Its type. A result that has none of these fields is not gone through.
    """
    return _withhold(value) if _has_confidential(hint) else value


def _withhold(value: Any) -> Any:
    if isinstance(value, msgspec.Struct):
        changed = {name: _withhold_field(name, getattr(value, name)) for name in value.__struct_fields__}
        return msgspec.structs.replace(value, **changed)
    if isinstance(value, list):
        return [_withhold(item) for item in cast("list[Any]", value)]
    if isinstance(value, tuple):
        return tuple(_withhold(item) for item in cast("tuple[Any, ...]", value))
    return value


def _withhold_field(name: str, value: Any) -> Any:
    if name == "traceback" and isinstance(value, str):
        return remove_source_lines(value)
    return FOR_OPERATORS if name == "record" and value is not None else _withhold(value)


@cache
def _has_confidential(hint: Any, within: tuple[Any, ...] = ()) -> bool:
    """Return whether a type has such a field, itself or in its parts."""
    if hint in within:
        return False
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        fields: Mapping[str, Any] = get_type_hints(hint)
        return any(name in hint.__struct_fields__ for name in CONFIDENTIAL) or any(
            _has_confidential(field, (*within, hint)) for field in fields.values()
        )
    return any(_has_confidential(part, within) for part in get_args(hint) if part is not ...)
