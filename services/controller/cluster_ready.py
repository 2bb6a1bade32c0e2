"""All Up: is up when the whole cluster is, for what must wait for that: systemd is told READY no earlier (C91)."""

from typing import Protocol

import trio


class ReadinessSource(Protocol):
    """Knows when all members have been up."""

    @property
    def all_ready(self) -> trio.Event: ...


class ClusterReady:
    """A gate: `started()` when all members of the cluster have been up once."""

    def __init__(self, *, foreman: ReadinessSource) -> None:
        self._foreman = foreman

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Wait for them, then until cancelled."""
        await self._foreman.all_ready.wait()
        task_status.started()
        await trio.sleep_forever()
