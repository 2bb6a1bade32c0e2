"""Call the function of a processor, with its middleware: on Trio, on asyncio or in a thread."""

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import trio

from celery5.broker.calls.streams import RawEntry
from celery5.errors import CeleryError
from celery5.protocol.job.verdict import Outcome, Returned
from celery5.protocol.masking import MAX_ERROR_LENGTH, describe_error
from celery5.runners.in_thread import ThreadRunner
from celery5.runners.on_asyncio import AsyncioRunner
from celery5.runners.operations import OPERATION_SURROUND
from celery5.runners.running_job import RunningJob
from celery5.runners.surrounding import CALL_SURROUND, surround_call
from celery5.runners.user_errors import call_user_code, reraise_cancellation
from celery5.services.streams.owned_partition import OwnedPartition, RecordSequence
from celery5.services.streams.parking import ParkingSequence
from celery5.services.streams.thread_transports import AsyncioTransport, ThreadTransport
from celery5.streams.blocking_events import BlockingEvents, run_without_waiting
from celery5.streams.events import StreamEvents
from celery5.streams.feed import PORTION, FeedTransport, RecordFeed
from celery5.streams.middleware import MiddlewareCalls
from celery5.streams.processor import Processor

MAX_THREADS = 100_000
"""Threads of a processor: each sequence of records has one, so that this is no bound of ours."""


class ProcessorEnded(CeleryError):
    """A processor has ended by what is no Exception, such as SystemExit."""


class ProcessorCalls:
    """Calls the function of one processor, where that runs.

    Args:
        processor: The processor.
        asyncio_runner: Has the event loop of those that run on asyncio.
        checkpoint: Is called again and again while a function works in another thread; for tests in virtual time.
    """

    def __init__(
        self,
        *,
        processor: Processor[Any],
        asyncio_runner: AsyncioRunner,
        checkpoint: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._processor = processor
        self._codec = processor.stream.codec
        self._checkpoint = checkpoint
        self._operation_surround = OPERATION_SURROUND.get()
        self._asyncio_runner = asyncio_runner
        self._thread_runner = ThreadRunner(get_slots=lambda: MAX_THREADS)

    async def process(self, partition: OwnedPartition, records: RecordSequence | ParkingSequence) -> None:
        """Call the function until it ends. What it was at is `records.taken` then. Raises what it raises."""
        middleware = self._make_middleware(partition.number) if self._is_surrounded else None
        if self._processor.kind == "trio":
            # One at a time, so that what may be taken before a commit is there for the other sequences, too.
            portion = 1 if self._processor.concurrency > 1 else PORTION
            feed = self._make_feed(records, partition, trio.current_time, middleware, portion)
            try:
                error = await _run_on_trio(partial(self._process, feed, middleware))
            finally:
                records.take_over(*feed.unsettled)
        else:
            crossing = AsyncioTransport if self._processor.kind == "asyncio" else ThreadTransport
            transport = crossing(records, group=self._processor.name, checkpoint=self._checkpoint)
            now = trio.lowlevel.current_clock().current_time
            feed = self._make_feed(transport, partition, now, middleware, PORTION)
            try:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(transport.serve)
                    error = await self._execute(partial(self._process, feed, middleware))
                    nursery.cancel_scope.cancel()
            finally:
                transport.close()
                records.take_over(*feed.unsettled)
        if error is not None:
            raise error

    async def skip(self, partition: int, entries: Sequence[RawEntry], why: str) -> None:
        """Tell the middleware that records are given up. Raises what it raises."""
        if not self._processor.middleware:
            return
        async with trio.open_nursery() as nursery:
            if self._checkpoint is not None:
                nursery.start_soon(_repeat, self._checkpoint)
            error = await self._execute(partial(self._make_middleware(partition).skip, entries, why))
            nursery.cancel_scope.cancel()
        if error is not None:
            raise error

    def _make_feed(
        self,
        transport: FeedTransport,
        partition: OwnedPartition,
        now: Callable[[], float],
        middleware: MiddlewareCalls | None,
        portion: int,
    ) -> RecordFeed:
        return RecordFeed(
            transport,
            group=self._processor.name,
            partition=partition.number,
            grace_period=partition.grace_period,
            concurrency=self._processor.concurrency,
            now=now,
            portion=portion,
            middleware=middleware,
        )

    @property
    def _is_surrounded(self) -> bool:
        return bool(self._processor.middleware) or self._operation_surround is not None

    def _make_middleware(self, partition: int) -> MiddlewareCalls:
        processor = self._processor
        return MiddlewareCalls(
            processor.middleware,
            self._codec,
            group=processor.name,
            partition=partition,
            operating=self._operation_surround,
            stream=processor.stream.name,
        )

    async def _process(self, feed: RecordFeed, middleware: MiddlewareCalls | None) -> None:
        if middleware is None:
            await self._call(feed)
            return
        try:
            await self._call(feed)
            await middleware.leave()
        except Exception as error:
            await middleware.fail(error)
            raise
        except BaseException as error:
            middleware.end(error)
            raise

    async def _call(self, feed: RecordFeed) -> None:
        processor = self._processor
        function: Callable[[Any], Any] = processor.function
        try:
            if processor.kind == "thread":
                function(BlockingEvents(feed, self._codec, processor.into))
            else:
                await function(StreamEvents(feed, self._codec, processor.into))
        except Exception:
            raise
        except BaseException as error:
            if isinstance(error, trio.Cancelled) and processor.kind == "thread":
                raise  # it called `check_cancelled()`
            if type(error).__name__ == "CancelledError":
                raise  # asyncio is not imported for this; its runner knows whether the cancellation is ours
            reraise_cancellation(error)
            raise ProcessorEnded(describe_error(error, MAX_ERROR_LENGTH)) from error

    async def _execute(self, function: Callable[[], Awaitable[None]]) -> Exception | None:
        """Run a function where the processor runs; return what it raises."""
        errors: list[Exception] = []
        kind = self._processor.kind
        call = surround_call(
            (lambda: run_without_waiting(_await(function))) if kind == "thread" else function, kind
        )

        async def run() -> None:
            try:
                await call()
            except Exception as error:
                errors.append(error)

        def run_blocking() -> None:
            try:
                call()
            except Exception as error:
                errors.append(error)

        token = CALL_SURROUND.set(None)  # the runner would surround what never raises
        try:
            if kind == "trio":
                return await _run_on_trio(call)
            outcome = await self._execute_here(run, run_blocking)
        finally:
            CALL_SURROUND.reset(token)
        if errors:
            return errors[0]
        # What is no Exception, such as SystemExit, ends neither the loop nor the worker.
        return None if isinstance(outcome, Returned) else ProcessorEnded(repr(outcome)[:1000])

    async def _execute_here(
        self, run: Callable[[], Awaitable[None]], run_blocking: Callable[[], None]
    ) -> Outcome:
        if self._processor.kind == "asyncio":
            return await self._asyncio_runner.execute(run, (), {}, RunningJob())
        return await self._thread_runner.execute(run_blocking, (), {}, RunningJob())


async def _run_on_trio(function: Callable[[], Awaitable[None]]) -> Exception | None:
    """Run a function of a processor on Trio; return what it raises."""
    try:
        await call_user_code(function)
    except Exception as error:
        return error
    except BaseException as error:
        reraise_cancellation(error)
        ended = ProcessorEnded(describe_error(error, MAX_ERROR_LENGTH))
        ended.__cause__ = error
        return ended
    return None


async def _await(function: Callable[[], Awaitable[None]]) -> None:
    await function()


async def _repeat(function: Callable[[], Awaitable[None]]) -> None:
    while True:
        await function()
