"""Random histories: whatever is killed, refused, cancelled, retried and undone, runs of workflows end as they must.

By hand, with other seeds and for longer: `python -m tests.faults.workflows --seed 7 --episodes 100`.
"""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio

from celery5 import group
from celery5.broker.servers.embedded import EmbeddedServer
from celery5.protocol.workflows.status import RunStatus
from celery5.workflows import RunState
from tests.faults.nemesis.verdict import Life, Record, Run
from tests.faults.workflows.application import NotedTasks, make_app
from tests.faults.workflows.crew import Strikes
from tests.faults.workflows.episode import Episode
from tests.faults.workflows.stories import FAILED, Story, Storyteller, pairs_in_order
from tests.faults.workflows.verdict import Quiet, RunHistory, violations

RUNS = 40
"""Runs of one episode: all kinds of stories are among them."""


@pytest.mark.timeout(180)
@pytest.mark.parametrize("seed", [2])
def test_random_runs_end_as_the_reference_says_while_workers_die_and_redis_refuses(
    own_server: EmbeddedServer, tmp_path: Path, seed: int
) -> None:
    def strikes(rnd: random.Random) -> Strikes:
        return Strikes.draw(rnd, deaths=3, refusals=4, partitions=0)

    outcome = trio.run(Episode(seed, RUNS, tmp_path, own_server, strikes=strikes).play)
    assert not outcome.wrong, f"\n{outcome}"
    assert outcome.numbers["killed"] > 1


@pytest.fixture
def tasks(tmp_path: Path) -> NotedTasks:
    return NotedTasks(make_app("history", "redis://127.0.0.1:1"), tmp_path)


def test_a_story_follows_from_its_seed_alone(tasks: NotedTasks) -> None:
    stories = [[Storyteller(tasks).make("7", number) for number in range(1, 120)] for _ in range(2)]
    assert [[story.ends, story.pause, story.mode] for story in stories[0]] == [
        [story.ends, story.pause, story.mode] for story in stories[1]
    ]
    assert len({story.mode for story in stories[0]}) == 10


# ---- the judge: each thing that may be wrong in a history that has nothing else wrong


def make_status(state: RunState, **counts: int) -> RunStatus:
    numbers: dict[str, Any] = {
        "total": 3,
        "done": 2,
        "failed": 1,
        "skipped": 0,
        "active": 0,
        "held": 0,
        "pending": 0,
    } | counts
    return RunStatus(id="r", name="book", home="one", state=state, created=0.0, ended=9.0, **numbers)


class FailedHistory:
    """A run that has failed at its third step, and was undone."""

    def __init__(self, tasks: NotedTasks) -> None:
        book, doom = tasks.tasks["book"], tasks.tasks["doom"]
        workflow = book.s(1, 1001) >> book.s(2, 1002) >> doom.s(3, 1003)
        story = Story(1, "doomed", workflow.astart, [[FAILED]], pairs_in_order(workflow.tree), tells=True)
        story.found = [FAILED]
        self.history = RunHistory(story)
        self.history.jobs = [
            Run("book/1001/5", "r~0", 1, 10, 1.0, 2.0, True),
            Run("book/1002/6", "r~2", 1, 10, 2.0, 3.0, True),
            Run("doom/1003/7", "r~4", 1, 10, 3.0, 4.0),
            Run("undo/1002/8", "r~3", 1, 10, 5.0, 6.0, True),
            Run("undo/1001/9", "r~1", 1, 10, 6.0, 7.0, True),
            Run("tell/1998/9", "r~6", 1, 11, 9.2, 9.3, True),
        ]
        self.history.quiet = [Quiet(make_status(RunState.FAILED), 9.0)]
        self.record = Record(1.0, lives=[Life("W0", 10, 0.0), Life("W1", 11, 0.0)])

    def judge(self) -> list[str]:
        """Return what is wrong."""
        self.record.runs = self.history.jobs
        return violations(self.record, [self.history])

    def change(self, at: int, **fields: Any) -> None:
        """Change one job."""
        self.history.jobs[at] = replace(self.history.jobs[at], **fields)


def _not_undone(failed: FailedHistory) -> None:
    del failed.history.jobs[4]


def _undone_in_the_wrong_order(failed: FailedHistory) -> None:
    failed.change(4, began=4.5, ended=4.8)


def _undone_by_two_jobs(failed: FailedHistory) -> None:
    failed.history.jobs.append(Run("undo/1001/9", "r~1.1", 1, 10, 7.0, 8.0, True))


def _undone_though_it_never_ended(failed: FailedHistory) -> None:
    failed.change(1, whole=False)


def _undo_that_never_ended(failed: FailedHistory) -> None:
    failed.change(4, whole=False)


def _ran_twice(failed: FailedHistory) -> None:
    failed.history.jobs.append(Run("doom/1003/7", "r~4", 1, 11, 4.0, 4.5))


def _succeeded_again_after_a_retry(failed: FailedHistory) -> None:
    failed.history.jobs.append(Run("book/1001/5", "r~0.1", 1, 11, 4.0, 4.5, True))


def _began_when_the_run_had_ended(failed: FailedHistory) -> None:
    failed.history.jobs.append(Run("step/1004/5", "r~5", 1, 11, 9.5, 9.6, True))


def _counts_that_do_not_add_up(failed: FailedHistory) -> None:
    failed.history.quiet = [Quiet(make_status(RunState.FAILED, done=1), 9.0)]


def _came_to_something_else(failed: FailedHistory) -> None:
    failed.history.story.ends = [[5]]


def _was_never_retried(failed: FailedHistory) -> None:
    failed.history.story.ends = [[FAILED], [5]]


def _undone_though_it_succeeded(failed: FailedHistory) -> None:
    failed.history.story.found = failed.history.story.ends[0] = [5]
    del failed.history.jobs[3]


def _without_on_failure(failed: FailedHistory) -> None:
    del failed.history.jobs[5]


FAULTS: dict[Callable[[FailedHistory], None], str] = {
    _not_undone: "succeeded and was not undone",
    _undone_in_the_wrong_order: "1001 was undone before 1002",
    _undone_by_two_jobs: "was undone by 2 jobs",
    _undone_though_it_never_ended: "was undone and had not succeeded",
    _undo_that_never_ended: "the undo of 1001 has not ended",
    _ran_twice: "double: ",
    _succeeded_again_after_a_retry: "succeeded 2 times",
    _began_when_the_run_had_ended: "1 jobs began when it was FAILED",
    _counts_that_do_not_add_up: "its counts do not add up",
    _came_to_something_else: "came to 'FAILED', not 5",
    _was_never_retried: "has come to ['FAILED'] only",
    _undone_though_it_succeeded: "undone, and has not failed",
    _without_on_failure: "on_failure was called by 0 jobs for 1 failures",
}


def test_a_history_with_nothing_wrong_is_found_to_be_so(tasks: NotedTasks) -> None:
    assert FailedHistory(tasks).judge() == []


@pytest.mark.parametrize("spoil", FAULTS, ids=lambda spoil: spoil.__name__.strip("_"))
def test_each_thing_that_is_wrong_in_a_history_is_found(
    tasks: NotedTasks, spoil: Callable[[FailedHistory], None]
) -> None:
    failed = FailedHistory(tasks)
    spoil(failed)
    found = failed.judge()
    assert [fault for fault in found if FAULTS[spoil] in fault]


def test_a_job_that_ended_on_a_killed_worker_may_run_again(tasks: NotedTasks) -> None:
    failed = FailedHistory(tasks)
    failed.record.lives[0] = Life("W0", 10, 0.0, ended=8.0, killed=True, code=-9)
    failed.history.jobs.append(Run("doom/1003/7", "r~4", 1, 11, 7.5, 7.6))
    assert failed.judge() == []


def test_steps_in_order_are_known_through_groups_and_chains(tasks: NotedTasks) -> None:
    book = tasks.tasks["book"]
    workflow = group(book.s(1, 1), book.s(1, 2)) >> (book.s(1, 3) >> book.s(1, 4))
    assert sorted(pairs_in_order(workflow.tree)) == [(1, 3), (1, 4), (2, 3), (2, 4), (3, 4)]
