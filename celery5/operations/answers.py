"""The shapes of what processes answer, as far as pages rely on them.

Answers are not signed (docs/decisions/0010), so anybody who can write to Redis may have made one, and a process of
another version may answer otherwise: what has another shape is no answer.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from celery5.protocol.commands.definitions import ACTIVE, HEALTH, MEMBERS, STACK, STATS

if TYPE_CHECKING:
    from celery5.commands.control import Reply


class JobProgress(msgspec.Struct, frozen=True):
    """What a running job has reported."""

    done: float
    total: float | None = None
    note: str = ""


class ShownJob(msgspec.Struct, frozen=True):
    """A running job."""

    id: str
    task: str
    arguments: str = ""
    seconds: float | None = None
    progress: JobProgress | None = None


class Condition(msgspec.Struct, frozen=True):
    """A health check, or a circuit breaker."""

    check: str = ""
    of: str = ""
    state: str = ""
    why: str | None = None


class Conditions(msgspec.Struct, frozen=True):
    """The health of a worker."""

    checks: list[Condition] | None = None
    breakers: list[Condition] | None = None


class MemberRow(msgspec.Struct, frozen=True, rename={"seconds": "for"}):
    """A member of the cluster."""

    name: str
    phase: str
    host: str | None
    deaths: int
    restarts: int
    status: str
    trouble: str
    seconds: float | None = None


class Members(msgspec.Struct, frozen=True):
    """The members of a Controller."""

    line: str = ""
    members: list[MemberRow] | None = None


class Stack(msgspec.Struct, frozen=True):
    """Where the code of a job stands."""

    job: str
    task: str
    kind: str
    child: str = ""
    lines: list[str] = []
    note: str = ""


class Stacks(msgspec.Struct, frozen=True):
    """Where the code of a worker stands."""

    stacks: list[Stack]
    note: str = ""


SHAPES: Mapping[str, Any] = {
    ACTIVE.name: list[ShownJob],
    HEALTH.name: Conditions,
    MEMBERS.name: Members,
    STACK.name: Stacks,
    STATS.name: dict[str, Any],
}
"""The shape of the answer to each command that a page shows, by its name."""


OTHER_VERSION = "other-version"
"""Why an answer of another shape counts as none, in a word."""


def has_shape(command: str, reply: "Reply") -> bool:
    """Return whether an answer is what the pages expect of the command."""
    if command not in SHAPES or not reply.ok:
        return True
    try:
        msgspec.convert(reply.answer, SHAPES[command])
    except (msgspec.ValidationError, RecursionError):
        return False
    return True
