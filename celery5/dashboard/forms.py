"""Make the fields of a form from the parameters of an operation."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from celery5.operations.operation import Operation
from celery5.operations.parameters import Parameter, Widget, list_parameters
from celery5.protocol.durations import format_shortest
from celery5.protocol.text_values import DURATION

FEW_FIELDS = 4
"""Fields of a form that are all seen at once."""
KINDS: Mapping[Widget, tuple[str, str]] = {
    "text": ("text", ""),
    "time": ("text", "such as 2026-12-24T18:00:00+01:00"),
    "number": ("number", ""),
    "duration": ("text", DURATION.examples),
    "checkbox": ("checkbox", ""),
    "select": ("select", ""),
    "lines": ("textarea", "one on each line"),
    "json": ("textarea", "as JSON"),
}
"""The kind of a field for each widget, and what to write."""


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
    # What it is, in one line.
    help: str = ""
    # Whether it is seen at once: others are folded away when the form has values already.
    is_shown: bool = True


def make_fields(operation: Operation, values: Mapping[str, str]) -> list[FormField]:
    """Return the fields for the parameters of an operation, with the values that they have.

    When the form is asked for with values, as by a button, what is optional and has none is folded away.
    """
    fields = [
        _make_field(parameter, values.get(parameter.name))
        for parameter in list_parameters(operation.parameters)
    ]
    if not any(values.values()) or len(fields) <= FEW_FIELDS:
        return fields
    return [field._replace(is_shown=field.required or bool(values.get(field.name))) for field in fields]


def _make_field(parameter: Parameter, value: str | None) -> FormField:
    kind, hint = KINDS[parameter.widget]
    if value is None:
        default = parameter.default
        value = "" if default in (None, False) or kind == "textarea" else str(default)
        if value and parameter.widget == "duration":
            value = format_shortest(float(value))
    return FormField(
        name=parameter.name,
        label=parameter.label,
        kind=kind,
        value=value,
        required=parameter.required,
        choices=parameter.choices,
        hint=hint,
        help=parameter.help,
    )
