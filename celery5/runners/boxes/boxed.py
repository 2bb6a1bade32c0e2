"""Boxed runner: runs boxed tasks, each in a process of its own, which is kept for the next job (C62).

Everything about processes is imported with the first boxed job: a worker without boxed tasks has nothing of it.
"""

import os
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import trio
from msgspec import Raw
from msgspec.structs import replace

from celery5.errors import BoxCrashed, SoftTimeLimitExceeded
from celery5.protocol.boxes.box import PYTHON_BOX, Box
from celery5.protocol.job.arguments import Parameters
from celery5.protocol.job.envelope import Envelope
from celery5.protocol.job.verdict import Outcome, Raised
from celery5.runners.context import CURRENT_JOB, LogEvent
from celery5.runners.outcome import get_error_outcome
from celery5.runners.running_job import RunningJob

if TYPE_CHECKING:
    from celery5.protocol.boxes.frames import BoxHello, BoxHome, RunJob
    from celery5.runners.boxes.box_process import BoxProcess

MAX_TRIES = 3
"""Boxes that may turn out to have ended when they are to be told of a job, before the job fails."""

LAUNCHER = Path(__file__).with_name("box_launcher.py")


class BoxedTask(Protocol):
    """What of a task matters here."""

    @property
    def name(self) -> str: ...
    @property
    def box(self) -> Box | None: ...
    @property
    def parameters(self) -> Parameters: ...
    @property
    def deduplicate(self) -> Callable[..., Any] | None: ...


class BoxGroups(Protocol):
    """Remembers the process groups of boxes, for whoever has to end them when the worker cannot."""

    def add_box(self, pid: int, began: int, /) -> None: ...
    def remove_box(self, pid: int, /) -> None: ...


class BoxedRunner:
    """Runs boxed tasks, at most as many boxes at once as `slots()` says.

    A box is started when a job needs one and none is idle, and ended after `jobs` jobs, or when it has been idle for
    `idle` seconds. `home` says where a Python box finds its tasks, `limit` how many bytes a result may have;
    `groups` is told of each box.
    """

    def __init__(
        self,
        *,
        tasks: Mapping[str, BoxedTask],
        get_slots: Callable[[], int],
        get_home: "Callable[[], BoxHome]",
        log_event: LogEvent,
        worker: str,
        result_limit: int,
        max_jobs: int,
        idle_timeout: float,
        box_groups: BoxGroups | None = None,
    ) -> None:
        self._tasks = tasks
        self._slots = get_slots
        self._home = get_home
        self._tell = log_event
        self._worker = worker
        self._limit = result_limit
        self._jobs = max_jobs
        self._patience = idle_timeout
        self._groups = box_groups
        self._nursery: trio.Nursery | None = None
        self._all: set[BoxProcess] = set()
        self._idle: deque[BoxProcess] = deque()  # the one that was idle last is at the right
        self._news = trio.Event()

    @property
    def pids(self) -> list[int]:
        """The process ids of all boxes there are."""
        return [each.pid for each in self._all]

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep boxes until cancelled, then end them all: nobody runs a job any more."""
        lives = trio.CancelScope()

        async def live(task_status: trio.TaskStatus[trio.Nursery]) -> None:
            with lives:
                async with trio.open_nursery() as nursery:
                    task_status.started(nursery)
                    await trio.sleep_forever()

        async with trio.open_nursery() as around:
            try:
                self._nursery = await around.start(live)
                await trio.lowlevel.checkpoint_if_cancelled()  # see Boot
                lives.shield = True  # not before: a start that is cancelled would wait for it for ever
                task_status.started()
                await self._end_idle_ones()
            finally:
                self._nursery = None
                await self._end_all()
                lives.cancel()

    async def execute(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        running_job: RunningJob,
    ) -> Outcome:
        """Run to the end, in a box. Cancellation ends the job, if need be with the box, and goes through, unless the
        job ended with an outcome all the same."""
        envelope = None if running_job.delivery is None else running_job.delivery.envelope
        assert envelope is not None, "an executor has it"
        task = self._tasks[envelope.task]
        run = self._run_of(task, envelope, args, kwargs, running_job, policy=function is task.deduplicate)
        early: list[SoftTimeLimitExceeded] = []
        running_job.raise_soft_limit = early.append
        try:
            return await self._in_a_box(task.box or PYTHON_BOX, run, running_job, early)
        except BoxCrashed as error:
            return _crashed(error)
        finally:
            running_job.raise_soft_limit = None

    def _run_of(
        self,
        task: BoxedTask,
        envelope: Envelope,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        hand: RunningJob,
        *,
        policy: bool,
    ) -> "RunJob":
        """What a box is told of a job."""
        from celery5.protocol.boxes.frames import RunJob

        job, limits = CURRENT_JOB.get(), hand.limits
        run = RunJob(
            id=envelope.id,
            task=envelope.task,
            queue="" if job is None else job.queue,
            attempt=envelope.attempt,
            worker=self._worker,
            sections=envelope.sections,
            time_limit=None if limits is None else limits.hard,
            soft_time_limit=None if limits is None else limits.soft,
            policy=policy,
        )
        if task.box is None or task.box.is_python:
            return replace(run, args=envelope.args, kwargs=envelope.kwargs)
        return replace(run, arguments=Raw(task.parameters.encode_by_name(args, kwargs)))

    async def _in_a_box(
        self, box: Box, run: "RunJob", hand: RunningJob, early: Sequence[SoftTimeLimitExceeded]
    ) -> Outcome:
        from celery5.runners.boxes.box_process import BoxEnded

        for _ in range(MAX_TRIES):
            one = await self._take(box)
            try:
                return await one.run_job(run, hand, early)
            except BoxEnded:
                continue
            finally:
                self._put_back(one)
        raise BoxCrashed(f"{MAX_TRIES} boxes in a row ended before they could be told of the job")

    async def _take(self, box: Box) -> "BoxProcess":
        """An idle box of this kind, else a new one."""
        for one in reversed(self._idle):
            if one.box == box and one.is_usable:
                self._idle.remove(one)
                return one
        if self._nursery is None:
            raise BoxCrashed("the worker is stopping: it starts no box any more")
        spare = self._kept() - max(self._slots() - 1, 0)
        for one in list(self._idle)[: max(spare, 0)]:  # boxes of other kinds, which have to make room
            self._idle.remove(one)
            self._nursery.start_soon(one.stop)
        return await self._open(box, self._nursery)

    async def _open(self, box: Box, nursery: trio.Nursery) -> "BoxProcess":
        from celery5.runners.boxes.box_process import BoxProcess

        one = BoxProcess(box, _command(box), result_limit=self._limit, log_event=self._tell)
        self._all.add(one)
        if self._groups is not None:
            self._groups.add_box(one.pid, one.start_ticks)
        nursery.start_soon(self._live, one)
        try:
            await one.wait_ready(self._hello(box))
        except BaseException:
            nursery.start_soon(one.stop)
            raise
        return one

    async def _live(self, one: "BoxProcess") -> None:
        try:
            await one.run()
        finally:
            self._all.discard(one)
            if self._groups is not None:
                self._groups.remove_box(one.pid)
            if one in self._idle:
                self._idle.remove(one)

    def _put_back(self, one: "BoxProcess") -> None:
        """The job has ended: keep the box for the next one, unless it has had its time."""
        nursery = self._nursery
        if nursery is None:
            return  # all of them are being ended
        if one.is_usable and one.job_count < self._jobs and self._kept() <= self._slots():
            one.idle_since = trio.current_time()
            self._idle.append(one)
            self._news.set()
        elif one in self._all:
            nursery.start_soon(one.stop)

    def _kept(self) -> int:
        """How many boxes there are, but for those that are being ended."""
        return sum(each.is_usable for each in self._all)

    async def _end_idle_ones(self) -> None:
        assert self._nursery is not None
        while True:
            due = self._idle[0].idle_since + self._patience if self._idle else float("inf")
            if due <= trio.current_time():
                self._nursery.start_soon(self._idle.popleft().stop)
                continue
            with trio.move_on_at(due):
                await self._news.wait()
            self._news = trio.Event()

    async def _end_all(self) -> None:
        with trio.CancelScope(shield=True):
            self._idle.clear()
            async with trio.open_nursery() as ending:
                for each in self._all:
                    ending.start_soon(each.stop)

    def _hello(self, box: Box) -> "BoxHello":
        from celery5.protocol.boxes.frames import VERSION, BoxHello

        return BoxHello(VERSION, self._worker, self._limit, self._home() if box.is_python else None)


def _command(box: Box) -> list[str]:
    """How a box is started: a Python one by itself, any other by the launcher, which becomes it."""
    me = str(os.getpid())
    if box.is_python:
        return [sys.executable, "-m", "celery5.processes.box", me]
    return [sys.executable, "-I", "-S", str(LAUNCHER), me, *box.command]


def _crashed(error: BoxCrashed) -> Outcome:
    """A failed attempt; what the box said last is its traceback."""
    outcome = get_error_outcome(error)
    if not isinstance(outcome, Raised):
        return outcome
    return replace(outcome, failure=replace(outcome.failure, traceback=error.stderr))
