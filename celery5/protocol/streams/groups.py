"""Values of a stream and its groups, as the scripts and the services exchange them.

A *group* reads a stream: each of its members owns some partitions, and each partition has one owner and a *cursor*, the
id of the last record that is done. An owner is known by its incarnation and by the *epoch* of the partition, which
changes with each owner: so an owner that was replaced can commit nothing.
"""

from collections.abc import Mapping, Sequence

import msgspec

from celery5.protocol.bounded_decoding import read_whole
from celery5.protocol.streams.parking import ParkedRecord, ReleasedRecord


def split_id(record_id: str) -> tuple[int, int]:
    """Return the two parts of a record's id: its time in ms since 1970, and its number in the partition, from 1.

    Text that is no id counts as 0-0: other programs write, too.
    """
    ms, _, number = record_id.partition("-")
    whole = read_whole(ms, -1), read_whole(number, -1)
    return whole if min(whole) >= 0 else (0, 0)


class StreamMap(msgspec.Struct, frozen=True):
    """How many partitions a stream has, and the version of this number."""

    partitions: int
    version: int


class StreamTotals(msgspec.Struct, frozen=True):
    """How large a stream is."""

    # How many partitions records are sent to.
    partitions: int
    # How many there have ever been: earlier records may be in these.
    most: int
    # How many records were dropped before all groups had read them, and how many were archived.
    dropped: int
    archived: int = 0


class StaleMap(msgspec.Struct, frozen=True):
    """Nothing was appended: the partitions were chosen by an old map."""

    map: StreamMap


class RefusedAppend(msgspec.Struct, frozen=True):
    """Nothing was appended, and why."""

    why: str
    # A group has not read as many records as are kept. Else a time is too early.
    is_full: bool = False


class RefusedReshard(msgspec.Struct, frozen=True):
    """The number of partitions was not changed, and why."""

    # `unknown`: no such stream; `many`: earlier changes are not read past; `windows`: a group has open ones.
    outcome: str
    group: str = ""
    partition: int = -1


class Appended(msgspec.Struct, frozen=True):
    """What was appended: partition and id of each record, '' as the id of one that had come before."""

    ids: tuple[tuple[int, str], ...]
    # How many records were dropped that a group had not read.
    dropped: int


class ArchivePortion(msgspec.Struct, frozen=True):
    """Records of one partition that a worker has claimed for the archive."""

    partition: int
    last: str
    # How often it has failed.
    failures: int
    # The id of each, and its fields and values in turns.
    entries: Sequence[tuple[bytes, Sequence[bytes]]]


class ArchiveClaim(msgspec.Struct, frozen=True):
    """The reply to a worker that asks for records to archive."""

    # How many records wait, in all partitions.
    waiting: int
    # Seconds until a portion that is not free now may be; None for none.
    retry_in: float | None
    # None: nothing is to be archived now.
    portion: ArchivePortion | None


class Assignment(msgspec.Struct, frozen=True):
    """One partition that is assigned to a member."""

    partition: int
    # Whether the member is its owner already. Else an earlier owner has not given it back yet.
    is_owned: bool
    epoch: int
    cursor: str
    # How many owners have died of what may be the first record. The first of them may have had more records in hand.
    deaths: int
    # '' or `quarantined`.
    condition: str
    # The ids beyond the cursor that are done.
    ahead: tuple[str, ...] = ()
    # Up to which id it may be read; '' for all.
    limit: str = ""
    # The id at which other partitions wait for this one; '' for none.
    awaited: str = ""
    # The last record that there was when the last owner died: later ones are not to blame; '' for none.
    suspect: str = ""


class GroupMembership(msgspec.Struct, array_like=True, frozen=True):
    """What a worker is in a group. Its incarnation is that of the worker."""

    stream: str
    group: str
    # The name of the member.
    member: str

    @property
    def names(self) -> tuple[str, str]:
        """The name, and that under which it keeps what it has in hand when it is about to leave."""
        return self.member, get_leaving_name(self.member)


def get_leaving_name(member: str) -> str:
    """Return the name of a member that is about to leave: it gets no share."""
    return f"\0{member}"


class RenewedMembership(msgspec.Struct, frozen=True):
    """The reply to a member that has renewed its lease."""

    map: StreamMap
    members: int
    assigned: tuple[Assignment, ...]
    # Seconds until the next lease of another member ends, unless that renews it; None when there is no other.
    lapse_in: float | None = None
    # Partitions that this member owns and another one waits for. It may not know that it owns them: the reply to the
    # renewal that made it their owner may be lost.
    claimed: tuple[int, ...] = ()


class Commit(msgspec.Struct, frozen=True):
    """What is committed of one partition, in one step."""

    partition: int
    epoch: int
    cursor: str
    new_cursor: str
    # Encoded outputs, for the outbox.
    outputs: Sequence[bytes] = ()
    # Changes of the keyed state; None removes.
    state: Mapping[str, bytes | None] = {}
    # Fields and values, in turns, of each dead record.
    dead: Sequence[Sequence[str | bytes]] = ()
    ahead: Sequence[str] = ()
    # The name of the ownership, and the number of the commit in it, from 1: a commit may be repeated.
    name: str = ""
    number: int = 0
    parked: Sequence[ParkedRecord] = ()
    released: Sequence[ReleasedRecord] = ()
    # Whether the deaths of owners still count, though the cursor moves: the next records may be to blame, too.
    keeps_deaths: bool = False

    def to_words(self) -> list[str | bytes | int]:
        """Return it as the script takes it."""
        words: list[str | bytes | int] = [self.partition, self.epoch, self.cursor, self.new_cursor]
        words += (self.name, self.number, " ".join(self.ahead), int(self.keeps_deaths))
        words.append(len(self.released))
        for released in self.released:
            words += (released.key, released.entry)
        words += (
            len(self.outputs),
            *self.outputs,
            len(self.state),
        )
        for name, value in self.state.items():
            words += (name, value or b"")
        words.append(len(self.dead))
        for dead in self.dead:
            words += (len(dead), *dead)
        words.append(len(self.parked))
        for parked in self.parked:
            about = "" if parked.about is None else parked.about.to_text()
            words += (parked.key, about, len(parked.words), *parked.words)
        return words


class ForgottenPortion(msgspec.Struct, frozen=True):
    """What became of one portion of a group that is forgotten."""

    # `ok`; or why nothing was done: `unknown`, `live` or `kept`.
    outcome: str
    # `ok`: the first partition of the next portion, 0 for none; `live`: how many members run; `kept`: how many outputs
    # are not delivered.
    number: int = 0
    # `kept`: how many dead and how many parked records there are.
    dead: int = 0
    parked: int = 0


class PartitionState(msgspec.Struct, frozen=True):
    """The state of one partition in one group."""

    partition: int
    # The id of the last record that was ever appended, 0-0 for none.
    last_id: str
    # The id of the last record that is done.
    cursor: str
    # The first record that is not done and still there; '' for none.
    first_unread: str
    # How many records the log has.
    length: int
    # The incarnation that owns it; '' for none.
    owner: str
    epoch: int
    deaths: int
    condition: str
    why: str
    # Since when it has this condition, in seconds since 1970; 0 for none.
    since: float = 0.0
    # The numbers of the first and the last record that were archived, of those that went last; (0, -1) for none.
    archived_run: tuple[int, int] = (0, -1)
    # How many windows of the stream's key are open, and how many records came after a window of theirs had closed.
    open_windows: int = 0
    late: int = 0

    @property
    def lag(self) -> int:
        """How many records are not done."""
        return max(0, split_id(self.last_id)[1] - split_id(self.cursor)[1])

    @property
    def missing(self) -> tuple[int, int]:
        """How many of these were dropped, and how many were archived, before the group has read them."""
        if not self.lag:
            return 0, 0
        first = split_id(self.first_unread)[1] if self.first_unread else split_id(self.last_id)[1] + 1
        return split_gap(split_id(self.cursor)[1], first, self.archived_run)


def split_gap(before: int, after: int, archived_run: tuple[int, int]) -> tuple[int, int]:
    """Return how many of the records between two numbers were dropped, and how many were archived.

    Args:
        before: The number of the record in front of the gap.
        after: The number of the record behind it.
        archived_run: The numbers of the first and the last record that were archived.
    """
    first, last = archived_run
    archived = max(0, min(last, after - 1) - max(first, before + 1) + 1)
    return max(0, after - before - 1 - archived), archived


class GroupState(msgspec.Struct, frozen=True):
    """The state of a group, with some of its partitions."""

    # How many partitions there are in all.
    total: int
    # Time of the reply in ms since 1970, by the clock of Redis.
    at: int
    members: tuple[str, ...]
    partitions: tuple[PartitionState, ...]
    # Keys that it has parked, and how many records they have.
    parked_keys: int = 0
    parked_records: int = 0

    def get_age(self, partition: PartitionState) -> float:
        """Return for how many seconds the first unread record of a partition has been there."""
        return (
            max(0.0, (self.at - split_id(partition.first_unread)[0]) / 1000)
            if partition.first_unread
            else 0.0
        )
