"""Recycling: when a worker process should restart, by the jobs it has done and the memory it uses."""

from collections.abc import Callable
from typing import NamedTuple

from celery5.protocol.counts import format_count

RESTART_EXIT_CODE = 75
"""The exit code of a process that asks for a restart and has not failed (EX_TEMPFAIL of sysexits.h)."""
SUPERVISED_VARIABLE = "CELERY5_SUPERVISED"
"""The environment variable of processes started by a Controller, which restarts them: they need not restart
themselves. Its value is one of the next two, or another one: then the process ends before the next one starts.
"""
STARTS_SUCCESSOR = "successor"
"""The Controller starts another process before this one is recycled, if it is asked to."""
IS_SPARE = "spare"
"""The same, and this process is such another one: it is told when it is needed no more."""
LIMIT_JITTER = 0.2
"""The largest part by which a process' limit is reduced at random, so that processes do not all restart
together.
"""
MEMORY_MARGIN = 0.1
"""The part by which the limit of memory is reduced at least: it must not be exceeded while the next process starts."""


class RecyclingLimits(NamedTuple):
    """The limits after which a process is recycled; 0: never."""

    jobs: int = 0
    memory: int = 0  # bytes


def jitter_limits(limits: RecyclingLimits, random: Callable[[], float]) -> RecyclingLimits:
    """Return the limits of one process, reduced at random by up to a fifth; that of memory by a tenth at least.

    `random` returns numbers from 0 to 1.
    """
    return RecyclingLimits(
        limits.jobs - int(limits.jobs * LIMIT_JITTER * random()),
        limits.memory - int(limits.memory * (MEMORY_MARGIN + (LIMIT_JITTER - MEMORY_MARGIN) * random())),
    )


def get_recycle_reason(limits: RecyclingLimits, *, jobs: int, memory: int) -> str:
    """Return why a process with this many jobs and bytes should be recycled; '' if it should not."""
    if limits.jobs and jobs >= limits.jobs:
        return f"it has done {format_count(jobs, 'job')}, and its limit is {limits.jobs} (max_jobs)"
    if limits.memory and jobs and memory >= limits.memory:
        return f"it takes {format_mib(memory)}, and its limit is {format_mib(limits.memory)} (max_memory)"
    return ""


def format_mib(size: int) -> str:
    """Return a size for people."""
    return f"{size / 2**20:.1f} MiB"
