"""Give records that one full stream does not keep to its archive.

A sending that finds a partition full of unread records moves the oldest ones to those that wait for the archive. Here a
worker claims them in portions, each of one partition, gives a portion to the archive, and only then removes it. One
worker at a time has the records of a partition. A portion that has failed, or whose worker has died, is claimed again
with the same records.
"""

import random
from functools import partial
from typing import Any

import trio

from celery5.broker.calls import streams as calls
from celery5.broker.driver import AsyncDriver
from celery5.broker.drivers.retrying import RetryingDriver
from celery5.errors import BrokerError
from celery5.logs.log import Log
from celery5.protocol.job.retry_policy import full_jitter
from celery5.protocol.masking import MAX_ERROR_LENGTH, describe_error
from celery5.protocol.streams.groups import ArchiveClaim, ArchivePortion
from celery5.runners.surrounding import surround_call
from celery5.runners.user_errors import call_in_thread, call_user_code, reraise_cancellation
from celery5.services.process.broker_outages import OutageLog, retry_until_available
from celery5.streams.archive import Archive, describe_archive, is_async_archive
from celery5.streams.encodings import learn_encodings
from celery5.streams.entry import StoredRecord, decode_as_class
from celery5.streams.stream import Stream

PORTION = 500
"""The most records of a portion."""
MAX_PORTION_BYTES = 4 * 1024 * 1024
"""The most bytes of a portion, unless it is one record."""
LEASE = 6.0
"""Seconds after which a portion of a worker that is silent is claimed by another; it is renewed three times in each."""
POLL_INTERVAL = 1.0
"""Seconds between two looks for records to archive."""
TIMEOUT = 30.0
"""Seconds that an archive may take for a portion."""
STOP_LIMIT = 5.0
"""Seconds that it may take when this stops."""
FIRST_DELAY = 0.5
"""The most seconds until a portion is tried again after its first failure."""
MAX_DELAY = 60.0
"""The most seconds until then after any failure."""


class StreamArchiver:
    """Archives the records of one stream."""

    def __init__(
        self, stream: Stream[Any], archive: Archive, redis: AsyncDriver, worker: str, log: Log
    ) -> None:
        self.stream = stream
        self.archived = self.failures = self.waiting = 0
        self._archive: Any = archive
        self._is_async = is_async_archive(archive)
        self._redis = redis
        self._worker = worker
        self._log = log
        self._outages = OutageLog(log, "archive:interrupted", "archive:resumed", stream=stream.name)
        self._settling = RetryingDriver(
            redis,
            limit=LEASE,
            record_error=self._outages.record_error,
            record_recovery=self._outages.record_recovery,
        )
        self._before = -1
        self._is_failing = False
        self._thread: trio.CapacityLimiter | None = None

    async def serve(self) -> None:
        """Archive until cancelled."""
        while True:
            claim = await retry_until_available(self._claim, self._outages, even_refused=True)
            self.waiting = claim.waiting
            if claim.portion is not None:
                fields = [words for _, words in claim.portion.entries]
                learn = partial(learn_encodings, self._redis, self.stream.keys, self.stream.codec, fields)
                await retry_until_available(learn, self._outages, even_refused=True)
                self._before = claim.portion.partition
                await self._finish(claim.portion)
            else:
                await trio.sleep(
                    POLL_INTERVAL if claim.retry_in is None else min(POLL_INTERVAL, claim.retry_in + 0.01)
                )

    async def _claim(self) -> ArchiveClaim:
        call = calls.claim_archived(
            self.stream.keys,
            self._worker,
            lease=LEASE,
            most=PORTION,
            most_bytes=MAX_PORTION_BYTES,
            before=self._before,
        )
        return await self._redis.perform(call)

    async def _finish(self, portion: ArchivePortion) -> None:
        """Archive a portion and settle it. When this stops, it has a moment to end: else it would be archived again."""
        limit, done = trio.CancelScope(shield=True), trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._archive_and_settle, portion, limit, done)
            try:
                await done.wait()
            finally:
                limit.deadline = trio.current_time() + STOP_LIMIT

    async def _archive_and_settle(
        self, portion: ArchivePortion, limit: trio.CancelScope, done: trio.Event
    ) -> None:
        with limit:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._renew, portion)
                error = await self._write(portion)
                nursery.cancel_scope.cancel()
            try:
                await self._settle(portion, error)
            except BrokerError as outage:
                # It stays claimed until its lease ends, and is archived again then: with the same records.
                self._log.event(
                    "archive:settle-failed", "warning", why=str(outage), **self._describe(portion)
                )
        done.set()

    async def _write(self, portion: ArchivePortion) -> Exception | None:
        """Give a portion to the archive; return what it raised."""
        stream = self.stream
        entries = [
            StoredRecord(portion.partition, record_id.decode(), decode_as_class(fields, stream.codec))
            for record_id, fields in portion.entries
        ]
        try:
            with trio.fail_after(TIMEOUT):
                if self._is_async:
                    await call_user_code(self._archive, stream.name, portion.partition, entries)
                else:
                    # One thread for each stream: an archive that hangs for ever blocks no other thread.
                    self._thread = self._thread or trio.CapacityLimiter(1)
                    write = surround_call(
                        partial(self._archive, stream.name, portion.partition, entries), "thread"
                    )
                    await call_in_thread(write, limiter=self._thread)
        except trio.TooSlowError:
            return TimeoutError(f"it did not end within {TIMEOUT:g} s")
        except BaseException as error:  # the user's code
            reraise_cancellation(error)
            return error if isinstance(error, Exception) else RuntimeError(describe_error(error))
        return None

    async def _renew(self, portion: ArchivePortion) -> None:
        """Keep the portion while the archive takes it."""
        while True:
            await trio.sleep(LEASE / 3)
            call = calls.settle_archived(self.stream.keys, self._worker, portion, "renewed", delay=LEASE)
            with self._outages.suppressing():
                await self._redis.perform(call)

    async def _settle(self, portion: ArchivePortion, error: Exception | None) -> None:
        """Remove a portion that is archived; let another one be tried later."""
        keys, count = self.stream.keys, len(portion.entries)
        if error is None:
            self.archived += count
            # Full memory of a moment is waited for: else the portion would be archived again.
            await self._settling.perform(calls.settle_archived(keys, self._worker, portion, "archived"))
            self._log.event("archive:written", "debug", **self._describe(portion))
            if self._is_failing:
                self._is_failing = False
                self._log.event("archive:recovered", stream=self.stream.name)
            return
        self.failures += 1
        delay = full_jitter(portion.failures, start=FIRST_DELAY, cap=MAX_DELAY, random=random.random)
        # Each partition fails by itself: one line is enough until the archive works again.
        self._log.event(
            "archive:failed",
            "debug" if self._is_failing else "error",
            why=describe_error(error, MAX_ERROR_LENGTH),
            failures=portion.failures + 1,
            again_in=round(delay, 3),
            hint=_FAILED,
            **self._describe(portion),
        )
        self._is_failing = True
        await self._redis.perform(calls.settle_archived(keys, self._worker, portion, "failed", delay=delay))

    def _describe(self, portion: ArchivePortion) -> dict[str, Any]:
        return {
            "stream": self.stream.name,
            "partition": portion.partition,
            "records": len(portion.entries),
            "last": portion.last,
            "where": describe_archive(self._archive),
        }


_FAILED = (
    "the records wait in Redis and are tried again; when as many wait as the stream keeps, more are refused"
)
