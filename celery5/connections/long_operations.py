"""Long operations whose caller waits: an outage of Redis in the middle is waited for, and logged."""

import time

from celery5.broker.driver import AsyncDriver
from celery5.broker.drivers.retrying import RetryingDriver
from celery5.runners.context import LOG_EVENT

MAX_OUTAGE = 60.0
"""Seconds for which an operation waits whose caller waits for it."""


def persist(redis: AsyncDriver, operation: str) -> RetryingDriver:
    """Return the driver of an operation whose caller waits: it waits for a minute, and logs that it does.

    Args:
        redis: The driver that performs the calls.
        operation: What is done, for the log: a noun and a verb of the command line.
    """
    outage = _OperationOutage(operation)
    return RetryingDriver(
        redis, limit=MAX_OUTAGE, record_error=outage.record_error, record_recovery=outage.record_recovery
    )


class _OperationOutage:
    """Logs that an operation is interrupted, and that it goes on."""

    def __init__(self, operation: str) -> None:
        self._operation = operation
        self._since: float | None = None

    def record_error(self, error: Exception) -> None:
        if self._since is None:
            self._since = time.monotonic()
            LOG_EVENT.get()("operation:interrupted", "warning", operation=self._operation, why=str(error))

    def record_recovery(self) -> None:
        if self._since is not None:
            seconds, self._since = round(time.monotonic() - self._since, 1), None
            LOG_EVENT.get()("operation:resumed", "info", operation=self._operation, after=seconds)
