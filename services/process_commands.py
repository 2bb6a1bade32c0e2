"""Process Commands: what a process that runs no jobs tells of itself and does when it is told to: `ping`, `stats`,
`shutdown`.

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
from celery5.services.board import Board
from celery5.services.commands import Handler


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
        return {"ping": self._ping, "stats": self._stats, "shutdown": self._shutdown}

    async def _ping(self, parameters: Mapping[str, Any]) -> object:
        _none(parameters)
        return {"pong": self._worker, "kind": self._kind, "uptime": round(time.monotonic() - self._began, 3)}

    async def _stats(self, parameters: Mapping[str, Any]) -> object:
        _none(parameters)
        return {
            "kind": self._kind,
            "process": {
                "pid": os.getpid(),
                "host": socket.gethostname(),
                "python": ".".join(map(str, sys.version_info[:3])),
                "celery5": celery5.__version__,
            },
            "uptime": round(time.monotonic() - self._began, 3),
            "steps": self._board.shown(),
            "commands": dict(self._counts),
            "log": None if self._log.journal is None else self._log.journal.counts,
        }

    async def _shutdown(self, parameters: Mapping[str, Any]) -> object:
        _none({name: value for name, value in parameters.items() if name != "how"})
        self._done.set()
        return {"how": parameters.get("how", "warm")}


def _none(parameters: Mapping[str, Any]) -> None:
    if parameters:
        raise CommandRefused(f"parameter {next(iter(parameters))!r} is not known here")
