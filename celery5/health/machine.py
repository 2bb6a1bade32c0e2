"""Machine: what this machine has, and has left for this process: cores, load, memory."""

import os
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

MEMINFO = "/proc/meminfo"
"""Where Linux says how much memory there is. Elsewhere there is no such file."""
_NO_LIMIT = 2**62
"""The first version says no word for it, but a number of bytes that nobody has."""
_PROC_CGROUP = "/proc/self/cgroup"


class ControlGroups(NamedTuple):
    """A tree of control groups: its `root`, what `/proc/self/cgroup` calls it, each group's files for its limit and
    what is taken of it, and the line of `memory.stat` for what of that the kernel may drop."""

    root: str
    called: str
    limit: str
    taken: str
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
"""Of Linux' second version, and of its first."""


class MachineReading(NamedTuple):
    """`cores` that this process may use, the `load` average of the last minute, bytes of `memory` that are left."""

    cores: int
    load: float
    memory: int


def read_machine() -> MachineReading:
    """How things are now. It takes some 0.2 ms. What a system does not tell is 0."""
    memory = 0
    with suppress(OSError):
        memory = available_memory()
    return MachineReading(_cores(), _load(), memory)


def available_memory() -> int:
    """Bytes that this process could get without swapping: what the system has left, or what the limit of a container
    or a unit leaves, whichever is least. Raises OSError where nobody says."""
    limits = [left for tree in CONTROL_GROUP_TREES for left in iter_free_memory(tree, _own_group(tree))]
    return max(min([_left_in_system(), *limits]), 0)


def used_memory() -> int:
    """Bytes of this process that are in memory now; 0 where nobody says."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def iter_free_memory(tree: ControlGroups, group: str) -> Iterator[int]:
    """Bytes that a control group, and each above it that has a limit, leaves to its processes.

    Files that were read and that nobody uses do not count as taken: the kernel drops them when memory is short.
    """
    parts = [each for each in group.split("/") if each]
    for depth in range(len(parts) + 1):
        folder = "/".join([tree.root, *parts[:depth]])
        with suppress(OSError, ValueError):  # the root has no such files, and one without a limit says `max`
            limit = _number(f"{folder}/{tree.limit}")
            if limit < _NO_LIMIT:
                taken = _number(f"{folder}/{tree.taken}") - _line(f"{folder}/memory.stat", tree.droppable)
                yield limit - taken


def _own_group(tree: ControlGroups) -> str:
    """The control group of this process in such a tree; '' where there is none."""
    with suppress(OSError), open(_PROC_CGROUP) as lines:
        for line in lines:
            _, called, group = line.rstrip("\n").split(":", 2)
            if tree.called in called.split(","):
                return group
    return ""


def _left_in_system() -> int:
    return _line(MEMINFO, b"MemAvailable:") * 1024


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _load() -> float:
    try:
        return os.getloadavg()[0]
    except OSError:
        return 0.0


def _number(path: str) -> int:
    with open(path, "rb") as file:
        return int(file.read())


def _line(path: str, name: bytes) -> int:
    """The number behind a name in a file of such lines. Raises OSError when it is not there."""
    with open(path, "rb") as lines:
        for line in lines:
            found, _, number = line.partition(b" ")
            if found == name:
                return int(number.split()[0])
    raise OSError(f"{path} does not say {name.decode()}")
