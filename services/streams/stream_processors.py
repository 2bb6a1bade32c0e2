"""The processors of a worker: what it has also without any, while the code that runs one is not loaded."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from celery5.services.streams.processor_group import ProcessorGroup


class StreamProcessors:
    """All processors of this worker. A worker without processors does nothing here."""

    def __init__(self, *, groups: Sequence["ProcessorGroup"]) -> None:
        self._groups: Mapping[str, ProcessorGroup] = {group.channel: group for group in groups}
        self._scope = trio.CancelScope()

    @property
    def channels(self) -> list[str]:
        """The channels on which groups hear of changes."""
        return list(self._groups)

    def on_message(self, channel: bytes, _payload: bytes) -> None:
        """Hear of a change in a group."""
        self._groups[channel.decode()].renew_now()

    def recheck(self) -> None:
        """Renew the membership in all groups: the connection was down, and messages may have been missed."""
        for group in self._groups.values():
            group.renew_now()

    def stop(self) -> None:
        """Begin to stop all processors. Repeated calls do nothing."""
        self._scope.cancel()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run all processors until cancelled. What is in hand then, or since `stop`, has its grace period."""
        with trio.CancelScope() as self._scope:
            async with trio.open_nursery() as nursery:
                for group in self._groups.values():
                    await nursery.start(group.run)
                task_status.started()
                await trio.sleep_forever()
        await trio.sleep_forever()


class ProcessorsStop:
    """Has the processors begin to stop as soon as the worker does.

    What they have in hand has its grace period while the jobs have theirs, so that the two do not add up.
    """

    def __init__(self, *, stream_processors: StreamProcessors) -> None:
        self._processors = stream_processors

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Wait until cancelled, and stop them."""
        task_status.started()
        try:
            await trio.sleep_forever()
        finally:
            self._processors.stop()
