"""Move the runs of workflows on whose home is a queue of this worker, and send what they have for other queues.

A run is changed by one script only, `advance.lua`. It is called in the trip that settles members of runs, and here
until nothing is left. What it cannot do in the slot of its queue it puts into an outbox: jobs of other queues, what
has ended for runs of other queues, jobs to revoke. So do the scripts that end jobs, with what is sent for a dead one.
A worker takes an entry, performs it and removes it; when the worker dies, another one takes it. Each entry may be
performed twice: a job is published once for its id, a node ends once.
"""

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

import msgspec
import trio
from msgspec.structs import replace

from celery5.broker.call import Call
from celery5.broker.calls import workflows as calls
from celery5.broker.calls.leases import HeartbeatReply
from celery5.broker.driver import AsyncDriver
from celery5.broker.keys import QueueKeys
from celery5.broker.wall_clock import wall_time
from celery5.errors import BrokerError, BrokerReplied, CeleryError, Corrupt
from celery5.logs.log import Log
from celery5.protocol.job.failure_call import make_failure_job
from celery5.protocol.job.job import Job
from celery5.protocol.job.messages import read_job_id
from celery5.protocol.masking import mask_lines
from celery5.protocol.workflows.member_ids import MemberId, parse_member_id
from celery5.protocol.workflows.plan import DEFAULT_LIFE
from celery5.protocol.workflows.status import StepFailure
from celery5.services.process.broker_outages import RETRY_INTERVAL, OutageLog
from celery5.services.process.wake_ups import WakeUps
from celery5.workflows import graph

OUTBOX_BATCH = 100
"""Entries of the outbox in one call."""
STALE_AFTER = 5.0
"""Seconds after which an entry that a worker has taken is taken by another one: the worker has died, or is stuck."""
FIRST_PASS = 5.0
"""Seconds that a starting worker takes for what waits in the outboxes, before it reads jobs."""
NEW_RUNS = b"runs"
"""The payload that notifies the workers of a queue of records or of the outbox."""
_END_BITS = ("done", "bad", "held")
"""The bitmaps that say which members of a map have ended."""

T = TypeVar("T")
Action = Callable[[], Awaitable[Any]]


class RunApplication(Protocol):
    """The application, as far as its runs need it."""

    async def asend_jobs(self, jobs: Sequence[Job]) -> Any:
        """Send jobs that were made before."""
        ...

    @property
    def workflows(self) -> Any:
        """Its workflows."""
        ...


class RunProgress:
    """What waits to be done for the runs of each queue of this worker."""

    def __init__(self, *, results_ttl: float) -> None:
        self._ttl = results_ttl
        self._records: set[str] = set()
        self._outboxes: set[str] = set()
        self._stale: set[str] = set()
        self._changed = trio.Event()

    def make_advance(self, keys: QueueKeys, records: Sequence[bytes] = ()) -> "Call[calls.Advance]":
        """Return the call that moves the runs of a queue on."""
        return calls.advance(keys, records, ttl=self._ttl, is_worker=True)

    def note_records(self, queue: str) -> None:
        """Note that records wait to be applied."""
        self._records.add(queue)
        self._changed.set()

    def note_advance(self, queue: str, advance: "calls.Advance") -> None:
        """Note what a call has left to do."""
        if advance.left:
            self._records.add(queue)
        if advance.outbox:
            self._outboxes.add(queue)
        if advance.left or advance.outbox:
            self._changed.set()

    def note_outbox(self, queue: str, *, is_stale: bool = False) -> None:
        """Note that entries wait in the outbox; `is_stale` when a worker may have left them."""
        self._outboxes.add(queue)
        if is_stale:
            self._stale.add(queue)
        self._changed.set()

    async def wait(self) -> None:
        """Wait until there is something to do."""
        await self._changed.wait()
        self._changed = trio.Event()

    def take_records(self) -> list[str]:
        """Return the queues with records, and forget them."""
        queues = sorted(self._records)
        self._records.clear()
        return queues

    def take_outboxes(self) -> list[tuple[str, bool]]:
        """Return the queues with entries in their outbox, and whether some may be stale, and forget them."""
        queues = [(queue, queue in self._stale) for queue in sorted(self._outboxes)]
        self._outboxes.clear()
        self._stale.clear()
        return queues


class RunRelay:
    """Does what `RunProgress` notes."""

    def __init__(
        self,
        *,
        app: RunApplication,
        redis: AsyncDriver,
        consumed: Sequence[QueueKeys],
        run_progress: RunProgress,
        wake_ups: WakeUps,
        worker: str,
        log: Log,
    ) -> None:
        self._app = app
        self._wake_ups = wake_ups
        self._redis = redis
        self._queues: Mapping[str, QueueKeys] = {keys.queue: keys for keys in consumed}
        self._by_channel = {keys.wake.encode(): keys.queue for keys in consumed}
        self._progress = run_progress
        self._worker = worker
        self._log = log
        self._outages = {
            keys.queue: OutageLog(log, "workflow:interrupted", queue=keys.queue) for keys in consumed
        }

    def on_message(self, channel: bytes) -> None:
        """Look at the queue whose workers are notified on a channel."""
        queue = self._by_channel[channel]
        if self._wake_ups.does_answer(queue):
            self._progress.note_records(queue)
            self._progress.note_outbox(queue)

    def on_heartbeat(self, keys: QueueKeys, reply: HeartbeatReply) -> None:
        """Take the reply to a heartbeat: what a worker that died has left is done here."""
        if reply.run_records:
            self._progress.note_records(keys.queue)
        if reply.run_outbox:
            self._progress.note_outbox(keys.queue, is_stale=True)

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Move runs on until cancelled. First what waits, so that no job runs that was to be revoked."""
        for queue in self._queues:
            self._progress.note_outbox(queue, is_stale=True)
        with trio.move_on_after(FIRST_PASS):
            await self._do_all()
        task_status.started()
        while True:
            await self._progress.wait()
            if not await self._do_all():
                await trio.sleep(RETRY_INTERVAL)

    async def _do_all(self) -> bool:
        """Do what is noted. Returns whether all of it was done."""
        failed = False
        for queue in self._progress.take_records():
            failed = not await self._attempt(queue, self._advance) or failed
        for queue, is_stale in self._progress.take_outboxes():
            if is_stale:
                failed = not await self._attempt(queue, self._send_stale) or failed
            failed = not await self._attempt(queue, self._send) or failed
        return not failed

    async def _attempt(self, queue: str, action: Any) -> bool:
        """Do something for a queue; when that fails, note it again. Returns whether it was done."""
        try:
            await action(self._queues[queue])
        except (BrokerError, CeleryError) as error:
            self._outages[queue].record_error(error)
            self._progress.note_records(queue)
            self._progress.note_outbox(queue, is_stale=True)
            return False
        self._outages[queue].record_recovery()
        return True

    async def _advance(self, keys: QueueKeys) -> None:
        """Apply all records of a queue."""
        while True:
            advance = await self._redis.perform(self._progress.make_advance(keys))
            log_advance(self._log, keys.queue, advance)
            if advance.outbox:
                self._progress.note_outbox(keys.queue)
            if not advance.left:
                return

    async def _send_stale(self, keys: QueueKeys) -> None:
        """Perform the entries that another worker has left."""
        try:
            entries = await self._redis.perform(
                calls.claim_outbox(keys, self._worker, idle=STALE_AFTER, count=OUTBOX_BATCH)
            )
        except BrokerReplied as error:
            if "NOGROUP" not in str(error) and "no such key" not in str(error).lower():
                raise
            return
        await self._perform(keys, entries, is_stale=True)

    async def _send(self, keys: QueueKeys) -> None:
        """Perform the new entries of an outbox. Raises the first error at the end."""
        error: Exception | None = None
        while entries := await self._read(keys):
            try:
                await self._perform(keys, entries)
            except (BrokerError, CeleryError) as failed:
                error = error or failed
        if error:
            raise error

    async def _read(self, keys: QueueKeys) -> "list[calls.OutboxEntry]":
        read = calls.read_outbox(keys, self._worker, count=OUTBOX_BATCH)
        try:
            return await self._redis.perform(read)
        except BrokerReplied as error:
            if "NOGROUP" not in str(error):
                raise
        if not await self._redis.perform(calls.has_outbox(keys)):
            return []
        try:
            await self._redis.perform(calls.create_outbox(keys))
        except BrokerReplied as error:
            if "BUSYGROUP" not in str(error):
                raise
        return await self._redis.perform(read)

    async def _perform(
        self, keys: QueueKeys, entries: "Sequence[calls.OutboxEntry]", *, is_stale: bool = False
    ) -> None:
        """Perform entries, and remove them. One that fails holds up only those for the same destination.

        Raises:
            BrokerError, CeleryError: The first error, when all others were tried. What failed stays in the outbox.
        """
        done: list[str] = []
        errors: list[Exception] = []
        for ids, action in self._plan(keys, entries, is_stale=is_stale):
            try:
                await action()
            except (BrokerError, CeleryError) as error:
                errors.append(error)
            else:
                done += ids
        if done:
            await self._redis.perform(calls.remove_from_outbox(keys, done))
        if errors:
            raise errors[0]

    def _plan(
        self, keys: QueueKeys, entries: "Sequence[calls.OutboxEntry]", *, is_stale: bool
    ) -> Iterator[tuple[list[str], Action]]:
        """Yield what is to be done for each destination, with the ids of its entries."""
        records: dict[str, list[calls.OutboxEntry]] = {}
        jobs: dict[str, list[calls.OutboxEntry]] = {}
        failed: list[calls.OutboxEntry] = []
        others: list[calls.OutboxEntry] = []
        for entry in entries:
            if "record" in entry.fields:
                records.setdefault(entry.fields["home"].decode(), []).append(entry)
            elif "failed" in entry.fields:
                failed.append(entry)
            elif "job" in entry.fields:
                jobs.setdefault(entry.fields["queue"].decode(), []).append(entry)
            else:
                others.append(entry)
        for home, part in records.items():
            apply = partial(self._apply, home, [entry.fields["record"] for entry in part])
            yield [entry.id for entry in part], apply
        send = self._send_late if is_stale else self._send_jobs
        for part in jobs.values():
            yield (
                [entry.id for entry in part],
                partial(send, keys, [_make_job(entry.fields) for entry in part]),
            )
        for entry in failed:
            yield [entry.id], partial(self._send_for_failure, entry.fields)
        # Jobs that are to be revoked may be among those that have just been sent.
        for entry in others:
            yield [entry.id], partial(self._perform_one, keys.queue, entry.fields)

    async def _send_for_failure(self, fields: Mapping[str, bytes]) -> None:
        """Send the `on_failure` job of a dead one that is in no run. If it was sent before, that changes nothing."""
        job_id = fields["failed"].decode()
        try:
            job = make_failure_job(job_id, fields["message"], fields["document"], now=wall_time())
        except Corrupt as error:  # no such message comes from `delay`
            self._log.event(
                "job:on-failure-dropped", "error", job=read_job_id(fields["message"]), why=str(error)
            )
            return
        await self._app.asend_jobs([job])

    async def _apply(self, home: str, records: Sequence[bytes]) -> None:
        log_failed_runs(self._log, home, await self._app.workflows.apply(home, records))

    async def _perform_one(self, home: str, fields: Mapping[str, bytes]) -> None:
        """Perform an entry that is neither a job nor a record."""
        workflows = self._app.workflows
        if "revoke" in fields:
            log_failed_runs(self._log, home, await workflows.revoke_members(home, fields))
        elif "retried" in fields:
            await workflows.remove_replaced(home, fields["retried"].decode())
        elif "find-lost" in fields:
            log_failed_runs(self._log, home, await workflows.find_lost(home, fields["find-lost"].decode()))
        elif "watch" in fields:
            life = int(fields["life"]) / 1000
            await workflows.watch(home, fields["watch"].decode(), int(fields["node"]), life=life)
        elif "unwatch" in fields:
            await workflows.unwatch(home, fields["unwatch"].decode())

    async def _send_jobs(self, keys: QueueKeys, jobs: Sequence[Job]) -> None:
        """Send jobs of another queue, or with keys. One whose key another job has is rejected."""
        results = await self._app.asend_jobs(jobs)
        rejected = [job for job, result in zip(jobs, results, strict=True) if result.duplicate]
        await self._end(keys, rejected, "REJECTED", "another job has its key")

    async def _send_late(self, keys: QueueKeys, jobs: Sequence[Job]) -> None:
        """Send jobs that were to be sent earlier, but those that have ended since.

        Those whose run has stopped are stopped instead.
        """
        members = [(job, member) for job in jobs if (member := parse_member_id(job.id)) is not None]
        runs = await self._read_runs(keys, [member for _, member in members])
        active = [(job, member) for job, member in members if _may_be_active(runs[member.run], member)]
        ended = await self._find_ended(keys, [member for _, member in active])
        live = [(job, member) for job, member in active if member not in ended]
        unwanted = await self._find_unwanted(keys, runs, [member for _, member in live])
        wanted = [job for job, member in live if member not in unwanted]
        stopped = [job for job, member in live if member in unwanted]
        if stopped:
            await self._stop(keys, stopped)
        if wanted:
            await self._send_jobs(keys, wanted)

    async def _stop(self, keys: QueueKeys, jobs: Sequence[Job]) -> None:
        """End jobs whose run has stopped before they were known to be sent.

        An earlier attempt may have sent them before it was cut off, or may be about to. So each one is sent first,
        for a time that never comes: where it is known that changes nothing. Once it is revoked, whoever sends it later
        sends nothing. One that runs tells its run how it has ended, and so has one that ran.
        """
        never = f"+{DEFAULT_LIFE * 1000:.0f}"
        await self._app.asend_jobs([replace(job, at=never, lock="", unique_for=None) for job in jobs])
        states = await self._app.workflows.revoke_jobs(jobs[0].queue, [job.id for job in jobs])
        ended = [job for job in jobs if states[job.id] == "REVOKED"]
        await self._end(keys, ended, "REVOKED", "its run was stopped before it was sent")

    async def _read_runs(
        self, keys: QueueKeys, members: Sequence[MemberId]
    ) -> dict[str, Mapping[str, bytes]]:
        """Return of each run what it says of the nodes of these jobs, in one trip."""
        names: dict[str, dict[str, None]] = {}
        for member in members:
            fields = (f"{name}:{member.node}" for name in ("node", "run", "total"))
            names.setdefault(member.run, {"state": None, "def": None}).update(dict.fromkeys(fields))
        read = [calls.read_run(keys, run_id, list(fields)) for run_id, fields in names.items()]
        return dict(zip(names, await self._perform_all(read), strict=True))

    async def _find_ended(self, keys: QueueKeys, members: Sequence[MemberId]) -> set[MemberId]:
        """Return the jobs of maps among these that have ended, in one trip."""
        asked = [
            (member, calls.read_bit(keys, member.run, member.node, bit, member.member))
            for member in members
            if member.member is not None
            for bit in _END_BITS
        ]
        replies = await self._perform_all([call for _, call in asked])
        return {member for (member, _), has_ended in zip(asked, replies, strict=True) if has_ended}

    async def _find_unwanted(
        self, keys: QueueKeys, runs: Mapping[str, Mapping[str, bytes]], members: Sequence[MemberId]
    ) -> set[MemberId]:
        """Return the jobs among these whose run has stopped, and that are steps of it, in one trip."""
        doubted = [member for member in members if not _is_wanted(runs[member.run], member)]
        numbers: dict[str, list[str]] = {}
        for member in doubted:
            numbers.setdefault(graph.get_plan_digest(runs[member.run]), []).append(str(member.node))
        read = [calls.read_plan(keys, digest, nodes) for digest, nodes in numbers.items()]
        plans = dict(zip(numbers, await self._perform_all(read), strict=True))
        unwanted: set[MemberId] = set()
        for member in doubted:
            raw = plans[graph.get_plan_digest(runs[member.run])].get(str(member.node))
            node = None if raw is None else graph.try_decode_node(raw)
            if node is None or not graph.is_hidden_job(node):
                unwanted.add(member)
        return unwanted

    async def _perform_all(self, several: Sequence[Call[T]]) -> list[T]:
        return await self._redis.perform_all(several) if several else []

    async def _end(self, keys: QueueKeys, jobs: Sequence[Job], state: str, reason: str) -> None:
        """End jobs that do not run, in their runs."""
        if not jobs:
            return
        records = [
            calls.pack_record("end", job.id, state, _make_document(job, state, reason)) for job in jobs
        ]
        advance = await self._redis.perform(self._progress.make_advance(keys, records))
        log_advance(self._log, keys.queue, advance)
        self._progress.note_advance(keys.queue, advance)


def _may_be_active(fields: Mapping[str, bytes], member: MemberId) -> bool:
    """Return whether a node has not ended. What is remembered of the id of a job itself is forgotten in time."""
    word, _, generation = fields.get(f"node:{member.node}", b"").partition(b" ")
    # The run that its job has returned is in its place; or its job has read the items of its map.
    is_replaced = f"run:{member.node}" in fields or (
        member.member is None and f"total:{member.node}" in fields
    )
    is_current = (generation or b"0") == b"%d" % member.generation
    return not is_replaced and is_current and word in (b"active", b"ending")


def _is_wanted(fields: Mapping[str, bytes], member: MemberId) -> bool:
    """Return whether a run sends such a job, whatever it is."""
    return fields.get("state") == b"live" and fields.get(f"node:{member.node}", b"").startswith(b"active")


def log_advance(log: Log, queue: str, advance: "calls.Advance") -> None:
    """Log what went wrong in the runs of a queue while they moved on."""
    if advance.problem:
        log.event("workflow:record-failed", "error", queue=queue, why=advance.problem)
    log_failed_runs(log, queue, advance.failed)


def log_failed_runs(log: Log, queue: str, failed: "Sequence[calls.FailedRun]") -> None:
    """Log the runs that have failed or expired, with where and why."""
    for run in failed:
        failure = run.failure or StepFailure(
            id="", run=run.id, type="WorkflowExpired", message="its deadline is over"
        )
        log.event(
            "workflow:failed",
            "warning",
            queue=queue,
            run=run.id,
            workflow=run.workflow,
            state="EXPIRED" if run.state == "EXPIRED" else "FAILED",
            node=failure.node,
            task=failure.task,
            job=failure.id,
            why=mask_lines(f"{failure.type}: {failure.message}"),
        )


def _make_job(fields: Mapping[str, bytes]) -> Job:
    def text(name: str) -> str:
        return fields.get(name, b"").decode(errors="replace")

    return Job(
        text("job"),
        text("task"),
        text("queue"),
        fields["message"],
        text("at"),
        False,
        text("lock"),
        float(text("unique_for")) if text("unique_for") else None,
        lane=text("lane"),
    )


def _make_document(job: Job, state: str, reason: str) -> str:
    return msgspec.json.encode(
        {"v": 1, "id": job.id, "task": job.task, "state": state, "reason": reason}
    ).decode()
