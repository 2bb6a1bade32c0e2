"""Of many workers a few ask at once for a job that waits at a limit, and the others soon, so that none is left."""

import math
import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
from trio.testing import MockClock

from celery5.broker.calls.leases import HeartbeatReply
from celery5.broker.keys import Keys
from celery5.protocol.process.wake_ups import ANSWERING, MAX_SPREAD
from celery5.services.process.wake_ups import WakeUps
from celery5.services.worker.admission_control import AdmissionControl

MAIL = Keys("shop").for_queue("mail")
UNUSED: Any = None


class Wanted(set[tuple[str, str]]):
    """The tasks of which a worker asks for waiting jobs."""

    def add(self, *queue_task: str) -> None:  # type: ignore[override]
        super().add(cast("tuple[str, str]", queue_task))


def make_controls(count: int) -> list[AdmissionControl]:
    """Return the admission controls of as many workers, which take no jobs themselves."""
    controls: list[AdmissionControl] = []
    for number in range(count):
        wake_ups = WakeUps(draw=random.Random(number).random)
        wake_ups.on_heartbeat(MAIL, HeartbeatReply(alive=True, lapsed=0, due_in=None, workers=count))
        admission = SimpleNamespace(
            waiting_tasks=Wanted(), kind_starts=None, notify=lambda: None, yielding_until=math.inf
        )
        controls.append(
            AdmissionControl(
                worker=f"w{number}",
                lease=UNUSED,
                consumed=[MAIL],
                redis=UNUSED,
                tasks=cast("Any", {"send": None}),
                admission=cast("Any", admission),
                intake=UNUSED,
                in_flight=UNUSED,
                recent=UNUSED,
                unstarted=UNUSED,
                reading=UNUSED,
                outcome_handler=UNUSED,
                wake_ups=wake_ups,
                log=UNUSED,
            )
        )
    return controls


def notify_all(controls: Sequence[AdmissionControl], task: bytes = b"send") -> None:
    for control in controls:
        control.on_message(MAIL.slots_freed.encode(), task)


async def count_asking(controls: Sequence[AdmissionControl]) -> int:
    """Return how many workers ask for waiting jobs now."""
    for control in controls:
        await control.admit_waiting()
    return sum(bool(control._wanted) for control in controls)


@pytest.mark.parametrize("workers", [1, ANSWERING])
async def test_each_of_a_few_workers_asks_at_once(workers: int) -> None:
    controls = make_controls(workers)
    notify_all(controls)
    assert await count_asking(controls) == workers


async def test_a_few_of_a_thousand_workers_ask_at_once_and_the_others_within_a_second(
    autojump_clock: MockClock,
) -> None:
    controls = make_controls(1000)
    notify_all(controls)
    assert 0 < await count_asking(controls) < 4 * ANSWERING
    await trio.sleep(MAX_SPREAD / 2)
    assert 300 < await count_asking(controls) < 700
    await trio.sleep(MAX_SPREAD / 2)
    assert await count_asking(controls) == 1000


async def test_many_messages_in_a_second_make_few_requests_of_each_worker(autojump_clock: MockClock) -> None:
    controls = make_controls(1000)
    for _ in range(100):
        notify_all(controls)
    assert await count_asking(controls) < 100 * 2 * ANSWERING
    assert all(len(control._due) <= 1 for control in controls)
    latest = max((when for control in controls for when in control._due.values()), default=0.0)
    assert latest < trio.current_time() + MAX_SPREAD / 2, "the first of several times counts"


async def test_a_task_that_a_worker_does_not_have_is_not_asked_for(autojump_clock: MockClock) -> None:
    controls = make_controls(1000)
    notify_all(controls, b"unknown")
    await trio.sleep(MAX_SPREAD)
    assert await count_asking(controls) == 0
