"""Capacity of a queue with jobs of two kinds: how much is read of it, and when one of the kinds is saturated."""

import time
from typing import Any, cast

import pytest

from celery5 import App
from celery5.logs.log import Log
from celery5.protocol.cluster.canary_limit import CanaryLimit
from celery5.protocol.job.delivery import Delivery
from celery5.protocol.scaling.budget import Budget
from celery5.protocol.scaling.prefetch import BATCH, FAST_RATE, HORIZON, DurationEstimate
from celery5.services.job.concurrency_budget import MaximalConcurrencyBudget
from celery5.services.job.in_flight import InFlightJobs, IsolatedJobs, RunningJobs
from celery5.services.job.internal_queues import InternalTasksQueue
from celery5.services.job.reading_state import ReadingState
from celery5.services.job.resource_slots import ResourceSlots
from celery5.services.job.thread_load import ThreadLoad
from celery5.services.limits.admission_state import AWAITING_ADMISSION, AdmissionState
from celery5.services.limits.waiting_tasks import WaitingTasks
from celery5.services.scaling.preferences import Preferences
from celery5.services.worker.capacity import MAX_AWAITING, QueueCapacity

KINDS = ("trio", "thread")
FAST_COUNT = int(FAST_RATE * HORIZON)
"""Jobs of a kind that is never saturated, between two looks."""


class MixedQueue:
    """A worker with two slots of each kind, and a queue with jobs of both."""

    def __init__(self) -> None:
        app, log = App("mixed"), Log(worker="w", app="mixed")

        @app.task(name="quick")
        async def quick() -> None: ...

        @app.task(name="short")
        def short() -> None: ...

        self.in_flight, running_jobs = InFlightJobs(), RunningJobs()
        self.estimates = {kind: DurationEstimate() for kind in KINDS}
        queues = {kind: InternalTasksQueue() for kind in KINDS}
        budget = MaximalConcurrencyBudget(
            budgets={kind: Budget(minimum=2, maximum=2) for kind in KINDS},
            task_kinds={},
            queues=queues,
            in_flight=self.in_flight,
            running_jobs=running_jobs,
            thread_load=ThreadLoad(),
            resource_slots=ResourceSlots(),
            log=log,
        )
        self.admission = AdmissionState(
            tasks=app.tasks,
            queues=queues,
            duration_estimates=self.estimates,
            budget=budget,
            in_flight=self.in_flight,
            isolated_jobs=IsolatedJobs(queues=queues, in_flight=self.in_flight, max_deliveries=3),
            running_jobs=running_jobs,
            reading=ReadingState(),
            log=log,
            kind_rates={},
            kind_starts=cast("Any", None),  # no kind has a rate
            canary_limit=CanaryLimit(None, count_failures=int, clock=time.monotonic),
            waiting_tasks=WaitingTasks(
                tasks=app.tasks, budget=budget, preferences=Preferences(log=log), queue_order=""
            ),
        )
        self.capacity = QueueCapacity(
            consumed=[app.queue("default")],
            tasks=app.tasks,
            duration_estimates=self.estimates,
            budget=budget,
            in_flight=self.in_flight,
            admission=self.admission,
        )
        self.capacity.record_read({"default": {"thread": 1000}})

    def hold(self, kind: str, count: int) -> None:
        """Hold that many more jobs."""
        for _ in range(count):
            delivery = Delivery("default", str(len(self.in_flight)).encode(), b"")
            delivery.set_kind(kind)
            self.in_flight.add(delivery)

    def look(self, *, ended: int, seconds: float) -> bool:
        """Return whether jobs in threads are saturated, after so many have ended."""
        for _ in range(ended):
            self.estimates["thread"].record(seconds)
        self.capacity.update_saturation()
        return "thread" in self.admission.saturated_kinds


@pytest.mark.parametrize(
    ("ended", "seconds", "expected"),
    [
        (2, 0.05, True),
        (FAST_COUNT - 1, 0.01, True),
        (FAST_COUNT, 0.01, False),  # it runs as many as could be moved aside, though some take long
        (2, 0.0001, False),  # they are short
    ],
)
def test_a_kind_that_runs_its_jobs_as_fast_as_they_could_be_moved_is_not_saturated(
    ended: int, seconds: float, expected: bool
) -> None:
    mixed = MixedQueue()
    mixed.hold("thread", 1100)
    assert not mixed.look(ended=ended, seconds=seconds)
    assert mixed.look(ended=ended, seconds=seconds) is expected
    looks = [mixed.look(ended=0, seconds=seconds) for _ in range(2)]
    assert looks[-1] is (seconds > 0.001), "what has ended before does not count"


@pytest.mark.parametrize("held", [0, 2])
def test_jobs_that_await_admission_are_as_few_while_their_kind_has_free_slots(held: int) -> None:
    mixed = MixedQueue()
    mixed.estimates["thread"].record(0.0009)
    mixed.admission.set_saturated_kinds({"thread"})
    mixed.hold("thread", held)
    awaiting = 0
    for _ in range(100):
        count = mixed.capacity.get_capacity("default")
        assert 0 <= count <= BATCH
        mixed.hold(AWAITING_ADMISSION, count)
        awaiting += count
    assert 0 < awaiting <= MAX_AWAITING
