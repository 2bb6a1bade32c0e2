"""Jobs as middleware sees them: on their way out of a process, and in a worker."""

from collections.abc import Mapping, Sequence
from typing import Literal, cast

import msgspec

from celery5.broker.keys import EVENTS
from celery5.errors import TaskFailed
from celery5.middleware.outcomes import Dead, JobOutcome, Retrying, make_job_outcome
from celery5.protocol.job.delivery import Delivery
from celery5.protocol.job.job import Job
from celery5.protocol.job.messages import (
    TRACEPARENT,
    Command,
    add_headers,
    get_entry_time,
    read_headers,
    read_job_id,
)
from celery5.protocol.job.verdict import Verdict
from celery5.protocol.workflows.member_ids import get_run_id

MAX_HEADER_BYTES = 8192
"""The most bytes that middleware may add to a message."""


def check_headers(headers: Mapping[str, str]) -> None:
    """Raise ValueError for headers that are no texts, or too large."""
    size = 0
    for name, value in headers.items():
        if not all(isinstance(text, str) for text in cast("tuple[object, ...]", (name, value))):
            raise ValueError(f"header {name!r} is {value!r}: names and values are texts")
        for text in (name, value):
            if not text.isascii():
                text.encode()  # half of a surrogate pair has no form in a message
        size += len(name) + len(value)
    if size > MAX_HEADER_BYTES:
        raise ValueError(f"the headers have {size} characters, over the limit of {MAX_HEADER_BYTES}")


class OutgoingJob:
    """A job, an event, or a run of a workflow that is being sent."""

    def __init__(self, job: Job, *, is_run: bool = False) -> None:
        self._job = job
        self._is_run = is_run
        self._headers: dict[str, str] | None = None
        self._before: dict[str, str] = {}

    @property
    def id(self) -> str:
        """The id of the job, of the event, or of the run."""
        return self._job.id

    @property
    def name(self) -> str:
        """The name of the task, of the event, or of the workflow."""
        return self._job.task

    @property
    def queue(self) -> str:
        """The name of the queue that it goes to; `events` for an event."""
        return "events" if self._job.queue == EVENTS else self._job.queue

    @property
    def kind(self) -> Literal["job", "event", "run"]:
        """What it is."""
        if self._is_run:
            return "run"
        return "event" if self._job.queue == EVENTS else "job"

    @property
    def size(self) -> int:
        """Bytes of the message, without what middleware adds; 0 for a run."""
        return len(self._job.message) if not self._is_run else 0

    @property
    def run_id(self) -> str:
        """The id of the run of a workflow that it is or belongs to; '' for none."""
        return self._job.id if self._is_run else get_run_id(self._job.id)

    @property
    def headers(self) -> dict[str, str]:
        """The headers of the message, to be changed by middleware: texts by name.

        They travel with the job through all its attempts, and from an event to the jobs of its subscribers. The header
        `traceparent` is the trace context of logs, too.
        """
        if self._headers is None:
            self._before = read_headers(self._job.message)
            self._headers = self._before.copy()
        return self._headers

    def make_job(self) -> Job:
        """Return the job with its headers.

        Raises:
            ValueError: The headers are no texts, or too large.
        """
        if self._headers is None or self._headers == self._before:
            return self._job
        check_headers(self._headers)
        return msgspec.structs.replace(self._job, message=add_headers(self._job.message, self._headers))


def get_sent_job(outgoing: OutgoingJob) -> Job:
    """Return the job that is being sent, with its arguments, which middleware does not see. For the testing kit."""
    return outgoing.make_job()


class SendingBatch:
    """What is sent in one step: one job for `delay`, many for `send_many`."""

    def __init__(self, jobs: Sequence[OutgoingJob]) -> None:
        self.jobs: tuple[OutgoingJob, ...] = tuple(jobs)
        self._error: BaseException | None = None

    @property
    def error(self) -> BaseException | None:
        """Why nothing, or not all, was sent; None as long as it is not known, and when all was."""
        return self._error

    def fail(self, error: BaseException) -> None:
        """Note why it was not sent."""
        self._error = error


class IncomingJob(msgspec.Struct, eq=False):
    """A job in a worker."""

    _delivery: Delivery
    _worker: str
    _outcome: JobOutcome | None = None
    _exception: BaseException | None = None
    _text_error: TaskFailed | None = None
    _carried: dict[str, str] | None = None

    @property
    def id(self) -> str:
        """Its id; '' when its message is unreadable."""
        command = self._delivery.command
        return read_job_id(self._delivery.message) if command is None else command.id

    @property
    def task(self) -> str:
        """The name of its task; '' when its message is unreadable."""
        command = self._delivery.command
        return "" if command is None else command.task

    @property
    def queue(self) -> str:
        """The name of its queue."""
        return self._delivery.queue

    @property
    def worker(self) -> str:
        """The name of the worker."""
        return self._worker

    @property
    def attempt(self) -> int:
        """The number of this attempt, from 1."""
        command = self._delivery.command
        return 1 if command is None else command.attempt

    @property
    def sent(self) -> float:
        """When it was sent, in seconds since 1970; 0 when that is not known."""
        return self._delivery.sent

    @property
    def queued(self) -> float:
        """When it was put on its queue and might run, in seconds since 1970 by Redis' clock.

        That is after a countdown, the delay of a retry, or its wait for a limit. For a job that was put there by hand
        under its own id it is when it was received.
        """
        return get_entry_time(self._delivery.entry) or self.received

    @property
    def received(self) -> float:
        """When the worker has read it, in seconds since 1970."""
        return self._delivery.read

    @property
    def size(self) -> int:
        """Bytes of its message."""
        return len(self._delivery.message)

    @property
    def run_id(self) -> str:
        """The id of the run of a workflow that it belongs to; '' for none."""
        return get_run_id(self.id)

    @property
    def trace(self) -> str:
        """Its trace context, a W3C traceparent; '' for none."""
        command = self._delivery.command
        return "" if command is None else command.trace

    @property
    def headers(self) -> Mapping[str, str]:
        """Its headers, with `traceparent` when it has a trace context."""
        command = self._delivery.command
        return {} if command is None else _get_headers(command)

    @property
    def outcome(self) -> JobOutcome | None:
        """What became of it; None as long as it runs."""
        return self._outcome

    @property
    def exception(self) -> BaseException | None:
        """The error of a failed attempt; None when it has not failed.

        It is what the task raised. Of a `Retry` it is the error that it was for, `exc`, as in the dead letter. Where
        the task raised nothing in this process, it is a `TaskFailed` with the text of the error, as `get()` raises it:
        of a boxed task, at a time limit, for arguments that do not fit, for an unknown task.
        """
        if self._exception is not None:
            return self._exception
        if self._text_error is None and isinstance(self._outcome, Dead | Retrying):
            self._text_error = self._make_error(self._outcome)
        return self._text_error

    def _make_error(self, outcome: Dead | Retrying) -> TaskFailed:
        error = outcome.error
        return TaskFailed(
            job_id=self.id,
            task=self.task,
            type=error.type,
            message=error.message,
            error_args=error.args,
            traceback=error.traceback,
            attempt=self.attempt,
            worker=self.worker,
            reason=outcome.reason.value if isinstance(outcome, Dead) else "retried",
        )

    def carry(self, headers: Mapping[str, str]) -> None:
        """Add headers to the message, in case that the job comes again: for a retry, or from the dead-letter queue.

        Raises:
            ValueError: They are no texts, or too large together with those that the job has.
        """
        carried = {**(self._carried or {}), **headers}
        check_headers({**self.headers, **carried})
        self._carried = carried

    @property
    def carried(self) -> Mapping[str, str] | None:
        """The headers that `carry` has added."""
        return self._carried

    def finish(self, verdict: Verdict) -> None:
        """Note what becomes of the job."""
        self._outcome = make_job_outcome(verdict)

    def note_error(self, error: BaseException) -> None:
        """Note what the task has raised."""
        self._exception = error


def get_command(job: IncomingJob) -> Command | None:
    """Return the message of a job, with its arguments, which middleware does not see. For the testing kit.

    None when it is unreadable.
    """
    return job._delivery.command  # pyright: ignore[reportPrivateUsage]


def get_raised(job: IncomingJob) -> BaseException | None:
    """Return what the task has raised in this process; None when only the text of an error is known."""
    return job._exception  # pyright: ignore[reportPrivateUsage]


def _get_headers(command: Command) -> Mapping[str, str]:
    headers = command.headers or {}
    return {TRACEPARENT: command.trace, **headers} if command.trace else headers


class SettlingBatch:
    """Jobs of one queue whose outcomes a worker stores in one step."""

    def __init__(self, queue: str, jobs: Sequence[IncomingJob]) -> None:
        self.queue: str = queue
        self.jobs: tuple[IncomingJob, ...] = tuple(jobs)
        self._error: BaseException | None = None

    @property
    def error(self) -> BaseException | None:
        """Why the outcomes could not be stored; None when they were."""
        return self._error

    def fail(self, error: BaseException) -> None:
        """Note why they could not be stored."""
        self._error = error
