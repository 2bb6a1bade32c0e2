"""The thread pool: calls in threads that stay, their errors, their cancellation, and what is left of them."""

import threading
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from typing import Any

import pytest
import trio
import trio.lowlevel
from trio.testing import wait_all_tasks_blocked

from celery5.runners import thread_pool
from celery5.runners.thread_pool import NotBegun, ThreadCall, ThreadPool

LIMIT = 20.0


async def make(pool: ThreadPool, function: Callable[[], Any]) -> Any:
    """Make one call, within the limit of a test."""
    with trio.fail_after(LIMIT):
        return await pool.make(ThreadCall(function))


async def make_together(pool: ThreadPool, *functions: Callable[[], Any]) -> None:
    """Make calls at once."""
    async with trio.open_nursery() as nursery:
        for function in functions:
            nursery.start_soon(make, pool, function)


async def test_threads_stay_and_there_are_as_many_as_calls_at_once() -> None:
    pool, used, barrier = ThreadPool(4), set[int](), threading.Barrier(2)

    def call() -> None:
        barrier.wait(LIMIT)
        used.add(threading.get_ident())

    for _ in range(20):
        await make_together(pool, call, call)
    assert len(used) == 2


async def test_no_more_calls_run_at_once_than_there_are_slots() -> None:
    pool, running, most = ThreadPool(1), 0, 0

    def call() -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        threading.Event().wait(0.01)
        running -= 1

    await make_together(pool, *[call] * 5)
    assert most == 1
    pool.resize(3)
    barrier = threading.Barrier(3)
    await make_together(pool, *[lambda: barrier.wait(LIMIT)] * 3)


async def test_a_call_has_the_context_of_its_task_and_returns_or_raises() -> None:
    pool, variable = ThreadPool(1), ContextVar("variable", default=0)
    variable.set(7)
    assert await make(pool, variable.get) == 7
    await make(pool, lambda: variable.set(8))
    assert variable.get() == 7
    with pytest.raises(ZeroDivisionError):
        await make(pool, lambda: 1 // 0)
    with pytest.raises(SystemExit):
        await make(pool, lambda: exec("raise SystemExit(3)"))
    assert await make(pool, lambda: trio.from_thread.run(trio.sleep, 0)) is None
    assert await make(pool, lambda: trio.from_thread.run_sync(trio.lowlevel.current_task)) is not None


async def test_a_cancelled_call_notices_it_and_no_other_call_does() -> None:
    pool, begun, seen, other_may_end = ThreadPool(2), threading.Event(), trio.Event(), threading.Event()
    calls = []

    def cancelled() -> None:
        begun.set()
        while True:
            trio.from_thread.check_cancelled()
            threading.Event().wait(0.001)

    def other() -> str:
        other_may_end.wait(LIMIT)
        trio.from_thread.check_cancelled()
        return "unharmed"

    async def expect_other() -> None:
        assert await make(pool, other) == "unharmed"
        seen.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(expect_other)
        with trio.CancelScope() as scope:

            async def cancel() -> None:
                await trio.to_thread.run_sync(begun.wait, LIMIT)
                scope.cancel()

            nursery.start_soon(cancel)
            calls.append(ThreadCall(cancelled))
            await pool.make(calls[0])
        assert scope.cancelled_caught
        assert calls[0].end is not None
        with trio.fail_after(LIMIT):
            await calls[0].end.wait()
        assert isinstance(calls[0].error, trio.Cancelled)
        assert await make(pool, lambda: "another") == "another"  # in a thread that was not cancelled
        other_may_end.set()
        with trio.fail_after(LIMIT):
            await seen.wait()


async def test_an_abandoned_call_keeps_its_slot_until_it_ends() -> None:
    pool, may_end = ThreadPool(1), threading.Event()
    call = ThreadCall(lambda: may_end.wait(LIMIT))
    with trio.move_on_after(0.05):
        await pool.make(call)
    with trio.move_on_after(0.05) as waited:
        await pool.make(ThreadCall(lambda: None))
    assert waited.cancelled_caught
    may_end.set()
    assert await make(pool, lambda: 1) == 1
    assert call.result is True


async def test_a_call_that_is_cancelled_before_it_begins_never_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool, begun, host = ThreadPool(1), list[int](), ThreadPool._host
    may_start = trio.Event()

    async def start_late(pool: ThreadPool, thread: Any, token: Any) -> None:
        await may_start.wait()
        await host(pool, thread, token)

    monkeypatch.setattr(ThreadPool, "_host", start_late)
    call = ThreadCall(lambda: begun.append(1))
    with trio.move_on_after(0.05) as scope:
        await pool.make(call)
    assert scope.cancelled_caught
    assert call.end is None
    may_start.set()
    assert await make(pool, lambda: 2) == 2
    assert begun == []


async def test_a_thread_that_cannot_be_started_is_the_error_of_its_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = ThreadPool(1)

    async def refuse(*_words: Any, **_more: Any) -> None:
        await trio.lowlevel.checkpoint()
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(trio.to_thread, "run_sync", refuse)
        for _ in range(3):
            with pytest.raises(RuntimeError, match="start new thread"):
                await make(pool, lambda: 1)
    assert await make(pool, lambda: 1) == 1


async def test_idle_threads_end_and_calls_get_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread_pool, "IDLE_TIMEOUT", 0.01)
    pool, threads = ThreadPool(1), list[threading.Thread]()
    for _ in range(3):
        await make(pool, lambda: threads.append(threading.current_thread()))
        with trio.fail_after(LIMIT):
            while pool._thread_count:
                await trio.sleep(0.005)
    assert len(threads) == 3


async def test_calls_that_end_together_wake_the_loop_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, barrier, collected = ThreadPool(8), threading.Barrier(9), 0
    collect = ThreadPool._collect

    def count(pool: ThreadPool) -> None:
        nonlocal collected
        collected += 1
        collect(pool)

    monkeypatch.setattr(ThreadPool, "_collect", count)

    async def block_loop() -> None:
        while barrier.n_waiting < 8:
            await trio.sleep(0.001)
        barrier.wait(LIMIT)  # the loop stands still until all calls have ended
        while len(pool._ended) < 8:
            threading.Event().wait(0.001)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(make_together, pool, *[lambda: barrier.wait(LIMIT)] * 8)
        nursery.start_soon(block_loop)
    assert collected == 1


async def test_a_call_may_end_in_the_turn_in_which_it_is_cancelled() -> None:
    pool, begun, may_end = ThreadPool(1), threading.Event(), threading.Event()

    def function() -> int:
        begun.set()
        may_end.wait(LIMIT)
        return 7

    call = ThreadCall(function)
    async with trio.open_nursery() as nursery:

        async def cancel() -> None:
            await trio.to_thread.run_sync(begun.wait, LIMIT)
            may_end.set()
            while not pool._ended:  # the loop stands still: its end and its cancellation come together
                threading.Event().wait(0.001)
            nursery.cancel_scope.cancel()
            pool._collect()

        nursery.start_soon(cancel)
        await pool.make(call)
    assert (call.result, call.is_over, call.end) == (7, True, None)
    assert await make(pool, lambda: 8) == 8


async def test_a_thread_makes_calls_back_to_back_while_the_loop_does_something_else() -> None:
    pool, made, threads = ThreadPool(1), list[int](), set[int]()
    first, all_made = threading.Event(), threading.Event()

    def call(number: int) -> None:
        first.wait(LIMIT)
        made.append(number)
        threads.add(threading.get_ident())
        if len(made) == 10:
            all_made.set()

    async with trio.open_nursery() as nursery:
        for number in range(10):
            nursery.start_soon(make, pool, partial(call, number))
            await wait_all_tasks_blocked()
        first.set()
        assert all_made.wait(LIMIT)  # the loop stands still meanwhile
    assert made == list(range(10))
    assert len(threads) == 1


async def test_calls_that_wait_behind_a_long_one_are_given_back_if_they_may_be() -> None:
    pool, may_end, made = ThreadPool(1), threading.Event(), list[str]()
    begun = list[str]()

    async def expect_not_begun() -> None:
        with pytest.raises(NotBegun):
            await pool.make(
                ThreadCall(
                    lambda: made.append("short"), lambda: begun.append("short"), may_be_given_back=True
                )
            )

    with trio.fail_after(LIMIT):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(make, pool, lambda: may_end.wait(LIMIT))
            await wait_all_tasks_blocked()
            nursery.start_soon(make, pool, lambda: made.append("patient"))
            async with trio.open_nursery() as waiting:
                for _ in range(3):
                    waiting.start_soon(expect_not_begun)
            assert (made, begun) == ([], [])
            may_end.set()
    assert (made, begun) == (["patient"], [])


async def test_a_call_begins_when_its_thread_takes_it_and_not_when_it_waits() -> None:
    pool, may_end, begun = ThreadPool(1), threading.Event(), list[int]()
    async with trio.open_nursery() as nursery:
        for number in range(3):
            call = ThreadCall(partial(may_end.wait, LIMIT), partial(begun.append, number))
            nursery.start_soon(pool.make, call)
            await wait_all_tasks_blocked()
        with trio.fail_after(LIMIT):
            while not begun:
                await trio.sleep(0.001)
        assert begun == [0]
        may_end.set()
    assert begun == [0, 1, 2]


async def test_a_call_that_is_cancelled_while_it_waits_for_a_slot_leaves_the_others_theirs() -> None:
    pool, may_end, made = ThreadPool(1), threading.Event(), list[int]()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(make, pool, lambda: may_end.wait(LIMIT))
        await wait_all_tasks_blocked()
        with trio.move_on_after(0.02) as scope:
            await pool.make(ThreadCall(lambda: made.append(1)))
        assert scope.cancelled_caught
        nursery.start_soon(make, pool, lambda: made.append(2))
        await wait_all_tasks_blocked()
        may_end.set()
    assert made == [2]
    pool.resize(2)
    barrier = threading.Barrier(2)
    await make_together(pool, *[lambda: barrier.wait(LIMIT)] * 2)


class Following:
    """Calls that follow on one another, and how often the Trio task that waits for them has gone on."""

    def __init__(self, *functions: Callable[[], Any]) -> None:
        self._left = list(functions)
        self.results = list[Any]()

    def choose_next(self, call: ThreadCall[Any]) -> ThreadCall[Any] | None:
        self.results.append(call.result)
        return ThreadCall(self._left.pop(0)) if self._left else None


class Steps(trio.abc.Instrument):
    """How often this task has been woken."""

    def __init__(self) -> None:
        self.count = 0
        self._task = trio.lowlevel.current_task()

    def task_scheduled(self, task: trio.lowlevel.Task) -> None:
        self.count += task is self._task


async def test_calls_follow_in_place_of_one_without_waking_its_task() -> None:
    pool, variable, steps = ThreadPool(1), ContextVar("variable", default=0), Steps()
    variable.set(7)
    following = Following(lambda: 2, variable.get)
    trio.lowlevel.add_instrument(steps)
    with trio.fail_after(LIMIT):
        assert await pool.make(ThreadCall(lambda: 1), following.choose_next) == 7
    trio.lowlevel.remove_instrument(steps)
    assert following.results == [1, 2, 7]
    assert steps.count == 1


async def test_an_error_ends_what_follows() -> None:
    pool = ThreadPool(1)

    def fail() -> None:
        raise ValueError("the second one")

    following = Following(fail, lambda: 3)
    with trio.fail_after(LIMIT), pytest.raises(ValueError, match="the second one"):
        await pool.make(ThreadCall(lambda: 1), following.choose_next)
    assert following.results == [1]


async def test_a_following_call_is_the_one_that_is_cancelled() -> None:
    pool, begun, noticed = ThreadPool(1), threading.Event(), threading.Event()

    def block() -> None:
        begun.set()
        try:
            while True:
                trio.from_thread.check_cancelled()
                threading.Event().wait(0.001)
        except trio.Cancelled:
            noticed.set()
            raise

    following = Following(block, lambda: 3)
    with trio.fail_after(LIMIT):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(pool.make, ThreadCall(lambda: 1), following.choose_next)
            while not begun.is_set():
                await trio.sleep(0.001)
            nursery.cancel_scope.cancel()
        assert await make(pool, lambda: 4) == 4
    assert noticed.is_set()
    assert following.results == [1]


async def test_other_tasks_run_while_calls_follow_on_one_another() -> None:
    pool, in_this_turn, most, turns = ThreadPool(2), 0, 0, 0

    def choose_next(_call: ThreadCall[Any]) -> ThreadCall[Any] | None:
        nonlocal in_this_turn, most
        threading.Event().wait(0.002)  # meanwhile a call in the other thread ends
        in_this_turn += 1
        most = max(most, in_this_turn)
        return None if most > 100 else ThreadCall(lambda: 1)

    with trio.fail_after(LIMIT):
        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(pool.make, ThreadCall(lambda: 1), choose_next)
            while turns < 20:
                await trio.lowlevel.checkpoint()
                turns, in_this_turn = turns + bool(in_this_turn), 0
            nursery.cancel_scope.cancel()
    assert 1 <= most <= 10
