"""Declare rules by which the Scheduler imposes limits: `app.limits.rule` and `@app.limit_rule`."""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, tzinfo
from typing import TYPE_CHECKING, Any, TypeVar, cast, overload

import msgspec

from celery5.errors import Misconfigured
from celery5.health.health_check import HealthCheck
from celery5.protocol.limit_rules import LimitRule, TimeWindow, check_rule_name
from celery5.protocol.limits import LimitOverride
from celery5.protocol.scheduling.zones import load_zone
from celery5.protocol.shards import Placement, check_override, get_placement
from celery5.protocol.task_kinds import EventLoop, FunctionKind, choose_kind

if TYPE_CHECKING:
    from celery5.application import DeclaredTask

F = TypeVar("F", bound=Callable[..., Any])

EVERY = 30.0
"""Seconds between two calls of a rule's function, by default."""


class ComputedRule(msgspec.Struct, frozen=True):
    """A rule whose limits a function computes from the state of the cluster."""

    name: str
    function: Callable[..., Any]
    # Seconds between two calls.
    every: float
    # Where the function runs.
    kind: FunctionKind


class DeclaredRules(msgspec.Struct, frozen=True):
    """The rules of an application, checked, for a Scheduler to evaluate."""

    rules: tuple[LimitRule, ...] = ()
    computed: tuple[ComputedRule, ...] = ()
    # The time zone of each rule that has a window, by the rule's name.
    zones: Mapping[str, tzinfo] = msgspec.field(default_factory=dict[str, tzinfo])
    # The names of all tasks.
    tasks: frozenset[str] = frozenset()
    # Which shards the jobs of tasks of sharded queues go to.
    placements: Mapping[str, Placement] = msgspec.field(default_factory=dict[str, Placement])

    def get_local_time(self, rule: LimitRule, now: float) -> datetime | None:
        """Return the time `now`, in seconds since 1970, in the zone of a rule's window; None if it has none."""
        zone = self.zones.get(rule.name)
        return None if zone is None else datetime.fromtimestamp(now, zone)

    def parse_limits(self, rule: str, returned: object) -> dict[str, LimitOverride]:
        """Return the limits that a rule's function returned, by task. Raises Misconfigured."""
        if returned is None:
            return {}
        if not isinstance(returned, Mapping):
            raise Misconfigured(f"limit rule {rule} returned {returned!r}: return limits by task, or None")
        limits: dict[str, LimitOverride] = {}
        for task, limit in cast("Mapping[object, object]", returned).items():
            name = str(getattr(task, "name", task))
            if name not in self.tasks:
                raise Misconfigured(f"limit rule {rule} returned a limit for {name!r}, which is no task")
            if limit is not None:
                limits[name] = _make_override(rule, limit).validate(name)
                check_override(name, self.placements.get(name), limits[name])
        return limits


class DeclareLimitRule:
    """The decorator `@app.limit_rule`, with or without arguments, and all rules of an application."""

    def __init__(self, default_loop: EventLoop = "trio") -> None:
        self._default_loop: EventLoop = default_loop
        self._rules: dict[str, LimitRule] = {}
        self._checks: dict[str, HealthCheck] = {}
        self._computed: dict[str, ComputedRule] = {}

    @property
    def is_used(self) -> bool:
        """Whether there is any rule, so that a Scheduler is needed."""
        return bool(self._rules or self._computed)

    @property
    def has_functions(self) -> bool:
        """Whether a rule is a function, so that workers report their load."""
        return bool(self._computed)

    @overload
    def __call__(self, function: F, /) -> F: ...
    @overload
    def __call__(
        self, *, name: str | None = None, every: float = EVERY, loop: EventLoop | None = None
    ) -> Callable[[F], F]: ...
    def __call__(
        self,
        function: Callable[..., Any] | None = None,
        *,
        name: str | None = None,
        every: float = EVERY,
        loop: EventLoop | None = None,
    ) -> Any:
        """Declare a function that computes limits: the Scheduler calls it, and imposes what it returns.

        It takes a `celery5.scaling.ClusterSnapshot`, and returns a limit (a number) or a rate (such as `200/m`) for
        each task to be limited, by the task or its name; None imposes nothing. An `async def` runs in the event loop
        `loop`, a `def` in a thread; each may take 5 seconds. If it fails, what it returned before stays.

        Args:
            name: The name of the rule; by default that of the function.
            every: Seconds between two calls.
            loop: The event loop of an `async def`; by default that of the application.

        Raises:
            Misconfigured: The name is taken, `function` cannot be called with one argument, or `loop` is none for it.
        """

        def declare(function: Any) -> Any:
            rule = check_rule_name(name or str(getattr(function, "__name__", "")))
            self._check_new(rule)
            if not callable(function) or not _takes_one(function):
                raise Misconfigured(
                    f"limit rule {rule}: {function!r} does not take one argument, the snapshot"
                )
            seconds: object = every
            if (
                isinstance(seconds, bool)
                or not isinstance(seconds, int | float)  # pyright: ignore[reportUnnecessaryIsInstance]
                or not 0 < seconds < math.inf
            ):
                raise Misconfigured(f"limit rule {rule}: every is {every!r}: give seconds")
            self._computed[rule] = ComputedRule(
                rule, function, every, choose_kind(function, loop, self._default_loop, f"limit rule {rule}")
            )
            return function

        return declare if function is None else declare(function)

    def add(
        self,
        name: str,
        task: "str | DeclaredTask",
        override: LimitOverride,
        during: TimeWindow | str | None,
        when: HealthCheck | None,
        states: Sequence[str],
    ) -> None:
        """Declare a rule. Raises Misconfigured."""
        rule = LimitRule(
            name=name,
            task=task if isinstance(task, str) else task.name,
            override=override,
            during=_parse_window(name, during),
            check="" if when is None else _get_check_name(name, when),
            states=() if when is None else _get_states(name, when, states),
        ).validate()
        if when is None and states:
            raise Misconfigured(f"limit rule {name}: states are those of a health check: give when=, too")
        self._check_new(name)
        self._rules[name] = rule
        if when is not None:
            self._checks[name] = when

    def resolve(
        self, tasks: Mapping[str, Any], checks: Mapping[str, HealthCheck], timezone: str
    ) -> DeclaredRules:
        """Return all rules for a Scheduler. Raises Misconfigured for a task, a check or a time zone that is unknown."""
        zones: dict[str, tzinfo] = {}
        placements: dict[str, Placement] = {
            name: get_placement(task.declared_limits)
            for name, task in tasks.items()
            if task.app.brokers.is_sharded(task.queue)
        }
        for rule in self._rules.values():
            if rule.task not in tasks:
                raise Misconfigured(f"limit rule {rule.name}: {rule.task!r} is no task of this application")
            check_override(rule.task, placements.get(rule.task), rule.override)
            if rule.check and checks.get(rule.check) is not self._checks[rule.name]:
                raise Misconfigured(
                    f"limit rule {rule.name}: no worker runs the health check {rule.check!r}: declare it with "
                    "@app.health_check, or pass it as checks= of the application or of a task"
                )
            if rule.during is not None:
                zones[rule.name] = load_zone(rule.during.timezone or timezone)
        return DeclaredRules(
            tuple(self._rules.values()), tuple(self._computed.values()), zones, frozenset(tasks), placements
        )

    def _check_new(self, name: str) -> None:
        if name in self._rules or name in self._computed:
            raise Misconfigured(f"two limit rules are named {name!r}")


def _make_override(rule: str, limit: object) -> LimitOverride:
    if isinstance(limit, str):
        return LimitOverride(rate=limit)
    if isinstance(limit, int) and not isinstance(limit, bool):
        return LimitOverride(limit=limit)
    raise Misconfigured(f"limit rule {rule}: limit {limit!r}: give a number, or a rate such as '200/m'")


def _parse_window(rule: str, during: object) -> TimeWindow | None:
    if isinstance(during, str):
        start, _, end = during.partition("-")
        return TimeWindow(start.strip(), end.strip())
    if during is None or isinstance(during, TimeWindow):
        return during
    raise Misconfigured(f"limit rule {rule}: during is {during!r}: give '22:00-06:00', or a TimeWindow")


def _get_check_name(rule: str, when: object) -> str:
    if not isinstance(when, HealthCheck):
        raise Misconfigured(f"limit rule {rule}: when is {when!r}: give a HealthCheck")
    if when.scope != "global":
        raise Misconfigured(
            f"limit rule {rule}: {when.name} has no one state for all workers: give it scope='global'"
        )
    return when.name


def _get_states(rule: str, when: HealthCheck, states: Sequence[str]) -> tuple[str, ...]:
    chosen = (states,) if isinstance(states, str) else tuple(states) or when.states[:-1]
    for state in chosen:
        if state not in when.states:
            raise Misconfigured(
                f"limit rule {rule}: {when.name} has no state {state!r}; it has: {', '.join(when.states)}"
            )
    return chosen


def _takes_one(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind(None)
    except TypeError:
        return False
    except ValueError:  # written in C: it has no signature
        return True
    return True
