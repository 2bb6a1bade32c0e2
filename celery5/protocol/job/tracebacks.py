"""Format the traceback of an error of the user's, in a bound of time and memory."""

import traceback
from itertools import islice
from types import TracebackType
from typing import Any, cast

from celery5.protocol.job.verdict import iterate_leaves
from celery5.protocol.masking import MAX_ERROR_LENGTH, describe_error

MAX_FRAMES = 400
"""Frames of one error that are shown, the last ones: as many as there is space for in a dead letter."""
MAX_ERRORS = 1_000
"""Errors that are looked at: members of groups, causes and contexts, each as often as it is named."""
MAX_NOTES = 1_000_000
"""Characters of the notes of one error with which it is shown."""
MAX_SHOWN_MEMBERS = 15
"""Members that are shown of a group that has too many: as many as Python shows."""

# By the name: 3.14 has `__getattribute__` of an error from `object`.
_READ: tuple[Any, ...] = tuple(
    getattr(BaseException, name) for name in ("__cause__", "__context__", "__traceback__", "__getattribute__")
)
_READ_OF_GROUP: Any = vars(BaseExceptionGroup)["exceptions"]


def format_traceback(error: BaseException, steps: TracebackType | None = None) -> str:
    """Return the text that Python shows for an error.

    An error whose members, causes, contexts or notes are too many, or are not those that Python has stored, is shown
    with its first members only: Python's own formatter goes through all of them before it shows one. It would never end
    where each of forty groups is a member of the next one twice, or where a class makes a new `__cause__` for each
    look. Never raises: an error whose own methods raise is shown in the same way.

    Args:
        error: The error.
        steps: Its traceback; None for the one that it has.
    """
    own_steps = get_traceback(error) if steps is None else steps
    try:
        if can_show_others(error):
            lines = traceback.format_exception(type(error), error, own_steps, limit=-MAX_FRAMES)
            return "".join(lines).encode(errors="backslashreplace").decode()
    except BaseException as other:
        why = describe_error(other, MAX_ERROR_LENGTH)
        return f"{_format_shortly(error, own_steps)}(no more can be shown of it: {why})\n"
    return _format_shortly(error, own_steps) + _OTHERS_LEFT_OUT


def _format_shortly(error: BaseException, steps: TracebackType | None) -> str:
    """Return the traceback of an error, and what it and the first of its members say. Never raises."""
    lines = ["Traceback (most recent call last):\n", *traceback.format_tb(steps, limit=-MAX_FRAMES)]
    lines.append(f"{describe_error(error, MAX_ERROR_LENGTH)}\n")
    first = islice(iterate_leaves(error), MAX_SHOWN_MEMBERS)
    lines += [f"  {describe_error(leaf, MAX_ERROR_LENGTH)}\n" for leaf in first if leaf is not error]
    return "".join(lines)


def get_traceback(error: BaseException) -> TracebackType | None:
    """Return the traceback of an error, whatever its class has made of the attribute."""
    return cast("TracebackType | None", _READ[2].__get__(error))


def can_show_others(error: BaseException) -> bool:
    """Return whether Python's formatter ends soon: it looks at a group's member again for each time it is named."""
    pending: list[BaseException] = [error]
    chained = set[int]()
    for _ in range(MAX_ERRORS):
        if not pending:
            return True
        current: Any = pending.pop()
        if not _is_read_as_stored(type(current)) or _has_long_notes(current):
            return False
        chained.add(id(current))
        for other in (current.__cause__, current.__context__):
            if other is not None and id(other) not in chained:
                chained.add(id(other))
                pending.append(other)
        if issubclass(type(current), BaseExceptionGroup):
            members = current.exceptions
            if len(members) > MAX_ERRORS:
                return False
            pending += members
    return not pending


def _is_read_as_stored(kind: Any) -> bool:
    """Return whether the attributes that Python's formatter follows are those of the built-in classes."""
    own = (kind.__cause__, kind.__context__, kind.__traceback__, kind.__getattribute__)
    is_group = issubclass(kind, BaseExceptionGroup)
    return all(map(_is, own, _READ)) and (not is_group or kind.exceptions is _READ_OF_GROUP)


def _has_long_notes(error: BaseException) -> bool:
    notes: Any = vars(error).get("__notes__")  # anything, which Python shows somehow
    if not isinstance(notes, list):
        return False
    size = sum(len(note) for note in cast("list[object]", notes) if isinstance(note, str))
    return len(cast("list[object]", notes)) > MAX_ERRORS or size > MAX_NOTES


def _is(value: object, other: object) -> bool:
    return value is other


_OTHERS_LEFT_OUT = "(it has more members, causes or notes than can be shown)\n"
