"""Return the driver and the result waiter of the running event loop, which are opened when first needed.

A library function that awaits a result has no nursery in which its connections could live. So they belong to the
loop:
one driver for each endpoint and each Trio run or asyncio loop, closed when that ends.
"""

from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from celery5.broker import ambient_asyncio, ambient_trio
from celery5.broker.colour import current_colour
from celery5.broker.driver import AsyncDriver, AsyncResultWaiter
from celery5.broker.endpoint import Endpoint

if TYPE_CHECKING:
    from celery5.broker.drivers.on_trio import TrioRedis

T = TypeVar("T")


async def get_driver(endpoint: Endpoint) -> AsyncDriver:
    """Return the driver of this loop.

    On Trio this waits for the first connection.

    Raises:
        RuntimeError: There is no Trio or asyncio loop.
        BrokerError: On Trio: what `TrioRedis.run` raised.
    """
    if _on_trio():
        return await ambient_trio.get_trio_driver(endpoint)
    return (await ambient_asyncio.get_loop_connections(endpoint)).redis


async def get_result_waiter(endpoint: Endpoint) -> AsyncResultWaiter:
    """Return the waiter for documents of this loop. Raises like `get_driver`."""
    if _on_trio():
        return await ambient_trio.get_trio_result_waiter(endpoint)
    return (await ambient_asyncio.get_loop_connections(endpoint)).results


@contextmanager
def lend_driver(endpoint: Endpoint, driver: "TrioRedis") -> Generator[None, None, None]:
    """Let `get_driver` return `driver` in the whole Trio run within this block.

    A worker lends its own connection to its jobs.
    """
    with ambient_trio.lend_trio_driver(endpoint, driver):
        yield


def _on_trio() -> bool:
    colour = current_colour()
    if colour is None:
        raise RuntimeError("await this in Trio or asyncio: no event loop of either kind runs here")
    return colour == "trio"
