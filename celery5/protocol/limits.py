"""Limit how many jobs of a task run at once, and how many begin in a period of time.

A task declares `DeclaredLimits`; an operator or a Scheduler may set a `LimitOverride` at run time. Together they make
the current `AdmissionRule`. A task without a rule is not limited, at no cost.
"""

import math
from collections.abc import Callable
from typing import Any, Literal

import msgspec

from celery5.errors import Misconfigured
from celery5.protocol.task_kinds import TASK_KINDS
from celery5.protocol.text_values import RATE, parse_assignments
from celery5.similar_names import did_you_mean

Per = Literal["all", "worker"]
"""Whether a limit counts for all workers together, or for each worker."""

MAX_LIMIT = 1_000_000
"""The highest limit or rate."""
SLACK_SHARE = 1 / 20
"""The slack of a rate, as a share of its period."""
MIN_SLACK, MAX_SLACK = 0.05, 1.0
"""The bounds of the slack, in seconds."""
MAX_EXPIRY_MS = 10**15
"""Milliseconds since 1970: the latest expiry."""


class Limit(msgspec.Struct, frozen=True):
    """At most `most` jobs of a task run at once, of all workers or `per` worker; 0 rejects every job."""

    most: int
    per: Per = "all"

    def validate(self, task: str) -> "Limit":
        """Return itself. Raises Misconfigured."""
        _check_count(self.most, task, "limit", 0)
        _check_per(self.per, task)
        return self


class Range(msgspec.Struct, frozen=True):
    """A computed limit: the number that `compute()` returns, kept from `least` to `most`.

    Each worker calls it at each heartbeat, a few times in ten seconds, so it must be quick. Workers get the same number
    only if they compute it from shared data. If it raises, the last value stays, and the error is logged once.
    """

    least: int
    most: int
    compute: Callable[[], float]
    per: Per = "all"

    def validate(self, task: str) -> "Range":
        """Return itself. Raises Misconfigured."""
        _check_count(self.least, task, "limit", 0)
        _check_count(self.most, task, "limit", 1)
        _check_per(self.per, task)
        if self.least > self.most:
            raise Misconfigured(
                f"task {task}: Range({self.least}, {self.most}): the first bound is the lower one"
            )
        if not callable(self.compute):
            raise Misconfigured(
                f"task {task}: Range(compute={self.compute!r}): give a function that gives a number"
            )
        return self

    def clamp(self, computed: float) -> int:
        """Return a computed value within the bounds. Raises ValueError if it is not a number."""
        value: object = computed
        is_number = isinstance(value, int | float) and not isinstance(value, bool)  # pyright: ignore[reportUnnecessaryIsInstance]
        if not is_number or math.isnan(computed):
            raise ValueError(f"{computed!r} is no number")
        return int(min(max(computed, self.least), self.most))


class Rate(msgspec.Struct, frozen=True):
    """How many jobs of a task may begin in any period of a length, on all workers or `per` worker."""

    text: str  # `200/m`, `5/s`, `1000/h`, `10/d`, `3/10s`, `1/1.5s`, `0.5/m`
    per: Per = "all"

    @property
    def count(self) -> int:
        """Return how many jobs may begin in one period."""
        return int(RATE.parse(self.text).count)

    @property
    def span(self) -> float:
        """Return the period in seconds."""
        return RATE.parse(self.text).seconds

    @property
    def slack(self) -> float:
        """Return the seconds within which an admitted job must begin.

        Jobs that begin in a period were admitted in it or at most this many seconds before, so admissions are counted
        over both.
        """
        return min(max(self.span * SLACK_SHARE, MIN_SLACK), MAX_SLACK)

    @property
    def window(self) -> int:
        """Return the ms over which admissions are counted."""
        return math.ceil((self.span + self.slack) * 1000)

    def validate(self, task: str) -> "Rate":
        """Return itself. Raises Misconfigured."""
        try:
            RATE.parse(str(self.text))
            is_rate = "/" in self.text
        except (Misconfigured, TypeError):
            is_rate = False
        if not is_rate:
            raise Misconfigured(f"task {task}: rate {RATE.make_error(self.text)}")
        _check_count(self.count, task, "rate_limit", 1)
        _check_per(self.per, task)
        return self


class DeclaredLimits(msgspec.Struct, frozen=True):
    """The limits that a task declares."""

    limit: Limit | Range | None = None
    rate: Rate | None = None
    keyed: bool = False  # the limit counts for each concurrency key
    fair: bool = False  # each fair key has a waiting list, and the lists take turns


class LimitOverride(msgspec.Struct, frozen=True, omit_defaults=True):
    """A limit or a rate that was set on a task at run time."""

    limit: int | None = None
    rate: str = ""
    by: str = ""  # who set it
    since: float = 0.0  # seconds since 1970

    def validate(self, task: str) -> "LimitOverride":
        """Return itself. Raises Misconfigured."""
        if self.limit is not None:
            _check_count(self.limit, task, "limit", 0)
        if self.rate:
            Rate(self.rate).validate(task)
        return self


class Suspension(msgspec.Struct, frozen=True, omit_defaults=True):
    """The suspension of a task. Times are seconds since 1970."""

    why: str = ""
    by: str = ""
    since: float = 0.0
    until: float = 0.0  # 0: until it is resumed


class AdmissionRule(msgspec.Struct, frozen=True):
    """The limits of one task now."""

    task: str
    max_running: int | None = None  # None: no limit
    per: Per = "all"
    rate: Rate | None = None
    keyed: bool = False
    fair: bool = False
    suspended: bool = False
    kind: str = ""  # of the task, if all tasks of its kind have a rate together
    kind_rate: Rate | None = None

    @property
    def slack(self) -> float | None:
        """Return the seconds within which an admitted job must begin; None if no rate holds."""
        return min((rate.slack for rate in (self.rate, self.kind_rate) if rate is not None), default=None)

    @property
    def is_empty(self) -> bool:
        """Return whether nothing is limited: jobs wait only for a worker that has a slot for their kind."""
        return not (self.has_limit or self.suspended)

    @property
    def has_limit(self) -> bool:
        """Return whether its jobs have slots of a limit. Those of a task that is only suspended have none."""
        return bool(self.max_running is not None or self.rate or self.kind_rate or self.keyed or self.fair)

    @property
    def needs_start(self) -> bool:
        """Return whether each job needs a start of the rate of its kind."""
        return self.kind_rate is not None and not self.rejects_all and not self.suspended

    @property
    def rejects_all(self) -> bool:
        """Return whether all jobs are rejected. Those of a suspended task are held instead."""
        return self.max_running == 0 and not self.suspended

    def describe(self) -> str:
        """Return what holds jobs of the task, in words: `rate 3/s of push`, `limit 2 per key of sync`."""
        if self.suspended:
            return f"{self.task} is suspended"
        holds: list[str] = []
        if self.rate is not None:
            holds.append(_describe_rate(self.rate))
        if self.max_running is not None:
            holds.append(_describe_limit(str(self.max_running), self.per, keyed=self.keyed))
        if holds:
            return f"{' and '.join(holds)} of {self.task}"
        if self.kind_rate is not None:
            return _describe_kind_rate(self.kind, self.kind_rate)
        return f"{_TURNS} of {self.task}"

    def to_script_arguments(self, job_count: int) -> dict[str, Any]:
        """Return the rule as the scripts take it, for a worker with capacity for `job_count` jobs.

        They know nothing of the rate of a kind: it holds for all queues, and the worker counts it before.
        """
        max_running = -1 if self.max_running is None or self.rejects_all else self.max_running
        rate = None if self.rejects_all else self.rate
        return {
            "task": escape_word(self.task),
            "most": max_running,
            "per_worker": self.per == "worker",
            "rate": rate.count if rate else 0,
            "window": rate.window if rate else 0,
            "rate_per_worker": bool(rate and rate.per == "worker"),
            "fair": self.fair,
            "keyed": self.keyed,
            "suspended": self.suspended,
            "in_order": self.is_empty,
            "want": 0 if self.suspended else job_count,
        }


_TURNS = "turns of the keys"


def _describe_rate(rate: Rate) -> str:
    return f"rate {rate.text}{_describe_per(rate.per)}"


def _describe_limit(count: str, per: Per, *, keyed: bool) -> str:
    return f"limit {count}{' per key' if keyed else _describe_per(per)}"


def _describe_kind_rate(kind: str, rate: Rate) -> str:
    return f"rate {rate.text} of all {kind} tasks"


def _describe_per(per: Per) -> str:
    return " per worker" if per == "worker" else ""


def describe_declared_limits(declared: DeclaredLimits | None, kind: str, kind_rate: Rate | None) -> str:
    """Return the declared limits of a task and the rate of its kind, in words; '' if there are none.

    A declared limit is left out if there is a rate: it has no effect then.
    """
    declared = declared or DeclaredLimits()
    holds: list[str] = []
    if declared.rate is not None:
        holds.append(_describe_rate(declared.rate))
    elif declared.limit is not None:
        limit = declared.limit
        count = str(limit.most) if isinstance(limit, Limit) else f"{limit.least} to {limit.most}"
        holds.append(_describe_limit(count, limit.per, keyed=declared.keyed))
    if kind_rate is not None:
        holds.append(_describe_kind_rate(kind, kind_rate))
    if declared.fair:
        holds.append(_TURNS)
    return " and ".join(holds)


def make_admission_rule(
    task: str,
    declared: DeclaredLimits | None,
    *,
    computed: int | None,
    override: LimitOverride | None,
    suspended: bool,
    kind: str = "",
    kind_rate: Rate | None = None,
) -> AdmissionRule | None:
    """Return the rule of a task now; None when it is not limited. `computed` is the value of a Range.

    An override replaces the declared value. A declared limit does not count if there is a rate; an overriding limit
    counts beside it, and so does the rate of the task's kind. Jobs of a suspended task are held; those of a task with
    the limit 0 are rejected.
    """
    declared = declared or DeclaredLimits()
    rate = Rate(override.rate) if override and override.rate else declared.rate
    max_running, per = (None, "all") if rate is not None else _declared(declared, computed)
    if override is not None and override.limit is not None:
        max_running, per = override.limit, declared.limit.per if declared.limit else "all"
    rule = AdmissionRule(
        task,
        max_running,
        per,
        rate,
        keyed=declared.keyed and declared.rate is None,
        fair=declared.fair,
        suspended=suspended,
        kind=kind if kind_rate is not None else "",
        kind_rate=kind_rate,
    )
    return None if rule.is_empty else rule


def _declared(declared: DeclaredLimits, computed: int | None) -> tuple[int | None, Per]:
    limit = declared.limit
    if limit is None:
        return None, "all"
    if type(limit) is Limit:
        return limit.most, limit.per
    assert type(limit) is Range
    return (limit.most if computed is None else computed), limit.per


KIND_PREFIX = "kind "
"""What stands before a kind of task where its rate is stored among the overrides of tasks."""


def parse_kind_rates(text: str) -> dict[str, Rate]:
    """Return the rates of kinds of tasks, from `KIND=RATE`, separated by spaces or commas. Raises Misconfigured."""
    rates = parse_assignments(text, "write thread=200/m")
    return {kind: make_kind_rate(kind, rate) for kind, rate in rates.items()}


def make_kind_rate(kind: str, rate: str) -> Rate:
    """Return the rate of a kind of task. Raises Misconfigured."""
    if kind not in TASK_KINDS:
        suggestion = did_you_mean(kind, TASK_KINDS, otherwise=f"there are {', '.join(TASK_KINDS)}")
        raise Misconfigured(f"{kind!r} is no kind of task: {suggestion}")
    try:
        return Rate(rate).validate(kind)
    except Misconfigured:
        raise Misconfigured(
            f"kind {kind}: rate {rate!r}: write a whole number and a period, such as 200/m"
        ) from None


def escape_word(word: str) -> str:
    """Return a name or key as one word: the scripts split words at spaces."""
    return word.replace("%", "%25").replace(" ", "%20")


def unescape_word(word: str) -> str:
    """Return the name or key that `escape_word` encoded."""
    return word.replace("%20", " ").replace("%25", "%")


def get_waiting_list(rule: AdmissionRule, concurrency_key: str, fair_key: str) -> str:
    """Return the waiting list of a job, in three words: its task, its fair key, its concurrency key."""
    fair = escape_word(fair_key) if rule.fair else ""
    return f"{escape_word(rule.task)} {fair} {escape_word(concurrency_key) if rule.keyed else ''}"


def format_expiry(expires: float | None) -> str:
    """Return when a waiting job expires, as the scripts take it: ms since 1970, '' for never."""
    return "" if expires is None else str(min(int(expires * 1000), MAX_EXPIRY_MS))


def parse_declared_limits(
    task: str, limit: "int | Limit | Range | None", rate: "str | Rate | None", *, keyed: bool, fair: bool
) -> DeclaredLimits | None:
    """Return the limits that a task declares; None when there are none. Raises Misconfigured."""
    if limit is None and rate is None and not keyed and not fair:
        return None
    if isinstance(limit, int) and not isinstance(limit, bool):
        limit = Limit(limit)
    if isinstance(rate, str):
        rate = Rate(rate)
    if limit is not None and not isinstance(limit, Limit | Range):
        raise Misconfigured(f"task {task}: limit is {limit!r}: give a number, a Limit or a Range")
    if rate is not None and not isinstance(rate, Rate):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise Misconfigured(f"task {task}: rate_limit is {rate!r}: give a text such as '200/m', or a Rate")
    if keyed and limit is None:
        raise Misconfigured(
            f"task {task}: concurrency_key says what the limit is counted by: give limit, too"
        )
    return DeclaredLimits(limit and limit.validate(task), rate and rate.validate(task), keyed, fair)


def _check_count(count: object, task: str, name: str, minimum: int) -> None:
    if not isinstance(count, int) or isinstance(count, bool) or not minimum <= count <= MAX_LIMIT:
        raise Misconfigured(
            f"task {task}: {name} is {count!r}: give a whole number from {minimum} to {MAX_LIMIT:,}"
        )


def _check_per(per: object, task: str) -> None:
    if per not in ("all", "worker"):
        raise Misconfigured(f"task {task}: per is {per!r}: give 'all' or 'worker'")
