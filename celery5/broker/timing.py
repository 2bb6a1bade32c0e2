"""Outage: how long those who wait put up with a broker that cannot be reached, and how often they try."""

from dataclasses import dataclass
from random import random

from celery5.errors import BrokerError, BrokerUnavailable
from celery5.protocol.job.retry_policy import full_jitter


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """How long a connection waits for what. All times in seconds.

    `connect`: one attempt, handshake included. `reply`: any answer, and how long a call waits for a
    connection. `idle_ping`: silence after which the server is asked for a sign of life. `first_connect`: how
    long `run` tries before it gives up when the server was never reached. `backoff_start`, `backoff_cap`:
    pauses between attempts (full jitter). `breaker_failures`, `breaker_reset`: failures in a row that open
    the breaker, and the pause until its probe. `max_unsent_bytes`: what may wait to be sent; one call more is
    refused.

    The cap and the reset are what recovery costs after an outage: with 1 s each, a connection works again
    within 2 s.
    """

    connect: float = 5.0
    reply: float = 10.0
    idle_ping: float = 15.0
    first_connect: float = 5.0
    backoff_start: float = 0.05
    backoff_cap: float = 1.0
    breaker_failures: int = 3
    breaker_reset: float = 1.0
    max_unsent_bytes: int = 64 * 1024 * 1024


OUTAGE_LIMIT = 30.0
"""Seconds without a connection after which even those who wait without a limit are told."""


class Outage:
    """The outage of one connection, if there is one now: its last `error`, None while all is well."""

    def __init__(self, timing: Timing) -> None:
        self._timing = timing
        self._attempts = 0
        self._since = 0.0
        self.error: BrokerError | None = None

    def reset(self) -> None:
        """Connected."""
        self._attempts = 0
        self.error = None

    def record_failure(self, error: BrokerError, now: float) -> bool:
        """An attempt failed. True when there is no point in another one."""
        if self.error is None:
            self._since = now
        self.error = error
        self._attempts += 1
        return not isinstance(error, BrokerUnavailable) or now - self._since >= OUTAGE_LIMIT

    def next_pause(self) -> float:
        """Seconds until the next attempt."""
        start, cap = self._timing.backoff_start, self._timing.backoff_cap
        return full_jitter(self._attempts, start=start, cap=cap, random=random)
