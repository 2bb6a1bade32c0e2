"""Runners: whatever a task does, there is one outcome, and a cancelled task has really ended."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
import trio

from celery5.protocol.job.verdict import Outcome, PermanentFailure, Raised, Reason, Returned
from celery5.runners import asyncio_thread
from celery5.runners.context import CURRENT_JOB, CurrentJob, current_job
from celery5.runners.in_thread import ThreadRunner
from celery5.runners.on_asyncio import AsyncioRunner
from celery5.runners.on_trio import TrioRunner
from celery5.runners.running_job import RunningJob, TimeLimits

KINDS = ("trio", "asyncio", "thread")


@pytest.fixture
def runners(loop: AsyncioRunner) -> dict[str, Any]:
    """One runner of each kind."""
    return {"trio": TrioRunner(), "asyncio": loop, "thread": ThreadRunner(get_slots=lambda: 2)}


async def execute(runners: dict[str, Any], kind: str, body: Any) -> Outcome:
    """Run `body` as a task of this kind."""

    async def coroutine(n: int, *, add: int) -> Any:
        return body(n + add)

    def function(n: int, *, add: int) -> Any:
        return body(n + add)

    outcome: Outcome = await runners[kind].execute(
        function if kind == "thread" else coroutine, [1], {"add": 2}, RunningJob()
    )
    return outcome


def raiser(error: BaseException) -> Any:
    """A body that raises."""

    def body(_n: int) -> None:
        raise error

    return body


@pytest.mark.parametrize("kind", KINDS)
async def test_a_result_is_encoded(runners: dict[str, Any], kind: str) -> None:
    assert await execute(runners, kind, lambda n: {"n": n}) == Returned(b'{"n":3}')


@pytest.mark.parametrize("kind", KINDS)
async def test_a_result_without_a_json_form_is_refused(runners: dict[str, Any], kind: str) -> None:
    for value in (object(), "half of a pair: \udc80", float("nan")):
        outcome = await execute(runners, kind, lambda _n, value=value: value)
        assert isinstance(outcome, PermanentFailure)
        assert outcome.reason is Reason.UNENCODABLE_RESULT
        assert "cannot be encoded" in outcome.failure.message


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "error",
    [
        ValueError("wrong", 7),
        SystemExit(2),
        ExceptionGroup("two", [ValueError("a"), OSError("b")]),
        BaseExceptionGroup("exit", [SystemExit(1)]),
        asyncio.CancelledError("by itself"),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_whatever_is_raised_is_the_tasks_failure(
    runners: dict[str, Any], kind: str, error: BaseException
) -> None:
    outcome = await execute(runners, kind, raiser(error))
    assert isinstance(outcome, Raised)
    assert outcome.failure.type == type(error).__name__
    assert outcome.failure.args == tuple(map(repr, error.args))
    assert "in body" in outcome.failure.traceback


@pytest.mark.parametrize("kind", KINDS)
async def test_a_task_knows_its_job_and_keeps_its_context_to_itself(
    runners: dict[str, Any], kind: str
) -> None:
    job = CurrentJob("id", "task", "queue", 1, "worker")
    CURRENT_JOB.set(job)

    def body(_n: int) -> list[str]:
        found = current_job()
        assert found == job
        return [found.id]

    assert await execute(runners, kind, body) == Returned(b'["id"]')
    CURRENT_JOB.set(None)


async def test_a_cancelled_trio_task_has_ended(runners: dict[str, Any]) -> None:
    ended = trio.Event()

    async def task() -> None:
        try:
            await trio.sleep_forever()
        finally:
            ended.set()

    with trio.move_on_after(0.02) as scope:
        await runners["trio"].execute(task, [], {}, RunningJob())
    assert scope.cancelled_caught
    assert ended.is_set()


async def test_a_cancelled_asyncio_task_has_ended_when_execute_returns(runners: dict[str, Any]) -> None:
    notes: list[str] = []

    async def task() -> None:
        notes.append("began")
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.05)
            notes.append("ended")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(cancel_when, lambda: notes == ["began"], nursery.cancel_scope)
        await runners["asyncio"].execute(task, [], {}, RunningJob())
    assert nursery.cancel_scope.cancelled_caught
    assert notes == ["began", "ended"]


async def cancel_when(condition: Callable[[], bool], scope: trio.CancelScope) -> None:
    """Cancel as soon as something is true."""
    with trio.fail_after(30):
        while not condition():
            await trio.sleep(0.005)
    scope.cancel()


async def test_an_asyncio_task_that_is_done_all_the_same_keeps_its_result(runners: dict[str, Any]) -> None:
    began, got = threading.Event(), list[object]()

    async def task() -> int:
        began.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            return 5
        return 6

    async with trio.open_nursery() as nursery:
        nursery.start_soon(cancel_when, began.is_set, nursery.cancel_scope)
        got.append(await runners["asyncio"].execute(task, [], {}, RunningJob()))
    assert got == [Returned(b"5")]


async def test_an_asyncio_task_that_blocks_its_loop_is_left_behind(
    runners: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asyncio_thread, "CANCEL_TIMEOUT", 0.1)
    go, ended = threading.Event(), threading.Event()

    async def task() -> None:
        go.wait(60)
        ended.set()

    with trio.move_on_after(0.02) as scope:
        await runners["asyncio"].execute(task, [], {}, RunningJob())
    assert scope.cancelled_caught
    assert not ended.is_set()
    go.set()
    assert await execute(runners, "asyncio", lambda n: n) == Returned(b"3")


async def test_asyncio_tasks_run_side_by_side_and_each_gets_its_own_outcome(runners: dict[str, Any]) -> None:
    found: dict[int, Outcome] = {}

    async def task(n: int) -> int:
        await asyncio.sleep(0.01 * (n % 3))
        return n

    async def ask(n: int) -> None:
        with trio.move_on_after(0.005 if n % 5 == 0 else 30):
            found[n] = await runners["asyncio"].execute(task, [n], {}, RunningJob())

    async with trio.open_nursery() as nursery:
        for n in range(100):
            nursery.start_soon(ask, n)
    for n in range(100):
        if n % 5:
            assert found[n] == Returned(str(n).encode())


async def test_a_cancelled_thread_is_left_to_itself_and_can_find_out(runners: dict[str, Any]) -> None:
    go, told = threading.Event(), threading.Event()

    def task() -> None:
        assert go.wait(60), "nobody was held up by it"
        try:
            trio.from_thread.check_cancelled()
        except trio.Cancelled:
            told.set()
            raise

    with trio.move_on_after(0.02) as scope:
        await runners["thread"].execute(task, [], {}, RunningJob())
    assert scope.cancelled_caught
    go.set()
    assert told.wait(30)


async def test_the_asyncio_runner_ends_its_loop_and_can_begin_again() -> None:
    loop = AsyncioRunner()
    for _ in range(2):
        async with trio.open_nursery() as nursery:
            await nursery.start(loop.run)

            async def name() -> str:
                _left = asyncio.get_running_loop().create_task(asyncio.sleep(60))
                return threading.current_thread().name

            assert await loop.execute(name, [], {}, RunningJob()) == Returned(b'"celery5-asyncio"')
            nursery.cancel_scope.cancel()
        assert not any(thread.name == "celery5-asyncio" for thread in threading.enumerate())


@pytest.mark.parametrize("limits", [None, TimeLimits(hard=60, soft=50)])
@pytest.mark.parametrize("kind", KINDS)
async def test_the_traceback_of_a_failure_begins_in_the_tasks_own_code(
    runners: dict[str, Any], kind: str, limits: TimeLimits | None
) -> None:
    async def coroutine() -> None:
        raise ValueError("mine")

    def function() -> None:
        raise ValueError("mine")

    task: Any = function if kind == "thread" else coroutine
    outcome = await runners[kind].execute(task, [], {}, RunningJob(limits=limits))
    assert outcome.failure.traceback.splitlines()[1].startswith(f'  File "{__file__}"')
    wrong = await runners[kind].execute(task, ["one too many"], {}, RunningJob(limits=limits))
    assert "in " in wrong.failure.traceback, "there is nothing but ours"
    assert wrong.failure.traceback.startswith("Traceback")


async def foreign_sleep() -> None:
    """Asks asyncio for its loop."""
    await asyncio.sleep(1)


async def foreign_turn() -> None:
    """Asks Trio for what only asyncio knows."""
    await asyncio.sleep(0)


@pytest.mark.parametrize("softly", [False, True])
@pytest.mark.parametrize("task", [foreign_sleep, foreign_turn])
async def test_a_trio_task_that_calls_asyncio_is_told_what_to_do(task: Any, softly: bool) -> None:
    outcome = await TrioRunner().execute(
        task, [], {}, RunningJob(limits=TimeLimits(soft=60) if softly else None)
    )
    assert isinstance(outcome, Raised)
    assert outcome.failure.message.endswith(
        '(this task runs on Trio: declare it, or the App, with loop="asyncio" if it uses asyncio)'
    )


async def test_what_has_nothing_to_do_with_asyncio_hears_nothing_of_it(runners: dict[str, Any]) -> None:
    outcome = await execute(runners, "trio", raiser(RuntimeError("no luck")))
    assert isinstance(outcome, Raised)
    assert outcome.failure.message == "no luck"


async def test_threads_follow_the_number_of_slots_when_it_changes() -> None:
    slots, go = 1, threading.Event()
    runner, started = ThreadRunner(get_slots=lambda: slots), list[int]()

    def wait(number: int) -> None:
        started.append(number)
        go.wait(30)

    async with trio.open_nursery() as nursery:
        for number in (1, 2):
            nursery.start_soon(runner.execute, wait, [number], {}, RunningJob())
        with trio.fail_after(30):
            while len(started) < 1:
                await trio.sleep(0.01)
        await trio.sleep(0.05)
        assert len(started) == 1
        slots = 3
        nursery.start_soon(runner.execute, wait, [3], {}, RunningJob())
        with trio.fail_after(30):
            while len(started) < 3:
                await trio.sleep(0.01)
        go.set()


@pytest.mark.parametrize("kind", KINDS)
async def test_a_result_that_no_client_could_read_is_refused(runners: dict[str, Any], kind: str) -> None:
    value: list[Any] = []
    for _ in range(950):
        value = [value]
    outcome = await execute(runners, kind, lambda _n: value)
    assert isinstance(outcome, PermanentFailure)
    assert outcome.reason is Reason.UNENCODABLE_RESULT


@pytest.mark.parametrize("error", [KeyboardInterrupt("by hand"), GeneratorExit("by hand")], ids=repr)
async def test_an_error_of_a_task_on_trio_is_no_signal(runners: dict[str, Any], error: BaseException) -> None:
    outcome = await execute(runners, "trio", raiser(error))
    assert isinstance(outcome, Raised)
    assert outcome.failure.type == type(error).__name__


async def test_a_cancellation_is_never_swallowed_whatever_is_raised_with_it(runners: dict[str, Any]) -> None:
    async def task() -> None:
        try:
            await trio.sleep_forever()
        except trio.Cancelled as cancelled:
            raise BaseExceptionGroup("both", [cancelled, KeyboardInterrupt()]) from None

    with trio.move_on_after(0.02) as scope:
        await runners["trio"].execute(task, [], {}, RunningJob())
    assert scope.cancelled_caught
