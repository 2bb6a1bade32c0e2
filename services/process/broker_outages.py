"""Try again until Redis serves again, and log each outage once.

Three ways, by what follows an error of the broker:

- `retry_until_available`: the service can do nothing else before the call succeeds.
- `OutageLog.suppressing`: the next try comes by itself, such as at the next interval.
- `last_try`: there is no next try, since the service ends; others wait for its lease to lapse.

In an outage a try costs nothing: the connection (`broker/connection/link.py`) has the backoff, with jitter, and the
breaker, and refuses calls at once meanwhile. These services have loops of their own:

- An error on one queue or broker must not hold up the others: `Mover`, `SinkDelivery`, `RunRelay`, `OutboxRelay`.
- An error makes what was known unknown: `HistoryRollup`, `AlertEvaluator`, `QueueDepths`, `Recoverer`, which looks
  again after the next heartbeat, and `KindRates`, which lets jobs without a rate pass.
- What is tried changes between two attempts: `ResultPublisher`, whose batch shrinks.
- What is tried runs and does not return: `RemoteBrokerSchedules` and `BackgroundBoot`, which end with errors of their
  services, the connections of a `MessagePublisher`, which wait for the broker themselves, and the sources of
  `SourceIngestion`, the user's code, after whose errors the delay grows.
"""

from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from typing import Any, TypeVar

import trio

from celery5.broker.transient_errors import is_transient
from celery5.errors import BrokerError
from celery5.logs.log import Level, Log

T = TypeVar("T")

RETRY_INTERVAL = 0.5
"""Seconds between two tries."""
SHORT_RETRY_INTERVAL = 0.1
"""Seconds between two tries of what jobs or records wait for."""
LAST_TRY_LIMIT = 2.0
"""Seconds that a service may take to give up a lease or a turn when it ends; otherwise that lapses."""


class OutageLog:
    """Logs the outages of one service: one line when it is interrupted, one when it resumes.

    Both are at level debug if the process has logged the outage of the broker already (`broker:disconnected`).

    Args:
        interrupted_event: The log event of the first error of an outage.
        resumed_event: The log event of the recovery; None to log none.
        level: The level of `interrupted_event`.
        hint: The field `hint` of `interrupted_event`; '' for none.
        logs_repeats: Whether the further errors of an outage are logged, too, at level debug.
        fields: Further fields of both lines.
    """

    def __init__(
        self,
        log: Log,
        interrupted_event: str,
        resumed_event: str | None = None,
        *,
        level: Level = "warning",
        hint: str = "",
        logs_repeats: bool = False,
        **fields: Any,
    ) -> None:
        self._log = log
        self._interrupted_event = interrupted_event
        self._resumed_event = resumed_event
        self._level: Level = level
        self._hint = {"hint": hint} if hint else {}
        self._logs_repeats = logs_repeats
        self._fields = fields
        self._since: float | None = None
        self._is_explained = False

    def record_error(self, error: Exception) -> None:
        """Log the error, if it is the first one of an outage, or repeats are logged.

        The first error that has another cause than the outage of the broker counts as the first, too.
        """
        is_explained = self._log.lost_connections.explains(error)
        is_first = self._since is None or (self._is_explained and not is_explained)
        if is_first:
            self._since = trio.current_time() if self._since is None else self._since
            self._is_explained = is_explained
        if is_first or self._logs_repeats:
            level: Level = self._level if is_first and not is_explained else "debug"
            self._log.event(self._interrupted_event, level, why=str(error), **self._fields, **self._hint)

    def record_recovery(self) -> None:
        """Log the end of an outage, if there was one."""
        if self._since is not None:
            seconds, self._since = round(trio.current_time() - self._since, 1), None
            if self._resumed_event is not None:
                level: Level = "debug" if self._is_explained else "info"
                self._log.event(self._resumed_event, level, after=seconds, **self._fields)

    @contextmanager
    def suppressing(self) -> Generator[None]:
        """Log an error of the broker that ends this block, and do not raise it: the caller tries again later."""
        try:
            yield
        except BrokerError as error:
            self.record_error(error)
        else:
            self.record_recovery()


async def retry_until_available(
    attempt: Callable[[], Awaitable[T]],
    outages: OutageLog | None,
    interval: float = RETRY_INTERVAL,
    *,
    even_refused: bool = False,
) -> T:
    """Await `attempt()` until the broker serves it, and return its result.

    What must be done after a lost reply is done in `attempt`, which raises the error again.

    Args:
        attempt: One try. It is repeated from its beginning, so whatever it does before the error must be repeatable.
        outages: Logs the first error of an outage and the recovery; None where nothing is to be logged.
        interval: Seconds between two tries. Where it does something at intervals anyway, it is this interval.
        even_refused: Try again also after an error that no later try cures by itself, such as a missing permission.

    Raises:
        BrokerError: One that trying again later does not cure.
    """
    while True:
        try:
            result = await attempt()
        except BrokerError as error:
            if not (even_refused or is_transient(error)):
                raise
            if outages is not None:
                outages.record_error(error)
            await trio.sleep(interval)
        else:
            if outages is not None:
                outages.record_recovery()
            return result


@contextmanager
def last_try(log: Log, event: str, **fields: Any) -> Generator[None]:
    """Run this block also when the service is cancelled, for LAST_TRY_LIMIT seconds.

    An error of the broker is logged as `event` at level debug, with `fields`, and not raised.
    """
    with trio.move_on_after(LAST_TRY_LIMIT, shield=True):
        try:
            yield
        except BrokerError as error:
            log.event(event, "debug", why=str(error), **fields)
