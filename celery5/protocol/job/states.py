"""States: what a job can be, and which step leads from one state to the next.

Rule 1: everything about states and transitions lives here. The scripts write these states and no others; the diagram
in the documentation is rendered from the table. The states are Fennel's (F15) with those that the CEP needs.
"""

from collections.abc import Mapping
from enum import StrEnum


class JobState(StrEnum):
    """The state of one job. The values are what the wire, the logs and the command line say."""

    UNKNOWN = "UNKNOWN"  # nothing is known of the id: never sent here, or its result has expired
    SENT = "SENT"  # on its queue
    SCHEDULED = "SCHEDULED"  # waits in Redis for its time
    HELD = "HELD"  # waits in Redis, as it is: its task's circuit breaker is open
    EXECUTING = "EXECUTING"  # handed to a worker
    RETRY = "RETRY"  # failed, waits in Redis for its next attempt
    SUCCESS = "SUCCESS"
    DEAD = "DEAD"  # in the dead-letter queue
    REJECTED = "REJECTED"
    REVOKED = "REVOKED"
    EXPIRED = "EXPIRED"  # not started before its `expires`


class Move(StrEnum):
    """What can happen to a job."""

    SEND = "send"
    SCHEDULE = "schedule"
    HOLD = "hold"
    FALL_DUE = "fall due"
    START = "start"
    SUCCEED = "succeed"
    RETRY = "retry"
    BURY = "bury"
    RELEASE = "release"
    RECOVER = "recover"
    REVOKE = "revoke"
    REJECT = "reject"
    EXPIRE = "expire"
    REPLAY = "replay"


_S, _M = JobState, Move

TRANSITIONS: Mapping[JobState, Mapping[Move, JobState]] = {
    _S.UNKNOWN: {_M.SEND: _S.SENT, _M.SCHEDULE: _S.SCHEDULED},
    _S.SENT: {_M.START: _S.EXECUTING, _M.HOLD: _S.HELD, _M.REVOKE: _S.REVOKED},
    _S.SCHEDULED: {_M.FALL_DUE: _S.SENT, _M.REVOKE: _S.REVOKED},
    _S.HELD: {_M.FALL_DUE: _S.SENT, _M.RELEASE: _S.SENT, _M.REVOKE: _S.REVOKED},
    _S.EXECUTING: {
        _M.SUCCEED: _S.SUCCESS,
        _M.RETRY: _S.RETRY,
        _M.BURY: _S.DEAD,
        _M.HOLD: _S.HELD,
        _M.RELEASE: _S.SENT,
        _M.RECOVER: _S.SENT,
        _M.REVOKE: _S.REVOKED,
        _M.REJECT: _S.REJECTED,
        _M.EXPIRE: _S.EXPIRED,
    },
    _S.RETRY: {_M.FALL_DUE: _S.SENT, _M.REVOKE: _S.REVOKED},
    _S.DEAD: {_M.REPLAY: _S.SENT},
    _S.SUCCESS: {},
    _S.REJECTED: {},
    _S.REVOKED: {},
    _S.EXPIRED: {},
}

FINISHED = frozenset({_S.SUCCESS, _S.DEAD, _S.REJECTED, _S.REVOKED, _S.EXPIRED})
"""The terminal states: I1 promises that every job ends in one of them. A dead job leaves its state only by replay."""


class IllegalTransition(ValueError):
    """A move that the table does not have."""


def advance(state: JobState, move: Move) -> JobState:
    """The state after `move`. Raises IllegalTransition when the table has no such step."""
    try:
        return TRANSITIONS[state][move]
    except KeyError:
        raise IllegalTransition(f"a job in state {state.value} cannot {move.value}") from None
