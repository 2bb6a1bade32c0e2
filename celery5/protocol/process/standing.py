"""Standing: whether a process works, is silent, is lost, or has ended in order. The one definition of it.

Three things tell of a process: its lease, which its event loop renews three times in each lease, its reports on
metrics, and whether it has left in order. A process whose loop is blocked lives: its sidecar renews its lease, and says
so. A lost one is shown for an hour, whoever has put its jobs back.
"""

from collections.abc import Collection, Iterable
from typing import Literal

import msgspec

from celery5.protocol.durations import format_age, format_duration

ProcessCondition = Literal["working", "silent", "lost", "ended"]

LOST_SHOWN = 3600.0
"""Seconds for which a lost process is shown."""
MAX_LOST = 100
"""Lost processes that are shown, the last ones."""
SILENT_SHARE = 0.5
"""The part of a lease without a renewal after which a process is silent. It renews it after a third."""
SHORTEST_SILENCE = 2.0
"""Seconds without a renewal that are none yet, however short the lease is."""
LATE_REPORT = 5.0
"""Seconds by which a report may be late, beside half of the time between two."""
OUTAGE_MARGIN = 1.0
"""Seconds beside an interval in which no process reports: then Redis took no reports."""
OUTAGE_INTERVALS = 5
"""Intervals without a report of any process after which they are named: processes report soon after an outage."""
HAS_LEFT, IS_RECOVERED = 0.0, -1.0
"""What a lease is in Redis instead of a time: of a worker that has left, and, or less, of one that is recovered."""
SILENCE_PARTS = 4096
"""Parts of a millisecond: the end of a lease has one more than the seconds of silence, or none."""


def pack_silence(seconds: float | None) -> float:
    """Return the part of a millisecond by which the end of a lease says for how long its worker has been silent."""
    return 0.0 if seconds is None else min(1 + int(seconds), SILENCE_PARTS - 1) / SILENCE_PARTS


def read_silence(part: int) -> float | None:
    """Return the seconds of silence from that part, in 4096ths; None where the worker renews its lease itself.

    More than 68 minutes are 68 minutes.
    """
    return part - 1.0 if part > 0 else None


def count_unnamed_lost(counts: Iterable[tuple[int, int]]) -> int:
    """Return how many lost workers are not known by name.

    A worker may be lost on each of its queues, so those of one queue count: the one that leaves out the most.

    Args:
        counts: How many were lost on each queue, and of how many the names are known.
    """
    return max((max(0, total - named) for total, named in counts), default=0)


def has_successor(name: str, live_names: Collection[str]) -> bool:
    """Return whether a live process of the same kind has taken the place of a lost one.

    It has the same name, or both have no name of their own, but those of their host and process id: `web-1:4711`.

    Args:
        name: The name of its inbox.
        live_names: Those of the live processes of its kind.
    """
    host, _, pid = name.rpartition(":")
    return name in live_names or (
        pid.isdecimal()
        and any(
            other.rpartition(":")[0] == host and other.rpartition(":")[2].isdecimal() for other in live_names
        )
    )


class ProcessStanding(msgspec.Struct, frozen=True):
    """What is known of a process at one time."""

    condition: ProcessCondition
    # In words: `working`, `silent for 8 s`, `lost 3 min ago`, `ended in order`.
    text: str
    # Seconds since the last sign of life of a silent one, and since a lost one was lost.
    seconds: float = 0.0

    @property
    def needs_attention(self) -> bool:
        """Whether a person should look at it."""
        return self.condition in ("silent", "lost")


def judge_standing(
    *,
    lease_left: float | None,
    lease: float,
    reported: float | None = None,
    interval: float = 0.0,
    silent_for: float | None = None,
    has_left: bool = False,
) -> ProcessStanding:
    """Return how a process stands.

    Args:
        lease_left: Seconds that its lease still lasts; negative: for how long it is over; None: not known.
        lease: Seconds of a lease.
        reported: Seconds since its last report; None when there is none.
        interval: Seconds between two reports; 0: it makes none.
        silent_for: Seconds for which its event loop had not renewed the lease when its sidecar did; None: it renews it.
        has_left: It has ended in order.
    """
    if has_left:
        return ProcessStanding("ended", "ended in order")
    if lease_left is not None and lease_left <= 0:
        return make_lost(-lease_left)
    # Its last sign of life is a renewal or a report. Leases of other lengths than here are renewed as often.
    signs = [] if lease_left is None else [max(lease - lease_left, 0.0) + (silent_for or 0.0)]
    silence = min([*signs, reported] if reported is not None else signs, default=0.0)
    if silent_for is not None and silence > SHORTEST_SILENCE:
        return ProcessStanding("silent", f"silent for {_format_silence(silence)}: {BLOCKED}", silence)
    if silence > max(lease * SILENT_SHARE, SHORTEST_SILENCE):
        return ProcessStanding("silent", f"silent for {_format_seconds(silence)}", silence)
    if reported is not None and interval and reported > get_report_limit(interval):
        return ProcessStanding("silent", f"no report for {_format_seconds(reported)}", reported)
    return ProcessStanding("working", "working")


def _format_seconds(seconds: float) -> str:
    return format_duration(int(seconds))


def _format_silence(seconds: float) -> str:
    return f"{'more than ' if seconds >= SILENCE_PARTS - 2 else ''}{_format_seconds(seconds)}"


BLOCKED = "its event loop is blocked, or cut off"
"""What is wrong with a worker whose sidecar renews its lease."""


def make_lost(seconds: float) -> ProcessStanding:
    """Return how a process stands that was lost this many seconds ago."""
    return ProcessStanding("lost", f"lost {format_age(0.0, max(seconds, 0.0))}", max(seconds, 0.0))


def get_report_limit(interval: float) -> float:
    """Return the seconds without a report after which a process is silent."""
    return interval * 1.5 + LATE_REPORT


class ReportFlow(msgspec.Struct, frozen=True):
    """When reports of any process came. If none did for longer than an interval, Redis took none: it was away, or full.

    All times are of the clock of Redis, in seconds since 1970.
    """

    # The last one; None: none has come.
    newest: float | None = None
    # The first one after the last time in which none came; None: that is not known.
    resumed: float | None = None

    def add(self, times: Iterable[float], interval: float) -> "ReportFlow":
        """Return the flow after reports have come at these times; each process makes one in `interval` seconds."""
        newest, resumed = self.newest, self.resumed
        for at in sorted(times):
            if newest is not None and at - newest > interval + OUTAGE_MARGIN:
                resumed = at
            newest = at if newest is None else max(newest, at)
        return ReportFlow(newest, resumed)

    def measure_silence(self, reported: float, now: float, interval: float) -> float:
        """Return for how long a process has made no report that others have made: an outage is nobody's silence.

        Args:
            reported: When it made its last report.
            now: The time.
            interval: Seconds between two reports of a process.
        """
        newest = reported if self.newest is None else max(self.newest, reported)
        if interval + OUTAGE_MARGIN < now - newest <= interval * OUTAGE_INTERVALS:
            return 0.0  # nobody has reported since: Redis has just come back
        since = reported if self.resumed is None else max(reported, min(self.resumed, now))
        return max(0.0, now - since)


class LostJob(msgspec.Struct, frozen=True):
    """A job that a lost process had begun, and what became of it."""

    id: str
    task: str
    # `put back`, `dead letter`, `revoked`, or `had ended`.
    fate: str
    queue: str = ""


class LostRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What is noted of a lost process where its jobs are put back, on one queue."""

    # Its whole name, and when its jobs were put back, in seconds since 1970.
    worker: str
    at: float
    # Why it ended, for people; '' when nobody knows.
    why: str = ""
    # Jobs of it that were put back, and that became dead letters.
    put_back: int = 0
    dead: int = 0
    # Whether some of those dead letters may be there still.
    has_dead_left: bool = True
    # Some of the jobs that it had begun, and the tasks of all of them, up to a hundred.
    jobs: tuple[LostJob, ...] = ()
    tasks: tuple[str, ...] = ()
    # When another process of its name has joined since, in seconds since 1970; None: none has.
    repaired_at: float | None = None


def get_repair_time(*times: float | None) -> float | None:
    """Return when a loss was repaired that is noted in several places: once it is, it stays so for all."""
    return min((time for time in times if time is not None), default=None)


def merge_lost_records(records: Iterable[LostRecord]) -> tuple[LostRecord, ...]:
    """Return what is noted of lost processes on several shards of a queue, as of one queue: each process once."""
    merged: dict[str, LostRecord] = {}
    for record in records:
        other = merged.get(record.worker)
        merged[record.worker] = (
            record
            if other is None
            else LostRecord(
                worker=record.worker,
                at=min(record.at, other.at),
                why=other.why or record.why,
                put_back=other.put_back + record.put_back,
                dead=other.dead + record.dead,
                has_dead_left=other.has_dead_left or record.has_dead_left,
                jobs=(*other.jobs, *record.jobs),
                tasks=tuple(dict.fromkeys((*other.tasks, *record.tasks))),
                repaired_at=get_repair_time(other.repaired_at, record.repaired_at),
            )
        )
    return tuple(merged.values())


class _LostWork(msgspec.Struct, frozen=True):
    """What `recover.lua` has packed, and `join.lua` when it was repaired: an older process packs no such time."""

    why: str = ""
    put_back: int = 0
    dead: int = 0
    jobs: tuple[dict[str, str], ...] = ()
    tasks: dict[str, bool] = {}
    # In ms.
    repaired_at: float | None = None


def read_lost(queue: str, worker: str, at: float, packed: bytes, *, has_dead_left: bool = True) -> LostRecord:
    """Return what is noted of a lost worker on a queue; what cannot be read is left out."""
    try:
        work = msgspec.json.decode(packed, type=_LostWork)
    except (ValueError, RecursionError):
        work = _LostWork()
    jobs = tuple(
        LostJob(job.get("id", ""), job.get("task", ""), job.get("fate", ""), queue) for job in work.jobs
    )
    return LostRecord(
        worker=worker,
        at=at,
        why=work.why,
        put_back=work.put_back,
        dead=work.dead,
        has_dead_left=has_dead_left,
        jobs=jobs,
        tasks=tuple(work.tasks),
        repaired_at=None if work.repaired_at is None else work.repaired_at / 1000,
    )
