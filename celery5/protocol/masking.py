"""Masking: makes text safe to show: without passwords, and without control characters for a terminal."""

import re
from collections.abc import Mapping
from typing import Any, cast

MASK = "***"
_USER = re.compile(r"(?<=//)[^:/@]*:")
_IN_QUERY = re.compile(r"(?i)((?:pass\w{0,12}|pwd|secret|token)=)[^&]*")
_NAMED = re.compile(r"(?i)passw|secret|token|credential|api_?key")


_CONTROL = re.compile(
    r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufeff]"
)
"""C0 and C1 control characters, DEL, what turns the direction of text, line separators, halves of surrogate pairs."""
_BEYOND_JSON = re.compile(r"[\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ufeff]")
"""Those of them that an encoder of JSON leaves as they are."""


def escape_text(text: str, *, keep: str = "") -> str:
    """Return `text` with control characters as Python writes them (`\\x1b`), but for those to `keep`.

    Errors, names and log values come from other programs. Written raw they can colour a terminal, fill its clipboard,
    or forge a line of the log. Everything that is shown to people goes through here.
    """
    return _CONTROL.sub(lambda found: found[0] if found[0] in keep else _as_python(found[0]), text)


def escape_json(text: str) -> str:
    """Return JSON without control characters: those in its strings as `\\u009b`, so that it still means the same."""
    return _BEYOND_JSON.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _as_python(character: str) -> str:
    return character.encode("unicode_escape", "surrogatepass").decode()


def mask_passwords(value: object, *, maybe_url: bool = False) -> Any:
    """The same value without passwords: those in URLs, and whatever is named like one. A `doubtful` text may be no URL,
    though it should: all that might be a password is hidden then."""
    if isinstance(value, str):
        return _IN_QUERY.sub(rf"\1{MASK}", _without_password(value, doubtful=maybe_url))
    if isinstance(value, Mapping):
        pairs = cast("Mapping[object, object]", value).items()
        return {
            key: MASK if each and _NAMED.search(str(key)) else mask_passwords(each, maybe_url=maybe_url)
            for key, each in pairs
        }
    if isinstance(value, list | tuple):
        return [mask_passwords(each, maybe_url=maybe_url) for each in cast("list[object]", value)]
    return value


def _without_password(text: str, *, doubtful: bool) -> str:
    """Return a text without what is before its last @: an unquoted password may contain @, too. One pass, since the
    text may be long and comes from outside."""
    at = text.rfind("@")
    if at < 0:
        return text
    if doubtful:
        begin = text.find("//", 0, at)
        return f"{text[: begin + 2]}{MASK}{text[at:]}" if begin >= 0 else text
    user = _USER.search(text, 0, at)
    return f"{text[: user.end()]}{MASK}{text[at:]}" if user else text
