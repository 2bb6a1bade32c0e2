"""Reporter: report the state of this worker to the Scheduler that scales the application.

It sends nothing unless the application is scaled or uses priorities.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import trio

from celery5.broker.calls import scaling as scaling_calls
from celery5.broker.driver import AsyncDriver
from celery5.broker.keys import Keys, QueueKeys
from celery5.logs.log import Log
from celery5.protocol.scaling.snapshot import WorkerReport
from celery5.protocol.shards import get_queue_of_shard
from celery5.services.health.vitals import ProcessStatus
from celery5.services.job.concurrency_budget import MaximalConcurrencyBudget
from celery5.services.job.in_flight import InFlightJobs
from celery5.services.process.broker_outages import OutageLog, retry_until_available
from celery5.services.scaling.prefetch_factor import PrefetchFactor

REPORT_INTERVAL = 3.0
"""Seconds between reports."""
MAX_REPORTED_TASKS = 500
"""The most tasks whose durations are reported."""


class Reporter:
    """Sends the reports of one worker."""

    only_observes: ClassVar = True

    def __init__(
        self,
        *,
        redis: AsyncDriver,
        budget: MaximalConcurrencyBudget,
        in_flight: InFlightJobs,
        process_status: ProcessStatus,
        prefetch_factor: PrefetchFactor,
        worker: str,
        process: str,
        consumed: Sequence[QueueKeys],
        tasks: Mapping[str, Any],
        keys: Keys,
        reports: bool,
        log: Log,
    ) -> None:
        self._redis = redis
        self._keys = keys
        self._queues = tuple(dict.fromkeys(get_queue_of_shard(queue.queue) for queue in consumed))
        self._kinds = sorted({task.kind for task in tasks.values()})
        self._budget = budget
        self._in_flight = in_flight
        self._process_status = process_status
        self._prefetch_factor = prefetch_factor
        self._worker = worker
        self._process = process
        self._reports = reports
        self._outages = OutageLog(log, "autoscale:report-failed")
        self._seen: dict[str, tuple[int, float]] = {}
        self._means: dict[str, float] = {}

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Report until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._prefetch_factor.run_expiry)
            task_status.started()
            if self._reports:
                await self._report_on()

    async def _report_on(self) -> None:
        while True:
            await retry_until_available(self._report, self._outages, REPORT_INTERVAL, even_refused=True)
            await trio.sleep(REPORT_INTERVAL)

    async def _report(self) -> None:
        await self._redis.perform(scaling_calls.send_report(self._keys, self._worker, self.make_report()))

    def make_report(self) -> WorkerReport:
        """Return the current report."""
        counts = self._budget.get_counts()
        return WorkerReport(
            queues=self._queues,
            slots={kind: counts[kind]["current"] for kind in self._kinds},
            most={kind: self._budget.get_attainable_slots(kind) for kind in self._kinds},
            executing={kind: counts[kind]["executing"] for kind in self._kinds},
            held=self._count_held(),
            means=self._get_means(),
            prefetch=self._prefetch_factor.factor,
            concurrency=self._budget.factor,
            process=self._process,
        )

    def _count_held(self) -> dict[str, dict[str, int]]:
        found: dict[str, dict[str, int]] = {}
        for delivery in self._in_flight:
            if delivery.command is not None and delivery.kind:
                tasks = found.setdefault(get_queue_of_shard(delivery.queue), {})
                tasks[delivery.command.task] = tasks.get(delivery.command.task, 0) + 1
        return found

    def _get_means(self) -> dict[str, float]:
        """Return the mean duration of jobs by task. The jobs since the last report weigh as much as all before."""
        for task, (count, seconds) in self._process_status.jobs.sum_durations().items():
            before = self._seen.get(task, (0, 0.0))
            new = count - before[0]
            if new > 0:
                mean = (seconds - before[1]) / new
                self._means[task] = (mean + self._means.get(task, mean)) / 2
                self._seen[task] = (count, seconds)
        return {task: round(mean, 6) for task, mean in list(self._means.items())[:MAX_REPORTED_TASKS]}
