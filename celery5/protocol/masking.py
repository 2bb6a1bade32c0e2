"""Make text safe to show: on one line, without passwords and control characters."""

import re
from collections.abc import Mapping
from typing import Any, cast

MASK = "***"
MAX_ERROR_LENGTH = 500
"""The most characters of an error's text in a log."""
MAX_ERROR_TYPE = 200
"""The most characters of the name of an error's class: classes are made at runtime, too."""
_USER = re.compile(r"(?<=//)[^:/@]*:")
_IN_QUERY = re.compile(r"(?i)((?:pas\w{0,13}|pwd|secret|token)=)[^&]*")
_NAMED = re.compile(r"(?i)passw|passphrase|pwd|secret|token|credential|api_?key|private_?key|authorization")
_ASSIGNED = re.compile(
    r"""(?ix)
    ( (?: pass(?:w|phrase) | pwd | secret | token | credential | api_?key | private_?key | authorization ) \w{0,20}
      \\?["']? \s{0,3} (?: :\s{0,3} | =(?!=)\s{0,3} ) (?: (?:basic|bearer|token|digest|apikey)\s+ )? )
    (?: \\?"[^"]* "? | \\?'[^']* '? | [^\s&,;)\]}"']+ )
    """
)
"""A value that a text assigns to such a name: `password="x"`, `"token": "x"`, `Authorization: Bearer x`. Quotes may be
escaped, as in JSON inside a string.
"""

_WORDS = ("pas", "pwd", "secret", "token", "credential", "api", "private", "authorization")
"""One of them is in each name that the expressions above know."""
_CONTROL = re.compile(
    r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufeff]"
)
"""C0 and C1 control characters, DEL, text direction marks, line separators, halves of surrogate pairs."""
_BEYOND_JSON = re.compile(r"[\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ufeff]")
"""Those of them that a JSON encoder does not escape."""


def escape_text(text: str, *, keep: str = "") -> str:
    """Return `text` with control characters as Python writes them (`\\x1b`), but for those to `keep`.

    Errors, names and log values come from other programs. Written raw they can colour a terminal, fill its clipboard,
    or forge a line of the log. Everything that is shown to people goes through here.
    """
    return _CONTROL.sub(lambda found: found[0] if found[0] in keep else _as_python(found[0]), text)


def collapse_whitespace(text: str) -> str:
    """Return the text on one line, with a single space wherever it has white space."""
    return " ".join(text.split())


def cut_middle(text: str, length: int) -> str:
    """Return a text in at most this many characters, with `...` for what is left out.

    Its end is kept, as what to do comes last.
    """
    if len(text) <= length:
        return text
    at_end = (length - 3) * 3 // 8
    return f"{text[: length - 3 - at_end]}...{text[len(text) - at_end :]}"


def get_outage_text(text: str) -> str:
    """Return why a broker cannot be reached, without what its circuit breaker says of that: it is the same outage."""
    breaker, is_open, cause = text.rpartition("(circuit breaker open): ")
    if not is_open or cause.startswith("broker "):
        return cause
    return f"{breaker.partition(' is not tried')[0]} cannot be reached: {cause}"


def get_error_text(error: object, max_length: int | None = None) -> str:
    """Return the text of an error, or of the reason for one, on one line of at most this many characters. Never raises.

    Lone surrogates, which have no bytes, are escaped.
    """
    try:
        text = str(error)
        # Before it is split: the text of an error may be as long as what the error is about.
        text = collapse_whitespace(text if max_length is None else text[: 10 * max_length])
        return text.encode(errors="backslashreplace").decode()[:max_length]
    except BaseException:  # the text of an error may be the user's code
        return "<no text>"


def get_masked_text(error: object, max_length: int | None = None) -> str:
    """Return what `get_error_text` does, without passwords, as `mask_lines` masks them. Never raises."""
    # Masked before it is cut: the part of a URL before its @ is not seen to be a password.
    return mask_lines(get_error_text(error, None if max_length is None else 10 * max_length))[:max_length]


def show_error(error: BaseException, max_length: int = 1000) -> str:
    """Return an error as Python shows it: `ValueError('not a number')`, of at most this many characters. Never raises.

    Lone surrogates, which have no bytes, are escaped.
    """
    try:
        return repr(error)[:max_length].encode(errors="backslashreplace").decode()[:max_length]
    except BaseException:  # the user's code, too
        return f"<{get_type_name(error)} that cannot be shown>"


def get_type_name(value: object) -> str:
    """Return the name of a value's class, as Python itself knows it. Never raises.

    A metaclass may have redefined `__name__`, even so that it raises.
    """
    return str(_NAME_OF_CLASS.__get__(type(value)))[:MAX_ERROR_TYPE]


_NAME_OF_CLASS: Any = vars(type)["__name__"]


def describe_error(error: BaseException, max_length: int | None = None) -> str:
    """Return an error on one line for people, as Python ends a traceback: `ValueError: not a number`. Never raises.

    Its text has no passwords, as `get_masked_text` returns it.

    Args:
        max_length: The most characters of its text.
    """
    text = get_masked_text(error, max_length)
    name = get_type_name(error)
    return f"{name}: {text}" if text else name


def escape_json(text: str) -> str:
    """Return JSON without control characters: those in its strings as `\\u009b`, so that it still means the same."""
    return _BEYOND_JSON.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _as_python(character: str) -> str:
    return character.encode("unicode_escape", "surrogatepass").decode()


def mask_passwords(value: object, *, maybe_url: bool = False) -> Any:
    """Return the value without passwords: those in URLs, and values with names like `password`.

    With `maybe_url`, a text that should be a URL but may be invalid loses all that might be a password.
    """
    if isinstance(value, str):
        return _IN_QUERY.sub(rf"\1{MASK}", _without_password(value, doubtful=maybe_url))
    if isinstance(value, Mapping):
        pairs = cast("Mapping[object, object]", value).items()
        return {
            key: MASK if item and _NAMED.search(str(key)) else mask_passwords(item, maybe_url=maybe_url)
            for key, item in pairs
        }
    if isinstance(value, list | tuple):
        return [mask_passwords(item, maybe_url=maybe_url) for item in cast("list[object]", value)]
    return value


def is_named_secret(name: str) -> bool:
    """Return whether a value with this name is masked whatever it is: `password`, `api_key`."""
    return _NAMED.search(name) is not None


def mask_shown(value: object) -> Any:
    """Return JSON as people are shown it: without passwords. What is nested too deeply is not shown at all."""
    try:
        return _mask_shown(value)
    except RecursionError:
        return "(nested too deeply to be shown)"


def _mask_shown(value: object) -> Any:
    if isinstance(value, str):
        return mask_lines(value)
    if isinstance(value, Mapping):
        pairs = cast("Mapping[object, object]", value).items()
        return {key: MASK if item and is_named_secret(str(key)) else _mask_shown(item) for key, item in pairs}
    if isinstance(value, list | tuple):
        return [_mask_shown(item) for item in cast("list[object]", value)]
    return value


def mask_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of an event of the log without passwords, but for the `line` that other code has printed."""
    return {name: value if name == "line" else mask_shown(value) for name, value in fields.items()}


def mask_lines(text: str) -> str:
    """Return a text of several lines, such as an error or a traceback, without passwords: also assigned ones.

    Every surface shows errors through this function: history, log, pages, commands and API. What is masked already
    stays as it is.
    """
    if not _may_have_password(text):
        return text
    return "\n".join(
        _ASSIGNED.sub(rf"\1{MASK}", str(mask_passwords(line))) if _may_have_password(line) else line
        for line in text.split("\n")
    )


def _may_have_password(text: str) -> bool:
    """Return whether the expressions can find anything: they take twenty times as long to find nothing."""
    folded = text.casefold()
    return "@" in text or any(word in folded for word in _WORDS)


def _without_password(text: str, *, doubtful: bool) -> str:
    """Return a text without the part before its last @: an unquoted password may contain @, too.

    One pass, since the text is untrusted and may be long.
    """
    at = text.rfind("@")
    if at < 0:
        return text
    if doubtful:
        begin = text.find("//", 0, at)
        return f"{text[: begin + 2]}{MASK}{text[at:]}" if begin >= 0 else text
    user = _USER.search(text, 0, at)
    # Those that are masked already, as all URLs are that celery5 shows, are left alone.
    while user and text.startswith(f"{MASK}@", user.end()):
        user = _USER.search(text, user.end() + len(MASK) + 1, at)
    return f"{text[: user.end()]}{MASK}{text[at:]}" if user else text
