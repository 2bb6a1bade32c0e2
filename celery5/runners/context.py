"""Context: which job the code that runs now belongs to."""

import logging
from collections.abc import Mapping
from contextvars import Context, ContextVar
from datetime import timedelta
from decimal import getcontext, setcontext
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, cast

import msgspec

from celery5.errors import Misconfigured, Retry
from celery5.protocol.job.retry_policy import RetryPolicy


class CurrentJob(msgspec.Struct, frozen=True, omit_defaults=True):
    """The job that is running: its id, its task's name, its queue, the attempt (from 1), the worker's name, how
    often it was tried again for each of its `retry` sections so far, by their names, and the context of the `trace`
    that it belongs to, '' for none."""

    id: str
    task: str
    queue: str
    attempt: int
    worker: str
    sections: Mapping[str, int] | None = None
    trace: str = ""

    def retry(
        self,
        *,
        countdown: float | timedelta | None = None,
        max_retries: int | None = None,
        retry_policy: RetryPolicy | Mapping[str, Any] | None = None,
        exc: BaseException | None = None,
    ) -> NoReturn:
        """Have the job tried again (C22): raises `Retry`, so nothing after it is run.

        After `countdown` seconds, or as the retry policy says: `retry_policy` instead of the task's own, with
        `max_retries` instead of the policy's. `exc` is the error that the history remembers; without it, the one that
        is being handled. Raises Misconfigured for what makes no sense.
        """
        policy = None if retry_policy is None else RetryPolicy.parse(retry_policy)
        asked = Retry(countdown=countdown, max_retries=max_retries)
        asked.retry_policy = policy
        if exc is None:
            raise asked
        if not isinstance(cast("object", exc), BaseException):
            raise Misconfigured(f"exc is {exc!r}: give the error itself")
        raise asked from exc

    if not TYPE_CHECKING:  # a checker knows what is there

        def __getattr__(self, name: str) -> Any:
            ours = CELERY_EQUIVALENTS.get(name)
            hint = f'; for Celery\'s {name} there is {ours} (guide: "From Celery")' if ours else ""
            raise AttributeError(f"'CurrentJob' object has no attribute {name!r}{hint}", name=name, obj=self)


CELERY_EQUIVALENTS = {
    "request": "the job itself: self.id, self.queue, self.attempt, and self.attempt - 1 for its retries",
    "name": "self.task",
    "max_retries": "RetryPolicy: the worker counts",
    "update_state": "nothing: a job has no states of its own",
}
"""What Celery calls by another name on the `self` of a bound task."""


class LogEvent(Protocol):
    """Writes an event to a log: its name, its level, its fields."""

    def __call__(self, name: str, level: Any, /, **fields: Any) -> None: ...


def _plainly(name: str, level: Any, /, **fields: Any) -> None:
    """Outside of a worker there is Python's own log."""
    said = "  ".join(f"{field}={value}" for field, value in fields.items())
    logging.getLogger("celery5").log(logging.getLevelNamesMapping()[level.upper()], "%s  %s", name, said)


CURRENT_JOB: ContextVar[CurrentJob | None] = ContextVar("celery5_current_job", default=None)
LOG_EVENT: ContextVar[LogEvent] = ContextVar("celery5_tell", default=_plainly)
"""What code that runs for a job tells the worker's log with."""


def current_job() -> CurrentJob | None:
    """The job that this code runs for; None outside of a worker. Works in async tasks and in threads."""
    return CURRENT_JOB.get()


def isolate_decimal_context() -> None:
    """Give the context that this is called in a decimal context of its own, if it has inherited one: the one value
    that is changed in place, so that copies of a context share it."""
    if _DECIMALS.get(None) is not None:
        setcontext(getcontext().copy())


def _decimals() -> ContextVar[object]:
    """The variable that `decimal` keeps its context in. It has no name there."""
    empty = Context()
    empty.run(getcontext)
    return next(iter(empty))


_DECIMALS = _decimals()
