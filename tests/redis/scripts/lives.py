"""Lives: a queue on a server, and beside it what its jobs are by the table of states and the page of keys."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any
from uuid import uuid4

from celery5.broker.call import Call, Word
from celery5.broker.calls import dead_letters as dead_letters_calls
from celery5.broker.calls import jobs as jobs_calls
from celery5.broker.calls import revocation as revocation_calls
from celery5.broker.calls.job_details import inspect_job
from celery5.broker.calls.jobs import Entry
from celery5.broker.drivers.blocking import BlockingRedis
from celery5.broker.keys import GROUP, Keys, QueueKeys
from celery5.protocol.job.delivery import Settlement
from celery5.protocol.job.envelope import Document, Envelope, encode, read_envelope
from celery5.protocol.job.lanes import get_stream_id
from celery5.protocol.job.states import FINISHED, PLACES, IllegalTransition, JobState, Move, Place, advance
from celery5.protocol.job.story import JobDetails, make_job_details
from celery5.results.async_result import get_job_state

MESSAGES = {
    job: encode(Envelope(v=1, id=job, task="t", key=key)) for job, key in (("a", ""), ("b", "k"), ("c", "k"))
}
"""The jobs: `b` and `c` have the same key, so that only one of them is alive at any time."""
LOCKS = {job: read_envelope(message).lock if job != "a" else "" for job, message in MESSAGES.items()}
KEPT = 60_000


class Act(StrEnum):
    """What happens beside the table's moves."""

    SETTLE_REVOKED = "settle as revoked"
    DIE = "take the worker down once too often"
    PURGE = "purge"
    FORGET = "forget"


BY_SETTLING: dict[str, JobState] = {
    Move.SUCCEED: JobState.SUCCESS,
    Move.EXPIRE: JobState.EXPIRED,
    Move.REJECT: JobState.REJECTED,
    Act.SETTLE_REVOKED: JobState.REVOKED,
}


WAITING = tuple(PLACES[state][0] for state in (JobState.SCHEDULED, JobState.RETRY, JobState.HELD))
"""The places of jobs that are kept until their time."""


def get_place(state: JobState, *, marked: bool = False, buried: bool = False) -> str:
    """The place that the table has for a job; '' for one that has none."""
    if marked:
        return Place.REVOKED
    if state is JobState.DEAD and not buried:  # it was purged, and its document is still there
        return ""
    return PLACES[state][0] if PLACES[state] else ""


@dataclass
class Life:
    """What the model knows of one job."""

    state: JobState = JobState.UNKNOWN
    marked: bool = False
    """It was revoked while a worker had it."""
    buried: bool = False
    """It is in the dead-letter queue."""
    told: bool = False
    """Its document is kept."""

    def go(self, move: Move) -> None:
        """The table's own step. One that the table does not have must have changed nothing."""
        before = self.state
        with suppress(IllegalTransition):
            self.state = advance(before, move)
            self.marked = self.marked and self.state is before
            self.buried = self.state is JobState.DEAD
            self.told = self.state in FINISHED

    def fade(self) -> None:
        """The document is gone: nothing is known any more, unless the job is in the dead-letter queue."""
        self.told = False
        if self.state in FINISHED and not self.buried:
            self.state = JobState.UNKNOWN


@dataclass
class Model:
    """The queue on the server, and beside it what each job is by the table."""

    driver: BlockingRedis
    keys: QueueKeys = field(default_factory=lambda: Keys(f"states-{uuid4().hex}").for_queue("mail"))
    lives: dict[str, Life] = field(default_factory=lambda: {job: Life() for job in MESSAGES})
    entries: dict[str, Entry] = field(default_factory=dict[str, Entry])
    holder: str = ""
    """Who has the key of `b` and `c`."""
    worker: str = ""

    def __post_init__(self) -> None:
        self.join()

    @classmethod
    def on(cls, driver: BlockingRedis, lane: str) -> "Model":
        """A new queue, whose jobs go on the lane of that letter."""
        return cls(driver, Keys(f"states-{uuid4().hex}").for_queue("mail").on_lane(lane))

    def join(self) -> None:
        """A new worker comes."""
        self.worker = uuid4().hex
        self.driver.perform(jobs_calls.join_queue(self.keys, self.worker, lease=60))

    def make(self, job: str, move: str) -> None:
        """Do it on the server and, where the table has it, in the model."""
        of_one: dict[str, Callable[[str], None]] = {
            Move.SEND: self.send,
            Move.SCHEDULE: lambda job: self.send(job, "+0"),
            Move.REVOKE: self.revoke,
            Move.HOLD: self.hold,
            Move.REPLAY: self.replay,
            Act.PURGE: self.purge,
            Act.FORGET: self.forget,
        }
        of_all: dict[str, Callable[[], None]] = {
            Move.FALL_DUE: self.fall_due,
            Move.START: self.start,
            Move.RECOVER: self.recover,
            Act.DIE: lambda: self.recover(at_last=True),
        }
        if move in of_one:
            of_one[move](job)
        elif move in of_all:
            of_all[move]()
        else:
            self.settle(job, move)
        if self.holder and self.lives[self.holder].state in FINISHED | {JobState.UNKNOWN}:
            self.holder = ""

    def send(self, job: str, when: str = "") -> None:
        """Send or schedule it. One that has a key is sent only when no other job of that key is alive."""
        life, lock, move = self.lives[job], LOCKS[job], Move.SCHEDULE if when else Move.SEND
        if lock or self.keys.lane:
            others = self.driver.perform(
                jobs_calls.claim(self.keys, [(job, MESSAGES[job], when, lock, None)])
            )
            free = not lock or self.holder in ("", job) or life.state is not JobState.UNKNOWN
            assert others == ({} if free else {job: self.holder})
            if not free:
                return
        elif when:
            self.driver.perform(jobs_calls.schedule(self.keys, [(job, MESSAGES[job], when)]))
        else:
            self.driver.perform(jobs_calls.publish(self.keys, [(job, MESSAGES[job])]))
        if lock and life.state is JobState.UNKNOWN:
            self.holder = job
        life.go(move)

    def hold(self, job: str) -> None:
        """Hold it: one that a worker has by settling, one on the stream by hand, for no script does that yet."""
        life, keys = self.lives[job], self.keys
        if life.state is not JobState.SENT:
            self.settle(job, Move.HOLD)
            return
        place: bytes = self.driver.perform(words("HGET", keys.jobs, job))
        self.driver.perform(words("XDEL", keys.stream, get_stream_id(place[1:])))
        self.driver.perform(words("ZADD", keys.due, 1, job))
        self.driver.perform(words("HSET", keys.waiting, job, MESSAGES[job]))
        self.driver.perform(words("HSET", keys.jobs, job, "H" + keys.lane))
        life.go(Move.HOLD)

    def let_go(self, job: str) -> None:
        """Put a held job back. By hand, too."""
        keys = self.keys
        entry: bytes = self.driver.perform(words("XADD", keys.stream, "*", "job", MESSAGES[job]))
        self.driver.perform(words("HSET", keys.jobs, job, b"S" + entry + keys.lane.encode()))
        self.driver.perform(words("HDEL", keys.waiting, job))
        self.driver.perform(words("ZREM", keys.due, job))
        self.lives[job].go(Move.RELEASE)

    def revoke(self, job: str) -> None:
        """Revoke it: at once where it waits; a worker that has it is told, and until it lets go nothing is seen."""
        life = self.lives[job]
        (found,) = self.driver.perform(revocation_calls.revoke(self.keys, [job], ttl=60))
        if life.state is JobState.EXECUTING:
            life.marked = True
        else:
            life.go(Move.REVOKE)
        assert found == life.state.value

    def replay(self, job: str) -> None:
        """Put it back from the dead-letter queue, unless another job has its key by now."""
        life = self.lives[job]
        (entry,) = self.driver.perform(dead_letters_calls.find_entries(self.keys, [job]))
        assert bool(entry) is life.buried
        call = dead_letters_calls.replay_jobs(self.keys, [(entry or "0-1", job, MESSAGES[job], LOCKS[job])])
        (told,) = self.driver.perform(call)
        taken = bool(LOCKS[job]) and self.holder not in ("", job)
        assert (told == dead_letters_calls.DONE) is (life.buried and not taken)
        if told == dead_letters_calls.DONE:
            life.go(Move.REPLAY)
            self.holder = job if LOCKS[job] else self.holder

    def purge(self, job: str) -> None:
        """Take it off the dead-letter queue. Its document goes by itself."""
        life = self.lives[job]
        (entry,) = self.driver.perform(dead_letters_calls.find_entries(self.keys, [job]))
        assert self.driver.perform(dead_letters_calls.purge_jobs(self.keys, [(entry or "0-1", job)])) == [
            int(life.buried)
        ]
        life.buried = False
        if not life.told:
            life.fade()

    def forget(self, job: str) -> None:
        """Drop its document, as time does."""
        self.driver.perform(jobs_calls.delete_results(self.keys, [job]))
        self.lives[job].fade()

    def settle(self, job: str, move: str) -> None:
        """Settle the entry that was read last for a job, even when it was settled before."""
        if move == Move.RELEASE and self.lives[job].state is JobState.HELD:
            self.let_go(job)
            return
        if job not in self.entries:
            return
        state, entry, message = BY_SETTLING.get(move, JobState.DEAD), self.entries[job].id, MESSAGES[job]
        document = encode(Document(v=1, id=job, task="t", state=state.value))
        settlements: dict[str, Settlement] = {
            Move.RETRY: Settlement("retry", entry, job, message, 0, KEPT),
            Move.BURY: Settlement("bury", entry, job, message, KEPT, document),
            Move.RELEASE: Settlement("release", entry, job, message, 0, KEPT),
            Move.HOLD: Settlement("hold", entry, job, message, 0, KEPT),
        }
        complete = Settlement("complete", entry, job, document, KEPT, LOCKS[job].encode())
        self.driver.perform(jobs_calls.settle(self.keys, self.worker, [settlements.get(move, complete)]))
        if self.lives[job].state is JobState.EXECUTING:  # nothing else can be settled
            ends = self.lives[job].marked and move in (Move.RETRY, Move.RELEASE, Move.HOLD, Move.BURY)
            made = Move.REVOKE if ends or move == Act.SETTLE_REVOKED else Move(move)
            self.lives[job].go(made)

    def fall_due(self) -> None:
        """Time passes."""
        self.driver.perform(jobs_calls.promote_due_jobs(self.keys, limit=100))
        for life in self.lives.values():
            life.go(Move.FALL_DUE)

    def start(self) -> None:
        """A worker takes the first job that there is. Its beat makes the group of a lane that has its first."""
        self.driver.perform(jobs_calls.renew_lease(self.keys, self.worker, lease=60))
        if self.keys.lane and not self.driver.perform(words("EXISTS", self.keys.stream)):
            return
        for entry in self.driver.perform(
            jobs_calls.read_jobs([self.keys], self.worker, count=1, block_seconds=0.001)
        ):
            job = read_envelope(entry.message).id
            self.entries[job] = entry
            self.lives[job].go(Move.START)

    def recover(self, *, at_last: bool = False) -> None:
        """The worker dies, `at_last` once too often; another comes."""
        most = 0 if at_last else 1000
        self.driver.perform(
            jobs_calls.recover(
                self.keys, worker=self.worker, max_deliveries=most, limit=100, ttl=60, message_limit=1_000_000
            )
        )
        self.join()
        for life in self.lives.values():
            if life.state is JobState.EXECUTING:
                life.go(Move.REVOKE if life.marked else Move.BURY if at_last else Move.RECOVER)

    def seen(self) -> dict[str, JobState]:
        """The states as everybody sees them, by a handle and by `celery5 task show`."""
        states = {
            job: get_job_state(self.driver.perform(jobs_calls.locate_job(self.keys, job))) for job in MESSAGES
        }
        assert {job: self.story(job).state for job in MESSAGES} == states
        return states

    def story(self, job: str) -> JobDetails:
        """What `celery5 task show` tells of a job."""
        found = self.driver.perform(inspect_job(self.keys, job))
        return make_job_details(
            job,
            "mail",
            place=found.place,
            message=found.message,
            document=found.document,
            worker=found.worker,
        )

    def states(self) -> dict[str, JobState]:
        """The states by the table."""
        return {job: life.state for job, life in self.lives.items()}

    def check_what_is_left(self) -> None:
        """What is in Redis is what the page of keys says for these states."""
        keys, plain = self.keys, dict.fromkeys(MESSAGES, "")
        self.driver.perform(jobs_calls.renew_lease(keys, self.worker, lease=60))
        has_group = self.driver.perform(words("EXISTS", keys.stream))
        jobs, stream, pending, due, waiting, dead, unique, *documents = self.driver.perform_all(
            [
                words("HGETALL", keys.jobs),
                words("XRANGE", keys.stream, "-", "+"),
                words("XPENDING", keys.stream if has_group else keys.normal, GROUP, "-", "+", 10),
                words("ZRANGE", keys.due, 0, -1),
                words("HKEYS", keys.waiting),
                words("XRANGE", keys.dead, "-", "+"),
                words("HGETALL", keys.unique),
                *(words("PTTL", keys.result(job)) for job in MESSAGES),
            ]
        )
        for job, life in self.lives.items():
            plain[job] = get_place(life.state, marked=life.marked, buried=life.buried)
        found = {job.decode(): place.decode() for job, place in _pairs(jobs)}
        assert {job: found.get(job, "")[:1] for job in MESSAGES} == plain
        there = {job: place[1:] for job, place in found.items() if place[0] in PLACES[JobState.EXECUTING]}
        assert sorted(entry.decode() + keys.lane for entry, _ in stream) == sorted(there.values())
        assert all(place.endswith(keys.lane) for place in found.values() if place[0] in WAITING)
        having = [job for job, state in self.states().items() if state is JobState.EXECUTING]
        assert sorted(each[0].decode() + keys.lane for each in pending) == sorted(
            there[job] for job in having
        )
        late = [job for job, kind in plain.items() if kind in WAITING]
        assert (
            sorted(each.decode() for each in due) == sorted(each.decode() for each in waiting) == sorted(late)
        )
        graves = sorted(place[1:] for place in found.values() if place[0] == Place.DEAD)
        assert sorted(entry.decode() for entry, _ in dead) == graves
        assert dict(_pairs(unique)) == ({LOCKS["b"].encode(): self.holder.encode()} if self.holder else {})
        kept = {job for job, ttl in zip(MESSAGES, documents, strict=True) if 0 < ttl <= KEPT}
        assert kept == {job for job, life in self.lives.items() if life.told}
        assert [ttl for ttl in documents if ttl == -1] == []

    def clear(self) -> None:
        """Delete the queue's keys."""
        keys = self.keys
        own = (*keys.streams, keys.jobs, keys.due, keys.waiting, keys.dead, keys.leases, keys.unique)
        self.driver.perform(Call(("DEL", *own, *map(keys.result, MESSAGES)), int))


def words(*said: Word) -> Call[Any]:
    """A command, and its answer as it is."""
    return Call(said, lambda raw: raw)


def _pairs(raw: Any) -> Iterator[tuple[bytes, bytes]]:
    """A hash as RESP3 or RESP2 has it."""
    return iter(raw.items()) if hasattr(raw, "items") else zip(raw[::2], raw[1::2], strict=True)
