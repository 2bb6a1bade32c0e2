"""The states of runs and of their nodes, and the words that stand for them in Redis."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Generic, TypeVar

import msgspec

from celery5.protocol.masking import mask_lines

T = TypeVar("T")


class RunState(StrEnum):
    """The state of a run."""

    RUNNING = "RUNNING"
    HELD = "HELD"  # it runs, and waits for the replay of a dead letter
    CANCELLING = "CANCELLING"  # what waits is withdrawn, and what runs is stopped
    UNDOING = "UNDOING"  # it fails: what runs is stopped, and what has ended is undone
    SUCCESS = "SUCCESS"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    EXPIRED = "EXPIRED"
    UNKNOWN = "UNKNOWN"


class NodeState(StrEnum):
    """The state of a node."""

    PENDING = "PENDING"  # what is before it has not ended
    ACTIVE = "ACTIVE"  # its job, or its jobs, are on their queue or run
    WAITING = "WAITING"  # it sleeps, or waits for a signal
    HELD = "HELD"
    SUCCESS = "SUCCESS"
    FAILED = "FAILED"
    SKIPPED = "SKIPPED"


RUN_STATES: Mapping[str, RunState] = {
    "live": RunState.RUNNING,
    "success": RunState.SUCCESS,
    "failed": RunState.FAILED,
    "cancelled": RunState.CANCELLED,
    "expired": RunState.EXPIRED,
    "undoing failed": RunState.UNDOING,
    "undoing cancelled": RunState.CANCELLING,
    "undoing expired": RunState.UNDOING,
}
"""What the field `state` of a run says."""
NODE_STATES: Mapping[str, NodeState] = {
    "active": NodeState.ACTIVE,
    "waiting": NodeState.WAITING,
    "held": NodeState.HELD,
    "done": NodeState.SUCCESS,
    "late": NodeState.SUCCESS,  # after the run had failed: a retry counts it
    "failed": NodeState.FAILED,
    "counted": NodeState.FAILED,  # and those that depend on it know
    "skipped": NodeState.SKIPPED,
    "cut": NodeState.SKIPPED,  # another one was first
    "ending": NodeState.ACTIVE,  # another one was first, and its job is revoked
    "again": NodeState.PENDING,  # a retry has reset it
}
"""What the field `node:<number>` of a run says, before its generation."""
ENDED = frozenset({RunState.SUCCESS, RunState.FAILED, RunState.CANCELLED, RunState.EXPIRED})
"""The states in which a run does not change any more, unless it is retried."""


class Outcome(msgspec.Struct, Generic[T], frozen=True):
    """How a node with `on_error="continue"` has ended: what depends on it gets this in place of the value."""

    # SUCCESS, or the state in which it ended otherwise.
    state: str
    # The value of a success.
    value: T | None = None
    # The document of the job that failed: `failure` has type, message and traceback.
    error: dict[str, Any] | None = None

    @property
    def is_success(self) -> bool:
        """Whether the node has succeeded."""
        return self.state == "SUCCESS"


class RunStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a run, without looking at its nodes one by one. Times are seconds since 1970."""

    id: str
    # The name of the workflow.
    name: str
    # The queue where it lives.
    home: str
    state: RunState
    # How many jobs, waits and members of maps it has as far as it is known.
    total: int
    done: int
    failed: int
    skipped: int
    # On their queues, or running.
    active: int
    held: int
    # Not begun.
    pending: int
    created: float
    ended: float | None = None
    deadline: float | None = None
    # The type and message of the first failure; '' for none.
    error: str = ""
    # The node of another run in whose place it is; '' for none.
    parent: str = ""


def make_status(run_id: str, home: str, fields: Mapping[str, bytes]) -> RunStatus:
    """Return the status of a run from its fields."""

    def number(name: str) -> int:
        digits = fields.get(name, b"0")
        return int(digits) if digits.lstrip(b"-").isdigit() else 0

    def text(name: str) -> str:
        return fields.get(name, b"").decode(errors="replace")

    state = RUN_STATES.get(text("state"), RunState.UNKNOWN)
    held = number("held")
    if state is RunState.RUNNING and held:
        state = RunState.HELD
    elif state is RunState.CANCELLING and "undone" in fields:
        state = RunState.UNDOING
    total, done, failed, skipped, active = map(number, ("all", "done", "bad", "skipped", "active"))
    pending = max(0, total - done - failed - skipped - active - held)
    if state in ENDED:  # what has not begun never will, unless the run is retried
        skipped, pending = skipped + pending, 0
    return RunStatus(
        id=run_id,
        name=text("name"),
        home=home,
        state=state,
        total=total,
        done=done,
        failed=failed,
        skipped=skipped,
        active=active,
        held=held,
        pending=pending,
        created=number("created") / 1000,
        ended=number("ended") / 1000 if "ended" in fields and state in ENDED else None,
        deadline=number("until") / 1000 if "until" in fields else None,
        error=mask_lines(_describe_error(fields.get("error", b""))),
        parent=text("parent"),
    )


def _describe_error(raw: bytes) -> str:
    if not raw:
        return ""
    try:
        document: Any = msgspec.json.decode(raw)
        failure: Any = document.get("failure") or {}
        return f"{failure.get('type', document.get('state', ''))}: {failure.get('message', document.get('reason', ''))}"
    except (msgspec.DecodeError, AttributeError):
        return raw[:200].decode(errors="replace")
