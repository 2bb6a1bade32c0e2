"""Scaling: the trips by which workers report how they do, and one Scheduler at a time decides from that.

Floor: broker. Reads and writes: what the Lua files named here say; all keys come from `keys.py`.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from celery5.broker.call import Call, Script, scripted, text, whole
from celery5.broker.keys import GROUP, Keys, QueueKeys
from celery5.protocol.autoscale import Course
from celery5.protocol.limits import unquoted
from celery5.protocol.report import Census, Report

CENSUS = Script.load("census")
SCALE_TURN = Script.load("scale_turn")
SCALE_KEEP = Script.load("scale_keep")

REPORTED = 12.0
"""Seconds for which a report is believed."""
TURN = 10.0
"""Seconds after which another Scheduler takes the turn of one that is silent, at least."""
KEPT = 86400.0
"""Seconds for which it is known where the scaling was."""
SAMPLE = 16
"""Jobs that are looked at, at each end of a stream."""
SOON = 10.0
"""Seconds in which jobs of schedules count as if they were there."""
SAMPLE_BYTES = 65536
"""Bytes of them, about, after which no more are looked at."""

T = TypeVar("T")


class Scaling(msgspec.Struct, frozen=True, kw_only=True):
    """Where the scaling of an application is, as the Scheduler `by` left it `at` a time (seconds since 1970).

    The `course`; the workers that live (`workers`) and the least and the most there may be; the `jobs` that there are
    and the workers these would need (`needed`); until when nothing changes (`cool_until`, 0 when that is over); which
    tasks go first (`preferred`, weights by name); and the brokers that could not be looked at (`unseen`).
    """

    course: Course | None = None
    workers: int = 0
    minimum: int = 0
    maximum: int = 0
    jobs: int = 0
    needed: int = 0
    cool_until: float = 0.0
    preferred: dict[str, float] = {}
    unseen: tuple[str, ...] = ()
    by: str = ""
    at: float = 0.0


class Turn(msgspec.Struct, frozen=True):
    """Whether it is the asker's turn to scale; where the scaling is, and the time by Redis."""

    mine: bool
    scaling: Scaling | None
    now: float


def take_turn(keys: Keys, scheduler: str, *, seconds: float = TURN) -> Call[Turn]:
    """Take or keep the turn for so long, unless another Scheduler has it."""
    named = (keys.scaling_turn, keys.scaling)
    return scripted(SCALE_TURN, named, (scheduler, int(seconds * 1000)), _turn, repeatable=True)


def give_up_turn(keys: Keys, scheduler: str) -> Call[Turn]:
    """Let another Scheduler have the turn at once."""
    return scripted(SCALE_TURN, (keys.scaling_turn, keys.scaling), (scheduler, 0), _turn, repeatable=True)


def keep(keys: Keys, scheduler: str, scaling: Scaling) -> Call[bool]:
    """Remember where the scaling is; False when it is another one's turn by now."""
    words = (scheduler, msgspec.json.encode(scaling), int(KEPT * 1000))
    return scripted(SCALE_KEEP, (keys.scaling_turn, keys.scaling), words, bool, repeatable=True)


def scaling(keys: Keys) -> Call[Scaling | None]:
    """Where the scaling is; None when nothing is known of any."""
    return Call(("GET", keys.scaling), lambda raw: _decoded(raw, Scaling), repeatable=True)


def census(app: Keys, keys: QueueKeys) -> Call[Census]:
    """What waits on a queue or will be sent to it soon, and the workers that live."""

    def counted(raw: Any) -> Census:
        waiting, held, seen, workers, soon, gated = raw
        return Census(
            keys.queue,
            waiting,
            held,
            Counter(_texts(seen)),
            tuple(_texts(workers)),
            upcoming=Counter(_texts(soon)),
            gated=_counts(gated),
        )

    schedules, times = app.schedules(keys.queue), app.schedule_times(keys.queue)
    named = (keys.leases, schedules, times, keys.held, *keys.streams)
    return scripted(CENSUS, named, (GROUP, SAMPLE, SAMPLE_BYTES, int(SOON * 1000)), counted, repeatable=True)


def report(keys: Keys, worker: str, said: Report) -> Call[bool]:
    """Tell how a worker does."""
    words = ("SET", keys.report(worker), msgspec.json.encode(said), "PX", int(REPORTED * 1000))
    return Call(words, bool, repeatable=True)


def reports(keys: Keys, workers: Sequence[str]) -> Call[dict[str, Report]]:
    """The reports of these workers, one at least, by name; those that have not told any are left out."""

    def read(raw: Any) -> dict[str, Report]:
        found = {name: _decoded(each, Report) for name, each in zip(workers, raw, strict=True)}
        return {name: each for name, each in found.items() if each is not None}

    return Call(("MGET", *(keys.report(each) for each in workers)), read, repeatable=True)


def _texts(raw: Any) -> list[str]:
    return [text(each) for each in raw]


def _counts(raw: Any) -> dict[str, int]:
    words = [each for pair in raw.items() for each in pair] if hasattr(raw, "items") else raw
    found = zip(_texts(words[::2]), map(whole, words[1::2]), strict=True)
    return {unquoted(task): count for task, count in found if not task.startswith(" ")}


def _turn(raw: Any) -> Turn:
    return Turn(raw[0] == 1, _decoded(raw[1], Scaling), raw[2] / 1000)


def _decoded(raw: bytes | None, kind: type[T]) -> T | None:
    """What is no JSON of ours, of another version say, is as if it were not there."""
    try:
        return msgspec.json.decode(raw, type=kind) if raw else None
    except (msgspec.DecodeError, msgspec.ValidationError):
        return None
