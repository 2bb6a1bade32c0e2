"""The context of the job that runs: which job it is, and where its events are logged."""

import logging
from collections.abc import Callable, Mapping
from contextvars import Context, ContextVar
from datetime import timedelta
from decimal import getcontext, setcontext
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, cast

import msgspec

from celery5.errors import Misconfigured, Retry
from celery5.protocol.job.delivery import AssignedResources
from celery5.protocol.job.progress import ProgressReport
from celery5.protocol.job.retry_policy import RetryPolicy
from celery5.protocol.masking import mask_fields
from celery5.protocol.workflows.member_ids import get_run_id


class CurrentJob(msgspec.Struct, frozen=True, omit_defaults=True):
    """The job that is running."""

    id: str
    task: str  # its name
    queue: str
    attempt: int  # from 1
    worker: str  # its name
    sections: Mapping[str, int] | None = None  # retries so far, by the names of the job's `retry` sections
    trace: str = ""  # the trace context; empty for none
    assigned: AssignedResources | None = None  # what it has of the worker's capacity

    def retry(
        self,
        *,
        countdown: float | timedelta | None = None,
        max_retries: int | None = None,
        retry_policy: RetryPolicy | Mapping[str, Any] | None = None,
        exc: BaseException | None = None,
    ) -> NoReturn:
        """Retry the job: raise `Retry`, so that nothing after this call is run.

        Args:
            countdown: Seconds until the next attempt; by default the retry policy decides.
            max_retries: Replaces the policy's number.
            retry_policy: Replaces the task's own policy.
            exc: The error that is stored in the job's history; by default the one that is being handled.

        Raises:
            Retry: Always.
            Misconfigured: An argument is invalid.
        """
        policy = None if retry_policy is None else RetryPolicy.parse(retry_policy)
        retry = Retry(countdown=countdown, max_retries=max_retries)
        retry.retry_policy = policy
        if exc is None:
            raise retry
        if not isinstance(cast("object", exc), BaseException):
            raise Misconfigured(f"exc is {exc!r}: give the error itself")
        raise retry from exc

    @property
    def resources(self) -> Mapping[str, float]:
        """What it has of its worker's capacity, by the task's `resources=`."""
        return {} if self.assigned is None else self.assigned.amounts

    @property
    def devices(self) -> tuple[int, ...]:
        """The numbers of its GPUs, as this process counts them. No other job has them, unless it has a part of one."""
        return () if self.assigned is None else self.assigned.devices

    @property
    def run_id(self) -> str:
        """The id of the run of a workflow that the job belongs to; empty for none."""
        return get_run_id(self.id)

    if not TYPE_CHECKING:  # type checkers know the attributes

        def __getattr__(self, name: str) -> Any:
            equivalent = CELERY_EQUIVALENTS.get(name)
            hint = (
                f"; for Celery's {name} there is {equivalent} (see celery5 docs from-celery)"
                if equivalent
                else ""
            )
            text = f"'CurrentJob' object has no attribute {name!r}{hint}"
            raise AttributeError(text, name=name, obj=None if hint else self)


CELERY_EQUIVALENTS = {
    "request": "the job itself: self.id, self.queue, self.attempt, and self.attempt - 1 for its retries",
    "name": "self.task",
    "max_retries": "RetryPolicy: the worker counts",
    "update_state": "progress(done, total, note)",
}
"""Equivalents of attributes that Celery has on the `self` of a bound task."""


class LogEvent(Protocol):
    """Writes an event with its name, level and fields to a log."""

    def __call__(self, name: str, level: Any, /, **fields: Any) -> None: ...


def _log_with_stdlib(name: str, level: Any, /, **fields: Any) -> None:
    """Write an event to Python's own log: outside of a worker there is no other."""
    text = "  ".join(f"{field}={value}" for field, value in mask_fields(fields).items())
    logging.getLogger("celery5").log(logging.getLevelNamesMapping()[level.upper()], "%s  %s", name, text)


CURRENT_JOB: ContextVar[CurrentJob | None] = ContextVar("celery5_current_job", default=None)
LOG_EVENT: ContextVar[LogEvent] = ContextVar("celery5_tell", default=_log_with_stdlib)
"""Writes events of code that runs for a job to the worker's log."""


JOB_PLACE: ContextVar[Callable[[CurrentJob], str] | None] = ContextVar("celery5_job_place", default=None)
"""Returns where another process continues the eliot action of a job; None outside of a worker."""


class ProgressReceiver(Protocol):
    """Takes what jobs report of their progress, in any thread. It never waits."""

    def __call__(self, job: CurrentJob, report: ProgressReport, /) -> None: ...


PROGRESS_RECEIVER: ContextVar[ProgressReceiver | None] = ContextVar("celery5_progress_receiver", default=None)
"""Takes what the running job reports of its progress; None outside of a worker."""


class ErrorObserver(Protocol):
    """Learns what a task has raised, in whatever thread that is."""

    def note_error(self, error: BaseException, /) -> None: ...


JOB_ERRORS: ContextVar[ErrorObserver | None] = ContextVar("celery5_job_errors", default=None)
"""Learns the errors of the job that runs, for its middleware; None where there is none."""

CURRENT_PARTITION: ContextVar[Mapping[str, object] | None] = ContextVar("celery5_partition", default=None)
"""The worker, stream, processor and partition that this code runs for; None outside of a processor."""


def get_log_fields() -> dict[str, object]:
    """Return what each line has that this code logs: its job, or its partition of a stream; nothing outside of both."""
    job = CURRENT_JOB.get()
    if job is None:
        return dict(CURRENT_PARTITION.get() or {})
    fields: dict[str, object] = {"job": job.id, "task": job.task, "worker": job.worker}
    if job.trace:
        fields["trace"] = job.trace
    if job.run_id:
        fields["run"] = job.run_id
    return fields


def current_job() -> CurrentJob | None:
    """Return the job that this code runs for; None outside of a worker. Works in async tasks and in threads."""
    return CURRENT_JOB.get()


def isolate_decimal_context() -> None:
    """Copy the decimal context if the current context has inherited one.

    A decimal context is changed in place, so copies of a context would share it.
    """
    if _DECIMAL_CONTEXT.get(None) is not None:
        setcontext(getcontext().copy())


def _find_decimal_variable() -> ContextVar[object]:
    """Return the variable in which `decimal` keeps its context. It has no public name."""
    empty = Context()
    empty.run(getcontext)
    return next(iter(empty))


_DECIMAL_CONTEXT = _find_decimal_variable()
