"""Build the calls that keep plans, start runs of workflows, and move them on."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import msgspec

from celery5.broker.call import Call, Script, Word, decode_scores, decode_text, script_call, to_ms
from celery5.broker.keys import GROUP, Keys, QueueKeys
from celery5.protocol.job.delivery import MIN_DOCUMENT_TTL
from celery5.protocol.workflows.status import StepFailure

ADVANCE = Script.load(
    "workflows/advance",
    "clock",
    "idle_runs",
    "runs",
    "run_messages",
    "run_undo",
    "run_failures",
    "run_ends",
    "run_nodes",
    "run_maps",
    "run_children",
    "run_steps",
    "run_outcomes",
)
CLAIM_HOME = Script.load("workflows/claim_home")
STAGE = Script.load("workflows/stage", "idle_runs")
STAGE_ARGUMENTS = Script.load("workflows/stage_arguments")
WATCH = Script.load("workflows/watch")
DEFINE = Script.load("workflows/define")
FINISH = Script.load("workflows/finish")
READ_RUN = Script.load("workflows/read_run", "idle_runs")
SCAN_RUN = Script.load("workflows/scan_run", "idle_runs")

STEPS = 200
"""Jobs that one call sends at most: a script blocks the server while it runs."""
STAGED_LIFE = 120.0
"""Seconds after which what was published of a run is gone, unless the run is started."""


class FailedRun(NamedTuple):
    """A run that has failed or expired, for the log."""

    id: str
    # The name of its workflow.
    workflow: str
    # DEAD or EXPIRED.
    state: str
    # What has failed first; None when the run has expired.
    failure: StepFailure | None


class Advance(NamedTuple):
    """The reply of `advance`."""

    # How many records are left.
    left: int
    # How many entries the outbox has.
    outbox: int
    # The reply of each record that was given.
    replies: list[Any]
    # The error of a record that could not be applied; '' for none.
    problem: str = ""
    # The runs that have failed or expired, a hundred at most.
    failed: Sequence[FailedRun] = ()


class OutboxEntry(NamedTuple):
    """One entry of the outbox."""

    id: str
    # A record for the run's home, a job to publish, or a run whose jobs are to be revoked.
    fields: Mapping[str, bytes]


def pack_record(handler: str, *arguments: object) -> bytes:
    """Return what has happened in a run, for `advance`: the name of a handler there, and its arguments."""
    return msgspec.msgpack.encode([handler, *arguments])


def advance(
    keys: QueueKeys,
    records: Sequence[bytes] = (),
    *,
    ttl: float,
    steps: int = STEPS,
    is_worker: bool = False,
) -> Call[Advance]:
    """Apply records to the runs of a queue, and move on what can. Safe to repeat.

    Args:
        ttl: Seconds that a run is kept when it has ended; a minute at least, in which what it has yet to send is sent
            although the worker that was to do it has died.
        steps: Jobs that are sent at most.
        is_worker: The caller does what is left, so no worker has to be notified.
    """
    named = (
        keys.run_records,
        keys.run_prefix,
        keys.plan_prefix,
        keys.run_outbox,
        keys.live_runs,
        keys.past_runs,
        keys.jobs,
        keys.result_prefix,
        keys.normal,
        keys.high,
        keys.low,
        keys.idle_runs,
        keys.undoing_runs,
    )
    return script_call(
        ADVANCE,
        named,
        (
            steps,
            keys.wake,
            keys.queue,
            to_ms(max(ttl, MIN_DOCUMENT_TTL)),
            "1" if is_worker else "",
            *records,
        ),
        _advanced,
        repeatable=True,
    )


def claim_home(keys: Keys, run_id: str, home: str) -> Call[str]:
    """Claim the id of a run for a home, until it is started. Return the home that has it. Safe to repeat."""
    ms = to_ms(STAGED_LIFE)
    return script_call(CLAIM_HOME, (keys.run_home(run_id),), (home, ms), decode_text, repeatable=True)


def keep_home(keys: Keys, run_id: str, home: str, *, life: float) -> Call[bool]:
    """Keep where a run lives that has an id of the caller's. Safe to repeat."""
    return Call(("SET", keys.run_home(run_id), home, "PX", to_ms(life)), bool, repeatable=True)


def find_home(keys: Keys, run_id: str) -> Call[str]:
    """Return the home of a run with an id of the caller's; '' when none is known."""
    return Call(("GET", keys.run_home(run_id)), lambda raw: decode_text(raw or b""), repeatable=True)


def define_plan(keys: QueueKeys, digest: str, fields: Mapping[str, bytes]) -> Call[int]:
    """Keep nodes of a plan. Safe to repeat."""
    words: list[Word] = []
    for name, content in fields.items():
        words += [name, content]
    return script_call(DEFINE, (keys.plan(digest),), (to_ms(STAGED_LIFE), *words), int, repeatable=True)


def stage_items(
    keys: QueueKeys,
    run_id: str,
    node: int,
    before: int,
    items: Sequence[bytes],
    *,
    generation: int | None = None,
) -> Call[int]:
    """Put items of a map beside a run that is not live yet, or whose map waits for them. Safe to repeat.

    Args:
        before: How many items come before these.
        generation: How often the node that waits for them was started again; None when the run is not live yet.
    """
    words: tuple[Word, ...] = tuple(items)
    waiting = "" if generation is None else node
    named = (keys.run(run_id), keys.run_items(run_id, node), keys.idle_runs)
    return script_call(
        STAGE,
        named,
        (before, to_ms(STAGED_LIFE), run_id, waiting, generation or 0, *words),
        int,
        repeatable=True,
    )


def stage_arguments(keys: QueueKeys, run_id: str, first: int, texts: Sequence[bytes]) -> Call[int]:
    """Put arguments beside a run that is not live yet, from the number `first` on. Safe to repeat."""
    words: list[Word] = []
    for number, text in enumerate(texts, first):
        words += [number, text]
    named = (keys.run(run_id), keys.run_arguments(run_id), keys.idle_runs)
    return script_call(STAGE_ARGUMENTS, named, (to_ms(STAGED_LIFE), run_id, *words), int, repeatable=True)


def read_run(keys: QueueKeys, run_id: str, names: Sequence[str]) -> Call[dict[str, bytes]]:
    """Return fields of a run, those that it has, or that all runs of its plan share."""
    named = (keys.run(run_id), keys.idle_runs, keys.plan_prefix)
    return script_call(READ_RUN, named, (run_id, *names), partial(_found, names), repeatable=True)


def scan_run(keys: QueueKeys, run_id: str, cursor: str) -> Call[tuple[str, dict[str, bytes]]]:
    """Return some fields of a run, and the cursor for the next ones; "0" at the end."""
    named = (keys.run(run_id), keys.idle_runs)
    return script_call(SCAN_RUN, named, (run_id, cursor), _scanned, repeatable=True)


def read_plan(keys: QueueKeys, digest: str, names: Sequence[str]) -> Call[dict[str, bytes]]:
    """Return nodes of a plan, by their numbers, those that it has."""
    return Call(("HMGET", keys.plan(digest), *names), partial(_found, names), repeatable=True)


def scan_plan(keys: QueueKeys, digest: str, cursor: str) -> Call[tuple[str, dict[str, bytes]]]:
    """Return some nodes of a plan, and the cursor for the next ones; "0" at the end."""
    return Call(("HSCAN", keys.plan(digest), cursor, "COUNT", 500), _scanned, repeatable=True)


def read_bucket(keys: QueueKeys, run_id: str, node: int, bucket: int) -> Call[dict[int, bytes]]:
    """Return the results of one bucket of a map, by their position in it."""
    return Call(("HGETALL", f"{keys.run(run_id)}:{node}:r{bucket}"), _bucket, repeatable=True)


def read_bits(keys: QueueKeys, run_id: str, node: int, name: str) -> Call[bytes]:
    """Return a bitmap of a map: `done`, `bad` or `held` members."""
    return Call(("GET", f"{keys.run(run_id)}:{node}:{name}"), _bytes, repeatable=True)


def read_bit(keys: QueueKeys, run_id: str, node: int, name: str, member: int) -> Call[bool]:
    """Return whether a member of a map is in a bitmap."""
    return Call(("GETBIT", f"{keys.run(run_id)}:{node}:{name}", member), bool, repeatable=True)


def add_watch(keys: Keys, index: str, waiter: str, *, life: float) -> Call[int]:
    """Note for `life` seconds at least that a node of a run waits for an event with certain values. Safe to repeat."""
    return script_call(WATCH, (keys.event_waits(index),), (waiter, to_ms(life)), int, repeatable=True)


def remove_watch(keys: Keys, index: str, waiter: str) -> Call[int]:
    """Forget that a node waits for an event."""
    return Call(("SREM", keys.event_waits(index), waiter), int, repeatable=True)


def list_watches(keys: Keys, index: str) -> Call[list[str]]:
    """Return who waits for an event with certain values."""
    return Call(("SMEMBERS", keys.event_waits(index)), _texts, repeatable=True)


def has_outbox(keys: QueueKeys) -> Call[bool]:
    """Return whether anything was ever put into the outbox."""
    return Call(("EXISTS", keys.run_outbox), bool, repeatable=True)


def list_children(keys: QueueKeys, run_id: str, *, count: int) -> Call[list[str]]:
    """Return the runs that jobs of a run have returned, `count` at most."""
    return Call(("LRANGE", f"{keys.run(run_id)}:children", 0, count - 1), _texts, repeatable=True)


def count_outbox(keys: QueueKeys) -> Call[int]:
    """Return how many entries the outbox has."""
    return Call(("XLEN", keys.run_outbox), int, repeatable=True)


def count_records(keys: QueueKeys) -> Call[int]:
    """Return how many ends of jobs are not counted in their run yet."""
    return Call(("LLEN", keys.run_records), int, repeatable=True)


def read_places(keys: QueueKeys, ids: Sequence[str]) -> Call[list[bool]]:
    """Return of each job whether it is anywhere on its queue, runs, or is dead."""
    return Call(("HMGET", keys.jobs, *ids), lambda raw: [place is not None for place in raw], repeatable=True)


def create_outbox(keys: QueueKeys) -> Call[object]:
    """Create the consumer group of the outbox, unless it is there."""
    return Call(("XGROUP", "CREATE", keys.run_outbox, GROUP, "0"), lambda reply: reply, repeatable=True)


def read_outbox(keys: QueueKeys, worker: str, *, count: int) -> Call[list[OutboxEntry]]:
    """Take entries of the outbox for this worker, those that no other one has."""
    words = ("XREADGROUP", "GROUP", GROUP, worker, "COUNT", count, "STREAMS", keys.run_outbox, ">")
    return Call(words, _outbox_of_read)


def claim_outbox(keys: QueueKeys, worker: str, *, idle: float, count: int) -> Call[list[OutboxEntry]]:
    """Take entries of the outbox that another worker has had for `idle` seconds."""
    words = ("XAUTOCLAIM", keys.run_outbox, GROUP, worker, to_ms(idle), "0-0", "COUNT", count)
    return Call(words, lambda raw: _outbox(raw[1]), repeatable=True)


def remove_from_outbox(keys: QueueKeys, entries: Sequence[str]) -> Call[int]:
    """Remove entries that were performed. Safe to repeat."""
    return script_call(FINISH, (keys.run_outbox,), (GROUP, *entries), int, repeatable=True)


def list_live_runs(keys: QueueKeys, *, count: int) -> Call[list[str]]:
    """Return the ids of live runs."""
    return Call(("ZRANGE", keys.live_runs, 0, count - 1), _texts, repeatable=True)


def list_past_runs(keys: QueueKeys, *, count: int) -> Call[list[str]]:
    """Return the ids of runs that have ended lately, the last one first."""
    return Call(("ZREVRANGE", keys.past_runs, 0, count - 1), _texts, repeatable=True)


def list_undoing_runs(keys: QueueKeys, *, count: int) -> Call[dict[str, float]]:
    """Return the runs that stop, are undone, or were not completely undone, with since when, in seconds since 1970."""
    words = ("ZRANGE", keys.undoing_runs, 0, count - 1, "WITHSCORES")
    return Call(words, _since, repeatable=True)


def count_live_runs(keys: QueueKeys) -> Call[int]:
    """Return how many runs are live."""
    return Call(("ZCARD", keys.live_runs), int, repeatable=True)


def _advanced(raw: Any) -> Advance:
    failed = [
        FailedRun(
            decode_text(run),
            decode_text(workflow),
            decode_text(state),
            msgspec.json.decode(failure, type=StepFailure) if failure else None,
        )
        for run, workflow, state, failure in raw[4]
    ]
    return Advance(int(raw[0]), int(raw[1]), list(raw[2]), decode_text(raw[3]), failed)


def _scanned(raw: Any) -> tuple[str, dict[str, bytes]]:
    cursor, flat = raw
    return decode_text(cursor), {decode_text(name): value for name, value in _pairs(flat)}


def _found(names: Sequence[str], raw: Any) -> dict[str, bytes]:
    values = msgspec.convert(raw, list[bytes | None])
    return {name: value for name, value in zip(names, values, strict=True) if value is not None}


def _pairs(raw: Any) -> Iterable[tuple[bytes, bytes]]:
    """Return the pairs of a reply: a map in RESP3, a flat list in RESP2."""
    if hasattr(raw, "items"):
        return cast("Iterable[tuple[bytes, bytes]]", raw.items())
    return zip(raw[::2], raw[1::2], strict=True)


def _bytes(raw: Any) -> bytes:
    return msgspec.convert(raw, bytes | None) or b""


def _bucket(raw: Any) -> dict[int, bytes]:
    return {int(name): msgspec.convert(value, bytes) for name, value in _pairs(raw)}


def _outbox(entries: Any) -> list[OutboxEntry]:
    found = list[OutboxEntry]()
    for entry in entries or ():
        if entry is None or entry[1] is None:
            continue
        flat = entry[1]
        fields = {decode_text(name): value for name, value in zip(flat[::2], flat[1::2], strict=True)}
        found.append(OutboxEntry(decode_text(entry[0]), fields))
    return found


def _outbox_of_read(raw: Any) -> list[OutboxEntry]:
    streams: Any = raw.items() if hasattr(raw, "items") else raw or ()
    return [entry for _, entries in streams for entry in _outbox(entries)]


def _since(raw: Any) -> dict[str, float]:
    return {run: score / 1000 for run, score in decode_scores(raw)}


def _texts(raw: Any) -> list[str]:
    return [decode_text(item) for item in raw]
