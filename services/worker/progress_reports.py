"""Store what running jobs report of their progress: the last report of each, once a second at most.

A worker whose jobs report nothing sends nothing. What is stored is deleted when the job has left its executor. It has a
time to live for the worker that dies, which is renewed while the job runs on.
"""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import ClassVar

import trio

from celery5.broker.call import Call
from celery5.broker.calls import jobs as jobs_calls
from celery5.broker.driver import AsyncDriver
from celery5.broker.keys import QueueKeys
from celery5.errors import BrokerError
from celery5.logs.log import Log
from celery5.protocol.job.progress import ProgressReport
from celery5.runners.context import CurrentJob
from celery5.services.job.in_flight import RunningJobs
from celery5.services.process.broker_outages import OutageLog, retry_until_available

WRITE_INTERVAL = 1.0
"""Seconds between two writes."""
PROGRESS_TTL = 300.0
"""Seconds that the progress of a job stays which no worker renews."""
RENEWAL_INTERVAL = PROGRESS_TTL / 3
"""Seconds after which the time to live of a job without new reports is renewed."""
MAX_JOBS_PER_CALL = 256
"""Jobs of each sort in one call: a script blocks the server while it runs."""
LAST_WRITE_TIMEOUT = 1.0
"""Seconds that the last write may take when the worker stops."""

JobKey = tuple[str, str, int]
"""The queue, id and attempt of a job."""


class ProgressReports:
    """Keeps the last report of each running job until it is stored. Jobs report from any thread."""

    only_observes: ClassVar = True

    def __init__(
        self,
        *,
        redis: AsyncDriver,
        worker: str,
        consumed: Sequence[QueueKeys],
        running_jobs: RunningJobs,
        log: Log,
    ) -> None:
        self._redis = redis
        self._worker = worker
        self._queues = {keys.queue: keys for keys in consumed}
        self._running_jobs = running_jobs
        self._outages = OutageLog(log, "progress:write-failed", "progress:resumed")
        self._new: dict[JobKey, ProgressReport] = {}
        self._stored: dict[JobKey, tuple[ProgressReport, float]] = {}  # and when the time to live began
        self._token: trio.lowlevel.TrioToken | None = None
        self._has_news = False
        self._news = trio.Event()

    def receive(self, job: CurrentJob, report: ProgressReport) -> None:
        """Keep a report until it is stored, or until there is a later one. Call it in any thread."""
        self._new[job.queue, job.id, job.attempt] = report
        # Only the loop sets and resets the flag: a thread that did might set it too late, and wake nobody any more.
        if not self._has_news and self._token is not None:
            with suppress(trio.RunFinishedError):  # a thread that nobody waits for any more
                self._token.run_sync_soon(self._on_news, idempotent=True)

    def find(self, queue: str, job_id: str, attempt: int) -> ProgressReport | None:
        """Return the last report of a running job; None when it has reported nothing."""
        key = (queue, job_id, attempt)
        stored = self._stored.get(key)
        return self._new.get(key) or (stored[0] if stored else None)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Store reports until cancelled; then delete what is stored of jobs that have ended."""
        self._token = trio.lowlevel.current_trio_token()
        if self._new:
            self._on_news()
        task_status.started()
        try:
            while True:
                if not self._stored:
                    await self._news.wait()
                await retry_until_available(self._write, self._outages, WRITE_INTERVAL, even_refused=True)
                await trio.sleep(WRITE_INTERVAL)
        finally:
            if self._stored:
                with trio.move_on_after(LAST_WRITE_TIMEOUT, shield=True), suppress(BrokerError):
                    await self._write()

    def _on_news(self) -> None:
        self._has_news = True
        self._news.set()

    async def _write(self) -> None:
        """Store what is new, delete what has ended, and renew the rest. What is not stored stays new."""
        self._has_news, self._news = False, trio.Event()
        running = {
            (delivery.queue, delivery.command.id, delivery.command.attempt)
            for delivery in self._running_jobs
            if delivery.command is not None
        }
        reports = self._take_new(running)
        now = trio.current_time()
        ended = [key for key in self._stored if key not in running and key not in reports]
        kept = [
            key
            for key, (_, since) in self._stored.items()
            if key in running and key not in reports and now - since >= RENEWAL_INTERVAL
        ]
        calls = self._make_calls(reports, kept, ended)
        if not calls:
            return
        try:
            await self._redis.perform_all(calls)
        except BaseException:
            for key, report in reports.items():
                self._new.setdefault(key, report)  # unless there is a later one
            raise
        for key in ended:
            del self._stored[key]
        for key in kept:
            self._stored[key] = (self._stored[key][0], now)
        self._stored |= {key: (report, now) for key, report in reports.items()}

    def _take_new(self, running: set[JobKey]) -> dict[JobKey, ProgressReport]:
        """Return the new reports of jobs that run, and drop those of jobs that have ended."""
        taken: dict[JobKey, ProgressReport] = {}
        for key in list(self._new):  # threads add to it
            report = self._new.pop(key)
            if key in running and key[0] in self._queues:
                taken[key] = report
        return taken

    def _make_calls(
        self, reports: dict[JobKey, ProgressReport], kept: Iterable[JobKey], ended: Iterable[JobKey]
    ) -> list[Call[bool]]:
        """Return a call for each queue of which there is something to store; more for very many jobs."""
        calls: list[Call[bool]] = []
        for name, keys in self._queues.items():
            fresh = [
                (job, attempt, report) for (queue, job, attempt), report in reports.items() if queue == name
            ]
            lasting = [job for queue, job, _ in kept if queue == name]
            # An attempt that has ended, of a job of which another one runs here: that report takes its place.
            again = {job for job, _, _ in fresh}
            over = [job for queue, job, _ in ended if queue == name and job not in again]
            count = max(len(fresh), len(lasting), len(over))
            for start in range(0, count, MAX_JOBS_PER_CALL):
                part = slice(start, start + MAX_JOBS_PER_CALL)
                calls.append(self._make_call(keys, fresh[part], lasting[part], over[part]))
        return calls

    def _make_call(
        self,
        keys: QueueKeys,
        reports: list[tuple[str, int, ProgressReport]],
        kept: list[str],
        ended: list[str],
    ) -> Call[bool]:
        return jobs_calls.record_progress(
            keys, self._worker, ttl=PROGRESS_TTL, reports=reports, kept=kept, ended=ended
        )
