"""Replicas: a producer that waits until replicas have what it has published (F18).

Floor: domain. Reads: nothing. Writes: a key that is gone after a second.

WAIT is best effort, by Redis' own words: it makes the loss of a job at a failover much less likely, not impossible.
"""

from collections.abc import Sequence

from celery5.broker import calls
from celery5.broker.keys import QueueKeys
from celery5.connections import PlainRedis
from celery5.errors import BrokerError, NotReplicated
from celery5.protocol.job import Job

REPLICATION_TIMEOUT = 1.0
"""Seconds that replicas get."""


def wait_for_replicas(redis: PlainRedis, keys: QueueKeys, jobs: Sequence[Job], *, wanted: int) -> None:
    """Return once `wanted` replicas have `jobs`, which are published. Raises NotReplicated when they have not in time,
    or when Redis cannot be asked any more.

    This needs a connection that nobody else uses meanwhile, since WAIT holds it, and so never the one that all tasks
    of a Trio program share.
    """
    have, more = 0, ""
    try:
        have = redis.perform_all(calls.wait_for_replicas(keys, replicas=wanted, within=REPLICATION_TIMEOUT))[
            -1
        ]
    except BrokerError as error:
        more = f" ({error})"
    if have < wanted:
        raise NotReplicated(
            f"{_count(jobs)} published, but after {REPLICATION_TIMEOUT:g} s {have} of {wanted} replicas have all of that{more}; "
            "what was published will run: do not send it again, look at the replicas",
            ids=tuple(job.id for job in jobs),
            replicas=have,
            wanted=wanted,
        )


def _count(jobs: Sequence[Job]) -> str:
    return f"job {jobs[0].id} is" if len(jobs) == 1 else f"{len(jobs)} jobs are"
