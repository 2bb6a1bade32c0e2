"""Elsewhere: declares and fires the schedules whose queues are on one further broker, whenever that is there (C108).

A schedule is beside its queue, so that firing it is one atomic step there as it is everywhere. A broker that is away
holds up no schedule of another.
"""

from typing import Protocol

import trio

from celery5.errors import BrokerReplied, BrokerUnavailable
from celery5.logs.log import Log

AGAIN = 1.0
"""Seconds until another attempt, when the broker is away."""


class SchedulingService(Protocol):
    """A service."""

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Live until cancelled."""
        ...


class SchedulerListener(SchedulingService, Protocol):
    """A service that is told which Schedulers live."""

    def set_live_schedulers(self, living: tuple[str, ...], /) -> None:
        """These do."""
        ...


class RemoteBrokerSchedules:
    """The schedules of the `broker` of that name."""

    def __init__(
        self, *, broker: str, declarations: SchedulerListener, timetable: SchedulingService, log: Log
    ) -> None:
        self._broker = broker
        self._declarations = declarations
        self._timetable = timetable
        self._log = log
        self._missed = False

    def set_live_schedulers(self, living: tuple[str, ...]) -> None:
        """These Schedulers live."""
        self._declarations.set_live_schedulers(living)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Declare and fire until cancelled."""
        task_status.started()
        while True:
            try:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._timetable.run)
                    await nursery.start(self._declarations.run)
                    self._missed = False
            except* (BrokerUnavailable, BrokerReplied) as away:
                self._log.event(
                    "schedules:interrupted",
                    "debug" if self._missed else "warning",
                    broker=self._broker,
                    why=str(away.exceptions[0]),
                )
                self._missed = True
            await trio.sleep(AGAIN)
