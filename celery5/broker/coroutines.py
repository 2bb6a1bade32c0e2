"""Run coroutines that are written once on Trio, on asyncio and in plain Python.

In plain Python such a coroutine runs to its end without an event loop: each call that it awaits blocks.
"""

import time
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar

from celery5.broker.call import Call
from celery5.broker.colour import current_colour

if TYPE_CHECKING:
    from celery5.broker.driver import AsyncDriver, AsyncResultWaiter, BlockingDriver, ResultWaiter
    from celery5.broker.waiting.waits import StopCondition

A = TypeVar("A", bound="ConnectedApplication")
P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class BlockingDriverAdapter:
    """Makes an `AsyncDriver` of a blocking driver."""

    def __init__(self, redis: "BlockingDriver") -> None:
        self._redis = redis

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
