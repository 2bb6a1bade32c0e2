"""Passing: which troubles with Redis pass by themselves, so that a worker waits instead of ending."""

from collections.abc import Awaitable, Callable
from typing import TypeVar

import trio

from celery5.errors import BrokerReplied, BrokerUnavailable
from celery5.logs.log import Log

T = TypeVar("T")

_CODES = frozenset({"OOM", "MISCONF", "NOREPLICAS", "UNBLOCKED"})
"""Memory is full; the disk is full; too few replicas; a blocked read was ended, by a failover or a lost key."""
_OF_ONE_KEY = frozenset({"WRONGTYPE", "UNREADABLE"})
"""Another program has written to a key: it has another type, or holds what cannot be read."""


def is_recoverable(error: BrokerReplied | BrokerUnavailable) -> bool:
    """Return whether trying again later makes sense. An unreachable broker comes back, a spoilt key is repaired."""
    return is_outage(error) or is_key_corrupt(error)


def is_outage(error: BrokerReplied | BrokerUnavailable) -> bool:
    """Return whether the error is transient and affects every call, whatever its key."""
    return isinstance(error, BrokerUnavailable) or error.code in _CODES


def is_transient(error: BaseException) -> bool:
    """Return whether this is a transient error of the broker.

    The same for a process that runs and for one that begins again: both wait for transient errors.
    """
    return isinstance(error, BrokerReplied | BrokerUnavailable) and is_recoverable(error)


def is_key_corrupt(error: Exception) -> bool:
    """Return whether Redis works, and the content of one key causes the error."""
    return isinstance(error, BrokerReplied) and error.code in _OF_ONE_KEY


class OutageLog:
    """The outages of one service, and the names of its lines: it is `waiting`, it has `resumed`. What else there is to
    say about it stands in both."""

    def __init__(self, log: Log, interrupted_event: str, resumed_event: str, **about: str) -> None:
        self._log = log
        self._waiting = interrupted_event
        self._resumed = resumed_event
        self._about = about
        self._since: float | None = None

    def record_error(self, error: Exception) -> None:
        """Redis does not serve, for this reason."""
        if self._since is None:
            self._since = trio.current_time()
            self._log.event(self._waiting, "warning", why=str(error), **self._about)

    def record_recovery(self) -> None:
        """It serves."""
        if self._since is not None:
            away, self._since = round(trio.current_time() - self._since, 1), None
            self._log.event(self._resumed, "info", after=away, **self._about)


async def retry_until_available(
    attempt: Callable[[], Awaitable[T]], outages: OutageLog, interval: float
) -> T:
    """Await `attempt()` until the broker serves it, and return its result.

    Whoever has to forget something after a lost answer does so in `attempt`, and lets the error through.

    Args:
        attempt: One try. It is made again from the beginning, so what it did before the error must bear repeating.
        outages: Logs the first error of an outage and the recovery.
        interval: Seconds between two tries.

    Raises:
        BrokerReplied: An error that trying again later does not cure.
    """
    while True:
        try:
            result = await attempt()
        except (BrokerUnavailable, BrokerReplied) as error:
            if not is_recoverable(error):
                raise
            outages.record_error(error)
            await trio.sleep(interval)
        else:
            outages.record_recovery()
            return result
