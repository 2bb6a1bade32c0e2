"""Run the function of a processor on records, one after the other, and do what follows when it fails."""

import random
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import trio

from celery5.broker.calls.streams import RawEntry
from celery5.logs.log import Log
from celery5.protocol.counts import format_count
from celery5.protocol.masking import show_error
from celery5.protocol.names import get_class_names
from celery5.protocol.streams.failure import (
    MAX_ERROR_TEXT,
    Decision,
    ParkKey,
    QuarantinePartition,
    RetryRecord,
    SkipRecord,
    decide_failure,
    make_dead_record,
)
from celery5.runners.context import CURRENT_PARTITION
from celery5.runners.outcome import make_failure
from celery5.runners.user_errors import guard_scopes
from celery5.services.streams.owned_partition import OwnedPartition, PartitionHost, RecordSequence
from celery5.services.streams.parking import ParkedKeys, ParkingSequence
from celery5.services.streams.processor_calls import ProcessorCalls
from celery5.streams.processor import Processor

Records = RecordSequence | ParkingSequence
RESTART_DELAY = 1.0
"""Seconds until a function that has ended by itself, without taking a record, is called again."""


class SerialExecutor:
    """Runs the function of one processor.

    Args:
        processor: The processor.
        calls: Calls its function.
        host: The group that its partitions belong to.
        max_deliveries: How many deaths of workers a record may cause.
        log: Where failures are logged.
        random: Returns a number from 0 to 1, for the jitter of retries.
    """

    def __init__(
        self,
        *,
        processor: Processor[Any],
        calls: ProcessorCalls,
        host: PartitionHost,
        max_deliveries: int,
        log: Log,
        random: Callable[[], float] = random.random,
    ) -> None:
        self._processor = processor
        self._calls = calls
        self._host = host
        self._max_deliveries = max_deliveries
        self._log = log
        self._random = random
        self._unreadable: dict[int, str] = {}  # the record that was logged last, by partition
        self._names: dict[str, Any] = {"stream": processor.stream.name, "processor": processor.name}

    async def process(
        self, partition: OwnedPartition, sequence: RecordSequence, parked: ParkedKeys | None = None
    ) -> None:
        """Call the function of the processor, again and again, until the partition is given away.

        Args:
            partition: The partition.
            sequence: Those of its records that the function gets.
            parked: The parked keys that it knows, if the processor parks keys.
        """
        attempts: dict[bytes, int] = {}
        # It goes with the context into a thread or an asyncio task.
        CURRENT_PARTITION.set({"worker": self._log.worker, **self._names, "partition": partition.number})
        try:
            with sequence.scope:
                records = sequence if parked is None else self._make_parking(partition, sequence, parked)
                if partition.deaths >= self._max_deliveries:
                    await self._pass_poison(partition, sequence, records)
                while not records.is_stopping:
                    await self._call_function(partition, records, attempts)
        finally:
            sequence.ended.set()

    async def _call_function(
        self, partition: OwnedPartition, records: Records, attempts: dict[bytes, int]
    ) -> None:
        try:
            await self._calls.process(partition, records)
        except Exception as error:
            await self._handle_failure(partition, records, attempts, error)
            return
        has_taken = bool(records.taken)
        records.settle_taken()
        if not records.is_stopping:
            self._log.event(
                "processor:returned", "warning", partition=partition.number, hint=_RETURNED, **self._names
            )
            await _sleep_unless_stopping(records, 0.0 if has_taken else RESTART_DELAY)

    async def _handle_failure(
        self, partition: OwnedPartition, records: Records, attempts: dict[bytes, int], error: Exception
    ) -> None:
        if delay := await self._wait_for_reader(partition, records, error):
            records.give_back()
            await _sleep_unless_stopping(records, delay)
            return
        first = records.taken[0][0] if records.taken else b""
        attempt = attempts[first] = attempts.get(first, 0) + 1
        decision = decide_failure(
            self._processor.on_error,
            self._processor.then,
            attempt=attempt,
            kinds=get_class_names(error),
            random=self._random,
        )
        self._log.event(
            "record:failed",
            "warning",
            partition=partition.number,
            record=first.decode(),
            attempt=attempt,
            decision=type(decision).__name__,
            error=show_error(error),
            traceback=make_failure(error).traceback,
            **self._names,
        )
        if not records.taken and not isinstance(decision, QuarantinePartition):
            decision = RetryRecord(RESTART_DELAY)
        if isinstance(decision, RetryRecord):
            records.give_back()
            await _sleep_unless_stopping(records, decision.delay)
            return
        if isinstance(decision, ParkKey) and isinstance(records, ParkingSequence):
            if records.take_singly():
                return  # to find out which one of the batch it was
            decision = self._park(records, show_error(error))
        attempts.pop(first, None)
        if isinstance(decision, ParkKey):
            return
        if isinstance(decision, QuarantinePartition):
            records.give_back()
            await self._host.quarantine(partition, f"record {first.decode()}: {show_error(error)}"[:1000])
            return
        await self._give_up(partition, records, show_error(error), make_failure(error).traceback, attempt)

    async def _wait_for_reader(self, partition: OwnedPartition, records: Records, error: Exception) -> float:
        """Return for how many seconds to wait for a member of the group whose class can read what this one cannot.

        0.0 when the failure has another cause, or nobody else can read it.
        """
        unreadable = next((raw for raw in records.taken if not self._can_read(raw)), None)
        if unreadable is None:
            return 0.0
        number, record = partition.number, unreadable[0].decode()
        delay = await self._host.hand_over(partition, record)
        if delay and self._unreadable.get(number) != record:
            self._unreadable[number] = record
            self._log.event(
                "record:unreadable",
                "warning",
                partition=number,
                record=record,
                why=show_error(error),
                hint=_UNREADABLE,
                **self._names,
            )
        return delay

    def _can_read(self, raw: RawEntry) -> bool:
        try:
            with guard_scopes():
                self._processor.stream.codec.decode(raw[1])
        except Exception:  # a serializer of the user's own may raise anything
            return False
        return True

    def _park(self, records: ParkingSequence, why: str) -> Decision:
        """Park the key of a record; return what else becomes of it when that cannot be."""
        match records.park(why[:MAX_ERROR_TEXT]):
            case "parked":
                return ParkKey()
            case "no key":
                return SkipRecord()
            case "full":
                return QuarantinePartition()

    def _make_parking(
        self, partition: OwnedPartition, sequence: RecordSequence, parked: ParkedKeys
    ) -> ParkingSequence:
        return ParkingSequence(
            sequence=sequence,
            partition=partition,
            parked=parked,
            host=self._host,
            max_tries=self._max_deliveries,
            log=partial(self._log.event, **self._names),
        )

    async def _give_up(
        self, partition: OwnedPartition, records: Records, error: str, trace: str, attempts: int
    ) -> None:
        try:
            await self._calls.skip(partition.number, records.taken, error)
        except Exception as failure:  # the record is given up all the same
            self._log.event(
                "middleware:failed",
                "error",
                partition=partition.number,
                hook="on_skip",
                error=show_error(failure),
                traceback=make_failure(failure).traceback,
                **self._names,
            )
        records.add_dead_records(
            [
                make_dead_record(
                    *raw, partition=partition.number, error=error, traceback=trace, attempts=attempts
                )
                for raw in records.taken
            ]
        )

    async def _pass_poison(
        self, partition: OwnedPartition, sequence: RecordSequence, records: Records
    ) -> None:
        """Give up the first record, at which too many workers have died, or quarantine the partition."""
        found: deque[RawEntry] = deque()
        await sequence.fetch(found, 1)
        if not found:
            return
        if partition.deaths < self._max_deliveries:  # another sequence had that record
            sequence.give_back()
            return
        why = f"{format_count(partition.deaths, 'worker has', 'workers have')} died at this record"
        number, record = partition.number, found[0][0].decode()
        self._log.event(
            "record:poisonous",
            "error",
            partition=number,
            record=record,
            deaths=partition.deaths,
            **self._names,
        )
        if isinstance(records, ParkingSequence) and records.park(why) == "parked":
            return
        if self._processor.then == "ignore":
            await self._give_up(partition, sequence, why, "", partition.deaths)
        else:
            sequence.give_back()
            await self._host.quarantine(partition, f"record {record}: {why}")


async def _sleep_unless_stopping(records: Records, seconds: float) -> None:
    with trio.move_on_after(seconds):
        await records.stop_requested.wait()


_UNREADABLE = (
    "a member of the group with another version of its class gets it; if none comes, it counts as failed"
)
_RETURNED = "a processor is to go on until its events end: it was called again"
