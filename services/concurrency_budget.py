"""Concurrency Budget: how many jobs of each kind may run at once in this worker (C57, C63).

Floor: services. Reads: nothing. Writes: log messages.
"""

from collections.abc import Mapping

import trio

from celery5.log import Log

CPU_WARNING = 10
"""More slots than this for CPU-bound tasks gets a warning (C64)."""


class ConcurrencyBudget:
    """Fixed limits: `slots` of each kind of task."""

    def __init__(self, *, slots: Mapping[str, int], log: Log) -> None:
        self._slots = dict(slots)
        self._log = log

    def slots(self, kind: str) -> int:
        """How many jobs of this kind may run at once."""
        return self._slots[kind]

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Say what the limits are and stand by them."""
        if self._slots.get("thread", 0) > CPU_WARNING:
            self._log.event(
                "budget:many-cpu-slots", "warning", slots=self._slots["thread"], advised=CPU_WARNING
            )
        task_status.started()
        await trio.sleep_forever()
