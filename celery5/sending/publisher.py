"""Plan the fewest trips that publish some jobs. Pure: a driver of any colour performs the calls."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

from celery5.broker.call import Call
from celery5.broker.calls import jobs as jobs_calls
from celery5.broker.calls import limits
from celery5.broker.calls import queues as queue_calls
from celery5.broker.keys import EVENTS, Keys, QueueKeys
from celery5.protocol.job.job import Job

T = TypeVar("T")

JOBS_PER_TRIP = 200
"""Jobs in one trip: long scripts would hold the server up."""
LIMITED_JOBS_PER_TRIP = 100
"""The most jobs that one trip puts straight into waiting lists: each costs four commands or more."""
MAX_KNOWN_QUEUES = 1000
"""Queues that are remembered as registered, with their keys: a program may name one after each of its customers."""
BYTES_PER_TRIP = 4 * 1024 * 1024
"""Bytes of messages in one trip, unless one message alone has more."""


class PublishPlanner:
    """Makes the calls that publish jobs. One for an application."""

    def __init__(self, *, keys: Keys) -> None:
        self._keys = keys
        self._known: dict[str, QueueKeys] = {}
        self._announced: set[str] = {EVENTS}  # not a queue of tasks

    def queue(self, name: str) -> QueueKeys:
        """Return the keys of a queue, which are made once."""
        keys = self._known.get(name)
        if keys is None:
            if len(self._known) >= MAX_KNOWN_QUEUES:
                self._known.clear()
            keys = self._known[name] = self._keys.for_queue(name)
        return keys

    def plan_calls(self, jobs: Sequence[Job]) -> list[Call[Any]]:
        """Return the calls that publish `jobs`, in their order for each queue. Pass the replies to `record_published`.

        If one job has a key, all jobs of its queue are sent by the same script, to keep their order; so are jobs of
        another priority than normal, to their lane. Jobs with a waiting list (`Job.waiting_list`) go directly to it.
        """
        if len(jobs) == 1 and jobs[0].queue in self._announced:
            return [_WAYS[_way(jobs[0])](self.queue(jobs[0].queue).on_lane(jobs[0].lane), jobs)]
        groups = _grouped(jobs)
        queues = dict.fromkeys(name for name, _, _ in groups)
        calls: list[Call[Any]] = [
            queue_calls.register_queue(self._keys, name) for name in queues if name not in self._announced
        ]
        for (name, way, lane), group in groups.items():
            keys = self.queue(name).on_lane(lane)
            max_jobs = LIMITED_JOBS_PER_TRIP if way == "add_to_waiting_list" else JOBS_PER_TRIP
            calls += [_WAYS[way](keys, part) for part in split_into_trips(group, _size, max_jobs)]
        return calls

    def record_published(self, jobs: Sequence[Job], replies: Sequence[Any] = ()) -> Mapping[str, str]:
        """Record that the calls for `jobs` succeeded: their queues are registered.

        Returns:
            For the id of each job that was not sent because its key is taken, the id of the job that has the key.
        """
        if len(self._announced) > MAX_KNOWN_QUEUES:
            self._announced.intersection_update((EVENTS,))  # the others are announced again
        self._announced.update([job.queue for job in jobs])
        holders: dict[str, str] = {}
        for reply in replies:
            if type(reply) is dict:
                holders.update(cast("dict[str, str]", reply))
        return holders


def _way(job: Job) -> str:
    """Return how a job is sent when it is sent alone."""
    if _waits_at_limit(job):
        return "add_to_waiting_list"
    return "publish_unique" if job.lock or job.lane else "schedule" if job.at else "publish"


def _waits_at_limit(job: Job) -> bool:
    """Return whether a job goes directly to a waiting list."""
    return bool(job.waiting_list) and not job.lock and not job.at


def _grouped(jobs: Sequence[Job]) -> dict[tuple[str, str, str], list[Job]]:
    """Return the jobs by queue, way and lane."""
    keyed_queues = {job.queue for job in jobs if job.lock}
    groups: dict[tuple[str, str, str], list[Job]] = {}
    for job in jobs:
        way = _way(job)
        if job.queue in keyed_queues and way != "add_to_waiting_list":
            way = "publish_unique"
        groups.setdefault((job.queue, way, job.lane), []).append(job)
    return groups


def _publish(keys: QueueKeys, jobs: Sequence[Job]) -> Call[Any]:
    return jobs_calls.publish(keys, [(job.id, job.message) for job in jobs])


def _schedule(keys: QueueKeys, jobs: Sequence[Job]) -> Call[Any]:
    return jobs_calls.schedule(keys, [(job.id, job.message, job.at) for job in jobs])


def _publish_unique(keys: QueueKeys, jobs: Sequence[Job]) -> Call[Any]:
    return jobs_calls.publish_unique(
        keys, [(job.id, job.message, job.at, job.lock, job.unique_for) for job in jobs]
    )


def _add_to_waiting_list(keys: QueueKeys, jobs: Sequence[Job]) -> Call[Any]:
    return limits.add_to_waiting_list(
        keys, [(job.id, job.message, job.waiting_list, job.expires) for job in jobs]
    )


_WAYS = {
    "publish": _publish,
    "schedule": _schedule,
    "publish_unique": _publish_unique,
    "add_to_waiting_list": _add_to_waiting_list,
}


def split_into_trips(
    jobs: Iterable[T], size_of: Callable[[T], int], most: int = JOBS_PER_TRIP
) -> Iterator[list[T]]:
    """Yield the jobs in order, as many as go in one trip: `most`, or fewer where they are large.

    Args:
        size_of: Returns the bytes of one job. A trip has at most BYTES_PER_TRIP, unless one job alone has more.
        most: The maximal number of jobs.
    """
    part: list[T] = []
    size = 0
    for job in jobs:
        job_size = size_of(job)
        if part and (len(part) == most or size + job_size > BYTES_PER_TRIP):
            yield part
            part, size = [], 0
        part.append(job)
        size += job_size
    if part:
        yield part


def _size(job: Job) -> int:
    return len(job.message)
