"""The open resources of one process: what is opened once and shared by jobs, such as pools and clients."""

import sys
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import AsyncExitStack, ExitStack, contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, Protocol, TypeVar

from celery5.errors import ResourceUnavailable
from celery5.protocol.task_kinds import EventLoop, FunctionKind

T = TypeVar("T")

WAIT_LIMIT = 30.0
"""Seconds for which a job waits for a resource that is being opened."""


class OpenableResource(Protocol):
    """What is opened. Resources that are equal are one."""

    @property
    def name(self) -> str:
        """Its name."""
        ...

    @property
    def open(self) -> Callable[..., Any]:
        """What opens it. Tests replace the resource by this."""
        ...

    @property
    def is_async(self) -> bool:
        """Whether it is opened in an event loop."""
        ...

    def enter(self) -> Any:
        """Return the context manager that opens it: an asynchronous one where `is_async`."""
        ...


ResourceKey = tuple[OpenableResource, FunctionKind]
"""A resource, and where it is opened: in one of the event loops, or in a thread."""


class ResourceAccess(Protocol):
    """Where a job finds its resources."""

    def find(self, resource: OpenableResource) -> Any:
        """Return what was opened; it may block. Raises ResourceUnavailable."""
        ...

    async def find_async(self, resource: OpenableResource, stack: AsyncExitStack) -> Any:
        """Return what was opened. `stack` closes what is opened for this job alone. Raises ResourceUnavailable."""
        ...


RESOURCES: ContextVar[ResourceAccess | None] = ContextVar("celery5_resources", default=None)
"""Where the running job finds its resources; None outside of workers and boxes."""
REPLACED_RESOURCES: dict[Callable[..., Any], Any] = {}
"""What jobs of this process get in tests, by what would have opened the resource."""


@contextmanager
def replace_resource(opener: Callable[..., Any], value: object) -> Generator[None, None, None]:
    """Have jobs of this process get `value` while the block lasts. The resource is not opened for it."""
    before = REPLACED_RESOURCES.get(opener, _MISSING)
    REPLACED_RESOURCES[opener] = value
    try:
        yield
    finally:
        if before is _MISSING:
            del REPLACED_RESOURCES[opener]
        else:
            REPLACED_RESOURCES[opener] = before


def find_resource(resource: OpenableResource) -> Any:
    """Return what was opened, for the running job; it may block. Raises ResourceUnavailable."""
    if resource.open in REPLACED_RESOURCES:
        return REPLACED_RESOURCES[resource.open]
    return _get_access(resource).find(resource)


async def find_resource_async(resource: OpenableResource, stack: AsyncExitStack) -> Any:
    """Return what was opened, for the running job. `stack` closes what is opened for it alone.

    Raises ResourceUnavailable.
    """
    if resource.open in REPLACED_RESOURCES:
        return REPLACED_RESOURCES[resource.open]
    return await _get_access(resource).find_async(resource, stack)


def _get_access(resource: OpenableResource) -> ResourceAccess:
    access = RESOURCES.get()
    if access is None:
        raise ResourceUnavailable(
            f"resource {resource.name!r} is open in workers only: pass it as an argument of the call, or replace it by "
            f"celery5.testing.replaced({getattr(resource.open, '__name__', resource.open)}, ...)"
        )
    return access


class OpenResources:
    """The resources that a worker has opened. Any thread may call its methods.

    Args:
        request: Called with what a job needs and that is not open. It may be called in any thread.
    """

    def __init__(self, request: Callable[[ResourceKey], None]) -> None:
        self._request = request
        self._lock = threading.Lock()
        self._opened: dict[ResourceKey, Future[Any]] = {}

    def put(self, key: ResourceKey, value: object) -> None:
        """Hand out what was opened, also to jobs that wait for it."""
        with self._lock:
            future = self._opened.setdefault(key, Future[Any]())
        future.set_result(value)

    def remove(self, key: ResourceKey) -> None:
        """Have later jobs wait: the resource is closed."""
        with self._lock:
            self._opened.pop(key, None)

    def find(self, resource: OpenableResource) -> Any:
        """Return what was opened; block for it within a limit. Raises ResourceUnavailable."""
        return self._wait(resource, self._get_future((resource, "thread")))

    def _wait(self, resource: OpenableResource, future: "Future[Any]") -> Any:
        try:
            return future.result(WAIT_LIMIT)
        except FutureTimeout:
            raise ResourceUnavailable(
                f"resource {resource.name!r} was not open within {WAIT_LIMIT:g} s: the log says why"
            ) from None

    async def find_async(self, resource: OpenableResource, stack: AsyncExitStack) -> Any:
        """Return what was opened; wait for it within a limit. Raises ResourceUnavailable."""
        del stack
        future = self._get_future((resource, _get_loop() if resource.is_async else "thread"))
        return (
            future.result() if future.done() else await _call_in_thread(partial(self._wait, resource, future))
        )

    def _get_future(self, key: ResourceKey) -> "Future[Any]":
        with self._lock:
            future = self._opened.get(key)
            if future is not None:
                return future
            future = self._opened[key] = Future[Any]()
        self._request(key)
        return future


class BoxResources:
    """The resources of a box. One without an event loop is opened by the first job that needs it, and kept.

    Each job of a box has an event loop of its own, so what belongs to one is opened for each job.
    """

    def __init__(self) -> None:
        self._opened: dict[OpenableResource, Any] = {}
        self._stack = ExitStack()

    def find(self, resource: OpenableResource) -> Any:
        """Return what was opened, now or for an earlier job. Raises what opening it raises."""
        if resource not in self._opened:
            self._opened[resource] = self._stack.enter_context(resource.enter())
        return self._opened[resource]

    async def find_async(self, resource: OpenableResource, stack: AsyncExitStack) -> Any:
        """Return what was opened, for this job alone if it belongs to an event loop. Raises what opening it raises."""
        return await stack.enter_async_context(resource.enter()) if resource.is_async else self.find(resource)

    def close(self) -> None:
        """Close all of them. Raises what that raises."""
        self._stack.close()


def _get_loop() -> EventLoop:
    trio = sys.modules.get("trio")
    return "trio" if trio is not None and trio.lowlevel.in_trio_task() else "asyncio"


async def _call_in_thread(function: Callable[[], T]) -> T:
    """Call what blocks, on either event loop, and return what it returns."""
    if _get_loop() == "trio":
        import trio

        return await trio.to_thread.run_sync(function, abandon_on_cancel=True)
    import asyncio

    return await asyncio.to_thread(function)


_MISSING = object()
