"""Decide which tasks, and so which queues, workers should prefer now.

A strategy returns weights, not an order: two tasks with the weights 1.0 and 0.25 start about four to one while
both wait. No weight is 0, so nothing starves.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, TypeVar, cast

import msgspec

from celery5.errors import Misconfigured
from celery5.protocol.scaling.snapshot import CPU_BOUND_KINDS, ClusterSnapshot
from celery5.similar_names import did_you_mean

MAX_WEIGHT = 1.0
"""The weight of what is preferred, and of everything without a weight."""
MIN_WEIGHT = 0.01
"""The least weight."""
REDUCED_WEIGHT = 0.1
"""The weight of tasks whose slots are nearly used up."""
MAX_PREFERENCE_SECONDS = 3600.0
"""The most seconds that a preference lasts unless it is repeated."""

T = TypeVar("T")


class PrioritisationStrategy(Protocol):
    """Returns weights by task name; only their ratio counts.

    A task that is left out gets the largest weight. The strategy is called every few seconds and must not wait
    for anything.
    """

    def __call__(self, snapshot: ClusterSnapshot, /) -> Mapping[str, float]: ...


def shortest(snapshot: ClusterSnapshot) -> dict[str, float]:
    """Prefer tasks with short jobs. A task that never ran is preferred, so that its duration becomes known."""
    return {task: 1 / max(mean, 1e-6) for task, mean in _means(snapshot).items()}


def longest(snapshot: ClusterSnapshot) -> dict[str, float]:
    """Prefer tasks with long jobs. A task that never ran is preferred, so that its duration becomes known."""
    return {task: max(mean, 1e-6) for task, mean in _means(snapshot).items()}


def rarest(snapshot: ClusterSnapshot) -> dict[str, float]:
    """Prefer tasks of which few jobs wait, on all queues together."""
    waiting: dict[str, int] = {}
    for load in snapshot.task_loads:
        waiting[load.task] = waiting.get(load.task, 0) + load.waiting
    return {task: 1 / count for task, count in waiting.items() if count > 0}


class Saturation(msgspec.Struct, frozen=True, kw_only=True):
    """Prefer I/O-bound tasks when the slots for CPU-bound ones are nearly all taken, and the other way round.

    `threshold` is the share of slots, above 0 and at most 1, from which they are nearly all taken. While both
    are, or neither is, nothing is preferred. Raises Misconfigured.
    """

    threshold: float = 0.8

    def __post_init__(self) -> None:
        if not 0 < self.threshold <= 1:
            raise Misconfigured(f"threshold is {self.threshold!r}: give a share of slots, such as 0.8")

    def __call__(self, snapshot: ClusterSnapshot) -> dict[str, float]:
        """Return weights by task: the full one, or a tenth."""
        cpu, io = snapshot.cpu_utilization >= self.threshold, snapshot.io_utilization >= self.threshold
        if cpu == io:
            return {}
        return {
            line.task: REDUCED_WEIGHT if (line.kind in CPU_BOUND_KINDS) is cpu else MAX_WEIGHT
            for line in snapshot.task_loads
        }


STRATEGIES: Mapping[str, PrioritisationStrategy] = {
    "shortest": shortest,
    "longest": longest,
    "rarest": rarest,
    "saturation": Saturation(),
}
"""The strategies that settings can name."""


def parse_strategy(
    name: str, load_function: Callable[[str], Any] | None = None
) -> PrioritisationStrategy | None:
    """Return the strategy in a setting: one of `STRATEGIES`, or `module:function`, loaded by `load_function`.

    Returns None for '', and for `module:function` without a loader. Raises Misconfigured.
    """
    if ":" in name and all(name.partition(":")):
        strategy: PrioritisationStrategy | None = load_function(name) if load_function else None
        return strategy
    if name and name not in STRATEGIES:
        suggestion = did_you_mean(name, STRATEGIES, otherwise="or write module:function for one of your own")
        raise Misconfigured(f"no strategy {name!r}; there are {', '.join(STRATEGIES)}: {suggestion}")
    return STRATEGIES.get(name)


class Preference(msgspec.Struct, frozen=True):
    """What to prefer: weights from `MIN_WEIGHT` to `MAX_WEIGHT`, by name. A missing name has `MAX_WEIGHT`."""

    tasks: Mapping[str, float] = {}
    queues: Mapping[str, float] = {}

    @property
    def is_neutral(self) -> bool:
        """Return whether nothing is preferred."""
        return not self.tasks and not self.queues

    def differs_from(self, other: "Preference", *, factor: float = 1.25) -> bool:
        """Return whether any weight differs by more than this factor. Smaller changes are not worth sending."""
        return any(
            not 1 / factor <= mine.get(name, MAX_WEIGHT) / theirs.get(name, MAX_WEIGHT) <= factor
            for mine, theirs in ((self.tasks, other.tasks), (self.queues, other.queues))
            for name in mine.keys() | theirs.keys()
        )


def compute_preference(strategy: PrioritisationStrategy, snapshot: ClusterSnapshot) -> Preference:
    """Return what a strategy prefers for a snapshot, within bounds.

    The heaviest task has `MAX_WEIGHT`; a queue has the mean of the jobs that wait on it. Raises ValueError when
    the strategy returns anything but numbers, 0 or more, by name.
    """
    tasks = _bounded(strategy(snapshot))
    if not tasks:
        return Preference()
    waiting: dict[str, int] = {}
    weighed: dict[str, float] = {}
    for load in snapshot.task_loads:
        if load.waiting > 0:
            waiting[load.queue] = waiting.get(load.queue, 0) + load.waiting
            weight = tasks.get(load.task, MAX_WEIGHT) * load.waiting
            weighed[load.queue] = weighed.get(load.queue, 0.0) + weight
    queues = {queue: weighed[queue] / count for queue, count in waiting.items()}
    return Preference(_named(tasks), _named(_bounded(queues)))


def sort_by_weight(items: Iterable[T], weight: Callable[[T], float]) -> list[T]:
    """Return the items with the heaviest first; equal ones keep their order."""
    return sorted(items, key=weight, reverse=True)


def _means(snapshot: ClusterSnapshot) -> dict[str, float]:
    """Return the mean duration of each task, over all its queues."""
    durations: dict[str, list[float]] = {}
    for load in snapshot.task_loads:
        if load.mean is not None:
            durations.setdefault(load.task, []).append(load.mean)
    return {task: sum(means) / len(means) for task, means in durations.items()}


def _bounded(weights: Mapping[str, float]) -> dict[str, float]:
    """Return the weights scaled so that the largest is MAX_WEIGHT and none is below MIN_WEIGHT; empty when all
    are 0.
    """
    for name, weight in weights.items():
        if not isinstance(cast("object", name), str) or not is_number(weight) or weight < 0:
            raise ValueError(f"the weight of {name!r} is {weight!r}: give a number, 0 or more")
    largest = max(weights.values(), default=0.0)
    return (
        {name: max(MIN_WEIGHT, weight / largest) for name, weight in weights.items()} if largest > 0 else {}
    )


def _named(weights: Mapping[str, float]) -> dict[str, float]:
    """Return the weights without the largest, which is the default."""
    return {name: round(weight, 4) for name, weight in weights.items() if weight < MAX_WEIGHT}


def is_number(value: object) -> bool:
    """Return whether a value is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
