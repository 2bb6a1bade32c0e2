"""Companions: what fails beside a process is logged and begins again, and the process runs on."""

from functools import partial
from itertools import pairwise

import pytest
import trio

from celery5.protocol.job.verdict import iterate_leaves
from celery5.services.process.fenced import FIRST_PAUSE, MAX_PAUSE, STABLE_AFTER, keep_running


async def test_a_companion_that_fails_begins_again_after_longer_and_longer_pauses(
    autojump_clock: trio.testing.MockClock, nursery: trio.Nursery
) -> None:
    began: list[float] = []
    failures: list[tuple[str, float]] = []

    async def run(*, task_status: trio.TaskStatus[None]) -> None:
        began.append(trio.current_time())
        if len(began) == 3:
            raise ExceptionGroup("in a nursery", [RuntimeError("three")])
        task_status.started()
        raise ValueError(str(len(began)))

    def note(error: BaseException, pause: float) -> None:
        failures.append((f"{type(error).__name__}: {error}", pause))

    start = trio.current_time()
    await nursery.start(partial(keep_running, run, on_failure=note))
    assert trio.current_time() == start  # it has begun: whoever waits for it goes on
    await trio.sleep(1000)
    assert failures[:4] == [
        ("ValueError: 1", FIRST_PAUSE),
        ("ValueError: 2", 2 * FIRST_PAUSE),
        ("RuntimeError: three", 4 * FIRST_PAUSE),
        ("ValueError: 4", 8 * FIRST_PAUSE),
    ]
    assert failures[-1][1] == MAX_PAUSE
    assert max(later - earlier for earlier, later in pairwise(began)) == MAX_PAUSE
    nursery.cancel_scope.cancel()


async def test_a_companion_that_cannot_begin_keeps_nothing_waiting_and_is_tried_again(
    autojump_clock: trio.testing.MockClock, nursery: trio.Nursery
) -> None:
    tries: list[float] = []

    async def run(*, task_status: trio.TaskStatus[None]) -> None:
        tries.append(trio.current_time())
        if len(tries) % 3 == 0:
            task_status.started()
            await trio.sleep(STABLE_AFTER + 1)
        raise OSError("too many open files")

    pauses: list[float] = []
    with trio.fail_after(FIRST_PAUSE / 2):
        await nursery.start(partial(keep_running, run, on_failure=lambda error, pause: pauses.append(pause)))
    await trio.sleep(5 * STABLE_AFTER)
    assert pauses[:5] == [1, 2, 1, 2, 4]  # it has run well for a while the third time
    nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    "error",
    [KeyboardInterrupt(), SystemExit(3), GeneratorExit(), BaseExceptionGroup("", [SystemExit(4)])],
    ids=repr,
)
async def test_whatever_a_companion_raises_it_begins_again(
    autojump_clock: trio.testing.MockClock, nursery: trio.Nursery, error: BaseException
) -> None:
    failures: list[BaseException] = []

    async def run(*, task_status: trio.TaskStatus[None]) -> None:
        raise error

    def note(error: BaseException, _pause: float) -> None:
        failures.append(error)

    await nursery.start(partial(keep_running, run, on_failure=note))
    await trio.sleep(FIRST_PAUSE + 1)
    assert failures == [next(iterate_leaves(error))] * 2
    nursery.cancel_scope.cancel()


async def test_what_is_cancelled_or_returns_does_not_begin_again() -> None:
    began: list[str] = []

    async def run(name: str, *, task_status: trio.TaskStatus[None]) -> None:
        began.append(name)
        if name == "cancelled":
            await trio.sleep_forever()

    with trio.move_on_after(0.01) as scope:
        await keep_running(partial(run, "cancelled"), on_failure=lambda error, pause: None)
    assert scope.cancelled_caught
    await keep_running(partial(run, "returns"), on_failure=lambda error, pause: None)
    assert began == ["cancelled", "returns"]
