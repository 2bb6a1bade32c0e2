"""Sentry: transactions of jobs with the fields of Sentry's page Queues, and the errors of jobs that are dead.

It needs the package sentry-sdk (extra `sentry`), which the application sets up by `sentry_sdk.init(...)`.
"""

from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from typing import Any

from celery5.errors import Misconfigured
from celery5.extras import describe_installation
from celery5.middleware.jobs import IncomingJob, OutgoingJob, SendingBatch, get_raised
from celery5.middleware.middleware import Middleware
from celery5.middleware.outcomes import Dead, Expired, JobOutcome, Rejected, Released, Retrying, Revoked

ORIGIN = "auto.queue.celery5"
_MECHANISM = {"type": "celery5", "handled": False}
_STATUS: dict[type[JobOutcome], str] = {
    Retrying: "internal_error",
    Dead: "internal_error",
    Revoked: "cancelled",
    Released: "aborted",
    Rejected: "failed_precondition",
    Expired: "deadline_exceeded",
}
"""What Sentry calls an outcome; `ok` is a success."""


class SentryMiddleware(Middleware):
    """Reports jobs to Sentry.

    Args:
        capture_retries: Whether errors are reported whose job is tried again, too.

    Raises:
        Misconfigured: The package sentry-sdk is not installed.
    """

    def __init__(self, *, capture_retries: bool = False) -> None:
        try:
            self._sdk: Any = import_module("sentry_sdk")
            self._utils: Any = import_module("sentry_sdk.utils")
        except ImportError as error:
            raise Misconfigured(
                f"reports to Sentry need a package: {describe_installation('sentry')} ({error})"
            ) from None
        self._captures_retries = capture_retries

    def sending(self, batch: SendingBatch) -> AbstractContextManager[Any] | None:
        """Make a span `queue.publish`, and put its trace into the messages."""
        return self._publish(batch) if batch.jobs and self._sdk.is_initialized() else None

    @contextmanager
    def _publish(self, batch: SendingBatch) -> Generator[None, None, None]:
        jobs = batch.jobs
        with self._sdk.start_span(op="queue.publish", name=jobs[0].name, origin=ORIGIN) as span:
            for name, value in _describe_sending(jobs).items():
                span.set_data(name, value)
            trace, baggage = self._sdk.get_traceparent(), self._sdk.get_baggage()
            for job in jobs:
                if trace:
                    job.headers["sentry-trace"] = trace
                if baggage:
                    others = [
                        item
                        for item in job.headers.get("baggage", "").split(",")
                        if item and not item.strip().startswith("sentry-")
                    ]
                    job.headers["baggage"] = ",".join([*others, baggage])
            yield
            if batch.error is not None:
                span.set_status("internal_error")

    def running(self, job: IncomingJob) -> AbstractContextManager[Any] | None:
        """Make a transaction `queue.process`, and report the error of a job that is dead."""
        return self._process(job) if self._sdk.is_initialized() else None

    @contextmanager
    def _process(self, job: IncomingJob) -> Generator[None, None, None]:
        with self._sdk.isolation_scope() as scope:
            scope.set_context("celery5", {"job": job.id, "task": job.task, "attempt": job.attempt})
            transaction = self._sdk.continue_trace(
                dict(job.headers), op="queue.process", name=job.task, source="task", origin=ORIGIN
            )
            with self._sdk.start_transaction(transaction) as started:
                for name, value in _describe_running(job).items():
                    started.set_data(name, value)
                yield
                outcome = job.outcome
                if outcome is None or (isinstance(outcome, Retrying) and outcome.is_requested):
                    started.set_status("ok")
                    return
                started.set_status(_STATUS.get(type(outcome), "ok"))
                if isinstance(outcome, Dead) or (self._captures_retries and isinstance(outcome, Retrying)):
                    self._capture(job, outcome)

    def unstarted(self, job: IncomingJob) -> None:
        """Report a job that died without being run: its task is unknown, say."""
        if isinstance(job.outcome, Dead) and self._sdk.is_initialized():
            with self._sdk.isolation_scope() as scope:
                scope.set_context("celery5", {"job": job.id, "task": job.task, "attempt": job.attempt})
                self._capture(job, job.outcome)

    def _capture(self, job: IncomingJob, outcome: Dead | Retrying) -> None:
        raised = get_raised(job)
        if raised is not None:
            event, hint = self._utils.event_from_exception(
                raised, client_options=self._sdk.get_client().options, mechanism=_MECHANISM
            )
        else:  # of a box, or of celery5: there is a text
            value = {"type": outcome.error.type, "value": outcome.error.message, "mechanism": _MECHANISM}
            event, hint = {"level": "error", "exception": {"values": [value]}}, {}
        self._sdk.capture_event(event, hint=hint)


def _describe_sending(jobs: Sequence[OutgoingJob]) -> dict[str, Any]:
    fields: dict[str, Any] = {"messaging.system": "celery5", "messaging.destination.name": jobs[0].queue}
    if len(jobs) > 1:
        return {**fields, "messaging.batch.message_count": len(jobs)}
    return {
        **fields,
        "messaging.message.id": jobs[0].id,
        "messaging.message.body.size": jobs[0].size,
    }


def _describe_running(job: IncomingJob) -> dict[str, Any]:
    return {
        "messaging.system": "celery5",
        "messaging.message.id": job.id,
        "messaging.destination.name": job.queue,
        "messaging.message.body.size": job.size,
        "messaging.message.receive.latency": max(0.0, (job.received - job.queued) * 1000),
        "messaging.message.retry.count": job.attempt - 1,
    }
