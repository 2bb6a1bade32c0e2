"""Resource slots: who waits is asked again when something may fit, and keeps no turn once its jobs have gone."""

from typing import Any, cast

import pytest
import trio
import trio.testing

from celery5.protocol.scaling.resource_budget import LOOKAHEAD, UNIT, Needs, ResourceUse, SizedThing
from celery5.services.job.internal_queues import SharedSlots
from celery5.services.job.resource_slots import ABSENT_LIMIT, ResourceSlots, make_key

SMALL, LARGE = Needs({"vram_gb": UNIT}), Needs({"vram_gb": 4 * UNIT})


class Queue:
    """A queue of jobs, which counts how often it is asked."""

    def __init__(self, length: int = 1) -> None:
        self.length = length
        self.rechecks = 0

    def __len__(self) -> int:
        return self.length

    def recheck(self) -> None:
        self.rechecks += 1


def having_4() -> ResourceSlots:
    slots = ResourceSlots({"vram_gb": 4 * UNIT})
    slots.set_needs({"small": SMALL, "large": LARGE})
    return slots


@pytest.mark.parametrize("left", [1, 0])
async def test_a_task_keeps_its_turn_as_long_as_it_has_jobs_here(
    autojump_clock: trio.testing.MockClock, left: int
) -> None:
    slots, small = having_4(), Queue()
    slots.add_queue("small", small)
    slots.add_queue("large", Queue(left))
    slots.take("small")
    assert not slots.may_begin("large")
    for _ in range(LOOKAHEAD):
        slots.give_back(slots.take("small"))
    assert not slots.may_begin("small"), "what it needs is kept free for the large one"
    await trio.sleep(ABSENT_LIMIT + 0.1)
    small.rechecks = 0
    slots.forget_absent()
    await trio.sleep(0.1)
    assert slots.may_begin("small") == (not left)
    assert small.rechecks == (not left)


async def test_those_that_wait_behind_another_one_are_asked_again_when_it_begins() -> None:
    slots, queue = having_4(), Queue()
    slots.add_queue("small", queue)
    held = slots.take("large")
    assert not slots.may_begin("small")
    assert not slots.may_begin("large")
    slots.give_back(held)
    await trio.testing.wait_all_tasks_blocked()
    queue.rechecks = 0
    slots.take("small")
    await trio.testing.wait_all_tasks_blocked()
    assert queue.rechecks == 1


async def test_one_job_more_than_fits_is_read_while_others_have_what_it_needs() -> None:
    slots = having_4()
    assert slots.get_read_slots("small") == 4
    held = slots.take("large")
    assert slots.get_read_slots("small") == 1, "its turn comes"
    assert slots.get_read_slots("large") == 1, "the one that runs"
    slots.give_back(held)
    assert slots.get_read_slots("small") == 4


async def test_what_an_incarnation_has_opened_takes_nothing_after_its_end() -> None:
    slots = ResourceSlots({"vram_gb": 9 * UNIT})
    slots.set_needs(
        {
            name: Needs(shared=(SizedThing(make_key(name, "model"), {"vram_gb": 4 * UNIT}),))
            for name in ("one", "two")
        }
    )
    for name in ("one", "two"):
        slots.give_back(slots.take(name))
    slots.end_closings("one")
    assert slots.get_use() == {"vram_gb": ResourceUse(9, 4)}


class Incoming:
    """A job that is told what it has."""

    def assign(self, resources: object) -> None:
        self.resources = resources


@pytest.mark.parametrize("gone", ["its jobs", "its incarnation"])
async def test_what_was_reserved_is_given_back_when_nobody_takes_it(gone: str) -> None:
    resource_slots = having_4()
    slots = SharedSlots(["trio"], resource_slots=resource_slots)
    first, second = (
        slots.make_queues(lambda _job: 1.0, {"large": "trio"}, ["large"])["large"] for _ in range(2)
    )
    async with trio.open_nursery() as nursery:
        for queue in (first, second):
            assert queue.add_executors(1) == 1
            nursery.start_soon(queue.take_next)
            await trio.testing.wait_all_tasks_blocked()
            queue.put(cast("Any", Incoming()))
            await trio.testing.wait_all_tasks_blocked()
        assert len(second.items) == 1
        first.reset_executors()
        assert resource_slots.get_use()["vram_gb"].taken == 4, "reserved for the second"
        if gone == "its jobs":
            second.items.clear()
        else:
            second.reset_executors()
        await trio.testing.wait_all_tasks_blocked()
        assert resource_slots.get_use()["vram_gb"].taken == 0
        nursery.cancel_scope.cancel()
