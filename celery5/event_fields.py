"""Event Fields: an event's fields, checked and encoded as a task's arguments are, and what of them a task takes.

Floor: domain. Reads: nothing. Writes: nothing.
"""

import inspect
from collections.abc import Iterable, Sequence
from contextlib import suppress
from difflib import get_close_matches
from typing import Any, cast, get_type_hints

import msgspec

from celery5.errors import BadArguments, Misconfigured
from celery5.protocol.arguments import Parameters, encode_value
from celery5.task import Task


def get_field_parameters(kind: Any, name: str) -> Parameters:
    """Its fields, checked and encoded as a task's arguments are."""
    hints = get_type_hints(kind, include_extras=True)

    def call(**_fields: Any) -> None: ...

    call.__annotations__ = {each: hints[each] for each in kind.__struct_fields__}
    only = inspect.Parameter.KEYWORD_ONLY
    empty = inspect.Parameter.empty
    vars(call)["__signature__"] = inspect.Signature(
        [
            inspect.Parameter(
                each.name,
                only,
                annotation=hints[each.name],
                default=empty if each.required else _default(each),
            )
            for each in msgspec.structs.fields(kind)
        ]
    )
    try:
        return Parameters(name, call)
    except Misconfigured as error:
        text = str(error).replace("task ", "event ", 1).replace("parameter ", "field ", 1)
        raise Misconfigured(text) from None


def get_field_defaults(kind: Any, takes: Sequence[str] | None) -> dict[str, msgspec.Raw]:
    """The defaults of those fields that a task takes, as JSON: those that are the same each time."""
    found: dict[str, msgspec.Raw] = {}
    for each in msgspec.structs.fields(kind):
        is_fixed = each.default is not msgspec.NODEFAULT or each.default_factory in _EMPTY
        if not each.required and is_fixed and (takes is None or each.name in takes):
            with suppress(TypeError):  # one that has no JSON form is refused when the event is made
                found[each.name] = msgspec.Raw(encode_value(_default(each)))
    return found


def check_field_names(event: str, fields: Sequence[str], said: Iterable[str]) -> None:
    """Raises BadArguments for a field that the event does not have."""
    wrong = next((each for each in said if each not in fields), None)
    if wrong is not None:
        near = get_close_matches(wrong, fields, n=1)
        meant = f": did you mean {near[0]!r}?" if near else ";"
        raise BadArguments(
            f"event {event} has no field {wrong!r}{meant} its fields: {', '.join(fields) or 'none'}"
        )


def _default(field: msgspec.structs.FieldInfo) -> Any:
    """What a field is when it is not given; None where that is made anew each time."""
    if field.default is not msgspec.NODEFAULT:
        return field.default
    return cast("Any", field.default_factory)() if field.default_factory in _EMPTY else None


def as_field_error(error: BadArguments) -> BadArguments:
    """The same, in the words of events."""
    text = str(error).replace(": parameter ", ": field ", 1).replace(": an argument ", ": a field ", 1)
    return BadArguments(text.replace("keyword argument", "field"))


def get_taken_fields(task: Task[Any, Any], event: str, fields: Sequence[str]) -> tuple[str, ...] | None:
    """The fields that a task takes; None for all that there are. Raises Misconfigured if it needs others."""
    parameters = inspect.signature(task.function).parameters.values()
    kinds = {each.kind for each in parameters}
    by_name = [each for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    missing = [
        each.name
        for each in parameters
        if each.default is each.empty
        and each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)
        and (each.name not in fields or each.kind is each.POSITIONAL_ONLY)
    ]
    if missing:
        raise Misconfigured(
            f"task {task.name} needs {missing[0]!r}, which event {event} does not give by that name; "
            f"its fields: {', '.join(fields) or 'none'}"
        )
    return None if inspect.Parameter.VAR_KEYWORD in kinds else tuple(each.name for each in by_name)


_EMPTY = (list, dict, set)
"""Factories of defaults that make the same each time."""
