"""Decide how many workers there should be, how far they read ahead, and how many jobs each runs at once.

When there are more jobs than slots, workers first read further ahead, step by step. When they read as far ahead
as allowed, they get more slots for I/O-bound jobs, if that is allowed, and then there are more workers. When fewer
would do, it goes back the same way: first fewer workers, then fewer slots, then less ahead. After each step nothing
changes for a cool-down, which doubles with each step up to a limit, and is short again after a quiet period.

Three things prevent oscillation: the cool-down; a margin, since fewer workers must leave some slots free; and a
delay, since fewer must have been enough for a while without interruption.

While a broker is unreachable nothing is scaled down: its jobs and workers are unknown.
"""

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple, Protocol, cast

import msgspec

from celery5.errors import Misconfigured
from celery5.protocol.job.retry_policy import exponential
from celery5.protocol.scaling.snapshot import ClusterSnapshot
from celery5.protocol.task_kinds import IO_KINDS, TASK_KINDS
from celery5.protocol.text_values import DURATION, parse_assignments
from celery5.similar_names import did_you_mean

STEP_FACTOR = 2
"""The largest factor, up or down, of one step."""
SLOT_MARGIN = 0.2
"""The share of all slots that must be free when fewer workers would do."""


class Scale(NamedTuple):
    """A number of worker processes, and two factors: on how far each reads ahead, and on its I/O-bound slots."""

    workers: int
    prefetch: float = 1.0
    concurrency: float = 1.0


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """The input of a strategy."""

    snapshot: ClusterSnapshot
    now: Scale  # the desired scale
    minimum: int  # of workers
    maximum: int  # of workers
    prefetch: float = 1.0  # the largest prefetch factor
    concurrency: float = 1.0  # the largest concurrency factor

    def per_worker(self, kind: str) -> float:
        """Return how many jobs of a kind one worker may run at once, on average."""
        members = self.snapshot.workers
        return self.snapshot.max_slots(kind) / len(members) if members else 0.0

    def needed(self, *, margin: float = 0.0, kinds: Collection[str] = TASK_KINDS) -> int:
        """Return how many workers would have a slot for each job of these kinds, with a share of their slots free.

        Jobs of a kind that no worker has slots for need one worker; so do jobs while no worker is alive.
        """
        demand = {kind: jobs for kind, jobs in self.snapshot.demand().items() if kind in kinds}
        if not demand:
            return 0
        slots = {kind: self.per_worker(kind) * (1 - margin) for kind in demand}
        # rounding errors need no worker of their own
        return max(
            math.ceil(round(demand[kind] / slots_per_worker, 6)) if slots_per_worker else 1
            for kind, slots_per_worker in slots.items()
        )


class AutoscaleStrategy(Protocol):
    """Returns the scale that it wants.

    The result is kept within the limits and applied only outside a cool-down; a smaller scale only after it was
    wanted for a while. The strategy is called every few seconds and must not wait for anything.
    """

    def __call__(self, load: Load, /) -> Scale: ...


def prefetch_first(load: Load) -> Scale:
    """Return the next scale of the default strategy: one step, or none.

    Up, when there are more jobs than slots: first double the prefetch; at its limit, double the slots for I/O-bound
    jobs, if it is these that wait; at their limit, as many workers as are needed, but at most twice as many. Down,
    when fewer workers would do with a margin: as many as are needed then, but at least half as many; at the minimum,
    halve the slots, if half of them would do; then the prefetch.
    """
    now = load.now
    needed = load.needed()
    if needed and now.workers and not load.snapshot.workers:
        return now  # requested workers have not started yet: their capacity is unknown
    if needed > now.workers:
        if now.prefetch < load.prefetch and now.workers:
            return now._replace(prefetch=min(now.prefetch * STEP_FACTOR, load.prefetch))
        may_run_more = now.concurrency < load.concurrency and now.workers
        if may_run_more and load.needed(kinds=IO_KINDS) > now.workers:
            return now._replace(concurrency=min(now.concurrency * STEP_FACTOR, load.concurrency))
        return now._replace(workers=min(needed, max(now.workers * STEP_FACTOR, 1)))
    enough = max(load.needed(margin=SLOT_MARGIN), load.minimum)
    if enough < now.workers:
        return now._replace(workers=max(enough, now.workers // STEP_FACTOR))
    if now.workers > load.minimum:
        return now
    if now.concurrency > 1:
        margin_of_half = 1 - (1 - SLOT_MARGIN) / STEP_FACTOR
        if load.needed(margin=margin_of_half) > now.workers:
            return now
        return now._replace(concurrency=max(now.concurrency / STEP_FACTOR, 1.0))
    if load.needed(margin=SLOT_MARGIN) <= now.workers:
        return now._replace(prefetch=max(now.prefetch / STEP_FACTOR, 1.0))
    return now


class Autoscale(msgspec.Struct, frozen=True, kw_only=True):
    """How an application is scaled. Times are seconds."""

    minimum: int  # of worker processes
    maximum: int  # of worker processes
    prefetch: float = 4.0  # the largest factor on how far workers read ahead
    concurrency: float = 1.0  # the largest factor on their slots for I/O-bound jobs; 1: these never change
    cooldown: float = 1.0  # after the first step; doubles with each further one
    longest_cooldown: float = 60.0
    quiet: float = 300.0  # after a cool-down; then the cool-down is short again
    shrink_after: float = 30.0  # seconds for which a smaller scale must have been enough
    strategy: AutoscaleStrategy = prefetch_first


class AutoscaleState(msgspec.Struct, frozen=True, kw_only=True):
    """The state of an autoscaler, kept between snapshots. Times are seconds since 1970 by Redis."""

    workers: int  # desired
    prefetch: float = 1.0  # desired, for workers that read a crowded queue
    concurrency: float = 1.0  # desired, for all workers
    crowded: tuple[str, ...] = ()
    events: int = 0  # steps in a row
    at: float = 0.0  # of the last step
    low_since: float | None = None  # since when a smaller scale would do; None while it would not

    @property
    def scale(self) -> Scale:
        """Return the desired scale."""
        return Scale(self.workers, self.prefetch, self.concurrency)

    def get_prefetch(self, queues: tuple[str, ...]) -> float:
        """Return the factor for a worker that reads these queues."""
        return 1.0 if set(self.crowded).isdisjoint(queues) else self.prefetch


def make_initial_state(policy: Autoscale, snapshot: ClusterSnapshot) -> AutoscaleState:
    """Return the first state: as many workers as there are, within the limits."""
    return AutoscaleState(workers=min(max(len(snapshot.workers), policy.minimum), policy.maximum))


def resume_state(
    previous: AutoscaleState | None, policy: Autoscale, snapshot: ClusterSnapshot
) -> AutoscaleState | None:
    """Return the state to continue from.

    Before its first step an autoscaler starts again at each snapshot, with as many workers as there are. When
    not all of them can be seen, it keeps its state, or does not start (None).
    """
    if previous is not None and previous.at:
        return previous
    return previous if snapshot.unreachable else make_initial_state(policy, snapshot)


def get_cooldown_end(state: AutoscaleState, policy: Autoscale) -> float:
    """Return the time until which nothing changes."""
    if not state.events:
        return -math.inf
    return state.at + exponential(state.events - 1, start=policy.cooldown, cap=policy.longest_cooldown)


def get_next_state(
    state: AutoscaleState, policy: Autoscale, snapshot: ClusterSnapshot, now: float
) -> AutoscaleState:
    """Return the state after a snapshot at the time `now`. A step was made when `at` or the scale differs.

    Changed limits apply at once, without waiting for a cool-down. While a broker is unreachable nothing else is
    scaled down, and the wait for a smaller scale starts again afterwards. Raises whatever the user's strategy
    raises, and ValueError when that does not return numbers.
    """
    state = _within(state, policy)
    cooldown_end = get_cooldown_end(state, policy)
    if now >= cooldown_end + policy.quiet and state.events:
        state = msgspec.structs.replace(state, events=0)
    elif state.at > now and state.events:
        # the clock was set back: no cool-down may last for ever
        state = msgspec.structs.replace(state, at=now)
    load = Load(
        snapshot=snapshot,
        now=state.scale,
        minimum=policy.minimum,
        maximum=policy.maximum,
        prefetch=policy.prefetch,
        concurrency=policy.concurrency,
    )
    wanted = _bounded(policy.strategy(load), policy)
    if snapshot.unreachable:
        wanted = Scale(
            max(wanted.workers, state.workers),
            max(wanted.prefetch, state.prefetch),
            max(wanted.concurrency, state.concurrency),
        )
    is_smaller = wanted != state.scale and all(
        new <= old for new, old in zip(wanted, state.scale, strict=True)
    )
    low_since = (now if state.low_since is None else min(state.low_since, now)) if is_smaller else None
    crowded = _crowded(state, state.scale, snapshot)
    state = msgspec.structs.replace(state, low_since=low_since, crowded=crowded)
    if wanted == state.scale or now < get_cooldown_end(state, policy):
        return state
    if low_since is not None and now < low_since + policy.shrink_after:
        return state
    return AutoscaleState(
        workers=wanted.workers,
        prefetch=wanted.prefetch,
        concurrency=wanted.concurrency,
        crowded=_crowded(state, wanted, snapshot),
        events=state.events + 1,
        at=now,
        # the next scale must be enough for a while again, from this step on
        low_since=now if is_smaller else None,
    )


def _within(state: AutoscaleState, policy: Autoscale) -> AutoscaleState:
    return msgspec.structs.replace(state, **_bounded(state.scale, policy)._asdict())


def _bounded(scale: Scale, policy: Autoscale) -> Scale:
    scale = Scale(*scale)  # a user's strategy may give a plain tuple
    workers, prefetch, concurrency = scale
    if not all(map(math.isfinite, scale)):
        raise ValueError(
            f"the strategy gives {workers!r} workers, the prefetch {prefetch!r} and the concurrency {concurrency!r}: "
            "give numbers"
        )
    return Scale(
        min(max(int(workers), policy.minimum), policy.maximum),
        min(max(float(prefetch), 1.0), policy.prefetch),
        min(max(float(concurrency), 1.0), policy.concurrency),
    )


def _crowded(state: AutoscaleState, scale: Scale, snapshot: ClusterSnapshot) -> tuple[str, ...]:
    """Return the queues whose workers should read further ahead.

    Those had more jobs than their workers have slots since that began. When there are none, but a strategy
    wants it, all do.
    """
    if scale.prefetch <= 1:
        return ()
    demand: dict[tuple[str, str], int] = {}
    for load in snapshot.task_loads:
        key = (load.queue, load.kind)
        demand[key] = demand.get(key, 0) + load.demand
    crowded = {queue for (queue, kind), jobs in demand.items() if jobs > _slots(snapshot, queue, kind)}
    all_of_them = {queue for worker in snapshot.workers for queue in worker.queues}
    return tuple(sorted(crowded | set(state.crowded) or all_of_them))


def _slots(snapshot: ClusterSnapshot, queue: str, kind: str) -> int:
    return sum(worker.max_slots.get(kind, 0) for worker in snapshot.workers if queue in worker.queues)


def get_changes(before: AutoscaleState, after: AutoscaleState) -> Mapping[str, tuple[float, float]]:
    """Return what has changed, by name: the old and the new value."""
    return {
        name: (old, new)
        for name, old, new in (
            ("workers", before.workers, after.workers),
            ("prefetch", before.prefetch, after.prefetch),
            ("concurrency", before.concurrency, after.concurrency),
        )
        if old != new
    }


MAX_WORKERS = 10_000
"""The most workers of one application."""
MAX_PREFETCH_FACTOR = 16.0
"""The largest factor on how far workers read ahead."""
MAX_CONCURRENCY_FACTOR = 16.0
"""The largest factor on the slots of workers."""
MAX_SECONDS = 7 * 86400.0
"""The most seconds in each setting of time."""

_HINT = "write minimum=1 maximum=10"
_SECONDS = ("cooldown", "longest_cooldown", "quiet", "shrink_after")
_FACTORS = {"prefetch": MAX_PREFETCH_FACTOR, "concurrency": MAX_CONCURRENCY_FACTOR}
_NAMES = ("minimum", "maximum", *_FACTORS, *_SECONDS, "strategy")

FunctionLoader = Callable[[str], Any]
"""Returns the function named `module:function`. Raises Misconfigured."""


def parse_autoscale(
    value: str | Mapping[str, Any], load_function: FunctionLoader | None = None
) -> Autoscale | None:
    """Return the scaling in a setting; None for ''. Raises Misconfigured with the error in one line.

    A strategy is a function, or `module:function`, which `load_function` loads; without it such a name is not
    checked.
    """
    options: dict[str, Any] = parse_assignments(value, _HINT) if isinstance(value, str) else dict(value)
    if not options:
        return None
    _check_names(options)
    if "maximum" not in options:
        raise Misconfigured(f"autoscale needs a maximum, the most worker processes there may be: {_HINT}")
    fields: dict[str, Any] = {"minimum": 1, **options}
    minimum, maximum = (_whole(name, fields[name], least) for name, least in (("minimum", 0), ("maximum", 1)))
    if minimum > maximum:
        raise Misconfigured(f"autoscale: the minimum, {minimum}, is over the maximum, {maximum}")
    fields |= {"minimum": minimum, "maximum": maximum}
    for name, most in _FACTORS.items():
        if name in fields:
            fields[name] = _number(name, fields[name], 1.0, most, "a factor")
    for name in _SECONDS:
        if name in fields:
            least = 0.1 if "cooldown" in name else 0.0
            fields[name] = _seconds(name, fields[name], least)
    if "strategy" in fields:
        fields["strategy"] = _strategy(fields["strategy"], load_function)
        if fields["strategy"] is None:
            del fields["strategy"]
    return Autoscale(**fields)


def _check_names(options: Mapping[str, Any]) -> None:
    for name in options:
        if name not in _NAMES:
            suggestion = did_you_mean(str(name), _NAMES, otherwise=f"there are {', '.join(_NAMES)}")
            raise Misconfigured(f"autoscale has {name!r}, which it does not know: {suggestion}")


def _whole(name: str, value: object, minimum: int) -> int:
    if isinstance(value, str) and value.isdecimal() and len(value) < 10:
        value = int(value)
    if type(value) is not int or not minimum <= value <= MAX_WORKERS:
        raise Misconfigured(
            f"autoscale: {name} is {value!r}: give a number of worker processes, {minimum} or more"
        )
    return value


def _seconds(name: str, value: object, least: float) -> float:
    try:
        seconds = DURATION.parse(value) if isinstance(value, str) else value
    except Misconfigured as error:
        raise Misconfigured(f"autoscale: {name}: {error}") from None
    return _number(name, seconds, least, MAX_SECONDS, "seconds")


def _number(name: str, value: object, minimum: float, maximum: float, what: str) -> float:
    try:
        number = math.nan if isinstance(value, bool) else float(cast("Any", value))
    except (TypeError, ValueError):
        number = math.nan
    if not minimum <= number <= maximum:
        raise Misconfigured(f"autoscale: {name} is {value!r}: give {what} from {minimum:g} to {maximum:g}")
    return number


def _strategy(value: object, load_function: FunctionLoader | None) -> Any:
    if isinstance(value, str):
        if not all(value.partition(":")):
            raise Misconfigured(f"autoscale: strategy is {value!r}: write module:function")
        return load_function(value) if load_function else None
    if not callable(value) or isinstance(value, type):
        raise Misconfigured(
            f"autoscale: strategy is {value!r}: give a function that takes a Load and gives a Scale"
        )
    return value
