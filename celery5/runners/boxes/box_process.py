"""One box: a process of its own that is sent one job after another, and ended when it must be."""

import os
import re
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, TypeAlias, cast

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
READ_SIZE = 64 * 1024
"""Bytes that are read at once: what a pipe holds."""


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


_BOX_EVENTS = ("section:retried", "section:ignored", "resource:failed", "resource:close-failed")
"""Events that celery5 itself logs in a box."""
_RESERVED_FIELDS = {
    "worker", "job", "task", "level", "message_type", "timestamp", "task_uuid", "task_level", "name"
}  # fmt: skip
"""Fields of a log message that the box cannot set."""


class BoxInput:
    """Frames on their way to a box, in their order. What its pipe cannot take at once is written by `flush`."""

    def __init__(self, stdin: trio.lowlevel.FdStream) -> None:
        self._stdin = stdin
        self._unsent = bytearray()
        self._unsent_of_job = 0
        self._has_unsent = trio.Event()
        self.is_closed = False
        """Whether the box takes no more frames."""

    @property
    def is_job_sent(self) -> bool:
        """Whether the box was sent the whole frame of its job."""
        return not self._unsent_of_job

    @property
    def has_lost_job(self) -> bool:
        """Whether it never will be."""
        return self.is_closed and not self.is_job_sent

    def send_job(self, frame: bytes) -> None:
        """Send the frame that starts a job: nothing else is on its way."""
        self.send(frame)
        self._unsent_of_job = len(self._unsent)

    def send(self, frame: bytes) -> None:
        """Send a frame."""
        sent = 0 if self._unsent else self._write(frame)
        if sent < len(frame):
            self._unsent += memoryview(frame)[sent:]
            self._has_unsent.set()

    async def flush(self) -> None:
        """Write what is left, until the box takes no more."""
        while not self.is_closed:
            await self._has_unsent.wait()
            self._has_unsent = trio.Event()
            while self._unsent and not self.is_closed:
                try:
                    await trio.lowlevel.wait_writable(self._stdin)
                except (trio.ClosedResourceError, OSError, ValueError):  # of a descriptor that is closed
                    self.is_closed = True
                sent = self._write(self._unsent)
                del self._unsent[:sent]
                self._unsent_of_job = max(self._unsent_of_job - sent, 0)

    def _write(self, frame: bytes | bytearray) -> int:
        """Write as much as the pipe takes, and return how many bytes that is."""
        try:
            return 0 if self.is_closed else os.write(self._stdin.fileno(), frame)
        except BlockingIOError:
            return 0
        except OSError:  # the box has ended, or has closed its stdin
            self.is_closed = True
            return 0


async def _read_chunks(pipe: trio.lowlevel.FdStream) -> AsyncIterator[bytes]:
    """Yield what is read from a pipe. `receive_some` of the stream lets the whole loop turn before each read."""
    while True:
        await trio.lowlevel.wait_readable(pipe)
        try:
            chunk = os.read(pipe.fileno(), READ_SIZE)
        except BlockingIOError:
            continue
        if not chunk:
            return
        yield chunk


START_TIMEOUT = 30.0
"""Seconds from the start of a box to its `ready` frame."""
CANCEL_TIMEOUT = 1.5
"""Seconds that a box which accepts `cancel` has to end its job."""
TERM_TIMEOUT = 1.0
"""Seconds between the end of stdin and SIGTERM, and between that and SIGKILL."""


class BoxEnded(Exception):
    """The box had ended before it could be sent a job."""


ChooseNext: TypeAlias = "Callable[[BoxProcess, Outcome], RunJob | Outcome]"
"""Takes the outcome of a job, and returns what the box runs next, or the outcome to be returned."""


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
        devices: tuple[str, ...] = (),
    ) -> None:
        self.box = box
        self.devices = devices
        self.job_count = 0
        self.idle_since = 0.0
        self._limit = result_limit + FRAME_OVERHEAD
        self._log_event = log_event
        self._ended = trio.Event()
        self._changed = trio.Event()
        self._ready: BoxReady | None = None
        self._job = ""
        self._outcome: Outcome | None = None
        self._choose_next: ChooseNext | None = None
        self._reporting: tuple[CurrentJob, ProgressReceiver] | None = None
        self._nursery: trio.Nursery | None = None
        self._is_ending = self._is_broken = False
        self._group = ProcessGroup(command, box.get_variables(os.environ, devices))
        self._input = BoxInput(self._group.stdin)
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
        return not (self._is_ending or self._is_broken or self._input.is_closed or self._ended.is_set())

    async def run(self) -> None:
        """Read its output until it has ended, and its whole process group with it."""
        try:
            async with trio.open_nursery() as self._nursery:
                self._nursery.start_soon(self._flush_input)
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
        self._input.send(encode_frame(hello))
        if self._input.is_closed:
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
        self,
        run: RunJob,
        running_job: RunningJob,
        early: Sequence[SoftTimeLimitExceeded],
        choose_next: ChooseNext,
    ) -> Outcome:
        """Run one job, and then those that `choose_next` returns, and return the outcome of the last one.

        When cancelled, it requests the box to stop the job, and kills the box if that does not. Cancelled is raised
        unless the job has ended with an outcome.

        Args:
            run: The frame that starts the job.
            running_job: The job, with its limits.
            early: Soft time limits that were reached before the box was sent the job.
            choose_next: Called in the context of this task when a job has ended.

        Raises:
            BoxCrashed: The box ended while it ran the job.
            BoxEnded: The box was not sent the job.
        """
        self._context, self._choose_next = trio.lowlevel.current_task().context, choose_next
        raise_soft_limit = self._make_soft_limit_sender(run.id)
        running_job.allow_interrupts(raise_soft_limit)
        try:
            self._begin(run)
            for error in early:
                raise_soft_limit(error)
            await self._wait_job_end()
        except trio.Cancelled:
            self._choose_next = None
            with trio.CancelScope(shield=True):
                await self._stop_job(running_job)
            if self._outcome is None:
                raise
        finally:
            self._choose_next = None
            running_job.forbid_interrupts()
            self._output.end_job()
            self._job = ""
        if self._outcome is None and not self._input.is_job_sent:
            raise BoxEnded
        if self._outcome is None:
            raise self._crash(f"{self._describe_end()} while it ran the job")
        return self._outcome

    def _begin(self, run: RunJob) -> None:
        """Send a job to the box."""
        self._job, self._outcome = run.id, None
        job, receive = CURRENT_JOB.get(), PROGRESS_RECEIVER.get()
        self._reporting = None if job is None or receive is None else (job, receive)
        self._output.start_job(job)
        self.job_count += 1
        if self.box.cpu is not None:
            self._group.limit_cpu_time(self.box.cpu)
        self._input.send_job(encode_frame(run))

    def _go_on(self, outcome: Outcome, choose_next: ChooseNext) -> None:
        """Send the box the next job in the step in which it has replied: the task that waits is not woken."""
        following = choose_next(self, outcome)
        if isinstance(following, RunJob):
            self._output.end_job()
            self._begin(following)
        else:
            self._outcome = following

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
        async for chunk in _read_chunks(self._group.stdout):
            for line, is_complete in lines.feed(chunk):
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
        if self._choose_next is not None:
            self._context.run(self._go_on, outcome, self._choose_next)

    # ---- what it is sent

    async def _flush_input(self) -> None:
        await self._input.flush()
        self._changed.set()

    def _make_soft_limit_sender(self, job: str) -> Callable[[SoftTimeLimitExceeded], None]:
        def send_soft_limit(error: SoftTimeLimitExceeded) -> None:
            if self._accepts("soft-limit"):
                self._input.send(encode_frame(SoftLimitReached(job, str(error))))

        return send_soft_limit

    def _accepts(self, frame_type: str) -> bool:
        return self._ready is not None and frame_type in self._ready.hears

    async def _stop_job(self, running_job: RunningJob) -> None:
        """Request the box to end the job, else kill the box."""
        outcome = running_job.cancel_outcome
        limit = outcome.failure.message if isinstance(outcome, Raised) else ""
        if self._input.is_job_sent and self._accepts("cancel"):
            self._input.send(encode_frame(CancelJob(self._job, limit)))
            with trio.move_on_after(CANCEL_TIMEOUT):
                await self._wait_job_end()
        if self._outcome is None:
            await self.stop(signal.SIGTERM)
            running_job.record_traceback_text(self._output.stderr_tail)

    async def _wait_job_end(self) -> None:
        """Wait for the end of the job or of the box, or until it is known that the box does not get the job."""
        while self._outcome is None and not self._ended.is_set() and not self._input.has_lost_job:
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
