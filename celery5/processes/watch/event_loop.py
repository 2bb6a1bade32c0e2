"""Report what blocks the event loop: for how long, in which job, and with which stack.

A thread reads the main thread's stack at an interval. While the loop waits for events the thread does not wake it, so
an idle process stays idle. When code runs, the thread asks the loop for a sign of life. If none comes within the time
of the setting, the thread logs the stack at once, since the loop itself cannot. This costs nothing for each job: the
job is found on the stack. Meanwhile the thread also answers the status port.

A thread cannot run while C code holds the interpreter's lock: such a block is logged as soon as the lock is free.
When the whole process did not run, because it was stopped or got no CPU, no job is the cause. The CPU time
distinguishes the two.
"""

import threading
import time
import traceback
from collections import Counter
from contextlib import suppress
from types import FrameType
from typing import Self

import trio

from celery5.health.event_loop import LoopBlock
from celery5.logs.log import Log
from celery5.protocol.masking import collapse_whitespace
from celery5.runners import on_trio
from celery5.runners.context import CURRENT_JOB
from celery5.runners.stacks import get_thread_frame, walk_outwards
from celery5.services.health.status_port import StatusPort
from celery5.services.health.vitals import ProcessStatus
from celery5.services.process.systemd_notify import notify
from celery5.services.worker.task_execution import TaskExecution

SAMPLE_FRACTION = 0.25
"""The part of the setting between two looks at the loop: the times that are logged are as exact as that."""
MIN_INTERVAL, MAX_INTERVAL = 0.01, 1.0
"""Bounds of that, in seconds."""
MAX_WARNING_INTERVAL = 60.0
"""The most seconds between two warnings of one block: each comes at twice the time of the one before."""
MIN_CPU_SHARE = 0.1
"""The part of a pause that this process must have computed in, if the interpreter's lock was held then."""
MAX_FRAMES = 30
"""Frames of a stack that are logged, the innermost."""
MAX_DEPTH = 2000
"""Frames that are looked at."""

_IDLE = ("trio._core._io_epoll", "trio._core._io_kqueue", "trio._core._io_windows")
_NOBODY = ("", "")
_STEPS = "unrolled_run"
"""The function of Trio's that makes each step of each of its tasks."""


class LoopWatchdog:
    """A context manager for the main thread inside a Trio run: while the block lasts, it watches the loop.

    `threshold` is in seconds; 0 watches nothing. `address` is that of systemd's notification socket, if there is one.
    """

    def __init__(
        self,
        *,
        threshold: float,
        process_status: ProcessStatus,
        port: StatusPort,
        address: str | None,
        log: Log,
    ) -> None:
        self._threshold = threshold
        self._vitals = process_status
        self._port = port
        self._address = address
        self._log = log
        self._every = min(max(threshold * SAMPLE_FRACTION, MIN_INTERVAL), MAX_INTERVAL)
        self._main = threading.get_ident()
        self._token: trio.lowlevel.TrioToken | None = None
        self._thread: threading.Thread | None = None
        self._ends = False
        self._alarm = (
            threading.Lock()
        )  # free when the thread is to end; it wakes for less CPU time than an Event
        self._alarm.acquire()
        self._lock = threading.Lock()
        self._asked = False
        self._turned = 0.0  # when the loop was last known to turn
        self._log_from = 0.0  # the length of the block from which on it is logged again
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
        self._ends = True
        self._alarm.release()
        if self._thread is not None:
            self._thread.join(1.0)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Watch until cancelled."""
        with self:
            task_status.started()
            await trio.sleep_forever()

    # ---- on the loop

    def _turns(self) -> None:
        """Note that the loop turns; whatever blocked it has ended."""
        with self._lock:  # whole: a late `loop:blocked` of the thread must not come after this
            now = time.monotonic()
            seconds, self._turned, self._asked = now - self._turned, now, False
            if self._vitals.loop.current is None:
                return
            block = self._block(seconds)
            self._log_from, self._seen = 0.0, Counter()
            self._log.event("loop:resumed", "warning", **_fields(block))
            self._vitals.loop.end_block(block)
            notify(self._address, f"STATUS={collapse_whitespace(self._vitals.format_summary())}")

    # ---- in the thread

    def _watch(self) -> None:
        while not self._ends:
            if self._vitals.loop.current is not None and self._port.serve_while_blocked(self._every):
                now, locked = time.monotonic(), False  # this thread served clients, for as long as they took
            else:
                began, computed = time.monotonic(), time.process_time()
                self._alarm.acquire(timeout=self._every)
                now = time.monotonic()
                slept, computed = now - began, time.process_time() - computed
                locked = slept > self._every + self._threshold / 2
                if locked and computed < MIN_CPU_SHARE * slept:
                    self._excuse(slept)
                    continue
            with suppress(Exception):  # what it looks at may change, and the next look comes soon
                self._look(now, locked=locked)

    def _excuse(self, slept: float) -> None:
        """Blame no job for a time in which this thread did not run either, and the process used no CPU."""
        with self._lock:
            self._turned += slept
        if slept >= self._threshold:
            self._log.event("process:paused", "warning", seconds=round(slept, 3), hint=_PAUSED)

    def _look(self, now: float, *, locked: bool) -> None:
        """See whether the loop is idle, else ask it to show that it turns, or see for how long it has not.

        `locked`: something held the interpreter's lock since the last look. Then nobody could ask, and where the loop's
        thread is now must be read before anything else is done: each call may let that thread go on.
        """
        frame = get_thread_frame(self._main)
        asked = self._asked
        if not asked and not locked and is_idle(frame):
            self._turned = now  # only an answer changes this elsewhere, and none is due
            return
        seconds = now - self._turned
        blocked = (asked or locked) and seconds >= self._threshold and self._vitals.phase != "starting"
        if blocked:
            found = find_job(frame)
            if locked or found != _NOBODY or not is_idle(frame):
                self._note(found, seconds, frame, asked=asked)
        if not asked:
            self._ask()

    def _note(self, found: tuple[str, str], seconds: float, frame: FrameType | None, *, asked: bool) -> None:
        """Note a block, and log it at growing intervals while it lasts. Nothing when the loop has turned since."""
        with self._lock:
            if asked and not self._asked:
                return
            self._seen[found] += 1
            block = self._block(seconds)
            self._vitals.loop.update_block(block)
            if block.seconds >= self._log_from:
                self._log_from = block.seconds + min(block.seconds, MAX_WARNING_INTERVAL)
                self._log.event("loop:blocked", "warning", **_fields(block), stack=format_stack(frame))
                notify(self._address, f"STATUS={collapse_whitespace(block.why)}")

    def _ask(self) -> None:
        with self._lock:
            self._asked = True
        if self._token is not None:
            try:
                self._token.run_sync_soon(self._turns)
            except trio.RunFinishedError:
                self._ends = True

    def _block(self, seconds: float) -> LoopBlock:
        jobs = Counter({found: count for found, count in self._seen.items() if found != _NOBODY})
        ((task, job), _), *_ = jobs.most_common(1) or [(_NOBODY, 0)]
        return LoopBlock(round(seconds, 3), task, job, max(len(jobs) - 1, 0))


def find_job(frame: FrameType | None) -> tuple[str, str]:
    """Return the task and the id of the job that runs in a stack of the loop's thread; '' for both if none does."""
    for stack_frame in walk_outwards(frame, MAX_DEPTH):
        if stack_frame.f_code in TaskExecution.EXECUTOR_CODES:
            command = stack_frame.f_locals["delivery"].command
            return command.task, command.id
        if stack_frame.f_code.co_name == _STEPS and (task := stack_frame.f_locals.get("task")) is not None:
            job = task.context.get(CURRENT_JOB)  # a task that the job has started
            return _NOBODY if job is None else (job.task, job.id)
    return _NOBODY


def is_idle(frame: FrameType | None) -> bool:
    """Return whether the loop's thread waits for something to do."""
    return frame is None or frame.f_globals.get("__name__") in _IDLE


def format_stack(frame: FrameType | None) -> str:
    """Return the innermost frames of a stack as text, from the job's own function on if there is one."""
    found: list[tuple[FrameType, int]] = []
    for stack_frame in walk_outwards(frame, MAX_DEPTH):
        if stack_frame.f_code.co_filename == on_trio.__file__ or len(found) >= MAX_FRAMES:
            break
        found.append((stack_frame, stack_frame.f_lineno))
    return "".join(traceback.StackSummary.extract(reversed(found)).format())


def _fields(block: LoopBlock) -> dict[str, object]:
    others = {"others": block.others} if block.others else {}
    return {"task": block.task, "job": block.job, "seconds": block.seconds, **others}


_PAUSED = (
    "this process did not run meanwhile: it was stopped, its machine was suspended or too busy, or C code slept and "
    "held the interpreter's lock"
)
