"""Which `def` jobs run in the threads of this process, and whether one more may begin.

The decisions are in `celery5.protocol.scaling.cpu_shares`. They hold where the number of threads follows the jobs
(`cpu_slots="auto"`), and for all incarnations of a process together.
"""

import time
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple, Protocol

import trio

from celery5.protocol.scaling.cpu_shares import CpuShares
from celery5.runners.cpu_meters import CpuMeters, CpuUse, read_core_wait

FIRST_READING = 0.01
"""Seconds after which a job is measured whose task is not known yet: others wait for what it does."""
READING_INTERVAL = 0.1
"""Seconds between measurements of the jobs that run."""
IDLE_PROCESS = 0.02
"""The CPU time of the process, in cores, below which it says nothing that its threads wait for cores."""


class _Reading(NamedTuple):
    """What the process has used so far, in seconds."""

    time: float
    cpu: float
    core_wait: float | None


def _read_process() -> _Reading:
    return _Reading(time.perf_counter(), time.process_time(), read_core_wait())


class Rechecked(Protocol):
    """A queue whose next job may fit now."""

    def recheck(self) -> None: ...


class ThreadLoad:
    """The jobs in threads, by task, and the CPU shares of their tasks."""

    def __init__(self) -> None:  # without parameters, for the injector
        self.shares = CpuShares(cores=1)
        self.meters = CpuMeters(self._observe)
        self.is_limiting = False
        """Whether it decides how many jobs run."""
        self._running: Counter[str] = Counter()
        self._tasks: dict[trio.lowlevel.Task, str] = {}
        self._queues: list[Rechecked] = []
        self._begun = trio.Event()
        self._learned = trio.Event()
        self._cpu = 0.0
        self._reading = _Reading(0.0, 0.0, None)

    def limit(self, cores: int | None) -> None:
        """Let this many jobs run always, and others by their shares; None: let all run."""
        self.is_limiting = cores is not None
        if cores is not None:
            self.shares.set_cores(cores)
        self.recheck()

    def add_queue(self, queue: Rechecked) -> None:
        """Have a queue look at its next job again when more may fit."""
        self._queues.append(queue)

    def remove_queue(self, queue: Rechecked) -> None:
        """Forget a queue."""
        if queue in self._queues:
            self._queues.remove(queue)

    def fits(self, task: str) -> bool:
        """Return whether a job of a task may begin."""
        return not self.is_limiting or self.shares.fits(self._running, task)

    def begin(self, executor: trio.lowlevel.Task, task: str) -> None:
        """Count a job that an executor takes."""
        self._tasks[executor] = task
        self._running[task] += 1
        if self.is_limiting:
            self.shares.note_begin(task)
            self._begun.set()

    def end(self, executor: trio.lowlevel.Task | None) -> None:
        """Count the job of an executor no more, if it has one."""
        task = self._tasks.pop(executor, None) if executor is not None else None
        if task is not None:
            self._running[task] -= 1
            if not self._running[task]:
                del self._running[task]

    def count(self) -> int:
        """Return how many jobs run in threads."""
        return sum(self._running.values())

    def count_slots(self, waiting: Iterable[str], *, maximum: int) -> int:
        """Return how many jobs may run at once now, with the tasks of those that wait."""
        return self.shares.count_slots(self._running, waiting, maximum=maximum)

    @property
    def _is_busy(self) -> bool:
        return self.is_limiting and bool(self._running)

    async def wait_for_reading(self) -> None:
        """Wait until jobs run and it is time to measure them, or a task has become known; then measure them."""
        if not self._is_busy:
            while not self._is_busy:
                if self._begun.is_set():
                    self._begun = trio.Event()
                await self._begun.wait()
            self._reading = _read_process()
        self._learned = trio.Event()
        is_known = all(map(self.shares.is_known, self._running))
        due = trio.current_time() + (READING_INTERVAL if is_known else FIRST_READING)
        with trio.move_on_at(due) as scope:
            await self._learned.wait()
        self._observe_process(trio.current_time() - due if scope.cancelled_caught else None)
        self.meters.read()
        self.recheck()

    def _observe_process(self, lateness: float | None) -> None:
        """Learn from what the whole process has used since it was read, and from how late the loop was."""
        before, now = self._reading, _read_process()
        passed, used = now.time - before.time, now.cpu - before.cpu
        if passed < FIRST_READING / 2:
            return
        if now.core_wait is not None and before.core_wait is not None and used > IDLE_PROCESS * passed:
            self.shares.observe_core_wait(max(now.core_wait - before.core_wait, 0.0), process_cpu=used)
        if lateness is not None:
            self.shares.observe_lateness(lateness, cpu=self._cpu / passed, process_cpu=used / passed)
        self._cpu, self._reading = 0.0, now

    def _observe(self, task: str, use: CpuUse) -> None:
        is_known = self.shares.is_known(task)
        self.shares.observe(task, cpu=use.cpu, wall=use.wall, process_cpu=use.process_cpu)
        self._cpu += use.cpu
        if not is_known:
            self._learned.set()

    def recheck(self) -> None:
        """Have the queues look at their next jobs again."""
        for queue in self._queues:
            queue.recheck()
