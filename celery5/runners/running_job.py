"""Hand: one executor's hand: the job in it, how long that may run, and how it is told to stop.

An executor takes job after job with the same hand until one of them is cancelled; then it gets a new one.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import trio

from celery5.errors import SoftTimeLimitExceeded, TimeLimitExceeded
from celery5.protocol.job.delivery import Delivery
from celery5.protocol.job.section_rulings import copy_ruling
from celery5.protocol.job.verdict import Outcome, PermanentFailure, Raised, Reason, Returned
from celery5.runners.context import CURRENT_JOB
from celery5.runners.outcome import get_error_outcome


class TimeLimits(msgspec.Struct, frozen=True):
    """How long one attempt may run, in seconds: after `soft` it is told, after `hard` it is ended. None: for ever."""

    hard: float | None = None
    soft: float | None = None


INTERRUPT_TIMEOUT = 0.5
"""Seconds that a thread gets to end by the error that its time limit raises in it, before it is left to itself."""


@dataclass(slots=True, eq=False)
class RunningJob:
    """What holds a running job.

    `why` is the outcome of a job that was cancelled and did not return all the same. A runner that runs a job with
    limits says how to raise an error inside it: `soften` for the soft one, `cut` for the hard one. `behind` is there
    when a thread was left to itself; it is set when the thread has ended.
    """

    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    delivery: Delivery | None = None
    limits: TimeLimits | None = None
    cancel_outcome: Outcome | None = None
    raise_soft_limit: Callable[[SoftTimeLimitExceeded], None] | None = None
    interrupt: Callable[[TimeLimitExceeded], None] | None = None
    thread_ended: trio.Event | None = None
    _limit: TimeLimitExceeded | None = None
    _waiting: trio.CancelScope | None = None
    _patience: float = math.inf
    _usually: bool = False
    _usual: float = 0.0

    @property
    def has_soft_limit(self) -> bool:
        """Whether the job has a soft limit."""
        return self.limits is not None and self.limits.soft is not None

    def cancel(self, why: Outcome, wait_seconds: float | None = None) -> None:
        """Tell the job to stop. The first who says so says why; the least patient, for how many seconds it is waited
        for if it does not end by that (None: for as long as its runner thinks right)."""
        self.cancel_outcome = self.cancel_outcome or why
        self.scope.cancel()
        if wait_seconds is None:
            self._usually = True
        else:
            self._patience = min(self._patience, wait_seconds)
        if self._waiting is not None:
            self._waiting.deadline = min(self._waiting.deadline, self._until())

    def end_by_time_limit(self, error: TimeLimitExceeded) -> None:
        """The job's time is up: end it, which is a failed attempt."""
        if self.cancel_outcome is None:
            self._limit = error
        if self.interrupt is None:
            self.cancel(get_error_outcome(error))
        else:
            self.interrupt(error)
            self.cancel(get_error_outcome(error), INTERRUPT_TIMEOUT)

    def record_traceback(self, error: BaseException) -> None:
        """Where a cancelled job was, and in which sections, for the failure of one whose time was up. `error` is what
        has come out of it; to be called in the job's context."""
        if self._limit is not None:
            copy_ruling(self._limit, error, CURRENT_JOB.get())
            self.cancel_outcome = get_error_outcome(self._limit.with_traceback(error.__traceback__))

    def get_outcome(self, outcome: Outcome) -> Outcome:
        """What has become of a cancelled job that ended with `outcome`: what returned has returned; whatever else it
        made of being cancelled is not its own doing (I9)."""
        if self.cancel_outcome is None or type(outcome) in (Returned, PermanentFailure):
            return outcome
        if self._limit is not None and type(outcome) is Raised:
            if outcome.failure.type == "TimeLimitExceeded":
                return outcome  # raised in a thread, it knows where
            if outcome.ruling is not None and outcome.ruling.reason is Reason.POISONOUS:
                return outcome  # whatever the section made of it, it must not run again
        return self.cancel_outcome

    async def wait_ended(self, end: trio.Event, default_wait: float) -> bool:
        """For a runner whose job was cancelled: wait for its `end` with patience (`own` seconds, unless somebody said
        otherwise). Gives whether it has ended."""
        self._usual = default_wait
        with trio.CancelScope(shield=True, deadline=self._until()) as self._waiting:
            await end.wait()
        self._waiting = None
        return end.is_set()

    def _until(self) -> float:
        usual = self._usual if self._usually or self.cancel_outcome is None else math.inf
        return trio.current_time() + min(self._patience, usual)
