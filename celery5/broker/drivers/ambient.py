"""Ambient: the driver and the waiting of whatever event loop the caller stands in, opened when first asked for.

A library function that awaits a result has no nursery of its own and nobody who would open and close
connections for it. They belong to the loop instead: one driver for each endpoint and each Trio run or asyncio
loop, closed when that ends.
"""

from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from celery5.broker.colour import current_colour
from celery5.broker.driver import AsyncDriver, AsyncResultWaiter
from celery5.broker.endpoint import Endpoint

if TYPE_CHECKING:
    from celery5.broker.drivers.on_trio import TrioRedis

T = TypeVar("T")


async def get_driver(endpoint: Endpoint) -> AsyncDriver:
    """The driver of this loop.

    Raises RuntimeError outside of Trio and asyncio, and in Trio, where a first connection is waited for, what
    `TrioRedis.run` raises.
    """
    if _on_trio():
        from celery5.broker.drivers import ambient_loops

        return await ambient_loops.get_trio_driver(endpoint)
    from celery5.broker.drivers import ambient_loops

    return (await ambient_loops.get_loop_connections(endpoint)).redis


async def get_result_waiter(endpoint: Endpoint) -> AsyncResultWaiter:
    """What waits for documents in this loop. Raises as `redis`."""
    if _on_trio():
        from celery5.broker.drivers import ambient_loops

        return await ambient_loops.get_trio_result_waiter(endpoint)
    from celery5.broker.drivers import ambient_loops

    return (await ambient_loops.get_loop_connections(endpoint)).results


@contextmanager
def lend_driver(endpoint: Endpoint, driver: "TrioRedis") -> Generator[None, None, None]:
    """Within this block `redis` gives `driver` to the whole Trio run:

    a worker lends its jobs its own connection.
    """
    from celery5.broker.drivers import ambient_loops

    with ambient_loops.lend_trio_driver(endpoint, driver):
        yield


def _on_trio() -> bool:
    colour = current_colour()
    if colour is None:
        raise RuntimeError("await this in Trio or asyncio: no event loop of either kind runs here")
    return colour == "trio"
