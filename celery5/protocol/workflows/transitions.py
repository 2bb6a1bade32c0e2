"""What can happen to a run of a workflow and to its nodes, and what follows: the table that `advance.lua` follows.

What is not in the table changes nothing. The tests play each row, and each pair without a row, against the script; the
documentation shows the same table.
"""

from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Literal, NamedTuple

Kind = Literal["job", "child", "later", "member", "sleep", "wait", "undo"]
"""A node with one job; one whose job has returned a workflow, its child; a map whose items a job reads, until they are
known; a member of a map; a node that sleeps; a node that waits for a signal or an event; the undo task of a step that
has succeeded."""
Policy = Literal["fail", "continue", "skip", "apart", "hold", "ignore"]
"""What becomes of the run when the node fails: its `on_error`; `apart` in a branch of a fork; `ignore` when the state
in which its job has ended counts as success."""
COUNTS = ("active", "done", "bad", "skipped", "held", "undos", "undo_done", "undo_bad", "undo_purged")
"""The counters of a run."""


class NodeWord(StrEnum):
    """The state of a node as Redis keeps it, before its generation."""

    NONE = "none"  # not written: what is before it has not ended
    ACTIVE = "active"
    WAITING = "waiting"
    HELD = "held"
    DONE = "done"
    LATE = "late"
    FAILED = "failed"
    COUNTED = "counted"
    SKIPPED = "skipped"
    CUT = "cut"
    ENDING = "ending"
    AGAIN = "again"


class NodeMove(StrEnum):
    """What can happen to a node."""

    BEGIN = "all before it have ended"
    SKIP = "something before it has failed or was skipped"
    SUCCEED = "its job ends SUCCESS"
    DIE = "its job ends DEAD"
    EXPIRE = "its job ends EXPIRED"
    REVOKE = "its job ends REVOKED"
    REJECT = "its job ends REJECTED"
    LOSE = "its job is lost"
    RETURN = "its job returns no items"
    PURGE = "its dead letter is purged"
    SIGNAL = "the signal comes"
    FALL_DUE = "its time has come"
    DECIDE = "another one of a `first` succeeds"
    STOP = "the deadline of the run comes"
    RETRY = "the run is retried"


class RunMove(StrEnum):
    """What can happen to a run."""

    END = "its last node ends"
    FAIL = "a node fails"
    CANCEL = "it is cancelled"
    EXPIRE = "its deadline comes"
    LAST_JOB = "the last job that runs ends, without success"
    UNDONE = "the last undo job ends"
    RETRY = "it is retried"


class RunCondition(StrEnum):
    """What is so in a run, beside its state."""

    QUIET = "no job runs"
    ACTIVE = "a job without an undo task runs"
    MAY_UNDO = "a job with an undo task runs"
    UNDO = "a step with an undo task has ended"
    UNDONE = "that step is undone"


class NodeStep(NamedTuple):
    """What follows for a node and its run."""

    after: NodeWord
    # By how much the counters of the run change.
    counts: Mapping[str, int]
    # Whether the run fails by it.
    fails_run: bool = False


def _step(after: NodeWord, *, fails_run: bool = False, **counts: int) -> NodeStep:
    return NodeStep(after, {name: by for name, by in counts.items() if by}, fails_run)


_W, _M = NodeWord, NodeMove
StepsOfRow = NodeStep | Mapping[Policy, NodeStep]
"""What follows; by the policy of the node where it depends on that."""
Rows = Mapping[tuple[NodeWord, NodeMove], StepsOfRow]
_OTHER_ENDS = (_M.EXPIRE, _M.REVOKE, _M.REJECT, _M.LOSE)
_ENDS = (_M.DIE, *_OTHER_ENDS)


def _fail(active: int = 0) -> dict[Policy, NodeStep]:
    """Return what follows when a node fails for good that is not held."""
    return {
        "fail": _step(_W.FAILED, fails_run=True, bad=1, active=active),
        "continue": _step(_W.DONE, bad=1, active=active),
        "skip": _step(_W.COUNTED, bad=1, active=active),
        "apart": _step(_W.COUNTED, bad=1, active=active),
        "hold": _step(_W.FAILED, fails_run=True, bad=1, active=active),
        "ignore": _step(_W.DONE, done=1, active=active),
    }


_BEGINS: Rows = {
    (_W.NONE, _M.BEGIN): _step(_W.ACTIVE, active=1),
    (_W.NONE, _M.SKIP): _step(_W.SKIPPED, skipped=1),
    (_W.NONE, _M.DECIDE): _step(_W.CUT),
    (_W.AGAIN, _M.BEGIN): _step(_W.ACTIVE, active=1),
    (_W.AGAIN, _M.SKIP): _step(_W.SKIPPED, skipped=1),
    (_W.AGAIN, _M.DECIDE): _step(_W.CUT),
}
_WAITS: Rows = {
    **{pair: row for pair, row in _BEGINS.items() if pair[1] is not _M.BEGIN},
    (_W.NONE, _M.BEGIN): _step(_W.WAITING),
    (_W.AGAIN, _M.BEGIN): _step(_W.WAITING),
    (_W.WAITING, _M.DECIDE): _step(_W.CUT),
}
_SLEEPS_AGAIN: Rows = {(_W.SKIPPED, _M.RETRY): _step(_W.AGAIN, skipped=-1)}
_WAITS_AGAIN: Rows = {
    **_SLEEPS_AGAIN,
    (_W.FAILED, _M.RETRY): _step(_W.WAITING, bad=-1),
    (_W.COUNTED, _M.RETRY): _step(_W.WAITING, bad=-1),
}

_LATER: Rows = {
    **_BEGINS,
    (_W.ACTIVE, _M.RETURN): _step(_W.DONE, active=-1),  # from now on the members are counted: there are none
    (_W.ACTIVE, _M.DIE): {**_fail(active=-1), "hold": _step(_W.HELD, active=-1, held=1)},
    **{(_W.ACTIVE, move): _fail(active=-1) for move in _OTHER_ENDS},
    (_W.ACTIVE, _M.DECIDE): _step(_W.ENDING),
    (_W.HELD, _M.DECIDE): _step(_W.CUT, held=-1),
    (_W.HELD, _M.RETURN): _step(_W.DONE, held=-1),
    (_W.HELD, _M.PURGE): _step(_W.FAILED, fails_run=True, held=-1, bad=1),
    **{(_W.ENDING, move): _step(_W.CUT, active=-1) for move in (_M.RETURN, *_ENDS)},
}
_CHILD: Rows = {
    **_BEGINS,
    (_W.ACTIVE, _M.SUCCEED): _step(_W.DONE, active=-1, done=1),
    **{(_W.ACTIVE, move): _fail(active=-1) for move in (_M.DIE, _M.REVOKE)},
    # A child is cancelled with its parent.
    (_W.ACTIVE, _M.DECIDE): _step(_W.CUT, active=-1),
    (_W.ACTIVE, _M.STOP): _step(_W.FAILED, active=-1, bad=1),
}
_JOB_AGAIN: Rows = {
    (_W.FAILED, _M.RETRY): _step(_W.ACTIVE, bad=-1, active=1),
    (_W.COUNTED, _M.RETRY): _step(_W.ACTIVE, bad=-1, active=1),
    (_W.SKIPPED, _M.RETRY): _step(_W.AGAIN, skipped=-1),
}

LIVE_STEPS: Mapping[Kind, Rows] = {
    "job": {
        **_BEGINS,
        (_W.ACTIVE, _M.SUCCEED): _step(_W.DONE, active=-1, done=1),
        (_W.ACTIVE, _M.DIE): {**_fail(active=-1), "hold": _step(_W.HELD, active=-1, held=1)},
        **{(_W.ACTIVE, move): _fail(active=-1) for move in _OTHER_ENDS},
        (_W.ACTIVE, _M.DECIDE): _step(_W.ENDING),
        (_W.HELD, _M.DECIDE): _step(_W.CUT, held=-1),
        (_W.HELD, _M.SUCCEED): _step(_W.DONE, held=-1, done=1),
        (_W.HELD, _M.PURGE): _step(_W.FAILED, fails_run=True, held=-1, bad=1),
        **{(_W.ENDING, move): _step(_W.CUT, active=-1) for move in (_M.SUCCEED, *_ENDS)},
    },
    "child": _CHILD,
    "later": _LATER,
    # A member has no state of its own: it is what its bits and its map say. Its map ends with it here.
    "member": {
        **_BEGINS,
        (_W.NONE, _M.SKIP): _step(
            _W.SKIPPED
        ),  # the members of a map that is skipped are counted when the run has ended
        (_W.AGAIN, _M.SKIP): _step(_W.SKIPPED),
        (_W.ACTIVE, _M.SUCCEED): _step(_W.DONE, active=-1, done=1),
        (_W.ACTIVE, _M.DIE): {**_fail(active=-1), "hold": _step(_W.HELD, active=-1, held=1)},
        **{(_W.ACTIVE, move): _fail(active=-1) for move in _OTHER_ENDS},
        (_W.ACTIVE, _M.DECIDE): _step(_W.ENDING),
        (_W.HELD, _M.SUCCEED): _step(_W.DONE, held=-1, done=1),
        (_W.HELD, _M.PURGE): _step(_W.FAILED, fails_run=True, held=-1, bad=1),
        (_W.COUNTED, _M.SUCCEED): _step(_W.DONE, bad=-1, done=1),  # its dead letter was replayed
        (_W.ENDING, _M.SUCCEED): _step(_W.DONE, active=-1, done=1),
        **{(_W.ENDING, move): _step(_W.CUT, active=-1, bad=1) for move in _ENDS},
    },
    "sleep": {**_WAITS, (_W.WAITING, _M.FALL_DUE): _step(_W.DONE, done=1)},
    "wait": {
        **_WAITS,
        (_W.WAITING, _M.SIGNAL): _step(_W.DONE, done=1),
        (_W.WAITING, _M.FALL_DUE): _fail(),
    },
    "undo": {(_W.NONE, _M.STOP): _step(_W.ACTIVE, active=1, undos=1)},
}
"""What follows in a run that is live."""

STOPPED_STEPS: Mapping[Kind, Rows] = {
    "job": {
        (_W.ACTIVE, _M.SUCCEED): _step(_W.LATE, active=-1, done=1),
        **{(_W.ACTIVE, move): _step(_W.FAILED, active=-1, bad=1) for move in _ENDS},
        (_W.HELD, _M.SUCCEED): _step(_W.LATE, held=-1, done=1),
        **{(_W.HELD, move): _step(_W.FAILED, held=-1, bad=1) for move in (*_ENDS, _M.PURGE)},
        (_W.FAILED, _M.SUCCEED): _step(_W.LATE, bad=-1, done=1),
        (_W.ENDING, _M.SUCCEED): _step(_W.LATE, active=-1, done=1),
        **{(_W.ENDING, move): _step(_W.CUT, active=-1) for move in _ENDS},
        (_W.LATE, _M.RETRY): _step(_W.DONE),
        (_W.HELD, _M.RETRY): _step(_W.ACTIVE, held=-1, active=1),
        **_JOB_AGAIN,
    },
    "child": _JOB_AGAIN,  # it is the child that is retried
    "later": {
        # What is not begun yet does not begin any more.
        **{(_W.ACTIVE, move): _step(_W.FAILED, active=-1, bad=1) for move in (_M.RETURN, *_ENDS)},
        **{(_W.HELD, move): _step(_W.FAILED, held=-1, bad=1) for move in (_M.RETURN, *_ENDS, _M.PURGE)},
        **{(_W.ENDING, move): _step(_W.CUT, active=-1) for move in (_M.RETURN, *_ENDS)},
        (_W.HELD, _M.RETRY): _step(_W.ACTIVE, held=-1, active=1),
        **_JOB_AGAIN,
    },
    "member": {
        (_W.ACTIVE, _M.SUCCEED): _step(_W.DONE, active=-1, done=1),
        **{(_W.ACTIVE, move): _step(_W.FAILED, active=-1, bad=1) for move in _ENDS},
        (_W.HELD, _M.SUCCEED): _step(_W.DONE, held=-1, done=1),
        **{(_W.HELD, move): _step(_W.FAILED, held=-1, bad=1) for move in (*_ENDS, _M.PURGE)},
        **{(word, _M.SUCCEED): _step(_W.DONE, bad=-1, done=1) for word in (_W.FAILED, _W.COUNTED)},
        (_W.ENDING, _M.SUCCEED): _step(_W.DONE, active=-1, done=1),
        **{(_W.ENDING, move): _step(_W.CUT, active=-1, bad=1) for move in _ENDS},
        (_W.FAILED, _M.RETRY): _step(_W.ACTIVE, bad=-1, active=1),
        (_W.COUNTED, _M.RETRY): {"apart": _step(_W.ACTIVE, bad=-1, active=1)},
        (_W.HELD, _M.RETRY): _step(_W.ACTIVE, held=-1, active=1),
        (_W.SKIPPED, _M.RETRY): _step(_W.AGAIN),
    },
    "sleep": _SLEEPS_AGAIN,
    "wait": _WAITS_AGAIN,
    "undo": {
        (_W.ACTIVE, _M.SUCCEED): _step(_W.LATE, active=-1, undo_done=1),
        **{(_W.ACTIVE, move): _step(_W.FAILED, active=-1, undo_bad=1) for move in _ENDS},
        (_W.FAILED, _M.SUCCEED): _step(_W.LATE, undo_bad=-1, undo_done=1),
        (_W.FAILED, _M.PURGE): _step(_W.COUNTED, undo_purged=1),
    },
}
"""What follows in a run that has stopped: it has failed, expired or been cancelled, undone or not."""

_ENDS_OF_FAILED = ("failed", "cancelled", "expired")
RUN_STEPS: Mapping[tuple[str, RunMove], Mapping[RunCondition, str]] = {
    ("live", RunMove.END): {RunCondition.QUIET: "success", RunCondition.UNDO: "success"},
    ("live", RunMove.FAIL): {
        RunCondition.QUIET: "failed",
        RunCondition.ACTIVE: "failed",
        RunCondition.MAY_UNDO: "undoing failed",
        RunCondition.UNDO: "undoing failed",
    },
    ("live", RunMove.CANCEL): {
        RunCondition.QUIET: "cancelled",
        RunCondition.ACTIVE: "undoing cancelled",  # until it can say that nothing of it begins any more
        RunCondition.MAY_UNDO: "undoing cancelled",
        RunCondition.UNDO: "undoing cancelled",
    },
    ("live", RunMove.EXPIRE): {
        RunCondition.QUIET: "expired",
        RunCondition.ACTIVE: "expired",
        RunCondition.MAY_UNDO: "undoing expired",
        RunCondition.UNDO: "undoing expired",
    },
    **{(f"undoing {end}", RunMove.LAST_JOB): {RunCondition.MAY_UNDO: end} for end in _ENDS_OF_FAILED},
    **{(f"undoing {end}", RunMove.UNDONE): {RunCondition.UNDO: end} for end in _ENDS_OF_FAILED},
    ("undoing cancelled", RunMove.LAST_JOB): {
        RunCondition.ACTIVE: "cancelled",
        RunCondition.MAY_UNDO: "cancelled",
    },
    # Not while a job runs, and not when a step was undone.
    **{(end, RunMove.RETRY): {RunCondition.QUIET: "live"} for end in _ENDS_OF_FAILED},
}
"""The state of a run after what happens to it, in each condition that allows it."""


def find_step(kind: Kind, is_live: bool, word: NodeWord, move: NodeMove, policy: Policy) -> NodeStep | None:
    """Return what follows for a node; None when nothing changes."""
    row = (LIVE_STEPS if is_live else STOPPED_STEPS)[kind].get((word, move))
    return row if row is None or isinstance(row, NodeStep) else row.get(policy)


def list_policies(row: StepsOfRow) -> Iterator[tuple[str, NodeStep]]:
    """Yield what follows by a row, with the policies for which that is so; '' for all."""
    if isinstance(row, NodeStep):
        yield "", row
        return
    merged: dict[tuple[NodeWord, str, bool], tuple[list[str], NodeStep]] = {}
    for policy, step in row.items():
        key = (step.after, str(sorted(step.counts.items())), step.fails_run)
        merged.setdefault(key, ([], step))[0].append(policy)
    for policies, step in merged.values():
        yield ", ".join(policies), step
