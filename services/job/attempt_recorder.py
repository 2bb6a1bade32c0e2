"""Record attempts that have ended on this worker for the history of jobs."""

from collections.abc import Mapping
from typing import Any

import msgspec

from celery5.logs.fence import FENCE
from celery5.protocol.job.delivery import Delivery
from celery5.protocol.job.history import NO_SHAPE, STATES, JobRecord, Kept, make_attempt_record
from celery5.protocol.job.messages import read_job_id
from celery5.protocol.job.verdict import Verdict
from celery5.protocol.observability.ended_jobs import EndedJobs, SuccessWatch
from celery5.tasks.task import Task


class AttemptRecorder:
    """Makes records of the attempts that are kept. What fails here is noted, and harms no job.

    Args:
        ended_jobs: Keeps the records until they are sent.
        keeps_history: Whether there is a history. Without one nothing is recorded.
    """

    def __init__(
        self,
        *,
        tasks: Mapping[str, Task[..., Any]],
        worker: str,
        ended_jobs: EndedJobs,
        keeps_history: bool,
    ) -> None:
        self._tasks = tasks
        self._worker = worker
        self._ended_jobs = ended_jobs
        self._keeps_history = keeps_history

    def record_failure(self, delivery: Delivery, verdict: Verdict, waited: float | None) -> None:
        """Keep an attempt that has ended otherwise than with success, unless the job only goes back to its queue."""
        if self._keeps_history and type(verdict) in STATES:
            with FENCE("history"):
                self._ended_jobs.add_failure(lambda: self._make(delivery, verdict, waited, "failure"))

    def record_success(
        self, watch: SuccessWatch, delivery: Delivery, verdict: Verdict, seconds: float, waited: float
    ) -> None:
        """Keep a success that the watch has asked for."""
        if not self._keeps_history:
            watch.close()
            return
        with FENCE("history"):
            self._ended_jobs.add_success(
                watch,
                seconds,
                delivery.finished,
                lambda is_slow: self._make(delivery, verdict, waited, "slow" if is_slow else "sample"),
            )

    def _make(self, delivery: Delivery, verdict: Verdict, waited: float | None, kept: Kept) -> JobRecord:
        task = self._tasks.get(delivery.command.task) if delivery.command else None
        shape = task.call_shape if task is not None else NO_SHAPE
        record = make_attempt_record(delivery, verdict, shape, worker=self._worker, waited=waited, kept=kept)
        if delivery.command is None:
            return msgspec.structs.replace(record, id=read_job_id(delivery.message))
        return record
