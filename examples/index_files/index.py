"""Index: sends the jobs for every file of a folder, waits for their results, and adds them up.

Jobs go in portions, a few portions at a time: however large the folder, neither this process nor Redis holds more than
a few thousand jobs of it.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import trio

from celery5 import App, AsyncResult, CeleryError
from celery5.broker.calls import jobs as jobs_calls
from celery5.examples.index_files import tasks
from celery5.examples.index_files.folder import Folder, Totals, digest_of_all
from celery5.protocol.job.envelope import Document, read_document
from celery5.results.waiting import wait_for_results
from celery5.tasks import Signature, Task

PORTION = 100
"""Files that are sent together."""
PORTIONS = 30
"""Portions that are under way at once, of any of the tasks."""
PATIENCE = 60.0
"""Seconds without any job ending after which something must be wrong."""

BROKEN = Path(__file__).with_name("broken.json")

JOBS_FOR_A_FILE = (tasks.read, tasks.digest, tasks.count_words)
EXTRA_JOBS = ((tasks.ask_a_flaky_service, ()), (tasks.read_catalogue, (BROKEN,)))
"""The flaky job and the poisonous one, which fails at each of its attempts."""
EXPECTED_DEAD = 1
EXPECTED_RETRIES = 1 + (tasks.read_catalogue.send_options.max_retries or 0)


class NothingHappens(CeleryError):
    """No job has ended for a long time."""


class Outcome(msgspec.Struct):
    """What came of all jobs: the `totals` of the files, the jobs themselves, and seconds from sending to ending."""

    totals: Totals
    jobs: int
    retries: int
    dead: int
    in_dead_letter_queue: int
    first_failure: str
    latencies: list[float]


Told = Callable[[str], None]
"""Hears the name of a task of which a job has ended."""


class Index:
    """One indexing of `folder` by the workers of `app`; `told` hears how it goes on."""

    def __init__(self, app: App, folder: Folder, *, told: Told) -> None:
        self._app = app
        self._folder = folder
        self._told = told
        self._documents: list[Document] = []
        self._values: dict[str, dict[Path, Any]] = {task.name: {} for task in JOBS_FOR_A_FILE}
        self._patience = trio.CancelScope()
        self.under_way: set[str] = set()
        """The ids of jobs whose results are still in Redis, or will be."""

    async def run(self) -> Outcome:
        """Index everything. Raises NothingHappens when no job ends for a minute."""
        room = trio.Semaphore(PORTIONS)
        self._be_patient()
        with self._patience:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._send_and_wait, [each.s(*args) for each, args in EXTRA_JOBS])
                for start in range(0, len(self._folder.files), PORTION):
                    for task in JOBS_FOR_A_FILE:
                        await room.acquire()
                        nursery.start_soon(self._portion, task, start, room)
            return await self._outcome()
        raise NothingHappens(
            f"no job has ended for {PATIENCE:g} s: is the machine very busy, or the broker away?"
        )

    async def _portion(self, task: Task[[Path], Any], start: int, room: trio.Semaphore) -> None:
        """One task for each file of one portion."""
        files = self._folder.files[start : start + PORTION]
        try:
            values = await self._send_and_wait([task.s(path) for path in files])
        finally:
            room.release()
        self._values[task.name].update(zip(files, values, strict=True))

    async def _send_and_wait(self, signatures: Sequence[Signature[Any]]) -> list[Any]:
        """The values of these jobs in order; None for one that failed for good."""
        results: list[AsyncResult[Any]] = await self._app.asend_many(signatures)
        ids = [each.id for each in results]
        self.under_way.update(ids)
        keys = [each.key for each in results]
        documents = await wait_for_results(self._app, self._app.connections, keys, timeout=None)
        values = [self._take(each, documents[each.key]) for each in results]
        await self._app.aperform(jobs_calls.delete_results(self._app.queue(results[0].queue), ids))
        self.under_way.difference_update(ids)
        return values

    def _take(self, result: AsyncResult[Any], raw: bytes) -> Any:
        """Note how a job ended; gives its value."""
        self._documents.append(read_document(raw))
        self._told(result.task)
        self._be_patient()
        value = result.outcome(raw)
        return None if isinstance(value, Exception) else value

    def _be_patient(self) -> None:
        self._patience.deadline = trio.current_time() + PATIENCE

    async def _outcome(self) -> Outcome:
        queue = self._app.queue(self._app.settings.default_queue)
        dead = [each for each in self._documents if each.failure]
        other = [each for each in dead if each.task != tasks.read_catalogue.name]
        return Outcome(
            totals=self._totals(),
            jobs=len(self._documents),
            retries=sum(each.attempt - 1 for each in self._documents),
            dead=len(dead),
            in_dead_letter_queue=(await self._app.aperform(jobs_calls.measure_queue(queue))).dead,
            first_failure=f"{other[0].task}: {other[0].failure}" if other else "",
            latencies=sorted(each.finished - each.sent for each in self._documents),
        )

    def _totals(self) -> Totals:
        seen, digests, words = (self._values[task.name] for task in JOBS_FOR_A_FILE)
        whole = [path for path in self._folder.files if None not in (seen[path], digests[path], words[path])]
        files = len(self._folder.files) + self._folder.unnameable
        return Totals(
            files=files,
            unreadable=files - len(whole),
            bytes=sum(seen[path].bytes for path in whole),
            lines=sum(seen[path].lines for path in whole),
            words=sum(words[path] for path in whole),
            digest=digest_of_all({path: digests[path] for path in whole}),
        )
