"""Patience: waiting for results, with a look into the graves on behalf of those who have waited for a while.

The document of a job that died goes after its time like any other, and nobody will announce it again; but its job stays
dead, and whoever waits for it wants to hear of that and not to wait until the end of the time.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from celery5.broker.driver import AsyncDriver, AsyncResultWaiter, ResultWaiter
from celery5.connections.coroutines import BlockingDriverAdapter, run_blocking
from celery5.dead_letters.reading import find_dead_documents
from celery5.errors import BrokerUnavailable

if TYPE_CHECKING:
    from celery5.application import Application

DEAD_LETTER_CHECK_DELAY = 1.0
"""Seconds that one waits before somebody looks into the graves. Most results have come by then."""

StopCondition = Callable[[Mapping[str, bytes]], bool]


class CheckingResultWaiter:
    """Waits for results in plain Python."""

    def __init__(self, app: "Application", results: ResultWaiter) -> None:
        self._app = app
        self._results = results

    def wait(
        self, keys: Sequence[str], *, timeout: float | None, enough: StopCondition | None = None
    ) -> dict[str, bytes]:
        """What has arrived of the documents under `keys`: all, enough, or what is there at the time-out (seconds)."""
        wait, reached = _Wait(keys, timeout, enough), False
        try:
            wait.add(self._results.wait(keys, timeout=wait.first, enough=enough))
            reached = True
        except BrokerUnavailable:  # an outage may pass; who waits hears of it at the end, below
            if wait.rest == 0:
                raise
        if reached and not wait.over():
            with suppress(BrokerUnavailable):
                redis = BlockingDriverAdapter(self._app.connections.get_blocking_driver())
                wait.add(run_blocking(find_dead_documents(self._app, redis, wait.missing)))
        if not wait.over() and wait.rest != 0:
            wait.add(self._results.wait(wait.missing, timeout=wait.rest, enough=wait.enough))
        return wait.found


class AsyncCheckingResultWaiter:
    """Waits for results in an event loop."""

    def __init__(self, app: "Application", results: AsyncResultWaiter) -> None:
        self._app = app
        self._results = results

    async def wait(
        self, keys: Sequence[str], *, timeout: float | None, enough: StopCondition | None = None
    ) -> dict[str, bytes]:
        """As Patient.wait."""
        wait, reached = _Wait(keys, timeout, enough), False
        try:
            wait.add(await self._results.wait(keys, timeout=wait.first, enough=enough))
            reached = True
        except BrokerUnavailable:
            if wait.rest == 0:
                raise
        if reached and not wait.over():
            with suppress(BrokerUnavailable):
                redis: AsyncDriver = await self._app.connections.get_async_driver()
                wait.add(await find_dead_documents(self._app, redis, wait.missing))
        if not wait.over() and wait.rest != 0:
            wait.add(await self._results.wait(wait.missing, timeout=wait.rest, enough=wait.enough))
        return wait.found


class _Wait:
    """How far one wait has come."""

    def __init__(self, keys: Sequence[str], timeout: float | None, enough: StopCondition | None) -> None:
        self.found: dict[str, bytes] = {}
        self._keys = keys
        self._enough = enough
        self._ends = math.inf if timeout is None else time.monotonic() + timeout
        self.first = DEAD_LETTER_CHECK_DELAY if timeout is None else min(timeout, DEAD_LETTER_CHECK_DELAY)

    def add(self, found: Mapping[str, bytes]) -> None:
        """More documents."""
        self.found.update(found)

    @property
    def missing(self) -> list[str]:
        """The keys whose documents have not come."""
        return [key for key in self._keys if key not in self.found]

    def over(self) -> bool:
        """Whether all, or enough, has come."""
        return not self.missing or (self._enough is not None and self._enough(self.found))

    @property
    def rest(self) -> float | None:
        """The seconds that are left; None for all there are."""
        return None if self._ends == math.inf else max(0.0, self._ends - time.monotonic())

    @property
    def enough(self) -> StopCondition | None:
        """Whether what comes now is enough, with what has come before."""
        asked, before = self._enough, dict(self.found)
        return None if asked is None else lambda found: asked({**before, **found})
