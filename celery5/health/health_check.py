"""Health checks: what may be wrong with a worker or with what its tasks need, checked at a period."""

import inspect
import math
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeVar, cast, get_args, overload

import msgspec

from celery5.broker.call import Call
from celery5.broker.driver import AsyncDriver
from celery5.broker.keys import Keys, QueueKeys
from celery5.errors import Misconfigured
from celery5.protocol.annotations import refuse_injected
from celery5.protocol.health.breaker import BreakerPolicy
from celery5.protocol.health.readings import CHECK_STATES, UNKNOWN_STATE, validate_states
from celery5.protocol.task_kinds import EventLoop, check_loop
from celery5.runners.surrounding import surround_call

T = TypeVar("T")

Scope = Literal["local", "group", "global"]
CallOnAsyncio = Callable[[Callable[[], Awaitable[object]]], Awaitable[object]]
CheckFunction = Callable[[], Any]
"""Returns the state, or several, of which the worst counts; or True or None (good), or False (the worst)."""

PERIOD = 30.0
"""The default period, in seconds."""
TIMEOUT = 10.0
"""The default timeout, in seconds."""


class CheckContext(msgspec.Struct, frozen=True):
    """What a check may use of the process that runs it."""

    keys: Keys
    redis: AsyncDriver | None = None
    """The connection to the broker that the check is about; None if it is about no broker."""
    default_loop: EventLoop = "trio"
    """The event loop of an `async def` whose check names none."""
    call_on_asyncio: CallOnAsyncio | None = None
    """Calls a function in the asyncio loop of the process; None where there is none."""

    async def perform(self, call: Call[T], /) -> T:
        """Perform one call. Raises LookupError if the check is about no broker."""
        if self.redis is None:
            raise LookupError("this check is not about a broker: it has no connection")
        return await self.redis.perform(call)

    def get_queue_keys(self, name: str, /) -> QueueKeys:
        """Return the keys of a queue."""
        return self.keys.for_queue(name)


class ReportListener(Protocol):
    """Called with each report."""

    def __call__(self, check: "HealthCheck", state: str, why: str, /) -> None: ...


class HealthCheck:
    """A health check: it has a name, states, and functions that return which one it is in.

    Without functions it is in the state that was reported last, which is stale only when `period` is given.

    Args:
        function: A function that returns the state; `subscribe` adds more.
        states: The worst first, the good one last. When several hold, the first counts.
        period: Seconds between two runs; by default 30.
        timeout: Seconds that a run may take; by default 10, but no more than the period.
        allowed: How often a state may be seen within `window` before it trips the circuit breakers of the tasks and
            services that have this check; by default 2 times, `degraded` 10 times.
        window: Seconds; by default 12 periods.
        scope: `local`: each worker runs it. `group`: one worker runs it for all of its group (setting `worker_group`).
            `global`: one worker runs it for all. Shared states are kept in Redis.
        stale_after: Periods after which a state that was not seen again is stale.
        loop: The event loop of its functions that are `async def`; by default that of the application.

    Raises:
        Misconfigured: These do not fit together.
    """

    def __init__(
        self,
        name: str,
        function: CheckFunction | None = None,
        *,
        states: Sequence[str] = CHECK_STATES,
        period: float | None = None,
        timeout: float | None = None,
        allowed: Mapping[str, int] | None = None,
        window: float | None = None,
        scope: Scope = "local",
        stale_after: int = 3,
        loop: EventLoop | None = None,
    ) -> None:
        if not (isinstance(cast("object", name), str) and name) or any(
            character.isspace() or character in "{}" for character in name
        ):
            raise Misconfigured(f"health check name {name!r}: use 1 or more characters, no spaces, no braces")
        self.name: str = name
        self.states: tuple[str, ...] = validate_states(states, name)
        if loop is not None:
            check_loop(loop, f"health check {name}")
        self.loop: EventLoop | None = loop
        self.functions: list[CheckFunction] = []
        self._task_loops: dict[int, EventLoop] = {}
        if function is not None:
            self.subscribe(function)
        self.period: float = PERIOD if period is None else period
        self.timeout: float = min(TIMEOUT, self.period) if timeout is None else timeout
        self.window: float = 12 * self.period if window is None else window
        self.allowed: Mapping[str, int] = dict(self._get_default_allowed() if allowed is None else allowed)
        self.scope: Scope = scope
        self.stale_after: int = stale_after
        self.state: str = UNKNOWN_STATE
        """The state that was seen last in this process."""
        self.why: str = ""
        """Why it is in this state, from a check of an own class."""
        self._is_periodic = period is not None
        self._listeners: list[ReportListener] = []
        self._validate()

    def __repr__(self) -> str:
        return f"<HealthCheck {self.name}: {self.state}>"

    @property
    def good_state(self) -> str:
        """Return the good state."""
        return self.states[-1]

    @property
    def stale_after_seconds(self) -> float:
        """Return the seconds after which its state is stale."""
        has_period = self.functions or self._is_periodic or type(self).run_check is not HealthCheck.run_check
        return self.stale_after * self.period if has_period else math.inf

    @property
    def recheck_period(self) -> float | None:
        """Return the seconds after which it is run again while it is in a bad state; None: at its next period."""
        return None

    @property
    def is_polled(self) -> bool:
        """Return whether there is something to run at each period."""
        return bool(self.functions) or type(self).run_check is not HealthCheck.run_check

    def subscribe(self, function: CheckFunction) -> CheckFunction:
        """Run `function` or a task, too, at each period: `async def` in its event loop, `def` in a thread.

        The worst state that one of them returns counts. Raises Misconfigured for what cannot run without arguments.
        """
        own = _get_check_function(function, self.name)
        if self.loop == "asyncio" and not _is_async(own):
            raise Misconfigured(f"health check {self.name} is not async: loop='asyncio' is for async def")
        kind: Any = getattr(function, "kind", "")
        if kind in ("trio", "asyncio"):
            self._task_loops[id(own)] = kind
        self.functions.append(own)
        return function

    def record_state(self, state: str) -> None:
        """Record the state that this process has seen last."""
        self.state = state

    def report(self, state: str, why: str = "") -> None:
        """Report which state it is in, and why: from a task, a service or any thread of a worker.

        Elsewhere, as in a script, it does nothing. Raises Misconfigured for a state that the check does not have.
        """
        if state not in self.states:
            raise Misconfigured(
                f"health check {self.name} has no state {state!r}; it has: {', '.join(self.states)}"
            )
        for listener in list(self._listeners):
            listener(self, state, why)

    def attach(self, listener: ReportListener) -> None:
        """Call `listener` with each report from now on."""
        self._listeners.append(listener)

    def detach(self, listener: ReportListener) -> None:
        """Stop calling it."""
        if listener in self._listeners:
            self._listeners.remove(listener)

    async def run_check(self, function: CheckFunction | None, context: CheckContext) -> object:
        """Run one of its functions and return the state; a subclass may do something else. None: it has no function."""
        # An application is declared without an event loop.
        from celery5.runners.user_errors import call_in_thread

        if function is None:
            return None
        if _is_async(function):
            loop = self._task_loops.get(id(function)) or self.loop or context.default_loop
            if loop == "trio":
                return await function()
            if context.call_on_asyncio is None:
                raise Misconfigured(
                    f"health check {self.name}: there is no asyncio loop here: use def, or loop='trio'"
                )
            return await context.call_on_asyncio(function)
        is_own = getattr(function, "__module__", "").startswith("celery5.")
        call: Callable[[], object] = function if is_own else surround_call(function, "thread")
        return await call_in_thread(call, limiter=self._limiter())

    def _limiter(self) -> Any:
        """Return the limiter of the one thread that each check has: a function that hangs for ever takes no more.

        A forked child has its own: the thread that holds its parent's does not exist there.
        """
        import trio

        process, limiter = self.__dict__.get("_threads", (0, None))
        if process != os.getpid():
            limiter = trio.CapacityLimiter(1)
            self.__dict__["_threads"] = (os.getpid(), limiter)
        return limiter

    def _get_default_allowed(self) -> dict[str, int]:
        return {state: 10 if state == "degraded" else 2 for state in self.states[:-1]}

    def _validate(self) -> None:
        unknown = [state for state in self.allowed if state not in self.states]
        if unknown:
            raise Misconfigured(
                f"health check {self.name}: allowed names {unknown[0]!r}; its states are: {', '.join(self.states)}"
            )
        if self.good_state in self.allowed:
            raise Misconfigured(
                f"health check {self.name}: {self.good_state!r} is its good state and trips nothing"
            )
        if (
            not all(0 < seconds < math.inf for seconds in (self.period, self.timeout, self.window))
            or self.stale_after < 1
        ):
            raise Misconfigured(
                f"health check {self.name}: period, timeout, window and stale_after are more than 0"
            )
        if any(count < 0 for count in self.allowed.values()):
            raise Misconfigured(f"health check {self.name}: allowed takes counts of 0 or more")
        if self.scope not in get_args(Scope):
            raise Misconfigured(
                f"health check {self.name}: scope is {self.scope!r}; use {', '.join(map(repr, get_args(Scope)))}"
            )


def _is_async(function: CheckFunction) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004  an object whose call is async
    )


def _get_check_function(function_or_task: Any, check: str) -> CheckFunction:
    """Return the function to run; for a task, its own. Raises Misconfigured."""
    kind = getattr(function_or_task, "kind", "")
    function: Any = function_or_task.function if kind in ("trio", "asyncio", "thread") else function_or_task
    if kind == "boxed":
        raise Misconfigured(f"health check {check}: {function_or_task!r} is boxed: use async def, or def")
    if not callable(function):
        raise Misconfigured(f"health check {check}: {function_or_task!r} is no function")
    refuse_injected(function_or_task, f"health check {check}")
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise Misconfigured(
            f"health check {check}: {function_or_task!r} cannot be called without arguments: {error}"
        ) from None
    except ValueError:  # written in C: it has no signature
        pass
    return cast("CheckFunction", function)


def validate_checks(
    checks: Sequence[HealthCheck], breaker: BreakerPolicy | None, what: str
) -> tuple[HealthCheck, ...]:
    """Return the health checks of `what`, if its breaker fits them. Raises Misconfigured."""
    value: Any = checks
    for check in cast("Sequence[object]", value) if isinstance(value, list | tuple) else (value,):
        if not isinstance(check, HealthCheck):
            raise Misconfigured(
                f"{what}: checks has {check!r}; give HealthChecks, as @app.health_check makes them"
            )
    if breaker is not None and not isinstance(cast("object", breaker), BreakerPolicy):
        raise Misconfigured(f"{what}: breaker is {breaker!r}; give a BreakerPolicy(...)")
    known = {state for check in checks for state in check.states[:-1]}
    unknown = [state for state in (breaker and breaker.allowed) or () if state not in known]
    if unknown:
        hint = f"bad states of its checks are: {', '.join(sorted(known))}" if known else "it has no checks"
        raise Misconfigured(f"{what}: its breaker allows {unknown[0]!r}, but {hint}")
    return tuple(checks)


class DeclareCheck:
    """The decorator `@app.health_check`, with or without arguments. They are those of HealthCheck."""

    def __init__(self, checks: Sequence[HealthCheck] = (), *, has_asyncio: bool = True) -> None:
        self._has_asyncio = has_asyncio
        self.known: dict[str, HealthCheck] = {}
        for check in checks:
            self.add(check)

    @overload
    def __call__(self, function: CheckFunction, /) -> HealthCheck: ...
    @overload
    def __call__(
        self,
        *,
        name: str | None = None,
        states: Sequence[str] = CHECK_STATES,
        period: float | None = None,
        timeout: float | None = None,
        allowed: Mapping[str, int] | None = None,
        window: float | None = None,
        scope: Scope = "local",
        stale_after: int = 3,
        loop: EventLoop | None = None,
    ) -> Callable[[CheckFunction], HealthCheck]: ...
    def __call__(
        self, function: CheckFunction | None = None, *, name: str | None = None, **options: Any
    ) -> Any:
        """Declare a check. Raises Misconfigured."""

        def declare(function: CheckFunction) -> HealthCheck:
            if not callable(function):
                raise Misconfigured(f"@health_check takes a function, got {function!r}")
            return self.add(HealthCheck(name or str(getattr(function, "__name__", "")), function, **options))

        return declare if function is None else declare(function)

    def add(self, check: HealthCheck) -> HealthCheck:
        """Let the application's workers run a check. Raises Misconfigured when another one has its name."""
        if not isinstance(cast("object", check), HealthCheck):
            raise Misconfigured(f"checks are HealthChecks, got {check!r}")
        if check.loop == "asyncio" and not self._has_asyncio:
            raise Misconfigured(
                f"health check {check.name}: loop='asyncio': a Publisher has no asyncio loop: use def, or loop='trio'"
            )
        if self.known.setdefault(check.name, check) is not check:
            raise Misconfigured(f"two health checks are named {check.name!r}")
        return check
