"""Handle the commands that every process has: `ping`, `stats` and `shutdown`."""

import os
import socket
import sys
import time
from collections.abc import Mapping
from typing import Any

import trio

import celery5
from celery5.health.event_loop import measure_lateness
from celery5.health.machine import used_memory
from celery5.logs.log import Log
from celery5.protocol.commands.definitions import PING, SHUTDOWN, STATS, NoParameters, ShutdownParameters
from celery5.services.commands.dispatcher import CommandHandler, handle
from celery5.services.process.step_status import StepStatus

LAG_PERIOD = 0.02
"""Seconds over which the lag of the event loop is measured."""


class ProcessCommands:
    """The commands that every process has."""

    def __init__(
        self,
        *,
        kind: str,
        worker: str,
        stop_requested: trio.Event,
        command_counts: Mapping[str, int],
        step_status: StepStatus,
        log: Log,
    ) -> None:
        self._kind = kind
        self._worker = worker
        self._stop_requested = stop_requested
        self._counts = command_counts
        self._step_status = step_status
        self._log = log
        self._started_at = time.monotonic()

    @property
    def handlers(self) -> dict[str, CommandHandler]:
        """Return the handlers of the commands, by name."""
        return {**handle(PING, self.ping), **handle(STATS, self._stats), **handle(SHUTDOWN, self._shutdown)}

    async def ping(self, _parameters: NoParameters) -> object:
        """Run the command `ping`: return the name, the kind and the uptime in seconds."""
        return {"pong": self._worker, "kind": self._kind, "uptime": self._uptime()}

    async def get_stats(self) -> dict[str, Any]:
        """Return the numbers of the process. Measuring the lag of the event loop takes a moment."""
        return {
            "kind": self._kind,
            "process": {
                "pid": os.getpid(),
                "host": socket.gethostname(),
                "python": ".".join(map(str, sys.version_info[:3])),
                "celery5": celery5.__version__,
            },
            "uptime": self._uptime(),
            "steps": self._step_status.to_json(),
            "commands": dict(self._counts),
            "log": None if self._log.writer is None else self._log.writer.counts,
            "memory": used_memory(),
            "loop_lag": round(await measure_lateness(LAG_PERIOD), 6),
        }

    async def _stats(self, _parameters: NoParameters) -> object:
        return await self.get_stats()

    async def _shutdown(self, _parameters: ShutdownParameters) -> object:
        self._stop_requested.set()
        return {"how": "warm"}  # it has no jobs to return; a Controller stops its members warm, too

    def _uptime(self) -> float:
        return round(time.monotonic() - self._started_at, 3)
