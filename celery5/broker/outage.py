"""Outage: how long those who wait put up with a broker that cannot be reached, and how often they try.

Floor: broker. Pure: no clock. Reads: nothing. Writes: nothing.
"""

from random import random

from celery5.broker.timing import Timing
from celery5.errors import BrokerError, BrokerUnavailable
from celery5.protocol.backoff import full_jitter

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
