"""Keep the connections of each Trio run: system tasks keep them, which end with the run."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import trio

from celery5.broker.connection.link import LinkEvent, ignore_event
from celery5.broker.drivers.on_trio import TrioRedis
from celery5.broker.drivers.opening_on_trio import open_redis
from celery5.broker.endpoint import Endpoint
from celery5.broker.timing import Timing
from celery5.broker.topologies import ClusterFound, remember_cluster
from celery5.broker.waiting.on_trio import TrioResultWaiter

# A producer that cannot reach the broker fails soon; a worker may try for longer.
PRODUCER_TIMING = Timing(first_connect=2.0)


class LoopService(Protocol):
    """A service that a system task can run."""

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run until cancelled."""
        ...


R = TypeVar("R", bound=LoopService)


class SystemTaskService(Generic[R]):
    """A service that a system task runs. `ended` is true after it has returned or failed."""

    def __init__(self, service: R) -> None:
        self.service = service
        self.ended = False
        self._error: Exception | None = None
        self._settled = trio.Event()
        self._scope = trio.CancelScope()
        trio.lowlevel.spawn_system_task(self._keep, name=f"celery5 {type(service).__name__}")

    async def wait_ready(self) -> R:
        """Wait until the service has started and return it. Raises what its `run` raised."""
        await self._settled.wait()
        if self._error is not None:
            raise self._error
        return self.service

    def stop(self) -> None:
        """Cancel the service, because a new one replaces it."""
        self._scope.cancel()

    def started(self, value: None = None) -> None:
        """Record that the service has started: `run` gets this object as its `task_status`."""
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
    # Called with what happens to the run's own connections.
    observe: Callable[[LinkEvent], None] = ignore_event


_home: trio.lowlevel.RunVar[_Home] = trio.lowlevel.RunVar("celery5_home")


def _of_this_run() -> _Home:
    try:
        return _home.get()
    except LookupError:
        home = _Home()
        _home.set(home)
        return home


async def get_trio_driver(endpoint: Endpoint) -> TrioRedis:
    """Return the driver of this Trio run: one that was lent, or its own."""
    home = _of_this_run()
    if home.lent.get(endpoint):
        return home.lent[endpoint][-1]
    service = home.drivers.get(endpoint)
    if service is None or service.ended:
        service = home.drivers[endpoint] = SystemTaskService(
            open_redis(endpoint=endpoint, timing=PRODUCER_TIMING, name="celery5-producer", watch=home.observe)
        )
    try:
        return await service.wait_ready()
    except ClusterFound as found:
        remember_cluster(found)
    return await get_trio_driver(endpoint)


def observe_connections(observe: Callable[[LinkEvent], None]) -> None:
    """Have `observe` called with what happens to the connections that this Trio run opens from now on."""
    _of_this_run().observe = observe


def has_lent_driver() -> bool:
    """Return whether a worker in this Trio run lends its driver."""
    return any(_of_this_run().lent.values())


async def get_trio_result_waiter(endpoint: Endpoint) -> TrioResultWaiter:
    """Return the waiter for documents of this Trio run."""
    driver = await get_trio_driver(endpoint)
    home = _of_this_run()
    service = home.results.get(endpoint)
    if service is not None and service.service.redis is not driver:
        service.stop()
        service = None
    if service is None or service.ended:
        service = home.results[endpoint] = SystemTaskService(TrioResultWaiter(driver, timing=PRODUCER_TIMING))
    return await service.wait_ready()


@contextmanager
def lend_trio_driver(endpoint: Endpoint, driver: TrioRedis) -> Generator[None, None, None]:
    """Let `get_trio_driver` return `driver` to all tasks of this run within this block."""
    home = _of_this_run()
    lent = home.lent.setdefault(endpoint, [])
    lent.append(driver)
    try:
        yield
    finally:
        lent.remove(driver)  # may not be the last: of two workers in one run, either may end first
