"""Loop Watch: reports when something blocks the event loop, for how long, which job it is, and its stack.

Floor: processes. Reads: the frames of the main thread, while it blocks the loop. Writes: the log; the process' loop
blocks; systemd's status line.

A thread asks the loop again and again to show that it runs. If the loop does not for the time of the setting, the
thread logs the main thread's stack at once, since the loop itself cannot. A job costs nothing: the thread finds it on
the stack. Meanwhile the thread also answers the status port.

A thread cannot run while C code holds the interpreter's lock: such a block is logged as soon as the lock is free.
When the whole process did not run, because it was stopped or got no CPU, no job is the cause. The CPU time tells
these apart.
"""

import sys
import threading
import time
import traceback
from collections import Counter
from contextlib import suppress
from types import FrameType
from typing import Any, Self, cast

import trio

from celery5.log import Log
from celery5.loop import Block
from celery5.runners import on_trio
from celery5.runners.context import CURRENT
from celery5.services.status_port import StatusPort
from celery5.services.systemd_notify import notify
from celery5.services.task_execution import TaskExecution
from celery5.services.vitals import Vitals

PART = 0.1
"""The part of the setting after which the loop is asked again: the accuracy of the reported time."""
OFTEN, SELDOM = 0.01, 1.0
"""Bounds of that, in seconds."""
LONGEST_PAUSE = 60.0
"""The most seconds between two warnings of one block: each comes at twice the time of the one before."""
BUSY = 0.1
"""The part of a pause that this process must have computed in, if the interpreter's lock was held then."""
FRAMES = 30
"""Frames of a stack that are logged, the innermost."""
DEEPEST = 2000
"""Frames that are looked at."""

_IDLE = ("trio._core._io_epoll", "trio._core._io_kqueue", "trio._core._io_windows")
_NOBODY = ("", "")
_STEPS = "unrolled_run"
"""The function of Trio's that makes each step of each of its tasks."""


class LoopWatch:
    """A context manager for the main thread inside a Trio run: while the block lasts, it watches the loop.

    `threshold` is in seconds; 0 watches nothing. `address` is that of systemd's notification socket, if there is one.
    """

    def __init__(
        self, *, threshold: float, vitals: Vitals, port: StatusPort, address: str | None, log: Log
    ) -> None:
        self._threshold = threshold
        self._vitals = vitals
        self._port = port
        self._address = address
        self._log = log
        self._every = min(max(threshold * PART, OFTEN), SELDOM)
        self._main = threading.get_ident()
        self._token: trio.lowlevel.TrioToken | None = None
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._asked = False
        self._turned = 0.0
        self._told = 0.0
        self._seen: Counter[tuple[str, str]] = Counter()

    def __enter__(self) -> Self:
        self._token = trio.lowlevel.current_trio_token()
        self._main = threading.get_ident()
        self._turned = time.monotonic()
        if self._threshold:
            self._thread = threading.Thread(target=self._watch, name="celery5-loop", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(1.0)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Watch until cancelled."""
        with self:
            task_status.started()
            await trio.sleep_forever()

    # ---- on the loop

    def _turns(self) -> None:
        """Record that the loop runs, so that a block has ended."""
        with self._lock:
            now, block = time.monotonic(), self._vitals.loop.now
            seconds, self._turned, self._asked = now - self._turned, now, False
        if block is None:
            return
        block = self._block(seconds)
        self._told, self._seen = 0.0, Counter()
        self._log.event("loop:resumed", "warning", **_fields(block))
        self._vitals.loop.ended(block)
        notify(self._address, f"STATUS={_line(self._vitals.line())}")

    # ---- in the thread

    def _watch(self) -> None:
        while not self._stop.is_set():
            began, computed = time.monotonic(), time.process_time()
            if self._vitals.loop.now is None or not self._port.answer_for(self._every):
                self._stop.wait(self._every)
            now = time.monotonic()
            slept, computed = now - began, time.process_time() - computed
            locked = slept > self._every + self._threshold / 2
            if locked and computed < BUSY * slept:
                self._excuse(slept)
                continue
            with suppress(Exception):  # the frames change meanwhile, and the next look comes soon
                self._look(now, locked=locked)

    def _excuse(self, slept: float) -> None:
        """Blame no job for a time in which this thread did not run either, and the process used no CPU."""
        with self._lock:
            self._turned += slept
        if slept >= self._threshold:
            self._log.event("process:paused", "warning", seconds=round(slept, 3), hint=_PAUSED)

    def _look(self, now: float, *, locked: bool) -> None:
        """Ask the loop to show that it runs, or find out for how long it has not.

        `locked`: something held the interpreter's lock since the last look. Then nobody could ask, and where the loop's
        thread is now must be read before anything else is done: each call may let that thread go on.
        """
        frame = cast("Any", sys)._current_frames().get(self._main) if locked or self._asked else None
        asked, seconds = self._asked, now - self._turned
        blocked = (asked or locked) and seconds >= self._threshold and self._vitals.phase != "starting"
        found = job_on(frame)
        if blocked and (locked or found != _NOBODY or not is_idle(frame)):
            with self._lock:
                if asked and not self._asked:
                    return  # it runs again
                self._seen[found] += 1
                block = self._block(seconds)
                self._vitals.loop.goes_on(block)
            self._tell(block, frame)
        if not asked:
            self._ask()

    def _tell(self, block: Block, frame: FrameType | None) -> None:
        """Log a block, at growing intervals while it lasts."""
        if block.seconds >= self._told:
            self._told = block.seconds + min(block.seconds, LONGEST_PAUSE)
            self._log.event("loop:blocked", "warning", **_fields(block), stack=stack_of(frame))
            notify(self._address, f"STATUS={_line(block.why)}")

    def _ask(self) -> None:
        with self._lock:
            self._asked = True
        if self._token is not None:
            try:
                self._token.run_sync_soon(self._turns)
            except trio.RunFinishedError:
                self._stop.set()

    def _block(self, seconds: float) -> Block:
        jobs = Counter({found: count for found, count in self._seen.items() if found != _NOBODY})
        ((task, job), _), *_ = jobs.most_common(1) or [(_NOBODY, 0)]
        return Block(round(seconds, 3), task, job, max(len(jobs) - 1, 0))


def job_on(frame: FrameType | None) -> tuple[str, str]:
    """Return the task and the id of the job that runs in a stack of the loop's thread; '' for both if none does."""
    for each in _outwards(frame):
        if each.f_code is TaskExecution.EXECUTOR:
            envelope = each.f_locals["delivery"].envelope
            return envelope.task, envelope.id
        if each.f_code.co_name == _STEPS and (task := each.f_locals.get("task")) is not None:
            job = task.context.get(CURRENT)  # a task that the job has started
            return _NOBODY if job is None else (job.task, job.id)
    return _NOBODY


def is_idle(frame: FrameType | None) -> bool:
    """Return whether the loop's thread waits for something to do."""
    return frame is None or frame.f_globals.get("__name__") in _IDLE


def stack_of(frame: FrameType | None) -> str:
    """Return the innermost frames of a stack as text, from the job's own function on if there is one."""
    found: list[tuple[FrameType, int]] = []
    for each in _outwards(frame):
        if each.f_code.co_filename == on_trio.__file__ or len(found) >= FRAMES:
            break
        found.append((each, each.f_lineno))
    return "".join(traceback.StackSummary.extract(reversed(found)).format())


def _outwards(frame: FrameType | None) -> "list[FrameType]":
    found: list[FrameType] = []
    while frame is not None and len(found) < DEEPEST:
        found.append(frame)
        frame = frame.f_back
    return found


def _fields(block: Block) -> dict[str, object]:
    others = {"others": block.others} if block.others else {}
    return {"task": block.task, "job": block.job, "seconds": block.seconds, **others}


def _line(text: str) -> str:
    return " ".join(text.split())


_PAUSED = (
    "this process did not run meanwhile: it was stopped, its machine was suspended or too busy, or C code slept and "
    "held the interpreter's lock"
)
