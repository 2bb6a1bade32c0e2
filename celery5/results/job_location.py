"""Locate a job: find the queue that it is on, for a handle that was made from an id alone.

A handle that was returned by sending has its queue, and is not looked up. Any other one has a guess; when the job
is not on that queue, all queues are searched, as `App.find` does.
"""

from collections.abc import Container, Sequence
from typing import TYPE_CHECKING

from celery5.broker.calls import jobs as jobs_calls
from celery5.broker.calls import queues as queue_calls
from celery5.broker.calls.jobs import LocatedJob
from celery5.broker.driver import AsyncDriver
from celery5.broker.routing.unreachable import retry_without_unreachable, skip_unreachable
from celery5.protocol.job.states import JobState

if TYPE_CHECKING:
    from celery5.application import Application

JOBS_PER_TRIP = 500
"""Jobs to look for in one trip."""

_NOWHERE = LocatedJob(JobState.UNKNOWN, "", b"")


class JobHandle:
    """A job's id, and the queue that it is on as far as that is known.

    Args:
        queue: The queue of the job, or the one to look at first.
        is_located: Whether `queue` is known to be the job's.
    """

    __slots__ = ("app", "id", "is_located", "queue")

    def __init__(
        self,
        app: "Application",
        id: str,  # noqa: A002  the field's own name
        queue: str,
        *,
        is_located: bool = True,
    ) -> None:
        self.app: Application = app
        self.id: str = id
        self.queue: str = queue
        self.is_located: bool = is_located

    @property
    def key(self) -> str:
        """The key for the job's document."""
        return self.app.queue(self.queue).result(self.id)

    def set_queue(self, queue: str) -> None:
        """Note the queue that the job was found on."""
        self.queue, self.is_located = queue, True


async def locate_jobs(redis: AsyncDriver, handles: Sequence[JobHandle]) -> list[LocatedJob]:
    """Return where the jobs of one application are, in order, and set the queues of their handles.

    Raises:
        BrokerError: A job was not found, and may be on a broker that cannot be reached.
    """
    with skip_unreachable() as unreachable:
        places = await retry_without_unreachable(lambda: _locate(redis, handles, unreachable))
    for handle, (place, queue) in zip(handles, places, strict=True):
        if _is_known(place):
            handle.set_queue(queue)
    if unreachable and not all(handle.is_located for handle in handles):
        raise next(iter(unreachable.values()))
    return [place for place, _ in places]


async def _locate(
    redis: AsyncDriver, handles: Sequence[JobHandle], unreachable_queues: Container[str]
) -> list[tuple[LocatedJob, str]]:
    """Return where the jobs are, and their queues."""
    places = [(_NOWHERE, handle.queue) for handle in handles]
    first_indexes = [
        index
        for index, handle in enumerate(handles)
        if handle.is_located or _home(handle) not in unreachable_queues
    ]
    first = await _locate_pairs(redis, [(handles[index], handles[index].queue) for index in first_indexes])
    for index, place in zip(first_indexes, first, strict=True):
        places[index] = place, handles[index].queue
    missing = [
        index
        for index, handle in enumerate(handles)
        if not handle.is_located and not _is_known(places[index][0])
    ]
    if missing:
        app = handles[0].app
        names = await redis.perform(queue_calls.list_queues(app.keys))
        pairs = [(index, name) for index in missing for name in names if name != handles[index].queue]
        other_places = await _locate_pairs(redis, [(handles[index], name) for index, name in pairs])
        for (index, name), place in zip(pairs, other_places, strict=True):
            # Of several, one that has not ended.
            best = places[index][0]
            if _is_known(place) and (not _is_known(best) or (_has_ended(best) > _has_ended(place))):
                places[index] = place, name
    return places


def _home(handle: JobHandle) -> str:
    return handle.app.brokers.broker_of_queue(handle.queue)


async def locate_unknown(redis: AsyncDriver, handles: Sequence[JobHandle]) -> None:
    """Locate the jobs of those handles whose queue is a guess."""
    unknown = [handle for handle in handles if not handle.is_located]
    if unknown:
        await locate_jobs(redis, unknown)


async def _locate_pairs(redis: AsyncDriver, pairs: Sequence[tuple[JobHandle, str]]) -> list[LocatedJob]:
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
