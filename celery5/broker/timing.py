"""Time limits of a connection, and how long result waiters tolerate an outage of the broker."""

from random import random

import msgspec

from celery5.errors import BrokerError, BrokerUnavailable
from celery5.protocol.job.retry_policy import full_jitter


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """Time limits of a connection, in seconds.

    `backoff_cap` and `breaker_reset` decide how long recovery takes after an outage: with 1 s each, a connection works
    again within 2 s.
    """

    connect: float = 5.0
    """One attempt to connect, handshake included."""
    reply: float = 10.0
    """Any reply; also how long a call waits for a connection."""
    idle_ping: float = 15.0
    """Silence after which the server is sent a PING."""
    first_connect: float = 5.0
    """How long `run` tries to reach a server that it has never reached."""
    backoff_start: float = 0.05
    """The pause after the first failure; it doubles with each one, with full jitter."""
    backoff_cap: float = 1.0
    """The longest pause between two attempts."""
    breaker_failures: int = 3
    """Failures in a row that open the circuit breaker."""
    breaker_reset: float = 1.0
    """The pause until the breaker's probe."""
    max_unsent_bytes: int = 64 * 1024 * 1024
    """Bytes that may wait to be sent; further calls are refused."""


OUTAGE_LIMIT = 30.0
"""Seconds without a connection after which a wait fails even if it has no limit."""


class Outage:
    """The current outage of one connection. `error` is its last error, None while the connection works."""

    def __init__(self, timing: Timing) -> None:
        self._timing = timing
        self._attempts = 0
        self._since = 0.0
        self.error: BrokerError | None = None

    def reset(self) -> None:
        """End the outage: connected."""
        self._attempts = 0
        self.error = None

    def record_failure(self, error: BrokerError, now: float) -> bool:
        """Record a failed attempt. Return whether there is no point in another one."""
        if self.error is None:
            self._since = now
        self.error = error
        self._attempts += 1
        return not isinstance(error, BrokerUnavailable) or now - self._since >= OUTAGE_LIMIT

    def next_pause(self) -> float:
        """Return the seconds until the next attempt."""
        start, cap = self._timing.backoff_start, self._timing.backoff_cap
        return full_jitter(self._attempts, start=start, cap=cap, random=random)
