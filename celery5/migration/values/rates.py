"""Translate the rates of Celery's tasks."""

import math

from celery5.errors import Misconfigured
from celery5.protocol.limits import Rate

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_MAX_PERIOD = 9999


def translate_rate(value: object) -> str | None:
    """Return a rate of Celery's as celery5 writes it: `1/6s` for `10/m`, `10/s` for `600/m`, and `0.5/h` as it is.

    Celery leaves the same time between two starts; our rate lets all jobs of a period begin at once. So the period is
    as short as it can be, but a second at least: the slack of a shorter one would cost much of the rate.

    Returns:
        '' for no limit, which Celery has for None, 0 and `0/s`; None for what Celery could not read either.
    """
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    number, _, unit = str(value).replace(" ", "").partition("/")
    unit = unit or "s"
    try:
        if not float(number):
            return ""
        return _space(Rate(f"{number}/{unit}").validate(""))
    except (ValueError, Misconfigured):
        return None


def _space(rate: Rate) -> str:
    """Return an equal rate over the shortest period that is no shorter than a second."""
    interval = rate.span / rate.count
    count = 1 if interval >= 1 else math.ceil(round(1 / interval, 6))
    if count >= rate.count:
        return rate.text
    seconds = count * interval
    whole = next((unit for unit in "dhm" if (seconds / _SECONDS[unit]).is_integer()), None)
    unit = whole or next(unit for unit in "smhd" if seconds / _SECONDS[unit] <= _MAX_PERIOD)
    period = math.ceil(round(seconds / _SECONDS[unit] * 1000, 6)) / 1000
    return f"{count}/{'' if period == 1 else f'{period:g}' if period.is_integer() else period}{unit}"
