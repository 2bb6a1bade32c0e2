"""Decide what becomes of a record that a processor has failed at."""

from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from celery5.protocol.job.retry_policy import RetryPolicy

MAX_ERROR_TEXT = 2_000
"""The most characters that are kept of an error."""


class RetryRecord(msgspec.Struct, frozen=True):
    """Try again, in place: what is behind it waits."""

    delay: float  # seconds


class SkipRecord(msgspec.Struct, frozen=True):
    """Make it a dead record, and go on."""


class ParkKey(msgspec.Struct, frozen=True):
    """Set it aside, with all later records of its key, and go on with other keys."""


class QuarantinePartition(msgspec.Struct, frozen=True):
    """Stop the partition for the group, on all workers."""


Decision = RetryRecord | SkipRecord | ParkKey | QuarantinePartition

FailureAction = Literal["ignore", "park-key", "quarantine"]
FAILURE_ACTIONS: tuple[FailureAction, ...] = ("ignore", "park-key", "quarantine")


def decide_failure(
    policy: RetryPolicy,
    then: FailureAction,
    *,
    attempt: int,
    kinds: Sequence[str],
    random: Callable[[], float],
) -> Decision:
    """Return what follows a failure.

    Args:
        policy: How often, and after which delays, a record is tried again.
        then: What follows after that.
        attempt: How often this record has been tried now, from 1.
        kinds: The full names of the error's classes.
        random: Returns a number from 0 to 1, for the jitter.
    """
    if policy.allows(attempt) and policy.covers(kinds):
        return RetryRecord(policy.delay(attempt, random))
    match then:
        case "ignore":
            return SkipRecord()
        case "park-key":
            return ParkKey()
        case "quarantine":
            return QuarantinePartition()


def make_dead_record(
    record_id: bytes, fields: Sequence[bytes], *, partition: int, error: str, traceback: str, attempts: int
) -> tuple[str | bytes, ...]:
    """Return the fields and values of a dead record, in turns."""
    return (
        *("id", record_id, "partition", str(partition), "attempts", str(attempts)),
        *("error", error[:MAX_ERROR_TEXT], "traceback", traceback[-4 * MAX_ERROR_TEXT :]),
        *("fields", msgspec.msgpack.encode(list(fields))),
    )
