"""Wait for the documents of jobs, wherever these are.

A wait for a handle that was made from an id alone covers all queues that its job may be on. After a while a wait looks
for missing documents in the dead-letter queues: the document of a dead job expires like any other, and is not announced
again, but its job stays dead, so the caller should learn this at once rather than at the timeout.
"""

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from celery5.broker.calls import dead_letters as dead_letter_calls
from celery5.broker.calls import queues as queue_calls
from celery5.broker.colour import sleep
from celery5.broker.driver import AsyncDriver, StopCondition
from celery5.broker.timing import OUTAGE_LIMIT
from celery5.errors import BrokerUnavailable
from celery5.results.job_location import JobHandle, locate_jobs

if TYPE_CHECKING:
    from celery5.application import Application

DEAD_LETTER_CHECK_DELAY = 1.0
"""Seconds before a wait reads the dead-letter queues. Most results have arrived by then."""
DEAD_LETTERS_PER_TRIP = 100
"""Jobs that are looked for in one trip: longer scripts would hold the server up."""
RETRY_DELAY = 0.1
"""Seconds before a wait looks again for jobs after it could not."""

Documents = dict[str, bytes]


async def wait_for_documents(
    handles: Sequence[JobHandle],
    *,
    timeout: float | None,
    enough: StopCondition | None = None,
) -> Documents:
    """Wait for the documents of jobs of one application.

    Args:
        timeout: Seconds; None to wait without a limit.
        enough: Called with the documents that have arrived; the wait ends when it returns true.

    Returns:
        The documents that have arrived, by the keys of the handles.
    """
    app = handles[0].app
    if all(handle.is_located for handle in handles):
        keys = [handle.key for handle in handles]
        return await wait_for_results(app, keys, timeout=timeout, enough=enough)
    search = _Search(handles, timeout)
    await search.begin()
    documents = await wait_for_results(
        app, search.keys, timeout=search.deadline.left, enough=search.enough(enough)
    )
    return search.finish(documents)


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
        if wait.deadline.left == 0:
            raise
    if reached and not wait.over():
        with suppress(BrokerUnavailable):
            redis = await app.connections.get_async_driver()
            wait.add(await _find_dead_documents(app, redis, wait.missing))
    if not wait.over() and wait.deadline.left != 0:
        wait.add(await results.wait(wait.missing, timeout=wait.deadline.left, enough=wait.enough))
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


class _Deadline:
    """When a wait ends: `timeout` seconds from now, or never."""

    def __init__(self, timeout: float | None) -> None:
        # On the monotonic clock.
        self.at = math.inf if timeout is None else time.monotonic() + timeout

    @property
    def left(self) -> float | None:
        """The remaining seconds; None for no limit."""
        return None if self.at == math.inf else max(0.0, self.at - time.monotonic())


class _Search:
    """A wait for jobs some of whose queues are unknown: it covers all keys of their documents."""

    def __init__(self, handles: Sequence[JobHandle], timeout: float | None) -> None:
        self._app = handles[0].app
        self._handles = handles
        self.deadline = _Deadline(timeout)
        self._keys_of_handles: list[list[str]] = []

    async def begin(self) -> None:
        """Search for all jobs. Retries during an outage. Raises BrokerUnavailable."""
        outage_deadline = min(self.deadline.at, time.monotonic() + OUTAGE_LIMIT)
        while True:
            try:
                return await self._locate(await self._app.connections.get_async_driver())
            except BrokerUnavailable:
                if time.monotonic() >= outage_deadline:
                    raise
                await sleep(RETRY_DELAY)

    async def _locate(self, redis: AsyncDriver) -> None:
        await locate_jobs(redis, [handle for handle in self._handles if not handle.is_located])
        names = await redis.perform(queue_calls.list_queues(self._app.keys))
        self._keys_of_handles = []
        for handle in self._handles:
            queue_names = [handle.queue] if handle.is_located else dict.fromkeys([handle.queue, *names])
            self._keys_of_handles.append([self._app.queue(name).result(handle.id) for name in queue_names])

    @property
    def keys(self) -> list[str]:
        """All possible keys of the documents."""
        return list(dict.fromkeys(key for keys in self._keys_of_handles for key in keys))

    def enough(self, condition: StopCondition | None) -> StopCondition:
        """Return a condition: each job has a document under one of its keys, or the caller's condition is true."""
        jobs = len({handle.id for handle in self._handles})

        def is_enough(documents: Mapping[str, bytes]) -> bool:
            if condition is not None and condition(documents):
                return True
            return len(documents) >= jobs and all(
                any(key in documents for key in keys) for keys in self._keys_of_handles
            )

        return is_enough

    def finish(self, found: Documents) -> Documents:
        """Return the documents after setting the queues of their handles."""
        for handle, keys in zip(self._handles, self._keys_of_handles, strict=True):
            key = next((key for key in keys if key in found), None)
            if key is not None:
                handle.set_queue(self._app.keys.parse_result_key(key)[0])
        return found


class _Wait:
    """The state of one wait."""

    def __init__(self, keys: Sequence[str], timeout: float | None, enough: StopCondition | None) -> None:
        self.found: dict[str, bytes] = {}
        self._keys = keys
        self._enough = enough
        self.deadline = _Deadline(timeout)
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
    def enough(self) -> StopCondition | None:
        """A condition for documents that arrive from now on, which counts the earlier ones, too."""
        condition, earlier = self._enough, dict(self.found)
        return None if condition is None else lambda documents: condition({**earlier, **documents})
