"""Gating: the trips to Redis that let jobs through a gate, hold them before it, and tell of who waits.

Floor: broker. Reads and writes: what the Lua files of the same names say; all keys come from `keys.py`.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import msgspec

from celery5.broker.call import Call, Script, Word, script_call
from celery5.broker.calls import Entry, parse_entry
from celery5.broker.keys import GROUP, QueueKeys
from celery5.protocol.delivery import Delivery
from celery5.protocol.limits import AdmissionRule

ADMIT = Script.load("limits/admit", lib="admission")
ADD_TO_WAITING_LIST = Script.load("limits/add_to_waiting_list", lib="admission")
ADMIT_WAITING = Script.load("limits/admit_waiting", lib="admission")
SETTLE_LIMITED = Script.load("limits/settle_limited", lib="admission", inner="job/settle")

LEASE_LOST = -1
"""The worker has lost its lease, and nothing was done."""
ADMITTED, WAITING, REVOKED, GONE = 1, 0, -1, -2
"""What became of a job at the gate."""


class AdmissionRequest(NamedTuple):
    """One job at the gate, as `admit.lua` takes it. `how` is `run`, `wait` or `count`."""

    entry: bytes
    id: str
    waiting_list: str
    deliveries: int
    expires: str
    mode: str


class AdmissionReply(msgspec.Struct, frozen=True):
    """What became of each job (None when the lease is lost), and in how many seconds each rule's rate lets the next one
    through: 0 where nobody waits for that."""

    outcomes: list[int] | None
    delays: list[float]


class AdmittedJobs(msgspec.Struct, frozen=True):
    """What a gate has handed to this worker; for each rule how many, and as in `Admitted`. `owned` is how many outcomes
    were this worker's; LOST when it has no lease."""

    owned: int
    entries: list[Entry]
    counts: list[int]
    delays: list[float]


def admit(
    keys: QueueKeys, worker: str, jobs: Sequence[AdmissionRequest], rules: Sequence[tuple[AdmissionRule, int]]
) -> Call[AdmissionReply]:
    """Ask whether jobs that this worker has read may run, by `rules`. Safe to repeat."""
    results = tuple([keys.result(each.id) for each in jobs])
    words: tuple[Word, ...] = tuple([word for each in jobs for word in each])
    named = (keys.normal, keys.high, keys.low, keys.handed, keys.leases, keys.jobs, keys.waiting, keys.due,
             keys.slots, keys.slot_counts, keys.limited_counts, keys.waiting_list_prefix, *results)  # fmt: skip
    reply = partial(_admitted, len(jobs))
    return script_call(
        ADMIT, named, (GROUP, worker, keys.slots_freed, _json(rules), *words), reply, repeatable=True
    )


def add_to_waiting_list(keys: QueueKeys, jobs: Sequence[tuple[str, bytes, str, str]]) -> Call[int]:
    """Put jobs (id, envelope, line, when it expires) of the lane of `keys` into their lines; gives how many were new.
    Safe to repeat: a known id is left alone."""
    results = tuple([keys.result(each[0]) for each in jobs])
    words: tuple[Word, ...] = tuple([word for each in jobs for word in each])
    named = (keys.jobs, keys.waiting, keys.due, keys.limited_counts, keys.waiting_list_prefix, *results)
    return script_call(
        ADD_TO_WAITING_LIST, named, (keys.slots_freed, keys.lane, *words), int, repeatable=True
    )


def admit_waiting(
    keys: QueueKeys, worker: str, rules: Sequence[tuple[AdmissionRule, int]]
) -> Call[AdmittedJobs]:
    """Take up to so many jobs of each rule's task out of the waiting room. Not repeatable: what a lost answer carried
    is found among what is this worker's (`calls.mine`)."""
    named = (keys.handed, keys.leases, keys.jobs, keys.waiting, keys.due, keys.slots, keys.slot_counts, keys.limited_counts,
             keys.waiting_list_prefix)  # fmt: skip
    return script_call(
        ADMIT_WAITING, named, (GROUP, worker, _json(rules)), partial(_pulled, keys.on_lane("g"))
    )


def settle_limited(
    keys: QueueKeys,
    settle: Call[int],
    leaving: Sequence[Delivery],
    rules: Sequence[tuple[AdmissionRule, int]],
) -> Call[AdmittedJobs]:
    """As the call `settle`, for a batch in which those that are `leaving` have slots: these are free then, and who
    waits is handed over."""
    count = cast("int", settle.words[2])
    inner = cast("tuple[str, ...]", settle.words[3 : 3 + count])
    words = settle.words[3 + count :]
    named = (keys.handed, keys.jobs, keys.waiting, keys.due, keys.slots, keys.slot_counts, keys.limited_counts, keys.waiting_list_prefix,
             *inner)  # fmt: skip
    entries = msgspec.json.encode([each.entry.decode() for each in leaving])
    args = (keys.slots_freed, _json(rules), entries, *words)
    return script_call(SETTLE_LIMITED, named, args, partial(_settled, keys.on_lane("g")), repeatable=True)


def _json(rules: Sequence[tuple[AdmissionRule, int]]) -> bytes:
    return msgspec.json.encode([rule.to_script_arguments(want) for rule, want in rules])


def _admitted(jobs: int, raw: Any) -> AdmissionReply:
    if raw == LEASE_LOST:
        return AdmissionReply(None, [])
    return AdmissionReply(raw[:jobs], [each / 1000 for each in raw[jobs:]])


def _pulled(keys: QueueKeys, raw: Any) -> AdmittedJobs:
    if raw == LEASE_LOST:
        return AdmittedJobs(LEASE_LOST, [], [], [])
    return _handed(keys, 0, *raw)


def _settled(keys: QueueKeys, raw: Any) -> AdmittedJobs:
    return _handed(keys, *raw)


def _handed(keys: QueueKeys, owned: int, entries: Any, told: Any) -> AdmittedJobs:
    found = [parse_entry(keys, entry, flat) for _stream, some in entries for entry, flat in some]
    return AdmittedJobs(owned, found, [each[0] for each in told], [each[1] / 1000 for each in told])
