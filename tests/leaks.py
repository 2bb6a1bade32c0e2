"""Leaks: whether every key that a test left behind has an owner or a time to live (I11).

What an owner is stands in docs/reference/keys.md. Here it is checked from the other side: a field, a member or an entry
without anything that will ever remove it is a leak.
"""

import json
import re
import time
from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import redis

from celery5.broker.calls import leases as lease_calls
from celery5.broker.keys import EVENTS, GROUP, Keys, is_owned
from tests.gate_leaks import gate_leaks, parted
from tests.run_leaks import check_runs

PATTERN = re.compile(r"celery5:\{(?P<app>[^:{}]+)(?::(?P<queue>[^{}]*))?\}:(?P<what>.+)", re.DOTALL)
LONGEST_LEASE = 60_000
"""Milliseconds. A lease in the future is its worker's, if that lives, and will have lapsed by then if it does not."""
OF_EVENTS = "events:"
"""What the keys of an application's events begin with."""
Fields = dict[bytes, bytes]


@dataclass
class Queue:
    """What there is of one queue, by the names that `keys.py` gives; `stream` has all lanes, their letters last."""

    name: str
    stream: dict[bytes, Fields] = field(default_factory=dict)
    jobs: Fields = field(default_factory=dict)
    due: set[bytes] = field(default_factory=set)
    waiting: set[bytes] = field(default_factory=set)
    dead: dict[bytes, Fields] = field(default_factory=dict)
    leases: dict[bytes, float] = field(default_factory=dict)
    unique: Fields = field(default_factory=dict)
    consumers: dict[bytes, int] = field(default_factory=dict)
    for_sinks: dict[str, set[bytes]] = field(default_factory=dict)
    taken: dict[str, set[bytes]] = field(default_factory=dict)
    progress: dict[str, set[bytes]] = field(default_factory=dict)
    schedules: set[bytes] = field(default_factory=set)
    schedule_times: set[bytes] = field(default_factory=set)

    def faults(self, now: float) -> list[str]:
        """What of it has no owner. `now` is the server's time in ms."""
        found = [self._misplaced(job, place) for job, place in self.jobs.items()]
        found += [f"{job_id!r} is due without a Command" for job_id in self.due - self.waiting]
        gated = {job for job, place in self.jobs.items() if place[:1] == b"G"}
        found += [f"{job_id!r} has a Command and is never due" for job_id in self.waiting - self.due - gated]
        placed = {job for job, place in self.jobs.items() if place[:1] in b"DRHG"}
        found += [f"{job_id!r} is due and has no such place" for job_id in self.due - placed]
        found += [self._elsewhere(entry, fields) for entry, fields in self.stream.items()]
        found += [self._locked(lock, job) for lock, job in self.unique.items()]
        found += [self._leased(worker, end, now) for worker, end in self.leases.items()]
        orphans = self.schedule_times - self.schedules
        found += [f"schedule {orphan!r} has a time and is not there" for orphan in orphans]
        found += [f"consumer {name!r} has no lease and no job" for name in self.idlers()]
        found += self._undelivered()
        return [f"{self.name}: {fault}" for fault in found if fault]

    def _undelivered(self) -> list[str]:
        """What is known of a sink's documents is of some that are there."""
        known = {sink: self.progress.get(sink, set()) - {b"last"} for sink in self.progress}
        found = [f"{sink}: {entry!r} is taken and not there" for sink, entry in self._lost(self.taken)]
        found += [f"{sink}: {entry!r} was tried and is not there" for sink, entry in self._lost(known)]
        more = (self.taken.keys() | self.progress.keys()) - self.for_sinks.keys()
        return found + [f"{sink}: something is known of no documents" for sink in more]

    def _lost(self, known: dict[str, set[bytes]]) -> list[tuple[str, bytes]]:
        return [(sink, entry) for sink in known for entry in known[sink] - self.for_sinks.get(sink, set())]

    def idlers(self) -> list[bytes]:
        """Consumers with neither a lease nor a job. The next beat of any worker removes them."""
        return [name for name, held in self.consumers.items() if not held and name not in self.leases]

    def _misplaced(self, job: bytes, place: bytes) -> str:
        kind, entry = place[:1], place[1:]
        there = {
            b"S": entry in self.stream,
            b"V": entry in self.stream,
            b"D": job in self.due,
            b"R": job in self.due,
            b"H": job in self.due,
            b"G": job in self.waiting,
            b"X": entry in self.dead,
        }
        return "" if there.get(kind, False) else f"job {job!r} has the place {place!r}, where it is not"

    def _elsewhere(self, entry: bytes, fields: Fields) -> str:
        place = self.jobs.get(_id_of(fields), b"")
        if place[:1] in (b"S", b"V") and place[1:] != entry and place[1:] in self.stream:
            return f"entry {entry!r} is of a job whose place is {place!r}"
        return ""

    def _locked(self, lock: bytes, job: bytes) -> str:
        place = self.jobs.get(job, b"X")
        return f"key {lock!r} is held by {job!r}, which has ended" if place[:1] == b"X" else ""

    def _leased(self, worker: bytes, end: float, now: float) -> str:
        if end > now + LONGEST_LEASE:
            return f"the lease of {worker!r} does not end soon"
        if end <= 0 and not self.consumers.get(worker):
            return f"{worker!r} has left and holds nothing, and its lease is still there"
        return ""


def applications(client: "redis.Redis") -> set[str]:
    """The names of the applications that have keys on that server."""
    keys: Any = client.keys("celery5:{*")
    return {_application(key) for key in keys}


OF_STREAM = re.compile(
    r"(?P<tag>celery5:\{[^:{}]+:[^{}]+\}):"
    r"(?:map|groups|relayed|archiving|archive:\d+|log:\d+|(?P<kind>members|incarnations|plan|partition|state|outbox|dead-records|parked-keys|parked):(?P<group>[^:]+)(?::.*)?)"
)


def _check_streams(server: Any, keys: list[bytes]) -> tuple[list[str], list[bytes]]:
    """Return what is wrong with the keys of streams of records, and the other keys.

    The map owns the keys of a stream, and the group in `groups` those of a group.
    """
    found, others = list[str](), list[bytes]()
    for key in keys:
        name = key.decode(errors="replace")
        match = OF_STREAM.fullmatch(name)
        if match is None:
            if not name.endswith("}:record-streams"):
                others.append(key)
        elif not server.exists(f"{match['tag']}:map"):
            found.append(f"{name}: of no stream, and it never expires")
        elif match["group"] and not server.hexists(f"{match['tag']}:groups", match["group"]):
            found.append(f"{name}: of no group, and it never expires")
    return found, others


def leaks(client: "redis.Redis", *, but: Collection[str] = ()) -> list[str]:
    """Every key on that server, or part of one, that nobody owns and that never expires; `but` for some applications,
    whose tests still run."""
    server: Any = client
    keys = [key for key in server.keys("celery5:{*") if _application(key) not in but]
    if not keys:
        return []
    with server.pipeline(transaction=False) as pipe:
        for key in keys:
            pipe.pttl(key)
        lasting = [key for key, ttl in zip(keys, pipe.execute(), strict=True) if ttl == -1]
    names = [key.decode(errors="replace") for key in lasting]
    found = [
        f"{name}: never expires, and keys.py does not say that it stays"
        for name in names
        if not is_owned(name)
    ]
    gated, lasting = parted(lasting, PATTERN)
    unowned, lasting = _check_streams(server, lasting)
    found += unowned
    of_runs, lasting = check_runs(server, lasting)
    found += of_runs
    queues: dict[str, Queue] = {}
    for key in lasting:
        match = PATTERN.fullmatch(key.decode(errors="replace"))
        what = match["what"] if match else ""
        events = what.startswith(OF_EVENTS)
        if match and match["queue"] is None and what in ("queues", "paused", "schedule-queues"):
            continue  # the application's
        what = what.removeprefix(OF_EVENTS)
        what, _, sink = what.partition(":")
        name = f"{match['app']}:{EVENTS if events else match['queue']}" if match else ""
        if match and (match["queue"] is not None or events) and what in _OF_SINKS and sink:
            _OF_SINKS[what](server, key, queues.setdefault(name, Queue(name)), sink)
            continue
        if not match or (match["queue"] is None and not events) or sink or what not in _READ:
            found.append(f"{key.decode(errors='replace')}: nobody's, and it never expires")
            continue
        _READ[what](server, key, queues.setdefault(name, Queue(name)))
    found += _faults(server, queues.values())
    return found + [fault for app, name in gated for fault in gate_leaks(server, Keys(app).for_queue(name))]


def _faults(server: Any, queues: Collection[Queue]) -> list[str]:
    """What of these queues has no owner."""
    seconds, micros = server.time()
    found: list[str] = []
    for queue in queues:
        if queue.idlers():
            _visit(server, queue)
        found += queue.faults(seconds * 1000 + micros / 1000)
    return found


class Look:
    """A look at a server before a test, and a `last` one after it, which leaves nothing there but what was before.

    A `forgiving` one bears with a server that its own test has killed, or closed to us.
    """

    def __init__(self, client: "redis.Redis", *, forgiving: bool) -> None:
        self._client = client
        self._forgiving = forgiving
        self._before: set[str] = set()
        with self._forgiven():
            self._before = applications(client)

    def last(self, *, moment: float = 1.0) -> list[str]:
        """What leaks. Those who outlive a test, a sidecar say, have a `moment` (seconds) to finish."""
        found: list[str] = []
        with self._forgiven():
            end = time.monotonic() + moment
            while (found := leaks(self._client, but=self._before)) and time.monotonic() < end:
                time.sleep(0.02)
            forget(self._client, but=self._before)
        return found

    def _forgiven(self) -> AbstractContextManager[None]:
        return suppress(redis.RedisError) if self._forgiving else nullcontext()


def forget(client: "redis.Redis", *, but: Collection[str] = ()) -> None:
    """Delete every key of celery5, `but` those of some applications."""
    found: Any = client.keys("celery5:{*")
    keys = [key for key in found if _application(key) not in but]
    if keys:
        client.delete(*keys)


def _application(key: bytes) -> str:
    match = PATTERN.fullmatch(key.decode(errors="replace"))
    return match["app"] if match else ""


def _id_of(fields: Fields) -> bytes:
    try:
        found = json.loads(fields.get(b"job", b""))["id"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return b""
    return found.encode(errors="replace") if isinstance(found, str) else b""


def _stream(server: Any, key: bytes, queue: Queue) -> None:
    if server.type(key) != b"stream":  # what a hostile test has put there is its own affair
        return
    lane = _LETTERS.get(key.rpartition(b":")[2], b"")
    queue.stream |= {entry + lane: fields for entry, fields in server.xrange(key)}
    for group in server.xinfo_groups(key):
        if group["name"] == GROUP.encode():
            for consumer in server.xinfo_consumers(key, GROUP):
                queue.consumers[consumer["name"]] = (
                    queue.consumers.get(consumer["name"], 0) + consumer["pending"]
                )


def _visit(server: Any, queue: Queue) -> None:
    """Do to a queue what the next worker would, and look again."""
    app, _, name = queue.name.partition(":")
    keys = Keys(app).for_queue(name)
    for call in (
        lease_calls.join_queue(keys, "visitor", lease=1.0),
        lease_calls.renew_lease(keys, "visitor", lease=1.0),
        lease_calls.leave_queue(keys, "visitor"),
    ):
        server.execute_command(*call.with_script_text)
    queue.stream, queue.consumers = {}, {}
    for stream in keys.streams:
        if server.exists(stream):
            _stream(server, stream.encode(), queue)


def _jobs(server: Any, key: bytes, queue: Queue) -> None:
    queue.jobs = server.hgetall(key)


def _due(server: Any, key: bytes, queue: Queue) -> None:
    queue.due = set(server.zrange(key, 0, -1))


def _waiting(server: Any, key: bytes, queue: Queue) -> None:
    queue.waiting = set(server.hkeys(key))


def _dead(server: Any, key: bytes, queue: Queue) -> None:
    queue.dead = dict(server.xrange(key))


def _leases(server: Any, key: bytes, queue: Queue) -> None:
    queue.leases = dict(server.zrange(key, 0, -1, withscores=True))


def _unique(server: Any, key: bytes, queue: Queue) -> None:
    queue.unique = server.hgetall(key)


_LETTERS = {b"high": b"h", b"low": b"l", b"handed": b"g"}


def _schedules(server: Any, key: bytes, queue: Queue) -> None:
    """Whoever added one, or declares it, owns it until it is removed."""
    queue.schedules = set(server.hkeys(key))


def _schedule_times(server: Any, key: bytes, queue: Queue) -> None:
    queue.schedule_times = set(server.zrange(key, 0, -1))


_READ = {
    "schedules": _schedules,
    "schedule-times": _schedule_times,
    "stream": _stream,
    "high": _stream,
    "low": _stream,
    "handed": _stream,
    "jobs": _jobs,
    "due": _due,
    "waiting": _waiting,
    "dead": _dead,
    "leases": _leases,
    "unique": _unique,
}


def _documents(server: Any, key: bytes, queue: Queue, sink: str) -> None:
    queue.for_sinks[sink] = {entry for entry, _ in server.xrange(key)}


def _taken(server: Any, key: bytes, queue: Queue, sink: str) -> None:
    queue.taken[sink] = set(server.zrange(key, 0, -1))


def _progress(server: Any, key: bytes, queue: Queue, sink: str) -> None:
    queue.progress[sink] = set(server.hkeys(key))


_OF_SINKS = {"documents": _documents, "documents-taken": _taken, "documents-progress": _progress}
