"""The connections of an application to one broker, in each colour.

They are opened when first needed: a Django process never loads Trio, and importing celery5 opens no connection.
"""

import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, TypeVar, cast

from celery5.broker.colour import (
    BlockingDriverAdapter,
    BlockingWaiterAdapter,
    check_may_block,
    get_awaitable_colour,
)
from celery5.broker.driver import AsyncDriver, AsyncResultWaiter, BlockingDriver, ResultWaiter
from celery5.errors import BrokerError, Misconfigured
from celery5.protocol.brokers import DEFAULT_BROKER, format_unknown_broker
from celery5.protocol.masking import mask_passwords

if TYPE_CHECKING:
    from celery5.broker.drivers.on_trio import TrioRedis
    from celery5.broker.drivers.opening import BlockingBroker
    from celery5.broker.endpoint import Endpoint

T = TypeVar("T")


class Connections:
    """The connections of one application to the broker at `url`."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._lock = threading.Lock()
        self._endpoint: Endpoint | None = None
        self._blocking: BlockingBroker | None = None
        self._results: ResultWaiter | None = None

    def get(self, name: str) -> "Connections":
        """Return the connections to the broker of that name. Raises Misconfigured."""
        if name != DEFAULT_BROKER:
            raise Misconfigured(format_unknown_broker(name, (DEFAULT_BROKER,)))
        return self

    @property
    def masked_url(self) -> str:
        """The URL without its password."""
        return str(mask_passwords(self._url))

    @property
    def endpoint(self) -> "Endpoint":
        """The broker's endpoint. Raises BadBrokerURL."""
        if self._endpoint is None:
            from celery5.broker.endpoint import Endpoint

            self._endpoint = Endpoint.from_url(self._url)
        return self._endpoint

    def get_blocking_driver(self) -> BlockingDriver:
        """Return the driver for plain Python. Raises BlockingInEventLoop inside an event loop."""
        check_may_block()
        return self._get_driver_without_loop()

    def _get_driver_without_loop(self) -> BlockingDriver:
        return self._blocking or self._connect()

    def _connect(self) -> "BlockingBroker":
        if self._blocking is None:
            from celery5.broker.drivers.opening import open_blocking

            with self._lock:
                # Another thread may have been first.
                self._blocking = cast("BlockingBroker | None", self._blocking) or open_blocking(self.endpoint)
        return self._blocking

    def is_known_as_server(self) -> bool:
        """Return whether the broker is surely a single server. Asks it if no server has answered yet; may block.

        A broker that cannot be reached may be a cluster.
        """
        redis = self._blocking or self._connect()
        if not redis.has_connected:
            from celery5.broker.calls.jobs import PING

            with suppress(BrokerError):
                redis.perform(PING)
        return redis.has_connected and redis.endpoint.topology != "cluster"

    def get_result_waiter(self) -> ResultWaiter:
        """Return the waiter for results in plain Python. Raises BlockingInEventLoop inside an event loop."""
        check_may_block()
        redis = self._blocking or self._connect()
        if self._results is None:
            from celery5.broker.waiting.opening import BrokerResultWaiter

            with self._lock:
                self._results = cast("ResultWaiter | None", self._results) or BrokerResultWaiter(redis)
        return self._results

    async def get_async_driver(self) -> AsyncDriver:
        """Return the driver of the running event loop; in plain Python one whose calls block.

        Raises BlockingInEventLoop when a blocking function asks for it inside an event loop.
        """
        if get_awaitable_colour() is None:
            return BlockingDriverAdapter(self._get_driver_without_loop())
        return await self._get_driver_of_loop()

    async def _get_driver_of_loop(self) -> AsyncDriver:
        from celery5.broker import ambient
        from celery5.broker.reply_limit import LimitedDriver, get_reply_limit

        driver, limit = await ambient.get_driver(self.endpoint), get_reply_limit()
        return driver if limit is None else LimitedDriver(driver, limit, self.endpoint.masked_url)

    async def get_async_result_waiter(self) -> AsyncResultWaiter:
        """Return the waiter for results of the running event loop; in plain Python one that blocks.

        Raises BlockingInEventLoop when a blocking function asks for it inside an event loop.
        """
        if get_awaitable_colour() is None:
            return BlockingWaiterAdapter(self.get_result_waiter())
        return await self._get_result_waiter_of_loop()

    async def _get_result_waiter_of_loop(self) -> AsyncResultWaiter:
        from celery5.broker import ambient

        return await ambient.get_result_waiter(self.endpoint)

    @contextmanager
    def lend_driver(self, redis: "TrioRedis", endpoint: "Endpoint") -> Generator[None, None, None]:
        """Let `get_async_driver` return `redis` for the broker at `endpoint` in this Trio run, within this block.

        A worker lends its own connection to its jobs.
        """
        from celery5.broker import ambient

        with ambient.lend_driver(endpoint, redis):
            yield

    def close(self) -> None:
        """Close the connections of plain Python."""
        with self._lock:
            blocking, self._blocking = self._blocking, None
            results, self._results = self._results, None
        if results is not None:
            results.close()
        if blocking is not None:
            blocking.close()
