"""One box: a process of its own that is sent one job after another, and ended when it must be."""

import os
import re
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, cast

import trio

from celery5.errors import BoxCrashed, SoftTimeLimitExceeded
from celery5.protocol.boxes.box import Box
from celery5.protocol.boxes.frames import (
    FRAME_OVERHEAD,
    VERSION,
    BoxEliotMessage,
    BoxHello,
    BoxLogLine,
    BoxProgress,
    BoxReady,
    CancelJob,
    LineSplitter,
    MalformedFrame,
    RunJob,
    SoftLimitReached,
    decode_from_box,
    encode_frame,
    make_too_long,
    to_outcome,
)
from celery5.protocol.job.messages import Failure
from celery5.protocol.job.progress import make_progress_report
from celery5.protocol.job.verdict import Outcome, PermanentFailure, Raised, Reason
from celery5.runners.context import CURRENT_JOB, PROGRESS_RECEIVER, CurrentJob, LogEvent, ProgressReceiver
from celery5.runners.outcome import get_error_outcome
from celery5.runners.process_group import KILL_TIMEOUT, ProcessGroup
from celery5.runners.running_job import RunningJob

STDERR_TAIL_BYTES = 4_000
"""Bytes of a box's stderr that are kept with its failure: the last ones."""
MAX_OUTPUT_LINES = 100
"""Lines of printed output that are logged for one job; the others are counted."""
MAX_LOG_LINES = 1_000
"""Lines that a box may send to the log for one job; the others are counted."""
MAX_LEVELS = 100
"""Numbers in the place of a message of eliot."""
MAX_NUMBER = 2**53
"""What such a number is less than."""
MAX_UUID = 64
"""Characters of the id of its tree."""
MAX_LINE_BYTES = 2_000
"""Bytes of one such line that are logged."""


class BoxOutput:
    """The output of one box: writes it to the worker's log, and keeps the end of its stderr."""

    def __init__(
        self, log_event: LogEvent, pid: int, log_message: Callable[[dict[str, Any]], None] | None = None
    ) -> None:
        self._pid = pid
        self._log_message = log_message
        self._is_muted = False
        self._log_event = log_event
        self._job: CurrentJob | None = None
        self._tail = b""
        self._printed_count = self._logged_count = 0

    def start_job(self, job: CurrentJob | None) -> None:
        """Attribute the output from now on to this job."""
        self._job, self._tail = job, b""
        self._printed_count = self._logged_count = 0

    def end_job(self) -> None:
        """Attribute the output to no job, and log how many lines were dropped."""
        dropped = max(0, self._printed_count - MAX_OUTPUT_LINES) + max(0, self._logged_count - MAX_LOG_LINES)
        if dropped:
            self._log_event(
                "box:output-truncated", "warning", **self._job_fields(), pid=self._pid, lines=dropped
            )
        self._job, self._printed_count, self._logged_count = None, 0, 0

    def mute(self) -> None:
        """Log no more output: the box is being ended."""
        self._is_muted = True

    def add_stderr(self, chunk: bytes) -> None:
        """Keep the end of its stderr."""
        self._tail = (self._tail + chunk)[-STDERR_TAIL_BYTES:]

    @property
    def stderr_tail(self) -> str:
        """The end of its stderr."""
        return self._tail.decode("utf-8", "backslashreplace").strip()

    def log_line(self, line: BoxLogLine) -> None:
        """Log a line that the box has sent. There is a limit for each job, so that one does not fill the log of all."""
        self._logged_count += 1
        if self._logged_count > MAX_LOG_LINES:
            return
        fields = {
            name: value for name, value in line.fields.items() if _normalize(name) not in _RESERVED_FIELDS
        }
        if line.event in _BOX_EVENTS:
            self._log_event(line.event, line.level, **{**fields, **self._job_fields()})
        else:
            fields = {**fields, "logger": line.logger, "message": line.message, **self._job_fields()}
            self._log_event("log", line.level, **fields)

    def log_eliot_message(self, message: dict[str, Any]) -> None:
        """Log a message of eliot that the box has sent; what it says of the job and the worker does not count."""
        self._logged_count += 1
        if self._logged_count > MAX_LOG_LINES or self._log_message is None or not is_eliot_message(message):
            return
        fields = {name: value for name, value in message.items() if _normalize(name) not in _FIELDS_OF_JOB}
        job = self._job
        self._log_message({**fields, **self._job_fields(), **({} if job is None else {"worker": job.worker})})

    def log_output(self, line: bytes, stream: str) -> None:
        """Log a printed line, or a frame that was not expected."""
        if self._is_muted or not line.strip():
            return
        self._printed_count += 1
        if self._printed_count <= MAX_OUTPUT_LINES:
            text = line[:MAX_LINE_BYTES].decode("utf-8", "backslashreplace").rstrip()
            self._log_event(
                "box:printed", "info", **self._job_fields(), pid=self._pid, stream=stream, line=text
            )

    def _job_fields(self) -> dict[str, Any]:
        job = self._job
        return {} if job is None else {"job": job.id, "task": job.task}


def _normalize(name: str) -> str:
    """Return a field name as the journal compares names: JOB and job are one field there."""
    return _NOT_IN_NAMES.sub("_", name.upper()).lower()


_NOT_IN_NAMES = re.compile(r"[^A-Z0-9_]")
_FIELDS_OF_JOB = {"worker", "job", "task", "name"}
"""Fields of a message of eliot that the worker sets."""


def is_eliot_message(message: dict[str, Any]) -> bool:
    """Return whether a message has the fields of each message of eliot."""
    level, uuid = message.get("task_level"), message.get("task_uuid")
    return (
        isinstance(level, list)
        and 0 < len(cast("list[object]", level)) <= MAX_LEVELS
        and all(isinstance(number, int) and 0 < number < MAX_NUMBER for number in cast("list[object]", level))
        and isinstance(uuid, str)
        and len(uuid) <= MAX_UUID
        and isinstance(message.get("timestamp"), int | float)
        and message.get("level", "info") in ("debug", "info", "warning", "error")
    )


_BOX_EVENTS = ("section:retried", "section:ignored")
"""Events that celery5 itself logs in a box."""
_RESERVED_FIELDS = {
    "worker", "job", "task", "level", "message_type", "timestamp", "task_uuid", "task_level", "name"
}  # fmt: skip
"""Fields of a log message that the box cannot set."""


START_TIMEOUT = 30.0
"""Seconds from the start of a box to its `ready` frame."""
CANCEL_TIMEOUT = 1.5
"""Seconds that a box which accepts `cancel` has to end its job."""
TERM_TIMEOUT = 1.0
"""Seconds between the end of stdin and SIGTERM, and between that and SIGKILL."""


class BoxEnded(Exception):
    """The box had ended before it could be sent a job."""


class BoxProcess:
    """One box, which is started by the constructor. Raises BoxCrashed.

    Keep `run` running and await `wait_ready`; then call `run_job` any number of times, and `stop`.
    """

    def __init__(
        self,
        box: Box,
        command: Sequence[str],
        *,
        result_limit: int,
        log_event: LogEvent,
        log_message: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        self.box = box
        self.job_count = 0
        self.idle_since = 0.0
        self._limit = result_limit + FRAME_OVERHEAD
        self._log_event = log_event
        self._ended = trio.Event()
        self._changed = trio.Event()
        self._send_lock = trio.Lock()
        self._ready: BoxReady | None = None
        self._job = ""
        self._outcome: Outcome | None = None
        self._reporting: tuple[CurrentJob, ProgressReceiver] | None = None
        self._nursery: trio.Nursery | None = None
        self._is_ending = self._is_broken = False
        self._group = ProcessGroup(command, box.get_variables(os.environ))
        self._output = BoxOutput(log_event, self.pid, log_message)
        log_event("box:started", "debug", pid=self.pid, command=list(command)[:8])

    @property
    def pid(self) -> int:
        """Its process id, and that of its group."""
        return self._group.pid

    @property
    def start_ticks(self) -> int:
        """Its start time in the kernel's ticks; 0 if the system has none."""
        return self._group.start_ticks

    @property
    def is_usable(self) -> bool:
        """Whether it may be given a job."""
        return not (self._is_ending or self._is_broken or self._ended.is_set())

    async def run(self) -> None:
        """Read its output until it has ended, and its whole process group with it."""
        try:
            async with trio.open_nursery() as self._nursery:
                async with trio.open_nursery() as readers:
                    readers.start_soon(self._read_stdout)
                    readers.start_soon(self._read_stderr)
                    await self._group.wait_ended()
                    self._group.signal(signal.SIGKILL)  # for the rest of the group: then the pipes end
                    # A process that has left the group may keep them open: it is not waited for.
                    readers.cancel_scope.deadline = trio.current_time() + KILL_TIMEOUT
                self._nursery.cancel_scope.cancel()
        finally:
            with trio.CancelScope(shield=True):
                await self._group.reap()
                self._ended.set()
                self._changed.set()
                level = "debug" if self._is_ending else "warning"
                self._log_event(
                    "box:ended", level, pid=self.pid, code=self._group.exit_code, jobs=self.job_count
                )

    async def wait_ready(self, hello: BoxHello) -> None:
        """Wait until it is ready for its first job. Raises BoxCrashed."""
        if self.box.memory is not None:
            self._group.limit_memory(self.box.memory)
        try:
            await self._send(encode_frame(hello))
        except BoxEnded:
            await self._ended.wait()
        with trio.move_on_after(START_TIMEOUT):
            while self._ready is None and not self._ended.is_set():
                await self._wait_for_change()
        ready = self._ready
        if self._ended.is_set():
            raise self._crash(f"{self._group.describe_exit()} before it was ready")
        if ready is None:
            raise self._crash(f"did not send `ready` within {START_TIMEOUT:g} s")
        if ready.version != VERSION:
            raise BoxCrashed(f"the box speaks version {ready.version} of the protocol, this worker {VERSION}")

    async def run_job(
        self, run: RunJob, running_job: RunningJob, early: Sequence[SoftTimeLimitExceeded]
    ) -> Outcome:
        """Run one job and return its outcome.

        When cancelled, it requests the box to stop the job, and kills the box if that does not. Cancelled is raised
        unless the job has ended with an outcome.

        Args:
            run: The frame that starts the job.
            running_job: The job, with its limits.
            early: Soft time limits that were reached before the box was sent the job.

        Raises:
            BoxCrashed: The box ended while it ran the job.
            BoxEnded: The box was not sent the job.
        """
        self._job, self._outcome = run.id, None
        job, receive = CURRENT_JOB.get(), PROGRESS_RECEIVER.get()
        self._reporting = None if job is None or receive is None else (job, receive)
        self._output.start_job(job)
        self.job_count += 1
        was_sent = False
        raise_soft_limit = self._make_soft_limit_sender(run.id)
        running_job.allow_interrupts(raise_soft_limit)
        try:
            if self.box.cpu is not None:
                self._group.limit_cpu_time(self.box.cpu)
            await self._send(encode_frame(run))
            was_sent = True
            for error in early:
                raise_soft_limit(error)
            await self._wait_job_end()
        except trio.Cancelled:
            with trio.CancelScope(shield=True):
                await self._stop_job(running_job, was_sent=was_sent)
            if self._outcome is None:
                raise
        finally:
            running_job.forbid_interrupts()
            self._output.end_job()
            self._job = ""
        if self._outcome is None:
            raise self._crash(f"{self._describe_end()} while it ran the job")
        return self._outcome

    def mark_idle(self) -> None:
        """Note the time: the box has no job from now on."""
        self.idle_since = trio.current_time()

    async def stop(self, first: signal.Signals | None = None) -> None:
        """Close its stdin, or send it the signal `first`; then send stronger signals. Takes some seconds at most."""
        self._is_ending = True
        self._output.mute()
        await self._group.stdin.aclose()
        steps = ((None, TERM_TIMEOUT), (signal.SIGTERM, TERM_TIMEOUT), (signal.SIGKILL, KILL_TIMEOUT))
        for number, limit in steps[first is not None :]:
            if number is not None:
                self._group.signal(number)
            with trio.move_on_after(limit):
                await self._ended.wait()
                return

    # ---- what it sends

    async def _read_stdout(self) -> None:
        lines = LineSplitter(self._limit)
        async for chunk in self._group.stdout:
            for line, is_complete in lines.feed(bytes(chunk)):
                self._on_line(line, is_complete)
        for line, is_complete in lines.end():
            self._on_line(line, is_complete)
        self._retire()

    def _retire(self) -> None:
        """Give it no further job: its output has ended, mostly because it has, or cannot be trusted."""
        if self._nursery is not None and not self._is_broken:
            self._nursery.start_soon(self._stop_soon)
        self._is_broken = True

    async def _stop_soon(self) -> None:
        """Stop it after a moment: mostly it ends by itself."""
        await trio.sleep(TERM_TIMEOUT)
        await self.stop()

    async def _read_stderr(self) -> None:
        lines = LineSplitter(MAX_LINE_BYTES)
        async for chunk in self._group.stderr:
            self._output.add_stderr(bytes(chunk))
            for line, _ in lines.feed(bytes(chunk)):
                self._output.log_output(line, "stderr")
        for line, _ in lines.end():
            self._output.log_output(line, "stderr")

    def _on_line(self, line: bytes, is_complete: bool) -> None:
        frame = decode_from_box(line) if is_complete else make_too_long(line, self._limit)
        match frame:
            case None:
                self._output.log_output(line, "stdout")
            case BoxReady():
                self._ready = self._ready or frame
            case BoxLogLine():
                self._output.log_line(frame)
            case BoxEliotMessage():
                self._output.log_eliot_message(frame.message)
            case BoxProgress():
                self._receive_progress(frame, line)
            case MalformedFrame():
                self._set_outcome(_make_unreadable_outcome(frame), "", line)
                if frame.is_doubtful:
                    self._retire()  # a reply that comes yet would be taken for one to the next job
            case _:
                self._set_outcome(to_outcome(frame), frame.id, line)
        self._changed.set()

    def _receive_progress(self, frame: BoxProgress, line: bytes) -> None:
        """Pass on a report of the running job; log one that is of no such job, or makes no sense."""
        try:
            report = make_progress_report(frame.done, frame.total, frame.note)
        except (TypeError, ValueError):
            report = None
        if report is None or not self._job or frame.id not in ("", self._job):
            self._output.log_output(line, "stdout")
        elif self._reporting is not None:
            job, receive = self._reporting
            receive(job, report)

    def _set_outcome(self, outcome: Outcome, job: str, line: bytes) -> None:
        if not self._job or self._outcome is not None or job not in ("", self._job):
            self._output.log_output(line, "stdout")  # a reply to no job
            if not (job or self._job):
                self._retire()  # out of step: the next such reply may come while another job runs
            return
        self._outcome = outcome
        if isinstance(outcome, Raised) and outcome.failure.type == "MemoryError":
            self._is_broken = True  # it may still hold the memory

    # ---- what it is sent

    async def _send(self, frame: bytes) -> None:
        try:
            async with self._send_lock:
                await self._group.stdin.send_all(frame)
        except (trio.BrokenResourceError, trio.ClosedResourceError, OSError):
            self._is_broken = True
            raise BoxEnded from None

    async def _send_if_running(self, frame: bytes) -> None:
        with suppress(BoxEnded):
            await self._send(frame)

    def _make_soft_limit_sender(self, job: str) -> Callable[[SoftTimeLimitExceeded], None]:
        def send_soft_limit(error: SoftTimeLimitExceeded) -> None:
            if self._accepts("soft-limit") and self._nursery is not None:
                self._nursery.start_soon(
                    self._send_if_running, encode_frame(SoftLimitReached(job, str(error)))
                )

        return send_soft_limit

    def _accepts(self, frame_type: str) -> bool:
        return self._ready is not None and frame_type in self._ready.hears

    async def _stop_job(self, running_job: RunningJob, *, was_sent: bool) -> None:
        """Request the box to end the job, else kill the box."""
        outcome = running_job.cancel_outcome
        limit = outcome.failure.message if isinstance(outcome, Raised) else ""
        if was_sent and self._accepts("cancel"):
            with trio.move_on_after(CANCEL_TIMEOUT):
                await self._send_if_running(encode_frame(CancelJob(self._job, limit)))
                await self._wait_job_end()
        if self._outcome is None:
            await self.stop(signal.SIGTERM)
            running_job.record_traceback_text(self._output.stderr_tail)

    async def _wait_job_end(self) -> None:
        """Wait for the end of the job or of the box."""
        while self._outcome is None and not self._ended.is_set():
            await self._wait_for_change()

    async def _wait_for_change(self) -> None:
        await self._changed.wait()
        self._changed = trio.Event()

    # ---- how it ended

    def _describe_end(self) -> str:
        text = self._group.describe_exit()
        if self.box.cpu is not None and text.endswith("SIGXCPU"):
            return f"{text}, over its limit of {self.box.cpu:g} s of processor time,"
        return text

    def _crash(self, how: str) -> BoxCrashed:
        stderr = self._output.stderr_tail
        last = f": {stderr.splitlines()[-1][:MAX_LINE_BYTES]}" if stderr else ""
        return BoxCrashed(f"the box {how}{last}", stderr=stderr)


def _make_unreadable_outcome(frame: MalformedFrame) -> Outcome:
    """Return the outcome of a job whose reply cannot be read."""
    if frame.too_large:
        text = f"{frame.why}: return a reference, or raise message_limit"
        return PermanentFailure(Reason.RESULT_TOO_LARGE, Failure(type="MessageTooLarge", message=text))
    return get_error_outcome(BoxCrashed(f"the box wrote a frame that cannot be read: {frame.why}"))
