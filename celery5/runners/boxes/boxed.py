"""Boxed runner: runs boxed tasks, each in its own process, which is kept for the next job.

The modules about processes are imported with the first boxed job: other workers do not pay for them.
"""

import os
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import trio
from msgspec import Raw
from msgspec.structs import replace

from celery5.errors import BoxCrashed, SoftTimeLimitExceeded
from celery5.protocol.boxes.box import PYTHON_BOX, Box
from celery5.protocol.job.arguments import Parameters
from celery5.protocol.job.verdict import Outcome, Raised
from celery5.runners.context import CURRENT_JOB, JOB_PLACE, LogEvent
from celery5.runners.outcome import get_error_outcome
from celery5.runners.running_job import JobCall, RunningJob

if TYPE_CHECKING:
    from celery5.protocol.boxes.frames import BoxHello, BoxHome, RunJob
    from celery5.runners.boxes.box_process import BoxProcess

MAX_TRIES = 3
"""Boxes in a row that may turn out to have ended when they are sent the job, before the job fails."""

LAUNCHER = Path(__file__).with_name("launcher.py")


class BoxedTask(Protocol):
    """What the runner needs of a task."""

    @property
    def name(self) -> str: ...
    @property
    def box(self) -> Box | None: ...
    @property
    def parameters(self) -> Parameters: ...
    @property
    def deduplicate(self) -> Callable[..., Any] | None: ...


class BoxGroups(Protocol):
    """Keeps the process groups of boxes, so that another process can end them when the worker cannot."""

    def add_box(self, pid: int, began: int, /) -> None: ...
    def remove_box(self, pid: int, /) -> None: ...


class BoxLimits(msgspec.Struct, frozen=True):
    """Limits of a worker's boxes."""

    result_bytes: int
    max_jobs: int
    """Jobs after which a box is ended."""
    idle_timeout: float
    """Seconds without a job after which a box is ended."""


class BoxedRunner:
    """Runs boxed tasks. A box is started when a job needs one and none is idle.

    Args:
        tasks: The worker's tasks by name.
        get_slots: Returns how many boxes there may be at once.
        get_home: Returns where a Python box finds its tasks.
        log_event: Writes an event to the worker's log.
        log_message: Writes a message of eliot, which a box has sent, to the worker's log.
        worker: The worker's name.
        limits: When boxes are ended, and how large a result may be.
        box_groups: Notified of each box that starts and ends.
    """

    def __init__(
        self,
        *,
        tasks: Mapping[str, BoxedTask],
        get_slots: Callable[[], int],
        get_home: "Callable[[], BoxHome]",
        log_event: LogEvent,
        worker: str,
        limits: BoxLimits,
        box_groups: BoxGroups | None = None,
        log_message: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        self._tasks = tasks
        self._get_slots = get_slots
        self._get_home = get_home
        self._log_event = log_event
        self._log_message = log_message
        self._worker = worker
        self._limits = limits
        self._groups = box_groups
        self._nursery: trio.Nursery | None = None
        self._box_processes: set[BoxProcess] = set()
        self._idle: deque[BoxProcess] = deque()  # the box that became idle last is at the right
        self._idle_added = trio.Event()

    @property
    def pids(self) -> list[int]:
        """The process ids of all boxes."""
        return [box_process.pid for box_process in self._box_processes]

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep boxes until cancelled, then end them all."""
        boxes_scope = trio.CancelScope()

        async def keep_boxes(task_status: trio.TaskStatus[trio.Nursery]) -> None:
            with boxes_scope:
                async with trio.open_nursery() as nursery:
                    task_status.started(nursery)
                    await trio.sleep_forever()

        async with trio.open_nursery() as outer:
            try:
                self._nursery = await outer.start(keep_boxes)
                await trio.lowlevel.checkpoint_if_cancelled()
                boxes_scope.shield = True  # not earlier: a cancelled start would wait for it for ever
                task_status.started()
                await self._end_idle_boxes()
            finally:
                self._nursery = None
                await self._end_all()
                boxes_scope.cancel()

    async def execute(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        running_job: RunningJob,
    ) -> Outcome:
        """Run the job in a box and return its outcome.

        Those that `running_job.go_on` names when a job has ended are run, too: then it is the outcome of the last one.

        Cancellation ends the job, and the box if need be. Cancelled is raised unless the job has ended with an outcome.
        """
        jobs = _JobsOfExecutor(self, running_job, JobCall(function, args, kwargs))
        early: list[SoftTimeLimitExceeded] = []
        running_job.allow_interrupts(early.append)
        try:
            while True:
                outcome = await self._run_in_box(jobs, early)
                if not jobs.take_next():
                    return outcome
        except BoxCrashed as error:
            return _make_crash_outcome(error)
        finally:
            running_job.forbid_interrupts()

    def make_run(self, call: JobCall, running_job: RunningJob) -> "tuple[Box, RunJob]":
        """Return the box that a job needs, and the frame that starts it there."""
        from celery5.protocol.boxes.frames import RunJob

        command = None if running_job.delivery is None else running_job.delivery.command
        assert command is not None, "an executor has set it"
        task = self._tasks[command.task]
        box, job, limits = task.box or PYTHON_BOX, CURRENT_JOB.get(), running_job.limits
        arguments = (
            {"args": command.args, "kwargs": command.kwargs}
            if box.is_python
            else {"arguments": Raw(task.parameters.encode_by_name(call.args, call.kwargs))}
        )
        return box, RunJob(
            id=command.id,
            task=command.task,
            queue="" if job is None else job.queue,
            attempt=command.attempt,
            worker=self._worker,
            sections=command.sections,
            time_limit=None if limits is None else limits.hard,
            soft_time_limit=None if limits is None else limits.soft,
            policy=call.function is task.deduplicate,
            trace=command.trace,
            resources=None if job is None or job.assigned is None else job.assigned.amounts,
            eliot="" if job is None or (get_place := JOB_PLACE.get()) is None else get_place(job),
            **arguments,
        )

    async def _run_in_box(self, jobs: "_JobsOfExecutor", early: Sequence[SoftTimeLimitExceeded]) -> Outcome:
        from celery5.runners.boxes.box_process import BoxEnded

        for _ in range(MAX_TRIES):
            box_process = await self._acquire(jobs.box, jobs.devices)
            try:
                return await box_process.run_job(jobs.run, jobs.running_job, early, jobs.choose_next)
            except BoxEnded:
                continue
            finally:
                self._release(box_process)
        raise BoxCrashed(f"{MAX_TRIES} boxes in a row ended before they could be sent the job")

    def may_keep(self, box_process: "BoxProcess") -> bool:
        """Return whether a box may run another job."""
        return (
            box_process.is_usable
            and box_process.job_count < self._limits.max_jobs
            and self._nursery is not None
            and self._count_boxes() <= self._get_slots()
        )

    async def _acquire(self, box: Box, devices: tuple[str, ...]) -> "BoxProcess":
        """Return an idle box of this kind that sees these devices, else a new one."""
        for box_process in reversed(self._idle):
            if box_process.box == box and box_process.devices == devices and box_process.is_usable:
                self._idle.remove(box_process)
                return box_process
        if self._nursery is None:
            raise BoxCrashed("the worker is stopping: it starts no box any more")
        spare = self._count_boxes() - max(self._get_slots() - 1, 0)
        for box_process in list(self._idle)[: max(spare, 0)]:  # of other kinds: their slots are needed
            self._idle.remove(box_process)
            self._nursery.start_soon(box_process.stop)
        return await self._open(box, devices, self._nursery)

    async def _open(self, box: Box, devices: tuple[str, ...], nursery: trio.Nursery) -> "BoxProcess":
        from celery5.runners.boxes.box_process import BoxProcess

        box_process = BoxProcess(
            box,
            _make_command(box),
            result_limit=self._limits.result_bytes,
            log_event=self._log_event,
            log_message=self._log_message,
            devices=devices,
        )
        self._box_processes.add(box_process)
        if self._groups is not None:
            self._groups.add_box(box_process.pid, box_process.start_ticks)
        nursery.start_soon(self._run_box, box_process)
        try:
            await box_process.wait_ready(self._make_hello(box))
        except BaseException:
            nursery.start_soon(box_process.stop)
            raise
        return box_process

    async def _run_box(self, box_process: "BoxProcess") -> None:
        try:
            await box_process.run()
        finally:
            self._box_processes.discard(box_process)
            if self._groups is not None:
                self._groups.remove_box(box_process.pid)
            if box_process in self._idle:
                self._idle.remove(box_process)

    def _release(self, box_process: "BoxProcess") -> None:
        """Keep a box whose job has ended for the next job, unless it has reached a limit."""
        nursery = self._nursery
        if nursery is None:
            return  # all of them are being ended
        if self.may_keep(box_process):
            box_process.mark_idle()
            self._idle.append(box_process)
            self._idle_added.set()
        elif box_process in self._box_processes:
            nursery.start_soon(box_process.stop)

    def _count_boxes(self) -> int:
        """Return how many boxes there are, without those that are being ended."""
        return sum(box_process.is_usable for box_process in self._box_processes)

    async def _end_idle_boxes(self) -> None:
        assert self._nursery is not None
        while True:
            due = self._idle[0].idle_since + self._limits.idle_timeout if self._idle else float("inf")
            if due <= trio.current_time():
                self._nursery.start_soon(self._idle.popleft().stop)
                continue
            with trio.move_on_at(due):
                await self._idle_added.wait()
            self._idle_added = trio.Event()

    async def _end_all(self) -> None:
        with trio.CancelScope(shield=True):
            self._idle.clear()
            async with trio.open_nursery() as ending:
                for box_process in self._box_processes:
                    ending.start_soon(box_process.stop)

    def _make_hello(self, box: Box) -> "BoxHello":
        from celery5.protocol.boxes.frames import VERSION, BoxHello

        return BoxHello(
            VERSION, self._worker, self._limits.result_bytes, self._get_home() if box.is_python else None
        )


class _JobsOfExecutor:
    """The jobs that an executor runs one after another, in the same box while that may go on.

    Args:
        runner: Makes their frames, and knows whether a box may go on.
        running_job: Names the next job when one has ended.
        call: The call of the first job.
    """

    def __init__(self, runner: BoxedRunner, running_job: RunningJob, call: JobCall) -> None:
        self._runner = runner
        self.running_job = running_job
        self.box, self.run = runner.make_run(call, running_job)
        assigned = running_job.delivery and running_job.delivery.assigned
        self.devices = assigned.device_names if assigned else ()
        self._is_next = False  # `run` is for another box

    def take_next(self) -> bool:
        """Return whether `run` is the next job, which needs another box than the one before."""
        is_next, self._is_next = self._is_next, False
        return is_next

    def choose_next(self, box_process: "BoxProcess", outcome: Outcome) -> "RunJob | Outcome":
        """Return what the box runs next, or the outcome with which it has ended."""
        go_on = self.running_job.go_on
        if go_on is None or not self._runner.may_keep(box_process):
            return outcome
        following = go_on(outcome)
        if not isinstance(following, JobCall):
            return following
        try:
            box, self.run = self._runner.make_run(following, self.running_job)
        except BaseException as error:  # an argument that cannot be encoded for a box with a command
            return get_error_outcome(error)
        self._is_next, self.box = box != self.box, box  # a job that takes devices follows no other
        return outcome if self._is_next else self.run


def _make_command(box: Box) -> list[str]:
    """Return the command that starts a box: a Python box directly, any other by the launcher, which becomes it."""
    worker_pid = str(os.getpid())
    if box.is_python:
        return [sys.executable, "-m", "celery5.processes.box", worker_pid]
    return [sys.executable, "-I", "-S", str(LAUNCHER), worker_pid, *box.command]


def _make_crash_outcome(error: BoxCrashed) -> Outcome:
    """Return a failed attempt whose traceback is what the box wrote last."""
    outcome = get_error_outcome(error)
    if not isinstance(outcome, Raised):
        return outcome
    return replace(outcome, failure=replace(outcome.failure, traceback=error.stderr))
