"""Shared queues: several lives of one process run no more jobs together than one would, and none of them starves."""

import random
from collections import Counter
from typing import Any, cast

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from celery5.services.job.internal_queues import InternalTasksQueue, SharedSlots
from celery5.services.job.thread_load import ThreadLoad


class Crew:
    """Executors of one life, who note what they run."""

    def __init__(self, slots: SharedSlots, ran: list[str], running: list[str]) -> None:
        # Of all its jobs.
        self.weight = 1.0
        self.queue: InternalTasksQueue = slots.make_queues(lambda _job: self.weight)["trio"]
        self._ran = ran
        self._running = running

    async def work(self, how_long: float) -> None:
        """One executor, until it is one too many."""
        while (job := cast("str | None", await self.queue.take_next())) is not None:
            self._running.append(job)
            await trio.sleep(how_long)
            self._running.remove(job)
            self._ran.append(job)

    def put(self, *jobs: str) -> None:
        """Jobs come."""
        for job in jobs:
            self.queue.put(cast("Any", job))

    def begin(self, nursery: trio.Nursery, count: int, how_long: float = 1.0) -> None:
        """So many executors come."""
        for _ in range(self.queue.add_executors(count)):
            nursery.start_soon(self.work, how_long)


@pytest.mark.parametrize("seed", range(20))
async def test_never_more_run_than_there_are_slots_and_all_are_run(
    seed: int, autojump_clock: MockClock
) -> None:
    dice, slots = random.Random(seed), SharedSlots(["trio"])
    ran, running, most = list[str](), list[str](), 0
    crews = [Crew(slots, ran, running) for _ in range(3)]
    async with trio.open_nursery() as nursery:
        for crew in crews:
            crew.begin(nursery, 2, dice.choice([0.1, 1.0]))
        sent = 0
        for _ in range(60):
            for _ in range(dice.randrange(3)):
                dice.choice(crews).put(f"job {sent}")
                sent += 1
            await trio.sleep(dice.choice([0.0, 0.1, 0.7]))
            most = max(most, len(running))
        await trio.sleep(1000)
        assert len(ran) == sent
        nursery.cancel_scope.cancel()
    assert most == 2


async def test_who_was_turned_away_is_next(autojump_clock: MockClock) -> None:
    slots = SharedSlots(["trio"])
    ran = list[str]()
    full, other = Crew(slots, ran, []), Crew(slots, ran, [])
    async with trio.open_nursery() as nursery:
        full.begin(nursery, 1)
        other.begin(nursery, 1)
        full.put(*["full"] * 50)
        await trio.sleep(2.5)
        other.put("other", "other")
        await trio.sleep(4)
        assert ran.count("other") == 2
        nursery.cancel_scope.cancel()


async def test_the_slots_of_a_life_that_has_ended_are_free(autojump_clock: MockClock) -> None:
    slots = SharedSlots(["trio"])
    ran = list[str]()
    ended, other = Crew(slots, ran, []), Crew(slots, ran, [])
    async with trio.open_nursery() as nursery:
        other.begin(nursery, 1)
        async with trio.open_nursery() as inner:
            ended.begin(inner, 1, 1000)
            ended.put("never ends")
            await wait_all_tasks_blocked()
            other.put("other")
            await trio.sleep(5)
            assert ran == []
            inner.cancel_scope.cancel()
        ended.queue.reset_executors()
        await trio.sleep(5)
        assert ran == ["other"]
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("count", [1, 3])
async def test_slots_go_by_the_weights_of_jobs_while_they_have_any(
    count: int, autojump_clock: MockClock
) -> None:
    slots = SharedSlots(["trio"])
    ran = list[str]()
    light, heavy = Crew(slots, ran, []), Crew(slots, ran, [])
    light.weight = 0.25
    async with trio.open_nursery() as nursery:
        for crew in (light, heavy):
            crew.begin(nursery, count)
        light.put(*["light"] * 200)
        heavy.put(*["heavy"] * 200)
        await trio.sleep(100.5 / count)
        assert abs(ran.count("light") - 20) <= 3
        assert len(ran) >= 98
        ran.clear()
        light.weight = 1.0
        await trio.sleep(40 / count)
        assert 0.3 <= ran.count("light") / len(ran) <= 0.7
        nursery.cancel_scope.cancel()


async def test_only_task_has_all_slots_and_owes_nothing_later(
    autojump_clock: MockClock,
) -> None:
    slots = SharedSlots(["trio"])
    ran = list[str]()
    light, heavy = Crew(slots, ran, []), Crew(slots, ran, [])
    light.weight = 0.1
    async with trio.open_nursery() as nursery:
        for crew in (light, heavy):
            crew.begin(nursery, 2)
        light.put(*["light"] * 100)
        await trio.sleep(20.5)
        assert ran.count("light") == 40
        heavy.put(*["heavy"] * 100)
        await trio.sleep(40)
        assert 6 <= ran.count("light") - 40 <= 12
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("seed", range(20))
async def test_whatever_the_weights_all_are_run_and_none_idles(seed: int, autojump_clock: MockClock) -> None:
    dice, slots = random.Random(seed), SharedSlots(["trio"])
    ran = list[str]()
    running = list[str]()
    crews = [Crew(slots, ran, running) for _ in range(3)]
    async with trio.open_nursery() as nursery:
        for crew in crews:
            crew.begin(nursery, 2)
        for number in range(60):
            dice.choice(crews).weight = dice.choice([0.01, 0.3, 1.0])
            dice.choice(crews).put(f"job {number}")
            if number % 9 == 8:
                crew = dice.choice(crews)
                crew.queue.remove_executors(1)
                crew.begin(nursery, 1)
            await trio.sleep(dice.choice([0.0, 0.1, 0.7]))
            await wait_all_tasks_blocked()
            waiting = sum(len(runner.queue) for runner in crews)
            assert len(running) == 2 or not waiting
            assert len(running) <= 2
        await trio.sleep(1000)
        assert len(ran) == 60
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("seed", range(20))
async def test_tasks_with_slots_of_their_own_stay_within_them_and_their_kind(
    autojump_clock: MockClock, seed: int
) -> None:
    """Two incarnations share six slots of a kind; of these its task `a` has three at most, and one is kept for it."""
    dice, slots = random.Random(seed), SharedSlots(["trio"])
    inside, most, done = Counter[str](), Counter[str](), Counter[str]()
    incarnations = [slots.make_queues(lambda _job: 0.5 if seed % 2 else 1.0, {"a": "trio"}) for _ in range(2)]

    async def execute(name: str, queue: InternalTasksQueue) -> None:
        while (await queue.take_next()) is not None:
            inside[name] += 1
            most[name] = max(most[name], inside[name])
            most["all"] = max(most["all"], inside.total())
            await trio.sleep(dice.random() / 10)
            inside[name] -= 1
            done[name] += 1

    async with trio.open_nursery() as nursery:
        for queues in incarnations:
            queues["a"].keep_slots(1)
            for name, count in (("trio", 6), ("a", 3)):
                for _ in range(queues[name].add_executors(count)):
                    nursery.start_soon(execute, name, queues[name])
        for number in range(300):
            name = dice.choice(("trio", "trio", "a"))
            dice.choice(incarnations)[name].put(cast("Any", f"job {number}"))
            if dice.random() < 0.3:
                await trio.sleep(dice.random() / 20)
        with trio.fail_after(600):
            while done.total() < 300:
                await trio.sleep(0.01)
        nursery.cancel_scope.cancel()
    assert most["a"] <= 3
    assert most["trio"] <= 5
    assert most["all"] <= 6


class Computing:
    """A job of the task `name`."""

    def __init__(self, name: str) -> None:
        self.command = self
        self.task = name


@pytest.mark.parametrize("has_own_budget", [False, True])
async def test_a_job_in_a_thread_begins_when_what_runs_computes_less(
    has_own_budget: bool, autojump_clock: MockClock
) -> None:
    load = ThreadLoad()
    load.limit(1)
    slots = SharedSlots(["thread"], load)
    queues = slots.make_queues(lambda _job: 1.0, {"own": "thread"} if has_own_budget else {})
    first = queues["own"] if has_own_budget else queues["thread"]
    began, ends = list[str](), trio.Event()

    async def work(queue: InternalTasksQueue) -> None:
        while (job := await queue.take_next()) is not None:
            began.append(cast("Any", job).task)
            await ends.wait()

    async with trio.open_nursery() as nursery:
        for queue in queues.values():
            for _ in range(queue.add_executors(5)):
                nursery.start_soon(work, queue)
        first.put(cast("Any", Computing("computes")))
        await wait_all_tasks_blocked()
        for _ in range(3):
            queues["thread"].put(cast("Any", Computing("waits")))
        await wait_all_tasks_blocked()
        assert began == ["computes"]  # nothing is known of the other task: it may compute, too
        load.shares.observe("waits", cpu=0.001, wall=0.1, process_cpu=0.002)
        load.recheck()
        await wait_all_tasks_blocked()
        assert began == ["computes", "waits", "waits", "waits"]
        assert load.count() == 4
        queues["thread"].put(cast("Any", Computing("computes")))
        await wait_all_tasks_blocked()
        assert began.count("computes") == 1
        ends.set()
        await wait_all_tasks_blocked()
        assert began.count("computes") == 2
        assert load.count() == 0
        nursery.cancel_scope.cancel()
