"""Declare boot steps and services: what a process starts before it works.

A worker of celery5 is a graph of boot steps, and an application adds to it by `App(bootsteps=[...], services=[...])`.
A service is a boot step that keeps running.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from celery5.errors import Misconfigured
from celery5.health.health_check import HealthCheck, validate_checks
from celery5.protocol.annotations import refuse_injected
from celery5.protocol.health.breaker import BreakerPolicy
from celery5.protocol.job.retry_policy import RetryPolicy
from celery5.protocol.process.supervision import RetryState
from celery5.protocol.task_kinds import EventLoop, check_loop
from celery5.similar_names import did_you_mean

PROCESS_KINDS = ("worker", "router", "scheduler", "controller")
"""The kinds of processes that steps of an application run in."""
_KEPT_UP = RetryPolicy(max_retries=5, backoff=1.0, cap=60.0)
_ONCE = RetryPolicy(max_retries=0)


@dataclass(frozen=True, slots=True)
class BootStep:
    """One step of a process. Raises Misconfigured.

    `run` gets what it needs by the names of its parameters: `app`, `settings`, `logger`, `worker`, `inbox`, and the
    values that required steps returned.
    """

    name: str
    # A function that prepares something and returns: `async def` on Trio, or `def` in a thread. Or a class or function
    # that keeps running: `async def run(self, *, task_status)`. Or the text "module:name" of one of these, for modules
    # that import the application.
    run: Any
    # The steps that must be up first, of the application and of celery5.
    requires: Sequence[str] = ()
    # Whether the worker continues if the step does not start, and starts it again by the command `retry-boot-step`;
    # otherwise the worker stops.
    optional: bool = False
    # Seconds.
    start_limit: float = 30.0
    stop_limit: float = 30.0
    # By default 5 retries for a step that is optional or stays, and none for others.
    retry: RetryPolicy | Mapping[str, Any] | None = None
    # Called when the step is stopped.
    undo: Callable[..., Any] | str | None = None
    # Whether it keeps running. It is up as soon as it runs, unless it takes a `task_status`.
    stays: bool = False
    # The circuit breaker of a step that stays; while it is open the step is not started again.
    breaker: BreakerPolicy | None = None
    # Health checks that trip the breaker, too. Workers perform them.
    checks: Sequence[HealthCheck] = ()
    # The kinds of processes that it runs in: worker, router, scheduler, controller.
    process_kinds: Sequence[str] = ("worker",)
    # The event loop of its `async def` functions, by default that of the application: `asyncio` is the one of the
    # asyncio tasks of a worker, for a pool of connections that these share.
    loop: EventLoop | None = None

    def __post_init__(self) -> None:
        name: Any = self.name
        if not isinstance(name, str) or not re.fullmatch(r"[^\s,:]{1,100}", name):
            raise Misconfigured(
                f"boot step name {name!r}: use 1 to 100 characters without spaces, commas or colons"
            )
        requires = (self.requires,) if isinstance(self.requires, str) else tuple(self.requires)
        if not all(isinstance(cast("object", step), str) for step in requires):
            raise Misconfigured(f"boot step {name!r} requires {self.requires!r}: give the names of steps")
        object.__setattr__(self, "requires", requires)
        for limit in ("start_limit", "stop_limit"):
            value: Any = getattr(self, limit)
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise Misconfigured(f"boot step {name!r}: {limit} is {value!r}: give seconds, more than 0")
        if self.retry is not None:
            try:
                object.__setattr__(self, "retry", RetryPolicy.parse(self.retry))
            except Misconfigured as error:
                raise Misconfigured(f"boot step {name!r}: {error}") from None
        if not (callable(self.run) or hasattr(self.run, "run") or _is_place(self.run)):
            raise Misconfigured(
                f"boot step {name!r}: run is {self.run!r}: give a function or a class with run()"
            )
        if not (self.undo is None or callable(self.undo) or _is_place(self.undo)):
            raise Misconfigured(f"boot step {name!r}: undo is {self.undo!r}: give a function")
        object.__setattr__(self, "process_kinds", _check_process_kinds(name, self.process_kinds))
        if self.loop == "asyncio":
            object.__setattr__(self, "requires", (*requires, "asyncio"))
        object.__setattr__(self, "checks", _guard(self))

    @property
    def retry_state(self) -> RetryState:
        """The state of its retries before the first start: whether it is optional, and its retry policy."""
        default = _KEPT_UP if self.optional or self.stays else _ONCE
        return RetryState(optional=self.optional, policy=RetryPolicy.parse(self.retry or default))


def service(
    run: Any,
    /,
    *,
    name: str = "",
    requires: Sequence[str] = ("publishing",),
    optional: bool = False,
    start_limit: float = 30.0,
    stop_limit: float = 30.0,
    retry: RetryPolicy | Mapping[str, Any] | None = None,
    breaker: BreakerPolicy | None = None,
    checks: Sequence[HealthCheck] = (),
    process_kinds: Sequence[str] = ("worker",),
    loop: EventLoop | None = None,
) -> BootStep:
    """Return a step that runs until the process stops, and is restarted when it crashes.

    The parameters are those of `BootStep`. The default `name` comes from the name of the class or function:
    `StockPrices` is stock-prices. By default a service requires `publishing`: it may send jobs, and stops before
    publishing does. Its `breaker` trips by default after three crashes in a row, and prevents a restart for 30 s.
    Raises Misconfigured.
    """
    called = run.rpartition(":")[2] if isinstance(run, str) else getattr(run, "__name__", type(run).__name__)
    name = name or re.sub(r"(?<=[a-z0-9])(?=[A-Z])|_", "-", called).lower().strip("-<>")
    return BootStep(
        name,
        run,
        requires,
        optional,
        start_limit,
        stop_limit,
        retry,
        stays=True,
        breaker=breaker,
        checks=checks,
        process_kinds=process_kinds,
        loop=loop,
    )


def select_steps(steps: Sequence[BootStep], process_kind: str) -> tuple[BootStep, ...]:
    """Return those of the steps that run in processes of a kind."""
    return tuple(step for step in steps if process_kind in step.process_kinds)


def check_boot_steps(
    bootsteps: Sequence[Any], services: Sequence[Any], loop: EventLoop = "trio"
) -> tuple[BootStep, ...]:
    """Return all steps that an application adds, which run in its `loop` if they name none.

    Raises Misconfigured for an invalid step or a duplicate name.
    """
    for name, values in (("bootsteps", bootsteps), ("services", services)):
        if isinstance(values, str) or not isinstance(cast("object", values), Sequence):
            raise Misconfigured(f"{name} is {values!r}: give a list")
    for step in bootsteps:
        if not isinstance(step, BootStep):
            raise Misconfigured(f"bootsteps has {step!r}: give BootStep(name, run, ...)")
    steps = [*bootsteps, *(step if isinstance(step, BootStep) else service(step) for step in services)]
    names = [step.name for step in steps]
    duplicates = [name for name in names if names.count(name) > 1]
    if duplicates:
        raise Misconfigured(f"two boot steps or services are named {duplicates[0]!r}: give one another name")
    return tuple(replace(step, loop=loop) if step.loop is None else step for step in steps)


def _check_process_kinds(name: str, kinds: Any) -> tuple[str, ...]:
    """Return the kinds of processes of a step. Raises Misconfigured."""
    given: tuple[Any, ...] = (kinds,) if isinstance(kinds, str) else tuple(kinds)
    if not given:
        raise Misconfigured(f"boot step {name!r}: process_kinds is empty: give {', '.join(PROCESS_KINDS)}")
    for kind in given:
        if kind not in PROCESS_KINDS:
            raise Misconfigured(
                f"boot step {name!r}: process_kinds has {kind!r}; {did_you_mean(str(kind), PROCESS_KINDS)}"
            )
    return given


def _guard(step: BootStep) -> tuple[HealthCheck, ...]:
    """Return the health checks of a step. Raises Misconfigured for an invalid check, breaker or function."""
    checks = validate_checks(step.checks, step.breaker, f"boot step {step.name!r}")
    for function in (step.run, step.undo):
        refuse_injected(function, f"boot step {step.name!r}")
    if step.loop is not None:
        check_loop(step.loop, f"boot step {step.name!r}")
    if checks and "worker" not in step.process_kinds:
        raise Misconfigured(
            f"service {step.name!r} has health checks, which only workers perform: add 'worker' to process_kinds"
        )
    if not step.stays and (step.breaker is not None or checks):
        raise Misconfigured(f"boot step {step.name!r}: breaker and checks are for services, which stay")
    if step.breaker is not None and step.breaker.mode == "fail":
        raise Misconfigured(
            f"service {step.name!r} has no jobs to fail: its breaker's mode is delay, watch or off"
        )
    return checks


def _is_place(run: Any) -> bool:
    """Return whether `run` is the text "module:name", which names an object in a module."""
    return isinstance(run, str) and bool(re.fullmatch(r"[\w.]+:[\w.]+", run))
