"""Posts: the places of a cluster's members: how a member is, what words make of it, and what can be done about it.

Floor: protocol. Reads: nothing. Writes: nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from math import inf

from celery5.protocol.members import Beat, Kind, Member, MemberEvent, Ready, Stopping, Unknown


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
