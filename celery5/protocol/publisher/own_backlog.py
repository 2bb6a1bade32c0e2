"""A backlog of your own: where a process keeps jobs that it could not publish, in place of its memory.

`App(backlog=...)` takes an object with the methods of `OwnBacklog`.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import msgspec

from celery5.errors import Misconfigured
from celery5.protocol.job.job import Job


class UnsentJob(msgspec.Struct, frozen=True):
    """A job that waits until it can be published."""

    queue: str
    # Unique in its queue.
    id: str
    # All that there is to publish, as bytes: `Job.from_bytes` reads it.
    job: bytes
    # When it falls due, in seconds since 1970, if it was sent with a countdown: that runs on while it waits.
    due: float | None = None

    def to_job(self, now: float) -> Job:
        """Return the job for publishing at `now`, in seconds since 1970, with what is left of its countdown."""
        job = Job.from_bytes(self.job)
        if self.due is None:
            return job
        return msgspec.structs.replace(job, at=f"+{max(0, int((self.due - now) * 1000))}")


@runtime_checkable
class OwnBacklog(Protocol):
    """The jobs that wait, those of each queue in the order in which they were put.

    Its methods may block: in a program with an event loop they are called in a thread. Never two at a time, but by
    changing threads. What they raise is not lost: a job that cannot be stored is not sent, and its caller learns it.
    """

    def open(self) -> Collection[str]:
        """Open it, and return the queues that jobs wait for, which an earlier process may have left.

        Called before all others: by the first sending of each process, and again when it has failed.
        """
        ...

    def count(self) -> int:
        """Return how many jobs wait."""
        ...

    def put(self, jobs: Sequence[UnsentJob]) -> None:
        """Store all of these jobs or none, behind those that wait. A job whose id waits already is left alone.

        Raises:
            BacklogFull: There is no space for them.
        """
        ...

    def first(self, queue: str, limit: int) -> Sequence[UnsentJob]:
        """Return the first jobs of a queue, `limit` at most, in order."""
        ...

    def remove(self, queue: str, ids: Sequence[str]) -> None:
        """Remove jobs, which are published. Those that are not there are passed over."""
        ...


def split_own_backlog(settings: Mapping[str, Any]) -> tuple[OwnBacklog | None, Mapping[str, Any]]:
    """Return the backlog of the user's own among settings, if `backlog` is one, and the other settings.

    Raises:
        Misconfigured: It is neither that nor a number.
    """
    backlog = settings.get("backlog")
    if backlog is None or isinstance(backlog, int | float | str):
        return None, settings
    if isinstance(backlog, type) or not isinstance(backlog, OwnBacklog):
        raise Misconfigured(
            f"backlog is {backlog!r}: give how many jobs to keep, or an object with the methods open, count, put, "
            "first and remove"
        )
    return backlog, {name: value for name, value in settings.items() if name != "backlog"}
