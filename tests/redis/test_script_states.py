"""Script states: whatever happens in whatever order, the scripts take jobs through the table's states and no others.

Floor: tests. Reads and writes: the keys of one queue of an application that only the test has.
"""

from contextlib import suppress
from uuid import uuid4

from hypothesis import given, settings
from hypothesis import strategies as st

from celery5.broker import calls
from celery5.broker.blocking import BlockingRedis
from celery5.broker.call import Call
from celery5.broker.calls import Entry
from celery5.broker.embedded import EmbeddedServer
from celery5.broker.endpoint import Endpoint
from celery5.broker.keys import Keys
from celery5.protocol.envelope import Document, Envelope, encode, read_envelope
from celery5.protocol.states import IllegalTransition, JobState, Move, advance
from celery5.result import state_of

JOBS = ("a", "b", "c")
BY_SETTLING = {
    Move.SUCCEED: JobState.SUCCESS,
    Move.EXPIRE: JobState.EXPIRED,
    Move.REVOKE: JobState.REVOKED,
    Move.REJECT: JobState.REJECTED,
}
SENT = {Move.SEND, Move.SCHEDULE}
SETTLED = {*BY_SETTLING, Move.RETRY, Move.BURY, Move.RELEASE}
OF_ALL = {Move.FALL_DUE, Move.START, Move.RECOVER}
"""Moves of whatever is there, not of one job."""

steps = st.tuples(st.sampled_from(JOBS), st.sampled_from(sorted(SENT | SETTLED | OF_ALL)))


class Model:
    """The queue on the server, and beside it the state that each job has by the table."""

    def __init__(self, driver: BlockingRedis) -> None:
        self.driver = driver
        self.keys = Keys(f"states-{uuid4().hex}").of("mail")
        self.states = dict.fromkeys(JOBS, JobState.UNKNOWN)
        self.entries: dict[str, Entry] = {}
        self.worker = ""
        self.join()

    def join(self) -> None:
        """A new worker comes."""
        self.worker = uuid4().hex
        self.driver.perform(calls.join(self.keys, self.worker, lease=60))

    def make(self, job: str, move: Move) -> None:
        """Make a move on the server and, where the table has it, in the model."""
        message = encode(Envelope(v=1, id=job, task="t"))
        if move in OF_ALL:
            self.make_of_all(move)
            return
        if move is Move.SEND:
            self.driver.perform(calls.publish(self.keys, [(job, message)]))
        elif move is Move.SCHEDULE:
            self.driver.perform(calls.schedule(self.keys, [(job, message, "+0")]))
        elif job in self.entries:
            self.settle(job, message, move)
        if move in SENT or self.states[job] is JobState.EXECUTING:  # nothing else can be settled
            self.advance(job, move)

    def settle(self, job: str, message: bytes, move: Move) -> None:
        """Settle the entry that was read last for a job, even when it was settled before."""
        state = BY_SETTLING.get(move, JobState.DEAD)
        document = encode(Document(v=1, id=job, task="t", state=state.value))
        entry = self.entries[job].id
        words: dict[Move, tuple[str, bytes, str, bytes, int, bytes | int]] = {
            Move.RETRY: ("retry", entry, job, message, 0, 60_000),
            Move.BURY: ("bury", entry, job, message, 60_000, document),
            Move.RELEASE: ("release", entry, job, message, 0, 60_000),
        }
        complete = ("complete", entry, job, document, 60_000, b"")
        self.driver.perform(calls.settle(self.keys, self.worker, [words.get(move, complete)]))

    def make_of_all(self, move: Move) -> None:
        """Let time pass, a worker read, or a worker die."""
        if move is Move.FALL_DUE:
            self.driver.perform(calls.promote(self.keys, limit=100))
            moved = list(JOBS)
        elif move is Move.START:
            entries = self.driver.perform(calls.read([self.keys], self.worker, count=1, block=0.001))
            moved = [read_envelope(entry.message).id for entry in entries]
            self.entries.update(zip(moved, entries, strict=True))
        else:
            call = calls.recover(self.keys, worker=self.worker, max_deliveries=1000, limit=100, ttl=60)
            self.driver.perform(call)
            self.join()
            moved = list(JOBS)
        for job in moved:
            self.advance(job, move)

    def advance(self, job: str, move: Move) -> None:
        """The table's own step; a move that it does not have must have changed nothing."""
        with suppress(IllegalTransition):
            self.states[job] = advance(self.states[job], move)

    def seen(self) -> dict[str, JobState]:
        """The states as everybody sees them."""
        return {job: state_of(self.driver.perform(calls.locate(self.keys, job))) for job in JOBS}

    def clear(self) -> None:
        """Delete the queue's keys."""
        keys = self.keys
        own = (keys.stream, keys.jobs, keys.due, keys.waiting, keys.dead, keys.leases)
        self.driver.perform(Call(("DEL", *own, *map(keys.result, JOBS)), int))


def test_the_scripts_follow_the_table(server: EmbeddedServer) -> None:
    driver = BlockingRedis(Endpoint.from_url(server.url))

    @given(st.lists(steps, max_size=40))
    @settings(max_examples=60, deadline=None)
    def lived(moves: list[tuple[str, Move]]) -> None:
        model = Model(driver)
        for job, move in moves:
            model.make(job, move)
            assert model.seen() == model.states, (job, move)
        model.clear()

    lived()
    driver.close()


def test_one_life_through_every_state_that_this_version_writes(server: EmbeddedServer) -> None:
    driver = BlockingRedis(Endpoint.from_url(server.url))
    model = Model(driver)
    life = [
        Move.SCHEDULE,
        Move.FALL_DUE,
        Move.START,
        Move.RELEASE,
        Move.START,
        Move.RECOVER,
        Move.START,
        Move.RETRY,
    ]
    seen = [JobState.UNKNOWN]
    for move in [*life, Move.FALL_DUE, Move.START, Move.BURY]:
        model.make("a", move)
        seen.append(model.seen()["a"])
    names = "UNKNOWN SCHEDULED SENT EXECUTING SENT EXECUTING SENT EXECUTING RETRY SENT EXECUTING DEAD"
    assert seen == [JobState(name) for name in names.split()]
    model.clear()
    driver.close()
