"""Internal queues: every item is taken exactly once, whoever is cancelled meanwhile."""

import random
from collections.abc import Iterable
from typing import Any, cast

import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import wait_all_tasks_blocked

from celery5.protocol.job.delivery import Delivery
from celery5.services.job.internal_queues import HandoffQueue, InternalTasksQueue
from celery5.services.job.thread_load import ThreadLoad
from tests.night import examples


async def test_an_item_that_is_there_is_taken_at_once_in_order() -> None:
    queue: HandoffQueue[int] = HandoffQueue()
    for n in range(3):
        queue.put(n)
    assert len(queue) == 3
    with trio.CancelScope() as scope:
        scope.cancel()
        assert [await queue.take() for _ in range(3)] == [0, 1, 2]  # with no checkpoint


async def test_a_taker_that_never_waits_takes_all_and_wakes_nobody_else(nursery: trio.Nursery) -> None:
    queue: HandoffQueue[int] = HandoffQueue()
    took: dict[int, list[int]] = {0: [], 1: [], 2: []}

    async def take_on(me: int) -> None:
        while True:
            took[me].append(await queue.take())

    for me in took:
        nursery.start_soon(take_on, me)
    await wait_all_tasks_blocked()
    for n in range(100):
        queue.put(n)
    await wait_all_tasks_blocked()
    assert sorted(map(len, took.values())) == [0, 1, 99] or sorted(map(len, took.values())) == [0, 0, 100]
    nursery.cancel_scope.cancel()


async def test_a_taker_that_waits_is_followed_by_others_at_once(nursery: trio.Nursery) -> None:
    queue: HandoffQueue[int] = HandoffQueue()
    began: list[int] = []

    async def take_and_wait() -> None:
        began.append(await queue.take())
        await trio.sleep_forever()

    for _ in range(5):
        nursery.start_soon(take_and_wait)
    await wait_all_tasks_blocked()
    for n in range(4):
        queue.put(n)
    await wait_all_tasks_blocked()
    assert began == [0, 1, 2, 3]
    queue.put(4)
    await wait_all_tasks_blocked()
    assert began == [0, 1, 2, 3, 4]
    nursery.cancel_scope.cancel()


async def test_a_taker_woken_for_nothing_parks_again(nursery: trio.Nursery) -> None:
    queue: HandoffQueue[int] = HandoffQueue()
    took: list[int] = []

    async def take() -> None:
        took.append(await queue.take())

    nursery.start_soon(take)
    await wait_all_tasks_blocked()
    queue.put(1)
    assert queue.drain() == [1]
    await wait_all_tasks_blocked()
    assert took == []
    queue.put(2)
    await wait_all_tasks_blocked()
    assert took == [2]


def test_drain_takes_the_oldest_up_to_a_limit() -> None:
    queue: HandoffQueue[int] = HandoffQueue()
    for n in range(5):
        queue.put(n)
    assert queue.drain(2) == [0, 1]
    assert queue.drain() == [2, 3, 4]
    assert queue.drain(7) == []


def delivery(number: int) -> Delivery:
    return Delivery("default", b"%d-0" % number, b"")


async def test_surplus_takers_end_at_once_or_when_they_ask_again(
    nursery: trio.Nursery,
) -> None:
    queue, busy, here = InternalTasksQueue(), trio.Event(), 0

    async def work() -> None:
        nonlocal here
        here += 1
        while await queue.take_next() is not None:
            await busy.wait()
        here -= 1

    for _ in range(6):
        nursery.start_soon(work)
    await wait_all_tasks_blocked()
    for n in range(3):
        queue.put(delivery(n))
    await wait_all_tasks_blocked()
    queue.remove_executors(5)
    await wait_all_tasks_blocked()
    assert (here, queue.surplus_executors) == (3, 2)  # the three that waited are gone
    assert queue.add_executors(1) == 0  # one more is wanted: one of those that were to go stays
    assert queue.add_executors(3) == 2
    queue.remove_executors(2)
    busy.set()
    await wait_all_tasks_blocked()
    assert (here, queue.surplus_executors) == (1, 0)
    queue.put(delivery(4))
    await wait_all_tasks_blocked()
    assert len(queue) == 0
    nursery.cancel_scope.cancel()


@given(seed=st.integers(0, 2**32))
@settings(max_examples=examples(200), deadline=None)
def test_every_job_is_taken_while_the_number_of_takers_changes(
    seed: int,
) -> None:
    chance = random.Random(seed)

    async def story() -> None:
        queue = InternalTasksQueue()
        taken: list[bytes] = []
        here = wanted = put = 0

        async def work(waits: bool) -> None:
            nonlocal here
            here += 1
            while (each := await queue.take_next()) is not None:
                taken.append(each.entry)
                if waits:
                    await trio.lowlevel.checkpoint()
            here -= 1

        async with trio.open_nursery() as nursery:
            for _ in range(40):
                slots = chance.randint(1, 6)
                if slots < wanted:
                    queue.remove_executors(wanted - slots)
                else:
                    for _ in range(queue.add_executors(slots - wanted)):
                        nursery.start_soon(work, chance.random() < 0.5)
                wanted = slots
                for _ in range(chance.randint(0, 4)):
                    queue.put(delivery(put))
                    put += 1
                if chance.random() < 0.5:
                    await trio.lowlevel.checkpoint()
            await wait_all_tasks_blocked()
            assert (here, queue.surplus_executors, len(queue), put) == (wanted, 0, 0, len(taken))
            assert len(set(taken)) == put
            nursery.cancel_scope.cancel()

    trio.run(story)


@given(seed=st.integers(0, 2**32), takers=st.integers(1, 8), items=st.integers(0, 60))
@settings(max_examples=examples(200), deadline=None)
def test_every_item_is_taken_exactly_once_while_takers_come_and_are_cancelled(
    seed: int, takers: int, items: int
) -> None:
    chance = random.Random(seed)

    async def story() -> list[int]:
        queue: HandoffQueue[int] = HandoffQueue()
        taken: list[int] = []
        scopes: list[trio.CancelScope] = []

        async def take_on(waits: bool) -> None:
            with trio.CancelScope() as scope:
                scopes.append(scope)
                while True:
                    taken.append(await queue.take())
                    if waits:
                        await trio.lowlevel.checkpoint()

        async with trio.open_nursery() as nursery:
            for _ in range(takers):
                nursery.start_soon(take_on, chance.random() < 0.5)
            for n in range(items):
                queue.put(n)
                if chance.random() < 0.3 and scopes:
                    chance.choice(scopes).cancel()
                    nursery.start_soon(take_on, chance.random() < 0.5)
                if chance.random() < 0.1:
                    taken.extend(queue.drain(2))
                if chance.random() < 0.5:
                    await trio.lowlevel.checkpoint()
            nursery.start_soon(take_on, False)
            await wait_all_tasks_blocked()
            assert len(queue) == 0
            nursery.cancel_scope.cancel()
        return taken

    assert sorted(trio.run(story)) == list(range(items))


class Job:
    """A job of the task `name`."""

    def __init__(self, name: str, number: int) -> None:
        self.command = self
        self.task = name
        self.number = number


async def test_short_jobs_wait_behind_running_ones_and_come_back_in_their_order(
    nursery: trio.Nursery,
) -> None:
    load = ThreadLoad()
    load.set_slots(1)
    load.allow_waiting(lambda _job: True)
    queue, taken, put_back = InternalTasksQueue(load), list[Any](), trio.Event()

    async def work() -> None:
        while (job := await queue.take_next()) is not None:
            taken.append(job)
            await put_back.wait()
            if queue.is_ahead(job):
                queue.put_back(job)
            else:
                await trio.sleep_forever()

    def list_numbers(jobs: Iterable[Any]) -> list[int]:
        return [job.number for job in jobs]

    for _ in range(20):
        nursery.start_soon(work)
    for number in range(40):
        queue.put(cast("Any", Job("quick", number)))
    await wait_all_tasks_blocked()
    assert list_numbers(taken) == [0]  # nothing is known of the task
    load.learn_duration("quick", 0.00001)
    queue.recheck()
    await wait_all_tasks_blocked()
    assert list_numbers(taken) == list(range(20))
    assert load.count() == 1  # the others wait
    put_back.set()
    await wait_all_tasks_blocked()
    assert list_numbers(queue.items) == list(range(1, 40))
    assert list_numbers(taken) == list(range(20))  # they do not come again while what runs takes long
    assert list_numbers(queue.take_returned()) == list(range(1, 20))
    assert list_numbers(queue.items) == list(range(20, 40))
    nursery.cancel_scope.cancel()


async def test_jobs_that_are_not_short_wait_in_the_queue(nursery: trio.Nursery) -> None:
    load = ThreadLoad()
    load.set_slots(1)
    load.allow_waiting(lambda job: cast("Any", job).number != 7)
    queue, taken = InternalTasksQueue(load), list[int]()

    async def work() -> None:
        while (job := await queue.take_next()) is not None:
            taken.append(cast("Any", job).number)
            await trio.sleep_forever()

    for name, seconds in (("slow", 0.01), ("quick", 0.0001)):
        load.learn_duration(name, seconds)
    for _ in range(20):
        nursery.start_soon(work)
    for job in (Job("slow", 0), Job("slow", 1)):
        queue.put(cast("Any", job))
    await wait_all_tasks_blocked()
    assert taken == [0]
    assert queue.remove(queue.items[0])
    for number in range(2, 30):
        queue.put(cast("Any", Job("quick", number)))
    await wait_all_tasks_blocked()
    assert taken == [0, 2, 3, 4, 5, 6]  # number 7 may not wait, and the others do not pass it
    assert queue.remove(queue.items[0])
    queue.recheck()
    await wait_all_tasks_blocked()
    assert len(taken) == 11  # a millisecond of them behind the one that runs
    nursery.cancel_scope.cancel()
