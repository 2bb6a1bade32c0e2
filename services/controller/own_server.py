"""Own Server: has the broker that a Controller runs itself go on, whatever becomes of it (C92)."""

import random
from collections.abc import Callable
from typing import Protocol

import trio

from celery5.errors import CeleryError
from celery5.logs.log import Log
from celery5.protocol.job.retry_policy import full_jitter

POLL_PERIOD = 0.1
"""Seconds between two looks whether it is there."""
PING_PERIOD = 5.0
"""Seconds between two questions whether it answers."""
MAX_RESTART_DELAY = 10.0
"""Seconds between two attempts to start it, at most."""
STABLE_AFTER = 60.0
"""Seconds after which one that died again is started at once again."""


class BrokerServer(Protocol):
    """A server, whose methods may block."""

    pid: int

    @property
    def is_running(self) -> bool: ...

    def start(self, given_up: Callable[[], bool], /) -> bool: ...

    def is_responding(self) -> bool: ...

    def kill(self) -> None: ...


class BrokerSupervisor:
    """The server, from when it was started first: one that has died is started again, over its data, and one that has
    not answered for `hung_after` seconds (0: never) is killed."""

    def __init__(self, *, server: BrokerServer, hung_after: float, log: Log) -> None:
        self._server = server
        self._hung_after = hung_after
        self._log = log
        self._thread = trio.CapacityLimiter(1)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Look after it until cancelled."""
        task_status.started()
        attempt, begun = 0, trio.current_time()
        async with trio.open_nursery() as nursery:
            if self._hung_after:
                nursery.start_soon(self._ask)
            while True:
                while self._server.is_running:  # noqa: ASYNC110  it is a process that changes
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
    """In the thread: raises Cancelled when nobody waits for it any more."""
    trio.from_thread.check_cancelled()
    return False
