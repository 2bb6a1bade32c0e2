"""Find time zones by their names, in the database of the machine or the package tzdata."""

from datetime import UTC, tzinfo
from functools import lru_cache
from zoneinfo import ZoneInfo, available_timezones

from celery5.errors import Misconfigured
from celery5.similar_names import did_you_mean


@lru_cache(maxsize=64)
def load_zone(name: str) -> tzinfo:
    """Return the time zone of a name. Raises Misconfigured."""
    if name.upper() in ("", "UTC"):
        return UTC
    try:
        return ZoneInfo(name)
    except (KeyError, ValueError, OSError):
        remedy = did_you_mean(name, sorted(available_timezones()), otherwise="use a name like Europe/Berlin")
        raise Misconfigured(
            f"time zone {name!r} is not known on this machine: {remedy} (install tzdata where the system has no zones)"
        ) from None


def check_zone(name: object) -> str:
    """Return the name of a time zone, where one is declared. Raises Misconfigured when nobody knows it.

    A machine without any database of zones, such as that of a small producer, cannot tell: a Scheduler will.
    """
    if not isinstance(name, str):
        raise Misconfigured(f"time zone {name!r} is no text: use a name like Europe/Berlin")
    try:
        load_zone(name)
    except Misconfigured:
        if available_timezones():
            raise
    return name
