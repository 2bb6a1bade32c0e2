"""Write the log of a sidecar process: lines of the same form as those of its worker, and to the same place.

A sidecar is forked before its worker opens the log, and must never wait for a reader of it. So it opens the destination
itself, in the log's own thread, which starts with the first line: mostly there is none. Nothing goes through eliot,
whose other destinations belong to the worker.
"""

import os
import sys
import time
from collections.abc import Sequence
from typing import Any, TextIO
from uuid import uuid4

from celery5.app import App
from celery5.errors import Misconfigured
from celery5.logs.destination import RuntimeEnvironment, check_detectors, make_destination
from celery5.logs.lines import Message
from celery5.logs.log import Level, LogDestination, LogWriter
from celery5.logs.lost_connections import LostConnections
from celery5.protocol.masking import mask_fields

FLUSH_LIMIT = 0.3
"""Seconds that a line may take before what it announces is done: its reader may be slow."""
PROCESS = "sidecar"
"""What the field `process` of its lines says."""


class SidecarLog:
    """The log of the sidecar of one worker process.

    Args:
        app: The application, whose settings say the form and the level.
        process: The name in its lines until the worker has one.
    """

    def __init__(self, app: App, process: str = "") -> None:
        self.lost_connections: LostConnections = LostConnections(self._log_outage)
        self.worker: str = process
        """The name of the worker, once it has one."""
        self._writer = LogWriter(_LateDestination(app), level=app.settings.log_level, process=process)
        self._is_open = False
        self._uuid = str(uuid4())
        self._lines = 0

    def event(self, name: str, level: Level = "info", /, **fields: Any) -> None:
        """Log an event, as `celery5:<name>`, without passwords."""
        if not self._is_open:
            self._is_open = True
            self._writer.start()
        self._lines += 1
        message = {
            "worker": self.worker,
            "process": PROCESS,
            **mask_fields(fields),
            "timestamp": time.time(),
            "level": level,
        }
        message |= {"message_type": f"celery5:{name}", "task_uuid": self._uuid, "task_level": [self._lines]}
        self._writer(message)

    def _log_outage(self, name: str, _level: Level = "info", /, **fields: Any) -> None:
        """Log an outage at `debug`: the worker logs the same one, and other lines of the sidecar say what it costs."""
        self.event(name, "debug", **fields)

    def flush(self, limit: float = FLUSH_LIMIT) -> None:
        """Wait until all lines are written, for `limit` seconds at most."""
        end = time.monotonic() + limit
        while self._is_open and time.monotonic() < end:
            counts = self._writer.counts
            if counts.written + counts.lost >= self._lines:
                return
            time.sleep(0.005)

    def close(self) -> None:
        """Write what is left, within two seconds."""
        if self._is_open:
            self._writer.stop()


class _LateDestination:
    """Opens the destination with the first messages: a detector is code of the user's, and may take its time."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._destination: LogDestination | None = None

    def write(self, messages: Sequence[Message], /) -> int:
        """Write messages; return how many were written."""
        if self._destination is None:
            self._destination = self._open()
        return self._destination.write(messages)

    def _open(self) -> LogDestination:
        # Streams of its own: in those of `sys` may be text that the worker writes, too.
        environment = RuntimeEnvironment(os.environ, _open_stream(1), _open_stream(2), process=PROCESS)
        try:
            detectors = check_detectors(self._app.log_detectors)
            return make_destination(self._app.settings.log_format, environment, detectors)
        except Misconfigured:  # the journal has gone
            return environment.make_line_writer()


def _open_stream(descriptor: int) -> TextIO:
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return open(descriptor, "w", encoding=encoding, errors="backslashreplace", closefd=False)
