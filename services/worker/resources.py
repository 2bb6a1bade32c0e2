"""Open the resources of a worker's tasks before the first job, check them, open them again, and close them last."""

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from inspect import iscoroutinefunction
from typing import Any, Protocol, cast

import trio

from celery5.broker.keys import QueueKeys
from celery5.errors import ResourceUnavailable
from celery5.logs.log import Log
from celery5.protocol.masking import MAX_ERROR_LENGTH, describe_error
from celery5.runners.on_asyncio import AsyncioRunner
from celery5.runners.open_resources import (
    REPLACED_RESOURCES,
    OpenResources,
    ResourceFailures,
    ResourceKey,
    judge_check,
)
from celery5.runners.user_errors import call_in_thread, call_user_code, reraise_cancellation
from celery5.services.job.resource_slots import ResourceSlots, make_key
from celery5.tasks.resources import Resource
from celery5.tasks.task import Task

CHECK_LIMIT = 10.0
"""Seconds that a check in an event loop may take."""
STOP_LIMIT = 20.0
"""Seconds that resources have to close."""

OnOpened = Callable[[object], None]


class ResourceKeeper:
    """Keeps the resources of a worker open.

    It opens those of the tasks whose queues the worker reads, and others when a job needs them.

    Args:
        tasks: The tasks of the application.
        consumed: The queues that the worker reads.
        asyncio_runner: Has the asyncio loop.
        resource_slots: Says which of those with a size are to be closed, since a job needs their space.
        broker: The broker of the worker, by name: each has resources of its own.
        log: The log.
    """

    def __init__(
        self,
        *,
        tasks: Mapping[str, Task[..., Any]],
        consumed: Sequence[QueueKeys],
        asyncio_runner: AsyncioRunner,
        resource_slots: ResourceSlots,
        broker: str,
        log: Log,
    ) -> None:
        queues = {keys.queue for keys in consumed}
        needed = [
            task for task in tasks.values() if task.kind != "boxed" and task.injected and task.queue in queues
        ]
        self._needed: Mapping[ResourceKey, None] = dict.fromkeys(
            (resource, resource.get_kind(task.loop))
            for task in needed
            for resource in task.injected.values()
            if resource.open not in REPLACED_RESOURCES and not resource.size
        )
        self._resource_slots = resource_slots
        self._broker = broker
        self._make_kept = partial(_KeptResource, asyncio_runner, log)
        self._kept = dict[ResourceKey, _KeptResource]()
        self._send_request, self._requests = trio.open_memory_channel[_KeptResource](math.inf)
        self._token: trio.lowlevel.TrioToken | None = None
        self.open_resources: OpenResources = OpenResources(self._request)
        """Where jobs find them."""

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Open them, and keep them open until cancelled. Raises ResourceUnavailable for one that cannot be opened."""
        self._token = trio.lowlevel.current_trio_token()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._stop_when_cancelled)
            async with trio.open_nursery() as opening:
                for key in self._needed:
                    opening.start_soon(nursery.start, self._add(key).keep_from_start)
            nursery.start_soon(self._evict)
            task_status.started()
            async for kept in self._requests:  # a resource is requested once
                nursery.start_soon(self._keep, kept)

    async def _stop_when_cancelled(self) -> None:
        """Close them all at the end. A task of its own: what is still being opened is shielded from cancellation."""
        try:
            await trio.sleep_forever()
        finally:
            for kept in self._kept.values():
                kept.stop()
            self._resource_slots.end_closings(self._broker)

    async def _keep(self, kept: "_KeptResource") -> None:
        await kept.keep()
        if kept.is_evicted:
            del self._kept[kept.key]
            self._resource_slots.note_closed(make_key(self._broker, kept.key))

    async def _evict(self) -> None:
        """Close what no job uses and whose space one needs. It is opened again when a job asks for it."""
        async for key in self._resource_slots.receive_closings(self._broker):
            kept = self._kept.get(cast("ResourceKey", key))
            if kept is None:  # it was never asked for: the job that reserved its space has not come to that
                self._resource_slots.note_closed(make_key(self._broker, key))
            else:
                kept.evict()

    def _add(self, key: ResourceKey) -> "_KeptResource":
        kept = self._kept[key] = self._make_kept(key, self.open_resources)
        return kept

    def _request(self, key: ResourceKey) -> None:
        """Open a resource that a job needs, unless that is done already. Any thread may call this."""
        if self._token is not None:
            with suppress(trio.RunFinishedError):
                self._token.run_sync_soon(self._accept, key)

    def _accept(self, key: ResourceKey) -> None:
        if key not in self._kept:
            self._send_request.send_nowait(self._add(key))


class _KeptResource:
    """Keeps one resource open."""

    def __init__(
        self,
        asyncio_runner: AsyncioRunner,
        log: Log,
        key: ResourceKey,
        open_resources: OpenResources,
    ) -> None:
        self._asyncio_runner = asyncio_runner
        self._key = key
        self._log = log
        self._resource = cast("Resource", key[0])
        self._open_resources = open_resources
        self._token = trio.lowlevel.current_trio_token()
        self._scope = trio.CancelScope(shield=True)
        self._lifetime: _Lifetime | None = None
        self._is_stopping = False
        self.key = key
        self.is_evicted = False
        self._failures = ResourceFailures(self._resource.retry)
        self._opened = trio.Event()
        self._pausing = trio.CancelScope()

    async def keep_from_start(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Keep it open until cancelled; `started()` when it is open. Raises ResourceUnavailable if that fails."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._report_opened, task_status)
            while not self._opened.is_set():
                error = await self._hold()
                if self._is_stopping:
                    break
                if not self._opened.is_set() and not self._failures.allow_start:
                    raise ResourceUnavailable(
                        f"resource {self._resource.name!r}: {_describe(error)}"
                    ) from error
                await self._pause(error)
            await self.keep()

    async def _report_opened(self, task_status: trio.TaskStatus[None]) -> None:
        await self._opened.wait()
        task_status.started()

    async def keep(self) -> None:
        """Keep it open until cancelled."""
        while not self._is_stopping:
            await self._pause(await self._hold())

    def evict(self) -> None:
        """Close it, within a limit, and do not open it again."""
        self.is_evicted = True
        self._log.event("resource:evicted", resource=self._resource.name)
        self._pausing.cancel()
        self.stop()

    def stop(self) -> None:
        """Close it, within a limit."""
        self._is_stopping = True
        self._scope.deadline = trio.current_time() + STOP_LIMIT
        if self._lifetime is not None:
            self._lifetime.stop()

    async def _pause(self, error: BaseException | None) -> None:
        """Sleep before it is opened again."""
        if self._is_stopping:
            return
        delay = self._failures.choose_delay()
        self._log.event(
            "resource:failed",
            "warning",
            resource=self._resource.name,
            why=_describe(error),
            again_in=round(delay, 3),
        )
        with trio.CancelScope() as self._pausing:
            await trio.sleep(delay)

    async def _hold(self) -> BaseException | None:
        """Open it, and close it when this stops or its check fails; return what was raised."""
        if self._is_stopping:
            return None
        self._lifetime = lifetime = self._make_lifetime()
        error: BaseException | None = None
        with trio.CancelScope(shield=True) as self._scope:
            try:
                await lifetime.run(self._put)
            except BaseException as raised:  # the user's code
                reraise_cancellation(raised)
                error = raised
            finally:
                self._open_resources.remove(self._key)
        if self._is_stopping and error is not None:
            self._log.event(
                "resource:close-failed", "warning", resource=self._resource.name, why=_describe(error)
            )
        self._failures.note_failed(trio.current_time())
        return error

    def _make_lifetime(self) -> "_Lifetime":
        if self._key[1] == "trio":
            return _TrioLifetime(self._resource)
        if self._key[1] == "asyncio":
            return _AsyncioLifetime(self._resource, self._asyncio_runner)
        return _ThreadLifetime(self._resource)

    def _put(self, value: object) -> None:
        """Hand the resource out. Any thread may call this."""
        self._open_resources.put(self._key, value)
        self._token.run_sync_soon(self._note_opened)

    def _note_opened(self) -> None:
        self._failures.note_opened(trio.current_time())
        self._opened.set()
        self._log.event("resource:opened", resource=self._resource.name)


class _Lifetime(Protocol):
    """A resource from its opening to its closing, in one task or thread."""

    async def run(self, on_opened: OnOpened, /) -> None:
        """Open it, call `on_opened`, check it, and close it after `stop`. Raises what the user's code raises."""
        ...

    def stop(self) -> None:
        """Close it soon. Call it in Trio."""
        ...


class _TrioLifetime:
    """One that is opened on Trio."""

    def __init__(self, resource: Resource) -> None:
        self._resource = resource
        self._stopped = trio.Event()

    async def run(self, on_opened: OnOpened, /) -> None:
        """Open it, check it, and close it after `stop`."""
        await call_user_code(self._hold, on_opened)

    def stop(self) -> None:
        """Close it soon."""
        self._stopped.set()

    async def _hold(self, on_opened: OnOpened) -> None:
        resource = self._resource
        async with resource.enter() as value:
            on_opened(value)
            while not self._stopped.is_set():
                with trio.move_on_after(math.inf if resource.check is None else resource.check_interval):
                    await self._stopped.wait()
                if resource.check is not None and not self._stopped.is_set():
                    with trio.fail_after(CHECK_LIMIT):
                        judge_check(
                            await resource.check(value)
                            if iscoroutinefunction(resource.check)
                            else await call_in_thread(partial(resource.check, value))
                        )


class _AsyncioLifetime:
    """One that is opened on asyncio."""

    def __init__(self, resource: Resource, runner: AsyncioRunner) -> None:
        self._resource = resource
        self._runner = runner
        import asyncio  # only a worker with such a resource needs it

        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopped = asyncio.Event()
        self._is_stopping = False

    async def run(self, on_opened: OnOpened, /) -> None:
        """Open it, check it, and close it after `stop`."""
        await self._runner.call(partial(self._hold, on_opened))

    def stop(self) -> None:
        """Close it soon."""
        self._is_stopping = True
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._stopped.set)

    async def _hold(self, on_opened: OnOpened) -> None:
        resource = self._resource
        import asyncio

        self._loop = asyncio.get_running_loop()
        async with resource.enter() as value:
            on_opened(value)
            while not self._is_stopping:
                with suppress(TimeoutError):
                    async with asyncio.timeout(None if resource.check is None else resource.check_interval):
                        await self._stopped.wait()
                if resource.check is not None and not self._is_stopping:
                    async with asyncio.timeout(CHECK_LIMIT):
                        judge_check(
                            await resource.check(value)
                            if iscoroutinefunction(resource.check)
                            else await asyncio.to_thread(resource.check, value)
                        )


class _ThreadLifetime:
    """One that is opened, checked and closed in one thread."""

    def __init__(self, resource: Resource) -> None:
        self._resource = resource
        self._stopped = threading.Event()

    async def run(self, on_opened: OnOpened, /) -> None:
        """Open it, check it, and close it after `stop`."""
        await call_in_thread(partial(self._hold, on_opened), limiter=trio.CapacityLimiter(1))

    def stop(self) -> None:
        """Close it soon."""
        self._stopped.set()

    def _hold(self, on_opened: OnOpened) -> None:
        resource = self._resource
        with resource.enter() as value:
            on_opened(value)
            while not self._stopped.wait(None if resource.check is None else resource.check_interval):
                if resource.check is not None:
                    judge_check(resource.check(value))


def _describe(error: BaseException | None) -> str:
    return "its event loop has ended" if error is None else describe_error(error, MAX_ERROR_LENGTH)
