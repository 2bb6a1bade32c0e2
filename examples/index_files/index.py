"""Send the jobs for every file of a folder, wait for their results, and add them up.

Jobs are sent in batches, a few at a time: however large the folder, neither this process nor Redis holds more than a
few thousand of its jobs.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import trio

from celery5 import App, AsyncResult, CeleryError
from celery5.broker.calls import jobs as jobs_calls
from celery5.broker.calls import queues as queue_calls
from celery5.examples.index_files import tasks
from celery5.examples.index_files.folder import Folder, Totals, digest_of_all
from celery5.protocol.job.messages import Document, read_document
from celery5.results.waiting import wait_for_results
from celery5.tasks import Signature, Task

PORTION = 100
"""Files in one batch."""
PORTIONS = 30
"""Batches in flight at once, of all tasks together."""
PATIENCE = 60.0
"""Seconds without any job ending after which something must be wrong."""

BROKEN = Path(__file__).with_name("broken.json")

JOBS_FOR_A_FILE = (tasks.read, tasks.digest, tasks.count_words)
EXTRA_JOBS = ((tasks.ask_a_flaky_service, ()), (tasks.read_catalogue, (BROKEN,)))
"""A job that fails once, and one that fails at each of its attempts."""
EXPECTED_DEAD = 1
EXPECTED_RETRIES = 1 + (tasks.read_catalogue.send_options.max_retries or 0)


class NothingHappens(CeleryError):
    """No job has ended for PATIENCE seconds."""


class Outcome(msgspec.Struct):
    """The result of all jobs."""

    totals: Totals
    jobs: int
    retries: int
    dead: int
    in_dead_letter_queue: int
    first_failure: str
    # Seconds from sending to ending, sorted.
    latencies: list[float]


Told = Callable[[str], None]
"""A function that is called with the name of the task of each job that ends."""


class Index:
    """One run over `folder` with the workers of `app`. `told` is called for each job that ends."""

    def __init__(self, app: App, folder: Folder, *, told: Told) -> None:
        self._app = app
        self._folder = folder
        self._told = told
        self._documents: list[Document] = []
        self._values: dict[str, dict[Path, Any]] = {task.name: {} for task in JOBS_FOR_A_FILE}
        self._timeout_scope = trio.CancelScope()
        self.under_way: set[str] = set()
        """The ids of jobs whose results are in Redis, or will be."""

    async def run(self) -> Outcome:
        """Index everything. Raises NothingHappens when no job ends for a minute."""
        slots = trio.Semaphore(PORTIONS)
        self._extend_timeout()
        with self._timeout_scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(
                    self._send_and_wait, [extra_task.s(*args) for extra_task, args in EXTRA_JOBS]
                )
                for start in range(0, len(self._folder.files), PORTION):
                    for task in JOBS_FOR_A_FILE:
                        await slots.acquire()
                        nursery.start_soon(self._run_batch, task, start, slots)
            return await self._outcome()
        raise NothingHappens(
            f"no job has ended for {PATIENCE:g} s: is the machine very busy, or the broker away?"
        )

    async def _run_batch(self, task: Task[[Path], Any], start: int, slots: trio.Semaphore) -> None:
        """Run one task for each file of a batch."""
        files = self._folder.files[start : start + PORTION]
        try:
            values = await self._send_and_wait([task.s(path) for path in files])
        finally:
            slots.release()
        self._values[task.name].update(zip(files, values, strict=True))

    async def _send_and_wait(self, signatures: Sequence[Signature[Any]]) -> list[Any]:
        """Send jobs and return their values in order; None for a job that failed."""
        results: list[AsyncResult[Any]] = await self._app.asend_many(signatures)
        ids = [result.id for result in results]
        self.under_way.update(ids)
        keys = [result.key for result in results]
        documents = await wait_for_results(self._app, keys, timeout=None)
        values = [self._take(result, documents[result.key]) for result in results]
        await self._app.aperform(jobs_calls.delete_results(self._app.queue(results[0].queue), ids))
        self.under_way.difference_update(ids)
        return values

    def _take(self, result: AsyncResult[Any], raw: bytes) -> Any:
        """Record how a job ended, and return its value; None if it failed."""
        self._documents.append(read_document(raw))
        self._told(result.task)
        self._extend_timeout()
        value = result.outcome(raw)
        return None if isinstance(value, Exception) else value

    def _extend_timeout(self) -> None:
        self._timeout_scope.deadline = trio.current_time() + PATIENCE

    async def _outcome(self) -> Outcome:
        queue = self._app.queue(self._app.settings.default_queue)
        dead = [document for document in self._documents if document.failure]
        unexpected = [document for document in dead if document.task != tasks.read_catalogue.name]
        return Outcome(
            totals=self._totals(),
            jobs=len(self._documents),
            retries=sum(document.attempt - 1 for document in self._documents),
            dead=len(dead),
            in_dead_letter_queue=(await self._app.aperform(queue_calls.get_queue_depth(queue))).dead,
            first_failure=f"{unexpected[0].task}: {unexpected[0].failure}" if unexpected else "",
            latencies=sorted(document.finished - document.sent for document in self._documents),
        )

    def _totals(self) -> Totals:
        contents, digests, words = (self._values[task.name] for task in JOBS_FOR_A_FILE)
        readable = [
            path for path in self._folder.files if None not in (contents[path], digests[path], words[path])
        ]
        files = len(self._folder.files) + self._folder.unnameable
        return Totals(
            files=files,
            unreadable=files - len(readable),
            bytes=sum(contents[path].bytes for path in readable),
            lines=sum(contents[path].lines for path in readable),
            words=sum(words[path] for path in readable),
            digest=digest_of_all({path: digests[path] for path in readable}),
        )
