"""Waits: tells that somebody waits for Redis, once for each outage, and when he goes on.

Floor: services. Reads: nothing. Writes: log messages.
"""

import trio

from celery5.log import Log


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
