"""Make the fields of a form from the parameters of an operation."""

import re
from collections.abc import Mapping, Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

import msgspec

from celery5.operations.operation import Operation

FEW_FIELDS = 4
"""Fields of a form that are all seen at once."""


class FormField(NamedTuple):
    """A field of a form."""

    name: str
    # As it is shown: `dry run`.
    label: str
    # `text`, `number`, `checkbox`, `select`, or `textarea` for lists and JSON.
    kind: str
    value: str
    required: bool
    # The choices of a `select`.
    choices: Sequence[str] = ()
    # What to write.
    hint: str = ""
    # Whether it is seen at once: others are folded away when the form has values already.
    is_shown: bool = True


def make_fields(operation: Operation, values: Mapping[str, str]) -> list[FormField]:
    """Return the fields for the parameters of an operation, with the values that they have.

    When the form is asked for with values, as by a button, what is optional and has none is folded away.
    """
    fields = [
        _make_field(field, values.get(field.encode_name))
        for field in msgspec.structs.fields(operation.parameters)
    ]
    if not any(values.values()) or len(fields) <= FEW_FIELDS:
        return fields
    return [field._replace(is_shown=field.required or bool(values.get(field.name))) for field in fields]


def _make_field(field: Any, value: str | None) -> FormField:
    kind, choices, hint = _choose_kind(field.type)
    if value is None:
        default = field.default
        value = "" if default in (None, msgspec.NODEFAULT, False) or kind == "textarea" else str(default)
    label = re.sub(r"_", " ", field.name)
    return FormField(field.name, label, kind, value, field.required, choices, hint)


def _choose_kind(hint: Any) -> tuple[str, Sequence[str], str]:
    """Return the kind of a field, its choices, and what to write."""
    origin = get_origin(hint)
    if origin is Annotated:
        return _choose_kind(get_args(hint)[0])
    if origin in (Union, UnionType):
        parts = [part for part in get_args(hint) if part is not NoneType]
        return _choose_kind(parts[0])
    if origin is Literal:
        return "select", tuple(str(choice) for choice in get_args(hint)), ""
    if hint is bool:
        return "checkbox", (), ""
    if hint in (int, float):
        return "number", (), ""
    is_list = origin in (list, tuple)
    if is_list and Any not in get_args(hint):
        return "textarea", (), "one on each line"
    if is_list or origin is dict or hint is Any:
        return "textarea", (), "as JSON"
    return "text", (), ""
