"""Run Data Sources, and publish their documents to the tasks that subscribe to them.

A document becomes a job for each subscribed task. The job's id is derived from the document's and kept for a while: a
document that comes twice is one job, also when a Router died between two tasks. A source that fails is started again,
after a delay that grows.
"""

import random
import threading
import time
from collections import deque
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Generator,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import suppress
from typing import Any, cast

import msgspec
import trio

from celery5.broker.driver import AsyncDriver
from celery5.broker.keys import Keys
from celery5.errors import BadArguments, BrokerError, MessageTooLarge, Misconfigured
from celery5.events.sources import Source
from celery5.logs.log import Log
from celery5.protocol.events.documents import SourceDocument, make_document_job_id
from celery5.protocol.job.arguments import encode_value
from celery5.protocol.job.job import Job, new_id
from celery5.protocol.job.retry_policy import full_jitter
from celery5.protocol.job.verdict import iterate_leaves
from celery5.protocol.masking import MAX_ERROR_LENGTH, describe_error, get_error_text, get_type_name
from celery5.protocol.task_kinds import EventLoop
from celery5.runners.on_asyncio import AsyncioRunner
from celery5.runners.surrounding import surround_call
from celery5.runners.user_errors import call_in_thread, call_user_code, reraise_cancellation
from celery5.services.process.broker_outages import last_try
from celery5.services.process.exclusive_lease import ExclusiveLease
from celery5.tasks.task import Task

FIRST_DELAY = 0.5
"""The most seconds until a source is started again after its first failure."""
MAX_DELAY = 60.0
"""The most seconds until then after any failure."""
STABLE_SECONDS = 60.0
"""Seconds of running after which earlier failures no longer count."""
MAX_AHEAD = 1000
"""Bodies of a plain function that wait to be published, at most: then it waits."""
STOP_LIMIT = 5.0
"""Seconds that closing a source may take."""

Tasks = Sequence[Task[..., Any]]
Send = Callable[[Sequence[Job]], Awaitable[Sequence[Any]]]
"""Publishes jobs, and returns when they are."""


class SourceIngestion:
    """Runs each source for the tasks that subscribe to it.

    Args:
        subscriptions: The tasks that subscribe to each source.
        send: Sends their jobs, on either event loop.
        redis: Has the leases of sources that run in one Router at a time.
        keys: The keys of those leases.
        log: The log.
        worker: The name of this Router.
        asyncio_runner: Runs sources on asyncio.
        default_loop: The event loop of sources that name none.
    """

    def __init__(
        self,
        *,
        subscriptions: Mapping[Source, Tasks],
        send: Send,
        redis: AsyncDriver,
        keys: Keys,
        log: Log,
        worker: str,
        asyncio_runner: AsyncioRunner,
        default_loop: EventLoop,
    ) -> None:
        self._runners = [
            _SourceRunner(
                source,
                _DocumentPublisher(source, tasks, send),
                redis,
                keys.source_lease(source.name),
                log,
                worker,
                asyncio_runner if (source.loop or default_loop) == "asyncio" else None,
            )
            for source, tasks in subscriptions.items()
        ]

    def get_counts(self) -> dict[str, int]:
        """Return how many documents this process has published, by source."""
        return {runner.source.name: runner.publish.count for runner in self._runners}

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run all sources until cancelled."""
        task_status.started()
        async with trio.open_nursery() as nursery:
            for runner in self._runners:
                nursery.start_soon(runner.run)
            await trio.sleep_forever()


class _DocumentPublisher:
    """Publishes the documents of a source to the tasks that subscribe to it. A source gets it as its argument."""

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
        raw = body if isinstance(body, SourceDocument) else SourceDocument(body=_encode_body(body))
        document = msgspec.structs.replace(
            raw,
            id=_check_id(id or raw.id) or new_id(),
            source=self._source.name,
            attributes={**raw.attributes, **(attributes or {})},
            received=raw.received or round(time.time(), 6),
        )
        has_id = bool(id or raw.id)
        jobs = [self._make_job(task, document, has_id=has_id) for task in self._tasks]
        await self._send(jobs)
        self.count += 1
        return document.id

    def _make_job(self, task: Task[..., Any], document: SourceDocument, *, has_id: bool) -> Job:
        """Return the job of `task` for the document. Duplicates are recognised if the source gave it an id."""
        job_id = make_document_job_id(self._source.name, document.id, task.name)
        if has_id:
            # The id alone would not do: a dead job with this id does not prevent another one. The deduplication
            # window lasts longer than the job, and than further attempts to publish it.
            results_ttl = task.send_options.results_ttl or task.app.settings.results_ttl
            task = task.options(
                id=job_id, key=f"document {job_id}", unique_for=self._source.remember, results_ttl=results_ttl
            )
        return task.job(document)


def _encode_body(body: object) -> bytes:
    """Return a body as bytes. Raises BadArguments for one without a JSON form."""
    if isinstance(body, bytes | bytearray):
        return bytes(body)
    if isinstance(body, str):
        return body.encode()
    try:
        return encode_value(body)
    except BaseException as error:
        reraise_cancellation(error)
        raise BadArguments(
            f"a document's body is {get_type_name(body)}, which has no JSON: {get_error_text(error, MAX_ERROR_LENGTH)}"
        ) from None


def _check_id(document_id: object) -> str:
    if not isinstance(document_id, str) or len(document_id) > 200:
        raise BadArguments(f"a document's id is {document_id!r}: give a text of at most 200 characters")
    return document_id


class _SourceRunner:
    """Keeps one source running."""

    def __init__(
        self,
        source: Source,
        publish: _DocumentPublisher,
        redis: AsyncDriver,
        lease_key: str,
        log: Log,
        worker: str,
        asyncio_runner: AsyncioRunner | None,
    ) -> None:
        self.source = source
        self._asyncio_runner = asyncio_runner
        self.publish = publish
        self._log = log
        self._lease = ExclusiveLease(
            redis=redis, key=lease_key, holder=worker, on_renew_failed=self._report_renew_failed
        )
        self._failures = 0

    async def run(self) -> None:
        """Run the source, and again after each failure, until cancelled."""
        run = self._run_single if self.source.single else self._run_again
        while True:
            began = trio.current_time()
            try:
                await run()
            except BaseException as error:  # of the user's code, or because Redis is unreachable
                reraise_cancellation(error)
                if trio.current_time() - began >= STABLE_SECONDS:
                    self._failures = 0
                delay = full_jitter(self._failures, start=FIRST_DELAY, cap=MAX_DELAY, random=random.random)
                self._failures += 1
                self._log.event(
                    "source:failed",
                    "warning",
                    source=self.source.name,
                    why=describe_error(error, MAX_ERROR_LENGTH),
                    again_in=round(delay, 3),
                )
                await trio.sleep(delay)

    async def _run_again(self) -> None:
        """Run the source, and again after its interval; without one, sleep for ever once it has ended."""
        self._log.event("source:started", source=self.source.name, single=self.source.single)
        while True:
            await call_user_code(self._run_once)
            self._failures = 0
            if self.source.every is None:
                self._log.event("source:ended", source=self.source.name)
                await trio.sleep_forever()
            else:
                await trio.sleep(self.source.every)

    async def _run_once(self) -> None:
        if self.source.kind == "function":
            await self._publish_from_thread(self.source.run)
        elif self._asyncio_runner is not None:
            await self._asyncio_runner.call(self._run_async)
        else:
            await self._run_async()

    async def _run_async(self) -> None:
        """Run `async def` code of the source, on either event loop."""
        run: Any = self.source.run
        if self.source.kind == "coroutine":
            source = run() if isinstance(run, type) else run
            await getattr(source, "run", source)(self.publish)
            return
        bodies = cast("AsyncGenerator[object, None]", run())
        try:
            async for body in bodies:
                await self._publish_or_log(body)
        finally:
            if self._asyncio_runner is not None:  # which limits the time after a cancellation
                await bodies.aclose()
            else:
                with trio.move_on_after(STOP_LIMIT, shield=True):
                    await bodies.aclose()

    async def _publish_from_thread(self, run: Callable[[], Any]) -> None:
        """Publish the bodies of a plain function as it yields them, which may be without end. It runs in one thread."""
        bodies = _ThreadBodies(run)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(bodies.run)
                try:
                    async for body in bodies:
                        await self._publish_or_log(body)
                finally:
                    bodies.end()
        except BaseExceptionGroup as errors:
            reraise_cancellation(errors)
            raise next(iterate_leaves(errors)) from None

    async def _publish_or_log(self, body: object) -> None:
        """Publish a body; log one that can never be published, and go on with the next.

        A restart of the source would only return it again.
        """
        try:
            await self.publish(body)
        except (BadArguments, MessageTooLarge) as error:
            self._log.event(
                "source:document-rejected",
                "error",
                source=self.source.name,
                why=describe_error(error, MAX_ERROR_LENGTH),
            )

    # ---- one Router at a time

    async def _run_single(self) -> None:
        """Wait for the lease of the source, and run it while the lease is held."""
        await self._lease.wait_acquired()
        try:
            await self._lease.run_while_held(self._run_again)
            self._log.event("source:lease-lost", "warning", source=self.source.name, hint=_LOST)
        except BaseExceptionGroup as errors:
            reraise_cancellation(errors)
            raise next(iterate_leaves(errors)) from None
        finally:
            with last_try(self._log, "source:release-failed", source=self.source.name):
                await self._lease.release()

    def _report_renew_failed(self, error: BrokerError) -> None:
        self._log.event("source:renew-failed", "warning", source=self.source.name, why=str(error))


class _ThreadBodies:
    """What a plain function yields in its thread, for the event loop: at most MAX_AHEAD bodies wait, then the thread.

    A call into the event loop for each body would cost the thread a turn of the interpreter each time.
    """

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self._token = trio.lowlevel.current_trio_token()
        self._bodies = deque[object]()
        self._room = threading.Semaphore(MAX_AHEAD)
        self._change = trio.Event()
        self._has_ended = False
        self._error: BaseException | None = None
        self._is_wanted = True

    async def run(self) -> None:
        """Run the function to its end. What it raises, iteration raises after the bodies that it has yielded before."""
        try:
            # A thread of its own: it may run for ever, and must not take one that others wait for.
            limiter = trio.CapacityLimiter(1)
            await call_in_thread(surround_call(self._run_in_thread, "thread"), limiter=limiter)
        except BaseException as error:
            reraise_cancellation(error)
            self._error = error
        finally:
            self._has_ended = True
            self._change.set()

    def __aiter__(self) -> "_ThreadBodies":
        return self

    async def __anext__(self) -> object:
        while not self._bodies:
            if self._has_ended:
                raise self._error or StopAsyncIteration
            self._change = trio.Event()
            await self._change.wait()
        self._room.release()
        return self._bodies.popleft()

    def end(self) -> None:
        """Want no more bodies: the thread ends at the next one."""
        self._is_wanted = False
        self._room.release()

    def _run_in_thread(self) -> None:
        bodies: Any = self._function()
        if isinstance(bodies, bytes | str) or not isinstance(bodies, Iterable):
            raise Misconfigured(
                f"the source gave {get_type_name(bodies)}: give a list of bodies, or yield them"
            )
        for body in cast("Iterable[object]", bodies):
            self._room.acquire()
            if not self._is_wanted:
                break
            self._bodies.append(body)
            with suppress(trio.RunFinishedError):
                self._token.run_sync_soon(self._wake, idempotent=True)
        if isinstance(bodies, Generator):
            bodies.close()

    def _wake(self) -> None:
        self._change.set()


_LOST = "another Router may run it now; this one stops it, and waits for the lease"
