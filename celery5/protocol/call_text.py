"""Call text: the arguments of a call, as people see them in a table.

Floor: protocol. Reads: nothing. Writes: nothing.
"""

from collections.abc import Sequence
from typing import cast

import msgspec

from celery5.protocol.masking import mask_passwords
from celery5.protocol.remains import try_decode_value

MAX_CALL_LENGTH = 120
"""Characters of a call's arguments that are shown."""
MAX_CALL_SIZE = 16 * 1024
"""Bytes of a call's arguments that are looked at: of more only the size is shown."""


def format_call(names: Sequence[str], args: msgspec.Raw, kwargs: msgspec.Raw) -> str:
    """Return the arguments of a call on one line, `order=7, token="***"`: shortened, and without passwords.

    Args:
        names: the task's positional parameters, in order.
        args: the positional arguments, a JSON array.
        kwargs: the named ones, a JSON object.
    """
    size = len(bytes(args)) + len(bytes(kwargs))
    if size > MAX_CALL_SIZE:
        return f"({size} bytes)"
    listed, named = try_decode_value(args), try_decode_value(kwargs)
    if not isinstance(listed, list) or not isinstance(named, dict):
        return "(unreadable)"
    values = cast("list[object]", listed)
    known = dict(zip(names, values, strict=False)) | cast("dict[str, object]", named)
    try:
        shown = [f"{name}={_json(value)}" for name, value in mask_passwords(known).items()]
        text = ", ".join(shown + [_json(mask_passwords(value)) for value in values[len(names) :]])
    except RecursionError:
        return "(unreadable)"
    return text if len(text) <= MAX_CALL_LENGTH else f"{text[:MAX_CALL_LENGTH]}..."


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()
