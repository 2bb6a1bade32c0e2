"""Text values: durations, sizes, rates, ranges, addresses and lists as people write them.

Settings in code, in the environment and in files, flags and cluster descriptions all parse with the kinds below, so a
value is written in one way everywhere, and has one error: `'soon' is not a duration: write 30s, 15m, 2h ...`.
"""

import functools
import json
import math
import re
from collections.abc import Callable
from datetime import datetime
from typing import Any, Generic, NamedTuple, TypeVar, cast

import msgspec

from celery5.errors import Misconfigured

T = TypeVar("T")


class TextKind(Generic[T]):
    """A kind of value that people write as text.

    Args:
        noun: What errors call a value, with its article: `a duration`.
        examples: How to write one, for errors and help texts.
        read: Returns the value in a text without spaces around it; None when the text is not of this kind.
    """

    def __init__(self, noun: str, examples: str, read: Callable[[str], T | None]) -> None:
        self.noun = noun
        self.examples = examples
        self._read = read

    def parse(self, text: str) -> T:
        """Return the value. Raises Misconfigured."""
        value = self._read(text.strip())
        if value is None:
            raise self.make_error(text)
        return value

    def parse_optional(self, text: str) -> T | None:
        """Return the value; None for an empty text. Raises Misconfigured."""
        return self.parse(text) if text.strip() else None

    def parse_unit(self, text: str) -> "T | str":
        """Return the value of a text that ends with a unit; other texts as they are, for callers that parse numbers.
        Raises Misconfigured."""
        word = text.strip()
        plain = not word[-1:].isalpha() or word.lower() in _NOT_UNITS
        return text if plain else self.parse(text)

    def make_error(self, text: object) -> Misconfigured:
        """Return the error for a text that is not of this kind."""
        return Misconfigured(f"{text!r} is not {self.noun}: write {self.examples}")


class WrittenRate(msgspec.Struct, frozen=True):
    """A whole number of things in a number of seconds: `0.5/m` is 1 in 120 s."""

    count: float
    seconds: float

    @property
    def per_second(self) -> float:
        """How many in one second."""
        return self.count / self.seconds


class WrittenRange(NamedTuple):
    """`2`, `2..8`, or `2..`, whose maximum is ''; None without dots."""

    minimum: int
    maximum: str | None


class HostAndPort(NamedTuple):
    """A place in the network; the brackets of an IPv6 address are taken off."""

    host: str
    port: int


_SECONDS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_BYTES = {
    "": 1, "b": 1,
    "k": 2**10, "kib": 2**10, "m": 2**20, "mib": 2**20, "g": 2**30, "gib": 2**30, "t": 2**40, "tib": 2**40,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
}  # fmt: skip
_NOT_UNITS = ("null", "nan", "inf", "infinity")
_NUMBER = r"([0-9]{1,15}(?:\.[0-9]{1,15})?)"
_PLAIN = re.compile(_NUMBER)
_SPAN = re.compile(_NUMBER + "([smhdw])")
_SPANS = re.compile(f"({_SPAN.pattern})+")
_SIZE = re.compile(_NUMBER + r"\s*([A-Za-z]*)")
MAX_RATE_SECONDS = 9999 * 86400.0
"""The longest time that a rate is counted over."""
_RATE = re.compile(_NUMBER + r"(?:/([0-9]{1,4}(?:\.[0-9]{1,3})?)?([smhd]))?")
_COUNT = re.compile("[0-9]{1,9}")


def _read_duration(text: str) -> float | None:
    text = text.lower()
    if _PLAIN.fullmatch(text):
        return float(text)
    if not _SPANS.fullmatch(text):
        return None
    return sum(float(number) * _SECONDS[unit] for number, unit in _SPAN.findall(text))


def _read_size(text: str) -> int | None:
    match = _SIZE.fullmatch(text)
    unit = None if match is None else _BYTES.get(match[2].lower())
    return None if match is None or unit is None else int(float(match[1]) * unit)


@functools.lru_cache(256)  # an admission rule asks for each batch
def _read_rate(text: str) -> WrittenRate | None:
    match = _RATE.fullmatch(text.lower())
    if match is None:
        return None
    count, seconds = float(match[1]), float(match[2] or 1) * _SECONDS[match[3] or ""]
    if not count or not seconds:
        return None
    rate = WrittenRate(count, seconds) if count == int(count) else WrittenRate(1.0, seconds / count)
    return rate if rate.seconds <= MAX_RATE_SECONDS else None


def _read_count(text: str) -> int | None:
    return int(text) if _COUNT.fullmatch(text) else None


def _read_range(text: str) -> WrittenRange | None:
    minimum, dots, maximum = text.partition("..")
    count = _read_count(minimum.strip())
    return None if count is None else WrittenRange(count, maximum.strip() if dots else None)


def _read_host_and_port(text: str) -> HostAndPort | None:
    host, _, port = text.rpartition(":")
    host, number = host.removeprefix("[").removesuffix("]"), _read_count(port)
    return HostAndPort(host, number) if host and number is not None and number <= 65535 else None


def _read_names(text: str) -> tuple[str, ...] | None:
    return tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip())) or None


DURATION = TextKind("a duration", "30s, 15m, 2h, 1d12h or a number of seconds", _read_duration)
"""Seconds. A number without a unit is seconds, too."""
SIZE = TextKind("a size", "500 MiB, 2 GiB or a number of bytes", _read_size)
"""Bytes. `K`, `M` and `G` are powers of 1024, as in systemd; `KB`, `MB` and `GB` are powers of 1000."""
RATE = TextKind("a rate", "50/s, 100/m, 3/10s or 1000/h", _read_rate)
"""More than 0 in a span of time. A number without a span is per second."""
COUNT = TextKind("a whole number", "digits only, such as 10", _read_count)
RANGE = TextKind("a range", "2, 2..8 or 2..", _read_range)
HOST_AND_PORT = TextKind("HOST:PORT", "127.0.0.1:7070 or [::1]:7070", _read_host_and_port)
NAMES = TextKind("a list of names", "one,other", _read_names)
"""Names between commas, each once. A text that names nothing is an error."""


def parse_seconds(text: str) -> float:
    """Return the seconds of a duration, or of a number in any notation, as settings and flags take it: `15m`, `1e3`.

    Raises Misconfigured, also for a number that is not finite.
    """
    value = DURATION.parse_unit(text)
    try:
        seconds = float(value)
    except ValueError:
        raise DURATION.make_error(text) from None
    if not math.isfinite(seconds):
        raise DURATION.make_error(text)
    return seconds


def parse_time(text: str) -> datetime:
    """Return a time that is written as in ISO 8601. Raises Misconfigured."""
    try:
        return datetime.fromisoformat(text.strip())
    except ValueError:
        raise Misconfigured(f"{text!r} is not a time: write one like 2026-12-24T18:00:00+01:00") from None


def parse_assignments(text: str, hint: str, *, nameless: bool = False) -> dict[str, str]:
    """Return the values by name in `one=1 other=2`, separated by spaces or commas. Raises Misconfigured.

    Args:
        hint: How to write them, for errors: `write minimum=1 maximum=10`.
        nameless: Whether a value may go without a name. It has the name ''.
    """
    values: dict[str, str] = {}
    for word in text.replace(",", " ").split():
        name, equals, value = word.rpartition("=")
        if not value or (not name and (equals or not nameless)):
            raise Misconfigured(f"{word!r} is not understood: {hint}")
        if name in values:
            raise Misconfigured(
                f"{text!r} has {f'{name!r} twice' if name else 'two values without a name'}: {hint}"
            )
        values[name] = value
    return values


def parse_json_array(text: str, name: str) -> list[Any]:
    """Return the JSON array that the flag or setting `name` holds. Raises Misconfigured."""
    value = _parse_json(text, name, expected := "array, such as [1, 2]")
    if not isinstance(value, list):
        raise Misconfigured(f"{name} must be a JSON {expected}")
    return cast("list[Any]", value)


def parse_json_object(text: str, name: str) -> dict[str, Any]:
    """Return the JSON object that the flag or setting `name` holds. Raises Misconfigured."""
    value = _parse_json(text, name, expected := 'object, such as {"a": 1}')
    if not isinstance(value, dict):
        raise Misconfigured(f"{name} must be a JSON {expected}")
    return cast("dict[str, Any]", value)


def parse_json(text: str, name: str) -> object:
    """Return the value of JSON of any kind. Raises Misconfigured, which names what it was given for."""
    return _parse_json(text, name, "value")


def _parse_json(text: str, name: str, expected: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Misconfigured(f"{name} is not JSON: {error}; it must be a JSON {expected}") from None


def parse_parameter(text: str) -> tuple[str, Any]:
    """Return name and value of `name=value`. A value that is not JSON is text. Raises Misconfigured."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise Misconfigured(f"{text!r} is not a parameter: write name=value")
    try:
        return name, json.loads(value)
    except (ValueError, RecursionError):
        return name, value
