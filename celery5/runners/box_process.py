"""Box process: one box: a process of its own that is told of one job after another, and ended when it must be (C62).

Floor: runners. Reads: what the box says. Writes: what it is told; what else it says, to the log.
"""

import math
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import trio
from msgspec.structs import replace

from celery5.errors import BoxCrashed, SoftTimeLimitExceeded
from celery5.protocol.box import Box
from celery5.protocol.envelope import Failure
from celery5.protocol.frames import (
    MARGIN,
    TEXT,
    VERSION,
    Cancel,
    Hello,
    Line,
    Lines,
    Malformed,
    Ready,
    Run,
    SoftLimit,
    frame,
    outcome_of,
    read_from_box,
    too_long,
)
from celery5.protocol.verdict import Outcome, Raised, Reason, Refused
from celery5.runners.context import CURRENT, CurrentJob, Tell
from celery5.runners.ending import raised
from celery5.runners.hand import Hand

START_LIMIT = 30.0
"""Seconds that a box has from its start until it says that it is ready."""
ANSWER_LIMIT = 1.5
"""Seconds that a box which hears `cancel` has to end its job by itself."""
TERM_LIMIT = 1.0
"""Seconds between SIGTERM and SIGKILL."""
KILL_LIMIT = 2.0
"""Seconds that the kernel has to end what was killed."""
TAIL = 4_000
"""Bytes of what a box wrote to stderr that go with its failure: the last ones."""
SAID_LINES = 100
"""Lines of noise that are logged for one job; of the rest there is a count."""
SAID_LIMIT = 2_000
"""Bytes of one such line."""
POLL = 0.02
"""Seconds between two looks, where the kernel cannot tell of a process's end."""


class BoxGone(Exception):
    """The box had ended before it could be told of a job."""


class BoxProcess:
    """One box. `start` it, keep `live` running, `greet` it; then `work` it as often as you like, and `end` it."""

    def __init__(self, box: Box, command: Sequence[str], *, limit: int, tell: Tell) -> None:
        self.box = box
        self.jobs = 0
        self.idle_since = 0.0
        self._command = list(command)
        self._limit = limit + MARGIN
        self._tell = tell
        self._gone = trio.Event()
        self._news = trio.Event()
        self._saying = trio.Lock()
        self._ready: Ready | None = None
        self._answer: Outcome | None = None
        self._running: CurrentJob | None = None
        self._nursery: trio.Nursery | None = None
        self._ending = self._reaped = self._broken = False
        self._tail = bytearray()
        self._said = 0

    @property
    def pid(self) -> int:
        """Its process id, and that of its group."""
        return self._popen.pid

    @property
    def usable(self) -> bool:
        """Whether it may be given a job."""
        return not (self._ending or self._broken or self._gone.is_set())

    def start(self) -> None:
        """Start the process, in a session of its own, so that a Ctrl-C is not meant for it. Raises BoxCrashed.

        In the thread of the loop, which takes about a millisecond: it is the end of the thread that started it which
        ends a box, and a thread that Trio lends ends soon (`box_launcher.py`).
        """
        pipe = subprocess.PIPE
        try:
            self._popen = subprocess.Popen(
                self._command, bufsize=0, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
            )
        except (OSError, ValueError) as error:
            raise BoxCrashed(f"cannot start the box {self._command[0]!r}: {error}") from None
        self._stdin, self._stdout, self._stderr = map(
            _stream, (self._popen.stdin, self._popen.stdout, self._popen.stderr)
        )
        if self.box.memory is not None:
            self._restrict(resource.RLIMIT_DATA, self.box.memory)
        self._tell("box:started", "debug", pid=self.pid, command=self._command[:8])

    async def live(self) -> None:
        """Hear it until it has ended, and its whole group with it."""
        try:
            async with trio.open_nursery() as self._nursery:
                async with trio.open_nursery() as ears:
                    ears.start_soon(self._hear)
                    ears.start_soon(self._hear_stderr)
                    await self._exit()
                    self._kill()  # whoever is left of its group: then the pipes end
                    # Unless somebody left the group: nobody waits for that one.
                    ears.cancel_scope.deadline = trio.current_time() + KILL_LIMIT
                self._nursery.cancel_scope.cancel()
        finally:
            with trio.CancelScope(shield=True):
                await self._bury()

    async def greet(self, hello: Hello) -> None:
        """Wait until it is ready for its first job. Raises BoxCrashed."""
        try:
            await self._say(frame(hello))
        except BoxGone:
            await self._gone.wait()
        with trio.move_on_after(START_LIMIT):
            while self._ready is None and not self._gone.is_set():
                await self._changed()
        ready = self._ready
        if self._gone.is_set():
            raise self._crash(f"{self._how()} before it was ready")
        if ready is None:
            raise self._crash(f"did not say that it is ready within {START_LIMIT:g} s")
        if ready.version != VERSION:
            raise BoxCrashed(f"the box speaks version {ready.version} of the protocol, this worker {VERSION}")

    async def work(self, run: Run, hand: Hand, early: Sequence[SoftTimeLimitExceeded]) -> Outcome:
        """The outcome of one job. Cancelling tells the box to stop, and kills it if it does not; it goes through,
        unless the job ended with an outcome all the same. Raises BoxCrashed; BoxGone when the box was not told of the
        job."""
        self._running, self._answer, self._said = CURRENT.get(), None, 0
        self._tail.clear()
        self.jobs += 1
        told = False
        hand.soften = self._soften(run.id)
        try:
            if self.box.cpu is not None:
                self._allow(self.box.cpu)
            await self._say(frame(run))
            told = True
            for each in early:
                hand.soften(each)
            await self._over()
        except trio.Cancelled:
            with trio.CancelScope(shield=True):
                await self._stop(run.id, hand, told=told)
            if self._answer is None:
                raise
        finally:
            hand.soften = None
            self._tell_of_more()
            self._running = None
        if self._answer is None:
            raise self._crash(f"{self._how()} while it ran the job")
        return self._answer

    async def end(self, first: signal.Signals | None = None) -> None:
        """End it: by the end of its stdin, or by the signal `first`; then by stronger words. Takes some seconds at
        most."""
        self._ending = True
        await self._stdin.aclose()
        steps = ((None, TERM_LIMIT), (signal.SIGTERM, TERM_LIMIT), (signal.SIGKILL, KILL_LIMIT))
        for number, limit in steps[first is not None :]:
            self._kill(number)
            with trio.move_on_after(limit):
                await self._gone.wait()
                return

    # What the box says

    async def _hear(self) -> None:
        lines = Lines(self._limit)
        async for chunk in self._stdout:
            for line, whole in lines.feed(bytes(chunk)):
                self._take(line, whole)
        for line, whole in lines.end():
            self._take(line, whole)
        self._broken = True
        if self._nursery is not None:
            self._nursery.start_soon(self._end_soon)

    async def _end_soon(self) -> None:
        """Nothing that it says would be heard any more. Mostly its end is the reason."""
        await trio.sleep(TERM_LIMIT)
        await self.end()

    async def _hear_stderr(self) -> None:
        lines = Lines(SAID_LIMIT)
        async for chunk in self._stderr:
            self._tail = (self._tail + chunk)[-TAIL:]
            for line, _ in lines.feed(bytes(chunk)):
                self._log_noise(line, "stderr")
        for line, _ in lines.end():
            self._log_noise(line, "stderr")

    def _take(self, line: bytes, whole: bool) -> None:
        said = read_from_box(line) if whole else too_long(line, self._limit)
        match said:
            case None:
                self._log_noise(line, "stdout")
            case Ready():
                self._ready = self._ready or said
            case Line():
                self._log(said)
            case Malformed():
                self._answered(_unread(said), "", line)
            case _:
                self._answered(outcome_of(said), said.id, line)
        self._news.set()

    def _answered(self, outcome: Outcome, job: str, line: bytes) -> None:
        running = self._running
        if running is None or self._answer is not None or job not in ("", running.id):
            self._log_noise(line[:TEXT], "stdout")  # an answer to no job
            return
        self._answer = outcome
        if isinstance(outcome, Raised) and outcome.failure.type == "MemoryError":
            self._broken = True  # what it was short of it may still hold

    def _log(self, line: Line) -> None:
        fields = {name: value for name, value in line.fields.items() if name not in _OURS}
        if line.event in _EVENTS:
            self._tell(line.event, line.level, **{**fields, **self._about()})
        else:
            said = {**fields, "logger": line.logger, "message": line.message, **self._about()}
            self._tell("log", line.level, **said)

    def _log_noise(self, line: bytes, stream: str) -> None:
        """What somebody has printed, or a program has said that knows no better."""
        if self._ending or not line.strip():
            return
        self._said += 1
        if self._said <= SAID_LINES:
            text = line[:SAID_LIMIT].decode("utf-8", "backslashreplace").rstrip()
            self._tell("box:said", "info", **self._about(), pid=self.pid, stream=stream, line=text)

    def _tell_of_more(self) -> None:
        if self._said > SAID_LINES:
            self._tell(
                "box:said-more", "warning", **self._about(), pid=self.pid, lines=self._said - SAID_LINES
            )
        self._said = 0

    def _about(self) -> dict[str, Any]:
        job = self._running
        return {} if job is None else {"job": job.id, "task": job.task}

    # What it is told

    async def _say(self, words: bytes) -> None:
        try:
            async with self._saying:
                await self._stdin.send_all(words)
        except (trio.BrokenResourceError, trio.ClosedResourceError, OSError):
            self._broken = True
            raise BoxGone from None

    async def _say_if_heard(self, words: bytes) -> None:
        with suppress(BoxGone):
            await self._say(words)

    def _soften(self, job: str) -> Callable[[SoftTimeLimitExceeded], None]:
        def soften(error: SoftTimeLimitExceeded) -> None:
            if self._hears("soft-limit") and self._nursery is not None:
                self._nursery.start_soon(self._say_if_heard, frame(SoftLimit(job, str(error))))

        return soften

    def _hears(self, what: str) -> bool:
        return self._ready is not None and what in self._ready.hears

    async def _stop(self, job: str, hand: Hand, *, told: bool) -> None:
        """The job is to end: ask the box, else kill it."""
        why = hand.why
        limit = why.failure.message if isinstance(why, Raised) else ""
        if told and self._hears("cancel"):
            with trio.move_on_after(ANSWER_LIMIT):
                await self._say_if_heard(frame(Cancel(job, limit)))
                await self._over()
        if self._answer is None:
            await self.end(signal.SIGTERM)
            if isinstance(why, Raised):
                hand.why = replace(why, failure=replace(why.failure, traceback=self._last_words()))

    async def _over(self) -> None:
        """Wait for the end of the job, or of the box."""
        while self._answer is None and not self._gone.is_set():
            await self._changed()

    async def _changed(self) -> None:
        await self._news.wait()
        self._news = trio.Event()

    # Its limits, and its end

    def _allow(self, seconds: float) -> None:
        """Let it use so many seconds of processor time from now on. Only the soft limit: the hard one would stay."""
        try:
            with open(f"/proc/{self.pid}/stat") as file:
                words = file.read().rpartition(")")[2].split()
        except OSError:
            raise BoxGone from None
        used = (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")
        self._restrict(resource.RLIMIT_CPU, math.ceil(used + seconds))

    def _restrict(self, what: int, most: int) -> None:
        if sys.platform != "linux":
            raise BoxCrashed(
                "Box(memory=..., cpu=...) need Linux: a running process is given its limits there"
            )
        try:
            _, hard = resource.prlimit(self.pid, what)
            most = most if hard == resource.RLIM_INFINITY else min(most, hard)
            resource.prlimit(self.pid, what, (most, hard if what == resource.RLIMIT_CPU else most))
        except ProcessLookupError:
            raise BoxGone from None

    def _kill(self, number: signal.Signals | None = signal.SIGKILL) -> None:
        """A signal to the whole group. Its number is nobody else's while the box has not been reaped."""
        if number is not None and not self._reaped:
            with suppress(ProcessLookupError, PermissionError):  # all of it has ended
                os.killpg(self.pid, number)

    async def _exit(self) -> None:
        """Wait for the end of the process, which stays a zombie."""
        try:
            handle = os.pidfd_open(self.pid) if sys.platform == "linux" else -1
        except OSError:
            handle = -1
        try:
            while not self._has_ended():
                if handle < 0:
                    await trio.sleep(POLL)
                else:
                    await trio.lowlevel.wait_readable(handle)
        finally:
            if handle >= 0:
                os.close(handle)

    def _has_ended(self) -> bool:
        try:
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:  # a job waited for all children of the worker
            return True

    async def _bury(self) -> None:
        """Nothing is left of it but what it has said."""
        with trio.move_on_after(KILL_LIMIT):
            while not self._has_ended():
                self._kill()
                await trio.sleep(POLL)
        self._kill()
        self._popen.poll()
        self._reaped = True
        for each in (self._stdin, self._stdout, self._stderr):
            await each.aclose()
        self._gone.set()
        self._news.set()
        how = "debug" if self._ending else "warning"
        self._tell("box:ended", how, pid=self.pid, code=self._popen.returncode, jobs=self.jobs)

    def _how(self) -> str:
        """How the process has ended, in words."""
        code = self._popen.returncode
        if code is None or code >= 0:
            return f"exited with code {code}"
        name = signal.Signals(-code).name if -code in _SIGNALS else f"signal {-code}"
        if name == "SIGXCPU" and self.box.cpu is not None:
            return f"was killed by {name}, over its limit of {self.box.cpu:g} s of processor time,"
        return f"was killed by {name}"

    def _crash(self, how: str) -> BoxCrashed:
        words = self._last_words()
        last = f": {words.splitlines()[-1][:SAID_LIMIT]}" if words else ""
        return BoxCrashed(f"the box {how}{last}", stderr=words)

    def _last_words(self) -> str:
        return bytes(self._tail).decode("utf-8", "backslashreplace").strip()


def _stream(file: Any) -> trio.lowlevel.FdStream:
    """One end of a pipe, for Trio."""
    stream = trio.lowlevel.FdStream(os.dup(file.fileno()))
    file.close()
    return stream


def _unread(said: Malformed) -> Outcome:
    if said.too_large:
        text = f"{said.why}: return a reference, or raise message_limit"
        return Refused(Reason.RESULT_TOO_LARGE, Failure(type="MessageTooLarge", message=text))
    return raised(BoxCrashed(f"the box wrote a frame that cannot be read: {said.why}"))


_SIGNALS = {each.value for each in signal.Signals}
_EVENTS = ("section:again", "section:ignored")
"""What celery5 itself tells of in a box."""
_OURS = {"worker", "job", "task", "level", "message_type", "timestamp", "task_uuid", "task_level", "name"}
"""Fields of a message that nobody else sets."""
