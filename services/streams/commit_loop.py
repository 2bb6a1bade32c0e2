"""Gather what partitions have done, and commit it: soon, or at once when a processor waits for it."""

from collections.abc import Awaitable, Callable, Sequence

import trio

from celery5.protocol.streams.groups import Commit
from celery5.services.streams.owned_partition import OwnedPartition

MAX_COMMITS = 64
"""Partitions in one commit: Redis does nothing else in that time."""

CommitPartitions = Callable[[Sequence[OwnedPartition], Sequence[Commit]], Awaitable[None]]
"""Commits partitions, and tells each how that has ended."""


class CommitLoop:
    """Commits the partitions of one processor.

    Args:
        commit: Commits at most `MAX_COMMITS` partitions.
        within: The most seconds until what is done is committed.
    """

    def __init__(self, *, commit: CommitPartitions, within: float) -> None:
        self._commit_partitions = commit
        self._within = within
        self._dirty: list[OwnedPartition] = []
        self._noted = trio.Event()
        self._requested = trio.Event()
        self._turn = trio.Lock()

    def note_done(self, partition: OwnedPartition) -> None:
        """Commit this partition soon."""
        self._dirty.append(partition)
        self._noted.set()

    def commit_now(self) -> None:
        """Commit now what was noted."""
        self._requested.set()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Commit until cancelled."""
        task_status.started()
        while True:
            await self._noted.wait()
            with trio.move_on_after(self._within):
                await self._requested.wait()
            await self.commit()

    async def commit(self) -> None:
        """Commit all that is done by now."""
        async with self._turn:
            # `run` may wait for one of them: an event that is replaced before it is set would never wake it.
            if self._noted.is_set():
                self._noted = trio.Event()
            if self._requested.is_set():
                self._requested = trio.Event()
            dirty, self._dirty = [one for one in self._dirty if not one.is_lost], []
            for first in range(0, len(dirty), MAX_COMMITS):
                portion = dirty[first : first + MAX_COMMITS]
                await self._commit_partitions(portion, [partition.begin_commit() for partition in portion])
