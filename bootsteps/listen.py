"""Listen: subscribes to the channels on which workers are told what cannot wait: a job is due early, a job was revoked.

Floor: bootsteps. Reads: the channels of the worker's queues. Writes: nothing.
"""

from collections.abc import Callable, Mapping
from typing import Protocol

import trio

ChannelHandler = Callable[[bytes, bytes], None]
"""Is told the channel and what was said on it. Must be quick and must not block."""


class SubscriberConnection(Protocol):
    """A connection that listens."""

    async def subscribe(self, *channels: str | bytes) -> None: ...


class ChannelSubscriptions:
    """Subscribes once to every channel that has a hearer; the connection renews its subscriptions by itself."""

    def __init__(
        self, *, push: SubscriberConnection, channel_handlers: Mapping[bytes, ChannelHandler]
    ) -> None:
        self._push = push
        self._hearers = channel_handlers

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Subscribe, and be done."""
        await self._push.subscribe(*self._hearers)
        task_status.started()
