"""Where a process keeps jobs that it could not publish: in its memory, or in a backlog of your own.

`App(backlog=...)` takes an object with the methods of `OwnBacklog`.
"""

from collections.abc import Collection, Sequence

from celery5.protocol.publisher.own_backlog import OwnBacklog, UnsentJob, split_own_backlog
from celery5.sending.bounded_queue import BacklogCapacity, BoundedQueue

__all__ = ["JobsInMemory", "OwnBacklog", "UnsentJob", "split_own_backlog"]


class JobsInMemory:
    """The backlog of a process that has none of its own: in memory, and bounded. Its jobs are lost with the process."""

    def __init__(self) -> None:
        self.capacity: BacklogCapacity = BacklogCapacity(0)
        self._waiting = BoundedQueue[UnsentJob](self.capacity)

    def open(self) -> Collection[str]:
        """Return no queue: nothing outlives a process."""
        return ()

    def count(self) -> int:
        """Return how many jobs wait."""
        return len(self._waiting)

    def put(self, jobs: Sequence[UnsentJob]) -> None:
        """Keep jobs. Whether they fit is asked before."""
        for job in jobs:
            self._waiting.add(job.queue, job.id, len(job.job), job)

    def first(self, queue: str, limit: int) -> Sequence[UnsentJob]:
        """Return the first jobs of a queue."""
        return [item.value for item in self._waiting.first(queue, limit=limit)]

    def remove(self, queue: str, ids: Sequence[str]) -> None:
        """Remove jobs."""
        waiting = self._waiting.first(queue, limit=len(ids))
        gone = set(ids)
        self._waiting.remove([item.number for item in waiting if item.id in gone])
