"""Refuse what would reach a broker while `recorded` keeps what an application sends."""

import sys
from collections.abc import Sequence
from types import FrameType
from typing import TYPE_CHECKING, NoReturn, TypeVar

from celery5.broker.call import Call
from celery5.broker.colour import check_may_block, current_colour
from celery5.broker.driver import AsyncDriver, AsyncResultWaiter, BlockingDriver, ResultWaiter
from celery5.broker.waiting.waits import StopCondition
from celery5.connections.broker_connections import Connections
from celery5.errors import NotRecorded

if TYPE_CHECKING:
    from celery5.broker.endpoint import Endpoint

T = TypeVar("T")

PACKAGE = __name__.partition(".")[0]


class RefusingConnections(Connections):
    """The connections of an application that open none: every call and every wait raises NotRecorded.

    Only a worker of the application that runs in this process, by `running_worker`, keeps the one that it has.

    Args:
        replaced: The connections that are there otherwise. None of them is opened.
    """

    def __init__(self, replaced: Connections) -> None:
        super().__init__("")
        self._replaced = replaced

    @property
    def masked_url(self) -> str:
        """The URL of the broker that is not used."""
        return self._replaced.masked_url

    @property
    def endpoint(self) -> "Endpoint":
        """Raises NotRecorded: whoever knows the endpoint may connect to it."""
        refuse()

    def get(self, name: str) -> Connections:
        """Return these connections, once there is a broker of that name. Raises Misconfigured."""
        self._replaced.get(name)
        return self

    def get_blocking_driver(self) -> BlockingDriver:
        """Return a driver that refuses. Raises BlockingInEventLoop inside an event loop, as others do."""
        check_may_block()
        return _RefusingDriver()

    def get_result_waiter(self) -> ResultWaiter:
        """Return a waiter that refuses. Raises BlockingInEventLoop inside an event loop."""
        check_may_block()
        return _RefusingWaiter()

    async def get_async_driver(self) -> AsyncDriver:
        """Return a driver that refuses; in the Trio run of a worker, that of the worker."""
        if self._is_in_worker():
            return await self._replaced.get_async_driver()
        return _AsyncRefusingDriver()

    async def get_async_result_waiter(self) -> AsyncResultWaiter:
        """Return a waiter that refuses; in the Trio run of a worker, that of the worker."""
        if self._is_in_worker():
            return await self._replaced.get_async_result_waiter()
        return _AsyncRefusingWaiter()

    def close(self) -> None:
        """Close the connections that are replaced: there may be some from before."""
        self._replaced.close()

    def _is_in_worker(self) -> bool:
        if current_colour() != "trio":
            return False
        from celery5.broker.drivers import ambient_loops

        return ambient_loops.has_lent_driver()


class _RefusingDriver:
    def perform(self, call: Call[T], /) -> T:
        refuse()

    def perform_all(self, calls: Sequence[Call[T]], /) -> list[T]:
        return refuse() if calls else []


class _AsyncRefusingDriver:
    async def perform(self, call: Call[T], /) -> T:
        refuse()

    async def perform_all(self, calls: Sequence[Call[T]], /) -> list[T]:
        return refuse() if calls else []


class _RefusingWaiter:
    def wait(
        self, keys: Sequence[str], *, timeout: float | None, enough: StopCondition | None = None
    ) -> dict[str, bytes]:
        refuse()

    def close(self) -> None:
        """There is nothing to close."""


class _AsyncRefusingWaiter:
    async def wait(
        self, keys: Sequence[str], *, timeout: float | None, enough: StopCondition | None = None
    ) -> dict[str, bytes]:
        refuse()


def refuse() -> NoReturn:
    """Raise NotRecorded, which names what the test has called."""
    name = _find_called(sys._getframe(1))  # pyright: ignore[reportPrivateUsage]
    raise NotRecorded(
        f"{name} needs a broker, and recorded(app) opens no connection: it keeps jobs and events that are sent, whose "
        "run() returns the results; test everything else with running_worker(app)"
    )


def _find_called(frame: FrameType | None) -> str:
    """Return the name of the function of this package that code outside of it has called, to get to `frame`."""
    name = ""
    while frame is not None and str(frame.f_globals.get("__name__")).partition(".")[0] == PACKAGE:
        name = frame.f_code.co_qualname
        frame = frame.f_back
    return f"{name}()" if name and not name.startswith(("_", "<")) and "<" not in name else "this"
