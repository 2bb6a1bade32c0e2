"""Looking: the trips that tell of a job, or of a queue and its workers, and change nothing.

None of them goes through the keyspace: what is not in a queue's own few keys is not looked for.
"""

from typing import Any

import msgspec

from celery5.broker.call import Call, Script, script_call
from celery5.broker.keys import GROUP, QueueKeys

INSPECT_JOB = Script.load("job/inspect_job", "clock", "ending")
GET_QUEUE_STATE = Script.load("scaling/get_queue_state", "lane")


class JobInspection(msgspec.Struct, frozen=True):
    """All that the server says of a job. `held` is seconds that a worker has had it, `due` and `now` are seconds since
    1970, `before` is how many stand before it in its line at a gate; None where that is not so."""

    place: str
    document: bytes
    message: bytes
    worker: str
    held_for: float | None
    due: float | None
    deliveries: int
    now: float
    jobs_ahead: int | None = None


class WorkerState(msgspec.Struct, frozen=True):
    """A worker of a queue: for how many seconds its lease goes on (0: it has lapsed), and how many jobs it has."""

    name: str
    lease: float
    running: int

    @property
    def alive(self) -> bool:
        """Whether its lease stands."""
        return self.lease > 0


class QueueState(msgspec.Struct, frozen=True):
    """What is in a queue, in jobs, and who works on it.

    `waiting` are on the streams and nobody has them, `high` and `low` of these have such a priority; the oldest of them
    has been there for `oldest_waiting` seconds, None when there is none. `running` are in
    workers' hands, `held` wait at gates, `scheduled` for their time, retries included. `next_due` and `oldest_dead` are
    seconds from now and since then; None when there is none. `keys` is how many keys live jobs have. `paused`: nobody
    is to read it, until it is resumed. `documents`: how many each Data Sink has not got yet, by its name.
    """

    queue: str
    waiting: int
    running: int
    scheduled: int
    next_due: float | None
    dead: int
    oldest_dead: float | None
    keys: int
    workers: tuple[WorkerState, ...]
    paused: bool = False
    high: int = 0
    low: int = 0
    held: int = 0
    documents: dict[str, int] = {}
    oldest_waiting: float | None = None

    @property
    def unread(self) -> int:
        """Jobs that wait here, now or for their time, while no worker that lives reads this queue."""
        if any(each.alive for each in self.workers):
            return 0
        return self.waiting + self.held + self.scheduled


def inspect_job(keys: QueueKeys, job_id: str) -> Call[JobInspection]:
    """All that is known of a job."""
    named = (
        keys.normal,
        keys.jobs,
        keys.result(job_id),
        keys.due,
        keys.waiting,
        keys.dead,
        keys.waiting_list_prefix,
        *keys.other_streams,
    )
    return script_call(INSPECT_JOB, named, (GROUP, job_id), _sighting, repeatable=True)


def get_queue_state(keys: QueueKeys) -> Call[QueueState]:
    """What is in a queue, and who works on it."""

    def state(raw: Any) -> QueueState:
        return _state(keys.queue, raw)

    named = (keys.due, keys.dead, keys.leases, keys.unique, keys.limited_counts, *keys.streams)
    return script_call(GET_QUEUE_STATE, named, (GROUP,), state, repeatable=True)


def _sighting(raw: Any) -> JobInspection:
    place, document, message, worker, held, due, deliveries, now, before = raw
    return JobInspection(
        place.decode(errors="replace"),
        document,
        message,
        worker.decode(errors="replace"),
        _seconds(held),
        _seconds(due),
        deliveries,
        now / 1000,
        None if before < 0 else before,
    )


def _state(queue: str, raw: Any) -> QueueState:
    (
        (normal, high, low, handed),
        running,
        scheduled,
        next_due,
        dead,
        oldest_dead,
        keys,
        workers,
        gated,
        age,
    ) = raw
    states = [WorkerState(name.decode(errors="replace"), lease / 1000, jobs) for name, lease, jobs in workers]
    return QueueState(
        queue=queue,
        waiting=max(0, normal + high + low + handed),
        high=max(0, high),
        low=max(0, low),
        running=running,
        scheduled=scheduled,
        held=sum(count for _, count in gated),
        next_due=_seconds(next_due),
        dead=dead,
        oldest_dead=_seconds(oldest_dead),
        keys=keys,
        workers=tuple(sorted(states, key=lambda each: each.name)),
        oldest_waiting=_seconds(age),
    )


def _seconds(ms: int) -> float | None:
    return None if ms < 0 else ms / 1000
