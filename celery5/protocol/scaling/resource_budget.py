"""Decide which jobs begin by the resources that they take of a worker's capacity, such as GPUs and their memory.

Amounts are whole ten-thousandths: sums of fractions such as 0.1 are exact. A job takes all that it needs at once, so
that jobs cannot wait for each other. While a job that does not fit waits, a few later jobs that fit may begin. Then its
needs are kept free for it. So small jobs do not starve a large one, and use what a large one leaves.
"""

import math
import re
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, Literal, cast

import msgspec

from celery5.errors import Misconfigured
from celery5.protocol.counts import format_count
from celery5.protocol.text_values import parse_assignments
from celery5.similar_names import join_names

UNIT = 10_000
"""Ten-thousandths in 1: amounts are whole numbers of ten-thousandths."""
MAX_AMOUNT = 1e12
DEVICES = "gpu"
"""The resource whose units have numbers. A job gets the numbers of its units; a part of a unit is of a single unit."""
AUTO = "auto"
LOOKAHEAD = 8
"""The number of later jobs that may begin before a job that does not fit yet."""
Amounts = Mapping[str, int]
"""Ten-thousandths by the name of the resource."""
NOTHING: Amounts = MappingProxyType({})
_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")
_HINT = "write gpu=2 vram_gb=24 or gpu=auto"


def parse_needs(value: object, where: str) -> Amounts:
    """Return what each job takes, from numbers by name. Raises Misconfigured, which begins with `where`."""
    needs = {name: _parse_amount(name, amount, where) for name, amount in _check_names(value, where)}
    for name, amount in needs.items():
        if not amount:
            raise Misconfigured(f"{where}: {name} is 0: leave it out")
    devices = needs.get(DEVICES, 0)
    if devices > UNIT and devices % UNIT:
        raise Misconfigured(f"{where}: {DEVICES} is {show(devices)}: give a part of one, or a whole number")
    return needs


def parse_size(value: object, where: str) -> Amounts:
    """Return what something takes while it is open, from numbers by name. Raises Misconfigured."""
    size = parse_needs(value, where)
    if DEVICES in size:
        raise Misconfigured(
            f"{where}: {DEVICES} has no place in a size: a task takes it, by resources={{{DEVICES!r}: 1}}"
        )
    return size


def parse_capacity(value: "str | Mapping[str, Any]") -> dict[str, int | Literal["auto"]]:
    """Return the capacity in `gpu=2 vram_gb=auto` or in a table: ten-thousandths, or `auto`, by name.

    `auto` without a name stands for all resources that can be detected: its name is ''. Raises Misconfigured.
    """
    where = "capacity"
    if isinstance(value, str):
        if value.lstrip().startswith(("{", "[")):
            raise Misconfigured(f"{value!r} is JSON, which is not read here: {_HINT}")
        words = parse_assignments(value, _HINT, nameless=True)
        value = {name: word if word == AUTO else _read_number(name, word) for name, word in words.items()}
    found: dict[str, int | Literal["auto"]] = {}
    for name, amount in _check_names(value, where, nameless=True):
        if not name and amount != AUTO:
            raise Misconfigured(f"{where}: {amount!r} has no name: {_HINT}")
        found[name] = "auto" if amount == AUTO else _parse_amount(name, amount, where)
    devices = found.get(DEVICES, 0)
    if isinstance(devices, int) and devices % UNIT:
        raise Misconfigured(f"{where}: {DEVICES} is {show(devices)}: give a whole number")
    return found


def share_capacity(capacity: Amounts, number: int, processes: int) -> Amounts:
    """Return the share of process `number`, counted from 1, in a capacity. Devices are not divided."""
    return {
        name: amount // processes
        if name != DEVICES
        else len(range(number - 1, amount // UNIT, processes)) * UNIT
        for name, amount in capacity.items()
    }


def _check_names(value: object, where: str, *, nameless: bool = False) -> Iterable[tuple[str, object]]:
    if not isinstance(value, Mapping):
        raise Misconfigured(f"{where} is {value!r}: give numbers by name, such as {{'gpu': 1}}")
    for name, amount in cast("Mapping[object, object]", value).items():
        if not isinstance(name, str) or not (_NAME.fullmatch(name) or (nameless and not name)):
            raise Misconfigured(
                f"{where}: {name!r} is no name of a resource: use small letters, digits and underscores"
            )
        yield name, amount


def _parse_amount(name: str, value: object, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise Misconfigured(f"{where}: {name} is {value!r}: give a number")
    if not 0 <= value <= MAX_AMOUNT:
        raise Misconfigured(f"{where}: {name} is {value!r}: give a number from 0 to {MAX_AMOUNT:g}")
    from decimal import Decimal  # a process without such tasks does not load it

    # The decimal number as written, not its nearest binary fraction. Digits after the fourth are dropped.
    amount = int(Decimal(repr(value)) * UNIT)
    if value and not amount:
        raise Misconfigured(f"{where}: {name} is {value!r}: the smallest amount is {1 / UNIT:g}")
    return amount


def _read_number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        word = f"{name}={text}" if name else text
        raise Misconfigured(f"capacity: {word} is not a number: {_HINT}") from None


def to_number(amount: int) -> float:
    """Return an amount of ten-thousandths as a number, such as 7.5."""
    return amount // UNIT if amount % UNIT == 0 else amount / UNIT


def to_numbers(amounts: Amounts) -> dict[str, float]:
    """Return amounts of ten-thousandths as numbers, such as 7.5, by name."""
    return {name: to_number(amount) for name, amount in amounts.items()}


def show(amount: int) -> str:
    """Return an amount as text for people, such as `7.5`."""
    return format(to_number(amount), ".15g")


def show_amounts(amounts: Amounts) -> str:
    """Return amounts for people: `gpu 1, vram_gb 7.5`."""
    return ", ".join(f"{name} {show(amount)}" for name, amount in amounts.items())


class ResourceUse(msgspec.Struct, frozen=True):
    """How much of a resource a worker has, and what is taken of it now."""

    has: float
    taken: float


def show_use(resources: Mapping[str, ResourceUse]) -> str:
    """Return what is taken of a worker's capacity, for people: `gpu 1 of 2, vram_gb 7.5 of 24`."""
    return ", ".join(f"{name} {use.taken:.15g} of {use.has:.15g}" for name, use in resources.items())


def read_use(answer: object) -> dict[str, ResourceUse]:
    """Return the use of each resource from a worker's answer; empty if the answer cannot be read."""
    try:
        return msgspec.convert(answer or {}, dict[str, ResourceUse], from_attributes=True)
    except msgspec.ValidationError:  # an earlier version, or a later one
        return {}


def describe_lacking(
    jobs_by_task: Mapping[str, int], find_needs: Callable[[str], Mapping[str, float]]
) -> str:
    """Return which tasks have jobs that wait for a worker with what they take, in words; '' for none.

    Args:
        jobs_by_task: The number of waiting jobs, by the name of their task.
        find_needs: Returns the needs of a task's jobs by name; empty if this process does not know the task.
    """
    parts: list[str] = []
    for task, count in jobs_by_task.items():
        needs = ", ".join(f"{name} {amount:.15g}" for name, amount in find_needs(task).items())
        waiting = format_count(count, "job waits", "jobs wait")
        parts.append(f"{waiting} for a worker with {needs or 'the resources'} that {task} takes")
    return join_names(parts, separator="; ")


class SizedThing(msgspec.Struct, frozen=True):
    """A resource that jobs share, such as a model: opened once, it takes capacity while it is open."""

    key: Hashable
    size: Amounts


class Needs(msgspec.Struct, frozen=True):
    """What each job of a task takes while it runs, and the shared resources that it uses."""

    amounts: Amounts = NOTHING
    shared: tuple[SizedThing, ...] = ()

    @property
    def total(self) -> Amounts:
        """The capacity that a worker needs to run one such job at all."""
        return _sum([self.amounts, *(thing.size for thing in self.shared)])


class Grant(msgspec.Struct, frozen=True, eq=False):
    """What one job has taken."""

    task: str
    needs: Needs
    # The numbers of its devices, from 0, and the ten-thousandths of each that it has.
    devices: tuple[int, ...] = ()
    of_each: int = 0


class Evict(msgspec.Struct, frozen=True):
    """The unused shared resources that must be closed so that a job fits."""

    keys: tuple[Hashable, ...]


BEGIN: Literal["begin"] = "begin"
WAIT: Literal["wait"] = "wait"
Decision = Literal["begin", "wait"] | Evict


class _Open(msgspec.Struct):
    """A shared resource that is open, or is being opened or closed."""

    size: Amounts
    users: int = 0
    # The number of the last grant that used it.
    last_used: int = 0
    is_closing: bool = False


class _Waiting(msgspec.Struct):
    """The next job of a task, which waits."""

    needs: Needs
    # The number of later jobs that have begun before it.
    passed: int = 0


class ResourceBudget:
    """The capacity of one worker, what is taken of it, and which tasks have a job that waits for some.

    It has no clock and performs nothing: the caller performs what it decides.
    """

    def __init__(self, capacity: Amounts) -> None:
        self.capacity = dict(capacity)
        self.taken = dict.fromkeys(capacity, 0)
        self._free_of_device = [UNIT] * (capacity.get(DEVICES, 0) // UNIT)
        self._open: dict[Hashable, _Open] = {}
        self._waiting: dict[str, _Waiting] = {}
        self._running: dict[str, int] = {}
        self._grants = 0

    @property
    def waiting(self) -> Collection[str]:
        """The tasks with a waiting job, in the order in which they began to wait."""
        return self._waiting.keys()

    @property
    def open_keys(self) -> Collection[Hashable]:
        """The keys of shared resources that are open, or are being opened or closed."""
        return self._open.keys()

    def count_running(self, task: str) -> int:
        """Return how many jobs of a task have what they need."""
        return self._running.get(task, 0)

    def find_lacking(self, needs: Needs) -> Amounts:
        """Return the needs that exceed the whole capacity; empty if such a job can run here."""
        return {name: amount for name, amount in needs.total.items() if amount > self.capacity.get(name, 0)}

    def count_most(self, needs: Needs) -> int:
        """Return how many jobs with these needs can run here at once."""
        shared = _sum(thing.size for thing in needs.shared)
        free = {name: amount - shared.get(name, 0) for name, amount in self.capacity.items()}
        return _count_fitting(needs.amounts, free, [UNIT] * len(self._free_of_device))

    def count_fitting(self, needs: Needs) -> int:
        """Return how many more jobs with these needs fit now, if unused shared resources are closed."""
        kept = {thing.key for thing in needs.shared}
        free = self._get_free()
        for key, entry in self._open.items():
            if not entry.users and key not in kept:
                _add(free, entry.size, 1)
        for thing in needs.shared:
            if thing.key not in self._open:
                _add(free, thing.size, -1)
        return _count_fitting(needs.amounts, free, self._free_of_device)

    def decide(self, task: str, needs: Needs) -> Decision:
        """Decide whether the next job of a task may begin. If not, the task is added to those that wait."""
        for other, waiting in self._waiting.items():
            if other == task:
                break
            if waiting.passed >= LOOKAHEAD and _overlap(waiting.needs, needs):
                self._waiting.setdefault(task, _Waiting(needs))
                return WAIT
        missing = self._find_missing(needs)
        if not missing and self._choose_devices(needs) is not None:
            return BEGIN
        self._waiting.setdefault(task, _Waiting(needs))
        return self._choose_evicted(missing, needs) if missing else WAIT

    def take(self, task: str, needs: Needs) -> Grant:
        """Take what a job needs. Call it only after `decide` has returned BEGIN."""
        devices = self._choose_devices(needs)
        assert devices is not None, "it fits"
        self._grants += 1
        for other, waiting in list(self._waiting.items()):
            if other == task:
                del self._waiting[task]
                break
            waiting.passed += _overlap(waiting.needs, needs)
        _add(self.taken, needs.amounts, 1)
        of_each = min(needs.amounts.get(DEVICES, 0), UNIT)
        for device in devices:
            self._free_of_device[device] -= of_each
        for thing in needs.shared:
            if thing.key not in self._open:
                self._open[thing.key] = _Open(thing.size)
                _add(self.taken, thing.size, 1)
            entry = self._open[thing.key]
            entry.users, entry.last_used = entry.users + 1, self._grants
        self._running[task] = self._running.get(task, 0) + 1
        return Grant(task, needs, devices, of_each)

    def give_back(self, grant: Grant) -> None:
        """Give back what a job has taken. Its shared resources stay open."""
        _add(self.taken, grant.needs.amounts, -1)
        for device in grant.devices:
            self._free_of_device[device] += grant.of_each
        for thing in grant.needs.shared:
            if thing.key in self._open:
                self._open[thing.key].users -= 1
        self._running[grant.task] -= 1

    def note_closed(self, key: Hashable) -> None:
        """Note that a shared resource is closed."""
        if (entry := self._open.pop(key, None)) is not None:
            _add(self.taken, entry.size, -1)

    def leave(self, task: str) -> None:
        """Note that no job of a task waits here any more."""
        self._waiting.pop(task, None)

    def _get_free(self) -> dict[str, int]:
        return {name: amount - self.taken[name] for name, amount in self.capacity.items()}

    def _find_missing(self, needs: Needs) -> Amounts:
        """Return how much must become free before a job fits. What is being closed still counts as taken."""
        closing = any(
            entry.is_closing for thing in needs.shared if (entry := self._open.get(thing.key)) is not None
        )
        new = [thing.size for thing in needs.shared if thing.key not in self._open]
        free = self._get_free()
        missing = {
            name: amount - free.get(name, 0)
            for name, amount in _sum([needs.amounts, *new]).items()
            if amount > free.get(name, 0)
        }
        return missing or ({"": 1} if closing else NOTHING)

    def _choose_evicted(self, missing: Amounts, needs: Needs) -> Decision:
        """Return what to close, least recently used first; WAIT if that is too little, or is being closed already."""
        kept, left, keys = {thing.key for thing in needs.shared}, dict(missing), list[Hashable]()
        for key, entry in sorted(self._open.items(), key=lambda item: item[1].last_used):
            if entry.users or key in kept or not any(entry.size.get(name) for name in left):
                continue
            _add(left, {name: size for name, size in entry.size.items() if name in left}, -1)
            if not entry.is_closing:
                keys.append(key)
            left = {name: amount for name, amount in left.items() if amount > 0}
        if left or not keys:
            return WAIT
        for key in keys:
            self._open[key].is_closing = True
        return Evict(tuple(keys))

    def _choose_devices(self, needs: Needs) -> tuple[int, ...] | None:
        """Return the devices for a job; None when too few are free. Devices already shared are filled first."""
        amount, free = needs.amounts.get(DEVICES, 0), self._free_of_device
        if amount > UNIT:
            whole = [device for device, left in enumerate(free) if left == UNIT]
            count = amount // UNIT
            return tuple(whole[:count]) if len(whole) >= count else None
        if not amount:
            return ()
        fitting = [device for device, left in enumerate(free) if left >= amount]
        return (min(fitting, key=lambda device: free[device]),) if fitting else None


def _count_fitting(amounts: Amounts, free: Amounts, devices: Iterable[int]) -> int:
    most = [free.get(name, 0) // amount for name, amount in amounts.items() if name != DEVICES]
    if amount := amounts.get(DEVICES, 0):
        whole = sum(left == UNIT for left in devices)
        most.append(whole * UNIT // amount if amount > UNIT else sum(left // amount for left in devices))
    lacks = any(left < 0 for left in free.values())
    return 0 if lacks else max(min(most, default=MOST), 0)


MOST = 1_000_000
"""The number of jobs that fit if they take nothing."""


def _overlap(one: Needs, other: Needs) -> bool:
    """Return whether two jobs take anything of the same resource."""
    return not one.total.keys().isdisjoint(other.total)


def _sum(parts: Iterable[Amounts]) -> dict[str, int]:
    total: dict[str, int] = {}
    for part in parts:
        _add(total, part, 1)
    return total


def _add(total: dict[str, int], amounts: Amounts, sign: int) -> None:
    for name, amount in amounts.items():
        total[name] = total.get(name, 0) + sign * amount
