"""Machine: what this machine has, and has left: cores, load, memory.

Floor: services. Reads: /proc, and the limits of the control group that this process is in. Writes: nothing.
"""

import os
from contextlib import suppress
from typing import NamedTuple

_MEMINFO = "/proc/meminfo"
_GROUP = "/sys/fs/cgroup"


class Machine(NamedTuple):
    """`cores` that this process may use, the `load` average of the last minute, bytes of `memory` that are left."""

    cores: int
    load: float
    memory: int


def look_at_machine() -> Machine:
    """How things are now. It takes some 50 us. What a system does not tell is 0."""
    return Machine(_cores(), _load(), _memory())


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _load() -> float:
    try:
        return os.getloadavg()[0]
    except OSError:
        return 0.0


def _memory() -> int:
    """What the system has left, or what a container may still take, whichever is less."""
    left = [each for each in (_system_memory(), _group_memory()) if each is not None]
    return max(min(left, default=0), 0)


def _system_memory() -> int | None:
    with suppress(OSError, ValueError), open(_MEMINFO, "rb") as lines:
        for line in lines:
            if line.startswith(b"MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


def _group_memory() -> int | None:
    with suppress(OSError, ValueError):
        limit = _number("memory.max")
        return limit - _number("memory.current")
    return None


def _number(name: str) -> int:
    with open(f"{_GROUP}/{name}", "rb") as file:
        return int(file.read())
