"""Read the cores, the load and the memory that this machine has for this process."""

import os
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

MEMINFO = "/proc/meminfo"
"""The file in which Linux reports memory. Other systems do not have it."""
_NO_LIMIT = 2**62
"""Version 1 of control groups states a huge number of bytes where there is no limit."""
_PROC_CGROUP = "/proc/self/cgroup"


class ControlGroups(NamedTuple):
    """A tree of control groups, and the names of its files."""

    root: str
    # Its controller in `/proc/self/cgroup`.
    controller: str
    # The files of a group with its limit and its usage.
    limit_file: str
    usage_file: str
    # The line of `memory.stat` with the bytes of the usage that the kernel may drop.
    droppable: bytes


CONTROL_GROUP_TREES = (
    ControlGroups("/sys/fs/cgroup", "", "memory.max", "memory.current", b"inactive_file"),
    ControlGroups(
        "/sys/fs/cgroup/memory",
        "memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        b"total_inactive_file",
    ),
)
"""Those of version 2 and of version 1."""


class MachineReading(NamedTuple):
    """The state of the machine. What the system does not report is 0."""

    # Those that this process may use.
    cores: int
    # The average of the last minute.
    load: float
    # Bytes that are available.
    memory: int


def read_machine() -> MachineReading:
    """Return the state of the machine now. It takes some 0.2 ms."""
    memory = 0
    with suppress(OSError):
        memory = available_memory()
    return MachineReading(count_cores(), _get_load(), memory)


def available_memory() -> int:
    """Return the bytes that this process could get without swapping. Raises OSError where the system has no such file.

    The least counts of what the system has available, and what the limits of its container and its unit leave.
    """
    limits = [free for tree in CONTROL_GROUP_TREES for free in iter_free_memory(tree, _get_own_group(tree))]
    return max(min([_read_line(MEMINFO, b"MemAvailable:") * 1024, *limits]), 0)


def total_memory() -> int:
    """Return the bytes of memory that this process may use: those of the machine, of its container or its unit.

    0 if unknown.
    """
    limits: list[int] = []
    for tree in CONTROL_GROUP_TREES:
        parts = [name for name in _get_own_group(tree).split("/") if name]
        for depth in range(len(parts) + 1):
            with suppress(OSError, ValueError):
                limits.append(_read_number("/".join([tree.root, *parts[:depth], tree.limit_file])))
    with suppress(OSError):
        limits.append(_read_line(MEMINFO, b"MemTotal:") * 1024)
    return min(limits, default=0)


def used_memory() -> int:
    """Return the bytes of this process that are in memory now; 0 if unknown."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def iter_free_memory(tree: ControlGroups, group: str) -> Iterator[int]:
    """Yield the bytes that a control group leaves to its processes, and each group above it that has a limit.

    Cached files that are not in use do not count: the kernel drops them when memory is short.
    """
    parts = [name for name in group.split("/") if name]
    for depth in range(len(parts) + 1):
        folder = "/".join([tree.root, *parts[:depth]])
        with suppress(OSError, ValueError):  # the root has no such files, and one without a limit says `max`
            limit = _read_number(f"{folder}/{tree.limit_file}")
            if limit < _NO_LIMIT:
                usage = _read_number(f"{folder}/{tree.usage_file}")
                yield limit - (usage - _read_line(f"{folder}/memory.stat", tree.droppable))


def _get_own_group(tree: ControlGroups) -> str:
    """Return the control group of this process in a tree; '' for none."""
    with suppress(OSError), open(_PROC_CGROUP) as lines:
        for line in lines:
            _, controllers, group = line.rstrip("\n").split(":", 2)
            if tree.controller in controllers.split(","):
                return group
    return ""


def count_cores() -> int:
    """Return the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _get_load() -> float:
    try:
        return os.getloadavg()[0]
    except OSError:
        return 0.0


def _read_number(path: str) -> int:
    with open(path, "rb") as file:
        return int(file.read())


def _read_line(path: str, name: bytes) -> int:
    """Return the number that follows a name in a file with lines of these. Raises OSError if there is none."""
    with open(path, "rb") as lines:
        for line in lines:
            field, _, number = line.partition(b" ")
            if field == name:
                return int(number.split()[0])
    raise OSError(f"{path} does not have {name.decode()}")
