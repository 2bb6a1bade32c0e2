"""Bring up the steps that need Redis again and again, beside those that do not wait for it.

A Publisher takes jobs from its start on, also while Redis is unreachable. Commands and heartbeats work once Redis is
reachable.
"""

import random
from collections.abc import Callable
from typing import Any

import trio

from celery5.bootsteps.boot import BootFailed, BootGraph
from celery5.broker.topologies import ClusterFound
from celery5.errors import BrokerError, LeaseLost
from celery5.logs.log import Log
from celery5.protocol.job.retry_policy import full_jitter


class BackgroundBoot:
    """Runs `broker_boot`, a boot graph within another, and starts it again whenever an error of Redis ends it.

    If the server is part of a cluster, that is for the next incarnation: this one was built for a server.
    """

    def __init__(self, *, broker_boot: BootGraph, log: Log) -> None:
        self._broker_boot = broker_boot
        self._log = log
        self._last_error = ""

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run until cancelled. It is up at once, whether the inner graph is or not."""
        task_status.started()
        attempt = 0
        while True:
            try:
                await self._broker_boot.run(task_status=_Up(self._is_up))
            except* ClusterFound:
                raise
            except* (BrokerError, BootFailed, LeaseLost) as ended:
                why = _describe_first(ended)
                if why != self._last_error:
                    self._log.event(
                        "process:broker-lost", "warning", why=why, hint="it works on, and tries again"
                    )
                self._last_error = why
            await trio.sleep(full_jitter(attempt, start=0.1, cap=1.0, random=random.random))
            attempt += 1

    def _is_up(self) -> None:
        if self._last_error:
            self._log.event("process:broker-recovered")
        self._last_error = ""


class _Up(trio.TaskStatus[None]):
    """Calls a function when the inner graph is up."""

    def __init__(self, on_up: Callable[[], None]) -> None:
        self._on_up = on_up

    def started(self, value: None = None) -> None:
        self._on_up()


def _describe_first(group: Any) -> str:
    """Return the first error in a group of groups, as text."""
    inner = getattr(group, "exceptions", None)
    return _describe_first(inner[0]) if inner else str(group)
