"""Script states: whatever happens in whatever order, the scripts take jobs through the table's states and no others,
and leave in Redis what docs/reference/keys.md says, nothing else.
"""

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from celery5.broker.calls import events as events_calls
from celery5.broker.calls import jobs
from celery5.broker.drivers.blocking import BlockingRedis
from celery5.broker.endpoint import Endpoint
from celery5.broker.keys import EVENTS, Keys
from celery5.broker.servers.embedded import EmbeddedServer
from celery5.protocol.job.delivery import Settlement
from celery5.protocol.job.states import FINISHED, TRANSITIONS, JobState, Move, advance
from tests.house.lua import find_scripts_that_move_jobs
from tests.night import examples
from tests.redis.scripts.job_model import JOBS, LOCKS, Act, QueueModel, make_call

MOVES = sorted([*Move, *Act])
STEPS = [(job, state, move) for job in ("a", "b") for state, row in TRANSITIONS.items() for move in row
         if not (LOCKS[job] and (state, move) == (JobState.UNKNOWN, Move.HOLD))]  # fmt: skip
"""Every move of every state, with a job without a key and one with a key. No script holds a new job that has a key."""


@pytest.fixture
def driver(server: EmbeddedServer) -> Iterator[BlockingRedis]:
    one = BlockingRedis(Endpoint.from_url(server.url))
    yield one
    one.close()


@st.composite
def steps(draw: st.DrawFn) -> tuple[str, str, int]:
    """Draw a job, a move, and a number that says which move of the job's state to make instead, if any."""
    return draw(st.sampled_from(sorted(JOBS))), draw(st.sampled_from(MOVES)), draw(st.integers(-3, 9))


def likely(state: JobState) -> list[str]:
    """Return the moves of a state, and what else may happen to a job in it."""
    more: dict[JobState, list[str]] = {
        JobState.UNKNOWN: [Act.FIRE, Act.DELIVER],
        JobState.EXECUTING: [Act.WAIT, Act.KEEP, Act.SETTLE_REVOKED, Act.DIE],
        JobState.DEAD: [Act.PURGE, Act.FORGET],
    }
    return [*TRANSITIONS[state], *more.get(state, [Act.FORGET] if state in FINISHED else [])]


@pytest.mark.parametrize("lane", ["", "h", "l"])
def test_the_scripts_follow_the_table_and_leave_what_they_should(driver: BlockingRedis, lane: str) -> None:
    @given(st.lists(steps(), min_size=20, max_size=60))
    @settings(max_examples=examples(25), deadline=None)
    def play(moves: list[tuple[str, str, int]]) -> None:
        model = QueueModel(driver, lane)
        for job, move, number in moves:
            likely_moves = likely(model.jobs[job].state)
            made = likely_moves[number % len(likely_moves)] if number >= 0 else move
            model.make(job, made)
            assert model.seen() == model.states(), (job, made)
            model.check_what_is_left()
        model.clear()

    play()


def road(goal: JobState, move: Move) -> list[str]:
    """Return the shortest way from UNKNOWN to a state. Of the ways to HELD, the one that allows `move`."""
    if goal is JobState.HELD:
        return [Move.SEND, Move.START, Act.WAIT if move is Move.RELEASE else Move.HOLD]
    roads: dict[JobState, list[str]] = {JobState.UNKNOWN: []}
    while goal not in roads:
        for state, way in list(roads.items()):
            for step, after in TRANSITIONS[state].items():
                roads.setdefault(after, [*way, step])
    return roads[goal]


@pytest.mark.parametrize(("job", "state", "move"), STEPS)
@pytest.mark.parametrize("lane", ["", "h"])
def test_every_step_of_the_table_is_made(
    driver: BlockingRedis, job: str, lane: str, state: JobState, move: Move
) -> None:
    model = QueueModel(driver, lane)
    for step in road(state, move):
        model.make(job, step)
    assert model.seen()[job] is state
    model.make(job, move)
    if (state, move) == (JobState.EXECUTING, Move.REVOKE):
        assert model.seen()[job] is JobState.EXECUTING  # until its worker lets go of it
        model.make(job, Act.SETTLE_REVOKED)
    after = advance(state, move)
    if (state, move) == (JobState.HELD, Move.RELEASE):  # one script releases the job and gives it to a worker
        after = advance(after, Move.START)
    assert model.seen()[job] is after is model.jobs[job].state
    model.check_what_is_left()
    model.clear()


WAYS: dict[str, tuple[str, list[str]]] = {
    "publish": ("a", [Move.SEND, Move.START, Move.SUCCEED]),
    "schedule": ("a", [Move.SCHEDULE, Move.FALL_DUE, Move.START, Move.RETRY]),
    "publish unique": ("b", [Move.SEND, Move.START, Move.RECOVER, Move.START, Move.REVOKE, Move.RETRY]),
    "fire": ("b", [Act.FIRE, Act.FIRE, Move.START, Move.FAIL_FOR_GOOD, Move.REPLAY, Move.START, Act.DIE, Act.PURGE]),
    "deliver": ("a", [Act.DELIVER, Act.DELIVER, Act.WAIT, Move.REVOKE]),
    "waiting list": ("a", [Move.HOLD, Move.HOLD, Move.RELEASE, Move.RETRY, Move.FALL_DUE, Move.START, Act.WAIT]),
    "settled": ("a", [Move.HOLD, Move.RELEASE, Move.SUCCEED, Move.RELEASE]),
    "given back": ("a", [Move.HOLD, Move.RELEASE, Move.RELEASE, Move.FALL_DUE]),
    "revoked": ("a", [Move.HOLD, Move.RELEASE, Move.REVOKE, Act.WAIT, Move.RELEASE]),
    "worker died": ("a", [Move.HOLD, Move.RELEASE, Move.RECOVER, Move.START, Move.EXPIRE]),
    "kept for other code": ("a", [Move.SEND, Move.START, Act.KEEP, Move.RELEASE, Act.KEEP, Move.RELEASE, Move.RETRY]),
    "kept and due": ("b", [Move.SEND, Move.START, Act.KEEP, Move.FALL_DUE, Move.START, Move.HOLD, Move.FALL_DUE]),
    "kept and limited": ("a", [Move.SEND, Move.START, Act.KEEP, Move.RELEASE, Act.WAIT, Move.RELEASE, Move.SUCCEED]),
    "kept and revoked": ("a", [Move.SEND, Move.START, Act.KEEP, Move.REVOKE]),
    "kept, and its worker died": ("a", [Move.SEND, Move.START, Act.KEEP, Move.RELEASE, Move.RECOVER, Move.START]),
    "expired while waiting": ("d", [Move.HOLD, Move.FALL_DUE, Move.START, Move.EXPIRE]),
    "expires and is admitted": ("d", [Move.HOLD, Move.RELEASE, Act.WAIT, Move.RELEASE, Move.SUCCEED]),
}  # fmt: skip
"""Ways that a job goes through the scripts, each of which moves its place."""


@pytest.mark.parametrize(("job", "moves"), WAYS.values(), ids=list(WAYS))
@pytest.mark.parametrize("lane", ["", "l"])
def test_a_job_goes_this_way(driver: BlockingRedis, lane: str, job: str, moves: list[str]) -> None:
    model = QueueModel(driver, lane)
    for move in moves:
        model.make(job, move)
        assert model.seen() == model.states(), move
        model.check_what_is_left()
    model.clear()


def test_a_job_for_one_worker_finds_no_group_on_a_new_lane(driver: BlockingRedis) -> None:
    model = QueueModel(driver, "h")
    model.make("a", Move.SEND)
    model.make("d", Act.DELIVER)
    assert model.seen() == model.states()
    assert model.jobs["d"].state is model.jobs["a"].state is JobState.EXECUTING
    model.check_what_is_left()
    model.clear()


def play_event(driver: BlockingRedis) -> set[str]:
    """Keep an event that nobody wants, and send it again to a subscription. Return the scripts that were run."""
    app = Keys(f"states-{id(driver)}")
    model = QueueModel(driver, app=app)
    model.keys = keys = app.for_queue(EVENTS)
    model.join()
    model.make("a", Move.SEND)
    for verb, after in (("keep", JobState.UNKNOWN), ("done", JobState.UNKNOWN)):
        model.make("a", Move.START)
        assert model.seen()["a"] is JobState.EXECUTING
        outcome = events_calls.EventOutcome(verb, model.entries["a"].id, "a", "s", model.messages["a"])
        finish = events_calls.finish_events(
            app, keys, model.worker, [outcome], known_state=b"0", retention=60
        )  # fmt: skip
        assert model.perform(finish) == [1]
        assert model.seen()["a"] is after
        model.jobs["a"].state = after
        model.check_what_is_left()
        if verb == "keep":
            model.perform(events_calls.declare_subscriptions(app, [("n", b"v")], ["s"], ttl=60, catch_up=9))
            model.jobs["a"].make(Move.SEND)
            assert model.seen() == model.states()
            model.check_what_is_left()
    model.clear()
    model.keys = app.for_queue("mail")
    model.clear()
    model.perform(make_call("DEL", app.subscriptions, app.subscription_deadlines, app.unclaimed_events))
    return model.scripts


def test_every_script_that_moves_a_job_is_played_against_the_table(driver: BlockingRedis) -> None:
    played = play_event(driver)
    for job, moves in WAYS.values():
        model = QueueModel(driver)
        for move in moves:
            model.make(job, move)
        played |= model.scripts
        model.clear()
    moving = find_scripts_that_move_jobs()
    assert {"publish", "settle", "settle_limited", "admit", "recover", "revoke", "fire_schedule"} <= moving
    # Runs of workflows are played by the random ones, which know what they come to.
    assert sorted(moving - played - {"advance"}) == []


ENDS_OF_REVOKED = {
    Act.SETTLE_REVOKED: JobState.REVOKED,
    Move.RETRY: JobState.REVOKED,
    Move.RELEASE: JobState.REVOKED,
    Move.HOLD: JobState.REVOKED,
    Act.KEEP: JobState.REVOKED,
    Move.RECOVER: JobState.REVOKED,
    Act.DIE: JobState.REVOKED,
    Move.SUCCEED: JobState.SUCCESS,
    Move.FAIL_FOR_GOOD: JobState.REVOKED,
    Move.REJECT: JobState.REJECTED,
    Move.EXPIRE: JobState.EXPIRED,
}


@pytest.mark.parametrize(("move", "end"), ENDS_OF_REVOKED.items())
@pytest.mark.parametrize("lane", ["", "l"])
def test_revoked_job_ends_when_its_worker_releases_it(
    driver: BlockingRedis, lane: str, move: str, end: JobState
) -> None:
    model = QueueModel(driver, lane)
    for step in (Move.SEND, Move.START, Move.REVOKE, Move.REVOKE, move):
        model.make("b", step)
        assert model.seen() == model.states()
        model.check_what_is_left()
    assert model.seen()["b"] is end
    assert model.holder == ""
    model.clear()


def test_dropping_a_second_copy_of_a_job_touches_nothing_else(driver: BlockingRedis) -> None:
    model = QueueModel(driver)
    model.make("a", Move.SEND)
    model.driver.perform(make_call("XADD", model.keys.stream, "*", "job", model.messages["a"]))
    first, second = model.driver.perform(
        jobs.read_jobs([model.keys], model.worker, count=2, block_seconds=0.001)
    )
    drop = Settlement("drop", second.id, "", b"", 0, 0)
    assert model.driver.perform(jobs.settle(model.keys, model.worker, [drop])) == 1
    model.entries["a"] = first
    model.jobs["a"].make(Move.START)
    assert model.seen() == model.states()
    model.check_what_is_left()
    model.make("a", Move.SUCCEED)
    assert model.driver.perform(jobs.settle(model.keys, model.worker, [drop])) == 0
    model.check_what_is_left()
    model.clear()
