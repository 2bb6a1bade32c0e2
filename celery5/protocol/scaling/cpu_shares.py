"""Decide how many `def` jobs may run at once in one worker, from what share of their time they compute.

Only one thread runs Python code at a time. Jobs that wait for a database or another machine can run by the hundred;
jobs that compute gain nothing from more threads than cores, and delay the worker's own loop. So a job counts with its
*CPU share*: the part of its run in which it computes, from 0 to 1. The share of a task is learned from its jobs.

As many jobs as there are cores may always run. The others may compute for half a core together (HEADROOM), and for what
those of the cores leave of the interpreter: the jobs with the largest shares count as those of the cores.
"""

import math
import sys
from collections import deque
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import NamedTuple

HEADROOM = 0.5
"""The share of one core that all jobs beyond the number of cores may use together."""
UNKNOWN_SHARE = 1.0
"""The share of a task of which nothing is known: its first jobs may compute, and what has begun cannot be undone."""
MIN_SHARE = 0.0005
"""The least share: a job that only waits costs something too."""
KEEP = 0.9
"""How much of what was learned before counts beside one more observation. It weighs by its time."""
MAX_OBSERVED = 1.0
"""The most seconds that one observation weighs, or one long job would count for hundreds of short ones."""
MAX_BUSY = 0.98
"""The largest part of the time in which other threads count as computing: something is left for this one."""
LATE = 0.02
"""Seconds by which the loop wakes up too late when too many threads compute."""
CAUSED = 0.5
"""The least part of the CPU time of the process that its threads have used, if they are why the loop is late."""
LEAST_CPU = 0.25
"""The least CPU time of the threads for that, in cores."""
WAKE_UP = 0.0005
"""Seconds between the wake-up of a thread and its getting a core that do not count as waiting for a core. On an idle
machine it takes about 0.1 ms, often more, and threads that wait for I/O wake up often."""
MAX_PRESSURE = 64.0
MAX_STRETCH = 10.0
_PRESSURE_DECAY = 0.95
_STRETCH_DECAY = 0.2
_WAKE_UP_RISE = 0.5
_WAKE_UP_DECAY = 0.1
_RECENT_JOBS = 32


class CpuShares:
    """The learned CPU shares of tasks, and how many of their jobs may run at once.

    The time in which a job waits is not measured: it is what is left of its run, where it neither computes nor waits
    to compute. A thread waits to compute when it wakes up, and when another takes its turn. How often that was is
    counted at the end of a job (`pauses`), and how long it takes each time is known from the threads that begin a job
    (`wake_up`). While a job runs only the CPU time that the other threads used is known: if they and it took turns all
    the time, what it computed took as many times longer as there was less time left for it. But threads that each
    compute for a millisecond may never meet.

    Where other processes keep the machine busy, all threads also wait for a core, which is measured: everything that is
    computed takes as many times longer (`stretch`). Where it is not measured, such jobs look like ones that wait for a
    database. Then too many run, and the loop, which needs a core too, wakes up late: that raises all shares
    (`pressure`).
    """

    def __init__(self, *, cores: int) -> None:
        self.cores = cores
        self.pressure = 1.0
        """The factor on all shares: above 1 after the loop was late because of these jobs."""
        self.wake_up: float | None = None
        """How long a thread takes to wake up and get the interpreter's lock, in seconds; None until it is known."""
        self.stretch = 1.0
        """How many times longer computing takes than the CPU time it uses: the process waits for cores."""
        self._sums: dict[str, tuple[float, float]] = {}
        self._lateness = 0.0
        self._recent: deque[str] = deque(maxlen=_RECENT_JOBS)

    def set_cores(self, cores: int) -> None:
        """Set how many jobs may always run."""
        self.cores = cores

    def is_known(self, task: str) -> bool:
        """Return whether the share of a task was learned."""
        return task in self._sums

    def get_share(self, task: str) -> float:
        """Return the CPU share with which a job of a task counts."""
        sums = self._sums.get(task)
        if sums is None:
            return UNKNOWN_SHARE
        return min(max(sums[0] / (sums[0] + sums[1]) * self.pressure, MIN_SHARE), 1.0)

    def get_known_shares(self) -> dict[str, float]:
        """Return the learned shares by task."""
        return {task: self.get_share(task) for task in self._sums}

    def observe(
        self, task: str, *, cpu: float, wall: float, process_cpu: float, pauses: int | None = None
    ) -> None:
        """Learn from a job, or from a part of its run.

        Args:
            task: Its task.
            cpu: The CPU time of its thread, in seconds.
            wall: How long that took.
            process_cpu: The CPU time of the whole process meanwhile.
            pauses: How often its thread has left its core by itself meanwhile; None where that is not known.
        """
        if wall <= 0:
            return
        weight = min(1.0, MAX_OBSERVED / wall)
        before = self._sums.get(task, (0.0, 0.0))
        waiting = weight * find_waiting_time(
            cpu * self.stretch, wall, process_cpu * self.stretch, self.find_lock_wait(pauses)
        )
        computing = weight * cpu
        if computing + waiting > 0:
            self._sums[task] = (before[0] * KEEP + computing, before[1] * KEEP + waiting)

    def observe_wake_up(self, seconds: float) -> None:
        """Learn from how long a thread took to wake up and get the interpreter's lock."""
        before = seconds if self.wake_up is None else self.wake_up
        self.wake_up = before + (seconds - before) * (_WAKE_UP_RISE if seconds > before else _WAKE_UP_DECAY)

    def find_lock_wait(self, pauses: int | None) -> float | None:
        """Return for how long a thread that has left its core so often has waited for the interpreter's lock.

        It leaves it once to wait for something, again to wait for the lock, and again each time another thread has
        not let go of that for a switch interval. None if that is not known.
        """
        if pauses is None or self.wake_up is None:
            return None
        return self.wake_up * pauses / (2.0 + self.wake_up / sys.getswitchinterval())

    def observe_core_wait(self, seconds: float, *, process_cpu: float) -> None:
        """Learn for how long the threads of the process waited for a core.

        Args:
            seconds: How long, all together, since the last call.
            process_cpu: The CPU time of the process in that time.
        """
        factor = 1.0 + seconds / process_cpu if process_cpu > 0 else 1.0
        before, now = self.stretch, min(factor, MAX_STRETCH)
        self.stretch = now if now > before else before + (now - before) * _STRETCH_DECAY

    def observe_lateness(self, seconds: float, *, cpu: float, process_cpu: float) -> None:
        """Learn by how much the loop woke up too late, and adapt the pressure.

        Args:
            seconds: How late it was.
            cpu: The CPU time that jobs in threads have used since the last call, in cores.
            process_cpu: That of the whole process.
        """
        self._lateness += (seconds - self._lateness) * 0.3
        if self._lateness > LATE and cpu >= LEAST_CPU and cpu >= CAUSED * process_cpu:
            self.pressure = min(self.pressure * 2, MAX_PRESSURE)
        else:
            self.pressure = max(self.pressure * _PRESSURE_DECAY, 1.0)

    def note_begin(self, task: str) -> None:
        """Note that a job begins: the next ones are probably like the last ones."""
        self._recent.append(task)

    def fits(self, running: Mapping[str, int], task: str) -> bool:
        """Return whether one more job may begin.

        Args:
            running: The jobs that run in threads, by task.
            task: The task of the next one.
        """
        if sum(running.values()) < self.cores:
            return True
        return self._get_excess({**running, task: running.get(task, 0) + 1}) <= HEADROOM

    def count_slots(self, running: Mapping[str, int], waiting: Iterable[str], *, maximum: int) -> int:
        """Return how many jobs may run at once, with those that run.

        Args:
            running: The jobs that run in threads, by task.
            waiting: The tasks of those that wait, in order. If all of them fit, more jobs are like the last ones.
            maximum: The most there may be.
        """
        counts, slots = dict(running), sum(running.values())
        for task in islice(waiting, max(maximum - slots, 0)):
            if not self.fits(counts, task):
                return max(min(slots, maximum), self.cores)
            counts[task] = counts.get(task, 0) + 1
            slots += 1
        recent_share = self._get_recent_share()
        left = HEADROOM - self._get_excess(counts, recent_share)
        more = max(self.cores - slots, 0) + max(math.floor(left / recent_share + 1e-9), 0)
        return max(min(slots + more, maximum), self.cores)

    def _get_excess(self, counts: Mapping[str, int], next_share: float = 0.0) -> float:
        """Return how much the jobs beyond the number of cores compute more than those of the cores leave them.

        Args:
            counts: The jobs, by task.
            next_share: The share of those that come to the cores that are free.
        """
        free_cores, total, excess = self.cores, 0.0, 0.0
        for share, count in sorted(
            ((self.get_share(task), count) for task, count in counts.items()), reverse=True
        ):
            on_cores = min(count, free_cores)
            free_cores -= on_cores
            total += on_cores * share
            excess += (count - on_cores) * share
        return excess - max(1.0 - total - free_cores * next_share, 0.0)

    def _get_recent_share(self) -> float:
        """Return the mean share of the jobs that began last."""
        recent = [self.get_share(task) for task in self._recent]
        return sum(recent) / len(recent) if recent else UNKNOWN_SHARE


class CoreWait(NamedTuple):
    """What a thread has spent on waiting for a core since it began."""

    seconds: float
    # How often it got a core.
    runs: int


def find_core_wait(before: Mapping[str, CoreWait], now: Mapping[str, CoreWait]) -> float:
    """Return for how many seconds threads had to wait for a core, all together, since they were looked at before.

    The time that waking up takes does not count.
    """
    waited = 0.0
    for thread, wait in now.items():
        earlier = before.get(thread, CoreWait(0.0, 0))
        waited += max(wait.seconds - earlier.seconds - WAKE_UP * (wait.runs - earlier.runs), 0.0)
    return waited


def find_waiting_time(cpu: float, wall: float, process_cpu: float, lock_wait: float | None = None) -> float:
    """Return for how much of `wall` a thread with this CPU time waited for something else than to compute.

    Args:
        cpu: Its CPU time.
        wall: The time that passed.
        process_cpu: The CPU time of the whole process meanwhile.
        lock_wait: For how long it waited for the interpreter's lock; None if that is not known.
    """
    if lock_wait is None:
        busy = min(max(process_cpu - cpu, 0.0) / wall, MAX_BUSY)
        lock_wait = cpu / (1.0 - busy) - cpu
    return max(wall - cpu - lock_wait, 0.0)
