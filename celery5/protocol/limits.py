"""Limits: how many jobs of a task may run at once, how many may begin in a span of time, and whose turn it is.

What a task declares is its `DeclaredLimits`; what an operator or a Scheduler sets at any time is a `LimitOverride`. The
two make the `AdmissionRule` that holds now. A task without a rule is not limited and pays nothing.
"""

import math
from collections.abc import Callable
from typing import Any, Literal

import msgspec

from celery5.errors import Misconfigured
from celery5.protocol.text_values import RATE

Per = Literal["all", "worker"]
"""Whether a limit is counted for all workers together, or for each by itself."""

MAX_LIMIT = 1_000_000
"""The highest limit or rate that may be given."""
SHARE, LEAST, LONGEST = 1 / 20, 0.05, 1.0
"""What is added to the span of a rate: a twentieth, but so many seconds at least and at most."""
MAX_EXPIRY_MS = 10**15
"""Milliseconds since 1970: what expires later does not."""


class Limit(msgspec.Struct, frozen=True):
    """At most `most` jobs of a task run at once, of all workers or `per` worker; 0 rejects every job."""

    most: int
    per: Per = "all"

    def validate(self, task: str) -> "Limit":
        """Itself. Raises Misconfigured."""
        _check_count(self.most, task, "limit", 0)
        _check_per(self.per, task)
        return self


class Range(msgspec.Struct, frozen=True):
    """A limit that is computed: what `compute()` gives, but `least` at least and `most` at most.

    Each worker calls it at each heartbeat, a few times in ten seconds; so it must be quick. What it computes is
    the same on each if it goes by something that they share. Should it raise, the last value holds, which is
    logged once for each fault.
    """

    least: int
    most: int
    compute: Callable[[], float]
    per: Per = "all"

    def validate(self, task: str) -> "Range":
        """Itself. Raises Misconfigured."""
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
        """A computed value within the bounds. Raises ValueError for what is no number."""
        given: object = computed
        is_number = isinstance(given, int | float) and not isinstance(given, bool)  # pyright: ignore[reportUnnecessaryIsInstance]
        if not is_number or math.isnan(computed):
            raise ValueError(f"{computed!r} is no number")
        return int(min(max(computed, self.least), self.most))


class Rate(msgspec.Struct, frozen=True):
    """At most so many jobs of a task begin in any span of that length, of all workers or `per` worker: `200/m`, `5/s`,
    `1000/h`, `10/d`, `3/10s`."""

    text: str
    per: Per = "all"

    @property
    def count(self) -> int:
        """How many may begin in one span."""
        return int(RATE.parse(self.text).count)

    @property
    def span(self) -> float:
        """The span in seconds."""
        return RATE.parse(self.text).seconds

    @property
    def slack(self) -> float:
        """Seconds within which a job begins that was let through; later it must not. Those that begin in any span were
        let through in that span or so many seconds before it: that is what is counted."""
        return min(max(self.span * SHARE, LEAST), LONGEST)

    def validate(self, task: str) -> "Rate":
        """Itself. Raises Misconfigured."""
        try:
            rate = RATE.parse(str(self.text))
            is_whole = "/" in self.text and rate.count == int(rate.count)
        except (Misconfigured, TypeError):
            is_whole = False
        if not is_whole:
            raise Misconfigured(f"task {task}: rate {RATE.make_error(self.text)}; the number is a whole one")
        _check_count(self.count, task, "rate_limit", 1)
        _check_per(self.per, task)
        return self


class DeclaredLimits(msgspec.Struct, frozen=True):
    """What a task declares. `keyed`: its limit holds for each concurrency key by itself. `fair`: the jobs of each fair
    key stand in a waiting list of their own, and the lists take turns."""

    limit: Limit | Range | None = None
    rate: Rate | None = None
    keyed: bool = False
    fair: bool = False


class LimitOverride(msgspec.Struct, frozen=True, omit_defaults=True):
    """What was imposed on a task from outside: a `limit`, or a `rate`. `by` and `since` (seconds since 1970) say who
    did, and when."""

    limit: int | None = None
    rate: str = ""
    by: str = ""
    since: float = 0.0

    def validate(self, task: str) -> "LimitOverride":
        """Itself. Raises Misconfigured."""
        if self.limit is not None:
            _check_count(self.limit, task, "limit", 0)
        if self.rate:
            Rate(self.rate).validate(task)
        return self


class Suspension(msgspec.Struct, frozen=True, omit_defaults=True):
    """That a task is suspended, `why` and `by` what, `since` when and `until` when: seconds since 1970, 0 for until it
    is resumed."""

    why: str = ""
    by: str = ""
    since: float = 0.0
    until: float = 0.0


class AdmissionRule(msgspec.Struct, frozen=True):
    """What holds for the jobs of one task now. `most` run at once (None: no limit), `rate.count` begin in its span."""

    task: str
    max_running: int | None = None
    per: Per = "all"
    rate: Rate | None = None
    keyed: bool = False
    fair: bool = False
    suspended: bool = False

    @property
    def rejects_all(self) -> bool:
        """Whether the jobs are rejected. Those of a suspended task are held instead."""
        return self.max_running == 0 and not self.suspended

    def to_script_arguments(self, job_count: int) -> dict[str, Any]:
        """Return the rule as the scripts take it, for a worker with capacity for `job_count` jobs."""
        most = -1 if self.max_running is None or self.rejects_all else self.max_running
        rate = None if self.rejects_all else self.rate
        return {
            "task": escape_word(self.task),
            "most": most,
            "per_worker": self.per == "worker",
            "rate": rate.count if rate else 0,
            "window": math.ceil((rate.span + rate.slack) * 1000) if rate else 0,
            "rate_per_worker": bool(rate and rate.per == "worker"),
            "fair": self.fair,
            "keyed": self.keyed,
            "suspended": self.suspended,
            "want": 0 if self.suspended else job_count,
        }


def make_admission_rule(
    task: str,
    declared: DeclaredLimits | None,
    *,
    computed: int | None,
    override: LimitOverride | None,
    suspended: bool,
) -> AdmissionRule | None:
    """What holds for a task now; None when they are not limited. `computed` is the value of a Range.

    What is imposed beats what the task declares. A declared limit does not count where there is a rate; a
    limit that is imposed holds beside it. Where nothing may run, it makes a difference why: jobs of a suspended task
    are held, those of a task with the limit 0 are rejected.
    """
    declared = declared or DeclaredLimits()
    rate = Rate(override.rate) if override and override.rate else declared.rate
    most, per = (None, "all") if rate is not None else _declared(declared, computed)
    if override is not None and override.limit is not None:
        most, per = override.limit, declared.limit.per if declared.limit else "all"
    rule = AdmissionRule(
        task,
        most,
        per,
        rate,
        keyed=declared.keyed and declared.rate is None,
        fair=declared.fair,
        suspended=suspended,
    )
    return None if rule == AdmissionRule(task) else rule


def _declared(gate: DeclaredLimits, computed: int | None) -> tuple[int | None, Per]:
    limit = gate.limit
    if limit is None:
        return None, "all"
    if type(limit) is Limit:
        return limit.most, limit.per
    assert type(limit) is Range
    return (limit.most if computed is None else computed), limit.per


def escape_word(word: str) -> str:
    """A name or key as one word: the scripts part words at spaces."""
    return word.replace("%", "%25").replace(" ", "%20")


def unescape_word(word: str) -> str:
    """The name or key again."""
    return word.replace("%20", " ").replace("%25", "%")


def get_waiting_list(rule: AdmissionRule, concurrency_key: str, fair_key: str) -> str:
    """Return the waiting list of a job, in three words: its task, its fair key, its concurrency key."""
    fair = escape_word(fair_key) if rule.fair else ""
    return f"{escape_word(rule.task)} {fair} {escape_word(concurrency_key) if rule.keyed else ''}"


def format_expiry(expires: float | None) -> str:
    """Return when a waiting job expires, as the scripts take it: ms since 1970, '' for never."""
    return "" if expires is None else str(min(int(expires * 1000), MAX_EXPIRY_MS))


def parse_declared_limits(
    task: str,
    limit: "int | Limit | Range | None",
    rate: "str | Rate | None",
    *,
    keyed: bool,
    fair: bool,
) -> DeclaredLimits | None:
    """What a task declares, if anything. Raises Misconfigured."""
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


def _check_count(count: object, task: str, name: str, least: int) -> None:
    if not isinstance(count, int) or isinstance(count, bool) or not least <= count <= MAX_LIMIT:
        raise Misconfigured(
            f"task {task}: {name} is {count!r}: give a whole number from {least} to {MAX_LIMIT:,}"
        )


def _check_per(per: object, task: str) -> None:
    if per not in ("all", "worker"):
        raise Misconfigured(f"task {task}: per is {per!r}: give 'all' or 'worker'")
