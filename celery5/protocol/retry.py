"""Retry policy: how often a failed job is tried again, and how long it waits before that.

Floor: protocol. Reads: nothing. Writes: nothing.
"""

from collections.abc import Callable

import msgspec

from celery5.errors import Misconfigured
from celery5.protocol.backoff import full_jitter


class RetryPolicy(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a failed job is tried again (CEP rows C21 and C22; Fennel's F3 and F17).

    `max_retries` counts further attempts after the first. The wait before retry n (from 0) grows as `backoff` * 2**n
    seconds up to `cap` seconds; with `jitter` it is drawn evenly between nothing and that, so that a crowd spreads out.
    """

    max_retries: int = 3
    backoff: float = 1.0
    cap: float = 3600.0
    jitter: bool = True

    def checked(self) -> "RetryPolicy":
        """Itself; raises Misconfigured when a number makes no sense."""
        if self.max_retries < 0:
            raise Misconfigured(f"max_retries is {self.max_retries}: use 0 for one attempt only, or more")
        if self.backoff < 0 or self.cap < 0:
            raise Misconfigured(f"backoff ({self.backoff}) and cap ({self.cap}) are seconds, at least 0")
        return self

    def allows(self, attempt: int) -> bool:
        """Whether a job that failed at `attempt` (from 1) may be tried again."""
        return attempt <= self.max_retries

    def delay(self, attempt: int, random: Callable[[], float]) -> float:
        """Seconds to wait after `attempt` (from 1) failed. `random` gives numbers in [0, 1)."""
        draw = random if self.jitter else _most
        return full_jitter(attempt - 1, start=self.backoff, cap=self.cap, random=draw)


def _most() -> float:
    return 1.0
