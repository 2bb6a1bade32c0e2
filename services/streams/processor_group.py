"""Run the processors of this worker: each is a member of its group, reads the partitions that it owns, and commits.

There is no leader and no lock. A member renews its membership, which assigns the partitions as well; one that
must move is given back by its owner first, unless that is gone. What an owner commits is fenced by the epoch of the
partition: an owner that was frozen, and replaced, commits nothing.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, TypeVar

import trio

from celery5.broker.call import Call
from celery5.broker.calls import streams as calls
from celery5.broker.calls.streams import RawEntry
from celery5.broker.driver import AsyncDriver
from celery5.broker.drivers.parked import ParkedRedis
from celery5.errors import BrokerError, BrokerReplied, BrokerUnavailable
from celery5.logs.log import Log
from celery5.protocol.job.signature_digests import digest_class
from celery5.protocol.streams.groups import (
    Assignment,
    Commit,
    RenewedMembership,
    StreamMap,
    get_leaving_name,
    split_gap,
    split_id,
)
from celery5.protocol.streams.parking import ParkedKeysFound, read_parked_words
from celery5.runners.operations import operating
from celery5.services.process.broker_outages import SHORT_RETRY_INTERVAL, OutageLog, retry_until_available
from celery5.services.streams.group_member import GroupMember
from celery5.services.streams.outbox_relay import OutboxRelay
from celery5.services.streams.owned_partition import OwnedPartition, UncommittedPartitions, end_partitions
from celery5.services.streams.parking import ParkedKeys
from celery5.services.streams.processor_calls import ProcessorCalls
from celery5.services.streams.serial_executor import SerialExecutor
from celery5.streams.archive import describe_archive
from celery5.streams.encodings import learn_encodings
from celery5.streams.processor import Processor

T = TypeVar("T")

RENEWALS_PER_LEASE = 3
"""Renewals of the membership in one lease."""
LAPSE_DELAY = 0.02
"""Seconds after the end of another member's lease at which a renewal finds it dead."""
MIN_INTERVAL = 0.05
"""The least seconds between two renewals that nobody asked for."""
TRIAL_LIMIT = 30.0
"""Seconds for which other suspects wait for the trial of a slow one."""
READ_BLOCK = 5.0
"""Seconds for which a read waits for records."""
FINISH_LIMIT = 5.0
"""Seconds for the last commit and for leaving, when the worker stops."""
CLASS_TTL = 86_400.0
"""Seconds for which it is known which class of records a member has; it is announced again long before."""
DELIVERY_LIMIT = 2.0
"""Seconds of these for the delivery of the last outputs."""


class ProcessorGroup:
    """One processor in this worker. It is a service, and the host of the partitions that it owns."""

    def __init__(
        self,
        *,
        processor: Processor[Any],
        member: GroupMember,
        redis: AsyncDriver,
        reader: ParkedRedis,
        relay: OutboxRelay,
        processor_calls: ProcessorCalls,
        trials: trio.Lock,
        log: Log,
    ) -> None:
        self._processor = processor
        self._keys = processor.stream.keys
        self._group = processor.name
        self._member = member
        self._redis = redis
        self._reader = reader
        self._relay = relay
        self._trials = trials
        self._log = log
        self._names: dict[str, Any] = {"stream": processor.stream.name, "processor": processor.name}
        self._outages = OutageLog(log, "processor:interrupted", "processor:resumed", **self._names)
        self._grace_period = processor.get_grace_period(member.grace_period)
        self._uncommitted = UncommittedPartitions()
        self._committing = trio.Lock()
        self._executor = SerialExecutor(
            processor=processor,
            calls=processor_calls,
            host=self,
            max_deliveries=member.max_deliveries,
            log=log,
        )
        self._parks_keys = processor.then == "park-key"
        self._parked = ParkedKeysFound({}, 0)
        self._parked_by_partition: dict[int, ParkedKeys] = {}
        self._partitions: dict[int, OwnedPartition] = {}
        self._leaving: set[OwnedPartition] = set()
        self._nursery: trio.Nursery | None = None
        self._renewal_requested = trio.Event()
        self._renewing = trio.CancelScope()
        self._renewals_ended = trio.Event()
        self._is_joining = True
        self._announce_at = 0.0
        # The cursor of each partition that Redis had when the last renewal was sent.
        self._committed_cursors: dict[int, str] = {}
        self._digest = digest_class(processor.stream.codec.kind)
        self._is_past_border = self._is_stopping = self._is_handing_over = False
        self._map = StreamMap(processor.stream.partitions, 0)
        self._wanted = trio.Event()
        self._read_scope: trio.CancelScope | None = None

    @property
    def channel(self) -> str:
        """The channel on which members hear that something has changed."""
        return self._keys.changes(self._group)

    def renew_now(self) -> None:
        """Renew the membership soon: something has changed."""
        self._renewal_requested.set()

    # the service

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Be a member until cancelled; then finish what is in hand within the grace period, commit and leave."""
        self._is_joining, self._is_stopping, self._is_handing_over = True, False, False
        self._renewing, self._renewals_ended = trio.CancelScope(), trio.Event()
        scope, working = trio.CancelScope(shield=True), trio.Event()
        async with trio.open_nursery() as nursery:
            # Not by `nursery.start`: when that is cancelled, it waits for the end of what shields itself.
            nursery.start_soon(self._work, scope, working)
            try:
                await working.wait()
                task_status.started()
                await trio.sleep_forever()
            finally:
                with trio.CancelScope(shield=True):
                    with trio.move_on_after(FINISH_LIMIT):
                        await working.wait()
                    if working.is_set():
                        await self._finish()
                    scope.cancel()

    async def _work(self, scope: trio.CancelScope, working: trio.Event) -> None:
        """Run all loops until `scope` is cancelled; set `working` when they run."""
        try:
            with scope:
                await self._run_loops(working)
                raise RuntimeError("user code has cancelled the tasks of a processor")
        except BaseException as error:
            self._member.incarnation_end.note(error)
            raise

    async def _run_loops(self, working: trio.Event) -> None:
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            await nursery.start(self._reader.run)
            nursery.start_soon(self._renew_forever)
            nursery.start_soon(self._read_forever)
            nursery.start_soon(self._commit_forever)
            nursery.start_soon(self._relay.run)
            working.set()

    async def _finish(self) -> None:
        self._is_stopping = True
        owned = list(self._partitions.values())
        absence = self._processor.absence if self._member.is_named else 0.0
        # What may have ended this worker is given back as a dead worker's: the death is counted.
        if not absence and not self._member.incarnation_end.has_failed:
            await self._hand_over([partition for partition in owned if partition not in self._leaving])
        await end_partitions(owned, self._grace_period)
        with trio.move_on_after(FINISH_LIMIT):
            try:
                await self._commit()
                await self._deliver_outputs(owned)
                # Not before: while something is in hand, its lease must not end.
                self._renewing.cancel()
                await self._renewals_ended.wait()
                for name in (self._member.name, get_leaving_name(self._member.name)):
                    call = calls.leave_group(
                        *(self._keys, self._group),
                        member=name,
                        incarnation=self._member.incarnation,
                        absence=absence if name == self._member.name else 0.0,
                        has_died=self._member.incarnation_end.has_failed,
                    )
                    await self._redis.perform(call)
            except BrokerError as error:
                self._log.event("processor:leave-failed", "warning", why=str(error), **self._names)
        self._partitions.clear()
        self._leaving.clear()

    async def _hand_over(self, partitions: Sequence[OwnedPartition]) -> None:
        """Have others continue each partition as soon as what is in hand of it has ended."""
        self._is_handing_over = True
        self.renew_now()
        with trio.move_on_after(self._grace_period + FINISH_LIMIT):
            async with trio.open_nursery() as nursery:
                for partition in partitions:
                    nursery.start_soon(self._give_away, partition)

    async def _deliver_outputs(self, partitions: Sequence[OwnedPartition]) -> None:
        """Deliver what was committed last, if the targets take it: there may be no next owner for long."""
        with trio.move_on_after(DELIVERY_LIMIT):
            for partition in partitions:
                await self._relay.wait_delivered(partition.number)

    # membership

    async def _renew_forever(self) -> None:
        try:
            with self._renewing:
                await self._renew_until_replaced()
        finally:
            self._renewals_ended.set()

    async def _renew_until_replaced(self) -> None:
        while True:
            membership = await retry_until_available(
                self._renew_membership, self._outages, SHORT_RETRY_INTERVAL
            )
            if membership is None:
                self._log.event(
                    "processor:replaced", "error", member=self._member.name, hint=_REPLACED, **self._names
                )
                for partition in list(self._partitions.values()):
                    self._lose(partition)
                return
            self._apply(membership)
            await self._release_unknown(membership)
            with trio.move_on_after(self._get_interval(membership)):
                await self._renewal_requested.wait()
            self._renewal_requested = trio.Event()

    async def _release_unknown(self, membership: RenewedMembership) -> None:
        """Give back what is owned without being known here, so that those who wait for it get it.

        The reply by which this member became the owner was lost, and the plan has changed since. What is known here
        is given away with the work that is in hand.
        """
        unknown = [number for number in membership.claimed if number not in self._partitions]
        if unknown:
            await self._release(unknown)

    def _get_interval(self, membership: RenewedMembership) -> float:
        """Return the seconds until the next renewal: at once after another member's lease, if that ends first."""
        usual = self._member.lease / RENEWALS_PER_LEASE
        if membership.lapse_in is None:
            return usual
        return min(usual, max(membership.lapse_in + LAPSE_DELAY, MIN_INTERVAL))

    async def _renew_membership(self) -> RenewedMembership | None:
        is_past_border = self._is_past_border
        call = calls.renew_membership(
            *(self._keys, self._group),
            member=self._member.name,
            incarnation=self._member.incarnation,
            lease=self._member.lease,
            is_joining=self._is_joining,
            start=self._processor.first_id,
            partitions=self._processor.stream.partitions,
            is_past_border=is_past_border,
            is_leaving=self._is_handing_over,
        )
        self._committed_cursors = {number: partition.cursor for number, partition in self._partitions.items()}
        membership = await self._redis.perform(call)
        if self._parks_keys:
            # After the renewal: what is parked in front of a border is known before it is passed.
            for parked in self._parked_by_partition.values():
                parked.begin_update()
            self._parked = await self._redis.perform(calls.list_parked_keys(self._keys, self._group))
        if self._is_joining or trio.current_time() >= self._announce_at:
            await self._announce_class()
        self._is_joining = False
        if is_past_border:
            self._is_past_border = False
        return membership

    async def _announce_class(self) -> None:
        """Announce which class of records this member has."""
        await self._redis.perform(
            calls.announce_class(
                self._keys, self._group, self._member.name, digest=self._digest, ttl=CLASS_TTL
            )
        )
        self._announce_at = trio.current_time() + CLASS_TTL / 4

    def _apply(self, membership: RenewedMembership) -> None:
        """Begin and end partitions as they are assigned."""
        if self._is_stopping or self._nursery is None:
            return
        self._map = membership.map
        for number, parked in self._parked_by_partition.items():
            parked.update(self._parked, self._map.partitions)
            if number in self._partitions:
                self._partitions[number].wake()
        assigned = {assignment.partition: assignment for assignment in membership.assigned}
        for number, partition in list(self._partitions.items()):
            assignment = assigned.get(number)
            if assignment is not None and (
                assignment.epoch != partition.epoch
                or not assignment.is_owned
                or self._has_lost_commits(assignment)
            ):
                self._lose(partition)
            elif assignment is None or assignment.condition != partition.condition:
                # Under another condition it is given away, too: a commit may be under way, so that it begins again
                # in another epoch.
                if partition not in self._leaving:
                    self._leaving.add(partition)
                    self._nursery.start_soon(self._give_away, partition)
            else:
                partition.update(assignment)
        for number, assignment in assigned.items():
            if assignment.is_owned and number not in self._partitions:
                self._begin(assignment)

    def _has_lost_commits(self, assignment: Assignment) -> bool:
        """Return whether Redis has lost commits of a partition, as at a failover.

        The next commit would be refused. But there is none until a record comes that is not known here.
        """
        committed = self._committed_cursors.get(assignment.partition)
        return committed is not None and split_id(assignment.cursor) < split_id(committed)

    def _begin(self, assignment: Assignment) -> None:
        parked = self._make_parked_keys(assignment.partition)
        on_commit = None if parked is None else parked.note_commit
        partition = OwnedPartition(
            assignment,
            self._processor,
            self,
            self._uncommitted,
            grace_period=self._grace_period,
            on_commit=on_commit,
        )
        self._partitions[partition.number] = partition
        self._relay.note(partition.number)
        number, cursor, epoch = partition.number, partition.cursor, partition.epoch
        self._log.event(
            "partition:acquired", "debug", partition=number, cursor=cursor, epoch=epoch, **self._names
        )
        assert self._nursery is not None
        for sequence in partition.sequences:
            if partition.condition:
                sequence.ended.set()
            else:
                self._nursery.start_soon(self._executor.process, partition, sequence, parked)
        if partition.needs_trial and not partition.condition:
            self._nursery.start_soon(self._try_suspect, partition)
        self.want_records()

    def _make_parked_keys(self, number: int) -> ParkedKeys | None:
        if not self._parks_keys:
            return None
        parked = self._parked_by_partition[number] = ParkedKeys(number, self._parked, self._map.partitions)
        return parked

    async def _try_suspect(self, partition: OwnedPartition) -> None:
        """Let the record at which owners have died be processed while no other suspect of this worker is.

        A worker that dies has owned many partitions, of which one has killed it, or it has died of a job. From the
        third death on only that counts where the first record was on trial, and a job that may kill does not run then.
        """
        await partition.wait_fed()
        async with self._trials, self._member.suspect_turn.held(TRIAL_LIMIT):
            call = calls.begin_trial(
                *(self._keys, self._group, partition.number),
                incarnation=self._member.incarnation,
                epoch=partition.epoch,
            )
            await self._perform(call)
            partition.begin_trial()
            with trio.move_on_after(TRIAL_LIMIT):
                await partition.wait_trial_ended()

    def _lose(self, partition: OwnedPartition) -> None:
        """Stop at once, and commit nothing more: the partition is owned by another, or begins again."""
        if self._partitions.get(partition.number) is partition:
            del self._partitions[partition.number]
            self._parked_by_partition.pop(partition.number, None)
        self._relay.forget(partition.number)
        partition.lose()
        self._log.event("partition:lost", "warning", partition=partition.number, **self._names)

    async def _give_away(self, partition: OwnedPartition) -> None:
        """Finish what is in hand within the grace period, commit, and give the partition back."""
        await end_partitions([partition], self._grace_period)
        await self._commit()
        self._leaving.discard(partition)
        if self._partitions.get(partition.number) is not partition:
            return  # it was lost meanwhile, and has perhaps begun again
        if self._is_stopping:
            await self._deliver_outputs([partition])
        del self._partitions[partition.number]
        self._parked_by_partition.pop(partition.number, None)
        self._relay.forget(partition.number)
        await self._release([partition.number])
        self.renew_now()

    async def _release(self, numbers: Sequence[int]) -> None:
        """Give partitions back, and stay a member."""
        call = calls.release_partitions(
            *(self._keys, self._group),
            member=self._member.name,
            incarnation=self._member.incarnation,
            partitions=numbers,
        )
        await self._perform(call)
        for number in numbers:
            self._log.event("partition:yielded", "debug", partition=number, **self._names)

    # reading

    def want_records(self) -> None:
        """Read again: a partition wants more records than the read that waits is for."""
        self._wanted.set()
        if self._read_scope is not None:
            self._read_scope.cancel()

    async def _read_forever(self) -> None:
        while True:
            self._wanted = trio.Event()
            positions = {
                number: partition.position
                for number, partition in self._partitions.items()
                if partition.wants_records
            }
            if not positions:
                await self._wanted.wait()
                continue
            count = max(self._partitions[number].prefetch for number in positions)
            found = await self._read(calls.read(self._keys, positions, count=count, block=READ_BLOCK))
            for entries in found.values():
                await self._learn_encodings(entries)
            for number, entries in found.items():
                partition = self._partitions.get(number)
                if partition is not None and partition.position == positions[number]:
                    self._feed(partition, entries)

    async def _learn_encodings(self, entries: Sequence[RawEntry]) -> None:
        """Know what the stream has declared before an entry is decoded: a producer may have another codec by now."""
        codec, fields = self._processor.stream.codec, [words for _, words in entries]
        learn = partial(learn_encodings, self._redis, self._keys, codec, fields)
        await retry_until_available(learn, self._outages, SHORT_RETRY_INTERVAL)

    async def _perform(self, call: Call[T]) -> T:
        """Perform a call as soon as Redis is available."""
        attempt = partial(self._redis.perform, call)
        return await retry_until_available(attempt, self._outages, SHORT_RETRY_INTERVAL)

    async def _read(self, call: Call[dict[int, list[Any]]]) -> dict[int, list[Any]]:
        """Return what is read, nothing when the read was ended for another one."""
        found: dict[int, list[Any]] = {}
        try:
            with trio.CancelScope() as scope:
                self._read_scope = scope
                found = await self._reader.perform(call)
        except (BrokerUnavailable, BrokerReplied) as error:
            self._outages.record_error(error)
            await trio.sleep(SHORT_RETRY_INTERVAL)
        finally:
            self._read_scope = None
        return found

    def _feed(self, partition: OwnedPartition, entries: Sequence[RawEntry]) -> None:
        before = split_id(partition.position)[1]
        if partition.feed(entries) and self._nursery is not None:
            after = split_id(entries[0][0].decode())[1]
            self._nursery.start_soon(self._log_missing, partition.number, before, after)

    async def _log_missing(self, partition: int, before: int, after: int) -> None:
        """Say that records between two numbers are not there any more, and whether they were archived."""
        call = calls.get_archived_run(self._keys, partition)
        run = await self._perform(call)
        lost, archived = split_gap(before, after, run)
        if archived:
            self._log.event(
                "partition:records-archived",
                "error",
                partition=partition,
                records=archived,
                where=describe_archive(self._processor.stream.keep.archive),
                hint=_ARCHIVED,
                **self._names,
            )
        if lost:
            self._log.event(
                "partition:records-lost",
                "error",
                partition=partition,
                records=lost,
                hint=_LOST,
                **self._names,
            )

    # what partitions need besides

    async def quarantine(self, partition: OwnedPartition, why: str) -> None:
        """Stop the partition, in the whole cluster, until somebody ends that."""
        partition.stop()
        await self._commit()
        call = calls.set_condition(
            *(self._keys, self._group, partition.number, "quarantined"),
            why=why,
            incarnation=self._member.incarnation,
            epoch=partition.epoch,
        )
        done = await self._perform(call)
        if done:
            self._log.event(
                "partition:quarantined",
                "error",
                partition=partition.number,
                why=why,
                hint=_QUARANTINED,
                **self._names,
            )

    async def hand_over(self, partition: OwnedPartition, record: str) -> float:
        """Give the partition to a member whose class may be able to read a record."""
        call = calls.hand_over_partition(
            *(self._keys, self._group, partition.number),
            member=self._member.name,
            incarnation=self._member.incarnation,
            epoch=partition.epoch,
            record=record,
            digest=self._digest,
            grace=self._member.unknown_record_grace,
        )
        return await self._perform(call)

    # committing

    async def _commit_forever(self) -> None:
        while True:
            await self._uncommitted.wait(self._processor.commit_within)
            await self._commit()

    async def _commit(self) -> None:
        """Commit all that is done by now."""
        async with self._committing:
            for partitions in self._uncommitted.take():
                await self._commit_portion(partitions, [partition.begin_commit() for partition in partitions])

    async def _commit_portion(self, partitions: Sequence[OwnedPartition], commits: Sequence[Commit]) -> None:
        """Commit partitions, and tell each how that has ended."""
        call = calls.commit(self._keys, self._group, self._member.incarnation, commits)
        with operating("commit", "stream", self._keys.stream, len(commits)):
            verdicts = await self._perform(call)
        for partition, commit, is_committed in zip(partitions, commits, verdicts, strict=True):
            if not is_committed:
                self._lose(partition)
                self.renew_now()
                continue
            partition.end_commit(commit)
            if commit.outputs:
                self._relay.note(partition.number, len(commit.outputs))
                self._hold_if_behind(partition)
            if partition.is_past_border:
                self._is_past_border = True
                self.renew_now()

    def _hold_if_behind(self, partition: OwnedPartition) -> None:
        """Let a partition wait whose outputs are not taken: an outbox has a bound, too."""
        if self._nursery is not None and self._relay.is_behind(partition.number) and not partition.is_held:
            partition.hold()
            self._nursery.start_soon(self._release_when_delivered, partition)

    async def _release_when_delivered(self, partition: OwnedPartition) -> None:
        await self._relay.wait_delivered(partition.number)
        partition.release()

    async def read_parked(self, key: bytes, after: str, count: int) -> list[RawEntry]:
        """Return entries of the log of a parked key, behind `after`."""
        call = calls.read_parked(self._keys, self._group, key, after=after, count=count)
        entries = await self._perform(call)
        await self._learn_encodings([(entry, _read_parked_fields(words)) for entry, words in entries])
        return entries

    async def read_states(self, names: Sequence[str]) -> list[bytes | None]:
        """Read values of the keyed state. While Redis is unreachable, the processor waits: no record has failed."""
        call = calls.get_state(self._keys, self._group, names)
        return await self._perform(call)


def _read_parked_fields(words: Sequence[bytes]) -> Sequence[bytes]:
    """Return the fields of a parked record; none of what another program has put there."""
    try:
        return read_parked_words(words)[1]
    except (KeyError, ValueError):
        return ()


_REPLACED = "another worker has the same name and runs this processor now: give each worker a name of its own"
_ARCHIVED = "they were too many for the stream before this processor has read them: it has passed over them"
_LOST = "the stream drops records that a group has not read, Keep(full='drop'), or somebody has trimmed it"
_QUARANTINED = (
    "mend the cause, then: celery5 stream quarantine --clear, or skip the record with celery5 stream seek"
)
