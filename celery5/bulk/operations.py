"""What each kind of bulk action reads, and what it does to it, batch by batch.

Each step may be repeated: what is done already is skipped.
"""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec

from celery5.application import Application
from celery5.broker.call import Call
from celery5.broker.calls import jobs as jobs_calls
from celery5.broker.calls import queues as queue_calls
from celery5.broker.calls import workflows as workflow_calls
from celery5.broker.colour import AwaitableConnections
from celery5.broker.driver import AsyncDriver
from celery5.dead_letters.queues import DeadLetterTally, purge_batch, replay_batch
from celery5.dead_letters.reading import DeadJobReader
from celery5.errors import RunNotRetried, UnknownQueue
from celery5.protocol.bulk import BulkRequest, list_texts, shift_ages
from celery5.protocol.job.dead_letters import DeadJob, parse_filter
from celery5.protocol.job.messages import try_read_command
from celery5.protocol.job.states import JobState
from celery5.protocol.workflows.status import RunState, RunStatus, make_status
from celery5.results.job_details import WAITING_STATES
from celery5.workflows.run import WorkflowRun

if TYPE_CHECKING:
    from celery5.broker.keys import QueueKeys

T = TypeVar("T")

MAX_RUNS = 10_000
"""Runs of a queue that are looked at, the last ones that have ended."""
RUNS_AT_ONCE = 50
"""Runs that are read in one trip."""


class BatchOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one batch."""

    done: int
    failed: int = 0
    skipped: int = 0
    error: str = ""


class BulkOperation(Protocol[T]):
    """One kind of bulk action with its filter."""

    # Things that were read so far, whether they are selected or not.
    looked_at: int

    async def read_page(self) -> Sequence[T] | None:
        """Return what is selected of the next page, maybe nothing; None at the end."""
        ...

    async def perform(self, batch: Sequence[T]) -> BatchOutcome:
        """Do it to a part of a page."""
        ...


_NOT_REPLAYED = {
    "corrupt": "a job has no message to replay",
    "run-ended": "a job belongs to a run that has ended: retry the run if it failed, else start a new run",
    "run-succeeded": "a job belongs to a run that has succeeded: no replay is needed, purge it",
    "run-retried": "a job belongs to a run that was retried: another job does its step, and a worker removes this one",
}
"""Why dead jobs are not replayed, for people: what passes by itself, such as a key that is taken, is none of it."""


class DeadJobOperation:
    """Replays or purges dead jobs: those that were dead when the action was asked for."""

    def __init__(self, app: Application, redis: AsyncDriver, action: BulkRequest, elapsed: float) -> None:
        self._app = app
        self._redis = redis
        self._perform_batch = replay_batch if action.verb == "dlq:replay" else purge_batch
        self._query = parse_filter(shift_ages(action.filter, elapsed))
        self._reader = DeadJobReader(app, redis, self._query, in_order=False)
        self.looked_at: int = 0

    async def read_page(self) -> Sequence[DeadJob] | None:
        """Return the selected jobs of the next page; None at the end."""
        page = await self._reader.read_page()
        self.looked_at += len(page)
        return [job for job in page if job in self._query] if page else None

    async def perform(self, batch: Sequence[DeadJob]) -> BatchOutcome:
        """Replay or purge jobs of one queue."""
        tally = DeadLetterTally()
        await self._perform_batch(self._app, self._redis, batch, tally)
        failed = {reason: tally.left[reason] for reason in _NOT_REPLAYED if tally.left.get(reason)}
        return BatchOutcome(
            done=tally.done,
            failed=sum(failed.values()),
            skipped=len(batch) - tally.done - sum(failed.values()),
            error=_NOT_REPLAYED[next(iter(failed))] if failed else "",
        )


class RevokeOperation:
    """Revokes the jobs that wait on queues."""

    def __init__(self, app: Application, redis: AsyncDriver, action: BulkRequest) -> None:
        self._app = app
        self._redis = redis
        self._names = list_texts(action.filter, "queue")
        self._queues: list[QueueKeys] = []
        self._tasks = list_texts(action.filter, "task")
        self._cursor = "0"
        self._is_checked = False
        self.looked_at: int = 0

    async def read_page(self) -> "Sequence[tuple[QueueKeys, str]] | None":
        """Return the waiting jobs of the next page; None at the end. Raises UnknownQueue."""
        if not self._is_checked:
            names = await self._redis.perform(queue_calls.list_queues(self._app.keys))
            for name in self._names:
                shards = self._app.brokers.list_shards(name, names)
                if not set(shards).intersection(names):
                    raise UnknownQueue(name, names)
                self._queues += map(self._app.queue, shards)
            self._is_checked = True
        if not self._queues:
            return None
        keys = self._queues[0]
        self._cursor, ids = await self._redis.perform(jobs_calls.scan_jobs(keys, self._cursor))
        if self._cursor == "0":
            self._queues.pop(0)
        self.looked_at += len(ids)
        waiting: list[str] = []
        for start in range(0, len(ids), jobs_calls.REVOCATION_BATCH):
            waiting += await self._select(keys, ids[start : start + jobs_calls.REVOCATION_BATCH])
        return [(keys, job_id) for job_id in waiting]

    async def _select(self, keys: "QueueKeys", ids: Sequence[str]) -> list[str]:
        locate: list[Call[Any]] = [jobs_calls.locate_job(keys, job_id) for job_id in ids]
        places = await self._redis.perform_all(locate)
        waiting = [job_id for job_id, place in zip(ids, places, strict=True) if place.state in WAITING_STATES]
        if not self._tasks or not waiting:
            return waiting
        inspect: list[Call[Any]] = [jobs_calls.inspect_job(keys, job_id) for job_id in waiting]
        messages = [found.message for found in await self._redis.perform_all(inspect)]
        return [
            job_id
            for job_id, message in zip(waiting, messages, strict=True)
            if (command := try_read_command(message, self._app.settings.message_limit)[0]) is not None
            and any(fnmatchcase(command.task, pattern) for pattern in self._tasks)
        ]

    async def perform(self, batch: "Sequence[tuple[QueueKeys, str]]") -> BatchOutcome:
        """Revoke jobs of one queue."""
        done, ids = 0, [job_id for _, job_id in batch]
        for start in range(0, len(ids), jobs_calls.REVOCATION_BATCH):
            part = ids[start : start + jobs_calls.REVOCATION_BATCH]
            revoke = jobs_calls.revoke(batch[0][0], part, ttl=self._app.settings.results_ttl)
            done += (await self._redis.perform(revoke)).count(JobState.REVOKED)
        return BatchOutcome(done=done, skipped=len(ids) - done)


class RetryOperation:
    """Starts failed runs of workflows again, from where they failed."""

    def __init__(
        self, app: Application, connections: AwaitableConnections, redis: AsyncDriver, action: BulkRequest
    ) -> None:
        self._app = app
        self._connections = connections
        self._redis = redis
        self._queues = list_texts(action.filter, "queue")
        self._names = list_texts(action.filter, "workflow")
        self._runs: list[tuple[str, str]] | None = None
        self.looked_at: int = 0

    async def read_page(self) -> Sequence[tuple[str, str]] | None:
        """Return the failed runs of the next page, with their queues; None at the end."""
        if self._runs is None:
            known = await self._redis.perform(queue_calls.list_queues(self._app.keys))
            list_shards = self._app.brokers.list_shards
            queues = [shard for name in self._queues for shard in list_shards(name, known)] or known
            self._runs = [
                (queue, run_id)
                for queue in queues
                for run_id in await self._redis.perform(
                    workflow_calls.list_past_runs(self._app.queue(queue), count=MAX_RUNS)
                )
            ]
        page, self._runs = self._runs[:RUNS_AT_ONCE], self._runs[RUNS_AT_ONCE:]
        if not page:
            return None
        self.looked_at += len(page)
        read = [
            workflow_calls.read_run(self._app.queue(queue), run_id, ("state", "name", "parent"))
            for queue, run_id in page
        ]
        found = zip(page, await self._redis.perform_all(read), strict=True)
        return [run for run, fields in found if self._is_selected(make_status(run[1], run[0], fields))]

    def _is_selected(self, run: RunStatus) -> bool:
        is_named = not self._names or any(fnmatchcase(run.name, pattern) for pattern in self._names)
        return is_named and not run.parent and run.state is RunState.FAILED

    async def perform(self, batch: Sequence[tuple[str, str]]) -> BatchOutcome:
        """Start runs again."""
        done, skipped, error = 0, 0, ""
        for queue, run_id in batch:
            try:
                await WorkflowRun[Any](self._app, run_id, home=queue).retry_unrecorded(self._connections)
            except RunNotRetried as refusal:
                skipped += 1
                error = error or str(refusal)
            else:
                done += 1
        return BatchOutcome(done=done, skipped=skipped, error=error)


def make_operation(
    app: Application,
    connections: AwaitableConnections,
    redis: AsyncDriver,
    action: BulkRequest,
    *,
    elapsed: float = 0.0,
) -> BulkOperation[Any]:
    """Return the operation of an action that was asked for `elapsed` seconds ago."""
    if action.verb == "task:revoke":
        return RevokeOperation(app, redis, action)
    if action.verb == "workflow:retry":
        return RetryOperation(app, connections, redis, action)
    return DeadJobOperation(app, redis, action, elapsed)
