"""Process Commands: what every process tells of itself and does when it is told to: `ping`, `stats`, `shutdown`.

Floor: services. Reads: what the process knows of itself. Writes: nothing.
"""

import os
import socket
import sys
import time
from collections.abc import Mapping
from typing import Any

import trio

import celery5
from celery5.errors import CommandRefused
from celery5.log import Log
from celery5.loop import lateness
from celery5.machine import used_memory
from celery5.services.board import Board
from celery5.services.commands import Handler

LAG = 0.02
"""Seconds over which the loop's lag is measured."""


class ProcessCommands:
    """The commands that every process knows."""

    def __init__(
        self,
        *,
        kind: str,
        worker: str,
        done: trio.Event,
        inbox_counts: Mapping[str, int],
        board: Board,
        log: Log,
    ) -> None:
        self._kind = kind
        self._worker = worker
        self._done = done
        self._counts = inbox_counts
        self._board = board
        self._log = log
        self._began = time.monotonic()

    @property
    def handlers(self) -> dict[str, Handler]:
        """Each command by its name."""
        return {"ping": self.ping, "stats": self._stats, "shutdown": self._shutdown}

    async def ping(self, parameters: Mapping[str, Any]) -> object:
        """The command `ping`: who it is, and for how long, in seconds. Raises CommandRefused."""
        takes_only(parameters)
        return {"pong": self._worker, "kind": self._kind, "uptime": self._uptime()}

    async def stats(self) -> dict[str, Any]:
        """How the process does, in numbers. It measures for a moment how late the loop comes round."""
        return {
            "kind": self._kind,
            "process": {
                "pid": os.getpid(),
                "host": socket.gethostname(),
                "python": ".".join(map(str, sys.version_info[:3])),
                "celery5": celery5.__version__,
            },
            "uptime": self._uptime(),
            "steps": self._board.shown(),
            "commands": dict(self._counts),
            "log": None if self._log.journal is None else self._log.journal.counts,
            "memory": used_memory(),
            "loop_lag": round(await lateness(LAG), 6),
        }

    async def _stats(self, parameters: Mapping[str, Any]) -> object:
        takes_only(parameters)
        return await self.stats()

    async def _shutdown(self, parameters: Mapping[str, Any]) -> object:
        takes_only(parameters, "how")
        self._done.set()
        return {"how": parameters.get("how", "warm")}

    def _uptime(self) -> float:
        return round(time.monotonic() - self._began, 3)


def takes_only(parameters: Mapping[str, Any], *names: str) -> None:
    """Raises CommandRefused for a parameter of another name."""
    strange = [each for each in parameters if each not in names]
    if strange:
        takes = f"it takes {', '.join(names)}" if names else "it takes none"
        raise CommandRefused(f"parameter {strange[0]!r} is not known; {takes}")
