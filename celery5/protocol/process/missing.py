"""Processes that should work and do not, and what a person can do about each.

The leading Controller stores its missing members as a `MembersReport`; every surface reads that.
"""

import shlex
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from celery5.protocol.counts import format_count
from celery5.protocol.durations import format_duration
from celery5.protocol.masking import cut_middle

REPORT_PERIOD = 5.0
"""Seconds between two reports of a Controller."""
REPORT_TTL = 20.0
"""Seconds for which a report counts: a Controller that is gone says nothing of its members."""
MAX_NAMED = 20
"""Missing members that a report names."""
MAX_RETRIED = 5
"""Members that a command names."""
SHOWN_REASON = 200
"""Characters of a reason that are shown, with its end, which says what to do."""

MissingCondition = Literal["given up", "down", "none"]
"""Given up; down, and started again; or nobody does what this kind of process does."""


class MissingMember(msgspec.Struct, frozen=True, kw_only=True):
    """A process that should work and does not."""

    kind: str
    # Its name and its group in the cluster description; '' if no process of this kind works, whatever its name.
    name: str = ""
    group: str = ""
    condition: MissingCondition
    # When it ended, in seconds since 1970; None: not known.
    since: float | None = None
    # How it ended last, or what stands still, for people.
    why: str
    # What a person can do.
    remedy: str
    # What stands still since no process of its kind works; '' for nothing that is known.
    effect: str = ""

    @property
    def subject(self) -> str:
        """Return its group, as alerts and pages name it: `group worker-mail`; or its kind, if none works."""
        return f"group {self.kind}-{self.group}" if self.name else self.kind

    @property
    def reason(self) -> str:
        """Return how it ended last, in short, and what stands still."""
        return "; ".join(filter(None, (cut_middle(self.why, SHOWN_REASON), self.effect)))

    def describe(self, now: float) -> str:
        """Return it in a line: `scheduler-default-1 is given up, and has been down for 5 min: ...`."""
        if not self.name:
            return f"no {self.kind.capitalize()} works: {self.reason}"
        given_up = "is given up, and " if self.condition == "given up" else ""
        span = "" if self.since is None else f" for {format_duration(max(0.0, now - self.since))}"
        return f"{self.name} {given_up}has been down{span}: {self.reason}"


class GroupReport(msgspec.Struct, frozen=True, kw_only=True):
    """A group of the cluster description."""

    kind: str
    name: str
    # How many members it should have, and how many of them are missing.
    declared: int
    missing: int = 0

    @property
    def subject(self) -> str:
        """Return how alerts name it."""
        return f"group {self.kind}-{self.name}"


class MembersReport(msgspec.Struct, frozen=True, kw_only=True):
    """What the leading Controller says of the members of its cluster."""

    groups: tuple[GroupReport, ...] = ()
    # The missing members, those that were given up first, MAX_NAMED at most.
    missing: tuple[MissingMember, ...] = ()

    def has_kind(self, kind: str) -> bool:
        """Return whether the cluster description has members of this kind."""
        return any(group.kind == kind and group.declared for group in self.groups)

    def list_missing(self, kind: str) -> tuple[MissingMember, ...]:
        """Return the missing members of this kind."""
        return tuple(member for member in self.missing if member.kind == kind)

    @property
    def further(self) -> int:
        """Return how many more members are missing than are named."""
        return max(0, sum(group.missing for group in self.groups) - len(self.missing))


def format_retry(*names: str) -> str:
    """Return how the Controller is told to try members again that it has given up. A reload alone does not."""
    what = "it" if len(names) == 1 else "them"
    return f"correct what ends {what}, then: celery5 controller restart {shlex.join(names)}"


def format_restarting(name: str) -> str:
    """Return what to do about a member that its Controller still starts again."""
    return (
        "correct what ends it: its Controller starts it again by itself; celery5 controller status shows "
        f"{shlex.quote(name)}"
    )


class StartAdvice(msgspec.Struct, frozen=True):
    """Says how a process is made to work: by hand, or by the Controller that runs the cluster."""

    # Whether a Controller lives: then nobody starts a process by hand.
    is_controlled: bool = False
    # What the leading one says; None if that is not known.
    report: MembersReport | None = None

    def format_start(self, kind: str) -> str:
        """Return how a process of a kind is made to work, of which none does."""
        if not self.is_controlled:
            return f"celery5 {kind} start"
        return self.format_retry(kind) or (
            f"celery5 controller status shows what the Controller does about its {kind}s"
            if self.report is not None and self.report.has_kind(kind)
            else self.format_group(kind)
        )

    def format_worker(self, flags: str, table: str) -> str:
        """Return how a worker is made to work that has these flags on its command line, or in its group's table."""
        if not self.is_controlled:
            return f"celery5 worker start {flags}"
        retry = self.format_retry("worker")
        return "; ".join(filter(None, (retry, self.format_group("worker", table))))

    def format_retry(self, kind: str) -> str:
        """Return how the members of a kind are tried again that were given up; '' if none was."""
        members = self.report.list_missing(kind) if self.report else ()
        names = [member.name for member in members if member.condition == "given up"]
        return format_retry(*names[:MAX_RETRIED]) if names else ""

    def format_group(self, kind: str, table: str = "") -> str:
        """Return how the Controller is made to run members that are in none of its groups."""
        section = f"[{kind}s.NAME]" + (f" with {table}" if table else "")
        return f"add {section} to the cluster description if it has none, then: celery5 controller reload"


BY_HAND = StartAdvice()
"""The advice where no Controller is known."""


def make_start_advice(controllers: Sequence[str], report: MembersReport | None) -> StartAdvice:
    """Return the advice where these Controllers live, the leading one of which says this."""
    # The report of a Controller outlives it by some seconds.
    return StartAdvice(bool(controllers), report if controllers else None)


def list_missing(advice: StartAdvice, *, idle_schedules: int) -> tuple[MissingMember, ...]:
    """Return all processes that should work and do not, those that were given up first.

    Args:
        advice: What is known of the Controller.
        idle_schedules: How many active schedules do not fire, since no Scheduler lives at all.
    """
    found = () if advice.report is None else advice.report.missing
    if not idle_schedules:
        return found
    effect = format_count(idle_schedules, "schedule does not fire", "schedules do not fire")
    if any(member.kind == "scheduler" for member in found):
        return tuple(
            msgspec.structs.replace(member, effect=effect) if member.kind == "scheduler" else member
            for member in found
        )
    remedy = advice.format_start("scheduler")
    if not advice.is_controlled:  # one of other code would retire the schedules that it does not declare
        remedy = f"{remedy}, with the code that declares them"
    return (*found, MissingMember(kind="scheduler", condition="none", why=effect, remedy=remedy))


def list_missing_lines(missing: Iterable[MissingMember], further: int, now: float) -> list[str]:
    """Return for people a line for each missing member, and below it what to do.

    Args:
        missing: The members.
        further: How many more are missing.
        now: The time, in seconds since 1970.
    """
    lines = [line for member in missing for line in (member.describe(now), f"  {member.remedy}")]
    if further:
        more = format_count(further, "more member is", "more members are")
        lines.append(f"{more} missing: celery5 controller status shows all")
    return lines
