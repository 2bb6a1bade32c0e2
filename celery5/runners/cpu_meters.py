"""Measure how much CPU time jobs in threads use, while they run and at their end."""

import os
import resource
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import msgspec

from celery5.protocol.scaling.cpu_shares import CoreWait

_get_clock: Callable[[int], int] | None = getattr(time, "pthread_getcpuclockid", None)  # not on macOS

_THIS_THREAD: int | None = getattr(resource, "RUSAGE_THREAD", None)  # not on macOS

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
    pauses: int | None = None  # how often it has left its core by itself; None where that is not known


def _count_pauses() -> int | None:
    """Return how often this thread has left its core by itself since it began."""
    return None if _THIS_THREAD is None else resource.getrusage(_THIS_THREAD).ru_nvcsw


class CpuMeter:
    """The CPU time of one job in a thread.

    Args:
        task: Its task.
        is_handed_over: Whether a thread is to begin it at once, so that it waits for nothing but its wake-up.
    """

    __slots__ = (
        "_clock", "_counted", "_cpu", "_made_at", "_pauses", "_process_cpu", "_wall", "task", "uncounted_cpu", "use",
        "wake_up",
    )  # fmt: skip

    def __init__(self, task: str, *, is_handed_over: bool = False) -> None:
        self.task = task
        self.use: CpuUse | None = None
        """What it used since it began or was read; None until it has ended."""
        self.uncounted_cpu = 0.0
        """The CPU time that `count` has not returned when it ended."""
        self.wake_up: float | None = None
        """How long its thread took to wake up and get the interpreter's lock; None where that is not known."""
        self._made_at = time.perf_counter() if is_handed_over else None
        self._clock: int | None = None
        self._counted = self._cpu = self._wall = self._process_cpu = 0.0
        self._pauses: int | None = None

    def start(self) -> None:
        """Begin, in the thread of the job."""
        self._cpu, self._process_cpu, self._wall = (
            time.thread_time(),
            time.process_time(),
            time.perf_counter(),
        )
        self._counted, self._pauses = self._cpu, _count_pauses()
        if self._made_at is not None:
            self.wake_up = self._wall - self._made_at
        if _get_clock is not None:
            self._clock = _get_clock(threading.get_ident())

    def stop(self) -> None:
        """End, in the thread of the job."""
        self._clock = None
        cpu, before, now = time.thread_time(), self._pauses, _count_pauses()
        self.uncounted_cpu = max(cpu - self._counted, 0.0)
        self.use = self._measure(cpu, None if before is None or now is None else now - before)

    def count(self) -> float:
        """Return the CPU time since the job began or this was called. To be called from another thread."""
        if (cpu := self._read_clock()) is None:
            return 0.0
        before, self._counted = self._counted, cpu
        return max(cpu - before, 0.0)

    def read(self, least: float = 0.0) -> CpuUse | None:
        """Return what the job has used since it began or was read; None if it does not run, or not for `least` seconds.

        Its pauses are not known. To be called from another thread.
        """
        if time.perf_counter() - self._wall < least or (cpu := self._read_clock()) is None:
            return None
        use = self._measure(cpu, None)
        self._cpu, self._wall, self._process_cpu, self._pauses = (
            self._cpu + use.cpu,
            self._wall + use.wall,
            self._process_cpu + use.process_cpu,
            None,
        )
        return use

    def _read_clock(self) -> float | None:
        clock = self._clock
        if clock is None:
            return None
        try:
            return time.clock_gettime(clock)
        except OSError:  # the thread has ended
            return None

    def _measure(self, cpu: float, pauses: int | None) -> CpuUse:
        return CpuUse(
            max(cpu - self._cpu, 0.0),
            max(time.perf_counter() - self._wall, 0.0),
            max(time.process_time() - self._process_cpu, 0.0),
            pauses,
        )


class CpuMeters:
    """The meters of the jobs that run in threads of one worker.

    Args:
        observe: Called in the loop with a task and what a job of it has used so far.
        observe_end: Called in the loop with the meter of a job that has ended.
        must_measure: Returns whether a job of a task is to be measured.
        get_read_interval: Returns for how many seconds a job of a task runs before it is read, and until it is again.
    """

    def __init__(
        self,
        observe: Callable[[str, CpuUse], None],
        observe_end: Callable[[CpuMeter, CpuUse], None],
        must_measure: Callable[[str], bool],
        get_read_interval: Callable[[str], float],
    ) -> None:
        self._must_measure = must_measure
        self._observe = observe
        self._observe_end = observe_end
        self._get_read_interval = get_read_interval
        self._running: set[CpuMeter] = set()

    def add(self, task: str, *, is_handed_over: bool = False) -> CpuMeter | None:
        """Return the meter of a job that is about to begin; None if it is not to be measured."""
        if not self._must_measure(task):
            return None
        meter = CpuMeter(task, is_handed_over=is_handed_over)
        self._running.add(meter)
        return meter

    def remove(self, meter: CpuMeter) -> None:
        """Observe what a job has used since it was read. It has ended, or was abandoned."""
        self._running.discard(meter)
        if meter.use is not None:
            self._observe_end(meter, meter.use)

    def read(self) -> float:
        """Observe what the running jobs have used so far. Return their CPU time since this was called, of all jobs."""
        cpu = 0.0
        for meter in self._running:
            cpu += meter.count()
            if (use := meter.read(self._get_read_interval(meter.task))) is not None:
                self._observe(meter.task, use)
        return cpu
