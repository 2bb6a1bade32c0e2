"""The asyncio loop takes jobs in lists: each has its own task from its first step, and none holds up the others."""

import asyncio
import gc
import threading
import time
import types
from collections.abc import Generator
from contextvars import ContextVar
from typing import Any

import pytest
import trio

from celery5.protocol.job.verdict import Outcome, Returned
from celery5.runners import asyncio_thread
from celery5.runners.on_asyncio import AsyncioRunner
from celery5.runners.running_job import RunningJob
from celery5.runners.stacks import read_job_stacks

STEP: ContextVar[str] = ContextVar("step", default="none")


async def test_a_job_on_asyncio_has_its_own_task_and_context_from_its_first_step(loop: AsyncioRunner) -> None:
    async def job(number: int, waits: bool) -> list[object]:
        task = asyncio.current_task()
        assert task is not None
        task.set_name(f"job {number}")
        STEP.set(f"step of {number}")
        async with asyncio.timeout(10):
            if waits:
                await asyncio.sleep(0.001)
        async with asyncio.TaskGroup() as group:
            child = group.create_task(asyncio.sleep(0, STEP.get()))
        return [asyncio.current_task() is task, task.get_name(), STEP.get(), child.result()]

    outcomes: dict[int, Outcome] = {}

    async def run(number: int) -> None:
        outcomes[number] = await loop.execute(job, [number, number % 2 == 0], {}, RunningJob())

    async with trio.open_nursery() as nursery:
        for number in range(6):
            nursery.start_soon(run, number)
    expected = {
        number: Returned(f'[true,"job {number}","step of {number}","step of {number}"]'.encode())
        for number in range(6)
    }
    assert outcomes == expected


async def test_a_job_that_cancels_itself_before_it_waits_has_failed_at_its_first_wait(
    loop: AsyncioRunner,
) -> None:
    async def job() -> int:
        task = asyncio.current_task()
        assert task is not None
        assert task.cancel()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            task.uncancel()
            return task.cancelling()
        return -1

    assert await loop.execute(job, [], {}, RunningJob()) == Returned(b"0")


async def test_jobs_that_begin_together_and_compute_do_not_hold_up_those_that_run(
    loop: AsyncioRunner,
) -> None:
    turns, turns_at_end = 0, list[int]()

    async def count() -> None:
        nonlocal turns
        while len(turns_at_end) < 20:
            turns += 1
            await asyncio.sleep(0)

    async def compute() -> None:
        end = time.perf_counter() + 0.005
        while time.perf_counter() < end:
            pass
        turns_at_end.append(turns)

    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(loop.execute, count, [], {}, RunningJob())
            while not turns:
                await trio.sleep(0.001)
            for _ in range(20):
                nursery.start_soon(loop.execute, compute, [], {}, RunningJob())
    assert len(set(turns_at_end)) > 10


async def test_a_job_on_an_idle_loop_begins_before_this_turn_of_trio_ends(loop: AsyncioRunner) -> None:
    begun = threading.Event()

    async def job() -> None:
        begun.set()

    @types.coroutine
    def execute_and_block() -> Generator[Any, Any, Outcome]:
        execution = loop.execute(job, [], {}, RunningJob())
        request = execution.send(None)
        assert begun.wait(10)  # the Trio loop stands still meanwhile
        while True:
            answer = yield request
            try:
                request = execution.send(answer)
            except StopIteration as stop:
                outcome: Outcome = stop.value
                return outcome

    assert await execute_and_block() == Returned(b"null")


async def test_a_job_that_waits_for_the_loop_has_no_stack_of_the_job_that_blocks_it(
    loop: AsyncioRunner,
) -> None:
    begun, go = threading.Event(), threading.Event()

    async def block() -> None:
        begun.set()
        go.wait(30)

    async def wait_behind() -> None:
        pass

    first, second = RunningJob(), RunningJob()
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(loop.execute, block, [], {}, first)
            while not begun.is_set():
                await trio.sleep(0.001)
            nursery.start_soon(loop.execute, wait_behind, [], {}, second)
            while second.job_thread is None:
                await trio.sleep(0.001)
            (blocking,) = read_job_stacks("1", "block", "asyncio", first)
            (waiting,) = read_job_stacks("2", "wait_behind", "asyncio", second)
            go.set()
    assert "block" in [place.function for place in blocking.places]
    assert waiting.places == ()
    assert "is about to begin" in waiting.note


@pytest.mark.parametrize("waits", [False, True])
async def test_a_job_on_asyncio_leaves_nothing_to_the_garbage_collector(
    loop: AsyncioRunner, waits: bool
) -> None:
    async def job() -> None:
        if waits:
            await asyncio.sleep(0.001)

    await loop.execute(job, [], {}, RunningJob())
    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        for _ in range(20):
            await loop.execute(job, [], {}, RunningJob())
        gc.collect()
        found = {
            type(item).__name__ for item in gc.garbage if type(item).__module__ == asyncio_thread.__name__
        }
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
    assert found == set()
