"""Wait for results, and after a while look for missing ones in the dead-letter queues.

The document of a dead job expires like any other, and is not announced again. Its job stays dead, so a caller that
waits for it should learn this at once rather than at the timeout.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from celery5.broker.calls import dead_letters as dead_letter_calls
from celery5.broker.driver import AsyncDriver
from celery5.errors import BrokerUnavailable

if TYPE_CHECKING:
    from celery5.application import Application

DEAD_LETTER_CHECK_DELAY = 1.0
"""Seconds before a wait reads the dead-letter queues. Most results have arrived by then."""

DEAD_LETTERS_PER_TRIP = 100
"""Jobs that are looked for in one trip: longer scripts would hold the server up."""

StopCondition = Callable[[Mapping[str, bytes]], bool]


async def wait_for_results(
    app: "Application",
    keys: Sequence[str],
    *,
    timeout: float | None,
    enough: StopCondition | None = None,
) -> dict[str, bytes]:
    """Wait for documents of jobs like `ResultWaiter.wait`, and look into the dead-letter queues after a while."""
    results = await app.connections.get_async_result_waiter()
    wait, reached = _Wait(keys, timeout, enough), False
    try:
        wait.add(await results.wait(keys, timeout=wait.first, enough=enough))
        reached = True
    except BrokerUnavailable:  # an outage may pass; if it does not, the last wait raises
        if wait.rest == 0:
            raise
    if reached and not wait.over():
        with suppress(BrokerUnavailable):
            redis = await app.connections.get_async_driver()
            wait.add(await _find_dead_documents(app, redis, wait.missing))
    if not wait.over() and wait.rest != 0:
        wait.add(await results.wait(wait.missing, timeout=wait.rest, enough=wait.enough))
    return wait.found


async def _find_dead_documents(
    app: "Application", redis: AsyncDriver, results: Sequence[str]
) -> dict[str, bytes]:
    """Return the documents of those jobs that are dead, by result key, whether they have expired or not."""
    documents: dict[str, bytes] = {}
    queues: dict[str, list[str]] = {}
    for queue, job_id in map(app.keys.parse_result_key, results):
        queues.setdefault(queue, []).append(job_id)
    for queue, ids in queues.items():
        keys = app.queue(queue)
        for start in range(0, len(ids), DEAD_LETTERS_PER_TRIP):
            part = ids[start : start + DEAD_LETTERS_PER_TRIP]
            places = zip(part, await redis.perform(dead_letter_calls.find_entries(keys, part)), strict=True)
            dead_jobs = [(job_id, entry) for job_id, entry in places if entry]
            calls = [
                dead_letter_calls.list_entries(keys, first=entry, last=entry, count=1)
                for _, entry in dead_jobs
            ]
            replies = await redis.perform_all(calls) if calls else []
            for (job_id, _), entries in zip(dead_jobs, replies, strict=True):
                if entries and entries[0].document:
                    documents[keys.result(job_id)] = entries[0].document
    return documents


class _Wait:
    """The state of one wait."""

    def __init__(self, keys: Sequence[str], timeout: float | None, enough: StopCondition | None) -> None:
        self.found: dict[str, bytes] = {}
        self._keys = keys
        self._enough = enough
        self._ends = math.inf if timeout is None else time.monotonic() + timeout
        self.first = DEAD_LETTER_CHECK_DELAY if timeout is None else min(timeout, DEAD_LETTER_CHECK_DELAY)

    def add(self, found: Mapping[str, bytes]) -> None:
        """Add documents."""
        self.found.update(found)

    @property
    def missing(self) -> list[str]:
        """The keys whose documents have not arrived."""
        return [key for key in self._keys if key not in self.found]

    def over(self) -> bool:
        """Return whether all documents have arrived, or enough of them."""
        return not self.missing or (self._enough is not None and self._enough(self.found))

    @property
    def rest(self) -> float | None:
        """The remaining seconds; None for no limit."""
        return None if self._ends == math.inf else max(0.0, self._ends - time.monotonic())

    @property
    def enough(self) -> StopCondition | None:
        """A condition for documents that arrive from now on, which counts the earlier ones, too."""
        condition, earlier = self._enough, dict(self.found)
        return None if condition is None else lambda documents: condition({**earlier, **documents})
