"""What the jobs of each kind of task run with."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from celery5.protocol.job.verdict import Outcome
from celery5.protocol.scaling.prefetch import DurationEstimate
from celery5.runners.running_job import RunningJob
from celery5.services.worker.concurrency_budget import MaximalConcurrencyBudget
from celery5.services.worker.internal_queues import InternalTasksQueue
from celery5.tasks.task import Task


class Runner(Protocol):
    """Runs one function to its outcome."""

    async def execute(
        self, function: Callable[..., Any], args: Any, kwargs: Mapping[str, Any], running_job: RunningJob
    ) -> Outcome: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskResources:
    """The tasks of a worker, and what it has to run their jobs, by kind of task."""

    # The tasks, by name.
    tasks: Mapping[str, Task[..., Any]]
    # Where jobs wait for an executor.
    queues: Mapping[str, InternalTasksQueue]
    runners: Mapping[str, Runner]
    # How long the jobs take.
    duration_estimates: Mapping[str, DurationEstimate]
    # How many jobs may run at once.
    budget: MaximalConcurrencyBudget
