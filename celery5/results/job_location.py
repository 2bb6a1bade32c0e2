"""Locate a job: find the queue that it is on, for a handle that was made from an id alone.

A handle that was returned by sending has its queue, and is not looked up. Any other one has a guess; when the job
is not on that queue, all queues are searched, as `App.find` does, and a wait covers all of them.
"""

import math
import time
from collections.abc import Awaitable, Callable, Container, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from celery5.broker.calls import jobs as jobs_calls
from celery5.broker.calls import queues as queue_calls
from celery5.broker.calls.jobs import LocatedJob
from celery5.broker.colour import sleep
from celery5.broker.driver import AsyncDriver
from celery5.broker.routing.unreachable import retry_without_unreachable, skip_unreachable
from celery5.broker.timing import OUTAGE_LIMIT
from celery5.errors import BrokerUnavailable
from celery5.protocol.job.states import JobState
from celery5.results.waiting import wait_for_results

if TYPE_CHECKING:
    from celery5.application import Application

JOBS_PER_TRIP = 500
"""Jobs to look for in one trip."""
RETRY_DELAY = 0.1
"""Seconds before a wait looks again for jobs after it could not."""

_NOWHERE = LocatedJob(JobState.UNKNOWN, "", b"")

StopCondition = Callable[[Mapping[str, bytes]], bool]
Documents = dict[str, bytes]


class JobHandle(Protocol):
    """The handle of a job, as an `AsyncResult` is, and its possible location."""

    queue: str
    """The queue that the job is on, or that it may be on."""
    is_located: bool
    """Whether `queue` is known to be the job's."""

    @property
    def app(self) -> "Application":
        """The application whose job it is."""
        ...

    @property
    def id(self) -> str:
        """The job's id."""
        ...

    @property
    def key(self) -> str:
        """The key of its document if the job is on `queue`."""
        ...


async def locate_jobs(redis: AsyncDriver, handles: "Sequence[JobHandle]") -> list[LocatedJob]:
    """Return where the jobs of one application are, in order, and set the queues of their handles.

    Raises:
        BrokerError: A job was not found, and may be on a broker that cannot be reached.
    """
    with skip_unreachable() as unreachable:
        places = await retry_without_unreachable(lambda: _locate(redis, handles, unreachable))
    for handle, place in zip(handles, places, strict=True):
        handle.is_located = handle.is_located or _is_known(place)
    if unreachable and not all(handle.is_located for handle in handles):
        raise next(iter(unreachable.values()))
    return places


async def _locate(
    redis: AsyncDriver, handles: "Sequence[JobHandle]", unreachable_queues: Container[str]
) -> list[LocatedJob]:
    places = [_NOWHERE] * len(handles)
    first_indexes = [
        index
        for index, handle in enumerate(handles)
        if handle.is_located or _home(handle) not in unreachable_queues
    ]
    first = await _locate_pairs(redis, [(handles[index], handles[index].queue) for index in first_indexes])
    for index, place in zip(first_indexes, first, strict=True):
        places[index] = place
    missing = [
        index
        for index, handle in enumerate(handles)
        if not handle.is_located and not _is_known(places[index])
    ]
    if missing:
        app = handles[0].app
        names = await redis.perform(queue_calls.list_queues(app.keys))
        pairs = [(index, name) for index in missing for name in names if name != handles[index].queue]
        other_places = await _locate_pairs(redis, [(handles[index], name) for index, name in pairs])
        for (index, name), place in zip(pairs, other_places, strict=True):
            # Of several, one that has not ended.
            if _is_known(place) and (
                not _is_known(places[index]) or (_has_ended(places[index]) > _has_ended(place))
            ):
                places[index], handles[index].queue = place, name
    return places


def _home(handle: "JobHandle") -> str:
    return handle.app.brokers.broker_of_queue(handle.queue)


async def locate_unknown(redis: AsyncDriver, handles: "Sequence[JobHandle]") -> None:
    """Locate the jobs of those handles whose queue is a guess."""
    unknown = [handle for handle in handles if not handle.is_located]
    if unknown:
        await locate_jobs(redis, unknown)


async def wait_for_documents(
    app: "Application",
    handles: "Sequence[JobHandle]",
    *,
    timeout: float | None,
    enough: StopCondition | None = None,
) -> Documents:
    """Wait for the documents of jobs.

    Args:
        timeout: Seconds; None to wait without a limit.
        enough: Called with the documents that have arrived; the wait ends when it returns true.

    Returns:
        The documents that have arrived, by the keys of the handles.
    """
    if all(handle.is_located for handle in handles):
        keys = [handle.key for handle in handles]
        return await wait_for_results(app, keys, timeout=timeout, enough=enough)
    search = await _Search(app, handles, timeout).begun(app.connections.get_async_driver)
    documents = await wait_for_results(app, search.keys, timeout=search.rest, enough=search.enough(enough))
    return search.ended(documents)


class _Search:
    """A wait for jobs some of whose queues are unknown: it covers all keys of their documents."""

    def __init__(self, app: "Application", handles: "Sequence[JobHandle]", timeout: float | None) -> None:
        self._app = app
        self._handles = handles
        self._ends = math.inf if timeout is None else time.monotonic() + timeout
        self._of_each: list[list[str]] = []

    async def begun(self, reach: Callable[[], Awaitable[AsyncDriver]]) -> "_Search":
        """Return itself after all jobs were searched for. Retries during an outage. Raises BrokerUnavailable."""
        outage_deadline = min(self._ends, time.monotonic() + OUTAGE_LIMIT)
        while True:
            try:
                await self._look(await reach())
            except BrokerUnavailable:
                if time.monotonic() >= outage_deadline:
                    raise
                await sleep(RETRY_DELAY)
            else:
                return self

    async def _look(self, redis: AsyncDriver) -> None:
        await locate_jobs(redis, [handle for handle in self._handles if not handle.is_located])
        names = await redis.perform(queue_calls.list_queues(self._app.keys))
        self._of_each = []
        for handle in self._handles:
            queue_names = [handle.queue] if handle.is_located else dict.fromkeys([handle.queue, *names])
            self._of_each.append([self._app.queue(name).result(handle.id) for name in queue_names])

    @property
    def keys(self) -> list[str]:
        """All possible keys of the documents."""
        return list(dict.fromkeys(key for keys in self._of_each for key in keys))

    @property
    def rest(self) -> float | None:
        """The remaining seconds; None for no limit."""
        return None if self._ends == math.inf else max(0.0, self._ends - time.monotonic())

    def enough(self, condition: StopCondition | None) -> StopCondition:
        """Return a condition: each job has a document under one of its keys, or the caller's condition is true."""
        jobs = len({handle.id for handle in self._handles})

        def is_enough(documents: Mapping[str, bytes]) -> bool:
            if condition is not None and condition(documents):
                return True
            return len(documents) >= jobs and all(
                any(key in documents for key in keys) for keys in self._of_each
            )

        return is_enough

    def ended(self, found: Documents) -> Documents:
        """Return the documents after setting the queues of their handles."""
        for handle, keys in zip(self._handles, self._of_each, strict=True):
            key = next((key for key in keys if key in found), None)
            if key is not None:
                handle.queue, handle.is_located = self._app.keys.parse_result_key(key)[0], True
        return found


async def _locate_pairs(redis: AsyncDriver, pairs: "Sequence[tuple[JobHandle, str]]") -> list[LocatedJob]:
    """Return where jobs are, each on the queue that is paired with it."""
    places: list[LocatedJob] = []
    for start in range(0, len(pairs), JOBS_PER_TRIP):
        batch = pairs[start : start + JOBS_PER_TRIP]
        calls = [jobs_calls.locate_job(handle.app.queue(name), handle.id) for handle, name in batch]
        places += await redis.perform_all(calls)
    return places


def _is_known(place: LocatedJob) -> bool:
    return place.state != JobState.UNKNOWN


def _has_ended(place: LocatedJob) -> bool:
    return place.state in ("ENDED", JobState.DEAD)
