"""Where a process keeps jobs that it could not publish: in its memory, or in a backlog of your own.

`App(backlog=...)` takes an object with the methods of `OwnBacklog`.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar, cast

from celery5.protocol.masking import MAX_ERROR_LENGTH, describe_error, get_type_name
from celery5.protocol.publisher.own_backlog import OwnBacklog, UnsentJob, split_own_backlog
from celery5.sending.bounded_queue import BacklogCapacity, BoundedQueue

__all__ = ["CheckedBacklog", "JobsInMemory", "OwnBacklog", "UnsentJob", "split_own_backlog"]

T = TypeVar("T")


class BacklogFailed(Exception):
    """A backlog of the user's own has raised what is no Exception, or has returned what makes no sense."""


class CheckedBacklog:
    """A backlog of the user's own: whatever it raises is an Exception, and what it returns is what it should be."""

    def __init__(self, own: OwnBacklog) -> None:
        self._own = own

    def __repr__(self) -> str:
        try:
            return repr(self._own)
        except Exception:
            return f"<{get_type_name(self._own)}>"

    def open(self) -> Collection[str]:
        """Open it, and return its queues."""
        queues = _call(lambda: _to_list(self._own.open()))
        if not _is_list_of(str, queues):
            raise BacklogFailed(
                f"open() gave {get_type_name(queues)}: give the names of the queues that jobs wait for"
            )
        return cast("list[str]", queues)

    def count(self) -> int:
        """Return how many jobs wait."""
        count = _call(self._own.count)
        if type(cast("object", count)) is not int or count < 0:
            raise BacklogFailed(f"count() gave {get_type_name(count)}: give how many jobs wait, 0 or more")
        return count

    def put(self, jobs: Sequence[UnsentJob]) -> None:
        """Store jobs."""
        _call(lambda: self._own.put(jobs))

    def first(self, queue: str, limit: int) -> Sequence[UnsentJob]:
        """Return the first jobs of a queue."""
        jobs = _call(lambda: _to_list(self._own.first(queue, limit)))
        if not _is_list_of(UnsentJob, jobs):
            raise BacklogFailed(f"first() gave {get_type_name(jobs)}: give a list of the jobs that were put")
        return cast("list[UnsentJob]", jobs)[:limit]

    def remove(self, queue: str, ids: Sequence[str]) -> None:
        """Remove jobs."""
        _call(lambda: self._own.remove(queue, ids))


def _call(function: Callable[[], T]) -> T:
    """Call code of the user's own. What it raises that is no Exception would end the thread that publishes."""
    try:
        return function()
    except (Exception, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise BacklogFailed(describe_error(error, MAX_ERROR_LENGTH)) from error


def _to_list(values: object) -> object:
    """Return a list of what a collection has, which may be made as it is read; anything else as it is."""
    if isinstance(values, str | bytes) or not isinstance(values, Collection):
        return values
    return list(cast("Collection[object]", values))


def _is_list_of(kind: type, values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, kind) for value in cast("list[object]", values))


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
