"""Autoscale words: how an application is scaled, as its setting `autoscale` says it: in one line of text, or by name.

Floor: protocol. Reads: nothing. Writes: nothing.
"""

import math
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any, cast

from celery5.errors import Misconfigured
from celery5.protocol.autoscale import Autoscale

MAX_WORKERS = 10_000
"""Workers that one application can be scaled to."""
MAX_PREFETCH_FACTOR = 16.0
"""The largest factor on how far workers read ahead."""
MAX_SECONDS = 7 * 86400.0
"""Seconds that each of its times may be."""

_HINT = "write minimum=1 maximum=10"
_SECONDS = ("cooldown", "longest_cooldown", "quiet", "patience")
_NAMES = ("minimum", "maximum", "prefetch", *_SECONDS, "strategy")

FunctionLoader = Callable[[str], Any]
"""Gives the function that `module:function` names. Raises Misconfigured."""


def parse_autoscale(
    value: str | Mapping[str, Any], load_function: FunctionLoader | None = None
) -> Autoscale | None:
    """How to scale, as it was said: '' is not at all. Raises Misconfigured with one line that says what is wrong.

    A strategy is a function, or `module:function`, which `named` finds; without it such a name is not looked at.
    """
    told = _told(value) if isinstance(value, str) else dict(value)
    if not told:
        return None
    _refuse_strange(told)
    if "maximum" not in told:
        raise Misconfigured(f"autoscale needs a maximum, the most worker processes there may be: {_HINT}")
    fields: dict[str, Any] = {"minimum": 1, **told}
    minimum, maximum = (_whole(name, fields[name], least) for name, least in (("minimum", 0), ("maximum", 1)))
    if minimum > maximum:
        raise Misconfigured(f"autoscale: the minimum, {minimum}, is over the maximum, {maximum}")
    fields |= {"minimum": minimum, "maximum": maximum}
    if "prefetch" in fields:
        fields["prefetch"] = _number("prefetch", fields["prefetch"], 1.0, MAX_PREFETCH_FACTOR, "a factor")
    for name in _SECONDS:
        if name in fields:
            least = 0.1 if "cooldown" in name else 0.0
            fields[name] = _number(name, fields[name], least, MAX_SECONDS, "seconds")
    if "strategy" in fields:
        fields["strategy"] = _strategy(fields["strategy"], load_function)
        if fields["strategy"] is None:
            del fields["strategy"]
    return Autoscale(**fields)


def _refuse_strange(told: Mapping[str, Any]) -> None:
    for name in told:
        if name not in _NAMES:
            near = get_close_matches(str(name), _NAMES, n=1)
            meant = f"did you mean {near[0]}?" if near else f"there are {', '.join(_NAMES)}"
            raise Misconfigured(f"autoscale has {name!r}, which it does not know: {meant}")


def _told(text: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for word in text.replace(",", " ").split():
        name, equals, value = word.partition("=")
        if not name or not equals or not value:
            raise Misconfigured(f"{word!r} is not understood: {_HINT}")
        if name in found:
            raise Misconfigured(f"there are two of {name!r}")
        found[name] = value
    return found


def _whole(name: str, value: object, least: int) -> int:
    if isinstance(value, str) and value.isdecimal() and len(value) < 10:
        value = int(value)
    if type(value) is not int or not least <= value <= MAX_WORKERS:
        raise Misconfigured(
            f"autoscale: {name} is {value!r}: give a number of worker processes, {least} or more"
        )
    return value


def _number(name: str, value: object, least: float, most: float, what: str) -> float:
    try:
        number = math.nan if isinstance(value, bool) else float(cast("Any", value))
    except (TypeError, ValueError):
        number = math.nan
    if not least <= number <= most:
        raise Misconfigured(f"autoscale: {name} is {value!r}: give {what} from {least:g} to {most:g}")
    return number


def _strategy(value: object, named: FunctionLoader | None) -> Any:
    if isinstance(value, str):
        if not all(value.partition(":")):
            raise Misconfigured(f"autoscale: strategy is {value!r}: write module:function")
        return named(value) if named else None
    if not callable(value) or isinstance(value, type):
        raise Misconfigured(
            f"autoscale: strategy is {value!r}: give a function that takes a Load and gives a Scale"
        )
    return value
