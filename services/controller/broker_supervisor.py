"""Own server: keep the broker running that a Controller starts itself."""

import random
from collections.abc import Callable
from typing import Protocol

import trio

from celery5.errors import CeleryError
from celery5.logs.log import Log
from celery5.protocol.job.retry_policy import full_jitter

POLL_PERIOD = 0.1
"""Seconds between two checks whether the process runs."""
PING_PERIOD = 5.0
"""Seconds between two pings."""
MAX_RESTART_DELAY = 10.0
"""The most seconds between two attempts to start it."""
STABLE_AFTER = 60.0
"""Seconds of running after which a server that dies is restarted without delay."""


class BrokerServer(Protocol):
    """A broker server: celery5's own, or a user's `MessageBroker`. Its methods may block."""

    pid: int

    @property
    def is_running(self) -> bool: ...

    def start(self, is_cancelled: Callable[[], bool], /) -> object: ...

    def is_responding(self) -> bool: ...

    def kill(self) -> None: ...


class BrokerSupervisor:
    """Keeps a broker server running that has been started before.

    A server that died is started again with its data. One that has not answered for `hung_after` seconds is
    killed; 0 means never.
    """

    def __init__(self, *, server: BrokerServer, hung_after: float, log: Log) -> None:
        self._server = server
        self._hung_after = hung_after
        self._log = log
        self._thread = trio.CapacityLimiter(1)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Supervise the server until cancelled."""
        task_status.started()
        attempt, begun = 0, trio.current_time()
        async with trio.open_nursery() as nursery:
            if self._hung_after:
                nursery.start_soon(self._ask)
            while True:
                while self._server.is_running:  # noqa: ASYNC110  a process has no event to wait for
                    await trio.sleep(POLL_PERIOD)
                attempt = 0 if trio.current_time() - begun > STABLE_AFTER else attempt + 1
                self._log.event("broker:ended", "error", pid=self._server.pid)
                await trio.sleep(
                    full_jitter(attempt - 1, start=0.1, cap=MAX_RESTART_DELAY, random=random.random)
                    if attempt > 1
                    else 0
                )
                await self._begin()
                begun = trio.current_time()

    async def _begin(self) -> None:
        try:
            await trio.to_thread.run_sync(self._server.start, _is_over, limiter=self._thread)
        except (CeleryError, OSError) as error:
            self._log.event("broker:start-failed", "error", why=str(error))
        else:
            self._log.event("broker:started", pid=self._server.pid)

    async def _ask(self) -> None:
        answered = trio.current_time()
        while True:
            await trio.sleep(PING_PERIOD)
            if await self._answers():
                answered = trio.current_time()
            elif trio.current_time() - answered > self._hung_after:
                self._log.event("broker:hung", "error", pid=self._server.pid, seconds=self._hung_after)
                await trio.to_thread.run_sync(self._server.kill, limiter=self._thread)
                answered = trio.current_time()

    async def _answers(self) -> bool:
        try:
            return await trio.to_thread.run_sync(self._server.is_responding, limiter=self._thread)
        except (CeleryError, OSError):
            return False


def _is_over() -> bool:
    """Raise Cancelled, in a worker thread, when the caller has been cancelled."""
    trio.from_thread.check_cancelled()
    return False
