"""Notice when a server refuses calls that it takes at other times, and when it takes them again."""

from collections.abc import Callable
from typing import Any

from celery5.broker.call import Call
from celery5.broker.connection.link import CallsAccepted, CallsRefused
from celery5.errors import BrokerError
from celery5.protocol.health.server_memory import OUT_OF_MEMORY
from celery5.protocol.health.server_refusals import get_refusal_code


class RefusedCalls:
    """The calls that the server at `where` refuses to one connection, which passes events on with `report`."""

    def __init__(self, where: str, report: Callable[[CallsRefused | CallsAccepted], None]) -> None:
        self._where = where
        self._report = report
        self.kinds: dict[str, set[Any]] = {}
        """Kinds of refused calls, by the reason: while there are some, `record_accepted` is to be called."""

    def record_refused(self, call: Call[Any], error: BrokerError) -> None:
        """Record that the server has refused a call, if it may take it at other times."""
        code = get_refusal_code(error)
        if not code:
            return
        self.kinds.setdefault(code, set()).add(_get_kind(call))
        if code != OUT_OF_MEMORY:  # how full it is must be read first
            self._report(CallsRefused(self._where, str(error), code))

    def record_full(self, error: BrokerError) -> None:
        """Record how full the server is that has refused a call since its memory is full."""
        self._report(CallsRefused(self._where, str(error), OUT_OF_MEMORY))

    def record_accepted(self, call: Call[Any]) -> None:
        """Record that the server has run a call. It refuses none any more for which it had refused this kind."""
        for code in [code for code, kinds in self.kinds.items() if _get_kind(call) in kinds]:
            del self.kinds[code]
            self._report(CallsAccepted(self._where, code))

    def end(self) -> None:
        """Record that the connection has ended: nobody would notice an acceptance."""
        for code in self.kinds:
            self._report(CallsAccepted(self._where, code, is_end=True))
        self.kinds.clear()


def _get_kind(call: Call[Any]) -> Any:
    """Return the script or the command of a call: a server that refuses some of them may run others."""
    return call.words[0] if call.script is None else call.script.name
