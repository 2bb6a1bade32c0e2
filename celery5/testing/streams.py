"""Test a processor of a stream without Redis and without waiting: feed it records, let it crash, look at what it did.

The driver runs the code that a worker runs: its partitions, its commits, its decisions on failures. Only what Redis
does is done in memory: the logs, the cursors, the keyed state.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import msgspec
import trio
from msgspec.structs import replace

from celery5.app import App
from celery5.broker.calls.streams import RawEntry
from celery5.errors import Misconfigured
from celery5.logs.log import Log
from celery5.protocol.counts import format_count
from celery5.protocol.job.job import Job
from celery5.protocol.streams.groups import Assignment, Commit, split_id
from celery5.protocol.streams.parking import ParkedAction, ParkedKey, ParkedKeysFound, read_parked_words
from celery5.protocol.streams.routing import find_partition
from celery5.runners.on_asyncio import AsyncioRunner
from celery5.services.streams.outbox_relay import decode_output
from celery5.services.streams.owned_partition import OwnedPartition, UncommittedPartitions, end_partitions
from celery5.services.streams.parking import ParkedKeys
from celery5.services.streams.processor_calls import ProcessorCalls
from celery5.services.streams.serial_executor import SerialExecutor
from celery5.streams.processor import Processor, ProcessorFunction
from celery5.streams.stream import RecordId, Stream
from celery5.streams.windows import OWN_STATE
from celery5.testing.recording import Recorded
from celery5.testing.virtual_loop import VirtualTimeLoop

R = TypeVar("R")
T = TypeVar("T")

START_TIME = 1_700_000_000.0
"""Where the virtual clock starts, in seconds since 1970."""
GRACE_PERIOD = 30.0
"""Seconds that a processor has to end, when it declares none itself."""


@dataclass(frozen=True)
class DeadRecord(Generic[R]):
    """A record that the processor has given up."""

    id: RecordId
    record: R
    error: str
    attempts: int


class ProcessorDriver(Generic[R]):
    """Runs one processor in a test: all of its partitions, in virtual time. For plain Python.

    Use it in a `with` block. Time stands still until `advance`; a `feed` runs the processor until it waits for more
    records, for the time, or for something else.

    Args:
        app: The application.
        processor: The function of the processor.
        stream: Its stream; needed when the function processes several.
        max_deliveries: How many crashes a record may cause; by default as the settings say.
        start_time: Where the virtual clock starts, in seconds since 1970.

    Raises:
        Misconfigured: The function is no processor of the application.
    """

    def __init__(
        self,
        app: App,
        processor: ProcessorFunction[R],
        *,
        stream: Stream[R] | None = None,
        max_deliveries: int | None = None,
        start_time: float = START_TIME,
    ) -> None:
        self._processor: Processor[R] = _find_processor(app, processor, stream)
        self._app = app
        self._recorded = Recorded(app)
        self._group = _VirtualGroup(
            self._processor,
            app.settings.max_deliveries if max_deliveries is None else max_deliveries,
            self._recorded,
        )
        self._loop = VirtualTimeLoop(self._group.run)
        self._start_time = start_time
        self._unkeyed = 0

    def __enter__(self) -> Self:
        self._loop.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.stop()

    # what happens

    def feed(self, *records: R, times: Sequence[int] | None = None, commit: bool = True) -> list[RecordId]:
        """Append records to the stream, and run the processor until it waits.

        Args:
            records: The records. Each goes to the partition of its key, as with `Stream.send`.
            times: The time of each record in ms since 1970; by default the virtual time.
            commit: Commit what is done then. If not, it is committed in its time, by `advance` or `commit`, or when
                enough is done; and a `crash` before that has it processed again.

        Returns:
            Where the records are.

        Raises:
            BadRecord: A value does not fit its field.
            ValueError: A time is earlier than that of the last record of the partition, or `times` has another length.
        """
        if times is not None and len(times) != len(records):
            raise ValueError(
                f"{format_count(len(records), 'record')} with {format_count(len(times), 'time')}: give one for each"
            )
        ids = [self._append(record, None if times is None else times[n]) for n, record in enumerate(records)]
        self._loop.call(self._group.supply)
        if commit:
            self.commit()
        return ids

    def _append(self, record: R, time: int | None) -> RecordId:
        stream = self._processor.stream
        encoded = stream.encode(record, time)
        if encoded.key is None:
            number, self._unkeyed = self._unkeyed % stream.partitions, self._unkeyed + 1
        else:
            number = find_partition(encoded.key, stream.partitions)
        words = [word if isinstance(word, bytes) else str(word).encode() for word in encoded.words]
        return self._group.logs[number].append(words, time, int(self.now * 1000))

    def commit(self) -> None:
        """Commit what is done by now."""
        self._loop.call(self._group.commit)

    def advance(self, seconds: float) -> None:
        """Let virtual time pass: timers, retries, batches and commits happen in their time."""
        self._loop.advance(seconds)

    def crash(self, *partitions: int) -> None:
        """Let the worker die and another one take over: what is not committed is processed again, as it was committed.

        The function is cancelled, while a real crash runs no `finally` block and no `except`.

        Args:
            partitions: Only these; all by default.
        """
        self._loop.call(partial(self._group.crash, self._check(partitions)))

    def rebalance(self, *partitions: int) -> None:
        """Let partitions move to a new owner: what is in hand is finished within the grace period and committed.

        Args:
            partitions: Only these; all by default.
        """
        self._loop.call(partial(self._group.rebalance, self._check(partitions)))

    def end_quarantine(self, *partitions: int) -> None:
        """End the quarantine of partitions; of all by default."""
        self._loop.call(partial(self._group.end_quarantine, self._check(partitions)))

    def _check(self, partitions: tuple[int, ...]) -> tuple[int, ...]:
        count = len(self._group.logs)
        for partition in partitions:
            if not 0 <= partition < count:
                raise ValueError(f"there is no partition {partition}: give 0 to {count - 1}")
        return partitions or tuple(range(count))

    # what is there then

    @property
    def now(self) -> float:
        """The virtual time in seconds since 1970."""
        return self._start_time + self._loop.now

    def sent(self, stream: Stream[T]) -> list[T]:
        """Return the records that were sent to a stream, in the order of their commits."""
        decode = stream.codec.decode
        return [decode(words) for name, words in self._group.sent if name == stream.name]

    @property
    def jobs(self) -> Recorded:
        """The jobs and events that were sent and committed; `jobs.jobs_of(task)`, `jobs.run()` and so on."""
        return self._recorded

    @property
    def state(self) -> dict[str, Any]:
        """The keyed state that is committed, without open windows. Values are what their JSON says."""
        return {
            name: msgspec.json.decode(value)
            for name, value in sorted(self._group.state.items())
            if not name.startswith(OWN_STATE)
        }

    @property
    def committed(self) -> list[R]:
        """The records that are done, and committed, without dead ones; in the order of feeding in each partition."""
        return self._records(True)

    @property
    def uncommitted(self) -> list[R]:
        """The records that are not committed: they wait, or a crash would have them processed again."""
        return self._records(False)

    def _records(self, is_committed: bool) -> list[R]:
        decode = self._processor.stream.codec.decode
        dead = {dead.id for dead in self._group.dead}
        return [
            decode(entry[1])
            for log in self._group.logs
            for entry in log.entries
            if log.is_committed(entry) == is_committed and RecordId(log.number, entry[0].decode()) not in dead
        ]

    @property
    def dead(self) -> list[DeadRecord[R]]:
        """The records that the processor has given up."""
        decode = self._processor.stream.codec.decode
        return [
            DeadRecord(dead.id, decode(dead.fields), dead.error, dead.attempts) for dead in self._group.dead
        ]

    @property
    def parked(self) -> dict[str, list[R]]:
        """The records that are parked, by key, in their order."""
        decode = self._processor.stream.codec.decode
        return {
            key.decode(errors="replace"): [decode(read_parked_words(words)[1]) for _, words in entries]
            for key, entries in sorted(self._group.parked.items())
        }

    def release(self, *keys: str, discard: bool = False) -> None:
        """Have parked keys processed, or made dead records; all by default. Then commit that."""
        action: ParkedAction = "discard" if discard else "release"
        self._loop.call(partial(self._group.set_parked, action, [key.encode() for key in keys]))
        self.commit()

    @property
    def quarantined(self) -> dict[int, str]:
        """The partitions that are quarantined, and why."""
        return {log.number: log.why for log in self._group.logs if log.condition}


@dataclass(frozen=True)
class _Dead:
    id: RecordId
    fields: Sequence[bytes]
    error: str
    attempts: int


@dataclass
class _PartitionLog:
    """What Redis has of one partition: its records, and how far the group is."""

    number: int
    entries: list[RawEntry] = field(default_factory=list)
    cursor: str = "0-0"
    ahead: frozenset[str] = frozenset()
    epoch: int = 0
    deaths: int = 0
    suspect: str = ""
    condition: str = ""
    why: str = ""

    def append(self, words: Sequence[bytes], time: int | None, now: int) -> RecordId:
        last = split_id(self.entries[-1][0].decode())[0] if self.entries else 0
        if time is not None and time < last:
            raise ValueError(f"time {time} is before {last}: times in a partition never decrease")
        record_id = f"{max(last, now if time is None else time)}-{len(self.entries) + 1}"
        self.entries.append((record_id.encode(), words))
        return RecordId(self.number, record_id)

    def is_committed(self, entry: RawEntry) -> bool:
        record_id = entry[0].decode()
        return split_id(record_id) <= split_id(self.cursor) or record_id in self.ahead

    @property
    def has_unread(self) -> bool:
        return len(self.entries) > split_id(self.cursor)[1]

    def read(self, position: str, count: int) -> Sequence[RawEntry]:
        first = split_id(position)[1]
        return self.entries[first : first + count]

    def assign(self) -> Assignment:
        """Return the partition as a new owner gets it."""
        self.epoch += 1
        return Assignment(
            partition=self.number,
            is_owned=True,
            epoch=self.epoch,
            cursor=self.cursor,
            deaths=self.deaths,
            condition=self.condition,
            ahead=tuple(sorted(self.ahead, key=split_id)),
            suspect=self.suspect,
        )

    def commit(self, commit: Commit) -> None:
        if commit.new_cursor != self.cursor and not commit.keeps_deaths:
            self.deaths = 0
        self.cursor, self.ahead = commit.new_cursor, frozenset(commit.ahead)


class _VirtualGroup:
    """The only member of a group: the host of all partitions, with what Redis would have of them."""

    def __init__(self, processor: Processor[Any], max_deliveries: int, recorded: Recorded) -> None:
        self._processor = processor
        self._grace_period = processor.get_grace_period(GRACE_PERIOD)
        self._log = Log(worker="test", app=processor.stream.app.name)
        self._asyncio_runner = AsyncioRunner()
        self._executor = SerialExecutor(
            processor=processor,
            calls=ProcessorCalls(
                processor=processor,
                asyncio_runner=self._asyncio_runner,
                checkpoint=trio.lowlevel.checkpoint,
            ),
            host=self,
            max_deliveries=max_deliveries,
            log=self._log,
            random=Random(0).random,
        )
        self._uncommitted = UncommittedPartitions()
        self._committing = trio.Lock()
        self.logs = [_PartitionLog(number) for number in range(processor.stream.partitions)]
        self.sent: list[tuple[str, Sequence[bytes]]] = []
        self.state: dict[str, bytes] = {}
        self.dead: list[_Dead] = []
        self.parked: dict[bytes, list[RawEntry]] = {}
        self.about_parked: dict[bytes, ParkedKey] = {}
        self._parked_entries = 0
        self._parks_keys = processor.then == "park-key"
        self._parked_by_partition: dict[int, ParkedKeys] = {}
        self._recorded = recorded
        self._partitions: dict[int, OwnedPartition] = {}
        self._nursery: trio.Nursery | None = None
        self._wanted = trio.Event()

    async def run(self, *, task_status: trio.TaskStatus[None]) -> None:
        """Own all partitions until cancelled."""
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                nursery.start_soon(self._supply_forever)
                nursery.start_soon(self._commit_forever)
                await nursery.start(self._asyncio_runner.run)
                for log in self.logs:
                    self._begin(log)
                task_status.started()
                await trio.sleep_forever()
        finally:
            self._log.finish()

    def _begin(self, log: _PartitionLog) -> None:
        parked = on_commit = None
        if self._parks_keys:
            parked = ParkedKeys(log.number, self._find_parked(), len(self.logs))
            self._parked_by_partition[log.number], on_commit = parked, parked.note_commit
        partition = OwnedPartition(
            log.assign(),
            self._processor,
            self,
            self._uncommitted,
            grace_period=self._grace_period,
            on_commit=on_commit,
        )
        self._partitions[log.number] = partition
        assert self._nursery is not None
        for sequence in partition.sequences:
            if partition.condition:
                sequence.ended.set()
            else:
                self._nursery.start_soon(self._executor.process, partition, sequence, parked)
        if partition.needs_trial:
            partition.begin_trial()
        self.want_records()

    async def supply(self) -> None:
        """Give partitions the records that they want."""
        for number, partition in self._partitions.items():
            if partition.wants_records:
                partition.feed(self.logs[number].read(partition.position, partition.prefetch))

    async def _supply_forever(self) -> None:
        while True:
            await self._wanted.wait()
            self._wanted = trio.Event()
            await self.supply()

    async def crash(self, numbers: Sequence[int]) -> None:
        """Let partitions be lost and taken over."""
        for number in numbers:
            log = self.logs[number]
            self._partitions[number].lose()
            await end_partitions([self._partitions[number]], 0)
            if log.has_unread:
                log.deaths += 1
                log.suspect = log.entries[-1][0].decode()
            self._begin(log)

    async def rebalance(self, numbers: Sequence[int]) -> None:
        """Let partitions be given away and taken over."""
        await end_partitions([self._partitions[number] for number in numbers], self._grace_period)
        await self.commit()
        for number in numbers:
            self._begin(self.logs[number])

    async def end_quarantine(self, numbers: Sequence[int]) -> None:
        """Begin quarantined partitions again."""
        for log in [self.logs[number] for number in numbers if self.logs[number].condition]:
            log.condition = log.why = ""
            self._partitions[log.number].lose()
            self._begin(log)

    # the host of partitions

    def want_records(self) -> None:
        """Give a partition more records."""
        self._wanted.set()

    async def read_parked(self, key: bytes, after: str, count: int) -> list[RawEntry]:
        """Return entries of the log of a parked key, behind `after`."""
        await trio.lowlevel.checkpoint()
        return [entry for entry in self.parked.get(key, ()) if int(entry[0]) > int(after or 0)][:count]

    async def set_parked(self, action: ParkedAction, keys: Sequence[bytes]) -> None:
        """Have parked keys, or all, released or discarded."""
        for parked in self._parked_by_partition.values():
            parked.begin_update()
        for key in keys or list(self.about_parked):
            if key in self.about_parked:
                self.about_parked[key] = replace(self.about_parked[key], action=action, tries=0)
        for number, parked in self._parked_by_partition.items():
            parked.update(self._find_parked(), len(self.logs))
            self._partitions[number].wake()

    def _find_parked(self) -> ParkedKeysFound:
        return ParkedKeysFound(self.about_parked, sum(map(len, self.parked.values())))

    def _change_parked(self, commit: Commit) -> None:
        for change in commit.parked:
            known = self.about_parked.get(change.key)
            if change.about is None:
                if known is not None:
                    self.about_parked[change.key] = replace(known, tries=known.tries + 1)
            elif bool(change.words) != (known is not None):
                self.about_parked[change.key] = change.about
            if change.words:
                self._parked_entries += 1
                words = [word if isinstance(word, bytes) else word.encode() for word in change.words]
                self.parked.setdefault(change.key, []).append((str(self._parked_entries).encode(), words))
        for done in commit.released:
            left = [entry for entry in self.parked[done.key] if entry[0].decode() != done.entry]
            self.parked[done.key] = left
            self.about_parked[done.key] = replace(self.about_parked[done.key], tries=0)
            if not left:
                del self.parked[done.key], self.about_parked[done.key]

    async def read_states(self, names: Sequence[str]) -> list[bytes | None]:
        """Read values of the keyed state."""
        await trio.lowlevel.checkpoint()
        return [self.state.get(name) for name in names]

    async def hand_over(self, partition: OwnedPartition, record: str) -> float:
        """Return 0.0: there is no other member."""
        await trio.lowlevel.checkpoint()
        return 0.0

    async def quarantine(self, partition: OwnedPartition, why: str) -> None:
        """Stop the partition until `end_quarantine`."""
        partition.stop()
        await self.commit()
        log = self.logs[partition.number]
        log.condition, log.why = "quarantined", why

    async def _commit_forever(self) -> None:
        while True:
            await self._uncommitted.wait(self._processor.commit_within)
            await self.commit()

    async def commit(self) -> None:
        """Commit all that is done by now."""
        async with self._committing:
            for partitions in self._uncommitted.take():
                commits = [partition.begin_commit() for partition in partitions]
                self._commit_portion(partitions, commits)

    def _commit_portion(self, partitions: Sequence[OwnedPartition], commits: Sequence[Commit]) -> None:
        for partition, commit in sorted(
            zip(partitions, commits, strict=True), key=lambda pair: pair[0].number
        ):
            self.logs[partition.number].commit(commit)
            for name, value in commit.state.items():
                if value is None:
                    self.state.pop(name, None)
                else:
                    self.state[name] = value
            for dead in commit.dead:
                self._add_dead_record(partition.number, dead)
            self._change_parked(commit)
            for output in commit.outputs:
                self._deliver(decode_output(output))
            partition.end_commit(commit)

    def _add_dead_record(self, partition: int, words: Sequence[str | bytes]) -> None:
        fields: dict[Any, Any] = dict(zip(words[::2], words[1::2], strict=True))
        self.dead.append(
            _Dead(
                RecordId(partition, fields["id"].decode()),
                msgspec.msgpack.decode(fields["fields"]),
                fields["error"],
                int(fields["attempts"]),
            )
        )

    def _deliver(self, output: dict[str, Any]) -> None:
        if "job" in output:
            self._recorded.record([Job.from_bytes(output["job"])])
            return
        words = [word if isinstance(word, bytes) else word.encode() for word in output["words"]]
        self.sent.append((output["stream"], words))


def _find_processor(app: App, function: Any, stream: Stream[Any] | None) -> Processor[Any]:
    found = [
        processor
        for processor in app.streams.processors
        if processor.function is function and stream in (None, processor.stream)
    ]
    if len(found) == 1:
        return found[0]
    name = getattr(function, "__name__", repr(function))
    if not found:
        raise Misconfigured(f"{name} is no processor of {app.name}: declare it with @app.processor(...)")
    raise Misconfigured(f"{name} processes several streams: give stream=...")
