"""Masking: what people may read of a value: all but the passwords in it.

Floor: protocol. Reads: nothing. Writes: nothing.
"""

import re
from collections.abc import Mapping
from typing import Any, cast

MASK = "***"
_IN_URL = re.compile(r"(?s)(?<=//)([^:/@]*):.*@")
"""Up to the last @: a password that nobody has quoted may hold others."""
_BEFORE_AT = re.compile(r"(?s)(?<=//).*@")
_IN_QUERY = re.compile(r"(?i)((?:password|passwd|secret|token)=)[^&]*")
_NAMED = re.compile(r"(?i)passw|secret|token|credential|api_?key")


def masked(value: object, *, doubtful: bool = False) -> Any:
    """The same value without passwords: those in URLs, and whatever is named like one. A `doubtful` text may be no URL,
    though it should: all that might be a password is hidden then."""
    if isinstance(value, str):
        shown = _BEFORE_AT.sub(f"{MASK}@", value) if doubtful else _IN_URL.sub(rf"\1:{MASK}@", value)
        return _IN_QUERY.sub(rf"\1{MASK}", shown)
    if isinstance(value, Mapping):
        pairs = cast("Mapping[object, object]", value).items()
        return {
            key: MASK if each and _NAMED.search(str(key)) else masked(each, doubtful=doubtful)
            for key, each in pairs
        }
    if isinstance(value, list | tuple):
        return [masked(each, doubtful=doubtful) for each in cast("list[object]", value)]
    return value
