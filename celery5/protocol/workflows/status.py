"""The states of runs and of their nodes, and the words that stand for them in Redis."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from celery5.protocol.bounded_decoding import read_whole
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


class StepFailure(msgspec.Struct, frozen=True, kw_only=True):
    """What has failed: the job of `on_failure=` gets a list of these, one for a single job, 20 at most for a run."""

    # The id of the job; of the run, when that has expired.
    id: str
    # The id of the run; "" for a job that is in none. The number of the step in its graph; None when the whole run has
    # expired.
    run: str = ""
    node: int | None = None
    # The task whose job has failed; where a step has returned a workflow, that of the job that failed in it.
    task: str = ""
    # DEAD, EXPIRED, REJECTED, REVOKED; PURGED when the dead letter of a held step was purged; LOST.
    state: str = ""
    # The type and the message of the error.
    type: str = ""
    message: str = ""
    # Why the job is dead: `exhausted`, `poisoned`, `unknown-task`, ...
    reason: str = ""


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
    # The number of the step that has failed first; None for none. The task and the id of the job that failed there, or
    # in the workflow that the step has returned.
    failed_node: int | None = None
    failed_task: str = ""
    failed_job: str = ""
    # Of a run that fails: how many steps are to be undone, how many are, and how many could not be; the first error of
    # those, with its step.
    undos: int = 0
    undone: int = 0
    undo_failed: int = 0
    undo_error: str = ""
    # The node of another run in whose place it is; '' for none.
    parent: str = ""

    @property
    def failure(self) -> str:
        """Where and why it has failed, on one line: `node 3, shop.ship: ValueError: no`; '' when it has not."""
        place = "" if self.failed_node is None else f"node {self.failed_node}"
        return ": ".join(filter(None, (", ".join(filter(None, (place, self.failed_task))), self.error)))

    @property
    def undo(self) -> str:
        """What is undone, on one line: `undoing 2 of 5; refund of node 3 died: ValueError: no`; '' for nothing."""
        if not self.undos:
            return ""
        words = f"undone {self.undone} of {self.undos}"
        if self.state in (RunState.UNDOING, RunState.CANCELLING):
            words = f"undoing {min(self.undos, self.undone + self.undo_failed + 1)} of {self.undos}"
        if self.undo_error:
            return f"{words}; {self.undo_error}"
        return f"{words}; {self.undo_failed} failed" if self.undo_failed else words


def make_status(run_id: str, home: str, fields: Mapping[str, bytes]) -> RunStatus:
    """Return the status of a run from its fields."""

    def number(name: str) -> int:
        digits = fields.get(name, b"0")
        return -read_whole(digits[1:]) if digits[:1] == b"-" else read_whole(digits)

    def text(name: str) -> str:
        return fields.get(name, b"").decode(errors="replace")

    state = RUN_STATES.get(text("state"), RunState.UNKNOWN)
    if state is RunState.RUNNING and number("held"):
        state = RunState.HELD
    elif state is RunState.CANCELLING and "undone" in fields:
        state = RunState.UNDOING
    counts = {name: number(field) for name, field in _COUNTS.items()}
    pending = max(0, counts["total"] - sum(counts[name] for name in _OF_TOTAL))
    if state in ENDED:  # what has not begun never will, unless the run is retried
        counts["skipped"], pending = counts["skipped"] + pending, 0
    cause = _read_cause(fields.get("error", b""))
    return RunStatus(
        id=run_id,
        name=text("name"),
        home=home,
        state=state,
        **counts,
        pending=pending,
        created=number("created") / 1000,
        ended=number("ended") / 1000 if "ended" in fields and state in ENDED else None,
        deadline=number("until") / 1000 if "until" in fields else None,
        error=cause.error,
        failed_node=number("failed_at") if "failed_at" in fields else None,
        failed_task=cause.task,
        failed_job=cause.job,
        undo_error=_describe_undo_error(_read_cause(fields.get("undo_error", b"")), text("undo_of")),
        parent=text("parent"),
    )


_COUNTS = {
    "total": "all",
    "done": "done",
    "failed": "bad",
    "skipped": "skipped",
    "active": "active",
    "held": "held",
    "undos": "undos",
    "undone": "undo_done",
    "undo_failed": "undo_bad",
}
"""The fields of a run that count something, by the fields of its status."""
_OF_TOTAL = ("done", "failed", "skipped", "active", "held")
"""What of its total has begun, or ended."""


class _Cause(NamedTuple):
    """The innermost failure in a document."""

    error: str = ""
    task: str = ""
    job: str = ""


def _describe_undo_error(cause: _Cause, node: str) -> str:
    if not cause.error:
        return ""
    step = f" of node {node}" if node else ""
    return f"{cause.task or 'the undo'}{step} died: {cause.error}"


def _read_cause(raw: bytes) -> _Cause:
    """Return the error of the innermost job that has failed, its task and its id; nothing for no document."""
    if not raw:
        return _Cause()
    inner: bytes | None = raw
    while inner is not None:
        raw, inner = inner, read_inner(inner)
    try:
        document: Any = msgspec.json.decode(raw)
        failure: Any = document.get("failure") or {}
        kind = failure.get("type", document.get("state", ""))
        error = ": ".join(filter(None, (kind, failure.get("message", document.get("reason", "")))))
        task, job = document.get("task", ""), document.get("id", "")
    except (msgspec.DecodeError, AttributeError, TypeError, RecursionError):
        return _Cause(mask_lines(raw[:200].decode(errors="replace")))
    is_text = isinstance(task, str) and isinstance(job, str)
    return _Cause(mask_lines(error), task if is_text else "", job if is_text else "")


def read_inner(document: bytes) -> bytes | None:
    """Return the failure inside the document of a failure: of a job in a run that was in the place of a node. None for
    the document of a job.
    """
    try:
        inner = msgspec.json.decode(document, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, RecursionError):
        return None
    for name in ("cause", "error"):
        if name in inner and bytes(inner[name]) != b"null":
            return bytes(inner[name])
    return None
