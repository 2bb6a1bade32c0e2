"""Hand-overs: a large map and its undo, whose workers die one after another, and random runs of workers cut off."""

from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import pytest
import trio

from celery5 import chain, group
from celery5.broker.servers.embedded import EmbeddedServer
from tests.faults.workflows.application import NotedTasks
from tests.faults.workflows.crew import MOMENTS, Strikes
from tests.faults.workflows.episode import Episode
from tests.faults.workflows.stories import FAILED, Story, pairs_in_order

MEMBERS = 300
CALLS = (3, 5, 8)
"""At which of its calls to Redis a worker dies, from when it consumes. Each makes few, for many jobs at once."""


def make_large_story(tasks: NotedTasks, number: int) -> Story:
    """Return the story of a run that takes steps, maps, then fails, and undoes its steps."""
    label = number * 1000
    book, charge, doom = (tasks.tasks[name] for name in ("book", "charge", "doom"))
    members = tasks.tasks["member"].options(queue="two").map(label * 1000 + 1000 + n for n in range(MEMBERS))
    steps = [book.options(queue="two").s(n, label + 2 + n) for n in range(8)]
    workflow = (
        group(*steps, chain(charge.s(1, label + 20), charge.partial(label + 21)))
        >> members
        >> doom.s(1, label + 30)
    )

    def start(run_id: str) -> Awaitable[Any]:
        run: Awaitable[Any] = workflow.astart(id=run_id)
        return run

    return Story(number, "doomed", start, [[FAILED]], pairs_in_order(workflow.tree))


@pytest.mark.timeout(180)
def test_a_large_map_and_its_undo_are_done_once_when_workers_die_at_hand_overs(
    own_server: EmbeddedServer, tmp_path: Path
) -> None:
    strikes = Strikes([(at, MOMENTS[n % 3]) for n, at in enumerate(CALLS * 2)])
    episode = Episode(1, 1, tmp_path, own_server, strikes=lambda _rnd: strikes, make_story=make_large_story)
    outcome = trio.run(episode.play)
    assert not outcome.wrong, f"\n{outcome}"
    assert outcome.numbers["undone"] >= 10
    assert outcome.numbers["killed"] >= 4


@pytest.mark.timeout(180)
def test_random_runs_end_as_they_must_when_their_workers_are_cut_off(
    own_server: EmbeddedServer, tmp_path: Path
) -> None:
    outcome = trio.run(Episode(5, 40, tmp_path, own_server, strikes=lambda _rnd: Strikes(partitions=2)).play)
    assert not outcome.wrong, f"\n{outcome}"
