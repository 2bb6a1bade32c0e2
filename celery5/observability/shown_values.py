"""Mask the values of jobs and records before people are shown them, on every surface alike.

Commands and pages show what they read through these functions, so that a password hidden on one is hidden on all. The
setting `show_raw_values` switches it off. What the API returns to programs is as it was sent, but for the parameters
that a task redacts.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from celery5.application import Application
from celery5.observability.job_sources import get_shape
from celery5.protocol.job.dead_letters import DeadJob
from celery5.protocol.job.failure_groups import DeadJobGroups
from celery5.protocol.job.history import CallShape, mask_call, mask_record, name_arguments
from celery5.protocol.job.messages import Failure
from celery5.protocol.job.story import JobDetails
from celery5.protocol.masking import mask_lines, mask_shown
from celery5.streams.dead_records import StoredDeadRecord

S = TypeVar("S", bound=msgspec.Struct)


def mask_value(app: Application, value: Any) -> Any:
    """Return a record, a result or any other JSON without passwords."""
    return value if app.settings.show_raw_values else mask_shown(value)


def mask_text(app: Application, text: str) -> str:
    """Return the text of an error, or a traceback, without passwords."""
    return text if app.settings.show_raw_values else mask_lines(text)


def mask_dead_job(app: Application, job: DeadJob) -> DeadJob:
    """Return a dead job without passwords in its arguments and errors, nor its message as it is stored."""
    if app.settings.show_raw_values:
        return job
    args, kwargs = mask_call(get_shape(app, job.task), job.args, job.kwargs)
    masked = msgspec.structs.replace(
        job,
        args=args,
        kwargs=kwargs,
        error_args=tuple(map(mask_lines, job.error_args)),
        failures=tuple(map(_mask_failure, job.failures)),
        raw=b"",
    )
    return _mask_texts(masked, "message", "traceback")


def mask_groups(app: Application, found: DeadJobGroups) -> DeadJobGroups:
    """Return groups of dead jobs without passwords in their messages and tracebacks."""
    if app.settings.show_raw_values:
        return found
    groups = tuple(_mask_texts(group, "pattern", "message", "traceback") for group in found.groups)
    return msgspec.structs.replace(found, groups=groups)


def mask_job(app: Application, job: JobDetails) -> JobDetails:
    """Return a job as people are shown it: its arguments named, and no passwords in them, in its result, errors and
    progress.
    """
    shape = get_shape(app, job.task)
    if app.settings.show_raw_values:
        return msgspec.structs.replace(job, arguments=_name_arguments(shape, job))
    args, kwargs = mask_call(shape, job.args, job.kwargs)
    job = msgspec.structs.replace(job, args=args, kwargs=kwargs)
    return msgspec.structs.replace(
        job,
        arguments=_name_arguments(shape, job),
        value=mask_shown(job.value),
        failure=None if job.failure is None else _mask_failure(job.failure),
        failures=tuple(map(_mask_failure, job.failures)),
        progress=None if job.progress is None else _mask_texts(job.progress, "note"),
        reason=mask_lines(job.reason),
        deaths=tuple(_mask_texts(death, "why") for death in job.deaths),
        attempts=tuple(map(mask_record, job.attempts)),
    )


def _name_arguments(shape: CallShape, job: JobDetails) -> Mapping[str, Any]:
    """Return the arguments of a job by parameter; if its message is gone, those of the history."""
    if job.is_from_history or (job.args is None and job.kwargs is None):
        return job.attempts[-1].arguments if job.attempts else {}
    return name_arguments(shape, job.args, job.kwargs)


def mask_dead_record(app: Application, dead: StoredDeadRecord) -> StoredDeadRecord:
    """Return a dead record without passwords in the record and its error."""
    if app.settings.show_raw_values:
        return dead
    masked = msgspec.structs.replace(dead, record=mask_shown(dead.record))
    return _mask_texts(masked, "error", "traceback")


def _mask_failure(failure: Failure) -> Failure:
    masked = msgspec.structs.replace(failure, args=tuple(map(mask_lines, failure.args)))
    return _mask_texts(masked, "message", "traceback")


def _mask_texts(value: S, *names: str) -> S:
    """Return a value with these fields, which are texts, masked."""
    return msgspec.structs.replace(value, **{name: mask_lines(getattr(value, name)) for name in names})
