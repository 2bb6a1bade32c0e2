"""Define the states of a job, its places in Redis, and the transitions.

All code that shows a job's state reads this table. The Lua scripts write these places and make these moves and no
others (a test checks the table against each script), and the diagram in the documentation is drawn from it.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Literal

# A queue has a stream, a lane, for each priority, and one for the jobs that a worker got from a waiting list.
# In a job's place and in a delivery, the letter of its lane follows the id of an entry:
# `1700000000000-0h`.
Priority = Literal["high", "normal", "low"]
"""The priorities of a job."""

NORMAL, HIGH, LOW, ADMITTED = "", "h", "l", "g"
"""The letters of the lanes. The normal one has none."""

LANES: Mapping[str, str] = {"high": HIGH, "normal": NORMAL, "low": LOW}
"""The lane of each priority, the most urgent one first."""


def get_lane(priority: object) -> str:
    """Return the lane of a job whose message has that `priority`: the normal one for any other value."""
    return LANES.get(priority, NORMAL) if isinstance(priority, str) else NORMAL


def get_stream_id(entry: bytes) -> bytes:
    """Return the id of an entry on its stream, without the letter of its lane."""
    return entry if entry[-1:].isdigit() else entry[:-1]


class JobState(StrEnum):
    """The state of one job. The values are used in messages, logs and on the command line."""

    UNKNOWN = "UNKNOWN"  # no record of the id: it was never sent to this queue, or its result has expired
    SENT = "SENT"  # on its queue
    SCHEDULED = "SCHEDULED"  # waits in Redis for its time
    # Waits in Redis, unchanged: for its task's circuit breaker, or in the waiting list of a limit.
    HELD = "HELD"
    EXECUTING = "EXECUTING"  # given to a worker
    RETRY = "RETRY"  # failed, waits in Redis for its next attempt
    SUCCESS = "SUCCESS"
    DEAD = "DEAD"  # in the dead-letter queue
    REJECTED = "REJECTED"
    REVOKED = "REVOKED"
    EXPIRED = "EXPIRED"  # not started before its `expires`


class Place(StrEnum):
    """Where Redis keeps a job: the first letter of its field in the hash `jobs`. The comment says what follows it.

    A job that has ended has no place, unless it is dead. After all but `G` and `X` comes the letter of its lane.
    """

    STREAM = "S"  # the id of its entry on a stream
    REVOKED = "V"  # the same; it was revoked while a worker had it, and ends when that worker settles it
    SCHEDULED = "D"  # nothing: it waits for its time
    RETRY = "R"  # nothing: it waits for its next attempt
    HELD = "H"  # how many workers died with it, '' for none: it waits for a circuit breaker
    LIMITED = "G"  # the same number, a space, and the waiting list of a limit that it is in
    DEAD = "X"  # the id of its entry in the dead-letter queue


def get_entry(place: str) -> str:
    """Return the entry of a job with that place, with the letter of its lane; '' when it is not on a stream."""
    return place[1:] if place[:1] in (Place.STREAM, Place.REVOKED) else ""


class Move(StrEnum):
    """What can happen to a job."""

    SEND = "send"
    SCHEDULE = "schedule"
    HOLD = "hold"
    FALL_DUE = "fall due"
    START = "start"
    SUCCEED = "succeed"
    RETRY = "retry"
    FAIL_FOR_GOOD = "fail for good"
    RELEASE = "release"
    RECOVER = "recover"
    REVOKE = "revoke"
    REJECT = "reject"
    EXPIRE = "expire"
    REPLAY = "replay"


_S, _M, _P = JobState, Move, Place

PLACES: Mapping[JobState, tuple[Place, ...]] = {
    _S.UNKNOWN: (),
    # Revoked: its worker has died, and recovery ends it.
    _S.SENT: (_P.STREAM, _P.REVOKED),
    _S.SCHEDULED: (_P.SCHEDULED,),
    _S.HELD: (_P.HELD, _P.LIMITED),
    # On a stream like a job that is SENT: only the group's pending entries show that a worker has it.
    _S.EXECUTING: (_P.STREAM, _P.REVOKED),
    _S.RETRY: (_P.RETRY,),
    _S.SUCCESS: (),
    _S.DEAD: (_P.DEAD,),
    _S.REJECTED: (),
    _S.REVOKED: (),
    _S.EXPIRED: (),
}
"""The places of a job in each state."""

TRANSITIONS: Mapping[JobState, Mapping[Move, JobState]] = {
    # Hold: a producer may put a job directly on the waiting list of its limit.
    _S.UNKNOWN: {_M.SEND: _S.SENT, _M.SCHEDULE: _S.SCHEDULED, _M.HOLD: _S.HELD},
    _S.SENT: {_M.START: _S.EXECUTING, _M.REVOKE: _S.REVOKED},
    _S.SCHEDULED: {_M.FALL_DUE: _S.SENT, _M.REVOKE: _S.REVOKED},
    # Release: off the waiting list of a limit. The script that does it gives the job to a worker in the same step.
    _S.HELD: {_M.FALL_DUE: _S.SENT, _M.RELEASE: _S.SENT, _M.REVOKE: _S.REVOKED},
    _S.EXECUTING: {
        _M.SUCCEED: _S.SUCCESS,
        _M.RETRY: _S.RETRY,
        _M.FAIL_FOR_GOOD: _S.DEAD,
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
"""The state after each move that a state allows."""

FINISHED = frozenset({_S.SUCCESS, _S.DEAD, _S.REJECTED, _S.REVOKED, _S.EXPIRED})
"""The terminal states: every job ends in one of them. A dead job leaves its state only by replay."""

_STATES_BY_PLACE: Mapping[str, JobState] = {
    place.value: state for state, places in PLACES.items() if state is not _S.EXECUTING for place in places
}


class IllegalTransition(ValueError):
    """A move that the table does not allow in that state."""


def advance(state: JobState, move: Move) -> JobState:
    """Return the state after `move`. Raises IllegalTransition when the state does not allow it."""
    try:
        return TRANSITIONS[state][move]
    except KeyError:
        raise IllegalTransition(f"a job in state {state.value} cannot {move.value}") from None


def get_state(place: str, *, has_worker: bool = False) -> JobState:
    """Return the state of a job that has not ended, or is dead.

    Args:
        place: Its field in `jobs`; '' and values not in this table are UNKNOWN.
        has_worker: Whether its entry is pending for a worker.
    """
    letter = place[:1]
    if has_worker and letter in PLACES[_S.EXECUTING]:
        return _S.EXECUTING
    return _STATES_BY_PLACE.get(letter, _S.UNKNOWN)
