"""Lanes: the streams that a queue has beside its normal one, by their letters: one for each other priority, and one for
jobs that the waiting list of a limit has given to a worker.

Wherever the place of a job is written (its place in Redis, the entry of a delivery), the letter of its lane follows the
entry's id on the stream: `1700000000000-0h`. On the normal lane nothing follows.
"""

from collections.abc import Mapping
from typing import Literal

Priority = Literal["high", "normal", "low"]
"""What a job's priority may be."""

NORMAL, HIGH, LOW, ADMITTED = "", "h", "l", "g"
"""The letters."""

LANES: Mapping[str, str] = {"high": HIGH, "normal": NORMAL, "low": LOW}
"""The lane of each priority, the most urgent one first."""


def get_lane(priority: object) -> str:
    """Return the lane of a job whose message has that `priority`: the normal one for any other value."""
    return LANES.get(priority, NORMAL) if isinstance(priority, str) else NORMAL


def get_stream_id(entry: bytes) -> bytes:
    """Return the id of an entry on its stream, without the letter of its lane."""
    return entry if entry[-1:].isdigit() else entry[:-1]
