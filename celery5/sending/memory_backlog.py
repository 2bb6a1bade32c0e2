"""Keep jobs that a producer could not publish in its memory until Redis is reachable again.

A thread publishes them, each queue's in the order in which they were sent, and ends when none is left. It serves
plain Python, threads and any event loop alike, since it is part of none of them. In a Trio program a coroutine may do
it instead.
"""

import atexit
import os
import random
import sys
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from celery5.broker.colour import check_may_block, run_blocking, run_in_thread
from celery5.errors import BacklogFull, BrokerUnavailable
from celery5.protocol.job.job import Job
from celery5.protocol.job.retry_policy import full_jitter
from celery5.sending.bounded_queue import BacklogCapacity, BoundedQueue, QueuedItem

if TYPE_CHECKING:
    import trio

JOBS_PER_ATTEMPT = 200
"""Jobs of a queue in one attempt."""
BACKOFF_START = 0.05
BACKOFF_CAP = 1.0
"""Seconds between attempts: a random part of a time that doubles, up to this."""
THREAD_CHECK_INTERVAL = 0.05
"""Seconds between checks of the coroutine for the end of the thread."""
EXIT_TIMEOUT = 5.0
"""Seconds for publishing the waiting jobs when the process ends."""


class _Kept(msgspec.Struct, frozen=True):
    """A job that waits, and when it is due on the monotonic clock, if it was sent with a countdown."""

    job: Job
    due: float | None

    def now(self) -> Job:
        """Return the job for publishing now, with what is left of its countdown."""
        if self.due is None:
            return self.job
        left = max(0, int((self.due - time.monotonic()) * 1000))
        return msgspec.structs.replace(self.job, at=f"+{left}")


Portions = Mapping[str, Sequence[QueuedItem[_Kept]]]
"""The first jobs of each queue."""
Publish = Callable[[Sequence[Job]], Awaitable[object]]


class Backlog:
    """The jobs that one application has sent in this process while Redis is unreachable; usually none.

    They are in memory only: if the process dies they are lost.
    """

    def __init__(
        self,
        *,
        publish: Callable[[Sequence[Job]], object],
        app: str,
        apublish: Publish | None = None,
        broker_of_queue: Callable[[str], str] = lambda _queue: "",
    ) -> None:
        self._publish = publish
        self._apublish = apublish
        self._find_broker = broker_of_queue
        self._owner = f"application {app!r}"
        self._thread: threading.Thread | None
        self._wake: Callable[[], None] | None
        self._why: str
        self.reset_after_fork()
        _ALL.add(self)

    def __repr__(self) -> str:
        return f"<Backlog of {self._owner}: {self.size} jobs{f', {self.why}' if self.why else ''}>"

    @property
    def size(self) -> int:
        """The number of jobs that wait."""
        return len(self._waiting)

    @property
    def draining(self) -> bool:
        """Whether jobs wait and Redis accepts them."""
        return self.size > 0 and not self.why

    @property
    def why(self) -> str:
        """Why jobs wait: the error of the last attempt; '' when it succeeded."""
        return self._why

    def has_earlier_jobs(self, jobs: Sequence[Job]) -> bool:
        """Return whether jobs of the same queues wait, which must be published first."""
        return self.size > 0 and any(self._waiting.has_queue(job.queue) for job in jobs)

    def keep(self, jobs: Sequence[Job], error: BrokerUnavailable | None, *, limit: int) -> None:
        """Keep all of `jobs` or none.

        Args:
            error: The error of the attempt to send them, if one was made.
            limit: The maximal number of jobs in the backlog.

        Raises:
            BacklogFull: There would be more than `limit`; none was kept.
        """
        now = time.monotonic()
        with self._changed:
            self._waiting.capacity.resize(limit)
            if not self._waiting.capacity.has_space(len(jobs), 0):
                why = str(error or self._why)
                raise BacklogFull(
                    f"{len(jobs)} jobs were not sent: {self.size} of at most {limit} wait in the backlog already "
                    f"({why}); send them later, or raise the setting backlog",
                    maybe_done=error is not None and error.maybe_done,
                ) from error
            if error is not None:
                self._why = str(error)
            if self._thread is None and self._wake is None:
                self._start_thread()
            for job in jobs:
                self._waiting.add(job.queue, job.id, len(job.message), _Kept(job, _due(job, now)))
            if self._wake is not None:
                self._wake()

    async def run(self, *, task_status: "trio.TaskStatus[None] | None" = None) -> None:
        """Publish waiting jobs in this Trio run, in place of the thread, until cancelled.

        After that a thread publishes the rest. Run it as a task: `await nursery.start(app.backlog.run)`.
        """
        import trio  # a producer may not need it

        publish = self._apublish
        if publish is None or self._wake is not None:
            raise RuntimeError("this backlog has a coroutine already, or nothing to publish with in one")
        arrived, token, failures = trio.Event(), trio.lowlevel.current_trio_token(), 0

        def wake() -> None:
            with suppress(trio.RunFinishedError):
                token.run_sync_soon(arrived.set)

        self._wake = wake
        try:
            if task_status is not None:
                task_status.started()
            # Not retry_until_available: that is of the layer of services.
            while True:
                arrived = trio.Event()
                with self._changed:  # a running thread finishes its last attempt first
                    portions = None if self._thread is not None else self._first()
                if portions:
                    failures = 0 if await self._publish_portions(publish, portions) else failures + 1
                    await trio.sleep(_pause(failures) if failures else 0)
                else:
                    with trio.move_on_after(
                        THREAD_CHECK_INTERVAL if self._thread is not None else float("inf")
                    ):
                        await arrived.wait()
        finally:
            with self._changed:
                self._wake = None
                if self.size and self._thread is None:
                    self._start_thread()

    def flush(self, timeout: float | None = 10.0) -> bool:
        """Try at once, and wait until no job is left. For plain Python.

        Args:
            timeout: Seconds; None to wait without a limit.

        Returns:
            Whether no job is left.
        """
        check_may_block()
        with self._changed:
            self._changed.notify_all()
            return self._changed.wait_for(lambda: not self.size, timeout)

    async def aflush(self, timeout: float | None = 10.0) -> bool:
        """`flush`, from Trio or asyncio."""
        return await run_in_thread(lambda: self.flush(timeout))

    def reset_after_fork(self) -> None:
        """Start empty and with a new lock, as a forked child must: its parent publishes the waiting jobs."""
        self._changed = threading.Condition(threading.Lock())
        self._waiting = BoundedQueue[_Kept](BacklogCapacity(0))
        self._why = ""
        self._thread = None
        self._wake = None

    def describe_lost_jobs(self) -> str:
        """Return a message about jobs that wait when the process ends; '' when there are none."""
        if not self.size:
            return ""
        jobs, are = ("1 job", "is") if self.size == 1 else (f"{self.size} jobs", "are")
        return f"celery5: {jobs} of {self._owner} could not be published and {are} lost: {self._why}"

    async def _publish_here(self, jobs: Sequence[Job]) -> None:
        self._publish(jobs)

    def _start_thread(self) -> None:
        thread = threading.Thread(target=self._drain, name="celery5-backlog", daemon=True)
        thread.start()  # raises when the system is out of threads; the next job tries again
        self._thread = thread

    def _first(self) -> Portions:
        """Return what one attempt takes of each queue."""
        return {queue: self._waiting.first(queue, limit=JOBS_PER_ATTEMPT) for queue in self._waiting.queues}

    def _drain(self) -> None:
        """In the thread: publish until nothing waits."""
        failures = 0
        # Not retry_until_available: this thread has no Trio run.
        while True:
            with self._changed:
                if failures:
                    self._changed.wait(_pause(failures))
                portions = self._first()
                if not portions or self._wake is not None:
                    self._thread = None
                    return
            complete = run_blocking(self._publish_portions(self._publish_here, portions))
            failures = 0 if complete else failures + 1

    async def _publish_portions(self, publish: Publish, portions: Portions) -> bool:
        """Make one attempt at each queue's first jobs; return whether all of them went through."""
        complete = True
        unreachable = set[str]()
        for queue, portion in portions.items():
            if self._find_broker(queue) in unreachable:
                continue
            try:
                await publish([item.value.now() for item in portion])
            except BrokerUnavailable as error:  # the broker of this queue and others, which need not be tried
                self._why, complete = str(error), False
                unreachable.add(self._find_broker(queue))
            except Exception as error:  # refused: this queue's jobs stay, and hold up no other queue's
                self._why, complete = f"queue {queue!r}: {error}", False
            else:
                self._forget(portion)
        if complete:
            self._why = ""
        return complete

    def _forget(self, portion: Sequence[QueuedItem[_Kept]]) -> None:
        with self._changed:
            self._waiting.remove([item.number for item in portion])
            if not self._waiting:
                self._changed.notify_all()


def _pause(failures: int) -> float:
    return full_jitter(failures, start=BACKOFF_START, cap=BACKOFF_CAP, random=random.random)


def _due(job: Job, now: float) -> float | None:
    return now + int(job.at[1:]) / 1000 if job.at.startswith("+") else None


_ALL: weakref.WeakSet[Backlog] = weakref.WeakSet()


def _flush_at_exit() -> None:
    """Make one more attempt when the process ends, for a limited time; then report the jobs that are lost."""
    deadline = time.monotonic() + EXIT_TIMEOUT
    for backlog in list(_ALL):
        try:
            if backlog.size:
                backlog.flush(max(0.0, deadline - time.monotonic()))
        except KeyboardInterrupt:
            deadline = 0.0
        if message := backlog.describe_lost_jobs():
            sys.stderr.write(f"{message}\n")


def _after_fork() -> None:
    for backlog in list(_ALL):
        backlog.reset_after_fork()


atexit.register(_flush_at_exit)
os.register_at_fork(after_in_child=_after_fork)
