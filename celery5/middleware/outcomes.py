"""Outcomes: what became of a job, as middleware sees it."""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from celery5.protocol.job.messages import Failure
from celery5.protocol.job.verdict import (
    Complete,
    Expire,
    FailForGood,
    HandOver,
    Hold,
    Postpone,
    Reason,
    RejectVerdict,
    Release,
    RetryVerdict,
    Revoke,
    Verdict,
    is_plain_request,
)

_TIME_LIMITS = ("TimeLimitExceeded", "SoftTimeLimitExceeded")


class Succeeded(msgspec.Struct, frozen=True):
    """The task returned."""


class Retrying(msgspec.Struct, frozen=True):
    """There will be another attempt: this one failed, or asked for it."""

    # Seconds until the next attempt.
    delay: float
    error: Failure

    @property
    def is_requested(self) -> bool:
        """Whether the task asked for the next attempt, and for no error: then this one has not failed."""
        return is_plain_request(self.error)

    @property
    def timed_out(self) -> bool:
        """Whether the attempt ran for longer than a time limit."""
        return self.error.type in _TIME_LIMITS


class Dead(msgspec.Struct, frozen=True):
    """The job failed for good, and is in the dead-letter queue."""

    reason: Reason
    error: Failure

    @property
    def timed_out(self) -> bool:
        """Whether the last attempt ran for longer than a time limit."""
        return self.error.type in _TIME_LIMITS


class Revoked(msgspec.Struct, frozen=True):
    """The job was revoked."""


class Rejected(msgspec.Struct, frozen=True):
    """The task, or its policy for duplicates, rejected the job. That is no failure."""

    reason: str


class Expired(msgspec.Struct, frozen=True):
    """The job came too late: its `expires` had passed."""


class Released(msgspec.Struct, frozen=True):
    """The job goes back to its queue, and the attempt is not counted.

    So it is when its worker stops, when its broker is unreachable, or while a circuit breaker or a rate holds it up.
    """

    # Seconds until it may begin again.
    delay: float = 0.0
    # Why, where that is known.
    reason: str = ""


JobOutcome = Succeeded | Retrying | Dead | Revoked | Rejected | Expired | Released
"""What became of a job in a worker."""

_SUCCEEDED = Succeeded()
_MAKERS: Mapping[type, Callable[[Any], JobOutcome]] = {
    RetryVerdict: lambda verdict: Retrying(verdict.delay, verdict.failure),
    FailForGood: lambda verdict: Dead(verdict.reason, verdict.failure),
    Revoke: lambda _verdict: Revoked(),
    RejectVerdict: lambda verdict: Rejected(verdict.reason),
    Expire: lambda _verdict: Expired(),
    Release: lambda _verdict: Released(),
    Hold: lambda verdict: Released(verdict.delay, verdict.reason),
    HandOver: lambda verdict: Released(verdict.delay, verdict.reason),
    Postpone: lambda verdict: Released(verdict.delay, verdict.failure.message),
}


def make_job_outcome(verdict: Verdict) -> JobOutcome:
    """Return what a verdict means for the job."""
    if type(verdict) is Complete:  # the most frequent
        return _SUCCEEDED
    return _MAKERS[type(verdict)](verdict)
