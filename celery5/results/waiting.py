"""Wait for results, and look into the dead-letter queues for those that have not come after a while.

The document of a dead job expires like any other, and nobody announces it again. Its job stays dead, and whoever waits
for it should hear of that at once and not at the time-out.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from celery5.broker.coroutines import AwaitableConnections
from celery5.dead_letters.reading import find_dead_documents
from celery5.errors import BrokerUnavailable

if TYPE_CHECKING:
    from celery5.application import Application

DEAD_LETTER_CHECK_DELAY = 1.0
"""Seconds that one waits before somebody looks into the dead-letter queues. Most results have come by then."""

StopCondition = Callable[[Mapping[str, bytes]], bool]


async def wait_for_results(
    app: "Application",
    connections: AwaitableConnections,
    keys: Sequence[str],
    *,
    timeout: float | None,
    enough: StopCondition | None = None,
) -> dict[str, bytes]:
    """Wait for documents of jobs like `ResultWaiter.wait`, and look into the dead-letter queues after a while."""
    results = await connections.get_async_result_waiter()
    wait, reached = _Wait(keys, timeout, enough), False
    try:
        wait.add(await results.wait(keys, timeout=wait.first, enough=enough))
        reached = True
    except BrokerUnavailable:  # an outage may pass; if it does not, the last wait raises
        if wait.rest == 0:
            raise
    if reached and not wait.over():
        with suppress(BrokerUnavailable):
            redis = await connections.get_async_driver()
            wait.add(await find_dead_documents(app, redis, wait.missing))
    if not wait.over() and wait.rest != 0:
        wait.add(await results.wait(wait.missing, timeout=wait.rest, enough=wait.enough))
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
