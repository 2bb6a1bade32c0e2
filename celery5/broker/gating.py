"""Gating: the trips to Redis that let jobs through a gate, hold them before it, and tell of who waits.

Floor: broker. Reads and writes: what the Lua files of the same names say; all keys come from `keys.py`.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import msgspec

from celery5.broker.call import Call, Script, Word, scripted
from celery5.broker.calls import Entry, entry_on
from celery5.broker.keys import GROUP, QueueKeys
from celery5.protocol.delivery import Delivery
from celery5.protocol.limits import Rule

ADMIT = Script.load("admit", part="gates")
LINE_UP = Script.load("line_up", part="gates")
PULL = Script.load("pull", part="gates")
SETTLE_GATED = Script.load("settle_gated", part="gates", inner="settle")

LOST = -1
"""The worker has lost its lease, and nothing was done."""
RUNS, WAITS, REVOKED, GONE = 1, 0, -1, -2
"""What became of a job at the gate."""


class Asked(NamedTuple):
    """One job at the gate, as `admit.lua` takes it. `how` is `run`, `wait` or `count`."""

    entry: bytes
    id: str
    line: str
    deliveries: int
    expires: str
    how: str


class Admitted(msgspec.Struct, frozen=True):
    """What became of each job (None when the lease is lost), and in how many seconds each rule's rate lets the next one
    through: 0 where nobody waits for that."""

    fates: list[int] | None
    waits: list[float]


class Handed(msgspec.Struct, frozen=True):
    """What a gate has handed to this worker; for each rule how many, and as in `Admitted`. `owned` is how many outcomes
    were this worker's; LOST when it has no lease."""

    owned: int
    entries: list[Entry]
    counts: list[int]
    waits: list[float]


def admit(
    keys: QueueKeys, worker: str, jobs: Sequence[Asked], rules: Sequence[tuple[Rule, int]]
) -> Call[Admitted]:
    """Ask whether jobs that this worker has read may run, by `rules`. Safe to repeat."""
    results = tuple([keys.result(each.id) for each in jobs])
    words: tuple[Word, ...] = tuple([word for each in jobs for word in each])
    named = (keys.normal, keys.high, keys.low, keys.handed, keys.leases, keys.jobs, keys.waiting, keys.due,
             keys.slots, keys.counts, keys.held, keys.room_prefix, *results)  # fmt: skip
    reply = partial(_admitted, len(jobs))
    return scripted(ADMIT, named, (GROUP, worker, keys.free, _json(rules), *words), reply, repeatable=True)


def line_up(keys: QueueKeys, jobs: Sequence[tuple[str, bytes, str, str]]) -> Call[int]:
    """Put jobs (id, envelope, line, when it expires) of the lane of `keys` into their lines; gives how many were new.
    Safe to repeat: a known id is left alone."""
    results = tuple([keys.result(each[0]) for each in jobs])
    words: tuple[Word, ...] = tuple([word for each in jobs for word in each])
    named = (keys.jobs, keys.waiting, keys.due, keys.held, keys.room_prefix, *results)
    return scripted(LINE_UP, named, (keys.free, keys.lane, *words), int, repeatable=True)


def pull(keys: QueueKeys, worker: str, rules: Sequence[tuple[Rule, int]]) -> Call[Handed]:
    """Take up to so many jobs of each rule's task out of the waiting room. Not repeatable: what a lost answer carried
    is found among what is this worker's (`calls.mine`)."""
    named = (keys.handed, keys.leases, keys.jobs, keys.waiting, keys.due, keys.slots, keys.counts, keys.held,
             keys.room_prefix)  # fmt: skip
    return scripted(PULL, named, (GROUP, worker, _json(rules)), partial(_pulled, keys.on("g")))


def settle_gated(
    keys: QueueKeys, settle: Call[int], leaving: Sequence[Delivery], rules: Sequence[tuple[Rule, int]]
) -> Call[Handed]:
    """As the call `settle`, for a batch in which those that are `leaving` have slots: these are free then, and who
    waits is handed over."""
    count = cast("int", settle.words[2])
    inner = cast("tuple[str, ...]", settle.words[3 : 3 + count])
    words = settle.words[3 + count :]
    named = (keys.handed, keys.jobs, keys.waiting, keys.due, keys.slots, keys.counts, keys.held, keys.room_prefix,
             *inner)  # fmt: skip
    entries = msgspec.json.encode([each.entry.decode() for each in leaving])
    args = (keys.free, _json(rules), entries, *words)
    return scripted(SETTLE_GATED, named, args, partial(_settled, keys.on("g")), repeatable=True)


def _json(rules: Sequence[tuple[Rule, int]]) -> bytes:
    return msgspec.json.encode([rule.words(want) for rule, want in rules])


def _admitted(jobs: int, raw: Any) -> Admitted:
    if raw == LOST:
        return Admitted(None, [])
    return Admitted(raw[:jobs], [each / 1000 for each in raw[jobs:]])


def _pulled(keys: QueueKeys, raw: Any) -> Handed:
    if raw == LOST:
        return Handed(LOST, [], [], [])
    return _handed(keys, 0, *raw)


def _settled(keys: QueueKeys, raw: Any) -> Handed:
    return _handed(keys, *raw)


def _handed(keys: QueueKeys, owned: int, entries: Any, told: Any) -> Handed:
    found = [entry_on(keys, entry, flat) for _stream, some in entries for entry, flat in some]
    return Handed(owned, found, [each[0] for each in told], [each[1] / 1000 for each in told])
