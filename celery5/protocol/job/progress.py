"""The progress of a running job: what the job reports, and what readers get."""

from collections.abc import Mapping
from numbers import Integral, Real
from typing import NamedTuple, cast

import msgspec

MAX_NOTE = 200
"""Characters of a note that are kept."""
_MOST = 1e18
"""The largest number that is accepted."""


class ProgressReport(NamedTuple):
    """What a job has reported. A NamedTuple: a job may report in a tight loop."""

    done: float
    total: float | None
    note: str


class Progress(msgspec.Struct, frozen=True):
    """The progress of a running job, as its last stored report says."""

    done: float
    # None when the job does not know it.
    total: float | None
    note: str
    # When it was stored, in seconds since 1970.
    at: float
    # The attempt that has reported it, from 1.
    attempt: int
    # The name of the worker that runs this attempt.
    worker: str

    @property
    def fraction(self) -> float | None:
        """The part that is done, from 0 to 1; None when the total is unknown."""
        return get_fraction(self.done, self.total)


def get_fraction(done: float, total: float | None) -> float | None:
    """Return the part that is done, from 0 to 1; None when the total is unknown."""
    if total is None:
        return None
    return min(1.0, done / total) if total else 1.0


def make_progress_report(done: object, total: object, note: object) -> ProgressReport:
    """Return a report.

    Raises:
        TypeError: An argument is not of its type.
        ValueError: A number is negative, too large, or not a number.
    """
    if not isinstance(note, str):
        raise TypeError(f"progress: note is {note!r}: give a text")
    return ProgressReport(
        _check_number(done, "done"),
        None if total is None else _check_number(total, "total"),
        note if len(note) <= MAX_NOTE else f"{note[: MAX_NOTE - 1]}…",
    )


def _check_number(value: object, name: str) -> float:
    if type(value) is not int and type(value) is not float:  # numpy has numbers of its own
        if isinstance(value, bool) or not isinstance(value, Real):
            raise TypeError(f"progress: {name} is {value!r}: give a number")
        value = int(value) if isinstance(value, Integral) else float(value)
    number = cast("float", value)
    if not 0 <= number <= _MOST:  # NaN neither
        raise ValueError(f"progress: {name} is {number}: give a number from 0 to {_MOST:g}")
    return number


def parse_progress(fields: Mapping[bytes, bytes]) -> Progress | None:
    """Return the stored progress of a job; None when there is none that can be read: another program may write, too."""
    try:
        total = fields.get(b"total", b"")
        return Progress(
            _parse_number(fields[b"done"]),
            _parse_number(total) if total else None,
            fields.get(b"note", b"").decode(errors="replace"),
            int(fields[b"at"]) / 1000,
            int(fields[b"attempt"]),
            fields[b"worker"].decode(errors="replace"),
        )
    except (KeyError, ValueError):
        return None


def _parse_number(raw: bytes) -> float:
    return int(raw) if raw.isdigit() and len(raw) < 20 else float(raw)
