"""Timing: every limit of a connection to the broker, in one frozen value.

Floor: broker. Reads: nothing. Writes: nothing.
"""

from dataclasses import dataclass


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
