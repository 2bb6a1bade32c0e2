"""Declare timers: functions that worker processes run by the clock, `@app.timer(interval=60)`, or when they start.

A timer is no job: no run of it is in Redis. Each process runs its own, or one process at a time does (`on_leader`).
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, Never, TypeVar, cast, overload

import msgspec

from celery5.errors import Misconfigured
from celery5.hints import find_hint
from celery5.protocol.scheduling.declaration import MAX_INTERVAL, MAX_JITTER
from celery5.protocol.scheduling.periodic import OverlapPolicy
from celery5.protocol.scheduling.timers import OVERLAP_POLICIES
from celery5.protocol.scheduling.triggers import AnyTrigger, Trigger, validate_cron_fields, with_zone
from celery5.protocol.task_kinds import EventLoop, FunctionKind, choose_kind
from celery5.similar_names import did_you_mean

F = TypeVar("F", bound=Callable[[], object])

MIN_INTERVAL = 0.001
"""Seconds. A shorter interval is a busy loop."""
_LARGEST = 1e18
_OPTIONS = ("interval", "overlap", "jitter", "name", "loop", "on_leader")
_START_OPTIONS = ("name", "loop", "on_leader")


class Timer(msgspec.Struct, frozen=True, kw_only=True):
    """A function that worker processes run by the clock, or when they start."""

    name: str
    function: Callable[[], Any]
    # Where the function runs.
    kind: FunctionKind
    # Seconds between two runs, or a trigger; None: it runs once, at the start.
    interval: float | AnyTrigger | None
    # What happens when it is due while a run of it has not ended.
    overlap: OverlapPolicy = "skip"
    # The most seconds by which each run is delayed.
    jitter: float = 0.0
    # Whether one process of the cluster runs it.
    on_leader: bool = False


class DeclareTimer:
    """The decorator `@app.timer`."""

    def __init__(self, default_loop: EventLoop = "trio") -> None:
        self.default_loop: EventLoop = default_loop
        self.known: dict[str, Timer] = {}

    def __call__(
        self,
        interval: float | timedelta | AnyTrigger,
        *,
        overlap: OverlapPolicy = "skip",
        jitter: float | timedelta = 0.0,
        name: str | None = None,
        loop: EventLoop | None = None,
        on_leader: bool = False,
        **unknown: Never,
    ) -> Callable[[F], F]:
        """Declare a timer: each worker process runs the function, which takes no arguments.

        An `async def` runs in the event loop `loop`, a `def` in a thread. What it raises is
        logged. The first run is one interval after the start.

        Args:
            interval: Seconds between the starts of two runs, or what `cron`, `every`, `calendar` and `at` return.
            overlap: What happens when it is due while a run has not ended: `skip` leaves this run out, `queue` lets at
                most one wait, `allow` runs it beside the others, at most ten at once.
            jitter: Each run is delayed by a random time of up to this many seconds.
            name: Its name in logs and metrics; by default that of the function.
            loop: The event loop of an `async def`; by default that of the application.
            on_leader: Whether one worker process of the cluster runs it, and not each. When that process dies,
                another one takes over.

        Raises:
            Misconfigured: An option makes no sense, another timer has the name, or it is no function.
        """
        _refuse_unknown("@app.timer", unknown, _OPTIONS)

        def declare(function: F) -> F:
            label = name if name is not None else str(getattr(function, "__name__", ""))
            where = f"timer {label}"
            timer = Timer(
                name=_check_name(label),
                kind=_find_kind(function, loop, self.default_loop, where),
                function=function,
                interval=_parse_interval(interval, where),
                overlap=_check_overlap(overlap, where),
                jitter=_parse_jitter(jitter, interval, where),
                on_leader=_check_on_leader(on_leader, where),
            )
            self.add(timer)
            return function

        if callable(interval):
            raise Misconfigured("@app.timer: every how many seconds? Write @app.timer(interval=60)")
        return declare

    def add(self, timer: Timer) -> None:
        """Add a timer. Raises Misconfigured if there is one of that name."""
        if self.known.setdefault(timer.name, timer) is not timer:
            raise Misconfigured(f"two timers are named {timer.name!r}: give one another name")

    def list_timers(self, timezone: str) -> tuple[Timer, ...]:
        """Return all timers, with `timezone` for triggers that name none."""
        return tuple(_set_zone(timer, timezone) for timer in self.known.values())


class DeclareStart:
    """The decorator `@app.on_start`."""

    def __init__(self, timers: DeclareTimer) -> None:
        self._timers = timers

    @overload
    def __call__(self, function: F, /) -> F: ...
    @overload
    def __call__(
        self,
        /,
        *,
        on_leader: bool = False,
        name: str | None = None,
        loop: EventLoop | None = None,
    ) -> Callable[[F], F]: ...
    def __call__(
        self,
        function: F | None = None,
        /,
        *,
        on_leader: bool = False,
        name: str | None = None,
        loop: EventLoop | None = None,
        **unknown: Never,
    ) -> F | Callable[[F], F]:
        """Declare a function that each worker process runs once when it has started. It takes no arguments.

        An `async def` runs in the event loop `loop`, a `def` in a thread. Jobs do not wait for
        its end. What it raises is logged.

        Args:
            function: The function, where the decorator is written without parentheses.
            on_leader: Whether it runs once when the cluster starts: in one worker process, when no other one runs. It
                runs at most once: not again if it fails, or if its process dies.
            name: Its name in logs and metrics, where it stands among the timers; by default that of the function.
            loop: The event loop of an `async def`; by default that of the application.

        Raises:
            Misconfigured: An option makes no sense, a timer has the name, or it is no function.
        """
        _refuse_unknown("@app.on_start", unknown, _START_OPTIONS)

        def declare(function: F) -> F:
            label = name if name is not None else str(getattr(function, "__name__", ""))
            where = f"start function {label}"
            timer = Timer(
                name=_check_name(label),
                kind=_find_kind(function, loop, self._timers.default_loop, where),
                function=function,
                interval=None,
                on_leader=_check_on_leader(on_leader, where),
            )
            self._timers.add(timer)
            return function

        return declare if function is None else declare(function)


def _set_zone(timer: Timer, timezone: str) -> Timer:
    if not isinstance(timer.interval, Trigger):
        return timer
    return msgspec.structs.replace(timer, interval=with_zone(timer.interval, timezone))


def _refuse_unknown(decorator: str, unknown: Iterable[str], known: Sequence[str]) -> None:
    for option in unknown:
        suggestion = did_you_mean(option, known) or f"there are {', '.join(known)}"
        raise Misconfigured(
            f"{decorator}: {option} is no option{find_hint('option', option) or f'; {suggestion}'}"
        )


def _check_on_leader(on_leader: object, where: str) -> bool:
    if not isinstance(on_leader, bool):
        raise Misconfigured(f"{where}: on_leader is {on_leader!r}: give True or False")
    return on_leader


def _check_name(name: Any) -> str:
    if not isinstance(name, str) or not 0 < len(name) <= 200 or any(c.isspace() or c < " " for c in name):
        raise Misconfigured(f"timer name {name!r}: use 1 to 200 characters without spaces")
    return name


def _find_kind(declared: object, loop: EventLoop | None, default: EventLoop, where: str) -> FunctionKind:
    """Return where a function runs. Raises Misconfigured for what cannot run, or not without arguments."""
    function = cast("Callable[[], Any]", declared)
    if hasattr(function, "delay"):
        raise Misconfigured(f"{where}: {function!r} is a task: write @app.task(schedule=...) instead")
    if not (inspect.isroutine(function) or isinstance(declared, functools.partial)):
        raise Misconfigured(f"{where}: {function!r} is no function")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise Misconfigured(f"{where}: it has a yield: a timer is a plain function")
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise Misconfigured(f"{where} is called without arguments: {error}") from None
    except ValueError:  # written in C: it has no signature
        pass
    return choose_kind(function, loop, default, where)


def _parse_interval(interval: Any, where: str) -> float | AnyTrigger:
    if isinstance(interval, Trigger):
        trigger = cast("AnyTrigger", interval)
        try:
            validate_cron_fields(trigger)
        except Misconfigured as error:
            raise Misconfigured(f"{where}: {error}") from None
        return trigger
    if isinstance(interval, str):
        raise Misconfigured(f"{where}: interval is {interval!r}: give seconds, or cron({interval!r})")
    seconds = _to_seconds(interval)
    if seconds is None or not MIN_INTERVAL <= seconds <= MAX_INTERVAL.total_seconds():
        raise Misconfigured(
            f"{where}: interval is {interval!r}: give seconds, {MIN_INTERVAL:g} to 100 years, or cron(...)"
        )
    return seconds


def _check_overlap(overlap: Any, where: str) -> OverlapPolicy:
    if overlap not in OVERLAP_POLICIES:
        hint = did_you_mean(str(overlap), OVERLAP_POLICIES, otherwise=f"give {', '.join(OVERLAP_POLICIES)}")
        raise Misconfigured(f"{where}: overlap is {overlap!r}; {hint}")
    policy: OverlapPolicy = overlap
    return policy


def _parse_jitter(jitter: Any, interval: Any, where: str) -> float:
    """Return the seconds of jitter: less than the interval, so that runs stay in their order."""
    seconds, most = _to_seconds(jitter), _to_seconds(interval) or MAX_JITTER
    if seconds is None or not 0 <= seconds <= min(most, MAX_JITTER):
        most_text = "a day" if most >= MAX_JITTER else f"{most:g}"
        raise Misconfigured(f"{where}: jitter is {jitter!r}: give seconds, 0 to {most_text}")
    return seconds


def _to_seconds(value: Any) -> float | None:
    """Return a number or a timedelta in seconds; None for anything else."""
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, bool) or not isinstance(value, int | float) or not -_LARGEST < value < _LARGEST:
        return None
    return float(value)
