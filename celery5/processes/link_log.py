"""Link log: says in the log what happens to a connection.

Floor: processes. Reads: nothing. Writes: log messages.
"""

from dataclasses import asdict

from celery5.broker.on_trio import (
    BreakerClosed,
    BreakerOpened,
    LinkConnected,
    LinkConnectFailed,
    LinkEvent,
    LinkLost,
)
from celery5.log import Level, Log

_SAID: dict[type, tuple[str, Level]] = {
    LinkConnected: ("redis:connected", "info"),
    LinkConnectFailed: ("redis:connect-failed", "debug"),
    LinkLost: ("redis:lost", "warning"),
    BreakerOpened: ("redis:breaker-opened", "warning"),
    BreakerClosed: ("redis:breaker-closed", "info"),
}


class ConnectionLog:
    """Writes each link event as one log message."""

    def __init__(self, *, log: Log) -> None:
        self._log = log

    def __call__(self, event: LinkEvent) -> None:
        """One event."""
        name, level = _SAID[type(event)]
        fields = asdict(event)
        if fields.pop("is_error", False):
            level = "error"
        self._log.event(name, level, **fields)
