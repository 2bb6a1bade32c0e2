"""Run the processors of an application in this worker."""

from collections.abc import Mapping, Sequence

import trio

from celery5.services.streams.processor_group import ProcessorGroup


class StreamProcessors:
    """All processors of this worker. A worker without processors does nothing here."""

    def __init__(self, *, groups: Sequence[ProcessorGroup]) -> None:
        self._groups: Mapping[str, ProcessorGroup] = {group.channel: group for group in groups}

    @property
    def channels(self) -> list[str]:
        """The channels on which groups hear of changes."""
        return list(self._groups)

    def on_message(self, channel: bytes, _payload: bytes) -> None:
        """Hear of a change in a group."""
        self._groups[channel.decode()].attend_now()

    def recheck(self) -> None:
        """Attend in all groups: the connection was down, and messages may have been missed."""
        for group in self._groups.values():
            group.attend_now()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run all processors until cancelled."""
        async with trio.open_nursery() as nursery:
            for group in self._groups.values():
                await nursery.start(group.run)
            task_status.started()
            await trio.sleep_forever()
