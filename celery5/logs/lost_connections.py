"""Log an outage of a broker with one line when it begins, and one when it is over.

A process has several connections to each broker, and an outage ends all of them. What happens to each connection is
logged at level debug. So are errors of services, if `explains` returns that the outage is their cause. A server that
refuses new connections, such as one whose password has changed, is an error, logged once in the outage. A server that
refuses calls, such as one whose memory is full or which takes no writes, is handled in the same way.
"""

import time
from collections.abc import Callable

from celery5.errors import BrokerDenied, BrokerUnavailable
from celery5.protocol.health.server_memory import OUT_OF_MEMORY
from celery5.protocol.health.server_refusals import READ_ONLY, REFUSALS, get_refusal_code


class _Outage:
    """One outage: when it began, and which connections and calls it has affected."""

    def __init__(self, *, began: float, is_explained: bool) -> None:
        self.began = began
        # Whether another line says why connections are lost.
        self.is_explained = is_explained
        # Connections that are lost now, and how often one was lost in all.
        self.down = 0
        self.lost = 0
        # Calls that may or may not have run, and calls that are sent again.
        self.failed = 0
        self.resent = 0


class LostConnections:
    """Counts the lost connections of one process, by the address of their broker.

    Args:
        write: Logs an event of the process.
    """

    def __init__(self, write: Callable[..., None]) -> None:
        self._write = write
        self._outages: dict[str, _Outage] = {}
        # When each server refused the first call, and why it refused the last one, for each kind of refusal.
        self._refusing: dict[tuple[str, str], float] = {}
        self._refusals: dict[tuple[str, str], str] = {}
        # Brokers of which an error was logged since they were reachable.
        self._escalated: set[str] = set()

    def record_loss(self, where: str, why: str, *, failed: int, resent: int, silence: float = 0.0) -> None:
        """Record that a connection to the broker at `where` was lost, which had not answered for `silence` seconds."""
        began = time.monotonic() - silence
        if where not in self._outages:
            is_explained = (where, READ_ONLY) in self._refusing  # each refused write ends a connection
            self._outages[where] = _Outage(began=began, is_explained=is_explained)
            level = "debug" if is_explained else "warning"
            self._write("broker:disconnected", level, where=where, why=why)
        outage = self._outages[where]
        outage.began = min(outage.began, began)
        outage.down += 1
        outage.lost += 1
        outage.failed += failed
        outage.resent += resent

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
                "debug" if outage.is_explained else "info",
                where=where,
                after=round(time.monotonic() - outage.began, 1),
                connections=outage.lost,
                failed=outage.failed,
                resent=outage.resent,
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

    def record_refusal(self, where: str, why: str, code: str) -> None:
        """Record that the broker at `where` has refused a call for the reason of this code."""
        self._refusals[where, code] = why
        if (where, code) not in self._refusing:
            self._refusing[where, code] = time.monotonic()
            hint = REFUSALS[code].hint
            if code == OUT_OF_MEMORY:
                self._write("broker:full", "error", where=where, why=why, hint=hint)
            else:
                self._write("broker:refused", REFUSALS[code].level, where=where, why=why, hint=hint)

    def record_acceptance(self, where: str, code: str, *, is_end: bool = False) -> None:
        """Record that the broker at `where` accepts such calls again; `is_end`: nobody would notice any more."""
        self._refusals.pop((where, code), None)
        began = self._refusing.pop((where, code), None)
        if began is not None:
            level = "debug" if is_end else "info"
            seconds = round(time.monotonic() - began, 1)
            if code == OUT_OF_MEMORY:
                self._write("broker:writable", level, where=where, after=seconds)
            else:
                self._write("broker:accepted", level, where=where, after=seconds)

    def get_refusals(self) -> dict[str, str]:
        """Return why each server that is full refuses writes, by its address. Any thread may call this."""
        return {where: why for (where, code), why in self._refusals.copy().items() if code == OUT_OF_MEMORY}

    def is_lost(self, where: str) -> bool:
        """Return whether a connection to this broker is lost now."""
        return where in self._outages

    def explains(self, error: BaseException) -> bool:
        """Return whether an outage that is logged is the cause of an error."""
        code = get_refusal_code(error)
        if any(where in str(error) for where, refused in self._refusing if refused == code):
            return True
        explained = set(self._outages)
        if isinstance(error, BrokerDenied):
            explained &= self._escalated
        elif not isinstance(error, BrokerUnavailable):
            return False
        return any(where in str(error) for where in explained)
