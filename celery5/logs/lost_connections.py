"""Group the connections that a process loses: one line when an outage of a broker begins, one when it is over.

A process has several connections to each broker, and an outage ends all of them. What happens to each is logged at
level debug; so are the errors that services have meanwhile, where `explains` says that the outage is their cause.
The same holds while a server refuses writes since its memory is full.
"""

import time
from collections.abc import Callable

from celery5.errors import BrokerReplied, BrokerUnavailable
from celery5.protocol.health.server_memory import OUT_OF_MEMORY


class _Outage:
    """What is known of one outage: when it began, and what it has cost so far."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        # Connections that are not back yet.
        self.down = 0
        self.lost = 0
        # Calls of which nobody knows whether they have run, and calls that are sent again.
        self.failed = 0
        self.requeued = 0


class LostConnections:
    """The connections of one process that are lost now, by the address of their broker.

    Args:
        write: Logs an event of the process.
    """

    def __init__(self, write: Callable[..., None]) -> None:
        self._write = write
        self._outages: dict[str, _Outage] = {}
        # When a server that is full has refused the first write.
        self._full: dict[str, float] = {}

    def record_loss(self, where: str, why: str, *, failed: int, requeued: int) -> None:
        """Record that a connection to the broker at `where` was lost."""
        if where not in self._outages:
            self._outages[where] = _Outage()
            self._write("broker:disconnected", "warning", where=where, why=why)
        outage = self._outages[where]
        outage.down += 1
        outage.lost += 1
        outage.failed += failed
        outage.requeued += requeued

    def record_end(self, where: str) -> None:
        """Record that a lost connection is not made again: what used it has ended."""
        if outage := self._outages.get(where):
            outage.down -= 1

    def record_connection(self, where: str, *, is_return: bool) -> None:
        """Record that a connection was made; `is_return` if it is one that was lost."""
        outage = self._outages.get(where)
        if outage is None:
            return
        outage.down -= is_return
        if outage.down <= 0:
            del self._outages[where]
            self._write(
                "broker:reconnected",
                "info",
                where=where,
                after=round(time.monotonic() - outage.began, 1),
                connections=outage.lost,
                failed=outage.failed,
                requeued=outage.requeued,
            )

    def record_refusal(self, where: str, why: str) -> None:
        """Record that the broker at `where` has refused a write since its memory is full."""
        if where not in self._full:
            self._full[where] = time.monotonic()
            hint = "queues drain, and what adds work is refused: see celery5 docs failures"
            self._write("broker:full", "error", where=where, why=why, hint=hint)

    def record_write(self, where: str) -> None:
        """Record that the broker at `where` takes writes that it has refused before."""
        began = self._full.pop(where, None)
        if began is not None:
            self._write("broker:writable", "info", where=where, after=round(time.monotonic() - began, 1))

    def is_lost(self, where: str) -> bool:
        """Return whether a connection to this broker is lost now."""
        return where in self._outages

    def explains(self, error: BaseException) -> bool:
        """Return whether an error follows from an outage that is logged."""
        if isinstance(error, BrokerReplied):
            return error.code == OUT_OF_MEMORY and any(where in str(error) for where in self._full)
        return isinstance(error, BrokerUnavailable) and any(where in str(error) for where in self._outages)
