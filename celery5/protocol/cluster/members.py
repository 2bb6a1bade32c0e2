"""Members: the processes of a cluster, as values, and the words that a platform says of them.

A member is one process: what it is called, how it is started, how long it may take to end. A platform starts and ends
members, and tells the Foreman what becomes of them in five words. It says them in the order in which things happened,
and `Ended` is the last word on a process: whatever is said of that name later is about another one.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from math import inf
from typing import Literal

import msgspec

Kind = Literal["worker", "router", "scheduler", "publisher"]
State = Literal["starting", "up", "stopping"]
"""How a process that runs is: it has not said that it is ready, it has, or it is about to end."""

PARENT_VARIABLE = "CELERY5_PARENT"
"""The variable in which a member finds the id of the process without which it must not live."""
FAILURE_PREFIX = "failed: "
"""How the status begins that a member reports last, before it ends with an error; the error follows."""
MAX_REASON_LENGTH = 300
"""Characters of an error that are kept."""
KINDS: tuple[Kind, ...] = ("worker", "router", "scheduler", "publisher")


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """One process of a cluster.

    `name` is its own in the cluster and the first part of its name in logs and for commands. It is of a `kind` and a
    `group`. `host` is the name of the host that it runs on, '' for here. `arguments` are what follows `celery5` on its
    command line. `environment` is what it gets beside the surroundings. `stop_after`: seconds that it gets to end after
    it was asked to; then it is killed.
    """

    name: str
    kind: Kind
    group: str = "default"
    host: str = ""
    arguments: tuple[str, ...]
    environment: Mapping[str, str] = {}
    stop_after: float = 80.0


class Ready(msgspec.Struct, frozen=True):
    """It works."""

    name: str


class Ended(msgspec.Struct, frozen=True):
    """Its process is gone, and `how`, for people. The exit `code`, if it is known; below zero the signal that ended it.
    A `code` of 0 means that it ended as it was asked to."""

    name: str
    how: str
    code: int | None = None


class Beat(msgspec.Struct, frozen=True):
    """Its event loop turns. `status` is its last status, one line; '' when there is no new one.
    With `turns` false it is only a status: a thread sends it for a loop that is blocked."""

    name: str
    status: str = ""
    loop_alive: bool = True


class Stopping(msgspec.Struct, frozen=True):
    """It has begun to end."""

    name: str


class Unknown(msgspec.Struct, frozen=True):
    """Nobody can tell how it is, and `why`, for people: its host is away. It counts as it was, however long that is;
    told several times in `hung_after` seconds, as a `Beat` is."""

    name: str
    why: str


MemberEvent = Ready | Ended | Beat | Stopping | Unknown


def format_failure_status(error: str) -> str:
    """Return the status that a member reports when it is about to end with this error: one line of bounded length."""
    return FAILURE_PREFIX + _one_line(error)


def parse_failure_reason(status: str) -> str:
    """Return the error in a member's last status; '' when it is an ordinary status. It came from outside, so
    control characters are removed."""
    return _one_line(status.removeprefix(FAILURE_PREFIX)) if status.startswith(FAILURE_PREFIX) else ""


def format_end_reason(how: str, reason: str) -> str:
    """Return how a member ended, with the `reason` that it reported, if it did."""
    return f"{how}: {reason}" if reason else how


def _one_line(text: str) -> str:
    printable = "".join(each if each.isprintable() else " " for each in text)
    return " ".join(printable.split())[:MAX_REASON_LENGTH]


class Phase(Enum):
    """How a member is."""

    DOWN = "down"
    STARTING = "starting"
    UP = "up"
    STOPPING = "stopping"
    GIVEN_UP = "given up"

    @property
    def is_running(self) -> bool:
        """Whether there is a process."""
        return self in (Phase.STARTING, Phase.UP, Phase.STOPPING)


# What a word makes of a member whose process runs; `Ended` makes it DOWN, or GIVEN_UP. Of one that does not run nobody
# can say anything. Whoever beats is ready: the word that it is may have been lost while we were away.
TRANSITIONS: Mapping[tuple[Phase, type[MemberEvent]], Phase] = {
    (Phase.STARTING, Ready): Phase.UP,
    (Phase.STARTING, Beat): Phase.UP,
    (Phase.STARTING, Stopping): Phase.STOPPING,
    (Phase.STARTING, Unknown): Phase.STARTING,
    (Phase.UP, Ready): Phase.UP,
    (Phase.UP, Beat): Phase.UP,
    (Phase.UP, Stopping): Phase.STOPPING,
    (Phase.UP, Unknown): Phase.UP,
    (Phase.STOPPING, Ready): Phase.STOPPING,
    (Phase.STOPPING, Beat): Phase.STOPPING,
    (Phase.STOPPING, Stopping): Phase.STOPPING,
    (Phase.STOPPING, Unknown): Phase.STOPPING,
}


@dataclass(frozen=True, slots=True)
class Start:
    """Start this member."""

    member: Member


@dataclass(frozen=True, slots=True)
class Stop:
    """Ask it to end."""

    name: str


@dataclass(frozen=True, slots=True)
class Kill:
    """End it at once: `why`."""

    name: str
    why: str


Action = Start | Stop | Kill


@dataclass(slots=True)
class MemberState:
    """One member's place: the `member` as it is to be, whether it is `wanted`, and what `running` was started as.

    `since` when it is in its `phase`; when it was `heard` last; whether it was `asked` to end by us, and when `killed`;
    when it may be started again (`due`); when it has died of late, and `how` it ended last; how often it `died` and how
    often it was started again after an end in order (`restarts`), in all; what it says of itself (`status`), and when
    it has `told` that; why nobody knows how it is (`unknown`). One that is not wanted any more stays until those whom
    it `awaits` have come up.
    """

    member: Member
    is_wanted: bool = True
    is_spare: bool = False
    phase: Phase = Phase.DOWN
    started_as: Member | None = None
    phase_since: float = 0.0
    last_heard_at: float = 0.0
    stop_requested: bool = False
    stopping_by_itself: bool = False
    killed_at: float = -inf
    restart_at: float = -inf
    recent_deaths: list[float] = field(default_factory=list[float])
    failures: int = 0
    death_count: int = 0
    restart_count: int = 0
    waits_for: frozenset[str] = frozenset()
    end_reason: str = ""
    status: str = ""
    status_at: float = 0.0
    unknown_reason: str = ""

    @property
    def group(self) -> tuple[Kind, str]:
        """Whom it is like."""
        return self.member.kind, self.member.group

    @property
    def problem(self) -> str:
        """What is wrong with it; '' when it is up, or on its way for the first time or on purpose."""
        if self.phase is Phase.GIVEN_UP:
            return f"given up: {self.end_reason}"
        if self.unknown_reason and self.phase.is_running:
            return f"unknown: {self.unknown_reason}"
        if self.failures and self.phase in (Phase.DOWN, Phase.STARTING):
            return f"{self.end_reason}; it is started again"
        return ""
