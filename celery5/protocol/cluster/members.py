"""Members: the processes of a cluster, the events that a platform reports of them, and their states.

A member is one process: its name, how it is started, how long it may take to stop. A platform starts and stops members,
and reports what happens to them as five kinds of event, in order. `Ended` is the last event of a process: a later
event of the same name is about its successor.
"""

from collections.abc import Mapping
from enum import Enum
from math import inf
from typing import Literal

import msgspec

from celery5.protocol.masking import collapse_whitespace, cut_middle

Kind = Literal["worker", "router", "scheduler", "publisher"]
State = Literal["starting", "up", "stopping"]
"""The state of a running process: not ready yet, ready, or about to end."""

PARENT_VARIABLE = "CELERY5_PARENT"
"""The environment variable with the id of the process that a member must not outlive."""
LAST_FAILURE_VARIABLE = "CELERY5_LAST_FAILURE"
"""That with the error which ended the last start of a member, if that failed: the same traceback is not written again.
"""
FAILURE_PREFIX = "failed: "
"""The prefix of the last status of a member that ends with an error; the error follows."""
MAX_REASON_LENGTH = 300
"""Characters of an error that are kept, at most."""
MAX_GROUP_MEMBERS = 10_000
"""The most members of one group."""
KINDS: tuple[Kind, ...] = ("worker", "router", "scheduler", "publisher")


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """One process of a cluster, as it should run."""

    # Unique in the cluster; the first part of its name in logs and for commands.
    name: str
    kind: Kind
    group: str = "default"
    # The name of its host; "" for this one.
    host: str = ""
    # What follows `celery5` on its command line.
    arguments: tuple[str, ...]
    # Variables beside those that all members get.
    environment: Mapping[str, str] = {}
    # Seconds from the request to stop until it is killed.
    stop_after: float = 80.0


class Ready(msgspec.Struct, frozen=True):
    """It is ready."""

    name: str
    # The file of the application's module that it has loaded; "" where the platform does not tell.
    code: str = ""
    # Its whole name in Redis, which no other process has had; "" where the platform does not tell.
    incarnation: str = ""


class Ended(msgspec.Struct, frozen=True):
    """Its process is gone."""

    name: str
    # How it ended, for people.
    how: str
    # Its exit code if it is known: 0 when it stopped in order, below zero for the signal that ended it.
    code: int | None = None


class MemberEnd(msgspec.Struct, frozen=True):
    """How a process of a member that was up ended out of order, and what its Controller does then.

    It is for those who miss the process: what became of one that never was up is nothing to them.
    """

    # Its name, which its process has for an inbox.
    member: str
    # How it ended, for people.
    how: str
    # What follows: `it is started again`, `given up: ...`, `started again`.
    then: str
    # The whole name of the process that ended; "" if the Controller does not know it.
    worker: str = ""

    @property
    def text(self) -> str:
        """Return it in a line."""
        return f"{self.member} {self.how}; {self.then}"


class Beat(msgspec.Struct, frozen=True):
    """A heartbeat of its event loop, with its status."""

    name: str
    # Its last status, one line; "" when there is no new one.
    status: str = ""
    # False when a thread sends the status for a loop that is blocked: then it is no heartbeat.
    loop_alive: bool = True


class Stopping(msgspec.Struct, frozen=True):
    """It has begun to stop."""

    name: str


class Unknown(msgspec.Struct, frozen=True):
    """Its state is unknown, because its host is unreachable. It counts as it was, however long that lasts.

    Reported several times in `hung_after` seconds, like a `Beat`.
    """

    name: str
    # Why, for people.
    why: str


MemberEvent = Ready | Ended | Beat | Stopping | Unknown


def format_failure(error: str) -> str:
    """Return the error with which a member ends, as one line of bounded length."""
    return _one_line(error)


def format_failure_status(error: str) -> str:
    """Return the status that a member reports when it is about to end with this error."""
    return FAILURE_PREFIX + format_failure(error)


def parse_failure_reason(status: str) -> str:
    """Return the error in a member's last status, without control characters; '' when it is an ordinary status."""
    return _one_line(status.removeprefix(FAILURE_PREFIX)) if status.startswith(FAILURE_PREFIX) else ""


def format_end_reason(how: str, reason: str) -> str:
    """Return how a member ended, with the `reason` that it reported, if it did."""
    return f"{how}: {reason}" if reason else how


def _one_line(text: str) -> str:
    printable = "".join(char if char.isprintable() else " " for char in text)
    return cut_middle(collapse_whitespace(printable), MAX_REASON_LENGTH)


class Phase(Enum):
    """The phases of a member."""

    DOWN = "down"
    STARTING = "starting"
    UP = "up"
    STOPPING = "stopping"
    GIVEN_UP = "given up"

    @property
    def is_running(self) -> bool:
        """Return whether there is a process."""
        return self in (Phase.STARTING, Phase.UP, Phase.STOPPING)


# The next phase of a running member, by event; `Ended` makes it DOWN or GIVEN_UP. Events of a member that does not run
# are ignored. A heartbeat means ready: the event that said so may have been lost while this process was frozen.
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


class Start(msgspec.Struct, frozen=True):
    """Start this member."""

    member: Member


class Stop(msgspec.Struct, frozen=True):
    """Ask a member to stop."""

    name: str


class Kill(msgspec.Struct, frozen=True):
    """Kill a member."""

    name: str
    # The reason, for people.
    why: str


class Permit(msgspec.Struct, frozen=True):
    """Tell a worker that asks, or a successor that is needed no more, whether it may stop reading and end."""

    name: str
    # False: not yet.
    is_granted: bool


Action = Start | Stop | Kill | Permit


RECYCLING = "recycling"
"""Shown in place of the phase of a member that is being recycled."""


class MemberState(msgspec.Struct):
    """The state of one member. Changed by `ClusterState` alone."""

    # The member as it should be.
    member: Member
    is_wanted: bool = True
    # Runs beside the members of its group while they are restarted, and has tried the new version before them.
    is_spare: bool = False
    # Runs as the only one of its version until others may follow, or stops at once since they may not.
    is_canary: bool = False
    # It was a canary, and the change that it has tried follows: it stays as the spare.
    has_passed: bool = False
    # A spare that was started before another member is recycled. It ends when its jobs have ended.
    is_successor: bool = False
    # The member that is recycled when this successor is up; "" if that is not known.
    replaces: str = ""
    phase: Phase = Phase.DOWN
    # The member as its process was started.
    started_as: Member | None = None
    phase_since: float = 0.0
    last_heard_at: float = 0.0
    # We asked it to stop.
    stop_requested: bool = False
    # It reported that it stops, without a request.
    stopping_by_itself: bool = False
    killed_at: float = -inf
    # The earliest time of the next start.
    restart_at: float = -inf
    # The times of the deaths that count towards giving it up.
    recent_deaths: list[float] = msgspec.field(default_factory=list[float])
    # Deaths since it was last up; sets the delay of the next start.
    failures: int = 0
    # Deaths in all.
    death_count: int = 0
    # Starts after an end in order.
    restart_count: int = 0
    # An unwanted member stays until these are up.
    waits_for: frozenset[str] = frozenset()
    # How it ended last.
    end_reason: str = ""
    # When its process ended out of order; None if it has been up since.
    missing_since: float | None = None
    # What it reports of itself, and when it did.
    status: str = ""
    status_at: float = 0.0
    # The number of the change in which it was given up.
    given_up_in: int = 0
    # The file of the application's module that it has loaded; "" when that is not known.
    code: str = ""
    # Of its process, or of the last one: the whole name in Redis, "" when that is not known, and whether it was up.
    incarnation: str = ""
    has_been_up: bool = False
    # Why its state is unknown; "" when it is known.
    unknown_reason: str = ""
    # Why it is being recycled, until its next process is up, or is late; "" if it is not being recycled.
    recycle_reason: str = ""
    # Why it asks for a successor, and since when; "" if it does not.
    successor_reason: str = ""
    asked_at: float = -inf
    # Successors that have failed to start, in a row, and the earliest time of the next one.
    successor_failures: int = 0
    successor_at: float = -inf
    # Whether it may be recycled, and when it was told so last.
    is_permitted: bool = False
    permitted_at: float = -inf
    # Since when it is to end as a successor that is needed no more.
    dismissed_at: float = -inf

    @property
    def group(self) -> tuple[Kind, str]:
        """Return its kind and group."""
        return self.member.kind, self.member.group

    @property
    def is_recycling(self) -> bool:
        """Return whether it is being recycled, and nothing else has happened to it."""
        return bool(self.recycle_reason) and not (
            self.stop_requested
            or self.killed_at > -inf
            or self.failures
            or self.unknown_reason
            or self.phase is Phase.GIVEN_UP
        )

    @property
    def shown_phase(self) -> str:
        """Return its phase as it is shown, which may be RECYCLING."""
        return RECYCLING if self.is_recycling else self.phase.value

    @property
    def problem(self) -> str:
        """Return the problem of the member; '' when it is up, or starts for the first time or on purpose."""
        if self.phase is Phase.GIVEN_UP:
            return f"given up: {self.end_reason}"
        if self.unknown_reason and self.phase.is_running:
            return f"unknown: {self.unknown_reason}"
        if self.failures and self.phase in (Phase.DOWN, Phase.STARTING):
            return f"{self.end_reason}; it is started again"
        return ""
