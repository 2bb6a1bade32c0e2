"""Show numbers, times and spans in pages as people read them."""

import json
import re
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import partial, wraps
from typing import Any, cast
from urllib.parse import quote

import msgspec
from markupsafe import Markup

from celery5.errors import Misconfigured
from celery5.protocol.byte_counts import format_bytes
from celery5.protocol.counts import format_count
from celery5.protocol.durations import format_age, format_duration
from celery5.protocol.job.history import format_arguments
from celery5.protocol.job.messages import MAX_DEPTH, is_nested_deeper
from celery5.protocol.masking import escape_text
from celery5.protocol.observability import overview
from celery5.protocol.scaling.resource_budget import read_use, show_use
from celery5.protocol.text_values import parse_seconds

MAX_ODD_VALUE = 40
"""Characters of a value that is no number, time or size although it should be."""
NONE = "-"
"""Stands for what is not known or not there."""


def format_number(value: float | None) -> str:
    """Return a number with at most three digits behind those of its size: `12,345`, `0.25`."""
    if value is None:
        return NONE
    return f"{value:,.0f}" if value == int(value) or abs(value) >= 100 else f"{value:,.3g}"


def format_span(seconds: float | None) -> str:
    """Return a duration: `85 ms`, `2 h 5 min`."""
    return NONE if seconds is None else format_duration(max(seconds, 0.0))


def format_share(share: float | None) -> str:
    """Return a share in per cent."""
    return NONE if share is None else overview.format_share(share)


def format_moment(seconds: float | None) -> Markup:
    """Return a time as an element: how long ago it was, and the time itself, in UTC, for whoever points at it."""
    if not seconds:
        return Markup(NONE)
    moment = datetime.fromtimestamp(seconds, UTC)
    return Markup('<time data-age datetime="{}" title="{}">{}</time>').format(
        moment.isoformat(timespec="milliseconds"),
        moment.strftime("%Y-%m-%d %H:%M:%S UTC"),
        format_age(seconds, time.time()),
    )


def format_clock(seconds: float) -> str:
    """Return a time of the clock, in UTC; with the day if it is not within half a day."""
    pattern = "%H:%M UTC" if abs(time.time() - seconds) < 43_200 else "%Y-%m-%d %H:%M UTC"
    return datetime.fromtimestamp(seconds, UTC).strftime(pattern)


def format_time(seconds: float) -> str:
    """Return a time of this day, to the second, in UTC."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%H:%M:%S UTC")


_TOO_DEEP = b'"(nested too deeply to be shown)"'


def encode_json(value: Any) -> bytes:
    """Return any value as JSON, whatever lies in Redis: also big integers, halves of surrogate pairs and deep nests."""
    try:
        encoded = msgspec.json.encode(value, enc_hook=str)
    except (OverflowError, UnicodeError, RecursionError):
        try:
            encoded = json.dumps(
                msgspec.to_builtins(value, enc_hook=str, str_keys=True), default=str
            ).encode()
        except RecursionError:
            return _TOO_DEEP
    # From Python 3.14 on the size of the stack limits what can be encoded, which may be deeper than readers take.
    is_too_deep = len(encoded) > 2 * MAX_DEPTH and is_nested_deeper(encoded, MAX_DEPTH + 50)
    return _TOO_DEEP if is_too_deep else encoded


def format_json(value: Any) -> str:
    """Return any value as indented JSON."""
    encoded = encode_json(value)
    try:
        return msgspec.json.format(encoded, indent=2).decode()
    # Of halves of surrogate pairs msgspec says that the input was truncated.
    except (msgspec.DecodeError, RecursionError):
        return json.dumps(json.loads(encoded), indent=2)


def format_value(value: Any) -> str:
    """Return a value of any type for a cell of a table."""
    if value is None or value == "":
        return NONE
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return format_number(value)
    return encode_json(value).decode()


def _make_total(show: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter that shows any value: one that `show` cannot show, such as a time in the year 30,000, as text.

    One bad number in Redis is no reason to show nothing of a page.
    """

    @wraps(show)
    def show_any(value: Any, *words: str) -> Any:
        try:
            return show(value, *words)
        except (ValueError, OverflowError, OSError, TypeError):
            return escape_text(f"{value!r}"[:MAX_ODD_VALUE])

    return show_any


def encode_name(name: str) -> str:
    """Return a name as a part of a path. Browsers go up by `..` between slashes: the slashes are encoded then."""
    return quote(name, safe="" if _DOTS.search(name) else "/")


def is_span(text: str, seconds: str) -> bool:
    """Return whether a span of time in an address, such as `1h`, has this many seconds."""
    try:
        return parse_seconds(text) == float(seconds)
    except Misconfigured:
        return False


def _show_arguments(arguments: Any, separator: str = ", ") -> str:
    if not isinstance(arguments, Mapping):
        raise TypeError("no arguments by name")
    return format_arguments(cast("Mapping[str, Any]", arguments), separator=separator)


_DOTS = re.compile(r"(?:^|/)\.\.?(?:/|$)")


def _show_use(resources: Any) -> str:
    return show_use(read_use(resources))


_FILTERS: Mapping[str, Callable[..., Any]] = {
    "number": format_number,
    "count": format_count,
    "span": format_span,
    "share": format_share,
    "size": format_bytes,
    "use": _show_use,
    "arguments": _show_arguments,
    "argument_lines": partial(_show_arguments, separator="\n"),
    "moment": format_moment,
    "clock": format_clock,
    "time": format_time,
    "json": format_json,
    "value": format_value,
    "urlencode": encode_name,
    "is_span": is_span,
}
FILTERS: Mapping[str, Callable[..., Any]] = {name: _make_total(show) for name, show in _FILTERS.items()}
"""The filters of the templates, by name."""
