"""Pool: the blocking connections of one process, shared by its threads, and the breaker that guards new ones.

Floor: broker. Reads: nothing. Writes: nothing.

Bounded in number, and waiting for one is bounded in time. The last one given back is the first one taken, so
that a process with one busy thread has one connection.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import replace

from celery5.broker.endpoint import Endpoint
from celery5.broker.handshake import Resp
from celery5.broker.socket_link import SocketLink, dial
from celery5.broker.timing import Timing
from celery5.errors import BrokerError, BrokerUnavailable, CircuitOpen
from celery5.protocol.breaker import Breaker, BreakerPolicy

NAME = "celery5-producer"


class Dialer:
    """Opens connections to one endpoint, unless the last attempts all failed:

    then it refuses at once, for a moment.
    """

    def __init__(self, endpoint: Endpoint, timing: Timing) -> None:
        self.endpoint = endpoint
        self.timing = timing
        self.start_over()

    def start_over(self) -> None:
        """Forget the past: a forked child starts with a lock that nobody holds."""
        self._lock = threading.Lock()
        self._breaker = new_breaker(self.timing)

    def dial(self, *, resp: Resp = 2, within: float | None = None) -> SocketLink:
        """A new connection, in at most `within` seconds where that is less than the usual time.

        Raises `CircuitOpen` at once while the breaker is open; else what `socket_link.dial` does.
        """
        with self._lock:
            if not self._breaker.allows(time.monotonic()):
                raise circuit_open(self.endpoint, self.timing)
            self._breaker = self._breaker.begin(time.monotonic())
        timing = self.timing
        if within is not None and within < timing.connect:
            timing = replace(timing, connect=max(within, 0.01))
        try:
            link = dial(self.endpoint, timing, resp=resp, name=NAME)
        except BrokerUnavailable:
            self._learn(lambda breaker: breaker.failed(time.monotonic()))
            raise
        except BrokerError:
            # Refused is not away: somebody answered.
            self._learn(Breaker.succeeded)
            raise
        except BaseException:
            self._learn(lambda breaker: breaker.given_up(time.monotonic()))
            raise
        self._learn(Breaker.succeeded)
        return link

    def _learn(self, event: Callable[[Breaker], Breaker]) -> None:
        with self._lock:
            self._breaker = event(self._breaker)


class Pool:
    """At most `limit` connections. `take` one, use it alone, then `give_back` or `discard` it."""

    def __init__(self, dialer: Dialer, limit: int) -> None:
        self._dialer = dialer
        self._limit = limit
        self.start_over()

    def start_over(self) -> None:
        """Begin without connections and with locks that nobody holds, as a forked child must."""
        self._room = threading.Condition()
        self._free: list[SocketLink] = []
        self._open = 0
        self._queued = 0
        self._closed = False

    def take(self) -> SocketLink:
        """A connection in order: an idle one, a new one, or one that somebody gives back in time.

        Raises what `Dialer.dial` raises, and `BrokerUnavailable` when none became free.
        """
        while True:
            try:
                link = self._free.pop()
            except IndexError:
                found = self._wait_for_room()
                if found is None:
                    return self.dial()
                link = found
            if link.in_order():
                return link
            self.discard(link)

    def replacement(self, broken: SocketLink) -> SocketLink:
        """A new connection in the place of a broken one. Raises what `Dialer.dial` raises."""
        broken.close()
        return self.dial()

    def dial(self) -> SocketLink:
        """A new connection in a place that is taken already; the place is given up when that fails."""
        try:
            return self._dialer.dial()
        except BaseException:
            self._leave_place()
            raise

    def give_back(self, link: SocketLink) -> None:
        """The link is idle and its last reply was read."""
        self._free.append(link)
        # In this order: one who queues counts himself first and then looks for a free one, so none is missed.
        if self._queued:
            with self._room:
                self._room.notify()
        if self._closed:
            self.close()

    def discard(self, link: SocketLink) -> None:
        """The link is broken, or may be out of step."""
        link.close()
        self._leave_place()

    def drop_idle(self) -> None:
        """Close what is idle: the server behind the name has changed its role."""
        while True:
            try:
                link = self._free.pop()
            except IndexError:
                return
            self.discard(link)

    def close(self) -> None:
        """Close what is idle now, and the rest as it is given back. A later `take` opens again."""
        self._closed = True
        self.drop_idle()

    def _leave_place(self) -> None:
        with self._room:
            self._open -= 1
            self._room.notify()

    def _wait_for_room(self) -> SocketLink | None:
        """A free link, or None when there is room for a new one, which is then taken."""
        patience = self._dialer.timing.reply
        with self._room:
            self._closed = False
            self._queued += 1
            try:
                if not self._room.wait_for(lambda: self._free or self._open < self._limit, patience):
                    raise BrokerUnavailable(
                        f"all {self._limit} connections to broker {self._dialer.endpoint.masked} were busy for "
                        f"{patience:g} s; raise the number of connections, or use fewer threads"
                    )
                try:
                    return self._free.pop()
                except IndexError:
                    # Taken by somebody who did not queue; there may be room all the same.
                    if self._open < self._limit:
                        self._open += 1
                        return None
            finally:
                self._queued -= 1
        return self._wait_for_room()


def new_breaker(timing: Timing) -> Breaker:
    """The breaker of a producer's connections."""
    return Breaker(policy=BreakerPolicy(threshold=timing.breaker_failures, reset=timing.breaker_reset))


def circuit_open(endpoint: Endpoint, timing: Timing) -> CircuitOpen:
    """The error of an open breaker."""
    return CircuitOpen(
        f"broker {endpoint.masked} could not be reached {timing.breaker_failures} times in a row and is left alone "
        f"for {timing.breaker_reset:g} s; check that it runs"
    )
