"""The running job: what an executor runs now, how long that may take, and how it is stopped.

An executor reuses one RunningJob for job after job until one of them is cancelled.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from types import CoroutineType
from typing import Any, NamedTuple, Protocol

import msgspec
import trio
from msgspec.structs import replace

from celery5.errors import SoftTimeLimitExceeded, TimeLimitExceeded
from celery5.protocol.job.delivery import Delivery
from celery5.protocol.job.verdict import Outcome, PermanentFailure, Raised, Reason, Returned, copy_ruling
from celery5.runners.context import CURRENT_JOB
from celery5.runners.outcome import get_error_outcome
from celery5.runners.user_errors import ScopeGuard, make_own_cancellation


class TimeLimits(msgspec.Struct, frozen=True):
    """How long one attempt may run, in seconds; None for no limit."""

    hard: float | None = None  # the attempt is ended then
    soft: float | None = None  # SoftTimeLimitExceeded is raised in the task then


INTERRUPT_TIMEOUT = 0.5
"""Seconds that a thread has to end after its time limit was raised in it; after that it is abandoned."""


class JobThread(Protocol):
    """The thread in which a job runs."""

    @property
    def thread_id(self) -> int | None:
        """Its identity; None before the job's call and after it."""

    @property
    def coroutine(self) -> "CoroutineType[Any, Any, Any] | None":
        """The coroutine that its event loop runs for the job; None for a plain call."""


class JobSlot(Protocol):
    """The record of an executor in the memory that it shares with the sidecar of its worker."""

    @property
    def number(self) -> int: ...

    def record(self, delivery: Delivery, /) -> None:
        """Record a job that begins."""

    def set_deadline(self, end: float, /) -> None:
        """Record when the hard limit of the job ends; 0.0 for no limit."""

    def set_thread(self, thread: int, /) -> None:
        """Record the kernel's id of the thread that runs the job."""


class JobCall(NamedTuple):
    """The call of a job's function."""

    function: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]


class RunningJob(msgspec.Struct, eq=False):
    """The job that an executor runs, with its limits and the ways to end it."""

    scope: trio.CancelScope = msgspec.field(default_factory=trio.CancelScope)
    delivery: Delivery | None = None
    limits: TimeLimits | None = None
    cancel_outcome: Outcome | None = None
    """The outcome of a job that was cancelled and did not return all the same."""
    raise_soft_limit: Callable[[SoftTimeLimitExceeded], None] | None = None
    """Raises the error inside the job; None while its runner cannot do that."""
    interrupt: Callable[[TimeLimitExceeded], None] | None = None
    """The same for the hard limit. Only threads need it: other jobs are cancelled."""
    thread_ended: trio.Event | None = None
    """Set when an abandoned thread has ended; None if no thread was abandoned."""
    executor_task: trio.lowlevel.Task | None = None
    """The Trio task of the executor, to read where the job's code stands."""
    job_thread: JobThread | None = None
    """The thread that runs the job's code; None while none does."""
    slot: JobSlot | None = None
    """The record of the executor that the sidecar reads; None where there is no sidecar."""
    on_begin: "Callable[[RunningJob], None] | None" = None
    """Records that a job begins, in its thread; None where that is done before its runner is called."""
    go_on: "Callable[[Outcome], JobCall | Outcome] | None" = None
    """Takes the outcome of the job and returns what its runner goes on with, in place of waking the executor: the next
    job, or nothing but an outcome, to be returned. None where each job needs its executor."""
    may_go_on: bool = False
    """Whether nothing but the call of its function belongs to the job: then its end needs no executor."""
    is_ahead: bool = False
    """Whether the job may wait behind others in its runner, and be given back (NotBegun)."""
    began_at: float = 0.0
    """When the job began, by `time.perf_counter`; 0.0 until then."""
    ended_at: float = 0.0
    """When the job ended in its thread, by the same clock; 0.0 until then, and where it runs in no thread of ours."""
    must_end: bool = False
    """Whether no other job may run with this object: it was cancelled, or has left its Trio task in disorder."""
    scope_guard: ScopeGuard | None = None
    """Knows the cancel scopes around its jobs, which are the same for all of them; None before the first one."""
    is_task_disordered: bool = False
    """Whether its Trio task must end with it."""
    _limited_at: float = 0.0
    _own_outcome: Outcome | None = None
    _limit_error: TimeLimitExceeded | None = None
    _wait_scope: trio.CancelScope | None = None
    _max_wait: float = math.inf
    _use_default_wait: bool = False
    _default_wait: float = 0.0

    def set_limits(self, limits: TimeLimits | None) -> None:
        """Set the time limits of the next job, or None when it has ended."""
        self.limits = limits
        self._limited_at = time.perf_counter()

    def begin_late(self) -> None:
        """Record that the job begins now: called in its thread, where it may have waited behind others."""
        if self.on_begin is not None and not self.began_at:
            self.on_begin(self)
            self.began_at = time.perf_counter()

    def set_ended(self, ended_at: float) -> None:
        """Set when the job ended in its thread: its executor learns that later."""
        self.ended_at = ended_at

    def take_delay(self) -> float:
        """Return for how many seconds the job has waited since its limits began; 0 when this is called again."""
        if self.on_begin is None:
            return 0.0
        began_at = self.began_at or time.perf_counter()
        delay, self._limited_at = max(began_at - self._limited_at, 0.0), max(began_at, self._limited_at)
        return delay

    def set_delivery(self, delivery: Delivery | None) -> None:
        """Set the job that runs now; None when it has ended."""
        self.delivery = delivery
        self.began_at = self.ended_at = 0.0
        self.may_go_on = False

    def allow_going_on(self) -> None:
        """Let its runner go on with the next job when this one has ended."""
        self.may_go_on = True

    def set_ahead(self, is_ahead: bool) -> None:
        """Set whether the job may wait behind others in its runner."""
        self.is_ahead = is_ahead

    def set_thread(self, job_thread: JobThread | None) -> None:
        """Set the thread that runs the job's code: called by its runner."""
        self.job_thread = job_thread

    @property
    def has_soft_limit(self) -> bool:
        """Whether the job has a soft limit."""
        return self.limits is not None and self.limits.soft is not None

    def allow_interrupts(
        self,
        raise_soft_limit: Callable[[SoftTimeLimitExceeded], None],
        interrupt: Callable[[TimeLimitExceeded], None] | None = None,
    ) -> None:
        """Set how errors are raised inside the job: called by its runner."""
        self.raise_soft_limit, self.interrupt = raise_soft_limit, interrupt

    def forbid_interrupts(self) -> None:
        """Raise no more errors inside the job, which has ended."""
        self.raise_soft_limit = self.interrupt = None

    def cancel(self, outcome: Outcome, wait_seconds: float | None = None) -> None:
        """Cancel the job.

        Args:
            outcome: Its outcome, unless it returns all the same. The first call decides.
            wait_seconds: How long its runner waits for its end; None for the runner's default. The shortest counts.
        """
        self.cancel_outcome = self.cancel_outcome or outcome
        self.must_end = True
        self.scope.cancel()
        if wait_seconds is None:
            self._use_default_wait = True
        else:
            self._max_wait = min(self._max_wait, wait_seconds)
        if self._wait_scope is not None:
            self._wait_scope.deadline = min(self._wait_scope.deadline, self._wait_deadline())

    def end_by_time_limit(self, error: TimeLimitExceeded) -> None:
        """End the job because its time is over, which is a failed attempt."""
        if self.cancel_outcome is None:
            self._limit_error = error
        if self.interrupt is None:
            self.cancel(get_error_outcome(error))
        else:
            self.interrupt(error)
            self.cancel(get_error_outcome(error), INTERRUPT_TIMEOUT)

    def set_scope_guard(self, guard: ScopeGuard | None) -> None:
        """Set what knows the cancel scopes around the next job; None when there are others than before."""
        self.scope_guard = guard

    def leave_task(self) -> None:
        """Run no other job in the Trio task of this one: the cancel scopes around it are not as they were."""
        self.must_end = self.is_task_disordered = True

    def get_cancel_outcome(self) -> Outcome:
        """Return the outcome of a job that was cancelled and did not return all the same.

        When nobody has cancelled it here, it has done that itself, or what it had started in the nursery above it.
        """
        return self.cancel_outcome or self._own_outcome or get_error_outcome(make_own_cancellation())

    def record_traceback(self, error: BaseException) -> None:
        """Keep where the job was, and in which sections, if its time was over or nobody has cancelled it here.

        Args:
            error: What came out of the job. Call this in the job's context.
        """
        if self.cancel_outcome is None:
            own_error = make_own_cancellation().with_traceback(error.__traceback__)
            copy_ruling(own_error, error, CURRENT_JOB.get())
            self._own_outcome = get_error_outcome(own_error)
        if self._limit_error is not None:
            copy_ruling(self._limit_error, error, CURRENT_JOB.get())
            self.cancel_outcome = get_error_outcome(self._limit_error.with_traceback(error.__traceback__))

    def record_traceback_text(self, text: str) -> None:
        """Keep the traceback that a killed box has written, if the job was cancelled by a failure."""
        outcome = self.cancel_outcome
        if isinstance(outcome, Raised):
            self.cancel_outcome = replace(outcome, failure=replace(outcome.failure, traceback=text))

    def record_abandoned_thread(self, thread_ended: trio.Event | None) -> None:
        """Keep the event that is set when the job's abandoned thread has ended."""
        self.thread_ended = thread_ended

    def get_outcome(self, outcome: Outcome) -> Outcome:
        """Return the outcome of a job that ended with `outcome`, perhaps after it was cancelled.

        A job that returned has returned. How else it reacted to being cancelled is not its failure.
        """
        if self.cancel_outcome is None or type(outcome) in (Returned, PermanentFailure):
            return outcome
        if self._limit_error is not None and type(outcome) is Raised:
            if outcome.failure.type == "TimeLimitExceeded":
                return outcome  # raised in a thread: its traceback says where
            if outcome.ruling is not None and outcome.ruling.reason is Reason.POISONOUS:
                return outcome  # it must not run again, whatever the section made of it
        return self.cancel_outcome

    async def wait_ended(self, ended: trio.Event, default_wait: float) -> bool:
        """Wait for the end of a cancelled job, and return whether it has ended.

        Args:
            ended: Set when the job has ended.
            default_wait: Seconds to wait unless `cancel` has set others.
        """
        self._default_wait = default_wait
        with trio.CancelScope(shield=True, deadline=self._wait_deadline()) as self._wait_scope:
            await ended.wait()
        self._wait_scope = None
        return ended.is_set()

    def _wait_deadline(self) -> float:
        use_default = self._use_default_wait or self.cancel_outcome is None
        return trio.current_time() + min(self._max_wait, self._default_wait if use_default else math.inf)


class Runner(Protocol):
    """Runs the functions of one kind of task."""

    async def execute(
        self, function: Callable[..., Any], args: Any, kwargs: Mapping[str, Any], running_job: RunningJob
    ) -> Outcome:
        """Run one function to its outcome."""
        ...
