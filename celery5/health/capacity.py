"""Find out what this machine has for a worker: cores, memory and NVIDIA GPUs."""

import os
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple

from celery5.errors import Misconfigured
from celery5.health.machine import count_cores, total_memory
from celery5.protocol.scaling.resource_budget import (
    DEVICES,
    UNIT,
    Amounts,
    parse_capacity,
    share_capacity,
    show,
)
from celery5.similar_names import did_you_mean

SMI_LIMIT = 5.0
"""Seconds that `nvidia-smi` may take: it hangs where a driver is broken."""
_SMI = ("nvidia-smi", "--query-gpu=index,uuid,memory.total", "--format=csv,noheader,nounits")
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_GIB = 2**30


class Gpu(NamedTuple):
    """A GPU of this machine."""

    number: str
    uuid: str
    mebibytes: float


class WorkerCapacity(NamedTuple):
    """The capacity and the devices of one process."""

    amounts: Amounts
    # The number of each device in this process, and its name in CUDA_VISIBLE_DEVICES of another process.
    devices: tuple[tuple[int, str], ...]


def find_capacity(setting: str | Mapping[str, Any], number: int = 1, processes: int = 1) -> WorkerCapacity:
    """Return the capacity of process `number`, by the setting `capacity`. The first call may take SMI_LIMIT seconds.

    Raises:
        Misconfigured: The setting is invalid, or `auto` names a resource that cannot be detected.
    """
    given = parse_capacity(setting)
    if not given:
        return WorkerCapacity({}, ())
    amounts: dict[str, int] = {}
    for name, amount in given.items():
        if not name:
            amounts |= {found: most for found, most in _find_all().items() if most and found not in given}
        else:
            amounts[name] = amount if isinstance(amount, int) else _find(name)
    names = _list_device_names(amounts.get(DEVICES, 0) // UNIT)
    devices = tuple(list(enumerate(names))[number - 1 :: processes])
    return WorkerCapacity(share_capacity(amounts, number, processes), devices)


def _find(name: str) -> int:
    if name not in _FOUND:
        known = ", ".join(_FOUND)
        suggestion = did_you_mean(name, _FOUND, otherwise="give a number")
        raise Misconfigured(f"capacity: {name}=auto: only {known} can be detected: {suggestion}")
    return _find_all()[name]


def _find_all() -> dict[str, int]:
    gpus = _list_visible_gpus()
    return {
        "cpu": count_cores() * UNIT,
        "memory_gb": total_memory() * UNIT // _GIB,
        DEVICES: len(gpus) * UNIT,
        "vram_gb": sum(int(gpu.mebibytes * UNIT) // 1024 for gpu in gpus),
    }


_FOUND = ("cpu", "memory_gb", DEVICES, "vram_gb")


def _list_visible_gpus() -> list[Gpu]:
    """Return the GPUs that CUDA shows this process, in its order. CUDA stops at the first unknown name."""
    gpus, visible = _list_gpus(os.environ.get("PATH", "")), os.environ.get(_VISIBLE)
    if visible is None:
        return list(gpus)
    found: list[Gpu] = []
    for name in _split(visible):
        gpu = next((gpu for gpu in gpus if gpu.number == name or gpu.uuid.startswith(name)), None)
        if gpu is None:
            break
        found.append(gpu)
    return found


def _split(visible: str) -> list[str]:
    return [name.strip() for name in visible.split(",") if name.strip()]


def _list_device_names(count: int) -> list[str]:
    visible = os.environ.get(_VISIBLE)
    if visible is None:
        return [str(number) for number in range(count)]
    names = _split(visible)
    if len(names) < count:
        raise Misconfigured(
            f"capacity: {DEVICES} is {show(count * UNIT)}, but {_VISIBLE} names {len(names)}: give as many"
        )
    return names[:count]


@cache
def _list_gpus(path: str) -> tuple[Gpu, ...]:
    """Return the GPUs that `nvidia-smi` on a PATH knows; none if it is missing or fails."""
    del path
    with suppress(OSError, subprocess.SubprocessError, ValueError):
        done = subprocess.run(
            _SMI, capture_output=True, text=True, timeout=SMI_LIMIT, check=True, stdin=subprocess.DEVNULL
        )
        rows = [
            [cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines() if line.strip()
        ]
        return tuple(Gpu(number, uuid, _read_mebibytes(memory)) for number, uuid, memory in rows)
    return ()


def _read_mebibytes(text: str) -> float:
    """Return a number of MiB; 0 for `[N/A]`, as GPUs say that share the memory of the machine."""
    try:
        return float(text)
    except ValueError:
        return 0.0
