"""Revoke all jobs that wait on a queue.

They are revoked rather than deleted: callers that wait for one get `TaskRevoked`, keys become free, and Data Sinks
get their documents.
"""

from typing import TYPE_CHECKING, Any

from celery5.broker.call import Call
from celery5.broker.calls import jobs
from celery5.broker.driver import AsyncDriver
from celery5.broker.keys import QueueKeys
from celery5.errors import UnknownQueue
from celery5.protocol.job.states import JobState

if TYPE_CHECKING:
    from celery5.application import Application

WAITING_STATES = frozenset({JobState.SENT, JobState.SCHEDULED, JobState.HELD, JobState.RETRY})
"""The states of jobs that are revoked: those that no worker has."""


async def empty_queue(app: "Application", redis: AsyncDriver, queue: str) -> int:
    """Revoke the jobs that wait on a queue; return how many. Raises UnknownQueue."""
    queues = await redis.perform(jobs.list_queues(app.keys))
    if queue not in queues:
        raise UnknownQueue(queue, queues)
    keys, cursor, count = app.queue(queue), "0", 0
    while True:
        cursor, ids = await redis.perform(jobs.scan_jobs(keys, cursor))
        for start in range(0, len(ids), jobs.REVOCATION_BATCH):
            count += await _revoked(app, redis, keys, ids[start : start + jobs.REVOCATION_BATCH])
        if cursor == "0":
            return count


async def _revoked(app: "Application", redis: AsyncDriver, keys: QueueKeys, ids: list[str]) -> int:
    calls: list[Call[Any]] = [jobs.locate_job(keys, job_id) for job_id in ids]
    places = await redis.perform_all(calls)
    waiting = [job_id for job_id, place in zip(ids, places, strict=True) if place.state in WAITING_STATES]
    if not waiting:
        return 0
    states = await redis.perform(jobs.revoke(keys, waiting, ttl=app.settings.results_ttl))
    return states.count(JobState.REVOKED)
