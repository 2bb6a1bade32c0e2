"""Source Ingestion: runs Data Sources, and publishes what they bring to the tasks that want it.

A document becomes a job for each task that has subscribed. The job's id is made of the document's, and remembered for a
while: whatever comes twice is one job, also when a Router died between two tasks. A source that fails is begun again,
after a wait that grows.
"""

import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import msgspec
import trio

from celery5.broker.calls import events as events_calls
from celery5.broker.driver import AsyncDriver
from celery5.broker.keys import Keys
from celery5.errors import BadArguments, BrokerError, MessageTooLarge, Misconfigured
from celery5.events.sources import Source
from celery5.logs.log import Log
from celery5.protocol.events.documents import SourceDocument, make_document_job_id
from celery5.protocol.job.arguments import encode_value
from celery5.protocol.job.job import Job, new_id
from celery5.protocol.job.retry_policy import full_jitter
from celery5.protocol.masking import MAX_ERROR_LENGTH, describe_error
from celery5.tasks.task import Task

LEASE = 5.0
"""Seconds for which a source that runs in one Router at a time is held; it is renewed three times in each."""
FIRST_WAIT = 0.5
"""Seconds until a source that failed is begun again, at most, the first time."""
LONGEST_WAIT = 60.0
"""Seconds until then, at most."""
STEADY = 60.0
"""Seconds after which one that runs has not failed in a row with what was before."""
STOP_LIMIT = 5.0
"""Seconds that giving up what is held may take."""

Tasks = Sequence[Task[..., Any]]
Send = Callable[[Sequence[Job]], Awaitable[Sequence[Any]]]
"""Publishes jobs, and returns when they are."""


class SourceIngestion:
    """Runs each source for the tasks that have subscribed to it. `worker` is this Router's name."""

    def __init__(
        self,
        *,
        subscriptions: Mapping[Source, Tasks],
        send: Send,
        redis: AsyncDriver,
        keys: Keys,
        log: Log,
        worker: str,
    ) -> None:
        self._kept = [
            _Kept(each, _Emit(each, tasks, send), redis, keys.source_lease(each.name), log, worker)
            for each, tasks in subscriptions.items()
        ]

    def get_counts(self) -> dict[str, int]:
        """How many documents this process has published, by source."""
        return {kept.source.name: kept.emit.count for kept in self._kept}

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run them until cancelled."""
        task_status.started()
        async with trio.open_nursery() as nursery:
            for each in self._kept:
                nursery.start_soon(each.run)
            await trio.sleep_forever()


class _Emit:
    """What a source is handed: publishes a document to the tasks that have subscribed."""

    def __init__(self, source: Source, tasks: Tasks, send: Send) -> None:
        self._source = source
        self._tasks = tasks
        self._send = send
        self.count = 0

    async def __call__(
        self,
        body: object,
        /,
        *,
        id: str = "",  # noqa: A002  as everywhere
        attributes: Mapping[str, str] | None = None,
    ) -> str:
        said = body if isinstance(body, SourceDocument) else SourceDocument(body=_bytes_of(body))
        document = msgspec.structs.replace(
            said,
            id=_checked(id or said.id) or new_id(),
            source=self._source.name,
            attributes={**said.attributes, **(attributes or {})},
            received=said.received or round(time.time(), 6),
        )
        named = bool(id or said.id)
        jobs = [self._job(task, document, named=named) for task in self._tasks]
        await self._send(jobs)
        self.count += 1
        return document.id

    def _job(self, task: Task[..., Any], document: SourceDocument, *, named: bool) -> Job:
        """The job that gives `task` the document. One that has an id of its own is remembered by it."""
        name = make_document_job_id(self._source.name, document.id, task.name)
        if named:
            # A dead job keeps nobody away, and another attempt at publishing is no new document: the id and the window
            # outlive both.
            kept = task.send_options.results_ttl or task.app.settings.results_ttl
            task = task.options(
                id=name, key=f"document {name}", unique_for=self._source.remember, results_ttl=kept
            )
        return task.job(document)


def _bytes_of(body: object) -> bytes:
    """A body as bytes. Raises BadArguments for what has no JSON."""
    if isinstance(body, bytes | bytearray):
        return bytes(body)
    if isinstance(body, str):
        return body.encode()
    try:
        return encode_value(body)
    except Exception as error:
        raise BadArguments(
            f"a document's body is {type(body).__name__}, which has no JSON: {error}"
        ) from None


def _checked(name: object) -> str:
    if not isinstance(name, str) or len(name) > 200:
        raise BadArguments(f"a document's id is {name!r}: give a text of at most 200 characters")
    return name


class _Kept:
    """One source, kept running."""

    def __init__(
        self, source: Source, emit: _Emit, redis: AsyncDriver, key: str, log: Log, worker: str
    ) -> None:
        self.source = source
        self.emit = emit
        self._redis = redis
        self._key = key
        self._log = log
        self._worker = worker
        self._failures = 0

    async def run(self) -> None:
        """Run it again and again, until cancelled."""
        run = self._run_single if self.source.single else self._run_again
        while True:
            began = trio.current_time()
            try:
                await run()
            except Exception as error:  # the source is the user's code; or Redis is away
                if trio.current_time() - began >= STEADY:
                    self._failures = 0
                wait = full_jitter(self._failures, start=FIRST_WAIT, cap=LONGEST_WAIT, random=random.random)
                self._failures += 1
                self._log.event(
                    "source:failed",
                    "warning",
                    source=self.source.name,
                    why=describe_error(error, MAX_ERROR_LENGTH),
                    again_in=round(wait, 3),
                )
                await trio.sleep(wait)

    async def _run_again(self) -> None:
        """Run it, and again after a while when it ends; for ever asleep when it is not to be run again."""
        self._log.event("source:started", source=self.source.name, single=self.source.single)
        while True:
            await self._run_once()
            self._failures = 0
            if self.source.every is None:
                self._log.event("source:ended", source=self.source.name)
                await trio.sleep_forever()
            else:
                await trio.sleep(self.source.every)

    async def _run_once(self) -> None:
        run: Any = self.source.run
        if self.source.kind == "coroutine":
            stays = run() if isinstance(run, type) else run
            await getattr(stays, "run", stays)(self.emit)
        elif self.source.kind == "generator":
            bodies = cast("AsyncIterator[object]", run())
            try:
                async for each in bodies:
                    await self._emit_or_tell(each)
            finally:
                with trio.move_on_after(STOP_LIMIT, shield=True):
                    await cast("Any", bodies).aclose()
        else:
            for each in await trio.to_thread.run_sync(partial(_listed, run), abandon_on_cancel=True):
                await self._emit_or_tell(each)

    async def _emit_or_tell(self, body: object) -> None:
        """A body that can never be published is told of, and holds up none that come after it: begun again, the source
        would only bring it again."""
        try:
            await self.emit(body)
        except (BadArguments, MessageTooLarge) as error:
            self._log.event(
                "source:document-rejected",
                "error",
                source=self.source.name,
                why=describe_error(error, MAX_ERROR_LENGTH),
            )

    # ---- one Router at a time

    async def _run_single(self) -> None:
        """Wait until it is ours to run, and run it for as long as it is."""
        while wait := await self._hold():  # noqa: ASYNC110  it is Redis that changes
            await trio.sleep(min(wait + 0.05, LEASE / 2))
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._keep_holding, nursery.cancel_scope)
                await self._run_again()
        except ExceptionGroup as errors:
            raise _first_of(errors) from None
        finally:
            with trio.move_on_after(STOP_LIMIT, shield=True):
                await self._let_go()

    async def _hold(self) -> float:
        """Try to hold it; gives 0, or in how many seconds it may be free."""
        return await self._redis.perform(events_calls.acquire_lease(self._key, self._worker, lease=LEASE))

    async def _keep_holding(self, scope: trio.CancelScope) -> None:
        """Renew it; when that does not succeed in time, another may have it, so it ends here."""
        until = trio.current_time() + LEASE
        while True:
            await trio.sleep(LEASE / 3)
            asked, lost = trio.current_time(), False
            with trio.move_on_at(until):
                try:
                    lost = bool(await self._hold())
                    until = until if lost else asked + LEASE
                except BrokerError as error:
                    self._log.event("source:renew-failed", "warning", source=self.source.name, why=str(error))
            if lost or trio.current_time() >= until:
                self._log.event("source:lease-lost", "warning", source=self.source.name, hint=_LOST)
                scope.cancel()
                return

    async def _let_go(self) -> None:
        try:
            await self._redis.perform(events_calls.release_lease(self._key, self._worker))
        except BrokerError as error:
            self._log.event("source:release-failed", "debug", source=self.source.name, why=str(error))


def _listed(run: Callable[[], Any]) -> list[object]:
    """What a plain function gives, in its thread. Raises Misconfigured."""
    found: Any = run()
    if isinstance(found, bytes | str) or not isinstance(found, Iterable):
        raise Misconfigured(f"the source gave {type(found).__name__}: give a list of bodies, or yield them")
    return list(cast("Iterable[object]", found))


def _first_of(group: Any) -> Exception:
    """The first error in a group of groups."""
    first = group.exceptions[0]
    return _first_of(first) if isinstance(first, BaseExceptionGroup) else first


_LOST = "another Router may run it now; here it ends, and waits for its turn"
