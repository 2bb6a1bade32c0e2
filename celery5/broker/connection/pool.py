"""Pool: the blocking connections of one process, shared by its threads, and the breaker that guards new ones.

Bounded in number, and waiting for one is bounded in time. The last one given back is the first one taken, so
that a process with one busy thread has one connection.
"""

import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import replace

from celery5.broker.connection.handshake import Resp
from celery5.broker.connection.socket_link import SocketLink, dial
from celery5.broker.endpoint import Endpoint
from celery5.broker.timing import Timing
from celery5.errors import BrokerError, BrokerUnavailable, CircuitOpen
from celery5.protocol.health.breaker import Breaker, BreakerPolicy

NAME = "celery5-producer"


class Dialer:
    """Opens connections to one endpoint, unless the last attempts all failed:

    then it refuses at once, for a moment.
    """

    def __init__(self, endpoint: Endpoint, timing: Timing) -> None:
        self.endpoint = endpoint
        self.timing = timing
        self.reset()

    def reset(self) -> None:
        """Forget the past: a forked child starts with a lock that nobody holds."""
        self._lock = threading.Lock()
        self._breaker = new_breaker(self.timing)

    def dial(self, *, resp: Resp = 2, within: float | None = None) -> SocketLink:
        """A new connection, in at most `within` seconds where that is less than the usual time.

        Raises `CircuitOpen` at once while the breaker is open; else what `socket_link.dial` does.
        """
        timing = self.timing
        if within is not None and within < timing.connect:
            timing = replace(timing, connect=max(within, 0.01))
        try:
            self._set_out()
            link = dial(self.endpoint, timing, resp=resp, name=NAME)
        except CircuitOpen:
            raise
        except BrokerUnavailable:
            self._learn(lambda breaker: breaker.after_failure(time.monotonic()))
            raise
        except BrokerError:
            # Refused is not away: somebody answered.
            self._learn(Breaker.after_success)
            raise
        except BaseException:
            self._learn(lambda breaker: breaker.after_cancelled_probe(time.monotonic()))
            raise
        self._learn(Breaker.after_success)
        return link

    def _set_out(self) -> None:
        with self._lock:
            now = time.monotonic()
            if not self._breaker.is_allowed(now):
                raise circuit_open(self.endpoint, self.timing)
            self._breaker = self._breaker.with_probe(now)

    def _learn(self, event: Callable[[Breaker], Breaker]) -> None:
        with self._lock:
            self._breaker = event(self._breaker)


class _Place:
    """The right to one connection. Given up by being forgotten, so that no interruption can lose one."""

    __slots__ = ("__weakref__",)


class Pool:
    """At most `limit` connections. `take` one, use it alone, then `give_back` or `discard` it.

    Ctrl-C may strike between any two steps. A connection that nobody holds any more closes itself and frees
    its place, and the lock is a bare one: a `with` on a Condition can be left locked by an interruption.
    """

    def __init__(self, dialer: Dialer, limit: int) -> None:
        self._dialer = dialer
        self._limit = limit
        self.reset()

    def reset(self) -> None:
        """Begin without connections and with locks that nobody holds, as a forked child must."""
        self._lock = threading.Lock()
        self._room = threading.Condition(self._lock)
        self._places: weakref.WeakSet[_Place] = weakref.WeakSet()
        self._free: list[SocketLink] = []
        self._queued = 0
        self._closed = False

    def acquire(self) -> SocketLink:
        """A connection in order: an idle one, a new one, or one that somebody gives back in time.

        Raises what `Dialer.dial` raises, and `BrokerUnavailable` when none became free.
        """
        while True:
            try:
                link = self._free.pop()
            except IndexError:
                found = self._wait_for_room()
                if isinstance(found, _Place):
                    return self._dial(found)
                link = found
            if link.is_usable():
                return link
            self.discard(link)

    def replace(self, broken: SocketLink) -> SocketLink:
        """A new connection in the place of a broken one. Raises what `Dialer.dial` raises."""
        place, broken.place = broken.place, None
        broken.close()
        return self._dial(place)

    def release(self, link: SocketLink) -> None:
        """The link is idle and its last reply was read."""
        self._free.append(link)
        # In this order: one who queues counts himself first and then looks for a free one, so none is missed.
        if self._queued:
            with self._lock:
                self._room.notify()
        if self._closed:
            self.close()

    def discard(self, link: SocketLink) -> None:
        """The link is broken, or may be out of step."""
        link.place = None
        link.close()
        with self._lock:
            self._room.notify()

    def close_idle(self) -> None:
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
        self.close_idle()

    @property
    def idle(self) -> int:
        """How many connections are open and not in use."""
        return len(self._free)

    @property
    def in_use(self) -> int:
        """How many are in use, or being opened."""
        return len(self._places) - len(self._free)

    @property
    def waiting_threads(self) -> int:
        """How many threads wait for one."""
        return self._queued

    def _dial(self, place: object) -> SocketLink:
        try:
            link = self._dialer.dial()
        except BaseException:
            # By name: whoever keeps the error keeps the frames that it passed through, and what they hold.
            if isinstance(place, _Place):
                self._places.discard(place)
            with self._lock:
                self._room.notify()
            raise
        link.place = place
        return link

    def _wait_for_room(self) -> SocketLink | _Place:
        """A free link, or the place for a new one."""
        end = time.monotonic() + self._dialer.timing.reply
        with self._lock:
            self._closed = False
            self._queued += 1
            try:
                while True:
                    if self._free:
                        try:
                            return self._free.pop()
                        except IndexError:
                            pass  # taken by somebody who did not queue
                    if len(self._places) < self._limit:
                        place = _Place()
                        self._places.add(place)
                        return place
                    # In short turns: a place that was forgotten wakes nobody.
                    if not self._room.wait(min(1.0, end - time.monotonic())) and time.monotonic() >= end:
                        raise self._crowded()
            finally:
                self._queued -= 1

    def _crowded(self) -> BrokerUnavailable:
        return BrokerUnavailable(
            f"all {self._limit} connections to broker {self._dialer.endpoint.masked_url} were busy for "
            f"{self._dialer.timing.reply:g} s; raise the number of connections, or use fewer threads"
        )


def new_breaker(timing: Timing) -> Breaker:
    """The breaker of a producer's connections."""
    return Breaker(policy=BreakerPolicy(threshold=timing.breaker_failures, reset=timing.breaker_reset))


def circuit_open(endpoint: Endpoint, timing: Timing) -> CircuitOpen:
    """The error of an open breaker."""
    return CircuitOpen(
        f"broker {endpoint.masked_url} could not be reached {timing.breaker_failures} times in a row and is left alone "
        f"for {timing.breaker_reset:g} s; check that it runs"
    )
