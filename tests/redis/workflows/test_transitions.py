"""Transitions of runs: the scripts follow the table of `transitions.py`, and change nothing that it does not name."""

from collections.abc import Iterator
from typing import Any, cast, get_args

import pytest

from celery5.broker.drivers.blocking import BlockingRedis
from celery5.broker.endpoint import Endpoint
from celery5.broker.keys import Keys, QueueKeys
from celery5.broker.servers.embedded import EmbeddedServer
from celery5.broker.wall_clock import WALL_CLOCK
from celery5.protocol.workflows.plan import Node
from celery5.protocol.workflows.status import NODE_STATES, RUN_STATES
from celery5.protocol.workflows.transitions import (
    LIVE_STEPS,
    RUN_STEPS,
    STOPPED_STEPS,
    Kind,
    NodeMove,
    NodeStep,
    NodeWord,
    Policy,
    RunCondition,
    RunMove,
    find_step,
)
from tests.redis.workflows.transition_model import ENDS, LIFE, TRIED_IS_DUE, Look, NodeTrial, RunTrial

KINDS = cast("tuple[Kind, ...]", get_args(Kind))
POLICIES = cast("tuple[Policy, ...]", get_args(Policy))
NO_JOB = {*ENDS, NodeMove.RETURN}
NEVER: dict[Kind, set[NodeMove]] = {
    "job": {NodeMove.RETURN},
    "member": {NodeMove.RETURN},
    "later": {NodeMove.SUCCEED},
    "child": NO_JOB - {NodeMove.SUCCEED, NodeMove.DIE, NodeMove.REVOKE},
    "sleep": NO_JOB,
    "wait": NO_JOB,
    "undo": set(NodeMove) - ENDS.keys() - {NodeMove.STOP, NodeMove.RETRY},
}
"""What cannot happen to a node of each kind. A child succeeds, fails or is cancelled."""
MOVES: dict[Kind, tuple[NodeMove, ...]] = {
    kind: tuple(move for move in NodeMove if move not in NEVER[kind]) for kind in KINDS
}
ALONE = {*NO_JOB, NodeMove.RETRY}
"""What happens to the node that is tried only: what else changes a run is told to others of its nodes, too."""
Place = tuple[NodeWord, bool]
"""The state of a node, and whether its run is live."""
Way = tuple[NodeMove, ...]
"""What happens to a node, one after another."""


@pytest.fixture(scope="module")
def scripts(server_binary: str | None) -> Iterator[BlockingRedis]:
    """A connection to a server whose time the tests set."""
    with EmbeddedServer.start(server_binary) as server:
        WALL_CLOCK.set_virtual_time(0.0)
        driver = BlockingRedis(Endpoint.from_url(server.url))
        try:
            yield driver
        finally:
            driver.close()
            WALL_CLOCK.set_virtual_time(None)


def find_ways(kind: Kind, policy: Policy) -> dict[Place, Way]:
    """Return the shortest way to each place that a node of that kind gets to, by the table."""
    ways: dict[Place, Way] = {(NodeWord.NONE, True): ()}
    todo = list(ways)
    while todo:
        word, is_live = place = todo.pop(0)
        for move in MOVES[kind]:
            step = find_step(kind, is_live, word, move, policy)
            if not can_come(kind, word, move) or not (step or move is NodeMove.STOP):
                continue
            fails = move is NodeMove.STOP or (step is not None and step.fails_run)
            after = (step.after if step else word, (is_live or move is NodeMove.RETRY) and not fails)
            if after not in ways:
                ways[after] = (*ways[place], move)
                todo.append(after)
    return ways


def can_come(kind: Kind, word: NodeWord, move: NodeMove) -> bool:
    """Whether that can happen at all to a node in that state."""
    if move is NodeMove.FALL_DUE:  # until it has begun, the time that comes is that of the node before it
        return word not in (NodeWord.NONE, NodeWord.AGAIN)
    # What has not been sent does not end: the script does not ask.
    return kind not in ("member", "child") or move not in ENDS or word not in _NOT_SENT


_NOT_SENT = (NodeWord.NONE, NodeWord.SKIPPED, NodeWord.CUT, NodeWord.AGAIN)


@pytest.mark.parametrize(
    ("kind", "policy"),
    [
        (kind, policy)
        for kind in KINDS
        for policy in (POLICIES if kind not in ("sleep", "undo") else POLICIES[:1])
    ],
)
def test_whatever_happens_to_a_node_the_script_follows_the_table(
    scripts: BlockingRedis, kind: Kind, policy: Policy
) -> None:
    keys, wrong = Keys(f"trial-{kind}-{policy}").for_queue("default"), list[str]()
    for (word, is_live), way in find_ways(kind, policy).items():
        trial: NodeTrial | None = None
        # First what changes nothing: one run will do for all of that.
        for move in sorted(MOVES[kind], key=lambda move: bool(find_step(kind, is_live, word, move, policy))):
            if not can_come(kind, word, move):
                continue
            if trial is None:
                trial = NodeTrial(scripts, keys, kind, policy)
                for happening in way:
                    trial.make(happening)
            before = trial.look()
            assert (before.word, before.run == "live") == (word, is_live), way
            trial.make(move)
            after, step = trial.look(), find_step(kind, is_live, word, move, policy)
            problems = compare(kind, move, before, after, step)
            wrong += [
                f"{word}, {'live' if is_live else 'stopped'}, {move}: {problem}" for problem in problems
            ]
            if after != before or move not in ALONE:
                trial = None
    assert not wrong, "\n".join(wrong)


def compare(kind: Kind, move: NodeMove, before: Look, after: Look, step: NodeStep | None) -> Iterator[str]:
    """Yield what is not as the table says."""
    is_live = before.run == "live"
    is_retried = move is NodeMove.RETRY and not is_live and before.counts["active"] == 0 and kind != "undo"
    run = "live" if is_retried else before.run
    if is_live and (move is NodeMove.STOP or (step and step.fails_run)):
        run = "expired" if move is NodeMove.STOP else "failed"
    if kind == "undo" and step and NodeWord.ACTIVE in (before.word, after.word):
        run = "undoing expired" if is_live else "expired"
    expected = (step.after if step else before.word, dict(step.counts) if step else {}, run)
    changes = {name: after.counts[name] - before.counts[name] for name in before.counts}
    seen = (after.word, {name: by for name, by in changes.items() if by}, after.run)
    if seen != expected:
        yield f"{seen}, not {expected}"
    if step is None and move in ALONE and not is_retried:
        for name in after.fields | before.fields:
            # A purge of which the run hears too early is noted: what comes later is not held then.
            is_note = name.startswith("purged:")
            if not is_note and after.fields.get(name) != before.fields.get(name):
                yield f"{name} has changed"
    is_begun = after.word is NodeWord.ACTIVE and (before.word is not NodeWord.ACTIVE or is_retried)
    if after.sent - before.sent != (is_begun and not (kind == "child" and is_retried)):  # a child goes on
        yield f"{after.sent - before.sent} jobs were sent"
    if min(after.counts.values()) < 0:
        yield f"{after.counts}"


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", ["job", "later", "member"])
def test_a_job_that_ended_before_a_retry_changes_nothing_when_it_ends_again(
    scripts: BlockingRedis, kind: Kind, policy: Policy
) -> None:
    keys, tried = Keys(f"earlier-{kind}-{policy}").for_queue("default"), 0
    for place, way in find_ways(kind, policy).items():
        if NodeMove.RETRY not in way:
            continue
        trial = NodeTrial(scripts, keys, kind, policy)
        for happening in way:
            trial.make(happening)
        before = trial.look()
        for move in ENDS if trial.generation else ():
            trial.end_earlier(move)
            assert trial.look() == before, (place, move)
            tried += 1
    assert tried


@pytest.mark.parametrize("kind", ["job", "child", "later", "member"])
@pytest.mark.parametrize("order", [(NodeMove.REVOKE, NodeMove.STOP), (NodeMove.STOP, NodeMove.REVOKE)])
def test_a_retry_does_not_send_again_what_has_lost_in_a_first(
    scripts: BlockingRedis, kind: Kind, order: tuple[NodeMove, NodeMove]
) -> None:
    trial = NodeTrial(scripts, Keys(f"lost-{kind}").for_queue("default"), kind, "fail")
    for happening in (NodeMove.BEGIN, NodeMove.DECIDE, *order):
        trial.make(happening)
    before = trial.look()
    assert (before.word, before.run, before.counts["active"]) == (NodeWord.CUT, "expired", 0)
    trial.make(NodeMove.RETRY)
    after = trial.look()
    assert (after.word, after.run, after.sent) == (NodeWord.CUT, "live", before.sent)
    assert after.counts == before.counts


def test_each_row_of_the_table_is_played() -> None:
    reached = {
        (kind, is_live, word, move)
        for kind in KINDS
        for policy in POLICIES
        for word, is_live in find_ways(kind, policy)
        for move in MOVES[kind]
        if find_step(kind, is_live, word, move, policy)
    }
    rows = {
        (kind, is_live, *pair)
        for is_live, table in ((True, LIVE_STEPS), (False, STOPPED_STEPS))
        for kind, steps in table.items()
        for pair in steps
    }
    assert rows - reached == set()


def test_the_table_has_the_states_that_a_run_shows_and_no_others() -> None:
    assert {word.value for word in NodeWord} - {"none"} == set(NODE_STATES)
    states = {state for state, _ in RUN_STEPS} | {
        after for row in RUN_STEPS.values() for after in row.values()
    }
    assert states == set(RUN_STATES)


class WholeRun(RunTrial):
    """A run with a job that may have an undo task, a wait that may fail, and one that keeps it live."""

    def __init__(self, redis: BlockingRedis, keys: QueueKeys, condition: RunCondition) -> None:
        super().__init__(redis, keys)
        has_undo = condition in (RunCondition.MAY_UNDO, RunCondition.UNDO)
        template = [',"task":"tried","args":[],"kwargs":{}']
        nodes = [
            Node(kind="wait", name="open", feeds=[4], hidden=True),
            Node(kind="job", task="tried", feeds=[4], template=template, undo=3 if has_undo else None),
            Node(kind="wait", name="tried", feeds=[4], hidden=True, seconds=TRIED_IS_DUE / 1000),
            Node(kind="job", task="undo", name="undo", template=template, hidden=True),
            Node(kind="end", needs=3, hidden=True),
        ]
        head: dict[str, Any] = {"undo": True} if has_undo else {}
        self.start(nodes, [0, 1, 2], (), **head)
        if condition in (RunCondition.QUIET, RunCondition.UNDO):
            self.tell("one", f"{self.id}~1", "1")

    def happen(self, move: RunMove) -> None:
        """Let something happen to it."""
        match move:
            case RunMove.END:
                self.signal("open")
                self.signal("tried")
            case RunMove.FAIL:
                self.pass_time(TRIED_IS_DUE)
            case RunMove.CANCEL:
                self.tell("cancel", self.id)
            case RunMove.EXPIRE:
                self.pass_time(LIFE)
            case RunMove.LAST_JOB:
                self.tell("end", f"{self.id}~1", "REVOKED", '{"v":1}')
            case RunMove.UNDONE:
                self.tell("end", f"{self.id}~3", "SUCCESS", "null")
            case RunMove.RETRY:
                self.tell("retry", self.id, 0)

    @property
    def state(self) -> str:
        """Its state as Redis keeps it."""
        return self.read_fields()["state"].decode()


NEXT_CONDITION = {RunMove.LAST_JOB: RunCondition.QUIET, RunMove.UNDONE: RunCondition.UNDONE}
POSSIBLE = {
    RunMove.END: {RunCondition.QUIET, RunCondition.UNDO, RunCondition.UNDONE},
    RunMove.LAST_JOB: {RunCondition.ACTIVE, RunCondition.MAY_UNDO},
    RunMove.UNDONE: {RunCondition.UNDO},
}
"""In which conditions that can happen; what is not named may in all."""


def find_runs(start: RunCondition) -> dict[tuple[str, RunCondition], tuple[RunMove, ...]]:
    """Return the shortest way to each state of a run that begins in a condition, and to the condition there."""
    ways: dict[tuple[str, RunCondition], tuple[RunMove, ...]] = {("live", start): ()}
    todo = list(ways)
    while todo:
        state, condition = place = todo.pop(0)
        for move in RunMove:
            after = find_state(state, move, condition)
            new = (after, NEXT_CONDITION.get(move, condition))
            is_known = new in ways or move is RunMove.RETRY  # then its job runs in another generation
            if can_happen(state, move, condition) and not is_known:
                ways[new] = (*ways[place], move)
                todo.append(new)
    return ways


def find_state(state: str, move: RunMove, condition: RunCondition) -> str:
    """Return the state of a run after a move, by the table."""
    return RUN_STEPS.get((state, move), {}).get(condition, state)


def can_happen(state: str, move: RunMove, condition: RunCondition) -> bool:
    """Whether that can happen to a run at all."""
    if move is RunMove.UNDONE and not state.startswith("undoing"):
        return False
    # The job is tried in its first generation only, in which it runs once.
    if move is RunMove.LAST_JOB and state == "live":
        return False
    return condition in POSSIBLE.get(move, RunCondition)


@pytest.mark.parametrize(
    "start", [condition for condition in RunCondition if condition is not RunCondition.UNDONE]
)
def test_whatever_happens_to_a_run_the_script_follows_the_table(
    scripts: BlockingRedis, start: RunCondition
) -> None:
    keys, wrong = Keys(f"runs-{start.name.lower()}").for_queue("default"), list[str]()
    for (state, condition), way in find_runs(start).items():
        for move in RunMove:
            if not can_happen(state, move, condition):
                continue
            run = WholeRun(scripts, keys, start)
            for step in way:
                run.happen(step)
            before = run.read_fields()
            assert before["state"].decode() == state, way
            run.happen(move)
            expected = find_state(state, move, condition)
            if run.state != expected:
                wrong.append(f"{state}, {condition}, {move}: {run.state}, not {expected}")
            is_other = (
                expected == state and move not in POSSIBLE and not (state == "live" and move is RunMove.FAIL)
            )
            if is_other and run.read_fields() != before:
                wrong.append(f"{state}, {condition}, {move}: it has changed")
    assert not wrong, "\n".join(wrong)


def test_each_row_of_the_table_of_runs_is_played() -> None:
    reached = {
        (state, move, condition)
        for start in RunCondition
        for state, condition in find_runs(start)
        for move in RunMove
        if can_happen(state, move, condition)
    }
    rows = {(state, move, condition) for (state, move), row in RUN_STEPS.items() for condition in row}
    assert rows - reached == set()
