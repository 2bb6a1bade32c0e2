"""The open resources of one process: what is opened once and shared by jobs, such as pools and clients."""

import math
import random
import sys
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import AsyncExitStack, ExitStack, contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, Protocol, TypeVar

from celery5.errors import ResourceUnavailable, SoftTimeLimitExceeded, TimeLimitExceeded
from celery5.protocol.job.retry_policy import RetryPolicy
from celery5.protocol.masking import MAX_ERROR_LENGTH, describe_error
from celery5.protocol.task_kinds import EventLoop, FunctionKind
from celery5.runners.context import LOG_EVENT

T = TypeVar("T")

INTERRUPTIONS = (SoftTimeLimitExceeded, TimeLimitExceeded)
"""Errors that interrupt a job at any point in its thread. They are no failures of a resource."""

WAIT_LIMIT = 30.0
"""Seconds for which a job waits for a resource that is being opened."""
STABLE_SECONDS = 60.0
"""Seconds that a resource must be open before its earlier failures no longer count."""
MAX_FAILURES = 20
"""The number of failures after which the delay does not grow further."""


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

    @property
    def check(self) -> Callable[[Any], Any] | None:
        """The check of an open resource: it returns False or raises if the resource is unusable."""
        ...

    @property
    def check_interval(self) -> float:
        """Seconds between two checks."""
        ...

    @property
    def retry(self) -> RetryPolicy:
        """When it is opened again after a failure."""
        ...

    def enter(self) -> Any:
        """Return the context manager that opens it: an asynchronous one where `is_async`."""
        ...


class ResourceBroken(Exception):
    """The check of a resource has failed."""


def judge_check(answer: object) -> None:
    """Raise ResourceBroken if a check returned False. None is fine."""
    if answer is False:
        raise ResourceBroken("its check returned False")


class ResourceFailures:
    """Counts the failures of one resource in a row, which decide whether and when it is opened again.

    Times are in seconds, of any one clock.
    """

    def __init__(self, policy: RetryPolicy) -> None:
        self._policy = policy
        self._count = 0
        self._opened_at = math.inf

    @property
    def allow_start(self) -> bool:
        """Whether a resource that has never been open is tried again."""
        return self._policy.allows(self._count)

    def note_opened(self, now: float) -> None:
        """Note that it is open."""
        self._opened_at = now

    def note_failed(self, now: float) -> None:
        """Note that it is closed, or could not be opened."""
        is_stable = now - self._opened_at >= STABLE_SECONDS
        self._count = 1 if is_stable else self._count + 1
        self._opened_at = math.inf

    def choose_delay(self) -> float:
        """Return the seconds after which it is opened again."""
        return self._policy.delay(min(self._count, MAX_FAILURES), random.random)


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
        self._kept: dict[OpenableResource, _KeptInBox] = {}

    def find(self, resource: OpenableResource) -> Any:
        """Return the open resource. Open it if needed, and block for a limited time. Raises ResourceUnavailable."""
        kept = self._get_kept(resource)
        for delay in kept.open():
            time.sleep(delay)
        return kept.value

    async def find_async(self, resource: OpenableResource, stack: AsyncExitStack) -> Any:
        """Return the open resource; if it belongs to an event loop, it is opened for this job alone.

        Raises ResourceUnavailable, or the error of opening it for this job alone.
        """
        if resource.is_async:
            return await stack.enter_async_context(resource.enter())
        kept = self._get_kept(resource)
        for delay in kept.open():
            await _sleep(delay)
        return kept.value

    def _get_kept(self, resource: OpenableResource) -> "_KeptInBox":
        if resource not in self._kept:
            self._kept[resource] = _KeptInBox(resource)
        return self._kept[resource]

    def close(self) -> None:
        """Close all of them, the last one first. Raises the errors of closing."""
        with ExitStack() as stack:
            for kept in self._kept.values():
                stack.callback(kept.close)


class _KeptInBox:
    """One resource of a box, kept open between jobs."""

    def __init__(self, resource: OpenableResource) -> None:
        self._resource = resource
        self._failures = ResourceFailures(resource.retry)
        self._stack: ExitStack | None = None  # closes it; None while it is closed
        self._was_open = False
        self._checked_at = self._closed_until = -math.inf
        self.value: Any = None

    def open(self) -> Generator[float]:
        """Open it, if it is closed or its check fails; yield the seconds to sleep meanwhile.

        Raises:
            ResourceUnavailable: It was not open within the limit, or has never been and is not tried again.
        """
        if self._is_usable():
            return
        deadline = time.monotonic() + WAIT_LIMIT
        while True:
            yield max(self._closed_until - time.monotonic(), 0.0)
            try:
                self._enter()
                return
            except INTERRUPTIONS:
                raise
            except Exception as error:
                self._note_failed(error)
                is_over = self._closed_until > deadline
                if is_over or not (self._was_open or self._failures.allow_start):
                    raise ResourceUnavailable(
                        f"resource {self._resource.name!r}: {describe_error(error, MAX_ERROR_LENGTH)}"
                    ) from error

    def close(self) -> None:
        """Close it. Raises what that raises."""
        stack, self._stack, self.value = self._stack, None, None
        if stack is not None:
            stack.close()

    def _enter(self) -> None:
        stack = ExitStack()
        self.value = stack.enter_context(self._resource.enter())
        self._stack, self._was_open, self._checked_at = stack, True, time.monotonic()
        self._failures.note_opened(self._checked_at)

    def _is_usable(self) -> bool:
        """Return whether it is open. When the interval has passed, check it, and close it if the check fails."""
        resource = self._resource
        if self._stack is None:
            return False
        if resource.check is None or time.monotonic() < self._checked_at + resource.check_interval:
            return True
        try:
            judge_check(resource.check(self.value))
        except INTERRUPTIONS:
            raise
        except Exception as error:
            self._note_failed(error)
            self._close_broken()
            return False
        self._checked_at = time.monotonic()
        return True

    def _close_broken(self) -> None:
        try:
            self.close()
        except INTERRUPTIONS:
            raise
        except Exception as error:
            why = describe_error(error, MAX_ERROR_LENGTH)
            LOG_EVENT.get()("resource:close-failed", "warning", resource=self._resource.name, why=why)

    def _note_failed(self, error: Exception) -> None:
        self._failures.note_failed(time.monotonic())
        delay = self._failures.choose_delay()
        self._closed_until = time.monotonic() + delay
        why = describe_error(error, MAX_ERROR_LENGTH)
        LOG_EVENT.get()(
            "resource:failed", "warning", resource=self._resource.name, why=why, again_in=round(delay, 3)
        )


async def _sleep(seconds: float) -> None:
    if _get_loop() == "trio":
        import trio

        await trio.sleep(seconds)
    else:
        import asyncio

        await asyncio.sleep(seconds)


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
