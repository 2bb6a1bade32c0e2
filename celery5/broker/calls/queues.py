"""Build the calls that register, list, count and describe queues."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import msgspec

from celery5.broker.call import (
    Call,
    Script,
    decode_text,
    merge_names,
    parse_int,
    parse_seconds,
    script_call,
    to_ms,
)
from celery5.broker.keys import GROUP, Keys, QueueKeys
from celery5.protocol.limits import unescape_word
from celery5.protocol.observability.overview import QueueVerdict, judge_queue
from celery5.protocol.observability.queue_depth import QueueDepth, merge_latest
from celery5.protocol.observability.queue_flow import (
    LOOKS_KEPT,
    FlowReading,
    QueueFlow,
    QueueLook,
    merge_flows,
    pack_looks,
    read_flow,
)
from celery5.protocol.process.standing import LostRecord, merge_lost_records, read_lost, read_silence
from celery5.protocol.shards import get_largest, get_smallest, group_shards, sum_counts

MEASURE = Script.load("scaling/measure", "clock", "lane")
GET_QUEUE_STATE = Script.load("scaling/get_queue_state", "clock", "lane")
COUNT_ENDED = Script.load("scaling/count_ended", "clock")

T = TypeVar("T")


def register_queue(keys: Keys, queue: str) -> Call[int]:
    """Add the queue to the application's queues."""
    return Call(("SADD", keys.queues, queue), int, repeatable=True)


def list_queues(keys: Keys) -> Call[list[str]]:
    """Return the names of the application's queues, sorted."""
    return Call(("SMEMBERS", keys.queues), _names, repeatable=True, merge=merge_names)


def get_queue_depth(keys: QueueKeys) -> Call[QueueDepth]:
    """Return how far behind a queue is: one script, whose cost does not grow with the queue."""
    return _measure(keys, _depth)


def measure_depth_and_flow(keys: QueueKeys) -> Call[tuple[QueueDepth, FlowReading]]:
    """Return how far behind a queue is, and a look at the counters by which its flow is measured."""

    def read(raw: Any) -> tuple[QueueDepth, FlowReading]:
        return _depth(raw), _look(raw)

    return _measure(keys, read)


def look_at_queue(keys: QueueKeys) -> Call[FlowReading]:
    """Return a look at the counters by which a queue's flow is measured, and the earlier looks."""
    return _measure(keys, _look)


def keep_looks(keys: QueueKeys, looks: Sequence[QueueLook]) -> Call[bool]:
    """Keep the looks by which the flow of a queue is measured."""
    return script_call(
        COUNT_ENDED, (keys.flow,), (0, pack_looks(looks), to_ms(LOOKS_KEPT)), bool, repeatable=True
    )


def count_ended(keys: QueueKeys, count: int) -> Call[bool]:
    """Count attempts that have ended on a queue. What is repeated counts twice."""
    words = (count, "", to_ms(LOOKS_KEPT))
    return script_call(COUNT_ENDED, (keys.flow,), words, bool, repeatable=not count)


def _measure(keys: QueueKeys, decode: Callable[[Any], T]) -> Call[T]:
    waiting_lists = keys.waiting_list_prefix
    named = (
        keys.due,
        keys.dead,
        keys.limited_counts,
        keys.live_runs,
        waiting_lists,
        keys.jobs,
        keys.leases,
        keys.worker_deaths,
        keys.lost_workers,
        *keys.streams,
    )
    return script_call(MEASURE, named, (GROUP,), decode, repeatable=True)


def _names(raw: Iterable[bytes]) -> list[str]:
    """Return the names of queues. Invalid text is left out: celery5 did not write it."""
    found = [decode_text(word) for word in raw]
    return sorted(name for name in found if "\ufffd" not in name)


def _depth(raw: Any) -> QueueDepth:
    *counts, limited, deaths, seen, lost_count, lost, silent = raw
    total, running, due, dead, held, oldest, runs, overdue, backlog, workers = map(int, counts)
    reading = _flow(seen, backlog=backlog, running=running)
    return QueueDepth(
        waiting=max(0, total - running),
        oldest=None if oldest < 0 else oldest / 1000,
        dead=dead,
        held=held,
        scheduled=max(0, due),
        runs=runs,
        overdue=overdue,
        backlog=backlog,
        held_tasks=_held_tasks(limited),
        workers=workers,
        running=running,
        **_count_deaths(deaths),
        lost=int(lost_count),
        lost_workers={
            decode_text(name): float(at) / 1000 for name, at in zip(lost[::2], lost[1::2], strict=True)
        },
        silent_workers={decode_text(name): read_silence(part) or 0.0 for name, part in silent},
        flow=reading.flow,
        idle=reading.idle,
    )


def _look(raw: Any) -> FlowReading:
    _, running, _, _, _, _, _, _, backlog, _, _, _, seen, *_ = raw
    return _flow(seen, backlog=int(backlog), running=int(running))


def _flow(raw: Any, *, backlog: int, running: int) -> FlowReading:
    now, ended, at, since, looks = raw
    counts = parse_int(ended), parse_int(at), parse_int(since)
    return read_flow(now, counts, looks, backlog=backlog, running=running)


def _count_deaths(flat: Any) -> dict[str, Any]:
    """Return what is counted of workers that jobs took down, by the name of a field of QueueDepth, and by task."""
    # RESP3 has maps.
    words = [word for pair in flat.items() for word in pair] if hasattr(flat, "items") else flat
    found: dict[str, dict[str, float]] = {"deaths": {}, "poisoned": {}, "last": {}}
    for name, count in zip(words[::2], words[1::2], strict=True):
        what, _, task = decode_text(name).partition(" ")
        if what in found:
            found[what][task] = parse_int(count)
    last = {task: at / 1000 for task, at in found.pop("last").items()}
    return {**found, "last_deaths": last}


def _held_tasks(limited: Iterable[Any]) -> dict[str, int]:
    """Return how many jobs wait at limits, by task."""
    return {unescape_word(decode_text(task)): int(count) for task, count in limited}


class WorkerState(msgspec.Struct, frozen=True):
    """A worker of a queue: for how many seconds its lease goes on (0: it has lapsed), and how many jobs it has."""

    name: str
    lease: float
    running: int
    # Seconds for which the lease is over, while nobody has put the jobs of the worker back; None when it is not over.
    lapsed: float | None = None
    # Its sidecar renews the lease, since its event loop does not; and for how many seconds, as of the last renewal.
    is_blocked: bool = False
    silent_for: float | None = None

    @property
    def alive(self) -> bool:
        """Return whether its lease is valid."""
        return self.lease > 0


class QueueState(msgspec.Struct, frozen=True):
    """The counts of a queue, in jobs, and its workers. Seconds are from now or until now; None: there is none."""

    queue: str
    # On the streams, and no worker has them.
    waiting: int
    # Workers have them.
    running: int
    # Wait for their time, retries included.
    scheduled: int
    next_due: float | None
    dead: int
    oldest_dead: float | None
    # Keys that live jobs have.
    keys: int
    workers: tuple[WorkerState, ...]
    # No worker is to read the queue, until it is resumed.
    paused: bool = False
    # Of those that wait.
    high: int = 0
    low: int = 0
    # Wait at limits.
    held: int = 0
    # Documents that each Data Sink has not got yet, by its name.
    documents: dict[str, int] = {}
    # Of the oldest job of the backlog.
    oldest_waiting: float | None = None
    # Runs of workflows that live here.
    runs: int = 0
    # Scheduled jobs whose time has come.
    overdue: int = 0
    # Jobs that no worker has and whose time has come: those that wait, are held, or are overdue.
    backlog: int = 0
    # Jobs that wait at limits, by task, and what holds them, in words; '' when none is held, or it is not known.
    held_tasks: dict[str, int] = {}
    held_by: str = ""
    # How fast jobs come and leave; None while there was no earlier look.
    flow: QueueFlow | None = None
    # Seconds since an attempt ended; None when none did within a day.
    idle: float | None = None
    # Whether it keeps up.
    verdict: QueueVerdict = QueueVerdict("unknown", "not measured yet")

    # As QueueDepth has them.
    deaths: dict[str, int] = {}
    poisoned: dict[str, int] = {}
    last_deaths: dict[str, float] = {}
    # The last workers that were lost in the last hour, and how many there were.
    lost: tuple[LostRecord, ...] = ()
    lost_count: int = 0
    # Jobs that wait for a worker with the resources that they take, by task; the same in words.
    lacking: dict[str, int] = {}
    lacks: str = ""
    # Jobs that wait for a worker whose code has their task, and for one whose code takes their arguments, by task; the
    # same in words.
    unknown: dict[str, int] = {}
    unfit: dict[str, int] = {}
    awaits: str = ""
    # Whether jobs are, or ever were, on its streams.
    has_had_jobs: bool = True
    # The node of a Redis Cluster that has it, where each shard is shown; else ''.
    node: str = ""

    def judge(self) -> QueueVerdict:
        """Return whether it keeps up."""
        return judge_queue(
            backlog=self.backlog,
            upcoming=self.scheduled - self.overdue,
            oldest=self.oldest_waiting,
            workers=self.live_workers,
            is_paused=self.paused,
            flow=self.flow,
            idle=self.idle,
            held_by=self.held_by,
        )

    @property
    def live_workers(self) -> int:
        """Return how many live workers read it."""
        return sum(worker.alive for worker in self.workers)

    @property
    def unread(self) -> int:
        """Return how many jobs wait, now or for their time, if no live worker reads this queue; else 0."""
        return 0 if self.live_workers else self.count_unbegun()

    def count_unbegun(self) -> int:
        """Return how many jobs no worker has, whether or not their time has come."""
        return self.waiting + self.held + self.scheduled

    @property
    def is_only_named(self) -> bool:
        """Return whether there is nothing of it but its name, which a worker registered that has left: no job was ever
        sent to it.
        """
        has_jobs = self.has_had_jobs or self.count_unbegun() or self.running or self.dead
        has_others = self.keys or self.runs or any(self.documents.values()) or self.lost_count
        return not (has_jobs or has_others or self.workers or self.paused)


def merge_queue_states(states: Sequence[QueueState]) -> list[QueueState]:
    """Return the states of queues. The shards of a queue are merged into one state."""
    groups = group_shards({state.queue: state for state in states})
    return [
        parts[0] if len(parts) == 1 and parts[0].queue == queue else _merge_states(queue, parts)
        for queue, parts in groups.items()
    ]


def _merge_states(queue: str, parts: Sequence[QueueState]) -> QueueState:
    """Return the state of a queue, merged from all of its shards."""
    workers: dict[str, list[WorkerState]] = {}
    for worker in (worker for part in parts for worker in part.workers):
        workers.setdefault(worker.name, []).append(worker)
    lost = merge_lost_records(record for part in parts for record in part.lost)
    return QueueState(
        queue=queue,
        waiting=sum(part.waiting for part in parts),
        running=sum(part.running for part in parts),
        scheduled=sum(part.scheduled for part in parts),
        next_due=get_smallest(part.next_due for part in parts),
        dead=sum(part.dead for part in parts),
        oldest_dead=get_largest(part.oldest_dead for part in parts),
        keys=sum(part.keys for part in parts),
        workers=tuple(_merge_workers(of_name) for _, of_name in sorted(workers.items())),
        high=sum(part.high for part in parts),
        low=sum(part.low for part in parts),
        held=sum(part.held for part in parts),
        oldest_waiting=get_largest(part.oldest_waiting for part in parts),
        runs=sum(part.runs for part in parts),
        overdue=sum(part.overdue for part in parts),
        backlog=sum(part.backlog for part in parts),
        held_tasks=sum_counts(part.held_tasks for part in parts),
        flow=merge_flows(part.flow for part in parts),
        idle=get_smallest(part.idle for part in parts),
        deaths=sum_counts(part.deaths for part in parts),
        poisoned=sum_counts(part.poisoned for part in parts),
        last_deaths=merge_latest(part.last_deaths for part in parts),
        lost=lost,
        # A worker is lost on each shard that it reads, and these are all of them.
        lost_count=max(len(lost), *(part.lost_count for part in parts)),
        lacking=sum_counts(part.lacking for part in parts),
        unknown=sum_counts(part.unknown for part in parts),
        unfit=sum_counts(part.unfit for part in parts),
        has_had_jobs=any(part.has_had_jobs for part in parts),
        documents=sum_counts(part.documents for part in parts),
    )


def _merge_workers(parts: Sequence[WorkerState]) -> WorkerState:
    """Return the state of one worker, merged from several shards: it has a lease on each."""
    return WorkerState(
        parts[0].name,
        lease=min(part.lease for part in parts),
        running=sum(part.running for part in parts),
        lapsed=get_largest(part.lapsed for part in parts),
        is_blocked=any(part.is_blocked for part in parts),
        silent_for=get_largest(part.silent_for for part in parts),
    )


def get_queue_state(keys: QueueKeys) -> Call[QueueState]:
    """Return the counts of a queue, and its workers."""

    def state(raw: Any) -> QueueState:
        return _queue_state(keys.queue, raw)

    named = (
        keys.due,
        keys.dead,
        keys.leases,
        keys.unique,
        keys.limited_counts,
        keys.waiting_list_prefix,
        keys.jobs,
        keys.worker_deaths,
        keys.lost_workers,
        keys.lost_work,
        *keys.streams,
    )
    return script_call(GET_QUEUE_STATE, named, (GROUP,), state, repeatable=True)


def _worker_state(name: bytes, lease: int, jobs: int, over: int, part: int) -> WorkerState:
    return WorkerState(
        name.decode(errors="replace"),
        lease / 1000,
        jobs,
        None if over < 0 else over / 1000,
        is_blocked=part > 0,
        silent_for=read_silence(part),
    )


def _worker_states(workers: Iterable[Any]) -> tuple[WorkerState, ...]:
    return tuple(sorted((_worker_state(*worker) for worker in workers), key=lambda worker: worker.name))


def _lost_records(queue: str, raw: Any) -> tuple[LostRecord, ...]:
    return tuple(
        read_lost(queue, decode_text(name), float(at) / 1000, work, has_dead_left=has_dead_left != 0)
        for name, at, work, has_dead_left in raw
    )


def _queue_state(queue: str, raw: Any) -> QueueState:
    (
        (normal, high, low, handed),
        running,
        scheduled,
        next_due,
        dead,
        oldest_dead,
        keys,
        workers,
        limited,
        age,
        overdue,
        backlog,
        seen,
        deaths,
        lost_count,
        lost,
        *awaited,
        has_had_jobs,
    ) = raw
    lacking, unknown, unfit = map(_held_tasks, awaited)
    reading = _flow(seen, backlog=backlog, running=running)
    return QueueState(
        queue=queue,
        waiting=max(0, normal + high + low + handed),
        high=max(0, high),
        low=max(0, low),
        running=running,
        scheduled=scheduled,
        held=sum(count for _, count in limited),
        next_due=parse_seconds(next_due),
        dead=dead,
        oldest_dead=parse_seconds(oldest_dead),
        keys=keys,
        workers=_worker_states(workers),
        oldest_waiting=parse_seconds(age),
        overdue=overdue,
        backlog=backlog,
        held_tasks=_held_tasks(limited),
        flow=reading.flow,
        idle=reading.idle,
        **_count_deaths(deaths),
        lost=_lost_records(queue, lost),
        lost_count=lost_count,
        lacking=lacking,
        unknown=unknown,
        unfit=unfit,
        has_had_jobs=bool(has_had_jobs),
    )
