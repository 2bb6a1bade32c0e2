"""Connections: an application's way to its broker, in the colour of whoever asks.

Opened when first needed and never before: a Django process pays nothing for Trio, an importer nothing for Redis.
"""

import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar, cast

from celery5.broker.colour import check_may_block
from celery5.broker.driver import AsyncDriver, AsyncResultWaiter, BlockingDriver, ResultWaiter
from celery5.protocol.masking import mask_passwords

if TYPE_CHECKING:
    from celery5.broker.drivers.blocking import BlockingRedis
    from celery5.broker.drivers.on_trio import TrioRedis
    from celery5.broker.endpoint import Endpoint

T = TypeVar("T")


class Connections:
    """The connections of one application to the broker at `url`."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._lock = threading.Lock()
        self._endpoint: Endpoint | None = None
        self._blocking: BlockingRedis | None = None
        self._results: ResultWaiter | None = None

    @property
    def masked_url(self) -> str:
        """The URL without its password."""
        return str(mask_passwords(self._url))

    @property
    def endpoint(self) -> "Endpoint":
        """Where the broker is. Raises BadBrokerURL."""
        if self._endpoint is None:
            from celery5.broker.endpoint import Endpoint

            self._endpoint = Endpoint.from_url(self._url)
        return self._endpoint

    def get_blocking_driver(self) -> BlockingDriver:
        """Return the driver of plain Python. Raises BlockingInEventLoop inside an event loop."""
        return self._driver()

    def _driver(self) -> "BlockingRedis":
        check_may_block()
        if self._blocking is None:
            from celery5.broker.drivers.blocking import BlockingRedis

            with self._lock:
                # Another thread may have been first.
                self._blocking = cast("BlockingRedis | None", self._blocking) or BlockingRedis(self.endpoint)
        return self._blocking

    def get_result_waiter(self) -> ResultWaiter:
        """What waits for results in plain Python."""
        redis = self._driver()
        if self._results is None:
            from celery5.broker.waiting.blocking import BlockingResultWaiter as Waiter

            with self._lock:
                self._results = cast("ResultWaiter | None", self._results) or Waiter(redis, self.endpoint)
        return self._results

    async def get_async_driver(self) -> AsyncDriver:
        """The driver of this event loop."""
        from celery5.broker.drivers import ambient

        return await ambient.get_driver(self.endpoint)

    async def get_async_result_waiter(self) -> AsyncResultWaiter:
        """What waits for results in this event loop."""
        from celery5.broker.drivers import ambient

        return await ambient.get_result_waiter(self.endpoint)

    @contextmanager
    def lend_driver(self, redis: "TrioRedis", endpoint: "Endpoint") -> Generator[None, None, None]:
        """Within this block, `awaiting` in this Trio run gives `redis` for the broker at `endpoint`: a worker lends
        its jobs its own connection."""
        from celery5.broker.drivers import ambient

        with ambient.lend_driver(endpoint, redis):
            yield

    def close(self) -> None:
        """Close what plain Python opened."""
        with self._lock:
            blocking, self._blocking = self._blocking, None
            results, self._results = self._results, None
        if results is not None:
            results.close()
        if blocking is not None:
            blocking.close()
