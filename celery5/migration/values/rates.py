"""Translate the rates of Celery's tasks."""

from celery5.errors import Misconfigured
from celery5.protocol.limits import Rate


def translate_rate(value: object) -> str | None:
    """Return a rate of Celery's as celery5 writes it: `100/m`, `0.5/h`, a number for each second.

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
        return Rate(f"{number}/{unit}").validate("").text
    except (ValueError, Misconfigured):
        return None
