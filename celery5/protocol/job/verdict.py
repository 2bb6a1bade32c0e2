"""Decide what happens to a job after its outcome. No other module decides this.

Sections of a task rule on errors. Rulings are an attribute of the error, which is neither replaced nor wrapped: user
code may catch it, a nursery may put it into a group. Each ruling is for one run of one job, since a module may raise
the same object repeatedly.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any, NamedTuple, assert_never, cast

import msgspec

from celery5.errors import Reject, Retry
from celery5.protocol.job.messages import Failure, Refusal
from celery5.protocol.job.retry_policy import RetryPolicy
from celery5.protocol.names import get_class_names


class Reason(StrEnum):
    """Why a job is in the dead-letter queue."""

    EXHAUSTED = "exhausted"  # every attempt failed
    NOT_RETRIED = (
        "not-retried"  # it failed, and is not retried: max_retries=0, or an error that is not retried
    )
    POISONOUS = "poisonous"  # it failed in a `poisonous` section, which is never tried again
    POISONED = "poisoned"  # workers died too often while they ran it
    UNKNOWN_TASK = "unknown-task"
    BAD_ARGUMENTS = "bad-arguments"
    UNENCODABLE_RESULT = "unencodable-result"
    RESULT_TOO_LARGE = "result-too-large"
    CORRUPT = "corrupt"
    REJECTED_BY_LIMIT = "rejected-by-limit"
    UNDELIVERED = "undelivered"  # not the job but its document: a Data Sink refused it
    ABANDONED = (
        "abandoned"  # its next attempt could not be published, and `when_unpublishable` says to give up then
    )


class Returned(msgspec.Struct, frozen=True, gc=False):
    """The task returned; `value` is its result, encoded."""

    value: bytes


class Ruling(msgspec.Struct, frozen=True):
    """The decision of the section in which an error was raised.

    Dead-letter the job with `reason`; without one, try again by `policy`, counted under the section's own name.
    """

    section: str = ""
    policy: RetryPolicy | None = None
    reason: Reason | None = None


class Raised(msgspec.Struct, frozen=True):
    """The task raised.

    `kinds` are the names of each error's class and bases: of one error, or of several in a group. `ruling` is the
    decision of a section.
    """

    failure: Failure
    kinds: tuple[tuple[str, ...], ...] = ()
    ruling: Ruling | None = None


class RetryRequested(msgspec.Struct, frozen=True):
    """The task requested a retry (`raise Retry(...)`).

    Without a value, the task's own policy counts.
    """

    failure: Failure
    countdown: float | None = None  # seconds
    policy: RetryPolicy | None = None
    max_retries: int | None = None


class JobRejected(msgspec.Struct, frozen=True):
    """The task, or its `deduplicate` policy, rejected this job. That is no failure."""

    reason: str


class JobRevoked(msgspec.Struct, frozen=True):
    """The job was revoked before it ended, and did not end otherwise."""


class BrokerLost(msgspec.Struct, frozen=True):
    """The task raised BrokerUnavailable, and the worker cannot reach the broker either.

    If the worker can reach it, the outcome is `Raised`, like any other failure.
    """

    failure: Failure
    raised: Raised | None = None
    # Redis answers and takes no writes: what the runtime itself was to write for the job is written later.
    is_refused: bool = False


class Interrupted(msgspec.Struct, frozen=True):
    """The worker left before the task was done. The job did nothing wrong."""


class JobExpired(msgspec.Struct, frozen=True):
    """The job's `expires` had passed before it could start."""


class StartMissed(msgspec.Struct, frozen=True):
    """The job began too late: its rate limit allowed it to begin only until a certain time. It waits again."""


JOB_REVOKED, INTERRUPTED, JOB_EXPIRED, START_MISSED = JobRevoked(), Interrupted(), JobExpired(), StartMissed()
"""The outcomes without data."""


class PermanentFailure(msgspec.Struct, frozen=True):
    """This worker cannot run the job, or the result cannot be kept; trying again would not help."""

    reason: Reason
    failure: Failure


class CircuitBlocked(msgspec.Struct, frozen=True):
    """The task's circuit breaker is open, so the job was not begun.

    It is held for `delay` seconds. Without a delay it has failed, by an error whose class and bases are `kinds`.
    """

    failure: Failure
    kinds: tuple[str, ...] = ()
    delay: float | None = None


class ForeignJob(msgspec.Struct, frozen=True):
    """This worker's code cannot run the job, and other code may: it is kept for that, and looked at after `delay`."""

    failure: Failure
    refusal: Refusal
    delay: float


Outcome = (
    Returned
    | Raised
    | RetryRequested
    | JobRejected
    | JobRevoked
    | BrokerLost
    | Interrupted
    | JobExpired
    | StartMissed
    | PermanentFailure
    | CircuitBlocked
    | ForeignJob
)


class Complete(msgspec.Struct, frozen=True, gc=False):
    """Store the result and acknowledge."""

    value: bytes


class RetryVerdict(msgspec.Struct, frozen=True):
    """Try again after `delay` seconds.

    The retry is counted for `section` when one is named, else for the task. `note` says what is wrong with the user's
    own backoff, if anything is.
    """

    delay: float
    failure: Failure
    section: str = ""
    backoff_error: str = ""

    @property
    def is_requested(self) -> bool:
        """Whether the task asked for it, and for no error: the attempt has not failed."""
        return is_plain_request(self.failure)


class FailForGood(msgspec.Struct, frozen=True):
    """Move the job to the dead-letter queue."""

    reason: Reason
    failure: Failure


class Release(msgspec.Struct, frozen=True):
    """Return the job to its queue; no attempt is counted."""


class Postpone(msgspec.Struct, frozen=True):
    """Run this attempt again after `delay` seconds; it is not counted."""

    delay: float
    failure: Failure


class Hold(msgspec.Struct, frozen=True):
    """Keep the job in Redis unchanged for `delay` seconds; no attempt is counted. `why` is the cause."""

    delay: float
    reason: str


class HandOver(msgspec.Struct, frozen=True):
    """Keep the job for workers whose code knows its task and its arguments; no attempt is counted.

    It is looked at again after `delay` seconds. `reason` is why this worker cannot run it.
    """

    delay: float
    reason: str
    refusal: Refusal


class Expire(msgspec.Struct, frozen=True):
    """Drop the job and record that it has expired."""


class RejectVerdict(msgspec.Struct, frozen=True):
    """Drop the job because it was rejected, and record why."""

    reason: str


class Revoke(msgspec.Struct, frozen=True):
    """Drop the job because it was revoked, and record that."""


Verdict = (
    Complete
    | RetryVerdict
    | FailForGood
    | Release
    | Postpone
    | Hold
    | HandOver
    | Expire
    | RejectVerdict
    | Revoke
)

POSTPONE_DELAY = 1.0
"""Seconds after which a job that could not reach the broker runs again."""
MAX_SECTIONS = 100
"""The most sections of one job that are counted: a task with ever new section names is not retried for ever."""

FOREIGN_REASONS = frozenset({Reason.UNKNOWN_TASK, Reason.BAD_ARGUMENTS})
"""Why a job is given up that other code may be able to run."""

BackoffFunction = Callable[[int], float | str]
"""The user's own backoff: seconds before the retry of that number, from 0, or what is wrong with it."""

_NONE: Mapping[str, int] = {}
_PLAIN: Mapping[type, Release | Expire | Revoke] = {
    Interrupted: Release(),
    StartMissed: Release(),
    JobExpired: Expire(),
    JobRevoked: Revoke(),
}


def is_plain_request(failure: Failure) -> bool:
    """Return whether a task asked for another attempt without an error, as a task does that polls."""
    return failure.type == Retry.__name__


def make_ruling(section: str, policy: RetryPolicy, counts: Mapping[str, int] | None) -> Ruling:
    """Return the decision of a `retry` section on an error raised in it: try again, or retries used up.

    `counts` are the retries made, by section.
    """
    counts = counts or _NONE
    is_counted = section in counts or len(counts) < MAX_SECTIONS
    if is_counted and policy.allows(counts.get(section, 0) + 1):
        return Ruling(section, policy)
    return Ruling(section, reason=_get_final_reason(policy.max_retries))


def judge(
    outcome: Outcome,
    *,
    attempt: int,
    policy: RetryPolicy,
    random: Callable[[], float],
    sections: Mapping[str, int] | None = None,
    backoff: BackoffFunction | None = None,
) -> Verdict:
    """Return the verdict on an outcome.

    `attempt` counts from 1. `random` returns numbers in [0, 1). `sections` are the retries made for sections,
    which the task's own policy does not count. `backoff` replaces the delays of the policy.
    """
    if isinstance(outcome, Returned):  # the most frequent, and `match` is slower
        return Complete(outcome.value)
    match outcome:
        case Raised():
            return _after_failure(outcome, attempt, policy, random, sections or _NONE, backoff)
        case RetryRequested():
            return _judge_request(
                outcome, attempt - _count_section_retries(sections), policy, random, backoff
            )
        case PermanentFailure() | BrokerLost() | ForeignJob():
            return _judge_unable(outcome)
        case JobRejected(why):
            return RejectVerdict(why)
        case CircuitBlocked():
            if outcome.delay is not None:
                return Hold(outcome.delay, outcome.failure.message)
            failed = Raised(outcome.failure, (outcome.kinds,))
            return _after_failure(failed, attempt, policy, random, sections or _NONE, backoff)
        case JobRevoked() | Interrupted() | StartMissed() | JobExpired():
            return _PLAIN[type(outcome)]
        case _:
            assert_never(outcome)


def _judge_unable(outcome: PermanentFailure | BrokerLost | ForeignJob) -> Verdict:
    """Return the verdict on a job that this worker cannot run, or not now."""
    if isinstance(outcome, PermanentFailure):
        return FailForGood(outcome.reason, outcome.failure)
    if isinstance(outcome, BrokerLost):
        return Postpone(POSTPONE_DELAY, outcome.failure)
    return HandOver(outcome.delay, outcome.failure.message, outcome.refusal)


def is_task_healthy(outcome: Outcome) -> bool | None:
    """Return what an outcome shows about the health of its task.

    True when it returned; False when it failed unexpectedly, also when it will be tried again; None when it shows
    nothing. A `poisonous` section concerns its job, not the task.
    """
    if type(outcome) is Returned:
        return True
    if type(outcome) is not Raised:
        return None
    ruling = outcome.ruling
    return None if ruling is not None and ruling.reason is Reason.POISONOUS else False


def _count_section_retries(sections: Mapping[str, int] | None) -> int:
    return sum(sections.values()) if sections else 0


def _after_failure(
    outcome: Raised,
    attempt: int,
    policy: RetryPolicy,
    random: Callable[[], float],
    sections: Mapping[str, int],
    backoff: BackoffFunction | None,
) -> Verdict:
    failure, ruling = outcome.failure, outcome.ruling
    if ruling is not None and ruling.policy is not None:
        count = sections.get(ruling.section, 0) + 1
        return RetryVerdict(ruling.policy.delay(count, random), failure, ruling.section)
    if ruling is not None and ruling.reason is not None:
        return FailForGood(ruling.reason, failure)
    task_attempt = attempt - _count_section_retries(sections)
    if not all(map(policy.covers, outcome.kinds)):
        return FailForGood(Reason.NOT_RETRIED, failure)
    if policy.allows(task_attempt):
        return _again(task_attempt, policy, random, backoff, failure)
    return FailForGood(_get_final_reason(policy.max_retries), failure)


def _judge_request(
    request: RetryRequested,
    task_attempt: int,
    policy: RetryPolicy,
    random: Callable[[], float],
    backoff: BackoffFunction | None,
) -> Verdict:
    if request.policy is not None:
        policy, backoff = request.policy, None
    max_retries = policy.max_retries if request.max_retries is None else request.max_retries
    if task_attempt > max_retries:
        return FailForGood(_get_final_reason(max_retries), request.failure)
    if request.countdown is not None:
        return RetryVerdict(request.countdown, request.failure)
    return _again(task_attempt, policy, random, backoff, request.failure)


def _get_final_reason(max_retries: int) -> Reason:
    """Return the reason of a job without retries left: `not-retried` if its task allows none, else `exhausted`."""
    return Reason.EXHAUSTED if max_retries else Reason.NOT_RETRIED


def _again(
    task_attempt: int,
    policy: RetryPolicy,
    random: Callable[[], float],
    backoff: BackoffFunction | None,
    failure: Failure,
) -> RetryVerdict:
    """Return a retry after attempt `task_attempt` of the task itself (from 1)."""
    delay = "" if backoff is None else backoff(task_attempt - 1)
    if isinstance(delay, str):
        return RetryVerdict(policy.delay(task_attempt, random), failure, backoff_error=delay)
    return RetryVerdict(delay, failure)


_ATTRIBUTE = "_celery5_rulings"
_MAX_RULINGS = 1000
"""The most runs with a ruling on one error object: far more than a worker runs at once."""


class ErrorLeaf(NamedTuple):
    """One error: the one that was raised, or one in a group. `kinds` names its classes and those of its groups."""

    error: BaseException
    kinds: tuple[str, ...]
    ruling: Ruling | None

    @property
    def is_request(self) -> bool:
        """Return whether it is not a failure but a request to the worker: `Retry` or `Reject`."""
        return isinstance(self.error, Retry | Reject)

    @property
    def is_final(self) -> bool:
        """Return whether outer sections do not count: a request, a poisonous error, or one that a section retries."""
        if self.ruling is None:
            return self.is_request
        return self.ruling.policy is not None or self.ruling.reason is Reason.POISONOUS


def set_ruling(error: BaseException, run: object, ruling: Ruling) -> None:
    """Keep a ruling for `error` in this run (a CurrentJob, or None outside of workers), replacing an earlier one."""
    others = [pair for pair in _pairs(error) if pair[0] is not run][-_MAX_RULINGS + 1 :]
    # Not by the error's own `__setattr__`: errors may be frozen. Every error has a dictionary.
    object.__setattr__(error, _ATTRIBUTE, (*others, (run, ruling)))


def get_ruling(error: BaseException, run: object) -> Ruling | None:
    """Return the ruling on this error object in this run; None without one."""
    return next((ruling for by, ruling in _pairs(error) if by is run), None)


def get_leaf_errors(error: BaseException, run: object) -> list[ErrorLeaf]:
    """Return the errors in a group, at any depth, in order; a single error itself."""
    outer_kinds: tuple[str, ...] | None = None  # the same for all leaves
    leaves: list[ErrorLeaf] = []
    for leaf, group in _walk(error):
        if outer_kinds is None:
            outer_kinds = () if group is None else get_class_names(group)
        leaves.append(ErrorLeaf(leaf, (*get_class_names(leaf), *outer_kinds), get_ruling(leaf, run)))
    return leaves


def copy_ruling(heir: BaseException, error: BaseException, run: object) -> None:
    """Copy the strictest ruling on `error` to `heir`, which replaces it."""
    ruled = [leaf for leaf in get_leaf_errors(error, run) if leaf.ruling is not None]
    if ruled and (ruling := find_strictest(ruled).ruling) is not None:
        set_ruling(heir, run, ruling)


def find_strictest(found: Sequence[ErrorLeaf]) -> ErrorLeaf:
    """Return the error that decides: the strictest one.

    The order: a poisonous section, a section without retries left, `Reject`, `Retry`, an error without a ruling, an
    error that its section retries. Among equals the first counts.
    """
    return min(found, key=_rank)


def _rank(leaf: ErrorLeaf) -> int:
    ruling = leaf.ruling
    if ruling is not None and ruling.reason is not None:
        return 0 if ruling.reason is Reason.POISONOUS else 1
    if isinstance(leaf.error, Reject):
        return 2
    if isinstance(leaf.error, Retry):
        return 3
    return 4 if ruling is None else 5


def iterate_leaves(error: BaseException) -> Iterator[BaseException]:
    """Yield the errors in a group, at any depth, in order; a single error itself."""
    return (leaf for leaf, _ in _walk(error))


def _walk(error: BaseException) -> Iterator[tuple[BaseException, BaseException | None]]:
    """Yield each leaf with the outermost group around it. Not recursive: groups may be nested very deeply.

    A group that is a member of several groups is looked at once: forty groups, each a member of the next one twice,
    would have 2^40 leaves. Nothing of the user's is called: subclasses of groups may have redefined anything.
    """
    stack: list[tuple[Any, BaseException | None]] = [(error, None)]
    visited = set[int]()
    while stack:
        current, outermost = stack.pop()
        if issubclass(type(current), BaseExceptionGroup):
            if id(current) in visited:
                continue
            visited.add(id(current))
            members = cast("Sequence[BaseException]", _MEMBERS.__get__(current))
            stack += [(member, outermost or current) for member in reversed(members)]
        else:
            yield current, outermost


_MEMBERS: Any = vars(BaseExceptionGroup)["exceptions"]


def _pairs(error: BaseException) -> tuple[tuple[object, Ruling], ...]:
    try:
        pairs: tuple[tuple[object, Ruling], ...] = object.__getattribute__(error, _ATTRIBUTE)
    except AttributeError:
        return ()
    return pairs
