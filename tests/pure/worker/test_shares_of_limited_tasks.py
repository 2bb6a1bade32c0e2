"""Shares of limited tasks: how many waiting jobs of each a worker asks for, where several tasks have some."""

import time
from collections import Counter
from collections.abc import Iterable
from typing import Any, cast

import pytest

from celery5 import App
from celery5.logs.log import Log
from celery5.protocol.cluster.canary_limit import CanaryLimit
from celery5.protocol.limits import AdmissionRule, LimitOverride
from celery5.protocol.scaling.budget import Budget
from celery5.protocol.scaling.prefetch import DurationEstimate
from celery5.services.job.concurrency_budget import MaximalConcurrencyBudget
from celery5.services.job.in_flight import InFlightJobs, IsolatedJobs, RunningJobs
from celery5.services.job.internal_queues import InternalTasksQueue
from celery5.services.job.reading_state import ReadingState
from celery5.services.job.resource_slots import ResourceSlots
from celery5.services.job.thread_load import ThreadLoad
from celery5.services.limits.admission_state import MAX_REQUESTED_JOBS, AdmissionState
from celery5.services.limits.waiting_tasks import WaitingTasks
from celery5.services.scaling.preferences import Preferences

NAMES = ("a", "b", "c")


class Asking(AdmissionState):
    """An admission state whose worker gets whatever it asks for, and ends none of it."""

    def __init__(self, *, slots: int, limits: Iterable[int] = (1000, 1000, 1000)) -> None:
        app, in_flight, log = App("shares"), InFlightJobs(), Log(worker="w", app="shares")
        for name, limit in zip(NAMES, limits, strict=True):

            async def run() -> None: ...

            app.task(name=name, limit=limit)(run)
        queues = {"trio": InternalTasksQueue()}
        running_jobs = RunningJobs()
        budget = MaximalConcurrencyBudget(
            budgets={"trio": Budget(minimum=slots, maximum=slots)},
            task_kinds={},
            queues=queues,
            in_flight=in_flight,
            running_jobs=running_jobs,
            thread_load=ThreadLoad(),
            resource_slots=ResourceSlots(),
            log=log,
        )
        super().__init__(
            tasks=app.tasks,
            queues=queues,
            duration_estimates={"trio": DurationEstimate()},
            budget=budget,
            in_flight=in_flight,
            isolated_jobs=IsolatedJobs(queues=queues, in_flight=in_flight, max_deliveries=3),
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
        self.running: Counter[str] = Counter()

    def count_free_slots(self, kind: str, *, leaving: int = 0, in_order: bool = False) -> int:
        running = sum(count for name, count in self.running.items() if not self.get_rule(name).rejects_all)
        return super().count_free_slots(kind, leaving=leaving, in_order=in_order) - running

    def trip(self, names: Iterable[str] = NAMES) -> list[tuple[AdmissionRule, int]]:
        """Ask once. Whatever is asked for is there, and begins."""
        rules = self.plan_requests("default", names)
        self.running.update({rule.task: want for rule, want in rules})
        return rules


@pytest.mark.parametrize("order", [("a", "b", "c"), ("c", "a", "b"), ("b", "c", "a")])
def test_three_tasks_with_backlogs_get_a_third_of_the_slots_each(order: tuple[str, ...]) -> None:
    asking = Asking(slots=100)
    while sum(want for _, want in asking.trip(order)):
        pass
    assert sorted(asking.running.values()) == [33, 33, 34]


def test_no_trip_asks_for_more_than_one_script_may_hand_over() -> None:
    asking = Asking(slots=100, limits=(0, 1000, 1000))
    assert sum(want for _, want in asking.trip()) == MAX_REQUESTED_JOBS


def test_a_task_that_rejects_its_jobs_leaves_the_others_their_share() -> None:
    asking = Asking(slots=100, limits=(0, 1000, 1000))
    for _ in range(10):
        asking.trip()
    assert asking.running["b"] == asking.running["c"] == 50


def test_one_free_slot_goes_to_each_task_in_turn() -> None:
    asking = Asking(slots=1)
    turns = [
        next(rule.task for rule, want in asking.plan_requests("default", NAMES) if want) for _ in range(9)
    ]
    assert Counter(turns) == {"a": 3, "b": 3, "c": 3}


def test_a_task_that_ends_a_job_between_two_trips_keeps_no_other_from_its_turn() -> None:
    asking, turns = Asking(slots=1), Counter[str]()
    for _ in range(9):
        (turn,) = (rule.task for rule, want in asking.plan_requests("default", NAMES) if want)
        turns[turn] += 1
        asking.plan_requests("default", [turn])
    assert turns == {"a": 3, "b": 3, "c": 3}


def test_tasks_whose_rules_have_changed_are_reported_once() -> None:
    admission = Asking(slots=1)
    assert admission.take_changed_tasks() == set()
    admission.set_overrides({"a": LimitOverride(limit=3)}, {})
    assert admission.take_changed_tasks() == {"a"}
    assert admission.take_changed_tasks() == set()
    admission.set_overrides({"a": LimitOverride(limit=3)}, {})
    assert admission.take_changed_tasks() == set()
