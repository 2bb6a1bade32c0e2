"""In box: runs the functions of boxed tasks in the main thread of their own process, one at a time (C62).

The main thread, since only there a signal can raise an error in the middle of a sleep or of a system call: so limits
and revocations reach a boxed `def` where they cannot reach one in a worker's thread.
"""

import signal
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from typing import TYPE_CHECKING, Any

from celery5.errors import SoftTimeLimitExceeded, TimeLimitExceeded
from celery5.protocol.boxes.frames import CancelJob, RunJob, SoftLimitReached
from celery5.protocol.job.verdict import INTERRUPTED, Outcome
from celery5.runners.context import CURRENT_JOB, LOG_EVENT, CurrentJob, LogEvent
from celery5.runners.outcome import get_error_outcome, get_result_outcome

if TYPE_CHECKING:
    from celery5.runners.running_job import RunningJob

WAKE_SIGNAL = signal.SIGUSR2
"""The signal that means: look what you were told."""

BoxControl = SoftLimitReached | CancelJob


class JobCancelled(BaseException):
    """The job was told to stop. What `except Exception` does not catch."""


class BoxMainThread:
    """The main thread of a Python box. `hear` may be called from any other thread."""

    def __init__(self, log_event: LogEvent) -> None:
        self._tell = log_event
        self._job = ""
        self._shots: list[BaseException] = []
        self._aimed = self._held = False
        self._pass_on: Callable[[BoxControl], None] | None = None
        self._early: list[BoxControl] = []
        self._lock = threading.Lock()
        signal.signal(WAKE_SIGNAL, self._look)

    @property
    def is_busy(self) -> bool:
        """Whether a job runs."""
        return bool(self._job)

    def run_job(
        self,
        run: RunJob,
        loop: str,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Outcome:
        """Run one job to its end, in a context of its own."""
        job = CurrentJob(run.id, run.task, run.queue, run.attempt, run.worker, run.sections)
        return copy_context().run(self._perform, job, run, loop, function, args, kwargs)

    def start_job(self, job: str) -> None:
        """From here on what is said is for this job."""
        with self._lock:
            self._job, self._pass_on = job, None
            self._early, self._shots = [], []

    def end_job(self) -> None:
        """The job has ended: what comes late is for nobody."""
        with self._lock:
            self._job, self._pass_on = "", None

    def on_message(self, said: BoxControl) -> None:
        """What the worker says about the job that runs."""
        with self._lock:
            if said.id != self._job:
                return
            if self._pass_on is None:
                self._early.append(said)
            else:
                self._pass_on(said)

    def _perform(
        self, job: CurrentJob, run: RunJob, loop: str, function: Any, args: Any, kwargs: Any
    ) -> Outcome:
        CURRENT_JOB.set(job)
        LOG_EVENT.set(self._tell)
        try:
            if loop == "thread":
                return get_result_outcome(self._call(function, args, kwargs))
            return self._in_loop(run, loop, function, args, kwargs)
        except JobCancelled:
            return INTERRUPTED
        except BaseException as error:
            return get_error_outcome(error)

    # def

    def _call(self, function: Any, args: Any, kwargs: Any) -> Any:
        # An error may come at any step, those of `_aimed = False` too: but two errors cannot hit three of them.
        try:
            try:
                try:
                    self._aimed = True
                    self._listen(self._shoot)
                    return function(*args, **kwargs)
                finally:
                    self._aimed = False
            finally:
                self._aimed = False
        finally:
            self._aimed = False

    def _shoot(self, said: BoxControl) -> None:
        if isinstance(said, SoftLimitReached):
            self._shots.append(SoftTimeLimitExceeded(said.message))
        else:
            self._shots.append(TimeLimitExceeded(said.limit) if said.limit else JobCancelled("revoked"))
        signal.pthread_kill(threading.main_thread().ident or 0, WAKE_SIGNAL)

    def _look(self, _number: int, _frame: object) -> None:
        """In the main thread, between two steps of whatever it does."""
        if self._aimed and self._shots and not self._held:
            raise self._shots.pop(0)

    @contextmanager
    def defer_errors(self) -> Generator[None, None, None]:
        """For what must be done whole, such as to write a frame: nothing is raised in the job until it is."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self._held = True
        try:
            yield
        finally:
            self._held = False
            self._look(0, None)

    def _listen(self, take: Callable[[BoxControl], None]) -> None:
        with self._lock:
            self._pass_on, early = take, self._early
        for each in early:
            take(each)

    # async def

    def _in_loop(self, run: RunJob, loop: str, function: Any, args: Any, kwargs: Any) -> Outcome:
        """On Trio, or on an asyncio loop beside it: by the very runners that a worker has."""
        import trio

        from celery5.runners.on_asyncio import AsyncioRunner
        from celery5.runners.on_trio import TrioRunner
        from celery5.runners.running_job import RunningJob, TimeLimits

        async def job() -> Outcome:
            hand = RunningJob(limits=TimeLimits(run.time_limit, run.soft_time_limit))
            token = trio.lowlevel.current_trio_token()
            self._listen(lambda said: token.run_sync_soon(_tell, hand, said))
            outcome: Outcome | None = None
            async with trio.open_nursery() as nursery:
                with hand.scope, _cancelled(hand):
                    if loop == "asyncio":
                        runner = AsyncioRunner()
                        await nursery.start(runner.run)
                        outcome = await runner.execute(function, args, kwargs, hand)
                    else:
                        outcome = await TrioRunner().execute(function, args, kwargs, hand)
                nursery.cancel_scope.cancel()
            return hand.cancel_outcome or INTERRUPTED if outcome is None else hand.get_outcome(outcome)

        return trio.run(job)


@contextmanager
def _cancelled(hand: "RunningJob") -> Generator[None, None, None]:
    """Whatever else a job makes of being cancelled, it was cancelled."""
    try:
        yield
    except Exception:
        if hand.cancel_outcome is None:
            raise


def _tell(hand: "RunningJob", said: BoxControl) -> None:
    """In the loop: as a worker's deadlines would."""
    if isinstance(said, CancelJob):
        if said.limit:
            hand.end_by_time_limit(TimeLimitExceeded(said.limit))
        else:
            hand.cancel(INTERRUPTED)
    elif hand.raise_soft_limit is not None:
        hand.raise_soft_limit(SoftTimeLimitExceeded(said.message))
