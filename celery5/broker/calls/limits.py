"""Build the calls that admit jobs, put them on waiting lists, and change limits."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar, cast

import msgspec

from celery5.broker.call import Call, Script, Word, script_call, to_ms
from celery5.broker.calls.jobs import Entry, parse_entry
from celery5.broker.keys import GROUP, Keys, QueueKeys
from celery5.errors import Misconfigured
from celery5.protocol.job.delivery import Delivery
from celery5.protocol.limit_rules import ImposedLimits, merge_limits
from celery5.protocol.limits import AdmissionRule, LimitOverride, Rate, Suspension, escape_word

ADMIT = Script.load("limits/admit", "lease", "time_sent", "admission")
ADD_TO_WAITING_LIST = Script.load("limits/add_to_waiting_list", "admission")
ADMIT_WAITING = Script.load("limits/admit_waiting", "lease", "admission")
SETTLE_LIMITED = Script.load(
    "limits/settle_limited",
    "lease",
    "clock",
    "ending",
    "timing",
    "member",
    "foreign",
    "causes",
    "admission",
    inner="job/settle",
)

TAKE_STARTS = Script.load("limits/take_starts", "clock")
RETURN_STARTS = Script.load("limits/return_starts")

LEASE_LOST = -1
"""The worker has lost its lease, and nothing was done."""
ADMITTED, WAITING, REVOKED, GONE = 1, 0, -1, -2
"""The result of admission for one job."""


class AdmissionRequest(NamedTuple):
    """One job that asks for admission, as `admit.lua` takes it. `mode` is `run`, `wait` or `count`."""

    entry: bytes
    id: str
    waiting_list: str
    deliveries: int
    expires: str
    mode: str


class AdmissionReply(msgspec.Struct, frozen=True):
    """The result for each job (None when the lease is lost), and for each rule the seconds until its rate admits the
    next job: 0 when no job waits for that."""

    outcomes: list[int] | None
    delays: list[float]


class AdmittedJobs(msgspec.Struct, frozen=True):
    """Jobs admitted from waiting lists for this worker.

    `owned` is how many outcomes were this worker's; LEASE_LOST when it has no lease.
    """

    owned: int
    entries: list[Entry]
    counts: list[int]
    delays: list[float]


def admit(
    keys: QueueKeys, worker: str, jobs: Sequence[AdmissionRequest], rules: Sequence[tuple[AdmissionRule, int]]
) -> Call[AdmissionReply]:
    """Request admission by `rules` for jobs that this worker has read. Safe to repeat."""
    results = tuple([keys.result(job.id) for job in jobs])
    words: tuple[Word, ...] = tuple([word for job in jobs for word in job])
    named = (keys.normal, keys.high, keys.low, keys.handed, keys.leases, keys.jobs, keys.waiting, keys.due,
             keys.slots, keys.slot_counts, keys.limited_counts, keys.waiting_list_prefix, *results)  # fmt: skip
    reply = partial(_admission_reply, len(jobs))
    return script_call(
        ADMIT, named, (GROUP, worker, keys.slots_freed, _json(rules), *words), reply, repeatable=True
    )


def add_to_waiting_list(keys: QueueKeys, jobs: Sequence[tuple[str, bytes, str, str]]) -> Call[int]:
    """Put jobs (id, Command, waiting list, expiry) of one lane on their waiting lists. Return how many were new.

    Safe to repeat: a known id is left alone.
    """
    results = tuple([keys.result(job_id) for job_id, *_ in jobs])
    words: tuple[Word, ...] = tuple([word for job in jobs for word in job])
    named = (keys.jobs, keys.waiting, keys.due, keys.limited_counts, keys.waiting_list_prefix, *results)
    return script_call(
        ADD_TO_WAITING_LIST, named, (keys.slots_freed, keys.lane, *words), int, repeatable=True
    )


def admit_waiting(
    keys: QueueKeys, worker: str, rules: Sequence[tuple[AdmissionRule, int]]
) -> Call[AdmittedJobs]:
    """Admit up to this many waiting jobs of each rule's task.

    Not repeatable: what a lost answer carried is found by `read_pending`.
    """
    named = (keys.handed, keys.leases, keys.jobs, keys.waiting, keys.due, keys.slots, keys.slot_counts,
    keys.limited_counts,
             keys.waiting_list_prefix)  # fmt: skip
    return script_call(
        ADMIT_WAITING, named, (GROUP, worker, _json(rules)), partial(_taken_jobs, keys.on_lane("g"))
    )


def settle_limited(
    keys: QueueKeys,
    settle: Call[int],
    leaving: Sequence[Delivery],
    rules: Sequence[tuple[AdmissionRule, int]],
) -> Call[AdmittedJobs]:
    """Settle a batch in which the `leaving` jobs hold slots: these become free, and waiting jobs are admitted."""
    count = cast("int", settle.words[2])
    inner = cast("tuple[str, ...]", settle.words[3 : 3 + count])
    words = settle.words[3 + count :]
    named = (keys.handed, keys.jobs, keys.waiting, keys.due, keys.slots, keys.slot_counts, keys.limited_counts,
    keys.waiting_list_prefix,
             *inner)  # fmt: skip
    entries = msgspec.json.encode([delivery.entry.decode() for delivery in leaving])
    args = (keys.slots_freed, _json(rules), entries, *words)
    return script_call(SETTLE_LIMITED, named, args, partial(_settled, keys.on_lane("g")), repeatable=True)


def count_waiting(keys: QueueKeys, tasks: Sequence[str]) -> Call[dict[str, int]]:
    """Count the jobs of tasks that wait on a queue."""
    words = ("HMGET", keys.limited_counts, *map(escape_word, tasks))
    return Call(words, partial(_counts_by_task, tasks), repeatable=True)


def _counts_by_task(tasks: Sequence[str], raw: list[bytes | None]) -> dict[str, int]:
    return {task: int(count or 0) for task, count in zip(tasks, raw, strict=True)}


class TakenStarts(msgspec.Struct, frozen=True):
    """Starts of the rate of a kind: how many, when Redis noted them, and the seconds until the next one."""

    count: int
    noted_at: int  # in ms since 1970
    delay: float


MAX_STARTS = 1000
"""Starts of a rate that are read to count them."""


def read_use(keys: QueueKeys, rule: AdmissionRule) -> tuple[Call[int], Call[int], Call[list[int]], Call[int]]:
    """Return calls for how much of the limits of a task is in use on a queue.

    Their replies are: how many jobs have a slot, how many wait, the last starts of the rate in ms, and the ms until
    these are removed. Of a rate per worker there are no starts.
    """
    task = escape_word(rule.task)
    starts = f"{keys.waiting_list_prefix}starts {task}"
    return (
        Call(("HGET", keys.slot_counts, f"{task} "), _count, repeatable=True),
        Call(("HGET", keys.limited_counts, task), _count, repeatable=True),
        Call(("LRANGE", starts, -MAX_STARTS, -1), _moments, repeatable=True),
        Call(("PTTL", starts), int, repeatable=True),
    )


def count_starts(rate: Rate, starts: Sequence[int], left: int) -> int:
    """Return how many jobs began in the period of a rate that ends now, MAX_STARTS at most.

    Args:
        rate: The rate.
        starts: Its last starts in ms, the oldest first.
        left: The ms until they are removed, which is one `window` after the last one: so it says what time it is.
    """
    if not starts:
        return 0
    begin = starts[-1] + rate.window - left - rate.span * 1000
    return sum(start > begin for start in starts)


def _count(raw: bytes | None) -> int:
    return int(raw or 0)


def _moments(raw: Sequence[bytes]) -> list[int]:
    return [int(moment) for moment in raw]


def take_starts(keys: Keys, kind: str, want: int, rate: Rate) -> Call[TakenStarts]:
    """Take up to `want` starts of the rate of a kind. Not repeatable: those of a lost reply count as used."""
    args = (want, rate.count, rate.window)
    return script_call(TAKE_STARTS, (keys.kind_starts(kind),), args, _taken_starts)


def return_starts(keys: Keys, kind: str, starts: Sequence[tuple[int, int]]) -> Call[int]:
    """Return starts, each group with the time at which it was noted and how many it has.

    Not repeatable: other workers may have taken starts at the same time.
    """
    words = tuple(word for group in starts for word in group)
    return script_call(RETURN_STARTS, (keys.kind_starts(kind),), words, int)


def _taken_starts(raw: Any) -> TakenStarts:
    count, noted_at, delay = raw
    return TakenStarts(int(count), int(noted_at), int(delay) / 1000)


def _json(rules: Sequence[tuple[AdmissionRule, int]]) -> bytes:
    return msgspec.json.encode([rule.to_script_arguments(want) for rule, want in rules])


def _admission_reply(jobs: int, raw: Any) -> AdmissionReply:
    if raw == LEASE_LOST:
        return AdmissionReply(None, [])
    return AdmissionReply(raw[:jobs], [ms / 1000 for ms in raw[jobs:]])


def _taken_jobs(keys: QueueKeys, raw: Any) -> AdmittedJobs:
    if raw == LEASE_LOST:
        return AdmittedJobs(LEASE_LOST, [], [], [])
    return _admitted_jobs(keys, 0, *raw)


def _settled(keys: QueueKeys, raw: Any) -> AdmittedJobs:
    return _admitted_jobs(keys, *raw)


def _admitted_jobs(keys: QueueKeys, owned: int, streams: Any, counts: Any) -> AdmittedJobs:
    entries = [parse_entry(keys, entry, flat) for _stream, some in streams for entry, flat in some]
    return AdmittedJobs(owned, entries, [count for count, _ in counts], [delay / 1000 for _, delay in counts])


SET_OVERRIDE = Script.load("limits/set_override")
LIST_OVERRIDES = Script.load("limits/list_overrides")

T = TypeVar("T", LimitOverride, Suspension)


class StoredOverrides(msgspec.Struct, frozen=True):
    """The overrides of an application's tasks, by name: `limits` (and rates) that operators set, and which tasks are
    `suspended`; and the limits that a Scheduler imposes."""

    limits: dict[str, LimitOverride]
    suspended: dict[str, Suspension]
    imposed: ImposedLimits = ImposedLimits()
    lapse: float = 0.0  # seconds until the Scheduler's limits lapse, unless it renews them
    unreadable: tuple[str, ...] = ()  # the tasks whose override cannot be read, and does not hold

    @property
    def effective_limits(self) -> Mapping[str, LimitOverride]:
        """Return the limits and rates that hold: a Scheduler's take precedence over those of operators."""
        return merge_limits(self.limits, self.imposed)


def set_override(keys: Keys, task: str, override: LimitOverride | None) -> Call[bool]:
    """Override the limit or rate of a task; None removes the override. Return whether that changes anything."""
    words = b"" if override is None else msgspec.json.encode(override)
    return script_call(
        SET_OVERRIDE, (keys.limits,), (keys.limits, task, words, ""), bool, repeatable=True, merge=any
    )


def suspend_task(keys: Keys, task: str, suspension: Suspension) -> Call[bool]:
    """Suspend a task, or change the reason for it."""
    words = msgspec.json.encode(suspension)
    return script_call(
        SET_OVERRIDE, (keys.suspended,), (keys.limits, task, words, ""), bool, repeatable=True, merge=any
    )


def suspend_if_unchanged(
    keys: Keys, task: str, suspension: Suspension, before: Suspension | None
) -> Call[bool]:
    """Suspend a task if its state is still `before` (None: not suspended). Return whether that changes anything."""
    words, only = msgspec.json.encode(suspension), b"-" if before is None else msgspec.json.encode(before)
    return script_call(
        SET_OVERRIDE, (keys.suspended,), (keys.limits, task, words, only), bool, repeatable=True, merge=any
    )


def resume_task(keys: Keys, task: str, expected: Suspension | None = None) -> Call[bool]:
    """Let a task's jobs run again; with `expected`, only if it is suspended in that way.

    Return whether that changes anything.
    """
    words = b"" if expected is None else msgspec.json.encode(expected)
    return script_call(
        SET_OVERRIDE, (keys.suspended,), (keys.limits, task, "", words), bool, repeatable=True, merge=any
    )


def list_overrides(keys: Keys) -> Call[StoredOverrides]:
    """Return the current overrides. Those that cannot be read are skipped: a newer version may have written them."""
    return script_call(
        LIST_OVERRIDES,
        (keys.limits, keys.suspended, keys.imposed_limits),
        (),
        _overrides,
        repeatable=True,
        merge=_merge_overrides,
    )


CLAIM_RULES_TURN = Script.load("scaling/claim_scaling_turn", "clock")
IMPOSE = Script.load("limits/impose")

RULES_TURN = 10.0
"""Seconds after which another Scheduler takes the turn of one that is silent."""
IMPOSED_TTL = 12.0
"""Seconds after which what a Scheduler imposes lapses, unless it is renewed."""


class RulesTurn(NamedTuple):
    """Whether it is this Scheduler's turn to impose limits, what is imposed if so, and the broker's time."""

    mine: bool
    imposed: ImposedLimits
    now: float


def claim_rules_turn(keys: Keys, scheduler: str, *, seconds: float = RULES_TURN) -> Call[RulesTurn]:
    """Take or keep the turn for so long, unless another Scheduler has it; 0 gives it up."""
    named = (keys.limit_rules_turn, keys.imposed_limits)
    return script_call(CLAIM_RULES_TURN, named, (scheduler, to_ms(seconds)), _rules_turn, repeatable=True)


def impose_limits(keys: Keys, scheduler: str, imposed: ImposedLimits) -> Call[bool]:
    """Impose limits until they lapse, in place of those before. Return False if it is another Scheduler's turn."""
    words = msgspec.json.encode(imposed) if imposed.rules else b""
    named = (keys.limit_rules_turn, keys.imposed_limits)
    return script_call(
        IMPOSE, named, (scheduler, words, to_ms(IMPOSED_TTL), keys.limits), bool, repeatable=True
    )


def _rules_turn(raw: Any) -> RulesTurn:
    return RulesTurn(raw[0] == 1, _read_imposed(raw[1]), raw[2] / 1000)


def _read_imposed(raw: bytes) -> ImposedLimits:
    """Return what is imposed. What cannot be read is as if it were not there: a newer version may have written it."""
    try:
        return msgspec.json.decode(raw, type=ImposedLimits).validate() if raw else ImposedLimits()
    except (msgspec.DecodeError, Misconfigured, RecursionError):
        return ImposedLimits()


def _overrides(raw: Sequence[Any]) -> StoredOverrides:
    imposed, unreadable = _read_imposed(raw[2]), list[str]()
    return StoredOverrides(
        _read(raw[0], LimitOverride, unreadable),
        _read(raw[1], Suspension, unreadable),
        imposed,
        max(0, raw[3]) / 1000 if imposed.rules else 0.0,
        tuple(unreadable),
    )


def _merge_overrides(replies: Sequence[StoredOverrides]) -> StoredOverrides:
    """Return the overrides of all brokers. Of two for one task the first broker's, which is the default one, holds."""
    limits: dict[str, LimitOverride] = {}
    suspended: dict[str, Suspension] = {}
    imposed, lapse = ImposedLimits(), 0.0
    unreadable = [task for reply in replies for task in reply.unreadable]
    for reply in reversed(replies):
        limits |= reply.limits
        suspended |= reply.suspended
        if reply.imposed.rules:
            imposed, lapse = reply.imposed, reply.lapse
    return StoredOverrides(limits, suspended, imposed, lapse, tuple(unreadable))


def _read(words: Sequence[bytes], kind: type[T], unreadable: list[str]) -> dict[str, T]:
    """Return the overrides by their tasks; the tasks of those that cannot be read are added to `unreadable`."""
    found: dict[str, T] = {}
    for task, what in zip(words[::2], words[1::2], strict=True):
        name = task.decode(errors="replace")
        try:
            found[name] = msgspec.json.decode(what, type=kind)
        except (msgspec.DecodeError, RecursionError):
            unreadable.append(name)
    return found
