"""Stacks: SIGUSR1 has a process say in its log what each of its Trio tasks and threads is doing.

The signal is caught below Python, by `faulthandler`, which writes into a pipe where the main thread is at that moment.
That wakes a thread. It has the event loop look at the tasks, which is when all of them wait; a loop that does not turn
within LATE seconds is blocked, and the thread looks by itself. So there is a dump when it is needed most: also when a
job blocks the loop, and where. Only while C code holds the interpreter's lock does it have to wait for that to end.
"""

import faulthandler
import os
import re
import select
import signal
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice
from types import FrameType
from typing import Any, Self, cast

import trio

from celery5.logs.log import Log
from celery5.runners.context import CURRENT_JOB
from celery5.runners.stacks import walk_awaited, walk_outwards

DUMP_SIGNAL = signal.SIGUSR1
LOOP_TIMEOUT = 1.0
"""Seconds that the event loop has to turn."""
MAX_TASKS = 500
"""The most tasks in one dump, and the most threads."""
MAX_FRAMES = 40
"""The most frames of each: the innermost."""
MAX_DEPTH = 2000
"""Frames that are looked at."""
DUMP_INTERVAL = 0.2
"""Seconds between two dumps: what comes earlier is the same one."""
_NAME = 200
_END = b"\0"
_CAUGHT = re.compile(r'File "(.*)", line (\d+) in (.*)')


class StackDump:
    """A context manager for the main thread inside a Trio run: while the block lasts, SIGUSR1 dumps to `log`."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._root: trio.lowlevel.Task | None = None
        self._token: trio.lowlevel.TrioToken | None = None
        self._pipe = (-1, -1)
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self._root = trio.lowlevel.current_root_task()
        self._token = trio.lowlevel.current_trio_token()
        self._pipe = os.pipe()
        os.set_blocking(self._pipe[1], False)  # nobody waits in a signal handler
        faulthandler.register(DUMP_SIGNAL, file=self._pipe[1], all_threads=False, chain=False)
        self._thread = threading.Thread(target=self._listen, name="celery5-stacks", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        faulthandler.unregister(DUMP_SIGNAL)
        ear, mouth = self._pipe
        with suppress(BlockingIOError):
            os.write(mouth, _END)  # the end of the pipe alone may not come: forked processes have it, too
        os.close(mouth)
        if self._thread is not None:
            self._thread.join(LOOP_TIMEOUT)
        if self._thread is None or not self._thread.is_alive():
            os.close(ear)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Do so until cancelled."""
        with self:
            task_status.started()
            await trio.sleep_forever()

    def _listen(self) -> None:
        """In a thread: wait for what faulthandler writes."""
        requests = b""
        while _END not in requests and (requests := os.read(self._pipe[0], 65536)) and _END not in requests:
            time.sleep(DUMP_INTERVAL)
            while select.select([self._pipe[0]], [], [], 0)[0] and (more := os.read(self._pipe[0], 65536)):
                requests += more
            with suppress(Exception):  # what it looks at may change
                self._dump(requests.decode(errors="replace"))

    def _dump(self, caught: str) -> None:
        """Have the loop look; look by itself when the loop does not turn."""
        first, done, token = threading.Lock(), threading.Event(), self._token

        def look(loop: str) -> None:
            if first.acquire(blocking=False):
                with suppress(Exception):
                    self._tell(caught, loop)
                done.set()

        if token is not None:
            with suppress(trio.RunFinishedError):
                token.run_sync_soon(look, "turns")
        if not done.wait(LOOP_TIMEOUT):
            look("blocked")

    def _tell(self, caught: str, loop: str) -> None:
        """One message about the whole, one for each task (one for all that are alike), one for each thread."""
        tasks = list(islice(_below(self._root), MAX_TASKS + 1))
        threads = {thread.ident: thread.name for thread in threading.enumerate()}
        frames = list(cast("Any", sys)._current_frames().items())
        self._log.event(
            "process:stacks-dumped",
            "warning",  # it was asked for, so it is told at any usual level
            loop=loop,
            tasks=len(tasks) if len(tasks) <= MAX_TASKS else f"more than {MAX_TASKS}: these are the first",
            threads=len(frames),
            main=_read(caught),
        )
        for (name, where, job), count in Counter(map(_shown, tasks[:MAX_TASKS])).items():
            alike = {"count": count} if count > 1 else {}
            self._log.event(
                "process:task-dumped", "warning", name=name, **dict(job), **alike, frames=list(where)
            )
        for ident, frame in frames[:MAX_TASKS]:
            name = threads.get(ident, "?")
            self._log.event("process:thread-dumped", "warning", name=name[:_NAME], frames=_called(frame))


def _read(caught: str) -> list[str]:
    """Where the main thread was when the signal came, by faulthandler: the outermost frame first."""
    return [f"{where}:{line} in {what}" for where, line, what in _CAUGHT.findall(caught)][:MAX_FRAMES][::-1]


def _below(root: trio.lowlevel.Task | None) -> Iterator[trio.lowlevel.Task]:
    """A task and all that it has started, and so on."""
    waiting = [] if root is None else [root]
    while waiting:
        task = waiting.pop()
        yield task
        for nursery in list(task.child_nurseries):
            waiting.extend(list(nursery.child_tasks))


def _shown(task: trio.lowlevel.Task) -> tuple[str, tuple[str, ...], tuple[tuple[str, str], ...]]:
    """The name of a task, where it waits, and the job that it runs, if it does."""
    job = task.context.get(CURRENT_JOB)
    about = () if job is None else (("job", job.id), ("task", job.task))
    return task.name[:_NAME], tuple(_awaited(task)), about


def _awaited(task: trio.lowlevel.Task) -> Iterable[str]:
    """Where a task waits, the outermost frame first. Of one that runs right now only its beginning can be seen."""
    found: deque[str] = deque(maxlen=MAX_FRAMES)
    with suppress(Exception):  # it goes on while the loop's own thread does not ask
        for frame in islice(walk_awaited(task.coro), MAX_DEPTH):
            found.append(_place(frame))
    return found


def _called(frame: FrameType) -> list[str]:
    """Where a thread is, the outermost frame first."""
    return [_place(stack_frame) for stack_frame in walk_outwards(frame, MAX_FRAMES)][::-1]


def _place(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
