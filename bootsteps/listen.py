"""Listen: subscribes to the channels on which workers are told what cannot wait: a job is due early, a job was revoked.

Floor: bootsteps. Reads: the channels of the worker's queues. Writes: nothing.
"""

from collections.abc import Callable, Mapping
from typing import Protocol

import trio

Hears = Callable[[bytes, bytes], None]
"""Is told the channel and what was said on it. Must be quick and must not block."""


class Subscribes(Protocol):
    """A connection that listens."""

    async def subscribe(self, *channels: str | bytes) -> None: ...


class Listen:
    """Subscribes once to every channel that has a hearer; the connection renews its subscriptions by itself."""

    def __init__(self, *, push: Subscribes, hearers: Mapping[bytes, Hears]) -> None:
        self._push = push
        self._hearers = hearers

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Subscribe, and be done."""
        await self._push.subscribe(*self._hearers)
        task_status.started()
