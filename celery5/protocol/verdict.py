"""Verdict: what happens to a job once we know how it went. The one place of this decision.

Floor: protocol. Reads: nothing. Writes: nothing.
"""

from collections.abc import Callable
from enum import StrEnum
from typing import assert_never

import msgspec

from celery5.protocol.envelope import Failure
from celery5.protocol.retry import RetryPolicy


class Reason(StrEnum):
    """Why a job is in the dead-letter queue."""

    EXHAUSTED = "exhausted"  # every attempt failed
    POISONED = "poisoned"  # it took its worker down too often
    UNKNOWN_TASK = "unknown-task"
    BAD_ARGUMENTS = "bad-arguments"
    UNENCODABLE_RESULT = "unencodable-result"
    RESULT_TOO_LARGE = "result-too-large"
    CORRUPT = "corrupt"


class Returned(msgspec.Struct, frozen=True, gc=False):
    """The task returned; `value` is its result, encoded."""

    value: bytes


class Raised(msgspec.Struct, frozen=True):
    """The task raised."""

    failure: Failure


class Stranded(msgspec.Struct, frozen=True):
    """The task raised what celery5 raises when the broker cannot be reached, and the worker cannot reach it either."""

    failure: Failure


class Interrupted(msgspec.Struct, frozen=True):
    """The worker left before the task was done. The job did nothing wrong."""


class Lapsed(msgspec.Struct, frozen=True):
    """The job's `expires` had passed before it could start."""


class Refused(msgspec.Struct, frozen=True):
    """The job cannot be run here or its result cannot be kept; trying again would not help."""

    reason: Reason
    failure: Failure


Outcome = Returned | Raised | Stranded | Interrupted | Lapsed | Refused


class Complete(msgspec.Struct, frozen=True, gc=False):
    """Store the result and acknowledge."""

    value: bytes


class Retry(msgspec.Struct, frozen=True):
    """Try again after `delay` seconds."""

    delay: float
    failure: Failure


class Bury(msgspec.Struct, frozen=True):
    """Move the job to the dead-letter queue."""

    reason: Reason
    failure: Failure


class Release(msgspec.Struct, frozen=True):
    """Give the job back to its queue; no attempt is counted (I9)."""


class Postpone(msgspec.Struct, frozen=True):
    """Run this attempt again after `delay` seconds; it is not counted (I9)."""

    delay: float
    failure: Failure


class Expire(msgspec.Struct, frozen=True):
    """Drop the job and say so."""


Verdict = Complete | Retry | Bury | Release | Postpone | Expire

PAUSE = 1.0
"""Seconds after which a job that could not reach the broker runs again."""

_RELEASE = Release()
_EXPIRE = Expire()


def judge(outcome: Outcome, *, attempt: int, policy: RetryPolicy, random: Callable[[], float]) -> Verdict:
    """Decide. `attempt` counts from 1; `random` gives numbers in [0, 1)."""
    match outcome:
        case Returned(value):
            return Complete(value)
        case Raised(failure) if policy.allows(attempt):
            return Retry(policy.delay(attempt, random), failure)
        case Raised(failure):
            return Bury(Reason.EXHAUSTED, failure)
        case Refused(reason, failure):
            return Bury(reason, failure)
        case Stranded(failure):
            return Postpone(PAUSE, failure)
        case Interrupted():
            return _RELEASE
        case Lapsed():
            return _EXPIRE
        case _:
            assert_never(outcome)
