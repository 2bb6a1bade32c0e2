"""Build the calls that send reports on metrics, and keep what they are rolled up to."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import msgspec

from celery5.broker.call import Call, Script, Word, decode_text, parse_int, script_call, to_ms
from celery5.broker.keys import Keys
from celery5.protocol.observability.rollup import HOURS_KEPT, MINUTES_KEPT

SEND_REPORT = Script.load("observability/send_report")
CLAIM_ROLLUP = Script.load("observability/claim_rollup", "clock")
SAVE_ROLLUP = Script.load("observability/save_rollup")
ADVANCE_ROLLUP = Script.load("observability/advance_rollup")

MAX_REPORTS = 200_000
"""Reports that wait to be rolled up, about: those of ten thousand processes in five minutes, 180 MB."""
REPORT_TTL = 3600.0
"""Seconds that a report waits to be rolled up."""
REPORTS_READ = 200
"""Reports in one reply, at most."""
REPORTS_TRIMMED = 1000
"""Reports that are deleted in one call, about."""
MEMORY_SAMPLES = 5
"""Entries of a key whose size is looked at: the server does nothing else in that time."""


class RollupTurn(NamedTuple):
    """Whether it is the caller's turn to roll reports up."""

    is_own: bool
    # The id of the last report that was rolled up; '' for none.
    cursor: str
    # The time by the clock of Redis, in seconds since 1970.
    now: float


class StoredReport(NamedTuple):
    """A report that waits."""

    id: str
    packed: bytes

    @property
    def at(self) -> float:
        """When it came, by the clock of Redis, in seconds since 1970."""
        return int(self.id.partition("-")[0]) / 1000


Change = tuple[str, str, Word, Word]
"""A change of what is kept, as `save_rollup.lua` takes it."""


class StateChange(NamedTuple):
    """All changes of one group, or of the index: they are saved together."""

    # `group:` and its name, or `index`.
    name: str
    # Its mark before and after.
    before: str
    after: str
    changes: Sequence[Change]


def send_report(keys: Keys, process: str, number: int, packed: bytes) -> Call[bool]:
    """Send a report. Return whether it is new. Safe to repeat."""
    named = (keys.metrics_reports, keys.metrics_sent(process))
    words = (number, packed, MAX_REPORTS, to_ms(REPORT_TTL))
    return script_call(SEND_REPORT, named, words, bool, repeatable=True)


def claim_rollup(keys: Keys, process: str, *, seconds: float) -> Call[RollupTurn]:
    """Take or keep the turn for this many seconds, unless another process has it; 0 gives it up."""
    named = (keys.metrics_turn, keys.metrics_state)
    return script_call(CLAIM_ROLLUP, named, (process, to_ms(seconds)), _turn, repeatable=True)


def read_reports(keys: Keys, cursor: str, count: int = REPORTS_READ) -> Call[list[StoredReport]]:
    """Return reports that came after the one with the id `cursor`, the oldest first, at most `count`."""
    words = ("XRANGE", keys.metrics_reports, f"({cursor}" if cursor else "-", "+", "COUNT", count)
    return Call(words, _reports, repeatable=True)


def read_latest_reports(keys: Keys, cursor: str, *, before: str = "", count: int) -> Call[list[StoredReport]]:
    """Return the newest reports after the one with the id `cursor` and before that with `before`, the newest first."""
    last, first = f"({before}" if before else "+", f"({cursor}" if cursor else "-"
    words = ("XREVRANGE", keys.metrics_reports, last, first, "COUNT", count)
    return Call(words, _reports, repeatable=True)


def read_state(keys: Keys, names: Sequence[str]) -> Call[dict[str, bytes]]:
    """Return fields of what is kept, those that there are."""
    return Call(("HMGET", keys.metrics_state, *names), partial(_found, names), repeatable=True)


def save_rollup(keys: Keys, state_changes: Sequence[StateChange]) -> Call[bool]:
    """Save some groups, each as a whole.

    Return False when another process has saved one of them; then nothing is changed.
    """
    named = (keys.metrics_state, keys.metrics_minutes_prefix, keys.metrics_hours_prefix)
    flat: list[Word] = []
    for state_change in state_changes:
        flat += (state_change.name, state_change.before, state_change.after, len(state_change.changes))
        flat += (word for change in state_change.changes for word in change)
    words = (to_ms(HOURS_KEPT), to_ms(MINUTES_KEPT), to_ms(HOURS_KEPT), *flat)
    return script_call(SAVE_ROLLUP, named, words, bool)


def advance_rollup(keys: Keys, *, before: str, cursor: str) -> Call[bool]:
    """Note that the reports up to `cursor` are in all groups. Return False when another process has noted some.

    Args:
        before: The id of the last report that had been rolled up before.
        cursor: The id of the last one that is rolled up now.
    """
    words = (before, cursor, to_ms(HOURS_KEPT))
    return script_call(ADVANCE_ROLLUP, (keys.metrics_state,), words, bool)


def trim_reports(keys: Keys, needed_from: float) -> Call[int]:
    """Delete some of the reports that came before a time, in seconds since 1970. Return how many were deleted."""
    words = ("XTRIM", keys.metrics_reports, "MINID", "~", to_ms(needed_from), "LIMIT", REPORTS_TRIMMED)
    return Call(words, int, repeatable=True)


def read_points(prefix: str, group: str, since: float, until: float) -> Call[list[tuple[int, bytes]]]:
    """Return when each chunk of a group began, in seconds since 1970, and its points, packed."""
    words = ("XRANGE", prefix + group, max(to_ms(since), 0), max(to_ms(until), 0))
    return Call(words, _points, repeatable=True)


def measure_memory(key: str) -> Call[int]:
    """Return about how many bytes a key takes, from a few of its entries; 0 when there is none."""
    return Call(("MEMORY", "USAGE", key, "SAMPLES", MEMORY_SAMPLES), parse_int, repeatable=True)


def _turn(raw: Any) -> RollupTurn:
    return RollupTurn(raw[0] == 1, decode_text(raw[1]), int(raw[2]) / 1000)


def _reports(raw: Any) -> list[StoredReport]:
    return [StoredReport(decode_text(entry[0]), _fields(entry[1]).get(b"report", b"")) for entry in raw or ()]


def _points(raw: Any) -> list[tuple[int, bytes]]:
    points: list[tuple[int, bytes]] = []
    for entry in raw or ():
        fields = _fields(entry[1])
        if (at := fields.get(b"at", b"")).isdigit():
            points.append((int(at) // 1000, fields.get(b"points", b"")))
    return points


def _fields(words: Any) -> Mapping[bytes, bytes]:
    flat = cast("Sequence[bytes]", words or ())
    return dict(zip(flat[::2], flat[1::2], strict=False))


def _found(names: Sequence[str], raw: Any) -> dict[str, bytes]:
    values = msgspec.convert(raw, list[bytes | None])
    return {name: value for name, value in zip(names, values, strict=True) if value is not None}
