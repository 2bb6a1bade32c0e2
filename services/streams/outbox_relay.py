"""Deliver what processors have produced: from the outbox of each partition to its streams and queues.

Outputs are committed to an outbox in the slot of the stream that was read. Its owner delivers them in order. A target
stream remembers the last that it has had of each outbox, and a job is published once for its id: so a delivery that is
made again, by this owner or the next, changes nothing.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

import trio

from celery5.broker.calls import streams as calls
from celery5.broker.driver import AsyncDriver
from celery5.broker.keys import StreamKeys
from celery5.errors import BrokerError, CeleryError, Corrupt, StreamFull
from celery5.logs.log import Log
from celery5.protocol.bounded_decoding import decode_msgpack
from celery5.protocol.job.job import Job
from celery5.services.process.broker_outages import SHORT_RETRY_INTERVAL
from celery5.streams.stream import EncodedRecord, Stream

RELAY_BATCH = 200
"""Outputs in one call, as long as the target takes this many at once."""
MAX_UNDELIVERED = 2_000
"""Outputs of one partition that may wait for their targets: then nothing more of it is processed."""


class OutboxRelay:
    """Delivers the outputs of one group, of the partitions that this worker owns."""

    def __init__(
        self,
        *,
        keys: StreamKeys,
        group: str,
        streams: Mapping[str, Stream[Any]],
        send_jobs: Callable[[Sequence[Job]], Awaitable[object]],
        redis: AsyncDriver,
        log: Log,
    ) -> None:
        self._keys = keys
        self._group = group
        self._streams = streams
        self._send_jobs = send_jobs
        self._redis = redis
        self._log = log
        # How many outputs at most are not delivered, by partition.
        self._pending: dict[int, int] = {}
        self._noted = trio.Event()
        self._delivered = trio.Event()
        self._failing: dict[int, str] = {}
        # How many records a stream takes in one call, for those that have refused more.
        self._portions: dict[str, int] = {}

    def note(self, partition: int, outputs: int = MAX_UNDELIVERED) -> None:
        """Deliver what is in the outbox of a partition: this many more `outputs`, which a new owner does not know."""
        self._pending[partition] = self._pending.get(partition, 0) + outputs
        self._noted.set()

    def is_behind(self, partition: int) -> bool:
        """Return whether too many outputs of a partition are not delivered."""
        return self._pending.get(partition, 0) > MAX_UNDELIVERED

    def forget(self, partition: int) -> None:
        """Leave an outbox to the next owner of its partition."""
        self._pending.pop(partition, None)
        self._wake_waiters()

    async def wait_delivered(self, partition: int) -> None:
        """Wait until nothing that was noted of a partition is left, or it has another owner."""
        while partition in self._pending:
            await self._delivered.wait()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Deliver until cancelled."""
        task_status.started()
        while True:
            await self._noted.wait()
            self._noted = trio.Event()
            failed = False
            for partition in sorted(self._pending):
                try:
                    await self._deliver(partition)
                    self._failing.pop(partition, None)
                except (BrokerError, CeleryError) as error:
                    failed = True
                    self._log_failure(partition, str(error))
            self._wake_waiters()
            if failed:
                await trio.sleep(SHORT_RETRY_INTERVAL)
                self._noted.set()

    def _wake_waiters(self) -> None:
        self._delivered.set()
        self._delivered = trio.Event()

    def _log_failure(self, partition: int, why: str) -> None:
        if partition not in self._failing:
            self._log.event(
                "processor:delivery-failed",
                "warning",
                stream=self._keys.stream,
                processor=self._group,
                partition=partition,
                why=why,
            )
        self._failing[partition] = why

    async def _deliver(self, partition: int) -> None:
        while partition in self._pending:
            noted = self._pending[partition]
            entries = await self._redis.perform(
                calls.read_outbox(self._keys, self._group, partition, count=RELAY_BATCH)
            )
            if not entries:
                # What was noted while the reply was on its way may not be in it.
                if self._pending.get(partition) == noted:
                    del self._pending[partition]
                continue
            outputs = [(entry[0], decode_output(entry[1][1])) for entry in entries]
            delivered: list[bytes] = []
            try:
                for target, portion in groupby(outputs, key=lambda output: output[1].get("stream")):
                    await self._deliver_portion(partition, target, list(portion), delivered)
            finally:
                if delivered:  # also those in front of one that the target does not take now
                    await self._remove(partition, delivered)

    async def _remove(self, partition: int, delivered: Sequence[bytes]) -> None:
        await self._redis.perform(calls.remove_from_outbox(self._keys, self._group, partition, delivered))
        if partition in self._pending:
            self._pending[partition] = max(1, self._pending[partition] - len(delivered))

    async def _deliver_portion(
        self,
        partition: int,
        target: str | None,
        outputs: Sequence[tuple[bytes, dict[str, Any]]],
        delivered: list[bytes],
    ) -> None:
        """Deliver outputs to one target in order; add the ids of those that it has taken to `delivered`."""
        if target is None:
            await self._send_jobs([Job.from_bytes(output["job"]) for _, output in outputs])
            delivered += [entry_id for entry_id, _ in outputs]
            return
        records = [
            EncodedRecord(output["key"], output["words"], None, entry_id.decode())
            for entry_id, output in outputs
        ]
        source = f"{self._keys.stream}:{self._group}:{partition}"
        while records:
            portion = records[: self._portions.get(target, RELAY_BATCH)]
            try:
                await self._streams[target].append(self._redis, portion, source=source)
            except StreamFull:
                # All or none are taken, so fewer may fit: the stream may keep fewer, or has read not all.
                self._portions[target] = max(1, len(portion) // 2)
                if len(portion) == 1:
                    raise
                continue
            if target in self._portions:
                self._portions[target] = min(RELAY_BATCH, 2 * len(portion))
            delivered += [record.origin.encode() for record in portion]
            records = records[len(portion) :]


def decode_output(raw: bytes) -> dict[str, Any]:
    """Return an output as `celery5.streams.events.Outputs` has made it. Raises Corrupt."""
    try:
        return decode_msgpack(raw, dict[str, Any])
    except ValueError as error:
        raise Corrupt(f"an output of a processor: {error}") from None
