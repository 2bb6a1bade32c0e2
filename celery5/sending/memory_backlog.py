"""Keep jobs that a producer could not publish, in its memory or its own backlog, until Redis is reachable again.

A thread publishes them, each queue's in the order in which they were sent, and ends when none is left. It serves
plain Python, threads and any event loop alike, since it is part of none of them. In a Trio program a coroutine may do
it instead.
"""

import atexit
import math
import os
import random
import sys
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from celery5.broker.colour import check_may_block, run_blocking, run_in_thread
from celery5.errors import BacklogFull, BrokerUnavailable
from celery5.protocol.counts import choose_form, format_count
from celery5.protocol.job.job import Job
from celery5.protocol.job.retry_policy import full_jitter
from celery5.sending.own_backlog import CheckedBacklog, JobsInMemory, OwnBacklog, UnsentJob
from celery5.similar_names import count_rest

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
NAMED_AT_EXIT = 3
"""The most lost jobs that the last message of a process names."""


OPEN_INTERVAL = 1.0
"""Seconds between attempts to open a backlog of the user's own that has failed."""

Portions = Mapping[str, Sequence[UnsentJob]]
"""The first jobs of each queue."""
Publish = Callable[[Sequence[Job]], Awaitable[object]]
"""Publish jobs, in any colour: awaited by `Backlog.run`, run to its end in the thread."""
T = TypeVar("T")


class Backlog:
    """The jobs that one application has sent in this process while Redis is unreachable; usually none.

    They are in memory, and lost if the process dies, unless the application has its own backlog.
    """

    def __init__(
        self,
        *,
        publish: Publish,
        app: str,
        broker_of_queue: Callable[[str], str] = lambda _queue: "",
        own: OwnBacklog | None = None,
    ) -> None:
        self._publish = publish
        self._find_broker = broker_of_queue
        self._owner = f"application {app!r}"
        self._own = own
        self._memory: JobsInMemory
        self._queues: dict[str, None]  # those that jobs wait for
        self._size: int
        self._opens_at: float
        self._thread: threading.Thread | None
        self._wake: Callable[[], None] | None
        self._why: str
        self.reset_after_fork()
        _ALL.add(self)

    def __repr__(self) -> str:
        return f"<Backlog of {self._owner}: {format_count(self.size, 'job')}{f', {self.why}' if self.why else ''}>"

    @property
    def size(self) -> int:
        """The number of jobs that wait."""
        return self._size

    @property
    def draining(self) -> bool:
        """Whether jobs wait and Redis accepts them."""
        return self.size > 0 and not self.why

    @property
    def why(self) -> str:
        """Why jobs wait: the error of the last attempt; '' when it succeeded."""
        return self._why

    @property
    def own(self) -> OwnBacklog | None:
        """The backlog of the application's own; None when jobs are kept in memory."""
        return self._own

    @property
    def is_idle(self) -> bool:
        """Whether no job waits that this process knows of, and there is no backlog to open: the cheap question."""
        return not self._queues and self._opens_at == math.inf

    @property
    def is_to_be_opened(self) -> bool:
        """Whether there is a backlog of the application's own that this process has not opened."""
        return self._opens_at <= time.monotonic()

    def open(self) -> None:
        """Open the application's own backlog, and publish what an earlier process has left in it. May block."""
        with self._changed:
            if self.is_to_be_opened:
                self._open()

    def use_own(self, own: OwnBacklog) -> None:
        """Keep jobs in this backlog from now on. Nothing may wait."""
        self._own = own
        self.reset_after_fork()

    def has_earlier_jobs(self, jobs: Sequence[Job]) -> bool:
        """Return whether jobs of the same queues wait, which must be published first."""
        return bool(self._queues) and any(job.queue in self._queues for job in jobs)

    def keep(
        self,
        jobs: Sequence[Job],
        error: BrokerUnavailable | None,
        *,
        limit: int,
        max_bytes: float = math.inf,
    ) -> None:
        """Keep all of `jobs` or none. May block if the backlog is the application's own.

        Args:
            error: The error of the attempt to send them, if one was made.
            limit: The maximal number of jobs in memory.
            max_bytes: The most bytes of jobs in memory.

        Raises:
            BacklogFull: There would be more than that, or they cannot be stored; none was kept.
        """
        now = time.time()
        unsent = [UnsentJob(job.queue, job.id, job.to_bytes(), _due(job, now)) for job in jobs]
        with self._changed:
            if self._own is None:
                self._memory.capacity.resize(limit, max_bytes)
                self._check_memory(unsent, error)
            if self._thread is None and self._wake is None:
                self._start_thread()
            self._put(unsent, error)
            if error is not None:
                self._why = str(error)
            if self._wake is not None:
                self._wake()

    def _check_memory(self, unsent: Sequence[UnsentJob], error: BrokerUnavailable | None) -> None:
        capacity, size = self._memory.capacity, sum(len(unsent_job.job) for unsent_job in unsent)
        if capacity.has_space(len(unsent), size):
            return
        is_count = capacity.used_messages + len(unsent) > capacity.max_messages
        used = (
            f"{self.size} of at most {capacity.max_messages} wait in the backlog already"
            if is_count
            else f"they have {size} bytes, and {capacity.used_bytes} of at most {capacity.max_bytes} bytes wait in the "
            "backlog already"
        )
        setting = "backlog" if is_count else "backlog_bytes"
        raise self._make_full_error(unsent, used, error, f"send them later, or raise the setting {setting}")

    def _put(self, unsent: Sequence[UnsentJob], error: BrokerUnavailable | None) -> None:
        try:
            if self._opens_at < math.inf:
                self._queues.update(dict.fromkeys(self._store.open()))
                self._opens_at = math.inf
            self._store.put(unsent)
        except Exception as failure:  # it is full, or code of the user's own has failed
            is_full = isinstance(failure, BacklogFull)
            why = f"{failure}" if is_full else f"the backlog {self._store!r} cannot store them: {failure!r}"
            raise self._make_full_error(unsent, why, error, "send them later") from failure
        self._queues.update(dict.fromkeys(unsent_job.queue for unsent_job in unsent))
        self._size += len(unsent)
        self._update_size()

    def _make_full_error(
        self, unsent: Sequence[UnsentJob], what: str, error: BrokerUnavailable | None, remedy: str
    ) -> BacklogFull:
        full = BacklogFull(
            f"{format_count(len(unsent), 'job was', 'jobs were')} not sent: {what} ({error or self._why}); {remedy}",
            maybe_done=error is not None and error.maybe_done,
        )
        full.__cause__ = error
        return full

    async def run(self, *, task_status: "trio.TaskStatus[None] | None" = None) -> None:
        """Publish waiting jobs in this Trio run, in place of the thread, until cancelled.

        After that a thread publishes the rest. Run it as a task: `await nursery.start(app.backlog.run)`.
        """
        import trio  # a producer may not need it

        if self._wake is not None:
            raise RuntimeError("this backlog has a coroutine already")
        arrived, token, failures = trio.Event(), trio.lowlevel.current_trio_token(), 0

        def wake() -> None:
            with suppress(trio.RunFinishedError):
                token.run_sync_soon(arrived.set)

        self._wake = wake
        try:
            await self._call(self.open)
            if task_status is not None:
                task_status.started()
            # Not retry_until_available: that is of the layer of services.
            while True:
                arrived = trio.Event()
                portions = await self._call(self._take_without_thread)
                if portions is None or portions:
                    done = bool(portions) and await self._publish_portions(portions or {})
                    failures = 0 if done else failures + 1
                    pause = THREAD_CHECK_INTERVAL if self._thread is not None else _pause(failures)
                    await trio.sleep(pause if failures else 0)
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
        check_may_block("aflush")
        self.open()
        with self._changed:
            if not self._queues:  # a backlog of the user's own could not count when the last job went
                self._update_size()
            self._changed.notify_all()
            return self._changed.wait_for(lambda: not self.size, timeout)

    async def aflush(self, timeout: float | None = 10.0) -> bool:
        """`flush`, from Trio or asyncio."""
        return await run_in_thread(lambda: self.flush(timeout))

    def reset_after_fork(self) -> None:
        """Start again with a new lock, as a forked child must: its parent publishes the waiting jobs."""
        self._changed = threading.Condition(threading.Lock())
        self._memory = JobsInMemory()
        self._store: OwnBacklog = self._memory if self._own is None else CheckedBacklog(self._own)
        self._opens_at = math.inf if self._own is None else 0.0
        self._queues = {}
        self._size = 0
        self._why = ""
        self._thread = None
        self._wake = None

    def describe_lost_jobs(self) -> str:
        """Return a message about jobs that wait when the process ends; '' when there are none."""
        if not self.size:
            return ""
        jobs, are = format_count(self.size, "job"), choose_form(self.size, "is", "are")
        if self._own is None:
            which = f"celery5: {jobs} of {self._owner} could not be published and {are} lost"
            return f"{which}: {self._name_first_jobs()}: {self._why}"
        return (
            f"celery5: {jobs} of {self._owner} could not be published and {are} left in {self._store!r}, for the next "
            f"process that sends: {self._why}"
        )

    def _name_first_jobs(self) -> str:
        """Return the tasks and ids of the first jobs that wait, and how many more there are."""
        waiting = [job for queue in self._queues for job in self._store.first(queue, NAMED_AT_EXIT)]
        named = [f"{Job.from_bytes(unsent.job).task} {unsent.id}" for unsent in waiting[:NAMED_AT_EXIT]]
        return ", ".join(named) + count_rest(self.size - len(named))

    async def _call(self, function: Callable[[], T]) -> T:
        """Call a function, in a thread where it may block."""
        return function() if self._own is None else await run_in_thread(function)

    def _start_thread(self) -> None:
        thread = threading.Thread(target=self._drain, name="celery5-backlog", daemon=True)
        thread.start()  # raises when the system is out of threads; the next job tries again
        self._thread = thread

    # The rest is called with the lock, but for `_drain` and `_publish_portions`.

    def _open(self) -> None:
        try:
            self._queues.update(dict.fromkeys(self._store.open()))
        except Exception as error:  # code of the user's own
            self._why, self._opens_at = self._describe(error), time.monotonic() + OPEN_INTERVAL
            return
        self._opens_at = math.inf
        self._update_size()
        if self._queues and self._thread is None and self._wake is None:
            self._start_thread()

    def _update_size(self) -> None:
        try:
            self._size = self._store.count()
        except Exception as error:  # code of the user's own
            self._why = self._describe(error)

    def _describe(self, error: Exception) -> str:
        return f"the backlog {self._store!r}: {error!r}"

    def _take(self) -> Portions | None:
        """Return what one attempt takes of each queue; None when the backlog cannot be read."""
        portions: dict[str, Sequence[UnsentJob]] = {}
        try:
            for queue in list(self._queues):
                portions[queue] = self._store.first(queue, JOBS_PER_ATTEMPT)
                if not portions[queue]:
                    del portions[queue], self._queues[queue]
        except Exception as error:  # code of the user's own
            self._why = self._describe(error)
            return None
        if not portions:
            self._update_size()
            self._changed.notify_all()
        return portions

    def _take_without_thread(self) -> Portions | None:
        with self._changed:  # a running thread finishes its last attempt first
            return {} if self._thread is not None else self._take()

    def _drain(self) -> None:
        """In the thread: publish until nothing waits."""
        failures = 0
        # Not retry_until_available: this thread has no Trio run.
        while True:
            with self._changed:
                if failures:
                    self._changed.wait(_pause(failures))
                portions = self._take()
                if (portions is not None and not portions) or self._wake is not None:
                    self._thread = None
                    return
            done = portions is not None and run_blocking(self._publish_portions(portions))
            failures = 0 if done else failures + 1

    async def _publish_portions(self, portions: Portions) -> bool:
        """Make one attempt at each queue's first jobs; return whether all of them went through."""
        complete = True
        unreachable = set[str]()
        for queue, portion in portions.items():
            if self._find_broker(queue) in unreachable:
                continue
            try:
                await self._publish([unsent_job.to_job(time.time()) for unsent_job in portion])
            except BrokerUnavailable as error:  # the broker of this queue and others, which need not be tried
                self._why, complete = str(error), False
                unreachable.add(self._find_broker(queue))
            except Exception as error:  # refused: this queue's jobs stay, and hold up no other queue's
                self._why, complete = f"queue {queue!r}: {error}", False
            else:
                complete = await self._call(partial(self._forget, queue, portion)) and complete
        if complete:
            self._why = ""
        return complete

    def _forget(self, queue: str, portion: Sequence[UnsentJob]) -> bool:
        """Remove published jobs; return whether that was done. Those that stay are published again."""
        with self._changed:
            try:
                self._store.remove(queue, [unsent_job.id for unsent_job in portion])
                if not self._store.first(queue, 1):
                    self._queues.pop(queue, None)
            except Exception as error:  # code of the user's own
                self._why = self._describe(error)
                return False
            self._update_size()
            if not self._size:
                self._changed.notify_all()
            return True


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
