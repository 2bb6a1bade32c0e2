"""Locate a job: find the queue that it is on, for a handle that was made of an id alone.

A handle that came from sending knows its queue, and costs nothing here. One that does not has a guess; when nothing is
known of the job there, it is looked for on all queues, as `App.find` does, and a wait is for whichever it will be on.
"""

import math
import time
from collections.abc import Awaitable, Callable, Container, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from celery5.broker.calls import jobs as jobs_calls
from celery5.broker.calls.jobs import LocatedJob
from celery5.broker.coroutines import AwaitableConnections, sleep
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
    """The handle of a job, as an `AsyncResult` is: what is known of where the job is."""

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
        """The key of its document, were it on `queue`."""
        ...


async def locate_jobs(redis: AsyncDriver, handles: "Sequence[JobHandle]") -> list[LocatedJob]:
    """Where the jobs of one application are, in order. Handles whose job is found know its queue from then on. Raises
    the error of a broker that is away when one may be there."""
    with skip_unreachable() as away:
        seen = await retry_without_unreachable(lambda: _seen(redis, handles, away))
    for each, place in zip(handles, seen, strict=True):
        each.is_located = each.is_located or _is_known(place)
    if away and not all(each.is_located for each in handles):
        raise next(iter(away.values()))
    return seen


async def _seen(redis: AsyncDriver, handles: "Sequence[JobHandle]", away: Container[str]) -> list[LocatedJob]:
    seen = [_NOWHERE] * len(handles)
    asked = [n for n, each in enumerate(handles) if each.is_located or _home(each) not in away]
    first = await _looked(redis, [(handles[n], handles[n].queue) for n in asked])
    for n, place in zip(asked, first, strict=True):
        seen[n] = place
    lost = [n for n, each in enumerate(handles) if not each.is_located and not _is_known(seen[n])]
    if lost:
        app = handles[0].app
        names = await redis.perform(jobs_calls.list_queues(app.keys))
        pairs = [(n, name) for n in lost for name in names if name != handles[n].queue]
        found = await _looked(redis, [(handles[n], name) for n, name in pairs])
        for (n, name), place in zip(pairs, found, strict=True):
            # Of several, one that has not ended.
            if _is_known(place) and (not _is_known(seen[n]) or (_has_ended(seen[n]) > _has_ended(place))):
                seen[n], handles[n].queue = place, name
    return seen


def _home(handle: "JobHandle") -> str:
    return handle.app.brokers.broker_of_queue(handle.queue)


async def locate_unknown(connections: AwaitableConnections, handles: "Sequence[JobHandle]") -> None:
    """Look for the jobs of those handles that do not know their queue."""
    unknown = [handle for handle in handles if not handle.is_located]
    if unknown:
        await locate_jobs(await connections.get_async_driver(), unknown)


async def wait_for_documents(
    app: "Application",
    connections: AwaitableConnections,
    handles: "Sequence[JobHandle]",
    *,
    timeout: float | None,
    enough: StopCondition | None = None,
) -> Documents:
    """Wait for the documents of jobs.

    Args:
        timeout: Seconds; None to wait without a limit.
        enough: Called with the documents so far; the wait ends when it returns true.

    Returns:
        The documents that have arrived, by the keys of the handles.
    """
    if all(handle.is_located for handle in handles):
        keys = [handle.key for handle in handles]
        return await wait_for_results(app, connections, keys, timeout=timeout, enough=enough)
    search = await _Search(app, handles, timeout).begun(connections.get_async_driver)
    found = await wait_for_results(
        app, connections, search.keys, timeout=search.rest, enough=search.enough(enough)
    )
    return search.ended(found)


class _Search:
    """A wait for jobs some of whose queues nobody knows: under which keys their documents may come."""

    def __init__(self, app: "Application", handles: "Sequence[JobHandle]", timeout: float | None) -> None:
        self._app = app
        self._handles = handles
        self._ends = math.inf if timeout is None else time.monotonic() + timeout
        self._of_each: list[list[str]] = []

    async def begun(self, reach: Callable[[], Awaitable[AsyncDriver]]) -> "_Search":
        """Itself, when all jobs have been looked for. An outage may pass, as in any wait. Raises BrokerUnavailable."""
        patient_until = min(self._ends, time.monotonic() + OUTAGE_LIMIT)
        while True:
            try:
                await self._look(await reach())
            except BrokerUnavailable:
                if time.monotonic() >= patient_until:
                    raise
                await sleep(RETRY_DELAY)
            else:
                return self

    async def _look(self, redis: AsyncDriver) -> None:
        await locate_jobs(redis, [each for each in self._handles if not each.is_located])
        names = await redis.perform(jobs_calls.list_queues(self._app.keys))
        self._of_each = []
        for each in self._handles:
            likely = [each.queue] if each.is_located else dict.fromkeys([each.queue, *names])
            self._of_each.append([self._app.queue(name).result(each.id) for name in likely])

    @property
    def keys(self) -> list[str]:
        """All keys that a document may come under."""
        return list(dict.fromkeys(key for keys in self._of_each for key in keys))

    @property
    def rest(self) -> float | None:
        """The seconds that are left; None for all there are."""
        return None if self._ends == math.inf else max(0.0, self._ends - time.monotonic())

    def enough(self, asked: StopCondition | None) -> StopCondition:
        """Whether each job has told its end under one of its keys, or enough of them."""
        jobs = len({each.id for each in self._handles})

        def is_enough(found: Mapping[str, bytes]) -> bool:
            if asked is not None and asked(found):
                return True
            return len(found) >= jobs and all(any(key in found for key in keys) for keys in self._of_each)

        return is_enough

    def ended(self, found: Documents) -> Documents:
        """What was found, when the handles have been told where."""
        for each, keys in zip(self._handles, self._of_each, strict=True):
            key = next((key for key in keys if key in found), None)
            if key is not None:
                each.queue, each.is_located = self._app.keys.parse_result_key(key)[0], True
        return found


async def _looked(redis: AsyncDriver, asked: "Sequence[tuple[JobHandle, str]]") -> list[LocatedJob]:
    """Where jobs are, each on the queue that is named with it."""
    seen: list[LocatedJob] = []
    for at in range(0, len(asked), JOBS_PER_TRIP):
        some = asked[at : at + JOBS_PER_TRIP]
        trips = [jobs_calls.locate_job(each.app.queue(name), each.id) for each, name in some]
        seen += await redis.perform_all(trips)
    return seen


def _is_known(place: LocatedJob) -> bool:
    return place.state != JobState.UNKNOWN


def _has_ended(place: LocatedJob) -> bool:
    return place.state in ("ENDED", JobState.DEAD)
