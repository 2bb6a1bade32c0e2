"""Job model: one queue on a server, and beside it what its jobs are by the table of states and the page of keys."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeVar
from uuid import uuid4

from celery5.broker.call import Call, Word
from celery5.broker.calls import dead_letters as dead_letters_calls
from celery5.broker.calls import jobs as jobs_calls
from celery5.broker.calls import leases as lease_calls
from celery5.broker.calls import limits as limits_calls
from celery5.broker.calls import scheduling as scheduling_calls
from celery5.broker.calls.jobs import Entry, inspect_job
from celery5.broker.calls.limits import AdmissionRequest
from celery5.broker.drivers.blocking import BlockingRedis
from celery5.broker.keys import GROUP, Keys, QueueKeys
from celery5.protocol.job.delivery import Delivery, Settlement, pack_terms
from celery5.protocol.job.foreign import make_code_version
from celery5.protocol.job.messages import Command, Document, encode, format_lock, read_command
from celery5.protocol.job.states import (
    ADMITTED,
    FINISHED,
    HIGH,
    LOW,
    NORMAL,
    PLACES,
    IllegalTransition,
    JobState,
    Move,
    Place,
    advance,
)
from celery5.protocol.job.story import JobDetails, make_job_details
from celery5.protocol.limits import AdmissionRule
from celery5.results.async_result import get_job_state

T = TypeVar("T")

JOBS = {"a": Command(v=1, id="a", task="t"), "b": Command(v=1, id="b", task="t", key="k"),
        "c": Command(v=1, id="c", task="t", key="k"), "d": Command(v=1, id="d", task="t", expires=1.0)}  # fmt: skip
"""`b` and `c` have the same key, so that only one of them is alive at any time. `d` expires."""
LOCKS = {job: format_lock("t", "k") if command.key else "" for job, command in JOBS.items()}
RULE = AdmissionRule("t", max_running=1000)
WAITING_LIST = "t  "
"""The waiting list of all these jobs, by that rule."""
TTL_MS = 60_000
CODE = make_code_version({"t": "s"})


class Act(StrEnum):
    """What happens beside the table's moves, or another way to make one of them."""

    FIRE = "send by a schedule"
    DELIVER = "send to one worker"
    WAIT = "hold at a limit"
    KEEP = "hold for other code"
    SETTLE_REVOKED = "settle as revoked"
    DIE = "take the worker down once too often"
    PURGE = "purge"
    FORGET = "forget"


STATE_OF_COMPLETED: dict[str, JobState] = {
    Move.SUCCEED: JobState.SUCCESS,
    Move.EXPIRE: JobState.EXPIRED,
    Move.REJECT: JobState.REJECTED,
    Act.SETTLE_REVOKED: JobState.REVOKED,
}
TIMED = (Place.SCHEDULED, Place.RETRY, Place.HELD)
"""The places of jobs that are kept until their time."""


@dataclass
class ModelJob:
    """What the model knows of one job."""

    state: JobState = JobState.UNKNOWN
    # The lane that its entry is on, or comes back to.
    lane: str = NORMAL
    # It was revoked while a worker had it.
    is_revoked: bool = False
    # It is in the waiting list of a limit.
    is_limited: bool = False
    # It is kept for workers with other code.
    is_foreign: bool = False
    # It is in the dead-letter queue.
    is_dead_letter: bool = False
    # Its document is kept.
    has_document: bool = False

    def make(self, move: Move) -> bool:
        """Make the table's move. One that the table does not have must have changed nothing. Return whether it has."""
        before = self.state
        with suppress(IllegalTransition):
            self.state = advance(before, move)
            self.is_revoked = self.is_revoked and self.state is before
            self.is_limited = self.is_foreign = False
            self.is_dead_letter = self.state is JobState.DEAD
            self.has_document = self.state in FINISHED
            return True
        return False

    def drop_document(self) -> None:
        """The document is gone: nothing is known any more, unless the job is in the dead-letter queue."""
        self.has_document = False
        if self.state in FINISHED and not self.is_dead_letter:
            self.state = JobState.UNKNOWN

    @property
    def place(self) -> str:
        """The letter of the place that the table has for the job; '' for one that has none."""
        if self.is_revoked:
            return Place.REVOKED
        if self.is_limited:
            return Place.LIMITED
        if self.state is JobState.DEAD and not self.is_dead_letter:  # purged, and its document is still there
            return ""
        return PLACES[self.state][0] if PLACES[self.state] else ""


@dataclass
class QueueModel:
    """A queue on the server, and beside it what each job is by the table."""

    driver: BlockingRedis
    lane: str = NORMAL
    app: Keys = field(default_factory=lambda: Keys(f"states-{uuid4().hex}"))
    jobs: dict[str, ModelJob] = field(default_factory=lambda: {job: ModelJob() for job in JOBS})
    # The entry that was read last for each job.
    entries: dict[str, Entry] = field(default_factory=dict[str, Entry])
    # Who has the key of `b` and `c`.
    holder: str = ""
    worker: str = ""
    # How often the schedule has fired.
    fired: int = 0
    # The names of the scripts that were run.
    scripts: set[str] = field(default_factory=set[str])

    def __post_init__(self) -> None:
        self.keys: QueueKeys = self.app.for_queue("mail").on_lane(self.lane)
        priority = {NORMAL: "", HIGH: "high", LOW: "low"}[self.lane]
        self.messages = {
            job: encode(Command(v=1, id=job, task="t", key=spec.key, expires=spec.expires, priority=priority))
            for job, spec in JOBS.items()
        }
        self.join()

    def perform(self, call: Call[T]) -> T:
        """Perform a call, and note which script it runs."""
        if call.script:
            self.scripts.add(call.script.name)
        return self.driver.perform(call)

    def join(self) -> None:
        """Add a new worker."""
        self.worker = uuid4().hex
        self.perform(lease_calls.join_queue(self.keys, self.worker, lease=60))
        self.perform(lease_calls.announce_code(self.keys, CODE, lease=60, with_tasks=True))

    def make(self, job: str, move: str) -> None:
        """Make a move on the server and, where the table has it, in the model."""
        moves_of_job: dict[str, Callable[[str], None]] = {
            Move.SEND: self.send,
            Move.SCHEDULE: lambda job: self.send(job, "+0"),
            Move.REVOKE: self.revoke,
            Move.HOLD: self.hold,
            Move.REPLAY: self.replay,
            Act.FIRE: self.fire,
            Act.DELIVER: self.deliver,
            Act.WAIT: self.wait,
            Act.KEEP: lambda job: self.settle(job, Act.KEEP),
            Act.PURGE: self.purge,
            Act.FORGET: self.forget,
        }
        moves_of_all: dict[str, Callable[[], None]] = {
            Move.FALL_DUE: self.fall_due,
            Move.START: self.start,
            Move.RECOVER: self.recover,
            Act.DIE: lambda: self.recover(is_last=True),
        }
        if move in moves_of_job:
            moves_of_job[move](job)
        elif move in moves_of_all:
            moves_of_all[move]()
        elif move == Move.RELEASE and self.jobs[job].state is JobState.HELD:
            self.take_foreign() if self.jobs[job].is_foreign else self.admit_waiting()
        else:
            self.settle(job, move)
        if self.holder and self.jobs[self.holder].state in FINISHED | {JobState.UNKNOWN}:
            self.holder = ""

    def is_free(self, job: str) -> bool:
        """Whether no other job has the key of this one."""
        return not LOCKS[job] or self.holder in ("", job)

    def note_sent(self, job: str, move: Move) -> None:
        """Make the move of sending a job, on the lane of this queue. A known job is left alone."""
        if self.jobs[job].make(move):
            self.jobs[job].lane = self.keys.lane
            self.holder = job if LOCKS[job] else self.holder

    def send(self, job: str, when: str = "") -> None:
        """Send or schedule a job. One that has a key is sent only when no other job of that key is alive."""
        move, message, lock = Move.SCHEDULE if when else Move.SEND, self.messages[job], LOCKS[job]
        if lock or self.keys.lane:
            holders = self.perform(jobs_calls.publish_unique(self.keys, [(job, message, when, lock, None)]))
            is_sent = self.is_free(job) or self.jobs[job].state is not JobState.UNKNOWN
            assert holders == ({} if is_sent else {job: self.holder})
            if not is_sent:
                return
        elif when:
            self.perform(jobs_calls.schedule(self.keys, [(job, message, when)]))
        else:
            self.perform(jobs_calls.publish(self.keys, [(job, message)]))
        self.note_sent(job, move)

    def fire(self, job: str) -> None:
        """Send a job by a schedule that fires."""
        states = [b"%d" % count if count else b"" for count in (self.fired, self.fired + 1)]
        to_send = [(job, self.messages[job], LOCKS[job], None)]
        call = scheduling_calls.fire_schedule(
            self.app, self.keys, "s", expected_state=states[0], new_state=states[1], next_look=None, jobs=to_send
        )  # fmt: skip
        assert self.perform(call)
        self.fired += 1
        if self.is_free(job):
            self.note_sent(job, Move.SEND)

    def deliver(self, job: str) -> None:
        """Send a job without a key to the worker, which takes all that waits before it on that lane."""
        if LOCKS[job]:
            return
        call = jobs_calls.deliver_to_worker(
            self.keys, job, self.messages[job], worker=self.worker, max_before=100
        )
        entries = self.perform(call)
        self.note_sent(job, Move.SEND)
        self.note_started(entries or [])

    def hold(self, job: str) -> None:
        """Hold a job: one that is new in the waiting list of its limit, one that a worker has by settling it."""
        model = self.jobs[job]
        if model.state is not JobState.UNKNOWN:
            self.settle(job, Move.HOLD)
        elif not LOCKS[job]:
            expires = "1000" if JOBS[job].expires else ""
            words = [(job, self.messages[job], WAITING_LIST, expires)]
            assert self.perform(limits_calls.add_to_waiting_list(self.keys, words)) == 1
            model.make(Move.HOLD)
            model.is_limited, model.lane = True, NORMAL

    def wait(self, job: str) -> None:
        """Hold a job that a worker has in the waiting list of its limit."""
        if job not in self.entries:
            return
        model, expires = self.jobs[job], "1000" if JOBS[job].expires else ""
        request = AdmissionRequest(self.entries[job].id, job, WAITING_LIST, 0, expires, "wait")
        reply = self.perform(limits_calls.admit(self.keys, self.worker, [request], [(RULE, 0)]))
        if model.state is not JobState.EXECUTING:
            expected = limits_calls.WAITING if model.is_limited else limits_calls.GONE
        elif model.is_revoked:
            expected = limits_calls.REVOKED
        else:
            expected = limits_calls.WAITING
            model.make(Move.HOLD)
            model.is_limited, model.lane = True, NORMAL
        assert reply.outcomes == [expected]

    def admit_waiting(self) -> None:
        """Give the first job of the waiting list to the worker, if there is one: it is released and started at once."""
        reply = self.perform(limits_calls.admit_waiting(self.keys, self.worker, [(RULE, 1)]))
        assert len(reply.entries) == any(model.is_limited for model in self.jobs.values())
        for entry in reply.entries:
            self.jobs[read_command(entry.message).id].make(Move.RELEASE)
        self.note_started(reply.entries)

    def take_foreign(self) -> None:
        """Give a job that is kept for other code to the worker: it is released and started at once, without a slot."""
        call = jobs_calls.take_foreign_jobs(self.keys, self.worker, version=CODE.version, count=1)
        (entry,) = self.perform(call)
        assert entry.is_foreign
        model = self.jobs[read_command(entry.message).id]
        assert model.is_foreign
        model.make(Move.RELEASE)
        self.note_started([entry])

    def note_started(self, entries: list[Entry]) -> None:
        """The worker was given these entries."""
        for entry in entries:
            job = read_command(entry.message).id
            self.entries[job] = entry
            self.jobs[job].lane = entry.lane
            self.jobs[job].make(Move.START)

    def revoke(self, job: str) -> None:
        """Revoke a job: at once where it waits. One that a worker has is marked: it ends later."""
        model = self.jobs[job]
        (state,) = self.perform(jobs_calls.revoke(self.keys, [job], ttl=60))
        if model.state is JobState.EXECUTING:
            model.is_revoked = True
        else:
            model.make(Move.REVOKE)
        assert state == model.state.value

    def replay(self, job: str) -> None:
        """Put a job back from the dead-letter queue, unless another job has its key by now."""
        model = self.jobs[job]
        (entry,) = self.perform(dead_letters_calls.find_entries(self.keys, [job]))
        assert bool(entry) is model.is_dead_letter
        words = [(entry or "0-1", job, self.messages[job], LOCKS[job])]
        (result,) = self.perform(dead_letters_calls.replay_jobs(self.keys, words))
        assert (result == dead_letters_calls.DONE) is (model.is_dead_letter and self.is_free(job))
        if result == dead_letters_calls.DONE:
            self.note_sent(job, Move.REPLAY)

    def purge(self, job: str) -> None:
        """Take a job off the dead-letter queue. Its document goes by itself."""
        model = self.jobs[job]
        (entry,) = self.perform(dead_letters_calls.find_entries(self.keys, [job]))
        purged = self.perform(dead_letters_calls.purge_jobs(self.keys, [(entry or "0-1", job)]))
        assert purged == [int(model.is_dead_letter)]
        model.is_dead_letter = False
        if not model.has_document:
            model.drop_document()

    def forget(self, job: str) -> None:
        """Delete a job's document, as time does."""
        self.perform(jobs_calls.delete_results(self.keys, [job]))
        self.jobs[job].drop_document()

    def settle(self, job: str, move: str) -> None:
        """Settle the entry that was read last for a job, even when it was settled before."""
        if job not in self.entries:
            return
        model, entry, message = self.jobs[job], self.entries[job], self.messages[job]
        state = STATE_OF_COMPLETED.get(move, JobState.DEAD)
        document = encode(Document(v=1, id=job, task="t", state=state.value))
        settlements: dict[str, Settlement] = {
            Move.RETRY: Settlement("retry", entry.id, job, message, TTL_MS, 0),
            Move.FAIL_FOR_GOOD: Settlement(
                "bury", entry.id, job, message, TTL_MS, pack_terms(cause="", document=document.decode())
            ),
            Move.RELEASE: Settlement("release", entry.id, job, message, TTL_MS, 0),
            Move.HOLD: Settlement("hold", entry.id, job, message, TTL_MS, 0),
            # Its time differs from that of whatever is held in the same millisecond.
            Act.KEEP: Settlement("foreign", entry.id, job, message, TTL_MS, pack_terms(delay=-5, list="t -")),
        }
        complete = Settlement("complete", entry.id, job, document, TTL_MS, LOCKS[job].encode())
        keys = self.keys.on_lane(entry.lane)
        call = jobs_calls.settle(keys, self.worker, [settlements.get(move, complete)])
        if entry.lane == ADMITTED:  # it has a slot
            leaving = [Delivery("mail", entry.id, entry.message)]
            self.perform(limits_calls.settle_limited(keys, call, leaving, []))
        else:
            self.perform(call)
        if model.state is JobState.EXECUTING:  # nothing else can be settled
            goes_on = move in (Move.RETRY, Move.RELEASE, Move.HOLD, Act.KEEP, Move.FAIL_FOR_GOOD)
            if move == Act.SETTLE_REVOKED or (model.is_revoked and goes_on):
                model.make(Move.REVOKE)
            elif move == Move.RELEASE and entry.lane == ADMITTED:  # nobody reads that lane
                model.make(Move.HOLD)
            elif move == Act.KEEP:
                model.make(Move.HOLD)
                model.is_foreign = True
            else:
                model.make(Move(move))
            self.note_off_admitted(model)

    def note_off_admitted(self, model: ModelJob) -> None:
        """What was given to a worker by a waiting list comes back to the lane of its priority."""
        if model.lane == ADMITTED:
            model.lane = self.keys.lane

    def fall_due(self) -> None:
        """Let time pass. Of the jobs in a waiting list only those that expire are due."""
        self.perform(jobs_calls.promote_due_jobs(self.keys, limit=100))
        for job, model in self.jobs.items():
            if not model.is_limited or JOBS[job].expires:
                model.make(Move.FALL_DUE)

    def start(self) -> None:
        """Let the worker take the first job that there is. Its heartbeat makes the group of a lane that is new."""
        self.perform(lease_calls.renew_lease(self.keys, self.worker, lease=60))
        lanes = [self.keys.on_lane(lane) for lane in dict.fromkeys((self.keys.lane, NORMAL))]
        lanes = [keys for keys in lanes if self.perform(make_call("EXISTS", keys.stream))]
        shares = [1] * len(lanes)
        self.note_started(
            self.perform(jobs_calls.read_by_lane(lanes, self.worker, count=1, shares=shares))
        )  # fmt: skip

    def recover(self, *, is_last: bool = False) -> None:
        """The worker dies, with `is_last` once too often for its jobs; another one joins."""
        most = 0 if is_last else 1000
        self.perform(
            lease_calls.recover(
                self.keys, worker=self.worker, max_deliveries=most, limit=100, ttl=60, message_limit=1_000_000
            )
        )
        self.join()
        for model in self.jobs.values():
            if model.state is JobState.EXECUTING:
                model.make(
                    Move.REVOKE if model.is_revoked else Move.FAIL_FOR_GOOD if is_last else Move.RECOVER
                )
                self.note_off_admitted(model)

    def seen(self) -> dict[str, JobState]:
        """Return the states as everybody sees them, by a handle and by `celery5 task show`."""
        states = {job: get_job_state(self.perform(jobs_calls.locate_job(self.keys, job))) for job in JOBS}
        assert {job: self.details(job).state for job in JOBS} == states
        return states

    def details(self, job: str) -> JobDetails:
        """Return what `celery5 task show` shows of a job."""
        return make_job_details(job, "mail", self.perform(inspect_job(self.keys, job)))

    def states(self) -> dict[str, JobState]:
        """Return the states by the table."""
        return {job: model.state for job, model in self.jobs.items()}

    def check_what_is_left(self) -> None:
        """Check that Redis holds what the page of keys says for these states, and nothing else."""
        keys = self.keys
        self.perform(lease_calls.renew_lease(keys, self.worker, lease=60))
        jobs, due, waiting, dead, unique, *documents = self.driver.perform_all(
            [
                make_call("HGETALL", keys.jobs),
                make_call("ZRANGE", keys.due, 0, -1),
                make_call("HKEYS", keys.waiting),
                make_call("XRANGE", keys.dead, "-", "+"),
                make_call("HGETALL", keys.unique),
                *(make_call("PTTL", keys.result(job)) for job in JOBS),
            ]
        )
        places = {job.decode(): place.decode() for job, place in _pairs(jobs)}
        letters = {job: model.place for job, model in self.jobs.items()}
        assert {job: places.get(job, "")[:1] for job in JOBS} == letters
        self.check_streams(places)
        timed = sorted(job for job, letter in letters.items() if letter in TIMED)
        assert [places[job][1:].lstrip("0123456789") for job in timed] == [
            self.jobs[job].lane for job in timed
        ]
        limited = sorted(job for job, letter in letters.items() if letter == Place.LIMITED)
        expiring = [job for job in limited if JOBS[job].expires]
        assert _sorted(due) == sorted([*timed, *expiring])
        assert _sorted(waiting) == sorted([*timed, *limited])
        self.check_limits(limited, expiring)
        dead_entries = [place[1:] for place in places.values() if place[0] == Place.DEAD]
        assert _sorted(entry for entry, _ in dead) == sorted(dead_entries)
        assert dict(_pairs(unique)) == ({LOCKS["b"].encode(): self.holder.encode()} if self.holder else {})
        kept = {job for job, ttl in zip(JOBS, documents, strict=True) if 0 < ttl <= TTL_MS}
        assert kept == {job for job, model in self.jobs.items() if model.has_document}
        assert [ttl for ttl in documents if ttl == -1] == []

    def check_streams(self, places: dict[str, str]) -> None:
        """Check that the entries on all lanes are the jobs, and that the worker has those that are EXECUTING."""
        entries, pending = list[str](), list[str]()
        for lane in (NORMAL, HIGH, LOW, ADMITTED):
            stream = self.keys.on_lane(lane).stream
            if self.perform(make_call("EXISTS", stream)):
                read = self.perform(make_call("XRANGE", stream, "-", "+"))
                entries += [entry.decode() + lane for entry, _ in read]
                read = self.perform(make_call("XPENDING", stream, GROUP, "-", "+", 10))
                pending += [entry[0].decode() + lane for entry in read]
        on_stream = {
            job: place[1:] for job, place in places.items() if place[0] in PLACES[JobState.EXECUTING]
        }
        assert sorted(entries) == sorted(on_stream.values())
        executing = [job for job, state in self.states().items() if state is JobState.EXECUTING]
        assert sorted(pending) == sorted(on_stream[job] for job in executing)
        assert all(place.endswith(self.jobs[job].lane) for job, place in on_stream.items())

    def check_limits(self, limited: list[str], expiring: list[str]) -> None:
        """Check the waiting list, its counts, and that the jobs that it gave to the worker have a slot each."""
        keys = self.keys
        in_list, counts, slots = self.driver.perform_all(
            [
                make_call("ZRANGE", f"{keys.waiting_list_prefix}line {WAITING_LIST}", 0, -1),
                make_call("HGETALL", keys.limited_counts),
                make_call("HKEYS", keys.slots),
            ]
        )
        assert _sorted(in_list) == limited
        expected = {b"t": len(limited), b" expires": len(expiring)}
        assert {name: int(count) for name, count in _pairs(counts)} == {
            name: count for name, count in expected.items() if count
        }
        admitted = [
            job
            for job, model in self.jobs.items()
            if model.lane == ADMITTED and not self.entries[job].is_foreign
        ]
        assert _sorted(slots) == sorted(self.entries[job].id.decode() for job in admitted)

    def clear(self) -> None:
        """Delete the queue's keys."""
        keys, queue = self.keys, self.keys.queue
        own = [*keys.streams, keys.jobs, keys.due, keys.waiting, keys.dead, keys.leases, keys.unique]
        own += [keys.slots, keys.slot_counts, keys.limited_counts, self.app.schedules(queue)]
        own += [self.app.schedule_times(queue), *map(keys.result, JOBS)]
        own += [
            f"{keys.waiting_list_prefix}{name}" for name in (f"line {WAITING_LIST}", "tokens t ", "turns t")
        ]
        own += [keys.code_versions, f"{keys.code_versions}:{CODE.version}"]
        own += [keys.foreign_jobs, f"{keys.foreign_jobs}:t -"]
        self.perform(make_call("DEL", *own))


def make_call(*command: Word) -> Call[Any]:
    """Return the call of a command, with its reply as it is."""
    return Call(command, lambda raw: raw)


def _pairs(raw: Any) -> Iterator[tuple[bytes, bytes]]:
    """Return a hash as RESP3 or RESP2 has it."""
    return iter(raw.items()) if hasattr(raw, "items") else zip(raw[::2], raw[1::2], strict=True)


def _sorted(names: Any) -> list[str]:
    return sorted(name.decode() for name in names)
