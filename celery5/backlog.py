"""Backlog: jobs that a producer could not publish, kept in its memory until Redis is back (C26).

Floor: domain. Reads: nothing. Writes: the jobs, by its application's hand; a line on stderr about those that are lost.

A thread publishes them, each queue's in the order in which they were sent, and ends when none is left. It works from
plain Python, from threads and from any event loop alike, since it has no part in theirs.
"""

import atexit
import os
import random
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice

import msgspec

from celery5.broker.colour import current_colour
from celery5.broker.in_thread import in_thread
from celery5.errors import BacklogFull, BlockingInEventLoop, BrokerUnavailable
from celery5.protocol.backoff import full_jitter
from celery5.protocol.job import Job

PORTION = 200
"""Jobs of a queue in one attempt."""
BACKOFF_START = 0.05
BACKOFF_CAP = 1.0
"""Seconds between attempts: a random part of a time that doubles, up to this."""
FAREWELL = 5.0
"""Seconds that a process which ends gives what is left."""


class _Kept(msgspec.Struct, frozen=True):
    """A job that waits, and when it falls due on the monotonic clock, if it was sent with a countdown."""

    job: Job
    due: float | None

    def now(self) -> Job:
        """The job as it is to be published now: of its countdown, what is left."""
        if self.due is None:
            return self.job
        left = max(0, int((self.due - time.monotonic()) * 1000))
        return msgspec.structs.replace(self.job, at=f"+{left}")


class Backlog:
    """What one application of this process has sent and Redis has not got. It is empty unless Redis is away.

    It is memory and no more: what is in it when the process dies is lost (DESIGN part 2: Messages Backlog).
    """

    def __init__(self, *, publish: Callable[[Sequence[Job]], object], owner: str) -> None:
        self._publish = publish
        self._owner = owner
        self._thread: threading.Thread | None
        self._why: str
        self.start_over()
        _ALL.add(self)

    def __repr__(self) -> str:
        return f"<Backlog of {self._owner}: {self.size} jobs{f', {self.why}' if self.why else ''}>"

    @property
    def size(self) -> int:
        """How many jobs wait."""
        return self._size

    @property
    def draining(self) -> bool:
        """Whether jobs wait and Redis takes them."""
        return self._size > 0 and not self.why

    @property
    def why(self) -> str:
        """Why jobs wait: what the last attempt met with; '' when it went through."""
        return self._why

    def holds_up(self, jobs: Sequence[Job]) -> bool:
        """Whether jobs of the same queues wait, which are to be published first."""
        return self._size > 0 and any(job.queue in self._waiting for job in jobs)

    def keep(self, jobs: Sequence[Job], error: BrokerUnavailable | None, *, limit: int) -> None:
        """Keep all of `jobs`, or none: raises BacklogFull when there would be more than `limit`.

        `error` is what their own attempt met with, if one was made.
        """
        now = time.monotonic()
        with self._changed:
            if self._size + len(jobs) > limit:
                why = str(error or self._why)
                raise BacklogFull(
                    f"{len(jobs)} jobs were not sent: {self._size} of at most {limit} wait in the backlog already "
                    f"({why}); send them later, or raise the setting backlog",
                    maybe_done=error is not None and error.maybe_done,
                ) from error
            if error is not None:
                self._why = str(error)
            if self._thread is None:
                thread = threading.Thread(target=self._drain, name="celery5-backlog", daemon=True)
                thread.start()  # when the system has no thread to give, this raises, and the next job tries again
                self._thread = thread
            for job in jobs:
                self._waiting.setdefault(job.queue, deque()).append(_Kept(job, _due(job, now)))
            self._size += len(jobs)

    def flush(self, timeout: float | None = 10.0) -> bool:
        """Try at once, and wait until nothing is left, for `timeout` seconds at most (None: for ever). Gives whether
        nothing is left. For plain Python."""
        colour = current_colour()
        if colour is not None:
            raise BlockingInEventLoop(f"this would block the {colour} event loop: await aflush(...) instead")
        with self._changed:
            self._changed.notify_all()
            return self._changed.wait_for(lambda: not self._size, timeout)

    async def aflush(self, timeout: float | None = 10.0) -> bool:
        """`flush`, from Trio or asyncio."""
        return await in_thread(lambda: self.flush(timeout))

    def start_over(self) -> None:
        """Begin empty, with a lock that nobody holds, as a forked child must: what waits is its parent's to publish."""
        self._changed = threading.Condition(threading.Lock())
        self._waiting: dict[str, deque[_Kept]] = {}
        self._size = 0
        self._why = ""
        self._thread = None

    def lost(self) -> str:
        """What to say of jobs that wait when the process ends; '' when there are none."""
        if not self._size:
            return ""
        jobs, are = ("1 job", "is") if self._size == 1 else (f"{self._size} jobs", "are")
        return f"celery5: {jobs} of {self._owner} could not be published and {are} lost: {self._why}"

    def _drain(self) -> None:
        """In the thread: publish until nothing waits."""
        failures = 0
        while True:
            with self._changed:
                if failures:
                    pause = full_jitter(failures, start=BACKOFF_START, cap=BACKOFF_CAP, random=random.random)
                    self._changed.wait(pause)
                portions = {queue: list(islice(kept, PORTION)) for queue, kept in self._waiting.items()}
                if not portions:
                    self._thread = None
                    return
            failures = 0 if self._published(portions) else failures + 1

    def _published(self, portions: dict[str, list[_Kept]]) -> bool:
        """One attempt at each queue's first jobs; whether all of them went through."""
        whole = True
        for queue, kept in portions.items():
            try:
                self._publish([each.now() for each in kept])
            except BrokerUnavailable as error:
                self._why = str(error)
                return False
            except Exception as error:  # refused: this queue's jobs stay, and hold up no other queue's
                self._why = f"queue {queue!r}: {error}"
                whole = False
            else:
                self._gone(queue, len(kept))
        if whole:
            self._why = ""
        return whole

    def _gone(self, queue: str, count: int) -> None:
        with self._changed:
            waiting = self._waiting[queue]
            for _ in range(count):
                waiting.popleft()
            if not waiting:
                del self._waiting[queue]
            self._size -= count
            if not self._size:
                self._changed.notify_all()


def _due(job: Job, now: float) -> float | None:
    return now + int(job.at[1:]) / 1000 if job.at.startswith("+") else None


_ALL: weakref.WeakSet[Backlog] = weakref.WeakSet()


def _farewell() -> None:
    """The process ends: one more attempt, for a limited time, then say what is lost."""
    end = time.monotonic() + FAREWELL
    for backlog in list(_ALL):
        try:
            if backlog.size:
                backlog.flush(max(0.0, end - time.monotonic()))
        except KeyboardInterrupt:
            end = 0.0
        if said := backlog.lost():
            sys.stderr.write(f"{said}\n")


def _after_fork() -> None:
    for backlog in list(_ALL):
        backlog.start_over()


atexit.register(_farewell)
os.register_at_fork(after_in_child=_after_fork)
