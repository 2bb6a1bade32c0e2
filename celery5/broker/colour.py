"""Colour: whether the caller is in Trio, in asyncio, or in plain Python; run coroutines that are written once in each.

In plain Python such a coroutine runs to its end without an event loop: each call that it awaits blocks.

No loop is imported before it is needed: a loop that nobody has imported cannot be running, and a Django process pays
nothing for Trio.
"""

import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, Protocol, TypeVar

from celery5.broker.call import Call
from celery5.errors import BlockingInEventLoop

if TYPE_CHECKING:
    from celery5.broker.driver import (
        AsyncDriver,
        AsyncResultWaiter,
        BlockingDriver,
        ResultWaiter,
        StopCondition,
    )

Colour = Literal["trio", "asyncio"]

A = TypeVar("A", bound="ConnectedApplication")
P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


def current_colour() -> Colour | None:
    """Return the event loop that runs the caller; None in plain Python and in the worker threads of both loops."""
    trio = sys.modules.get("trio")
    if trio is not None and trio.lowlevel.in_trio_task():
        return "trio"
    asyncio = sys.modules.get("asyncio")
    if asyncio is not None and asyncio._get_running_loop() is not None:
        return "asyncio"
    return None


def check_may_block() -> None:
    """Raise BlockingInEventLoop inside an event loop. The error names the coroutine to await instead."""
    colour = current_colour()
    if colour is not None:
        name = _find_coroutine_name(sys._getframe(1))  # pyright: ignore[reportPrivateUsage]
        raise BlockingInEventLoop(f"this would block the {colour} event loop: await {name}(...) instead")


def _find_coroutine_name(frame: FrameType | None) -> str:
    """Return the name of the coroutine for the call of the public API that led to `frame`.

    It is read off the stack, since the alternative is to pass it through every function between the API and the
    driver. The outermost function of this package that has a counterpart is the one that the user called.
    """
    name, package = "get_async_driver", __name__.partition(".")[0]
    while frame is not None and str(frame.f_globals.get("__name__")).partition(".")[0] == package:
        name = _get_counterpart(frame) or name
        frame = frame.f_back
    return name


def _get_counterpart(frame: FrameType) -> str:
    """Return how the coroutine beside a function is reached: `delay` has `adelay`, `wait` has `wait_async`.

    A class that is reached through an attribute of the application names that as `REACHED_AS`. '' for none.
    """
    function, owner = frame.f_code.co_name, frame.f_locals.get("self", frame.f_locals.get("cls"))
    for counterpart in (f"a{function}", f"{function}_async"):
        if owner is None and counterpart in frame.f_globals:
            return counterpart
        kind = owner if isinstance(owner, type) else type(owner)
        if owner is not None and hasattr(kind, counterpart):
            return f"{getattr(kind, 'REACHED_AS', '')}{counterpart}"
    return ""


async def run_in_thread(function: Callable[[], T]) -> T:
    """Call `function` in a thread of Trio or asyncio and return its result. A cancelled call is abandoned there.

    In plain Python it is called directly.
    """
    colour = current_colour()
    if colour is None:
        return function()
    if colour == "trio":
        import trio

        return await trio.to_thread.run_sync(function, abandon_on_cancel=True)
    import asyncio

    return await asyncio.to_thread(function)


class BlockingDriverAdapter:
    """Makes an `AsyncDriver` of a blocking driver."""

    def __init__(self, redis: "BlockingDriver") -> None:
        self._redis = redis

    @property
    def has_connected(self) -> bool:
        """Whether the server may have answered before. Drivers of event loops exist only after it has."""
        return bool(getattr(self._redis, "has_connected", True))

    async def perform(self, call: Call[T], /) -> T:
        """Perform one call."""
        return self._redis.perform(call)

    async def perform_all(self, calls: Sequence[Call[T]], /) -> list[T]:
        """Perform several calls in one write."""
        return self._redis.perform_all(calls)


class BlockingWaiterAdapter:
    """Makes an `AsyncResultWaiter` of a blocking waiter."""

    def __init__(self, waiter: "ResultWaiter") -> None:
        self._waiter = waiter

    async def wait(
        self, keys: Sequence[str], *, timeout: float | None, enough: "StopCondition | None" = None
    ) -> dict[str, bytes]:
        """Wait like `ResultWaiter.wait`."""
        return self._waiter.wait(keys, timeout=timeout, enough=enough)


class AwaitableConnections(Protocol):
    """The connections that a coroutine of any colour needs. `Connections` is an implementation."""

    async def get_async_driver(self) -> "AsyncDriver":
        """Return the driver."""
        ...

    async def get_async_result_waiter(self) -> "AsyncResultWaiter":
        """Return the waiter for results."""
        ...


class ConnectionsInPlainPython(Protocol):
    """The connections that `BlockingConnections` needs. `Connections` is an implementation."""

    def get_blocking_driver(self) -> "BlockingDriver":
        """Return the blocking driver. Raises BlockingInEventLoop."""
        ...

    def get_result_waiter(self) -> "ResultWaiter":
        """Return the blocking waiter for results. Raises BlockingInEventLoop."""
        ...


class BlockingConnections:
    """The connections of an application for a coroutine that runs in plain Python, by `run_blocking`.

    Both methods raise BlockingInEventLoop inside an event loop.
    """

    def __init__(self, connections: ConnectionsInPlainPython) -> None:
        self._connections = connections

    async def get_async_driver(self) -> "AsyncDriver":
        """Return the blocking driver."""
        return BlockingDriverAdapter(self._connections.get_blocking_driver())

    async def get_async_result_waiter(self) -> "AsyncResultWaiter":
        """Return the blocking waiter."""
        return BlockingWaiterAdapter(self._connections.get_result_waiter())


class ConnectionsForEachColour(AwaitableConnections, ConnectionsInPlainPython, Protocol):
    """The connections of an application, for a caller of any colour. `Connections` is an implementation."""


class ConnectedApplication(Protocol):
    """An application, for the two functions that finish an operation for each colour."""

    @property
    def connections(self) -> ConnectionsForEachColour:
        """The connections to its broker, or to all of them."""
        ...


def run_in_plain_python(
    operation: "Callable[Concatenate[A, AsyncDriver, P], Coroutine[Any, Any, R]]",
    app: A,
    *args: P.args,
    **kwargs: P.kwargs,
) -> R:
    """Return what `operation(app, driver, ...)` returns, with the blocking driver of the application.

    An operation is written once, as a coroutine. A method of the API runs it by this function, and the method with the
    prefix `a` by `run_in_event_loop`. Raises BlockingInEventLoop inside an event loop.
    """
    driver = BlockingDriverAdapter(app.connections.get_blocking_driver())
    return run_blocking(operation(app, driver, *args, **kwargs))


async def run_in_event_loop(
    operation: "Callable[Concatenate[A, AsyncDriver, P], Coroutine[Any, Any, R]]",
    app: A,
    *args: P.args,
    **kwargs: P.kwargs,
) -> R:
    """Return what `operation(app, driver, ...)` returns, with the driver for the event loop of the caller."""
    return await operation(app, await app.connections.get_async_driver(), *args, **kwargs)


def run_blocking(coroutine: Coroutine[Any, Any, R]) -> R:
    """Run a coroutine in plain Python and return its result. It must not wait for an event loop."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        value: R = end.value
        return value
    raise AssertionError("plain Python waited for an event loop")


async def sleep(seconds: float) -> None:
    """Sleep, in the colour of the caller."""
    colour = current_colour()
    if colour == "trio":
        import trio

        await trio.sleep(seconds)
    elif colour == "asyncio":
        import asyncio

        await asyncio.sleep(seconds)
    else:
        time.sleep(seconds)  # noqa: ASYNC251  plain Python: there is no loop
