"""Listen For Due Jobs: subscribes to the channels on which a scheduled job that is due early is announced.

Floor: bootsteps. Reads: the queues' wake channels. Writes: nothing.
"""

from typing import Protocol

import trio

from celery5.services.mover import Mover


class Subscribes(Protocol):
    """A connection that listens."""

    async def subscribe(self, *channels: str | bytes) -> None: ...


class ListenForDueJobs:
    """Subscribes once; the connection renews its subscriptions by itself."""

    def __init__(self, *, push: Subscribes, mover: Mover) -> None:
        self._push = push
        self._mover = mover

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Subscribe, and be done."""
        await self._push.subscribe(*self._mover.channels)
        task_status.started()
