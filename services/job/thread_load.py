"""Which `def` jobs run in the threads of this process, and whether one more may begin.

The decisions are in `celery5.protocol.scaling.cpu_shares`. They hold where the number of threads follows the jobs
(`cpu_slots="auto"`), and for all incarnations of a process together.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

import trio

from celery5.protocol.job.delivery import Delivery
from celery5.protocol.scaling.cpu_shares import CoreWait, CpuShares, find_core_wait, find_waiting_time
from celery5.protocol.scaling.prefetch import DurationEstimate
from celery5.runners.cpu_meters import CpuMeter, CpuMeters, CpuUse, read_core_waits

FIRST_READING = 0.01
"""Seconds after which a job is measured whose task is not known yet: others wait for what it does."""
SHORT = 0.001
"""Seconds of short jobs that may wait for a thread at most, and the longest that such a job may take."""
MAX_AHEAD = 32
"""The most jobs that wait for a thread behind those that run."""
READING_INTERVAL = 0.1
"""Seconds between measurements of the jobs that run."""
LONG = 0.25
"""Seconds for which a job of a known task runs before it is learned from: at its end more is known."""
IDLE_PROCESS = 0.02
"""The CPU time of the process, in cores, below which it says nothing that its threads wait for cores."""


MEASURING_INTERVAL = 0.001
"""Seconds after a job of a short task was measured in which others are not: it takes a tenth of such a job's time."""
CORE_READING_COST = 0.03
"""The largest part of the time that goes into reading for how long threads wait for cores: it is a file for each."""


class _Reading(NamedTuple):
    """What the process has used so far, in seconds."""

    time: float
    cpu: float


def _read_process() -> _Reading:
    return _Reading(time.perf_counter(), time.process_time())


class _CoreWaits:
    """For how long the threads of the process wait for cores."""

    def __init__(self) -> None:
        self._cpu = self._next_at = 0.0
        self._waits: dict[str, CoreWait] | None = None

    def read(self) -> tuple[float, float] | None:
        """Return for how long they have waited since the last reading, and the CPU time since then.

        None where that is not known, and before the next reading is due: with many threads it takes longer.
        """
        begun = time.perf_counter()
        if begun < self._next_at:
            return None
        waits, cpu = read_core_waits(), time.process_time()
        self._next_at = begun + (time.perf_counter() - begun) / CORE_READING_COST
        before, self._waits = self._waits, waits
        cpu_before, self._cpu = self._cpu, cpu
        return None if before is None or waits is None else (find_core_wait(before, waits), cpu - cpu_before)


class Rechecked(Protocol):
    """A queue whose next job may fit now."""

    def recheck(self) -> None: ...


class ThreadLoad:
    """The jobs in threads, by task, and the CPU shares of their tasks."""

    def __init__(self) -> None:  # without parameters, for the injector
        self.shares = CpuShares(cores=1)
        self.meters = CpuMeters(self._observe, self._observe_end, self._must_measure, self._get_read_interval)
        self.is_limiting = False
        """Whether it decides how many jobs run."""
        self._running: Counter[str] = Counter()
        self._tasks: dict[trio.lowlevel.Task, str | None] = {}
        self._slots = 1
        self._durations: dict[str, DurationEstimate] = {}
        self._measured_at: dict[str, float] = {}
        self._may_wait: Callable[[Delivery], bool] | None = None
        self._ahead: dict[Delivery, int] = {}
        self._ahead_count = 0
        self._is_stalled = False
        self._has_short_tasks = trio.Event()
        self._queues: list[Rechecked] = []
        self._begun = trio.Event()
        self._learned = trio.Event()
        self._cpu = 0.0
        self._reading = _Reading(0.0, 0.0)
        self._core_waits = _CoreWaits()

    def limit(self, cores: int | None) -> None:
        """Let this many jobs run always, and others by their shares; None: let all run."""
        self.is_limiting = cores is not None
        if cores is not None:
            self.shares.set_cores(cores)
        self.recheck()

    @property
    def spare_executors(self) -> int:
        """How many executors there are beyond the slots, for jobs that wait: none until a short task is known."""
        return MAX_AHEAD if self._has_short_tasks.is_set() else 0

    async def wait_for_short_tasks(self) -> None:
        """Wait until a task is known whose jobs are short."""
        await self._has_short_tasks.wait()

    def set_slots(self, slots: int) -> None:
        """Set how many jobs may run at once."""
        self._slots = slots

    def allow_waiting(self, may_wait: Callable[[Delivery], bool]) -> None:
        """Let short jobs wait for a thread behind those that run: those for which `may_wait` returns True."""
        self._may_wait = may_wait

    def may_begin(self, delivery: Delivery) -> bool:
        """Return whether an executor may take a job: a slot is free, or the job is short and may wait for one."""
        if len(self._tasks) < self._slots:
            return self.fits("" if delivery.command is None else delivery.command.task)
        return self._may_wait is not None and self.may_follow(delivery) and self._may_wait(delivery)

    def may_follow(self, delivery: Delivery) -> bool:
        """The same, for a job of which it is known that it may wait."""
        task = "" if delivery.command is None else delivery.command.task
        waiting = len(self._tasks) - self._slots
        if waiting < 0:
            return self.fits(task)
        return not self._is_stalled and waiting < self._count_ahead(task)

    def _count_ahead(self, task: str) -> int:
        """Return how many jobs of a task may wait for a thread."""
        estimate = self._durations.get(task)
        if estimate is None or estimate.mean is None or estimate.mean >= SHORT:
            return 0
        return min(MAX_AHEAD, int(self._slots * SHORT / max(estimate.mean, 1e-6)))

    def take(self, executor: trio.lowlevel.Task, delivery: Delivery) -> None:
        """Count a job that an executor takes."""
        if len(self._tasks) < self._slots:
            self.begin(executor, "" if delivery.command is None else delivery.command.task)
            return
        self._ahead_count += 1
        self._ahead[delivery] = self._ahead_count
        self._tasks[executor] = None  # it takes the slot of one that runs now

    def is_ahead(self, delivery: Delivery) -> bool:
        """Return whether a job was taken though no slot was free."""
        return delivery in self._ahead

    def finish_waiting(self, delivery: Delivery) -> int:
        """Return the number of a job among those that were taken without a slot, and forget it; 0 for any other."""
        return self._ahead.pop(delivery, 0)

    def note_stall(self, executor: trio.lowlevel.Task) -> None:
        """Let no job wait until another one has ended: those that run take long, and this executor has no job now."""
        self._tasks.pop(executor, None)
        self._is_stalled = True

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
        if executor is None or executor not in self._tasks:
            return
        self._is_stalled = False
        task = self._tasks.pop(executor)
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
            self._core_waits.read()
        self._learned = trio.Event()
        is_known = all(map(self.shares.is_known, self._running))
        due = trio.current_time() + (READING_INTERVAL if is_known else FIRST_READING)
        with trio.move_on_at(due) as scope:
            await self._learned.wait()
        self._observe_process(trio.current_time() - due if scope.cancelled_caught else None)
        self._cpu += self.meters.read()
        self.recheck()

    def _observe_process(self, lateness: float | None) -> None:
        """Learn from what the whole process has used since it was read, and from how late the loop was."""
        before, now = self._reading, _read_process()
        passed, used = now.time - before.time, now.cpu - before.cpu
        if passed < FIRST_READING / 2:
            return
        if (core_wait := self._core_waits.read()) is not None and used > IDLE_PROCESS * passed:
            self.shares.observe_core_wait(core_wait[0], process_cpu=core_wait[1])
        if lateness is not None:
            self.shares.observe_lateness(lateness, cpu=self._cpu / passed, process_cpu=used / passed)
        self._cpu, self._reading = 0.0, now

    def _observe_end(self, meter: CpuMeter, use: CpuUse) -> None:
        """Learn from a job that has ended."""
        if meter.wake_up is not None:
            self.shares.observe_wake_up(meter.wake_up)
        lock_wait = self.shares.find_lock_wait(use.pauses)
        waiting = find_waiting_time(use.cpu, use.wall, use.process_cpu, lock_wait)
        self.learn_duration(meter.task, use.cpu + waiting)
        self._cpu += meter.uncounted_cpu
        self._observe(meter.task, use)

    def _get_read_interval(self, task: str) -> float:
        return LONG if self.shares.is_known(task) else 0.0

    def _must_measure(self, task: str) -> bool:
        """Return whether to measure a job that is about to begin: of a short task not each one."""
        estimate, now = self._durations.get(task), time.perf_counter()
        if (
            estimate is not None
            and estimate.mean is not None
            and estimate.mean < SHORT
            and now - self._measured_at.get(task, 0.0) < MEASURING_INTERVAL
        ):
            return False
        self._measured_at[task] = now
        return True

    def learn_duration(self, task: str, seconds: float) -> None:
        """Learn how long one job of a task has computed and waited, without the time in which it waited to compute."""
        estimate = self._durations.setdefault(task, DurationEstimate(horizon=SHORT))
        estimate.record(seconds)
        if estimate.mean is not None and estimate.mean < SHORT and not self._has_short_tasks.is_set():
            self._has_short_tasks.set()

    def _observe(self, task: str, use: CpuUse) -> None:
        is_known = self.shares.is_known(task)
        self.shares.observe(task, cpu=use.cpu, wall=use.wall, process_cpu=use.process_cpu, pauses=use.pauses)
        if not is_known:
            self._learned.set()

    def recheck(self) -> None:
        """Have the queues look at their next jobs again."""
        for queue in self._queues:
            queue.recheck()
