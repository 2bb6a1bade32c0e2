"""Event Fields: an event's fields, checked and encoded as a task's arguments are, and what of them a task takes.

Floor: domain. Reads: nothing. Writes: nothing.
"""

import inspect
from collections.abc import Sequence
from typing import Any, get_type_hints

import msgspec

from celery5.errors import BadArguments, Misconfigured
from celery5.protocol.arguments import Parameters
from celery5.task import Task


def parameters_of(kind: Any, name: str) -> Parameters:
    """Its fields, checked and encoded as a task's arguments are."""
    hints = get_type_hints(kind, include_extras=True)

    def call(**_fields: Any) -> None: ...

    call.__annotations__ = {each: hints[each] for each in kind.__struct_fields__}
    only = inspect.Parameter.KEYWORD_ONLY
    empty = inspect.Parameter.empty
    vars(call)["__signature__"] = inspect.Signature(
        [
            inspect.Parameter(
                each.name, only, annotation=hints[each.name], default=empty if each.required else None
            )
            for each in msgspec.structs.fields(kind)
        ]
    )
    try:
        return Parameters(name, call)
    except Misconfigured as error:
        text = str(error).replace("task ", "event ", 1).replace("parameter ", "field ", 1)
        raise Misconfigured(text) from None


def of_a_field(error: BadArguments) -> BadArguments:
    """The same, in the words of events."""
    text = str(error).replace(": parameter ", ": field ", 1).replace(": an argument ", ": a field ", 1)
    return BadArguments(text.replace("keyword argument", "field"))


def taken_by(task: Task[Any, Any], event: str, fields: Sequence[str]) -> tuple[str, ...] | None:
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
