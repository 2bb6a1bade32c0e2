"""Ambient, Trio: the connections of one Trio run, kept by system tasks, which end with the run."""

import asyncio
import weakref
from collections.abc import AsyncGenerator, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import trio

from celery5.broker.drivers.on_asyncio import AsyncioRedis
from celery5.broker.drivers.on_trio import TrioRedis
from celery5.broker.endpoint import Endpoint
from celery5.broker.timing import Timing
from celery5.broker.waiting.on_asyncio import AsyncioResultWaiter
from celery5.broker.waiting.on_trio import TrioResultWaiter


@dataclass
class LoopConnections:
    """What one loop has for one endpoint."""

    redis: AsyncioRedis
    results: AsyncioResultWaiter
    closing: AsyncGenerator[None, None]


_homes: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Endpoint, LoopConnections]] = (
    weakref.WeakKeyDictionary()
)


async def get_loop_connections(endpoint: Endpoint) -> LoopConnections:
    """The connections of the running loop to `endpoint`."""
    loop = asyncio.get_running_loop()
    homes = _homes.get(loop)
    if homes is None:
        for old in list(_homes):
            # A connection knows its loop, so a loop that was not shut down properly would stay for ever.
            if old.is_closed():
                del _homes[old]
        homes = _homes[loop] = {}
    found = homes.get(endpoint)
    if found is None:
        driver = AsyncioRedis(endpoint)
        waiting = AsyncioResultWaiter(driver, endpoint)
        found = homes[endpoint] = LoopConnections(
            driver, waiting, _close_with_the_loop(loop, endpoint, driver, waiting)
        )
        # Runs up to its yield without giving way to other tasks.
        await anext(found.closing)
    return found


async def _close_with_the_loop(
    loop: asyncio.AbstractEventLoop, endpoint: Endpoint, driver: AsyncioRedis, results: AsyncioResultWaiter
) -> AsyncGenerator[None, None]:
    """asyncio tells nobody that a loop ends, but asynchronous generators:

    `asyncio.run` closes those that are open.
    """
    try:
        yield
    finally:
        _homes.get(loop, {}).pop(endpoint, None)
        await results.aclose()
        await driver.aclose()


# A producer that cannot reach the broker is told so soon; a worker may try for longer.
PRODUCER_TIMING = Timing(first_connect=2.0)


class LoopService(Protocol):
    """Something with the shape of a service."""

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Live until cancelled."""
        ...


R = TypeVar("R", bound=LoopService)


class SystemTaskService(Generic[R]):
    """One service that a system task keeps running. It is `over` when it ended, with `error` if it failed."""

    def __init__(self, service: R) -> None:
        self.service = service
        self.ended = False
        self._error: Exception | None = None
        self._settled = trio.Event()
        self._scope = trio.CancelScope()
        trio.lowlevel.spawn_system_task(self._keep, name=f"celery5 {type(service).__name__}")

    async def wait_ready(self) -> R:
        """The service, once it has started. Raises what its `run` raised."""
        await self._settled.wait()
        if self._error is not None:
            raise self._error
        return self.service

    def stop(self) -> None:
        """End it: something else takes its place."""
        self._scope.cancel()

    def started(self, value: None = None) -> None:
        """What `run` says to its `task_status`."""
        self._settled.set()

    async def _keep(self) -> None:
        # An exception that leaves a system task ends the whole run with TrioInternalError.
        try:
            with self._scope:
                await self.service.run(task_status=self)
        except Exception as error:
            self._error = error
        finally:
            self.ended = True
            self._settled.set()


@dataclass
class _Home:
    drivers: dict[Endpoint, SystemTaskService[TrioRedis]] = field(default_factory=dict)
    results: dict[Endpoint, SystemTaskService[TrioResultWaiter]] = field(default_factory=dict)
    lent: dict[Endpoint, list[TrioRedis]] = field(default_factory=dict)


_home: trio.lowlevel.RunVar[_Home] = trio.lowlevel.RunVar("celery5_home")


def _of_this_run() -> _Home:
    try:
        return _home.get()
    except LookupError:
        home = _Home()
        _home.set(home)
        return home


async def get_trio_driver(endpoint: Endpoint) -> TrioRedis:
    """The driver of this run: one that was lent, or one of its own."""
    home = _of_this_run()
    if home.lent.get(endpoint):
        return home.lent[endpoint][-1]
    kept = home.drivers.get(endpoint)
    if kept is None or kept.ended:
        kept = home.drivers[endpoint] = SystemTaskService(
            TrioRedis(endpoint=endpoint, timing=PRODUCER_TIMING, name="celery5-producer")
        )
    return await kept.wait_ready()


async def get_trio_result_waiter(endpoint: Endpoint) -> TrioResultWaiter:
    """What waits for documents in this run."""
    driver = await get_trio_driver(endpoint)
    home = _of_this_run()
    kept = home.results.get(endpoint)
    if kept is not None and kept.service.redis is not driver:
        kept.stop()
        kept = None
    if kept is None or kept.ended:
        kept = home.results[endpoint] = SystemTaskService(
            TrioResultWaiter(driver, endpoint, timing=PRODUCER_TIMING)
        )
    return await kept.wait_ready()


@contextmanager
def lend_trio_driver(endpoint: Endpoint, driver: TrioRedis) -> Generator[None, None, None]:
    """Within this block `redis` gives `driver`, to all tasks of this run."""
    home = _of_this_run()
    lent = home.lent.setdefault(endpoint, [])
    lent.append(driver)
    try:
        yield
    finally:
        lent.remove(driver)  # not the last one, perhaps: of two workers in one run, either may end first
