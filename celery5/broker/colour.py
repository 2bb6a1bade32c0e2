"""Colour: whether the caller is in Trio, in asyncio, or in plain Python; run coroutines that are written once in each.

In plain Python such a coroutine runs to its end without an event loop: each call that it awaits blocks.

No loop is imported before it is needed: a loop that nobody has imported cannot be running, and a Django process pays
nothing for Trio.
"""

import sys
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from contextvars import ContextVar
from functools import update_wrapper
from inspect import cleandoc
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, Protocol, TypeVar

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

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

BLOCKED_ON_LOOP = "plain Python waited for an event loop"


def current_colour() -> Colour | None:
    """Return the event loop that runs the caller; None in plain Python and in the worker threads of both loops."""
    trio = sys.modules.get("trio")
    if trio is not None and trio.lowlevel.in_trio_task():
        return "trio"
    asyncio = sys.modules.get("asyncio")
    if asyncio is not None and asyncio._get_running_loop() is not None:
        return "asyncio"
    return None


# The coroutine to await instead, while a blocking function runs inside an event loop; '' otherwise.
_COROUTINE_TO_AWAIT: ContextVar[str] = ContextVar("celery5_coroutine_to_await", default="")


def blocking(
    function: Callable[P, Coroutine[Any, Any, R]],
) -> Callable[[Callable[..., None]], Callable[P, R]]:
    """Return a decorator that makes the blocking twin of a coroutine function. It uses only the name of its stub.

        @blocking(aget)
        def get(self) -> None: ...

    The twin takes and returns the same. In plain Python the coroutine runs to its end without an event loop, since
    `Connections.get_async_driver` returns a blocking driver there. Inside an event loop the twin raises
    BlockingInEventLoop as soon as the coroutine needs a connection; a result that has arrived already is returned.

    A class that is reached through an attribute of the application names that as `REACHED_AS`, for the error.

    A stub and not `get = blocking(aget)`: pyright calls the type of that ambiguous. With `Final` it is a class
    variable, which no Protocol with the method accepts and no subclass may override.
    """
    name = function.__name__.lstrip("_")

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        coroutine = function(*args, **kwargs)
        if current_colour() is None:
            try:  # as `run_blocking` does, which would be one more line in the tracebacks of users
                coroutine.send(None)
            except StopIteration as end:
                value: R = end.value
                return value
            raise AssertionError(BLOCKED_ON_LOOP)
        owner: object = getattr(function, "__self__", args[0] if args else None)
        # What the user called, if that called another twin.
        to_await = _COROUTINE_TO_AWAIT.get() or f"{getattr(owner, 'REACHED_AS', '')}{name}"
        token = _COROUTINE_TO_AWAIT.set(to_await)
        try:
            return run_blocking(coroutine)
        finally:
            _COROUTINE_TO_AWAIT.reset(token)

    def replace(stub: Callable[..., None]) -> Callable[P, R]:
        update_wrapper(call, function)
        call.__name__, call.__qualname__ = stub.__name__, stub.__qualname__
        # Tracebacks, and code that looks for what was called, show the name of the twin.
        call.__code__ = call.__code__.replace(co_name=call.__name__, co_qualname=call.__qualname__)
        doc = cleandoc(function.__doc__ or "")
        call.__doc__ = f"{doc}\n\nFor plain Python: in Trio or asyncio, await `{name}`."
        return call

    return replace


def check_may_block(coroutine: str = "get_async_driver") -> None:
    """Raise BlockingInEventLoop inside an event loop. The error names the coroutine to await instead."""
    colour = current_colour()
    if colour is not None:
        name = _COROUTINE_TO_AWAIT.get() or coroutine
        raise BlockingInEventLoop(f"this would block the {colour} event loop: await {name}(...) instead")


def get_awaitable_colour() -> Colour | None:
    """Return the event loop that a coroutine of any colour may await; None in plain Python, where it blocks.

    Raises BlockingInEventLoop when a blocking twin runs the coroutine inside an event loop.
    """
    if _COROUTINE_TO_AWAIT.get():
        check_may_block()
    return current_colour()


async def run_in_thread(function: Callable[[], T]) -> T:
    """Call `function` in a thread of Trio or asyncio and return its result. A cancelled call is abandoned there.

    In plain Python it is called directly.
    """
    colour = get_awaitable_colour()
    if colour is None:
        return function()
    if colour == "trio":
        import trio

        return await trio.to_thread.run_sync(function, abandon_on_cancel=True)
    import asyncio

    return await asyncio.to_thread(function)


class SettableEvent(Protocol):
    """An event of some colour: once it is set, all who wait for it continue."""

    def set(self) -> object:
        """Set it."""
        ...

    async def wait(self) -> object:
        """Wait until it is set."""
        ...


class _ThreadEvent:
    def __init__(self) -> None:
        self._event = threading.Event()

    def set(self) -> None:
        self._event.set()

    async def wait(self) -> None:
        self._event.wait()


def make_event() -> SettableEvent:
    """Return an event in the colour of the caller: for the tasks of its loop, or for threads."""
    colour = get_awaitable_colour()
    if colour is None:
        return _ThreadEvent()
    if colour == "trio":
        import trio

        return trio.Event()
    import asyncio

    return asyncio.Event()


def get_running_loop() -> object:
    """Return what stands for the event loop of the caller; None in plain Python."""
    colour = current_colour()
    if colour is None:
        return None
    if colour == "trio":
        import trio

        return trio.lowlevel.current_trio_token()
    import asyncio

    return asyncio.get_running_loop()


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


def run_blocking(coroutine: Coroutine[Any, Any, R]) -> R:
    """Run a coroutine in plain Python and return its result. It must not wait for an event loop."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        value: R = end.value
        return value
    raise AssertionError(BLOCKED_ON_LOOP)


async def sleep(seconds: float) -> None:
    """Sleep, in the colour of the caller."""
    colour = get_awaitable_colour()
    if colour == "trio":
        import trio

        await trio.sleep(seconds)
    elif colour == "asyncio":
        import asyncio

        await asyncio.sleep(seconds)
    else:
        time.sleep(seconds)  # noqa: ASYNC251  plain Python: there is no loop
