"""Health: the calls for the states of global health checks, which all workers of an application share."""

import math

import msgspec

from celery5.broker.call import Call
from celery5.broker.keys import Keys
from celery5.protocol.health.readings import CheckReading

TURN_SHARE = 0.9
"""The share of a period for which one worker's turn lasts: it is over when the next look is due."""
MAX_STATE_TTL = 7 * 86400.0
"""Seconds for which a state is kept that is never stale."""

_DECODER = msgspec.json.Decoder(CheckReading)


def claim_turn(keys: Keys, check: str, period: float) -> Call[bool]:
    """Return whether it is the caller's turn to run a check for all workers.

    A repeated call may return False: then nobody runs the check this time.
    """
    ms = max(1, int(TURN_SHARE * period * 1000))
    return Call(("SET", keys.check_turn(check), "1", "NX", "PX", ms), bool, repeatable=True)


def claim_notice(keys: Keys, check: str, period: float) -> Call[bool]:
    """Return whether it is the caller's turn to notify all workers that the period of a check has lapsed."""
    ms = max(1, int(TURN_SHARE * period * 1000))
    return Call(("SET", keys.check_notice(check), "1", "NX", "PX", ms), bool, repeatable=True)


def read_state(keys: Keys, check: str) -> Call[CheckReading | None]:
    """Return the state of a check; None when nobody has checked lately."""
    return Call(("GET", keys.check(check)), _reading, repeatable=True)


def write_state(keys: Keys, reading: CheckReading, *, ttl: float) -> Call[bool]:
    """Keep the state of a check for `ttl` seconds."""
    ms = int(1000 * (MAX_STATE_TTL if math.isinf(ttl) else ttl))
    return Call(
        ("SET", keys.check(reading.check), msgspec.json.encode(reading), "PX", ms), bool, repeatable=True
    )


def _reading(reply: bytes | None) -> CheckReading | None:
    try:
        return None if reply is None else _DECODER.decode(reply)
    except msgspec.DecodeError:
        return None
