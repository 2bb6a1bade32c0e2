"""Watch one job: each change of its state, and each report of its progress, until it has ended.

Redis announces neither, so they are read at an interval. All watches of an event loop, or of all threads, are read
together: a hundred jobs in one command, over the connection that the loop has anyway. A thousand watches cost a few
dozen commands a second, and no connection.
"""

import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Generic, TypeVar

import msgspec

from celery5.broker.calls.jobs import STATES_BATCH, WatchedState, read_states
from celery5.broker.colour import (
    current_colour,
    get_running_loop,
    make_event,
    run_blocking,
    sleep,
)
from celery5.broker.driver import AsyncDriver
from celery5.broker.timing import OUTAGE_LIMIT
from celery5.errors import BlockingInEventLoop, BrokerUnavailable, Misconfigured, ResultsDisabled
from celery5.protocol.job.messages import read_document
from celery5.protocol.job.progress import Progress
from celery5.protocol.job.states import FINISHED, JobState
from celery5.results.job_location import JobHandle, locate_jobs
from celery5.results.waiting import wait_for_results

R_co = TypeVar("R_co", covariant=True)

LEAST_INTERVAL = 0.1
"""The shortest interval of a watch, in seconds."""
FIRST_PAUSE = 0.05
"""Seconds until a job is read again whose state has just changed; each further pause is twice as long."""
UNKNOWN_INTERVAL = 5.0
"""The longest pause, in seconds, for a job that is on no queue: each read of it searches all queues."""
GATHERING = 0.02
"""Seconds for which a read waits for other watches, to read all of them together."""

_UNKNOWN = WatchedState(JobState.UNKNOWN, None)


class JobUpdate(msgspec.Struct, Generic[R_co], frozen=True):
    """What has changed of a job."""

    state: JobState
    # What the job has last reported, while it runs.
    progress: Progress | None = None
    # What it returned, when it is a SUCCESS; None if it was sent with `ignore_result`.
    result: R_co | None = None
    # What `get` raises for a job that has failed, or whose result does not fit the annotation.
    error: Exception | None = None

    @property
    def is_final(self) -> bool:
        """Whether the job has ended: this is the last update."""
        return self.state in FINISHED


class JobWatch(Generic[R_co]):
    """The updates of one job: `async for` in Trio and asyncio, `for` in plain Python.

    Not a generator: an asynchronous generator would have to be closed.

    Args:
        handle: The job.
        timeout: Seconds from now; None for no limit.
        every: Seconds between two looks, at most.
        outcome: Returns what a document says: the result or the error.
        make_timeout_error: Returns the error for a job that has not ended in time.
    """

    def __init__(
        self,
        handle: JobHandle,
        *,
        timeout: float | None,
        every: float,
        outcome: Callable[[bytes], R_co | Exception],
        make_timeout_error: Callable[[AsyncDriver], Awaitable[Exception]],
    ) -> None:
        self._handle = handle
        self._every = _check_interval(every)
        self._outcome = outcome
        self._make_timeout_error = make_timeout_error
        self._last: JobUpdate[R_co] | None = None
        self._pause = FIRST_PAUSE
        # On the monotonic clock: when it ends, and when Redis was last reached; None before the first time.
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._reached: float | None = None

    def __aiter__(self) -> AsyncIterator[JobUpdate[R_co]]:
        return self

    async def __anext__(self) -> JobUpdate[R_co]:
        if self._last is not None and self._last.is_final:
            raise StopAsyncIteration
        return await self._wait_for_change()

    def __iter__(self) -> Iterator[JobUpdate[R_co]]:
        return self

    def __next__(self) -> JobUpdate[R_co]:
        if (colour := current_colour()) is not None:
            raise BlockingInEventLoop(f"this would block the {colour} event loop: write `async for` instead")
        if self._last is not None and self._last.is_final:
            raise StopIteration
        return run_blocking(self._wait_for_change())

    async def _wait_for_change(self) -> JobUpdate[R_co]:
        while True:
            if self._last is not None:
                await self._sleep()
            try:
                update = await self._read()
            except BrokerUnavailable:
                # An outage may pass. If there was no connection yet, the caller learns that at once.
                if self._reached is None or time.monotonic() - self._reached > OUTAGE_LIMIT:
                    raise
                continue
            self._reached = time.monotonic()
            last = self._last
            if update != last:
                if last is None or update.state != last.state:
                    self._pause = FIRST_PAUSE
                self._last = update
                return update

    async def _sleep(self) -> None:
        """Sleep until the next look. Raises ResultTimeout."""
        left = None if self._deadline is None else self._deadline - time.monotonic()
        if left is not None and left <= 0:
            raise await self._make_timeout_error(await self._handle.app.connections.get_async_driver())
        most = self._every if self._handle.is_located else max(self._every, UNKNOWN_INTERVAL)
        pause, self._pause = min(self._pause, most), min(2 * self._pause, most)
        await sleep(pause if left is None else min(pause, left))

    async def _read(self) -> JobUpdate[R_co]:
        state, progress = await read_together(self._handle)
        if state not in ("ENDED", JobState.DEAD):
            return JobUpdate(JobState(state), progress)
        app, key = self._handle.app, self._handle.key
        raw = (await wait_for_results(app, [key], timeout=0)).get(key)
        if raw is None:  # it has just expired or was forgotten; or a dead job was just replayed
            return JobUpdate(JobState.UNKNOWN)
        ended = JobState(read_document(raw, app.settings.message_limit).state)
        outcome = self._outcome(raw)
        if isinstance(outcome, ResultsDisabled):
            return JobUpdate(ended)
        if isinstance(outcome, Exception):
            return JobUpdate(ended, error=outcome)
        return JobUpdate(ended, result=outcome)


def _check_interval(every: object) -> float:
    """Return an interval in seconds. Raises Misconfigured."""
    if isinstance(every, int | float) and not isinstance(every, bool) and every >= LEAST_INTERVAL:
        return every
    raise Misconfigured(f"every is {every!r}: give seconds, at least {LEAST_INTERVAL}")


class _Batch:
    """Jobs that are read together."""

    def __init__(self) -> None:
        self.handles: list[JobHandle] = []
        self.states: dict[JobHandle, WatchedState] = {}
        self.error: Exception | None = None
        self.done = make_event()


_open_batches: dict[object, _Batch] = {}
"""Batches that gather, by process, application, event loop and broker.

A broker that cannot be reached fails its own watches only. The process: a child that was forked meanwhile starts its
own. No lock, since a fork would copy it as it is: a job that joins too late is in no answer, and joins the next batch.
"""


async def read_together(handle: JobHandle) -> WatchedState:
    """Return the state of a job, which is read together with those of other callers. Raises BrokerError."""
    app = handle.app
    broker = app.brokers.broker_of_queue(handle.queue) if handle.is_located else None
    key = os.getpid(), app, get_running_loop(), broker
    while True:
        batch = _Batch()
        existing = _open_batches.setdefault(key, batch)
        existing.handles.append(handle)
        if existing is batch:
            await _read_batch(key, batch)
        else:
            batch = existing
            await batch.done.wait()
        if handle in batch.states:
            return batch.states[handle]
        if batch.error is not None:
            raise batch.error
        # It joined too late, or the task that was to read was cancelled.


async def _read_batch(key: object, batch: _Batch) -> None:
    try:
        await sleep(GATHERING)
        del _open_batches[key]
        batch.states = await _read_states(batch.handles)
    except Exception as error:
        batch.error = error
    finally:
        if _open_batches.get(key) is batch:
            del _open_batches[key]
        batch.done.set()


async def _read_states(handles: Sequence[JobHandle]) -> dict[JobHandle, WatchedState]:
    redis = await handles[0].app.connections.get_async_driver()
    unknown = [handle for handle in handles if not handle.is_located]
    if unknown:
        await locate_jobs(redis, unknown)
    states = dict.fromkeys(handles, _UNKNOWN)
    by_queue: dict[str, list[JobHandle]] = {}
    for handle in states:
        if handle.is_located:
            by_queue.setdefault(handle.queue, []).append(handle)
    parts = [
        (queue, of_queue[start : start + STATES_BATCH])
        for queue, of_queue in by_queue.items()
        for start in range(0, len(of_queue), STATES_BATCH)
    ]
    app = handles[0].app
    calls = [read_states(app.queue(queue), [handle.id for handle in part]) for queue, part in parts]
    for (_, part), found in zip(parts, await redis.perform_all(calls) if calls else (), strict=True):
        states.update(zip(part, found, strict=True))
    return states
