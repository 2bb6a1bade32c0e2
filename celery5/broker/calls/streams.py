"""Build the calls on streams of records: append, be a member of a group, read, commit, and what operators do."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from celery5.broker.call import (
    Call,
    Script,
    Word,
    decode_text,
    merge_names,
    parse_int,
    parse_seconds,
    script_call,
    to_ms,
)
from celery5.broker.keys import Keys, StreamKeys
from celery5.protocol.bounded_decoding import read_whole
from celery5.protocol.counts import format_count
from celery5.protocol.streams.groups import (
    Appended,
    ArchiveClaim,
    ArchivePortion,
    Assignment,
    Commit,
    ForgottenPortion,
    GroupState,
    PartitionState,
    RefusedAppend,
    RefusedReshard,
    RenewedMembership,
    StaleMap,
    StreamMap,
    StreamTotals,
)
from celery5.protocol.streams.parking import ParkedAction, ParkedKey, ParkedKeysFound
from celery5.protocol.streams.windows import LATE_RECORDS, OPEN_WINDOWS

APPEND = Script.load("streams/append", "clock", "record_id")
RENEW_MEMBERSHIP = Script.load("streams/renew_membership", "clock", "record_id", "stream_group")
COMMIT = Script.load("streams/commit", "record_id")
RENEW_MEMBER_LEASE = Script.load("streams/renew_member_lease", "clock")
RELEASE_PARTITIONS = Script.load("streams/release_partitions", "clock", "record_id", "stream_group")
SET_PARKED = Script.load("streams/set_parked")
SET_CONDITION = Script.load("streams/set_condition", "clock")
HAND_OVER = Script.load("streams/hand_over", "clock", "stream_group")
ANNOUNCE_CLASS = Script.load("streams/announce_class")
BEGIN_TRIAL = Script.load("streams/begin_trial")
SEEK = Script.load("streams/seek", "clock", "record_id", "stream_group")
RESHARD = Script.load("streams/reshard", "record_id", "stream_group")
CLAIM_ARCHIVED = Script.load("streams/claim_archived", "clock")
SETTLE_ARCHIVED = Script.load("streams/settle_archived", "clock", "record_id")
FORGET_GROUP = Script.load("streams/forget_group", "clock", "record_id", "stream_group")
GET_GROUP = Script.load("streams/get_group", "clock", "record_id", "stream_group")

REPLY_KEPT = 60.0
"""Seconds for which the reply to a sending is kept, so that the sending may be repeated."""

MAX_PARTITIONS = 4096
"""The most partitions of a stream."""
RawEntry = tuple[bytes, Sequence[bytes]]
"""An entry of a log: its id, and its fields and values in turns."""


AppendReply = Appended | StaleMap | RefusedAppend


class RecordToAppend(msgspec.Struct, frozen=True, gc=False):
    """A record, encoded."""

    partition: int
    # Fields and values in turns.
    words: Sequence[Word]
    # Its time in ms since 1970; None for the time of the call.
    time: int | None = None
    # Its id in the outbox that it comes from.
    origin: str = ""


def append(
    keys: StreamKeys,
    records: Sequence[RecordToAppend],
    *,
    version: int,
    partitions: int,
    most: int,
    full: str,
    max_age: float = 0.0,
    nonce: str = "",
    source: str = "",
) -> Call[AppendReply]:
    """Append records: all of them, or none.

    Args:
        keys: The keys of the stream.
        records: What is appended.
        version: The version of the map by which their partitions were chosen; 0 for none.
        partitions: The number of partitions of a stream that does not exist yet.
        most: The most records of a partition.
        full: What happens when there are more unread ones: `refuse`, `drop` or `archive`.
        max_age: Seconds after which a record that all groups have read may be dropped; 0 for never.
        nonce: A text that no other sending has, so that this one may be repeated.
        source: The outbox that the records come from.
    """
    words: list[Word] = []
    for record in records:
        time = "" if record.time is None else record.time
        words += (record.partition, time, record.origin, len(record.words), *record.words)
    keep = to_ms(REPLY_KEPT) if nonce else 0
    named = (
        keys.map,
        keys.groups,
        keys.log_prefix,
        keys.partition_prefix,
        keys.relayed,
        keys.sent(nonce),
        keys.archive_prefix,
        keys.archiving,
    )
    args = (version, partitions, most, full, to_ms(max_age), keep, source, len(records), *words)

    def read(raw: Any) -> AppendReply:
        return _read_appended(keys.stream, raw, most)

    return script_call(APPEND, named, args, read, repeatable=bool(nonce or source))


def _read_appended(stream: str, raw: Any, most: int) -> AppendReply:
    outcome = raw[0]
    if outcome == b"stale":
        return StaleMap(StreamMap(_read_partitions(raw[1]), raw[2]))
    if outcome == b"full" and raw[5] > most:
        return RefusedAppend(
            f"{format_count(int(raw[5]), 'record')} at once for partition {int(raw[1])} of stream {stream}, "
            f"which keeps {most}: however soon group {decode_text(raw[2])} reads, they do not fit; "
            f"send at most {most} in a call, or raise Keep(records=...)",
            is_full=True,
        )
    if outcome == b"full":
        waiting = f", and {int(raw[4])} wait for the archive" if raw[4] else ""
        return RefusedAppend(
            f"partition {int(raw[1])} of stream {stream} is full: group {decode_text(raw[2])} has not read "
            f"{format_count(int(raw[3]), 'record')}{waiting}; "
            "start its processor, raise Keep(records=...), or forget the group",
            is_full=True,
        )
    if outcome == b"early":
        return RefusedAppend(
            f"a record of stream {stream} is older than the last one of its partition {int(raw[1])}, "
            f"{decode_text(raw[2])}: times in a partition never decrease"
        )
    ids = [decode_text(word) for word in raw[1]]
    return Appended(tuple(zip(map(int, ids[::2]), ids[1::2], strict=True)), int(raw[2]))


def renew_membership(
    keys: StreamKeys,
    group: str,
    *,
    member: str,
    incarnation: str,
    lease: float,
    is_joining: bool,
    start: str,
    partitions: int,
    is_past_border: bool = False,
    is_leaving: bool = False,
) -> Call[RenewedMembership | None]:
    """Renew a membership for `lease` seconds. None: another incarnation has the member's name."""
    named = (
        keys.map,
        keys.groups,
        keys.members(group),
        keys.incarnations(group),
        keys.plan(group),
        f"{keys.partition_prefix}{group}:",
        keys.log_prefix,
    )
    channel = keys.changes(group)
    args = (
        group,
        member,
        incarnation,
        to_ms(lease),
        int(is_joining),
        start,
        partitions,
        channel,
        int(is_past_border),
        int(is_leaving),
    )
    return script_call(RENEW_MEMBERSHIP, named, args, _read_membership, repeatable=True)


def _read_membership(raw: Any) -> RenewedMembership | None:
    if raw[0] != b"ok":
        return None
    assigned = [
        Assignment(
            partition=row[0],
            is_owned=row[1] == 1,
            epoch=row[2],
            cursor=decode_text(row[3]),
            deaths=row[4],
            condition=decode_text(row[5]),
            ahead=tuple(decode_text(row[6]).split()),
            limit=decode_text(row[7]),
            awaited=decode_text(row[8]),
            suspect=decode_text(row[9]),
        )
        for row in raw[5]
    ]
    return RenewedMembership(
        StreamMap(_read_partitions(raw[1]), raw[2]),
        raw[3],
        tuple(assigned),
        parse_seconds(raw[4]),
        tuple(map(int, raw[6])),
    )


def renew_member_lease(
    keys: StreamKeys, group: str, *, member: str, incarnation: str, lease: float
) -> Call[bool]:
    """Renew the lease of a member for `lease` seconds, and nothing else. False: it is a member no more."""
    named = (keys.members(group), keys.incarnations(group))
    return script_call(RENEW_MEMBER_LEASE, named, (member, incarnation, to_ms(lease)), bool, repeatable=True)


def read(
    keys: StreamKeys, positions: Mapping[int, str], *, count: int, block: float
) -> Call[dict[int, list[Any]]]:
    """Read at most `count` entries behind each position, by partition. Wait up to `block` seconds for the first."""
    words: list[Word] = [
        *("XREAD", "COUNT", count, "BLOCK", to_ms(block), "STREAMS"),
        *(keys.log(partition) for partition in positions),
        *positions.values(),
    ]
    by_log = {keys.log(partition).encode(): partition for partition in positions}

    def decode(raw: Any) -> dict[int, list[Any]]:
        found = raw.items() if hasattr(raw, "items") else raw or ()
        return {by_log[log]: entries for log, entries in found}

    return Call(tuple(words), decode, None, repeatable=True, blocks=block)


def commit(
    keys: StreamKeys, group: str, incarnation: str, commits: Sequence[Commit]
) -> Call[tuple[bool, ...]]:
    """Commit partitions, each as a whole or not at all."""
    named = (
        f"{keys.partition_prefix}{group}:",
        keys.state(group),
        f"{keys.outbox_prefix}{group}:",
        keys.dead(group),
        keys.parked(group),
        f"{keys.parked_log_prefix}{group}:",
        keys.log_prefix,
    )
    words: list[Word] = []
    for partition_commit in commits:
        words += partition_commit.to_words()
    return script_call(COMMIT, named, (incarnation, *words), _read_verdicts, repeatable=True)


def _read_verdicts(raw: Any) -> tuple[bool, ...]:
    return tuple(verdict == 1 for verdict in raw)


def release_partitions(
    keys: StreamKeys, group: str, *, member: str, incarnation: str, partitions: Sequence[int]
) -> Call[int]:
    """Give partitions back, and stay a member."""
    return _release(keys, group, (member, incarnation), "", False, partitions)


def leave_group(
    keys: StreamKeys,
    group: str,
    *,
    member: str,
    incarnation: str,
    absence: float = 0.0,
    has_died: bool = False,
) -> Call[int]:
    """Give everything back and leave; the member's share is kept for its return for `absence` seconds."""
    return _release(keys, group, (member, incarnation), to_ms(absence), has_died, ())


def _release(
    keys: StreamKeys,
    group: str,
    names: tuple[str, str],
    absence: Word,
    has_died: bool,
    partitions: Sequence[int],
) -> Call[int]:
    member, incarnation = names
    prefix, channel = f"{keys.partition_prefix}{group}:", keys.changes(group)
    named = (keys.map, keys.members(group), keys.incarnations(group), prefix, keys.log_prefix)
    args = (member, incarnation, channel, absence, int(has_died), *partitions)
    return script_call(RELEASE_PARTITIONS, named, args, int, repeatable=True)


def set_condition(
    keys: StreamKeys,
    group: str,
    partition: int,
    condition: str,
    *,
    why: str = "",
    incarnation: str = "",
    epoch: int = 0,
) -> Call[bool]:
    """Set the condition of a partition: `quarantined`, or '' for none. With an incarnation only as its owner."""
    args = (condition, why, incarnation, epoch, keys.changes(group))
    return script_call(SET_CONDITION, (keys.partition(group, partition),), args, bool, repeatable=True)


def announce_class(keys: StreamKeys, group: str, member: str, *, digest: str, ttl: float) -> Call[int]:
    """Announce for `ttl` seconds which class of records a member has."""
    args = (member, digest, to_ms(ttl))
    return script_call(ANNOUNCE_CLASS, (keys.classes(group),), args, int, repeatable=True)


def hand_over_partition(
    keys: StreamKeys,
    group: str,
    partition: int,
    *,
    member: str,
    incarnation: str,
    epoch: int,
    record: str,
    digest: str,
    grace: float,
) -> Call[float]:
    """Assign a partition to a member with another class of records, as its owner cannot read one of them.

    Returns:
        Seconds until the owner is to look again, if it still is the owner; 0.0 when it has waited for `grace` seconds
        and no member has another class.
    """
    named = (
        keys.partition(group, partition),
        keys.plan(group),
        keys.members(group),
        keys.incarnations(group),
        keys.classes(group),
    )
    args = (member, incarnation, epoch, partition, record, digest, to_ms(grace), keys.changes(group))
    return script_call(HAND_OVER, named, args, lambda raw: int(raw) / 1000, repeatable=True)


def list_parked_keys(keys: StreamKeys, group: str) -> Call[ParkedKeysFound]:
    """Return the keys that a group has parked: 1,000 at most."""

    def read_keys(raw: Any) -> ParkedKeysFound:
        pairs = raw.items() if hasattr(raw, "items") else zip(raw[::2], raw[1::2], strict=True)
        found: dict[bytes, bytes] = dict(pairs)
        records = found.pop(b"records", b"0")
        parked = {
            name[4:]: ParkedKey.from_text(
                text.decode(errors="replace"), parse_int(found.get(b"tries:" + name[4:]))
            )
            for name, text in found.items()
            if name[:4] == b"key:"
        }
        return ParkedKeysFound(parked, parse_int(records))

    return Call(("HGETALL", keys.parked(group)), read_keys, repeatable=True)


def count_parked_records(keys: StreamKeys, group: str, key: bytes) -> Call[int]:
    """Return how many records of a key are parked."""
    return Call(("XLEN", _get_parked_log(keys, group, key)), int, repeatable=True)


def read_parked(
    keys: StreamKeys, group: str, key: bytes, *, after: str = "", count: int
) -> Call[list[RawEntry]]:
    """Return entries of the log of a parked key, behind `after`."""

    def read_entries(raw: Any) -> list[RawEntry]:
        found = msgspec.convert(raw, list[tuple[bytes, list[bytes]]])
        return [(entry, words) for entry, words in found]

    first = f"({after}" if after else "-"
    words = ("XRANGE", _get_parked_log(keys, group, key), first, "+", "COUNT", count)
    return Call(words, read_entries, repeatable=True)


def _get_parked_log(keys: StreamKeys, group: str, key: bytes) -> bytes:
    """STREAM  the records of a parked key: a key is any bytes."""
    return f"{keys.parked_log_prefix}{group}:".encode() + key


def set_parked(keys: StreamKeys, group: str, action: ParkedAction, parked: Sequence[bytes] = ()) -> Call[int]:
    """Have parked keys, or all, released, discarded, or left where they are (''); return how many there were."""
    names: list[Word] = list(parked)
    args = (action or "-", keys.changes(group), *names)
    return script_call(SET_PARKED, (keys.parked(group),), args, int, repeatable=True)


def erase_parked(keys: StreamKeys, group: str, parked: Sequence[bytes]) -> Call[int]:
    """Delete the parked keys of a group. For an application made for a test, whose workers have stopped."""
    logs = [_get_parked_log(keys, group, key) for key in parked]
    return Call(("UNLINK", keys.parked(group), *logs), int, repeatable=True)


def begin_trial(keys: StreamKeys, group: str, partition: int, *, incarnation: str, epoch: int) -> Call[bool]:
    """Note that the first unread record, at which an owner has died, is processed now. False: somebody else owns it."""
    return script_call(
        BEGIN_TRIAL, (keys.partition(group, partition),), (incarnation, epoch), bool, repeatable=True
    )


def seek(
    keys: StreamKeys,
    group: str,
    first: str,
    *,
    partition: int | None = None,
    force: bool = False,
    begins_anew: bool = False,
    forgets_state: bool = False,
) -> Call[int | dict[int, str]]:
    """Have a group continue with the first record from an id on, or at the end, `$`.

    Args:
        keys: The keys of the stream.
        group: The group.
        first: The id, or `$`.
        partition: Only this one.
        force: Do it while members run.
        begins_anew: End quarantines as well.
        forgets_state: Forget the keyed state as well.

    Returns:
        The cursors by partition, or how many live members were in the way; -1 for an unknown group.
    """
    prefix = f"{keys.partition_prefix}{group}:"
    members, incarnations = keys.members(group), keys.incarnations(group)
    named = (
        keys.map,
        keys.groups,
        members,
        incarnations,
        prefix,
        keys.log_prefix,
        keys.state(group),
        keys.parked(group),
        f"{keys.parked_log_prefix}{group}:",
    )
    only = "" if partition is None else partition
    args = (group, first, only, int(force), keys.changes(group), int(begins_anew), int(forgets_state))
    return script_call(SEEK, named, args, _read_sought, repeatable=True)


def _read_sought(raw: Any) -> int | dict[int, str]:
    if isinstance(raw, int):
        return raw
    return {partition: decode_text(cursor) for partition, cursor in enumerate(raw) if cursor}


def forget_group(
    keys: StreamKeys, group: str, *, first: int, count: int, force: bool = False
) -> Call[ForgottenPortion]:
    """Forget a group: `count` of its partitions from `first` on, and with the last ones all the rest."""

    def read_portion(raw: Any) -> ForgottenPortion:
        numbers = [int(number) for number in raw[1:]]
        return ForgottenPortion(decode_text(raw[0]), *numbers)

    named = (
        keys.map,
        keys.groups,
        keys.members(group),
        keys.incarnations(group),
        keys.plan(group),
        f"{keys.partition_prefix}{group}:",
        f"{keys.outbox_prefix}{group}:",
        keys.state(group),
        keys.dead(group),
        keys.parked(group),
        f"{keys.parked_log_prefix}{group}:",
        keys.classes(group),
    )
    return script_call(FORGET_GROUP, named, (group, first, count, int(force)), read_portion, repeatable=True)


def erase_stream(keys: StreamKeys, groups: Sequence[str], partitions: int) -> Call[int]:
    """Delete everything that a stream has. For an application made for a test, whose workers have stopped."""
    numbers = range(partitions)
    names = [keys.map, keys.groups, keys.relayed, *map(keys.log, numbers)]
    names += (keys.archiving, *map(keys.archive, numbers))
    for group in groups:
        names += (
            keys.members(group),
            keys.incarnations(group),
            keys.plan(group),
            keys.classes(group),
            keys.state(group),
            keys.dead(group),
        )
        for partition in range(partitions):
            names += (keys.partition(group, partition), keys.outbox(group, partition))
    return Call(("UNLINK", *names), int, repeatable=True)


def reshard(keys: StreamKeys, partitions: int, *, force: bool = False) -> Call[StreamMap | RefusedReshard]:
    """Change the number of partitions, with `force` also while windows are open."""

    def read_map(raw: Any) -> StreamMap | RefusedReshard:
        if raw[0] == b"ok":
            return StreamMap(partitions, raw[2])
        outcome = decode_text(raw[0])
        if outcome != "windows":
            return RefusedReshard(outcome)
        return RefusedReshard(outcome, decode_text(raw[1]), int(raw[2]))

    named = (keys.map, keys.groups, keys.log_prefix, keys.state_prefix)
    args = (partitions, keys.changes_prefix, int(force), OPEN_WINDOWS)
    return script_call(RESHARD, named, args, read_map, repeatable=True)


def get_group(keys: StreamKeys, group: str, *, first: int, count: int) -> Call[GroupState]:
    """Return the state of a group, with `count` of its partitions at most."""
    prefix = f"{keys.partition_prefix}{group}:"
    named = (
        keys.map,
        keys.members(group),
        keys.incarnations(group),
        prefix,
        keys.log_prefix,
        keys.state(group),
        keys.parked(group),
    )
    args = (first, count, OPEN_WINDOWS, LATE_RECORDS)
    return script_call(GET_GROUP, named, args, _read_group, repeatable=True)


def _read_group(raw: Any) -> GroupState:
    total, at, members, rows, parked_keys, parked_records = msgspec.convert(
        raw, tuple[int, int, list[bytes], list[_PartitionRow], int, int]
    )
    partitions = tuple(map(_read_partition, rows))
    return GroupState(total, at, tuple(map(decode_text, members)), partitions, parked_keys, parked_records)


_PartitionRow = tuple[int, bytes, bytes, bytes, int, bytes, int, int, bytes, bytes, int, bytes, int, int]


def _read_partition(row: _PartitionRow) -> PartitionState:
    partition, last_id, cursor, first_unread, length, owner, epoch, deaths = row[:8]
    condition, why, since, run, open_windows, late = row[8:]
    return PartitionState(
        partition=partition,
        last_id=decode_text(last_id),
        cursor=decode_text(cursor),
        first_unread=decode_text(first_unread),
        length=length,
        owner=decode_text(owner),
        epoch=epoch,
        deaths=deaths,
        condition=decode_text(condition),
        why=decode_text(why),
        since=since / 1000,
        archived_run=_parse_run(run),
        open_windows=open_windows,
        late=late,
    )


def _parse_run(raw: bytes | None) -> tuple[int, int]:
    """Return the numbers of the first and the last record that were archived; (0, -1) for none."""
    first, _, last = (raw or b"").partition(b" ")
    whole = read_whole(first, -1), read_whole(last, -1)
    return whole if min(whole) >= 0 else (0, -1)


def get_archived_run(keys: StreamKeys, partition: int) -> Call[tuple[int, int]]:
    """Return the numbers of the first and the last record of a partition that were archived; (0, -1) for none."""
    return Call(("HGET", keys.map, f"archived:{partition}"), _parse_run, repeatable=True)


def claim_archived(
    keys: StreamKeys, worker: str, *, lease: float, most: int, most_bytes: int, before: int = -1
) -> Call[ArchiveClaim]:
    """Claim a portion of the records that wait for the archive, for `lease` seconds.

    Args:
        keys: The keys of the stream.
        worker: Who claims it.
        lease: Seconds after which others may claim it.
        most: The most records.
        most_bytes: The most bytes, unless one record alone is larger.
        before: The partition of the portion before, so that all partitions have their turn; -1 for none.
    """

    def read_claim(raw: Any) -> ArchiveClaim:
        retry_in, portion = parse_seconds(raw[1]), None
        if len(raw) > 2:
            portion = ArchivePortion(
                int(raw[2]), decode_text(raw[3]), int(raw[4]), [(entry[0], entry[1]) for entry in raw[5]]
            )
        return ArchiveClaim(raw[0], retry_in, portion)

    named = (keys.map, keys.archiving, keys.archive_prefix)
    args = (worker, to_ms(lease), most, most_bytes, before)
    return script_call(CLAIM_ARCHIVED, named, args, read_claim, repeatable=True)


def settle_archived(
    keys: StreamKeys, worker: str, portion: ArchivePortion, outcome: str, *, delay: float = 0.0
) -> Call[bool]:
    """Settle a portion that was claimed: `archived`, or `failed` and free after `delay`; or `renewed` for so long.

    False: the worker does not have it any more.
    """
    named = (keys.map, keys.archiving, keys.archive(portion.partition))
    args = (portion.partition, worker, portion.last, outcome, to_ms(delay))
    return script_call(SETTLE_ARCHIVED, named, args, bool, repeatable=True)


def list_archived_partitions(keys: StreamKeys) -> Call[list[int]]:
    """Return the partitions that have records which wait for the archive, sorted."""
    return Call(("HKEYS", keys.archiving), lambda raw: sorted(map(int, raw)), repeatable=True)


def count_waiting_for_archive(keys: StreamKeys, partition: int) -> Call[int]:
    """Return how many records of a partition wait for the archive."""
    return Call(("XLEN", keys.archive(partition)), int, repeatable=True)


def _read_partitions(word: Any) -> int:
    """Return how many partitions a stream has. Raises ValueError for a number that no stream has: each is looked at."""
    partitions = int(word or 0)
    if not 0 <= partitions <= MAX_PARTITIONS:
        raise ValueError(f"a stream has 0 to {MAX_PARTITIONS} partitions, not {partitions}")
    return partitions


def get_map(keys: StreamKeys) -> Call[StreamMap | None]:
    """Return the map of a stream; None when nothing was ever sent to it."""

    def read_map(raw: Any) -> StreamMap | None:
        return None if raw[0] is None else StreamMap(_read_partitions(raw[0]), int(raw[1] or 1))

    return Call(("HMGET", keys.map, "partitions", "version"), read_map, repeatable=True)


def get_totals(keys: StreamKeys) -> Call[StreamTotals]:
    """Return how many partitions a stream has and has had, and how many unread records it has dropped or archived."""

    def read_totals(raw: Any) -> StreamTotals:
        partitions, most = map(_read_partitions, raw[:2])
        dropped, archived = (int(word or 0) for word in raw[2:])
        return StreamTotals(partitions, max(partitions, most), dropped, archived)

    return Call(
        ("HMGET", keys.map, "partitions", "most", "dropped", "archived"), read_totals, repeatable=True
    )


def count_records(keys: StreamKeys, partition: int) -> Call[int]:
    """Return how many records the log of a partition has."""
    return Call(("XLEN", keys.log(partition)), int, repeatable=True)


def count_partitions(keys: StreamKeys) -> Call[int]:
    """Return how many partitions a stream has or has ever had."""
    return Call(
        ("HMGET", keys.map, "partitions", "most"),
        lambda raw: max(map(_read_partitions, raw)),
        repeatable=True,
    )


def list_groups(keys: StreamKeys) -> Call[list[str]]:
    """Return the groups of a stream, sorted."""
    return Call(("HKEYS", keys.groups), lambda raw: sorted(map(decode_text, raw)), repeatable=True)


def register_stream(keys: Keys, stream: str) -> Call[int]:
    """Add a stream to those of the application."""
    return Call(("SADD", keys.record_streams, stream), int, repeatable=True)


def declare_encoding(keys: StreamKeys, encoding: str) -> Call[int]:
    """Note that records of a stream are sent in an encoding: its readers decode what was once declared."""
    return Call(("HSET", keys.map, f"codec:{encoding}", 1), int, repeatable=True)


def get_encodings(keys: StreamKeys, encodings: Sequence[str]) -> Call[list[str]]:
    """Return those of these encodings that were once declared for a stream."""

    def read_names(raw: Any) -> list[str]:
        return [name for name, found in zip(encodings, raw, strict=True) if found is not None]

    words = ("HMGET", keys.map, *[f"codec:{encoding}" for encoding in encodings])
    return Call(words, read_names, repeatable=True)


def list_streams(keys: Keys) -> Call[list[str]]:
    """Return the streams of the application, sorted."""
    return Call(
        ("SMEMBERS", keys.record_streams),
        lambda raw: sorted(map(decode_text, raw)),
        repeatable=True,
        merge=merge_names,
    )


def read_range(
    keys: StreamKeys, partition: int, *, first: str, last: str = "+", count: int, backwards: bool = False
) -> Call[list[Any]]:
    """Return entries of a partition, in order; `backwards`: the last ones first."""
    ends = (last, first) if backwards else (first, last)
    command = "XREVRANGE" if backwards else "XRANGE"
    return Call((command, keys.log(partition), *ends, "COUNT", count), _entries, repeatable=True)


def _entries(raw: Any) -> list[Any]:
    return list(raw or ())


def get_state(keys: StreamKeys, group: str, names: Sequence[str]) -> Call[list[bytes | None]]:
    """Return values of the keyed state of a group, None for those that are not there."""
    return Call(
        ("HMGET", keys.state(group), *names),
        lambda raw: msgspec.convert(raw, list[bytes | None]),
        repeatable=True,
    )


def read_outbox(keys: StreamKeys, group: str, partition: int, *, count: int) -> Call[list[Any]]:
    """Return the first entries of an outbox."""
    return Call(
        ("XRANGE", keys.outbox(group, partition), "-", "+", "COUNT", count), _entries, repeatable=True
    )


def remove_from_outbox(keys: StreamKeys, group: str, partition: int, ids: Sequence[bytes]) -> Call[int]:
    """Remove what was delivered."""
    return Call(("XDEL", keys.outbox(group, partition), *ids), int, repeatable=True)


def read_now(keys: StreamKeys, positions: Mapping[int, str], *, count: int) -> Call[dict[int, list[Any]]]:
    """Return at most `count` entries behind each position, by partition, without waiting for any."""
    logs = [keys.log(partition) for partition in positions]
    words: list[Word] = ["XREAD", "COUNT", count, "STREAMS", *logs, *positions.values()]
    by_log = {log.encode(): partition for log, partition in zip(logs, positions, strict=True)}

    def decode(raw: Any) -> dict[int, list[Any]]:
        found = raw.items() if hasattr(raw, "items") else raw or ()
        return {by_log[log]: entries for log, entries in found}

    return Call(tuple(words), decode, None, repeatable=True)


def count_dead_records(keys: StreamKeys, group: str) -> Call[int]:
    """Return how many dead records a group has."""
    return Call(("XLEN", keys.dead(group)), int, repeatable=True)


def read_dead_records(
    keys: StreamKeys, group: str, *, first: str, last: str = "+", count: int
) -> Call[list[Any]]:
    """Return dead records of a group, the oldest first."""
    return Call(("XRANGE", keys.dead(group), first, last, "COUNT", count), _entries, repeatable=True)


def remove_dead_records(keys: StreamKeys, group: str, ids: Sequence[str]) -> Call[int]:
    """Remove dead records; return how many of them were there."""
    return Call(("XDEL", keys.dead(group), *ids), int, repeatable=True)
