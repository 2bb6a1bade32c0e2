"""End the jobs of this worker that no executor has taken."""

from collections.abc import Mapping
from typing import Any

from celery5.logs.log import Log
from celery5.protocol.job.delivery import Delivery, make_drop, make_settlement
from celery5.protocol.job.messages import Command, Failure, read_job_id
from celery5.protocol.job.verdict import FailForGood, HandOver, Reason, Release
from celery5.protocol.observability.job_tally import UNKNOWN_TASK, JobTally
from celery5.services.job.attempt_recorder import AttemptRecorder
from celery5.services.job.internal_queues import InternalResultsQueue
from celery5.services.job.job_middleware import JobMiddleware
from celery5.tasks.task import Task


class UnstartedJobs:
    """Ends jobs that no executor has taken.

    Args:
        worker: The name of this worker, which stands in the documents.
        results_ttl: Seconds that the document of a job's end is kept.
        tally: Counts the jobs that have ended in this process.
        tasks: The tasks of the application, by name.
    """

    def __init__(
        self,
        *,
        results: InternalResultsQueue,
        log: Log,
        worker: str,
        results_ttl: float,
        tally: JobTally,
        tasks: Mapping[str, Task[..., Any]],
        job_middleware: JobMiddleware,
        attempt_recorder: AttemptRecorder,
    ) -> None:
        self._results = results
        self._log = log
        self._worker = worker
        self._results_ttl = results_ttl
        self._tally = tally
        self._tasks = tasks
        self._job_middleware = job_middleware
        self._attempt_recorder = attempt_recorder

    def settle(self, delivery: Delivery, verdict: FailForGood | Release | HandOver) -> None:
        """Settle a job that is held."""
        settlement = make_settlement(verdict, delivery, worker=self._worker, ttl=self._results_ttl)
        self._results.put((delivery, settlement))

    def refuse(self, delivery: Delivery, reason: Reason, error: str, text: str) -> None:
        """Dead-letter a job that cannot run here, and log it."""
        delivery.finish(delivery.read)
        verdict = FailForGood(reason, Failure(type=error, message=text))
        self._job_middleware.note_unstarted(delivery, verdict)
        self._attempt_recorder.record_failure(delivery, verdict, None)
        self.settle(delivery, verdict)
        command = delivery.command
        job = command.id if command else read_job_id(delivery.message)
        task = command.task if command else ""
        self._tally.count_unstarted(delivery.queue, task if task in self._tasks else UNKNOWN_TASK, "DEAD")
        entry = delivery.entry.decode()
        self._log.log_job(
            "error", job=job, queue=delivery.queue, entry=entry, state="DEAD", reason=reason.value, error=text
        )

    def hand_over(self, delivery: Delivery, verdict: HandOver) -> None:
        """Keep a job of an unknown task for workers that know it, and log it."""
        self.settle(delivery, verdict)
        assert delivery.command is not None
        self._log.log_job(
            "warning", job=delivery.command.id, task=delivery.command.task, queue=delivery.queue,
            entry=delivery.entry.decode(), state="HELD", delay=round(verdict.delay, 3), why=verdict.reason,
        )  # fmt: skip

    def drop_duplicate(self, delivery: Delivery, command: Command) -> None:
        """Remove an entry whose message came before. The job stays as it was."""
        self._results.put((delivery, make_drop(delivery)))
        self._log.event(
            "consumer:duplicate-dropped", "warning", job=command.id, task=command.task, attempt=command.attempt,
            queue=delivery.queue, entry=delivery.entry.decode(),
        )  # fmt: skip
