"""Build the calls by which processes renew their presence, and Controllers elect a leader."""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec

from celery5.broker.call import (
    Call,
    Script,
    decode_text,
    merge_name_tuples,
    parse_int,
    parse_seconds,
    script_call,
    to_ms,
)
from celery5.broker.keys import Keys
from celery5.protocol.cluster.leadership import LeaderRecord
from celery5.protocol.cluster.members import MemberEnd
from celery5.protocol.process.missing import REPORT_TTL, MembersReport
from celery5.protocol.process.standing import LOST_SHOWN

RENEW_PRESENCE = Script.load("cluster/renew_presence", "clock", "successor")
LIST_PRESENCE = Script.load("cluster/list_presence", "clock")
LIST_LOST = Script.load("cluster/list_lost", "clock")


def renew_presence(keys: Keys, kind: str, name: str, *, lease: float) -> Call[tuple[str, ...]]:
    """Renew the presence of the process `name` for `lease` seconds. Return all of its kind that live."""
    return script_call(
        RENEW_PRESENCE,
        (keys.live_processes(kind), keys.repaired_losses(kind)),
        (name, to_ms(lease)),
        _names,
        repeatable=True,
        merge=merge_name_tuples,
    )


def end_presence(keys: Keys, kind: str, name: str) -> Call[tuple[str, ...]]:
    """End the presence of the process `name`. Return those of its kind that live."""
    return script_call(
        RENEW_PRESENCE,
        (keys.live_processes(kind), keys.repaired_losses(kind)),
        (name, 0),
        _names,
        repeatable=True,
        merge=merge_name_tuples,
    )


def list_live_processes(keys: Keys, kind: str) -> Call[tuple[str, ...]]:
    """Return the processes of a kind that live."""
    return script_call(
        LIST_PRESENCE,
        (keys.live_processes(kind),),
        (),
        _names,
        repeatable=True,
        merge=merge_name_tuples,
    )


ACQUIRE_LEASE = Script.load("cluster/acquire_lease", "clock")
RELEASE_LEASE = Script.load("cluster/release_lease")


class ExclusiveLeaseReply(msgspec.Struct, frozen=True):
    """What became of the request for a lease that one process holds at a time."""

    # Seconds until it may be free; 0 when it is held by the process that asked.
    wait: float
    # How many other processes have asked for it within the time of a lease.
    others: int


def acquire_lease(key: str, holder: str, *, lease: float, candidates: str = "") -> Call[ExclusiveLeaseReply]:
    """Acquire or renew a lease that one process holds at a time.

    Args:
        key: The lease.
        holder: The process.
        lease: For how many seconds.
        candidates: The key with the processes that ask for it; '' if they are not counted.
    """
    keys = (key, *([candidates] if candidates else []))
    return script_call(ACQUIRE_LEASE, keys, (holder, to_ms(lease)), _exclusive_lease_reply, repeatable=True)


def release_lease(key: str, holder: str, *, candidates: str = "") -> Call[int]:
    """Release that lease, and ask for it no more."""
    keys = (key, *([candidates] if candidates else []))
    return script_call(RELEASE_LEASE, keys, (holder,), int, repeatable=True)


def _exclusive_lease_reply(raw: Any) -> ExclusiveLeaseReply:
    wait, others = raw
    return ExclusiveLeaseReply(wait / 1000, others)


def _names(raw: Iterable[bytes]) -> tuple[str, ...]:
    return tuple(word.decode(errors="replace") for word in raw)


def get_recycling_worker(keys: Keys) -> Call[str]:
    """Return the worker that has the turn to be recycled; "" for none."""
    return Call(("GET", keys.recycling), lambda reply: decode_text(reply or b""), repeatable=True)


PERMIT_TTL = 20.0
"""Seconds for which a permit to be recycled is kept. Its Controller repeats it several times in that time."""
_GRANTED, _NOT_YET = b"granted", b"wait"


def set_recycling_permit(keys: Keys, member: str, *, is_granted: bool) -> Call[object]:
    """Tell a worker whether it may be recycled now."""
    value = _GRANTED if is_granted else _NOT_YET
    words = ("SET", keys.recycling_permit(member), value, "PX", to_ms(PERMIT_TTL))
    return Call(words, lambda reply: reply, repeatable=True)


def get_recycling_permit(keys: Keys, member: str) -> Call[bool | None]:
    """Return whether a worker may be recycled now; None if its Controller has not told it."""
    words = ("GET", keys.recycling_permit(member))
    return Call(words, lambda reply: None if reply is None else reply == _GRANTED, repeatable=True)


def delete_recycling_permit(keys: Keys, member: str) -> Call[object]:
    """Delete what was told to the former process of a worker."""
    return Call(("DEL", keys.recycling_permit(member)), lambda reply: reply, repeatable=True)


CLAIM_LEADERSHIP = Script.load("cluster/claim_leadership", "clock")
LEADER_TTL = 30 * 86400.0
"""Seconds for which the record of the last leader is kept."""


def claim_leadership(keys: Keys, name: str, *, replaces: str, epoch: int) -> Call[LeaderRecord]:
    """Take or keep the lead, unless another Controller leads whose record may not be replaced. Return the record.

    See `celery5.protocol.cluster.leadership`.
    """
    words = (name, replaces, epoch, 1, to_ms(LEADER_TTL))
    return script_call(CLAIM_LEADERSHIP, (keys.leader,), words, _record, repeatable=True)


def resign_leadership(keys: Keys, name: str, *, epoch: int) -> Call[LeaderRecord]:
    """Give up the lead, if `name` has it in that epoch: another Controller may take it at once."""
    words = (name, "", epoch, 0, to_ms(LEADER_TTL))
    return script_call(CLAIM_LEADERSHIP, (keys.leader,), words, _record, repeatable=True)


def get_leader(keys: Keys) -> Call[LeaderRecord]:
    """Return the leader's record."""
    words = ("HMGET", keys.leader, "epoch", "beat", "leader", "since")
    return Call(words, _record, repeatable=True)


def _record(raw: Any) -> LeaderRecord:
    epoch, beat, leader, since = raw
    return LeaderRecord(_counted(epoch), _counted(beat), decode_text(leader or b""), _counted(since) / 1000)


def _counted(raw: bytes | None) -> int:
    """Return the number of a field as `claim_leadership.lua` reads it: both must see the same record."""
    number = parse_int(raw)
    return number if 0 <= number < 2**53 else 0


class LostLease(NamedTuple):
    """A lease that a process has not renewed: it was lost."""

    # Seconds for which it is over.
    seconds: float
    # Seconds for which another process works, or worked, in its place; None: none has since.
    repaired: float | None = None


def list_lost_processes(keys: Keys, kind: str) -> Call[dict[str, LostLease]]:
    """Return the processes of a kind that were lost in the last hour."""
    named = (keys.live_processes(kind), keys.repaired_losses(kind))
    return script_call(LIST_LOST, named, (), _lost, repeatable=True, merge=_merge_lost)


def _merge_lost(found: Sequence[dict[str, LostLease]]) -> dict[str, LostLease]:
    return {name: lease for reply in found for name, lease in reply.items()}


def _lost(raw: Any) -> dict[str, LostLease]:
    return {
        decode_text(name): LostLease(parse_int(over) / 1000, parse_seconds(parse_int(repaired)))
        for name, over, repaired in raw
    }


def note_member_end(keys: Keys, end: MemberEnd) -> Call[object]:
    """Note how the process of a member ended, for an hour."""
    words = ("SET", keys.member_end(end.member), msgspec.json.encode(end), "PX", to_ms(LOST_SHOWN))
    return Call(words, lambda reply: reply, repeatable=True)


def read_member_ends(keys: Keys, members: Sequence[str]) -> Call[dict[str, MemberEnd]]:
    """Return what Controllers know of the last ends of these members, those of which they know something."""

    def decode(raw: Any) -> dict[str, MemberEnd]:
        found: dict[str, MemberEnd] = {}
        for member, packed in zip(members, raw, strict=True):
            with suppress(ValueError, RecursionError):
                if packed is not None:
                    found[member] = msgspec.json.decode(packed, type=MemberEnd)
        return found

    return Call(("MGET", *[keys.member_end(member) for member in members]), decode, repeatable=True)


def store_members_report(keys: Keys, report: MembersReport) -> Call[object]:
    """Store what the leading Controller says of its members, for REPORT_TTL seconds."""
    words = ("SET", keys.members_report, msgspec.json.encode(report), "PX", to_ms(REPORT_TTL))
    return Call(words, lambda reply: reply, repeatable=True)


def read_members_report(keys: Keys) -> Call[MembersReport | None]:
    """Return what the leading Controller says of its members; None if none leads, or it cannot be read."""

    def decode(raw: Any) -> MembersReport | None:
        with suppress(ValueError, RecursionError):
            return None if raw is None else msgspec.json.decode(raw, type=MembersReport)
        return None

    return Call(("GET", keys.members_report), decode, repeatable=True)
