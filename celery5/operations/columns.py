"""Describe the columns of a result: what tables show of it, in a terminal and on a page, in the same order."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import msgspec

ColumnKind = Literal["value", "time", "duration"]
"""How a value is shown: as it is; as a moment, given in seconds since 1970; as a time span, given in seconds."""


@dataclass(frozen=True)
class ResultColumn:
    """One column of a table, and one field of what is shown of a single thing.

    Args:
        name: What stands above it.
        of: The field of the result whose value it shows; or a function of the result, which returns that.
        kind: How the value is shown.
    """

    name: str
    of: str | Callable[[Any], object]
    kind: ColumnKind = "value"

    def get(self, item: Any) -> object:
        """Return the value for one item of a result."""
        return getattr(item, self.of) if isinstance(self.of, str) else self.of(item)


def list_columns(result: Any) -> Sequence[ResultColumn]:
    """Return a column for each field of a result, or of the items of a list, in the order that JSON has.

    Args:
        result: The type of the result.
    """
    if get_origin(result) in (Union, UnionType):
        result = next(part for part in get_args(result) if part is not NoneType)
    if get_origin(result) in (list, tuple):
        result = get_args(result)[0]
    if not (isinstance(result, type) and issubclass(result, msgspec.Struct)):
        return ()
    return [ResultColumn(field.encode_name, field.name) for field in msgspec.structs.fields(result)]
