"""Measure how much CPU time jobs in threads use, while they run and at their end."""

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import msgspec

from celery5.protocol.scaling.cpu_shares import CoreWait

_get_clock: Callable[[int], int] | None = getattr(time, "pthread_getcpuclockid", None)  # not on macOS

_THREADS = "/proc/self/task"
_NANOSECOND = 1e-9


def read_core_waits() -> dict[str, CoreWait] | None:
    """Return for how long each thread of this process has waited for a core, by the thread's number.

    None where the system does not tell: Linux keeps these numbers.
    """
    waits: dict[str, CoreWait] = {}
    try:
        for thread in os.listdir(_THREADS):
            with (
                suppress(FileNotFoundError, ProcessLookupError),  # it has ended
                open(f"{_THREADS}/{thread}/schedstat", "rb", buffering=0) as file,
            ):
                _, waited, runs = map(int, file.read().split())
                waits[thread] = CoreWait(waited * _NANOSECOND, runs)
    except (OSError, ValueError):
        return None
    return waits


class CpuUse(msgspec.Struct, frozen=True):
    """What one thread used in a part of its time, in seconds."""

    cpu: float
    wall: float
    process_cpu: float  # of all threads of the process meanwhile


class CpuMeter:
    """The CPU time of one job in a thread."""

    __slots__ = ("_clock", "_cpu", "_process_cpu", "_wall", "task", "use")

    def __init__(self, task: str) -> None:
        self.task = task
        self.use: CpuUse | None = None
        """What it used since it began or was read; None until it has ended."""
        self._clock: int | None = None
        self._cpu = self._wall = self._process_cpu = 0.0

    def start(self) -> None:
        """Begin, in the thread of the job."""
        self._cpu, self._process_cpu, self._wall = (
            time.thread_time(),
            time.process_time(),
            time.perf_counter(),
        )
        if _get_clock is not None:
            self._clock = _get_clock(threading.get_ident())

    def stop(self) -> None:
        """End, in the thread of the job."""
        self._clock = None
        self.use = self._measure(time.thread_time())

    def read(self) -> CpuUse | None:
        """Return what the job has used since it began or this was called; None if it does not run.

        To be called from another thread.
        """
        clock = self._clock
        if clock is None:
            return None
        try:
            cpu = time.clock_gettime(clock)
        except OSError:  # the thread has ended
            return None
        use = self._measure(cpu)
        self._cpu, self._wall, self._process_cpu = (
            self._cpu + use.cpu,
            self._wall + use.wall,
            self._process_cpu + use.process_cpu,
        )
        return use

    def _measure(self, cpu: float) -> CpuUse:
        return CpuUse(
            max(cpu - self._cpu, 0.0),
            max(time.perf_counter() - self._wall, 0.0),
            max(time.process_time() - self._process_cpu, 0.0),
        )


class CpuMeters:
    """The meters of the jobs that run in threads of one worker.

    Args:
        observe: Called in the loop with a task and what a job of it has used so far.
        observe_end: The same for a job that has ended.
        must_measure: Returns whether a job of a task is to be measured.
    """

    def __init__(
        self,
        observe: Callable[[str, CpuUse], None],
        observe_end: Callable[[str, CpuUse], None],
        must_measure: Callable[[str], bool],
    ) -> None:
        self._must_measure = must_measure
        self._observe = observe
        self._observe_end = observe_end
        self._running: set[CpuMeter] = set()

    def add(self, task: str) -> CpuMeter | None:
        """Return the meter of a job that is about to begin; None if it is not to be measured."""
        if not self._must_measure(task):
            return None
        meter = CpuMeter(task)
        self._running.add(meter)
        return meter

    def remove(self, meter: CpuMeter) -> None:
        """Observe what a job has used since it was read. It has ended, or was abandoned."""
        self._running.discard(meter)
        if meter.use is not None:
            self._observe_end(meter.task, meter.use)

    def read(self) -> None:
        """Observe what all running jobs have used since they were read."""
        for meter in self._running:
            if (use := meter.read()) is not None:
                self._observe(meter.task, use)
