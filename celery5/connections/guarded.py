"""Guard the connections of an application: a check decides, at each use, whether they may be used."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from celery5.broker.colour import check_may_block, get_awaitable_colour
from celery5.broker.driver import AsyncDriver, AsyncResultWaiter, BlockingDriver, ResultWaiter
from celery5.connections.broker_connections import Connections

if TYPE_CHECKING:
    from celery5.broker.endpoint import Endpoint


class GuardedConnections(Connections):
    """Connections that nobody gets to use unless a check passes. Nothing is opened before it has.

    Args:
        guarded: The connections.
        check: Raises when they may not be used.
    """

    def __init__(self, guarded: Connections, check: Callable[[], None]) -> None:
        super().__init__("")
        self._guarded = guarded
        self._check = check

    @property
    def masked_url(self) -> str:
        """The URL of the broker."""
        return self._guarded.masked_url

    @property
    def endpoint(self) -> "Endpoint":
        """The broker's endpoint. Checked, too: whoever knows it may connect to it."""
        self._check()
        return self._guarded.endpoint

    def get(self, name: str) -> Connections:
        """Return the guarded connections to the broker of that name. Raises Misconfigured."""
        return GuardedConnections(self._guarded.get(name), self._check)

    def get_blocking_driver(self) -> BlockingDriver:
        """Return the driver for plain Python. Raises BlockingInEventLoop first, then what the check raises."""
        check_may_block()
        self._check()
        return self._guarded.get_blocking_driver()

    def get_result_waiter(self) -> ResultWaiter:
        """Return the waiter for results in plain Python. Raises like `get_blocking_driver`."""
        check_may_block()
        self._check()
        return self._guarded.get_result_waiter()

    async def get_async_driver(self) -> AsyncDriver:
        """Return the driver of the running event loop. Raises BlockingInEventLoop first, then what the check raises."""
        get_awaitable_colour()
        self._check()
        return await self._guarded.get_async_driver()

    async def get_async_result_waiter(self) -> AsyncResultWaiter:
        """Return the waiter for results of the running event loop. Raises like `get_async_driver`."""
        get_awaitable_colour()
        self._check()
        return await self._guarded.get_async_result_waiter()

    def close(self) -> None:
        """Close the connections: some may be open from before."""
        self._guarded.close()
