"""Build the calls by which workers report their load and one Scheduler at a time decides on it."""

from collections import Counter
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from celery5.broker.call import Call, Script, decode_text, parse_int, script_call, to_ms
from celery5.broker.keys import GROUP, Keys, QueueKeys
from celery5.protocol.limits import unescape_word
from celery5.protocol.scaling.autoscale import AutoscaleState
from celery5.protocol.scaling.snapshot import QueueLoad, WorkerReport
from celery5.protocol.scaling.wanted_workers import QueueDemand

MEASURE_LOAD = Script.load("scaling/measure_load", "clock", "lane")
CLAIM_SCALING_TURN = Script.load("scaling/claim_scaling_turn", "clock")
SAVE_SCALING = Script.load("scaling/save_scaling")

REPORT_TTL = 12.0
"""Seconds for which a report is valid."""
TURN = 10.0
"""Seconds after which another Scheduler takes the turn of one that is silent, at least."""
SCALING_TTL = 86400.0
"""Seconds for which it is known where the scaling was."""
SAMPLE = 16
"""Jobs that are sampled at each end of a stream."""
UPCOMING_HORIZON = 10.0
"""Seconds ahead for which jobs of schedules count as waiting."""
SAMPLE_BYTES = 65536
"""Bytes, about, after which no more jobs are sampled."""

T = TypeVar("T")


class Scaling(msgspec.Struct, frozen=True, kw_only=True):
    """Where the scaling of an application is, as the Scheduler `by` left it `at` a time (seconds since 1970).

    The `course`; the workers that live (`workers`) and the least and the most there may be; the `jobs` that there are
    and the workers these would need (`needed`); until when nothing changes (`cool_until`, 0 when that is over); which
    tasks go first (`preferred`, weights by name); the brokers that could not be looked at (`unseen`); and the jobs of
    each queue with the slots that a worker has for them (`demands`).
    """

    course: AutoscaleState | None = None
    workers: int = 0
    minimum: int = 0
    maximum: int = 0
    jobs: int = 0
    needed: int = 0
    cool_until: float = 0.0
    preferred: dict[str, float] = {}
    unseen: tuple[str, ...] = ()
    demands: tuple[QueueDemand, ...] = ()
    by: str = ""
    at: float = 0.0


class ScalingTurn(msgspec.Struct, frozen=True):
    """Whether it is the asker's turn to scale; where the scaling is, and the time by Redis."""

    mine: bool
    scaling: Scaling | None
    now: float


def claim_scaling_turn(keys: Keys, scheduler: str, *, seconds: float = TURN) -> Call[ScalingTurn]:
    """Take or keep the turn for so long, unless another Scheduler has it."""
    named = (keys.scaling_turn, keys.scaling)
    return script_call(CLAIM_SCALING_TURN, named, (scheduler, to_ms(seconds)), _turn, repeatable=True)


def release_scaling_turn(keys: Keys, scheduler: str) -> Call[ScalingTurn]:
    """Let another Scheduler have the turn at once."""
    return script_call(
        CLAIM_SCALING_TURN, (keys.scaling_turn, keys.scaling), (scheduler, 0), _turn, repeatable=True
    )


def save_scaling(keys: Keys, scheduler: str, scaling: Scaling) -> Call[bool]:
    """Remember where the scaling is. Return False when it is the turn of another Scheduler by now."""
    words = (scheduler, msgspec.json.encode(scaling), to_ms(SCALING_TTL))
    return script_call(SAVE_SCALING, (keys.scaling_turn, keys.scaling), words, bool, repeatable=True)


def get_scaling(keys: Keys) -> Call[Scaling | None]:
    """Return where the scaling is; None when nothing is known of any."""
    return Call(("GET", keys.scaling), lambda raw: _decoded(raw, Scaling), repeatable=True)


def measure_load(app: Keys, keys: QueueKeys) -> Call[QueueLoad]:
    """Return what waits on a queue or will be sent to it soon, and the workers that live."""

    def counted(raw: Any) -> QueueLoad:
        waiting, held, seen, workers, soon, limited = raw
        return QueueLoad(
            keys.queue,
            waiting,
            held,
            Counter(_texts(seen)),
            tuple(_texts(workers)),
            upcoming=Counter(_texts(soon)),
            waiting_at_limit=_counts(limited),
        )

    schedules, times = app.schedules(keys.queue), app.schedule_times(keys.queue)
    named = (keys.leases, schedules, times, keys.limited_counts, *keys.streams)
    return script_call(
        MEASURE_LOAD,
        named,
        (GROUP, SAMPLE, SAMPLE_BYTES, to_ms(UPCOMING_HORIZON)),
        counted,
        repeatable=True,
    )


def send_report(keys: Keys, worker: str, report: WorkerReport) -> Call[bool]:
    """Send the report of a worker."""
    words = ("SET", keys.report(worker), msgspec.json.encode(report), "PX", to_ms(REPORT_TTL))
    return Call(words, bool, repeatable=True)


def get_reports(keys: Keys, workers: Sequence[str]) -> Call[dict[str, WorkerReport]]:
    """Return the reports of these workers (at least one), by name; workers without a report are left out."""

    def read(raw: Any) -> dict[str, WorkerReport]:
        found = {name: _decoded(encoded, WorkerReport) for name, encoded in zip(workers, raw, strict=True)}
        return {name: report for name, report in found.items() if report is not None}

    return Call(("MGET", *(keys.report(worker) for worker in workers)), read, repeatable=True)


def _texts(raw: Any) -> list[str]:
    return [decode_text(word) for word in raw]


def _counts(raw: Any) -> dict[str, int]:
    words = [word for pair in raw.items() for word in pair] if hasattr(raw, "items") else raw
    found = zip(_texts(words[::2]), map(parse_int, words[1::2]), strict=True)
    return {unescape_word(task): count for task, count in found if not task.startswith(" ")}


def _turn(raw: Any) -> ScalingTurn:
    return ScalingTurn(raw[0] == 1, _decoded(raw[1], Scaling), raw[2] / 1000)


def _decoded(raw: bytes | None, kind: type[T]) -> T | None:
    """What is no JSON of ours, of another version say, is as if it were not there."""
    try:
        return msgspec.json.decode(raw, type=kind) if raw else None
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError):
        return None
