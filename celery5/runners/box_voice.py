"""Box voice: what a box says beside its answers: lines for the log, and noise, of which there may be any amount.

Floor: runners. Reads: nothing. Writes: the log.
"""

import re
from typing import Any

from celery5.protocol.frames import BoxLogLine
from celery5.runners.context import CurrentJob, LogEvent

STDERR_TAIL_BYTES = 4_000
"""Bytes of what a box wrote to stderr that go with its failure: the last ones."""
MAX_OUTPUT_LINES = 100
"""Lines of noise that are logged for one job; of the rest there is a count."""
MAX_LOG_LINES = 1_000
"""Lines for the log that a box may send for one job; of the rest there is a count."""
MAX_LINE_BYTES = 2_000
"""Bytes of one such line."""


class BoxOutput:
    """What one box says. `job` is the one that it runs, if any; `hushed` once nobody wants to hear it any more."""

    def __init__(self, log_event: LogEvent) -> None:
        self.pid = 0
        self.is_muted = False
        self._tell = log_event
        self._job: CurrentJob | None = None
        self._tail = b""
        self._said = self._logged = 0

    def start_job(self, job: CurrentJob | None) -> None:
        """From here on it speaks of this job."""
        self._job, self._tail = job, b""
        self._said = self._logged = 0

    def end_job(self) -> None:
        """The job has ended."""
        more = max(0, self._said - MAX_OUTPUT_LINES) + max(0, self._logged - MAX_LOG_LINES)
        if more:
            self._tell("box:output-truncated", "warning", **self._about(), pid=self.pid, lines=more)
        self._job, self._said, self._logged = None, 0, 0

    def add_stderr(self, chunk: bytes) -> None:
        """Remember the end of its stderr."""
        self._tail = (self._tail + chunk)[-STDERR_TAIL_BYTES:]

    @property
    def stderr_tail(self) -> str:
        """The end of its stderr."""
        return self._tail.decode("utf-8", "backslashreplace").strip()

    def log_line(self, line: BoxLogLine) -> None:
        """It has a line for the log. Some for each job: a job must not fill the log of all others."""
        self._logged += 1
        if self._logged > MAX_LOG_LINES:
            return
        fields = {name: value for name, value in line.fields.items() if _plain(name) not in _OURS}
        if line.event in _EVENTS:
            self._tell(line.event, line.level, **{**fields, **self._about()})
        else:
            said = {**fields, "logger": line.logger, "message": line.message, **self._about()}
            self._tell("log", line.level, **said)

    def log_output(self, line: bytes, stream: str) -> None:
        """Somebody has printed something, or a program has said what is not asked for."""
        if self.is_muted or not line.strip():
            return
        self._said += 1
        if self._said <= MAX_OUTPUT_LINES:
            text = line[:MAX_LINE_BYTES].decode("utf-8", "backslashreplace").rstrip()
            self._tell("box:printed", "info", **self._about(), pid=self.pid, stream=stream, line=text)

    def _about(self) -> dict[str, Any]:
        job = self._job
        return {} if job is None else {"job": job.id, "task": job.task}


def _plain(name: str) -> str:
    """Return a name as the journal compares it: JOB and job are one field there."""
    return _NOT_IN_NAMES.sub("_", name.upper()).lower()


_NOT_IN_NAMES = re.compile(r"[^A-Z0-9_]")
_EVENTS = ("section:retried", "section:ignored")
"""What celery5 itself tells of in a box."""
_OURS = {"worker", "job", "task", "level", "message_type", "timestamp", "task_uuid", "task_level", "name"}
"""Fields of a message that nobody else sets."""
