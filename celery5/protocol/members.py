"""Members: the processes of a cluster, as values, and the words that a platform says of them.

Floor: protocol. Reads: nothing. Writes: nothing.

A member is one process: what it is called, how it is started, how long it may take to end. A platform starts and ends
members, and tells the Foreman what becomes of them in five words. It says them in the order in which things happened,
and `Ended` is the last word on a process: whatever is said of that name later is about another one.
"""

from collections.abc import Mapping
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
