"""Script states: whatever happens in whatever order, the scripts take jobs through the table's states and no others,
and leave in Redis what docs/reference/keys.md says, nothing else.
"""

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from celery5.broker.calls import jobs
from celery5.broker.drivers.blocking import BlockingRedis
from celery5.broker.endpoint import Endpoint
from celery5.broker.servers.embedded import EmbeddedServer
from celery5.protocol.job.delivery import Settlement
from celery5.protocol.job.states import FINISHED, TRANSITIONS, JobState, Move, advance
from tests.redis.scripts.lives import MESSAGES, Act, Model, words

MOVES = sorted([*Move, *Act])
STEPS = [(state, move) for state, row in TRANSITIONS.items() for move in row]
"""The steps of the table. Holding a job that no worker has, and letting it go before its time, is done by hand: no
script does it yet."""


@pytest.fixture
def driver(server: EmbeddedServer) -> Iterator[BlockingRedis]:
    one = BlockingRedis(Endpoint.from_url(server.url))
    yield one
    one.close()


@st.composite
def steps(draw: st.DrawFn) -> tuple[str, str, int]:
    """A job, any move at all, and a number that says which of those to make instead that its state has, if any."""
    return draw(st.sampled_from(sorted(MESSAGES))), draw(st.sampled_from(MOVES)), draw(st.integers(-3, 9))


def likely(state: JobState) -> list[str]:
    """The moves that a job in that state has, and what else may happen to it."""
    more: dict[JobState, list[str]] = {
        JobState.EXECUTING: [Act.SETTLE_REVOKED, Act.DIE],
        JobState.DEAD: [Act.PURGE, Act.FORGET],
    }
    return [*TRANSITIONS[state], *more.get(state, [Act.FORGET] if state in FINISHED else [])]


@pytest.mark.parametrize("lane", ["", "h", "l"])
def test_the_scripts_follow_the_table_and_leave_what_they_should(driver: BlockingRedis, lane: str) -> None:
    @given(st.lists(steps(), min_size=20, max_size=60))
    @settings(max_examples=25, deadline=None)
    def lived(moves: list[tuple[str, str, int]]) -> None:
        model = Model.on(driver, lane)
        for job, move, number in moves:
            own = likely(model.lives[job].state)
            made = own[number % len(own)] if number >= 0 else move
            model.make(job, made)
            assert model.seen() == model.states(), (job, made)
            model.check_what_is_left()
        model.clear()

    lived()


def road(goal: JobState) -> list[Move]:
    """The shortest way from nothing to a state."""
    roads: dict[JobState, list[Move]] = {JobState.UNKNOWN: []}
    while goal not in roads:
        for state, way in list(roads.items()):
            for move, after in TRANSITIONS[state].items():
                roads.setdefault(after, [*way, move])
    return roads[goal]


@pytest.mark.parametrize(("state", "move"), STEPS)
@pytest.mark.parametrize("job", ["a", "b"])
@pytest.mark.parametrize("lane", ["", "h"])
def test_every_step_of_the_table_is_made(
    driver: BlockingRedis, job: str, lane: str, state: JobState, move: Move
) -> None:
    model = Model.on(driver, lane)
    for each in road(state):
        model.make(job, each)
    assert model.seen()[job] is state
    model.make(job, move)
    if (state, move) == (JobState.EXECUTING, Move.REVOKE):
        assert model.seen()[job] is JobState.EXECUTING  # until its worker lets go of it
        model.make(job, Act.SETTLE_REVOKED)
    assert model.seen()[job] is advance(state, move) is model.lives[job].state
    model.check_what_is_left()
    model.clear()


ENDS_OF_REVOKED = {
    Act.SETTLE_REVOKED: JobState.REVOKED,
    Move.RETRY: JobState.REVOKED,
    Move.RELEASE: JobState.REVOKED,
    Move.HOLD: JobState.REVOKED,
    Move.RECOVER: JobState.REVOKED,
    Act.DIE: JobState.REVOKED,
    Move.SUCCEED: JobState.SUCCESS,
    Move.BURY: JobState.REVOKED,
    Move.REJECT: JobState.REJECTED,
    Move.EXPIRE: JobState.EXPIRED,
}


@pytest.mark.parametrize(("move", "end"), ENDS_OF_REVOKED.items())
@pytest.mark.parametrize("lane", ["", "l"])
def test_a_job_that_is_revoked_while_a_worker_has_it_ends_when_that_lets_go_of_it(
    driver: BlockingRedis, lane: str, move: str, end: JobState
) -> None:
    model = Model.on(driver, lane)
    for each in (Move.SEND, Move.START, Move.REVOKE, Move.REVOKE, move):
        model.make("b", each)
        assert model.seen() == model.states()
        model.check_what_is_left()
    assert model.seen()["b"] is end
    assert model.holder == ""
    model.clear()


def test_dropping_a_second_copy_of_a_job_touches_nothing_else(driver: BlockingRedis) -> None:
    model = Model(driver)
    model.make("a", Move.SEND)
    model.driver.perform(words("XADD", model.keys.stream, "*", "job", MESSAGES["a"]))
    first, second = model.driver.perform(
        jobs.read_jobs([model.keys], model.worker, count=2, block_seconds=0.001)
    )
    drop = Settlement("drop", second.id, "", b"", 0, 0)
    assert model.driver.perform(jobs.settle(model.keys, model.worker, [drop])) == 1
    model.entries["a"] = first
    model.lives["a"].go(Move.START)
    assert model.seen() == model.states()
    model.check_what_is_left()
    model.make("a", Move.SUCCEED)
    assert model.driver.perform(jobs.settle(model.keys, model.worker, [drop])) == 0
    model.check_what_is_left()
    model.clear()
