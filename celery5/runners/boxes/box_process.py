"""Box process: one box: a process of its own that is told of one job after another, and ended when it must be (C62)."""

import os
import re
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import trio
from msgspec.structs import replace

from celery5.errors import BoxCrashed, SoftTimeLimitExceeded
from celery5.protocol.boxes.box import Box
from celery5.protocol.boxes.frames import (
    FRAME_OVERHEAD,
    VERSION,
    BoxHello,
    BoxLogLine,
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
from celery5.protocol.job.envelope import Failure
from celery5.protocol.job.verdict import Outcome, PermanentFailure, Raised, Reason
from celery5.runners.context import CURRENT_JOB, CurrentJob, LogEvent
from celery5.runners.outcome import get_error_outcome
from celery5.runners.process_group import KILL_TIMEOUT, ProcessGroup
from celery5.runners.running_job import RunningJob

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


START_TIMEOUT = 30.0
"""Seconds that a box has from its start until it says that it is ready."""
CANCEL_TIMEOUT = 1.5
"""Seconds that a box which hears `cancel` has to end its job by itself."""
TERM_TIMEOUT = 1.0
"""Seconds between the end of stdin and SIGTERM, and between that and SIGKILL."""


class BoxEnded(Exception):
    """The box had ended before it could be told of a job."""


class BoxProcess:
    """One box, which is started at once; raises BoxCrashed. Keep `live` running, `greet` it; then let it `work` as
    often as you like, and `end` it."""

    def __init__(self, box: Box, command: Sequence[str], *, result_limit: int, log_event: LogEvent) -> None:
        self.box = box
        self.job_count = 0
        self.idle_since = 0.0
        self._limit = result_limit + FRAME_OVERHEAD
        self._tell = log_event
        self._gone = trio.Event()
        self._news = trio.Event()
        self._saying = trio.Lock()
        self._ready: BoxReady | None = None
        self._job = ""
        self._answer: Outcome | None = None
        self._nursery: trio.Nursery | None = None
        self._ending = self._broken = False
        self._voice = BoxOutput(log_event)
        self._group = ProcessGroup(command, box.get_variables(os.environ))
        self._voice.pid = self.pid
        log_event("box:started", "debug", pid=self.pid, command=list(command)[:8])

    @property
    def pid(self) -> int:
        """Its process id, and that of its group."""
        return self._group.pid

    @property
    def start_ticks(self) -> int:
        """When it was started, by the kernel's count; 0 where it does not tell."""
        return self._group.start_ticks

    @property
    def is_usable(self) -> bool:
        """Whether it may be given a job."""
        return not (self._ending or self._broken or self._gone.is_set())

    async def run(self) -> None:
        """Hear it until it has ended, and its whole group with it."""
        try:
            async with trio.open_nursery() as self._nursery:
                async with trio.open_nursery() as ears:
                    ears.start_soon(self._hear)
                    ears.start_soon(self._hear_stderr)
                    await self._group.wait_ended()
                    self._group.signal(signal.SIGKILL)  # for whoever is left: then the pipes end
                    # Unless somebody left the group: nobody waits for that one.
                    ears.cancel_scope.deadline = trio.current_time() + KILL_TIMEOUT
                self._nursery.cancel_scope.cancel()
        finally:
            with trio.CancelScope(shield=True):
                await self._group.reap()
                self._gone.set()
                self._news.set()
                how = "debug" if self._ending else "warning"
                self._tell("box:ended", how, pid=self.pid, code=self._group.exit_code, jobs=self.job_count)

    async def wait_ready(self, hello: BoxHello) -> None:
        """Wait until it is ready for its first job. Raises BoxCrashed."""
        if self.box.memory is not None:
            self._group.limit_memory(self.box.memory)
        try:
            await self._say(encode_frame(hello))
        except BoxEnded:
            await self._gone.wait()
        with trio.move_on_after(START_TIMEOUT):
            while self._ready is None and not self._gone.is_set():
                await self._changed()
        ready = self._ready
        if self._gone.is_set():
            raise self._crash(f"{self._group.describe_exit()} before it was ready")
        if ready is None:
            raise self._crash(f"did not say that it is ready within {START_TIMEOUT:g} s")
        if ready.version != VERSION:
            raise BoxCrashed(f"the box speaks version {ready.version} of the protocol, this worker {VERSION}")

    async def run_job(
        self, run: RunJob, running_job: RunningJob, early: Sequence[SoftTimeLimitExceeded]
    ) -> Outcome:
        """The outcome of one job. Cancelling tells the box to stop, and kills it if it does not; it goes through,
        unless the job ended with an outcome all the same. Raises BoxCrashed; BoxEnded when the box was not told of the
        job."""
        self._job, self._answer = run.id, None
        self._voice.start_job(CURRENT_JOB.get())
        self.job_count += 1
        told = False
        running_job.raise_soft_limit = self._soften(run.id)
        try:
            if self.box.cpu is not None:
                self._group.limit_cpu_time(self.box.cpu)
            await self._say(encode_frame(run))
            told = True
            for each in early:
                running_job.raise_soft_limit(each)
            await self._over()
        except trio.Cancelled:
            with trio.CancelScope(shield=True):
                await self._stop(running_job, told=told)
            if self._answer is None:
                raise
        finally:
            running_job.raise_soft_limit = None
            self._voice.end_job()
            self._job = ""
        if self._answer is None:
            raise self._crash(f"{self._how_it_ended()} while it ran the job")
        return self._answer

    async def stop(self, first: signal.Signals | None = None) -> None:
        """End it: by the end of its stdin, or by the signal `first`; then by stronger words. Takes some seconds at
        most."""
        self._ending = self._voice.is_muted = True
        await self._group.stdin.aclose()
        steps = ((None, TERM_TIMEOUT), (signal.SIGTERM, TERM_TIMEOUT), (signal.SIGKILL, KILL_TIMEOUT))
        for number, limit in steps[first is not None :]:
            if number is not None:
                self._group.signal(number)
            with trio.move_on_after(limit):
                await self._gone.wait()
                return

    # What it says

    async def _hear(self) -> None:
        lines = LineSplitter(self._limit)
        async for chunk in self._group.stdout:
            for line, whole in lines.feed(bytes(chunk)):
                self._take(line, whole)
        for line, whole in lines.end():
            self._take(line, whole)
        self._step_aside()

    def _step_aside(self) -> None:
        """What it says is not heard any more, or not to be believed: it gets no further job. Mostly its end is why."""
        if self._nursery is not None and not self._broken:
            self._nursery.start_soon(self._end_soon)
        self._broken = True

    async def _end_soon(self) -> None:
        """Mostly it ends by itself."""
        await trio.sleep(TERM_TIMEOUT)
        await self.stop()

    async def _hear_stderr(self) -> None:
        lines = LineSplitter(MAX_LINE_BYTES)
        async for chunk in self._group.stderr:
            self._voice.add_stderr(bytes(chunk))
            for line, _ in lines.feed(bytes(chunk)):
                self._voice.log_output(line, "stderr")
        for line, _ in lines.end():
            self._voice.log_output(line, "stderr")

    def _take(self, line: bytes, whole: bool) -> None:
        said = decode_from_box(line) if whole else make_too_long(line, self._limit)
        match said:
            case None:
                self._voice.log_output(line, "stdout")
            case BoxReady():
                self._ready = self._ready or said
            case BoxLogLine():
                self._voice.log_line(said)
            case MalformedFrame():
                self._answered(_unread(said), "", line)
            case _:
                self._answered(to_outcome(said), said.id, line)
        self._news.set()

    def _answered(self, outcome: Outcome, job: str, line: bytes) -> None:
        if not self._job or self._answer is not None or job not in ("", self._job):
            self._voice.log_output(line, "stdout")  # an answer to no job
            if not (job or self._job):
                self._step_aside()  # out of step: the next such answer may come while another job runs
            return
        self._answer = outcome
        if isinstance(outcome, Raised) and outcome.failure.type == "MemoryError":
            self._broken = True  # what it was short of it may still hold

    # What it is told

    async def _say(self, words: bytes) -> None:
        try:
            async with self._saying:
                await self._group.stdin.send_all(words)
        except (trio.BrokenResourceError, trio.ClosedResourceError, OSError):
            self._broken = True
            raise BoxEnded from None

    async def _say_if_heard(self, words: bytes) -> None:
        with suppress(BoxEnded):
            await self._say(words)

    def _soften(self, job: str) -> Callable[[SoftTimeLimitExceeded], None]:
        def soften(error: SoftTimeLimitExceeded) -> None:
            if self._hears("soft-limit") and self._nursery is not None:
                self._nursery.start_soon(self._say_if_heard, encode_frame(SoftLimitReached(job, str(error))))

        return soften

    def _hears(self, what: str) -> bool:
        return self._ready is not None and what in self._ready.hears

    async def _stop(self, hand: RunningJob, *, told: bool) -> None:
        """The job is to end: ask the box, else kill it."""
        why = hand.cancel_outcome
        limit = why.failure.message if isinstance(why, Raised) else ""
        if told and self._hears("cancel"):
            with trio.move_on_after(CANCEL_TIMEOUT):
                await self._say_if_heard(encode_frame(CancelJob(self._job, limit)))
                await self._over()
        if self._answer is None:
            await self.stop(signal.SIGTERM)
            if isinstance(why, Raised):  # where it was, if it has said so
                hand.cancel_outcome = replace(
                    why, failure=replace(why.failure, traceback=self._voice.stderr_tail)
                )

    async def _over(self) -> None:
        """Wait for the end of the job, or of the box."""
        while self._answer is None and not self._gone.is_set():
            await self._changed()

    async def _changed(self) -> None:
        await self._news.wait()
        self._news = trio.Event()

    # How it ended

    def _how_it_ended(self) -> str:
        how = self._group.describe_exit()
        if self.box.cpu is not None and how.endswith("SIGXCPU"):
            return f"{how}, over its limit of {self.box.cpu:g} s of processor time,"
        return how

    def _crash(self, how: str) -> BoxCrashed:
        words = self._voice.stderr_tail
        last = f": {words.splitlines()[-1][:MAX_LINE_BYTES]}" if words else ""
        return BoxCrashed(f"the box {how}{last}", stderr=words)


def _unread(said: MalformedFrame) -> Outcome:
    """The outcome of a job whose answer cannot be read."""
    if said.too_large:
        text = f"{said.why}: return a reference, or raise message_limit"
        return PermanentFailure(Reason.RESULT_TOO_LARGE, Failure(type="MessageTooLarge", message=text))
    return get_error_outcome(BoxCrashed(f"the box wrote a frame that cannot be read: {said.why}"))
