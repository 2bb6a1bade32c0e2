"""Retry policy: how often a failed job is tried again, and how long it waits before that.

Floor: protocol. Reads: nothing. Writes: nothing.
"""

from collections.abc import Callable, Iterable
from typing import Annotated, get_type_hints

import msgspec
from msgspec import Meta

from celery5.errors import Misconfigured
from celery5.protocol.backoff import full_jitter, linear

LONGEST = 100 * 365 * 86400.0
"""Seconds. No wait is longer: a hundred years are for ever, and still fit every clock and script."""


class RetryPolicy(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a failed job is tried again (CEP rows C21 and C22; Fennel's F3 and F17).

    `max_retries` counts further attempts after the first. The wait before retry n (from 0) grows as `backoff` * 2**n
    seconds up to `cap` seconds, or, with a `step`, as `backoff` + n * `step`; with `jitter` it is drawn evenly between
    nothing and that, so that a crowd spreads out. `autoretry_for` names the errors to try again for, by the full names
    of their classes or of any base of theirs (none: all); `dont_autoretry_for` those never to, which wins.
    """

    max_retries: Annotated[int, Meta(ge=0)] = 3
    backoff: Annotated[float, Meta(ge=0, le=LONGEST)] = 1.0
    cap: Annotated[float, Meta(ge=0, le=LONGEST)] = 3600.0
    jitter: bool = True
    step: Annotated[float, Meta(ge=0, le=LONGEST)] | None = None
    autoretry_for: tuple[str, ...] = ()
    dont_autoretry_for: tuple[str, ...] = ()

    def checked(self) -> "RetryPolicy":
        """Itself; raises Misconfigured when a number makes no sense."""
        for name, kind in _TYPES.items():
            try:
                msgspec.convert(getattr(self, name), kind)
            except msgspec.ValidationError as error:
                raise Misconfigured(f"{name} is {getattr(self, name)!r}: {error}") from None
        return self

    def allows(self, attempt: int) -> bool:
        """Whether a job that failed at `attempt` (from 1) may be tried again."""
        return attempt <= self.max_retries

    def covers(self, kinds: Iterable[str]) -> bool:
        """Whether an error is tried again for, by the names of its class and bases."""
        if not (self.autoretry_for or self.dont_autoretry_for):
            return True
        names = set(kinds)
        wanted = not self.autoretry_for or not names.isdisjoint(self.autoretry_for)
        return wanted and names.isdisjoint(self.dont_autoretry_for)

    def delay(self, attempt: int, random: Callable[[], float]) -> float:
        """Seconds to wait after `attempt` (from 1) failed. `random` gives numbers in [0, 1)."""
        draw = random if self.jitter else _most
        if self.step is not None:
            return draw() * linear(attempt - 1, start=self.backoff, step=self.step, cap=self.cap)
        return full_jitter(attempt - 1, start=self.backoff, cap=self.cap, random=draw)


def _most() -> float:
    return 1.0


_TYPES = get_type_hints(RetryPolicy, include_extras=True)
