"""Log an outage of a broker with one line when it begins, and one when it is over.

A process has several connections to each broker, and an outage ends all of them. What happens to each connection is
logged at level debug. So are errors of services, if `explains` returns that the outage is their cause. A server that
refuses new connections, such as one whose password has changed, is an error, logged once in the outage. A server whose
memory is full, so that it refuses writes, is handled in the same way.
"""

import time
from collections.abc import Callable

from celery5.errors import BrokerDenied, BrokerReplied, BrokerUnavailable
from celery5.protocol.health.server_memory import OUT_OF_MEMORY


class _Outage:
    """One outage: when it began, and which connections and calls it has affected."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        # Connections that are lost now, and how often one was lost in all.
        self.down = 0
        self.lost = 0
        # Calls that may or may not have run, and calls that are sent again.
        self.failed = 0
        self.requeued = 0


class LostConnections:
    """Counts the lost connections of one process, by the address of their broker.

    Args:
        write: Logs an event of the process.
    """

    def __init__(self, write: Callable[..., None]) -> None:
        self._write = write
        self._outages: dict[str, _Outage] = {}
        # When each server that is full refused the first write.
        self._full: dict[str, float] = {}
        self._refusals: dict[str, str] = {}
        # Brokers of which an error was logged since they were reachable.
        self._escalated: set[str] = set()

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
        """Record that a lost connection will not be made again, since its user has ended."""
        if outage := self._outages.get(where):
            outage.down -= 1

    def record_connection(self, where: str, *, is_return: bool) -> None:
        """Record that a connection was made. `is_return`: it was lost before."""
        outage = self._outages.get(where)
        if outage is None:
            self._escalated.discard(where)
            return
        outage.down -= is_return
        if outage.down <= 0:
            del self._outages[where]
            self._escalated.discard(where)
            self._write(
                "broker:reconnected",
                "info",
                where=where,
                after=round(time.monotonic() - outage.began, 1),
                connections=outage.lost,
                failed=outage.failed,
                requeued=outage.requeued,
            )

    def record_refused_connection(self, where: str, why: str) -> None:
        """Record that the broker at `where` refuses a lost connection until a person has corrected something."""
        if where in self._outages and self.escalate(where):
            hint = "it goes on by itself when that is corrected, in Redis or in its settings: see celery5 docs trust"
            self._write("broker:refused", "error", where=where, why=why, hint=hint)

    def escalate(self, where: str) -> bool:
        """Return whether an error about the broker at `where` is the first one since it was reachable."""
        is_first = where not in self._escalated
        self._escalated.add(where)
        return is_first

    def record_refusal(self, where: str, why: str) -> None:
        """Record that the broker at `where` has refused a write because its memory is full."""
        self._refusals[where] = why
        if where not in self._full:
            self._full[where] = time.monotonic()
            hint = "queues drain, and what adds work is refused: see celery5 docs failures"
            self._write("broker:full", "error", where=where, why=why, hint=hint)

    def record_write(self, where: str) -> None:
        """Record that the broker at `where` accepts writes again."""
        self._refusals.pop(where, None)
        began = self._full.pop(where, None)
        if began is not None:
            self._write("broker:writable", "info", where=where, after=round(time.monotonic() - began, 1))

    def get_refusals(self) -> dict[str, str]:
        """Return why each server that is full refuses writes, by its address. Any thread may call this."""
        return self._refusals.copy()

    def is_lost(self, where: str) -> bool:
        """Return whether a connection to this broker is lost now."""
        return where in self._outages

    def explains(self, error: BaseException) -> bool:
        """Return whether an outage that is logged is the cause of an error."""
        if isinstance(error, BrokerReplied):
            return error.code == OUT_OF_MEMORY and any(where in str(error) for where in self._full)
        explained = set(self._outages)
        if isinstance(error, BrokerDenied):
            explained &= self._escalated
        elif not isinstance(error, BrokerUnavailable):
            return False
        return any(where in str(error) for where in explained)
