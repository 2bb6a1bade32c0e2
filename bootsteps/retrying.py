"""Meanwhile: brings steps up that need Redis, again and again, beside those that do not wait for it.

A Publisher takes jobs while Redis is away, and from its first moment on. That it can be commanded, and that others see
that it lives, follows when Redis is there.
"""

import random
from collections.abc import Callable
from typing import Any

import trio

from celery5.bootsteps.boot import BootFailed, BootGraph
from celery5.errors import BrokerError, LeaseLost
from celery5.logs.log import Log
from celery5.protocol.job.retry_policy import full_jitter


class BackgroundBoot:
    """Runs `company`, a boot graph within another, and brings it up anew whenever Redis has it end."""

    def __init__(self, *, broker_boot: BootGraph, log: Log) -> None:
        self._company = broker_boot
        self._log = log
        self._why = ""

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Up at once, whether the company is or not; until cancelled."""
        task_status.started()
        attempt = 0
        while True:
            try:
                await self._company.run(task_status=_Up(self._is_up))
            except* (BrokerError, BootFailed, LeaseLost) as ended:
                why = _first_of(ended)
                if why != self._why:
                    self._log.event(
                        "process:broker-lost", "warning", why=why, hint="it works on, and tries again"
                    )
                self._why = why
            await trio.sleep(full_jitter(attempt, start=0.1, cap=1.0, random=random.random))
            attempt += 1

    def _is_up(self) -> None:
        if self._why:
            self._log.event("process:broker-recovered")
        self._why = ""


class _Up(trio.TaskStatus[None]):
    """Tells that the company is up."""

    def __init__(self, tell: Callable[[], None]) -> None:
        self._tell = tell

    def started(self, value: None = None) -> None:
        self._tell()


def _first_of(group: Any) -> str:
    """The first error in a group of groups, as text."""
    inner = getattr(group, "exceptions", None)
    return _first_of(inner[0]) if inner else str(group)
