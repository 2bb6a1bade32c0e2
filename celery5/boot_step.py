"""Boot step: what a process brings up before it works: celery5's own parts, and those that an application adds.

A worker of celery5 is a graph of these, and an application adds to it with `App(bootsteps=[...], services=[...])`.
Both are the same: a service is a step that stays.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from celery5.errors import Misconfigured
from celery5.health.health_check import HealthCheck, validate_checks
from celery5.protocol.health.breaker import BreakerPolicy
from celery5.protocol.job.retry_policy import RetryPolicy
from celery5.protocol.process.supervision import RetryState

_KEPT_UP = RetryPolicy(max_retries=5, backoff=1.0, cap=60.0)
_ONCE = RetryPolicy(max_retries=0)


@dataclass(frozen=True, slots=True)
class BootStep:
    """One step of a process.

    `run` is a function that prepares something and returns, `async def` on Trio or `def` in a thread; or a class or
    function that stays and says when it is up, `async def run(self, *, task_status)`; or where one of them is,
    "module:name", for modules that import the application. It asks for what it needs by the names of its parameters:
    `app`, `settings`, `logger`, `worker`, `inbox`, and what the steps gave that it `requires`. `requires` names the
    steps that must be up before it, the application's own and celery5's. When an `optional` step does not come up the
    worker goes on without it, and tries it again by the command `retry-boot-step`; else it stops. `start_limit` and
    `stop_limit` are seconds. `retry` says how often and when to try again (default: 5 times for what is optional or
    stays, else never). `undo` is called when the step is taken down. What `stays` is up as soon as it runs, unless it
    takes a `task_status`. The circuit `breaker` of what stays, and the health `checks` that trip it, too, keep it from
    being started again for a while. Raises Misconfigured.
    """

    name: str
    run: Any
    requires: Sequence[str] = ()
    optional: bool = False
    start_limit: float = 30.0
    stop_limit: float = 30.0
    retry: RetryPolicy | Mapping[str, Any] | None = None
    undo: Callable[..., Any] | str | None = None
    stays: bool = False
    breaker: BreakerPolicy | None = None
    checks: Sequence[HealthCheck] = ()

    def __post_init__(self) -> None:
        said: Any = self.name
        if not isinstance(said, str) or not re.fullmatch(r"[^\s,:]{1,100}", said):
            raise Misconfigured(
                f"boot step name {said!r}: use 1 to 100 characters without spaces, commas or colons"
            )
        requires = (self.requires,) if isinstance(self.requires, str) else tuple(self.requires)
        if not all(isinstance(cast("object", each), str) for each in requires):
            raise Misconfigured(f"boot step {said!r} requires {self.requires!r}: give the names of steps")
        object.__setattr__(self, "requires", requires)
        for limit in ("start_limit", "stop_limit"):
            value: Any = getattr(self, limit)
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise Misconfigured(f"boot step {said!r}: {limit} is {value!r}: give seconds, more than 0")
        if self.retry is not None:
            try:
                object.__setattr__(self, "retry", RetryPolicy.parse(self.retry))
            except Misconfigured as error:
                raise Misconfigured(f"boot step {said!r}: {error}") from None
        if not (callable(self.run) or hasattr(self.run, "run") or _is_place(self.run)):
            raise Misconfigured(
                f"boot step {said!r}: run is {self.run!r}: give a function or a class with run()"
            )
        if not (self.undo is None or callable(self.undo) or _is_place(self.undo)):
            raise Misconfigured(f"boot step {said!r}: undo is {self.undo!r}: give a function")
        object.__setattr__(self, "checks", _guard(self))

    @property
    def retry_state(self) -> RetryState:
        """What it has before it: whether it is optional, and how often it is tried again."""
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
) -> BootStep:
    """A step that stays until the worker stops, and is restarted when it crashes.

    The parameters are those of `BootStep`. `name` is made of the class' or the function's, `StockPrices` is
    stock-prices; by default it may send jobs, and stops before that ends. Its `breaker` trips after three crashes in a
    row, and keeps it from being started again for 30 s, unless said otherwise. Raises Misconfigured.
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
    )


def check_boot_steps(bootsteps: Sequence[Any], services: Sequence[Any]) -> tuple[BootStep, ...]:
    """All steps that an application adds. Raises Misconfigured for what is none, and for a name that is there twice."""
    for name, said in (("bootsteps", bootsteps), ("services", services)):
        if isinstance(said, str) or not isinstance(cast("object", said), Sequence):
            raise Misconfigured(f"{name} is {said!r}: give a list")
    for each in bootsteps:
        if not isinstance(each, BootStep):
            raise Misconfigured(f"bootsteps has {each!r}: give BootStep(name, run, ...)")
    steps = [*bootsteps, *(each if isinstance(each, BootStep) else service(each) for each in services)]
    names = [each.name for each in steps]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise Misconfigured(f"two boot steps or services are named {twice[0]!r}: give one another name")
    return tuple(steps)


def _guard(step: BootStep) -> tuple[HealthCheck, ...]:
    """Its health checks. Raises Misconfigured when they, or its breaker, are none for it."""
    checks = validate_checks(step.checks, step.breaker, f"boot step {step.name!r}")
    if not step.stays and (step.breaker is not None or checks):
        raise Misconfigured(f"boot step {step.name!r}: breaker and checks are for services, which stay")
    if step.breaker is not None and step.breaker.mode == "fail":
        raise Misconfigured(
            f"service {step.name!r} has no jobs to fail: its breaker's mode is delay, watch or off"
        )
    return checks


def _is_place(run: Any) -> bool:
    """Whether it says where code is: "module:name"."""
    return isinstance(run, str) and bool(re.fullmatch(r"[\w.]+:[\w.]+", run))
