"""The pool of blocking connections that the threads of a process share, with a circuit breaker for new ones.

Their number is bounded, and so is the time that a thread waits for one. The connection that was released last is used
first, so that a process with one busy thread has one connection.
"""

import threading
import time
import weakref
from collections.abc import Callable

import msgspec

from celery5.broker.connection.handshake import Resp
from celery5.broker.connection.socket_link import SocketLink, dial
from celery5.broker.endpoint import Endpoint
from celery5.broker.timing import Timing
from celery5.errors import BrokerError, BrokerUnavailable, CircuitOpen
from celery5.protocol.counts import format_count
from celery5.protocol.health.breaker import Breaker, BreakerPolicy

NAME = "celery5-producer"


class Dialer:
    """Opens connections to one endpoint. After too many failures in a row it refuses at once for a moment."""

    def __init__(self, endpoint: Endpoint, timing: Timing) -> None:
        self.endpoint = endpoint
        self.timing = timing
        self.reset()

    def reset(self) -> None:
        """Start again, with a new lock and a closed breaker: for a forked child."""
        self._lock = threading.RLock()
        self._breaker = new_breaker(self.timing)

    def dial(self, *, resp: Resp = 2, within: float | None = None) -> SocketLink:
        """Open a connection.

        Args:
            resp: The protocol version.
            within: Seconds, if less than `timing.connect`.

        Raises:
            CircuitOpen: The breaker is open.
            BrokerError: As `socket_link.dial`.
        """
        timing = self.timing
        if within is not None and within < timing.connect:
            timing = msgspec.structs.replace(timing, connect=max(within, 0.01))
        try:
            self._start_attempt()
            link = dial(self.endpoint, timing, resp=resp, name=NAME)
        except CircuitOpen:
            raise
        except BrokerUnavailable:
            self._update_breaker(lambda breaker: breaker.after_failure(time.monotonic()))
            raise
        except BrokerError:
            # Refused is not unreachable: there was a reply.
            self._update_breaker(Breaker.after_success)
            raise
        except BaseException:
            self._update_breaker(lambda breaker: breaker.after_cancelled_probe(time.monotonic()))
            raise
        self._update_breaker(Breaker.after_success)
        return link

    def _start_attempt(self) -> None:
        with self._lock:
            now = time.monotonic()
            if not self._breaker.is_allowed(now):
                raise circuit_open(self.endpoint, self.timing)
            self._breaker = self._breaker.with_probe(now)

    def _update_breaker(self, event: Callable[[Breaker], Breaker]) -> None:
        with self._lock:
            self._breaker = event(self._breaker)


class _Place:
    """The right to one connection. It is freed by the garbage collector, so that no interruption can leak one."""

    __slots__ = ("__weakref__",)


class Pool:
    """At most `limit` connections. `acquire` one, use it alone, then `release` or `discard` it.

    Ctrl-C may interrupt between any two steps. So a connection without references closes itself and frees its place,
    and the lock is a plain one: an interruption can leave a `with` on a Condition locked.
    """

    def __init__(self, dialer: Dialer, limit: int) -> None:
        self._dialer = dialer
        self._limit = limit
        self.reset()

    def reset(self) -> None:
        """Start again without connections and with new locks: for a forked child."""
        # Reentrant: a signal handler that sends or waits may interrupt a thread that has it.
        self._lock = threading.RLock()
        self._place_freed = threading.Condition(self._lock)
        self._places: weakref.WeakSet[_Place] = weakref.WeakSet()
        self._free: list[SocketLink] = []
        self._waiting = 0
        self._closed = False

    def acquire(self) -> SocketLink:
        """Return an idle connection, a new one, or one that is released in time.

        Raises BrokerUnavailable if none becomes free, and BrokerError as `Dialer.dial`.
        """
        while True:
            link: SocketLink | None
            try:
                link = self._free.pop()
            except IndexError:
                link = None  # not raised here: the error below would have this one as its context
            if link is None:
                link_or_place = self._wait_for_place()
                if isinstance(link_or_place, _Place):
                    return self._dial(link_or_place)
                link = link_or_place
            if link.is_usable():
                return link
            self.discard(link)

    def replace(self, broken: SocketLink) -> SocketLink:
        """Return a new connection in the place of a broken one. Raises as `Dialer.dial`."""
        place, broken.place = broken.place, None
        broken.close()
        return self._dial(place)

    def release(self, link: SocketLink) -> None:
        """Put back a connection whose last reply was read."""
        self._free.append(link)
        # In this order: a waiting thread counts itself first and then looks for a free link, so it misses none.
        if self._waiting:
            with self._lock:
                self._place_freed.notify()
        if self._closed:
            self.close()

    def discard(self, link: SocketLink) -> None:
        """Close a connection that is broken, or may be out of step."""
        link.place = None
        link.close()
        with self._lock:
            self._place_freed.notify()

    def close_idle(self) -> None:
        """Close idle connections: the server behind the name has changed its role."""
        while True:
            try:
                link = self._free.pop()
            except IndexError:
                return
            self.discard(link)

    def close(self) -> None:
        """Close idle connections now and the others when they are released. A later `acquire` opens the pool again."""
        self._closed = True
        self.close_idle()

    @property
    def idle(self) -> int:
        """How many connections are idle."""
        return len(self._free)

    @property
    def in_use(self) -> int:
        """How many connections are in use or being opened."""
        return len(self._places) - len(self._free)

    @property
    def waiting_threads(self) -> int:
        """How many threads wait for a connection."""
        return self._waiting

    def _dial(self, place: object) -> SocketLink:
        try:
            link = self._dialer.dial()
        except BaseException:
            # Explicitly: the traceback of the error keeps this frame, and with it the place.
            if isinstance(place, _Place):
                self._places.discard(place)
            with self._lock:
                self._place_freed.notify()
            raise
        link.place = place
        return link

    def _wait_for_place(self) -> SocketLink | _Place:
        """Return a free link, or the place for a new one."""
        end = time.monotonic() + self._dialer.timing.reply
        with self._lock:
            self._closed = False
            self._waiting += 1
            try:
                while True:
                    if self._free:
                        try:
                            return self._free.pop()
                        except IndexError:
                            pass  # taken by a thread that did not wait
                    if len(self._places) < self._limit:
                        place = _Place()
                        self._places.add(place)
                        return place
                    # In short turns: a place that the garbage collector frees notifies nobody.
                    if (
                        not self._place_freed.wait(min(1.0, end - time.monotonic()))
                        and time.monotonic() >= end
                    ):
                        raise self._make_busy_error()
            finally:
                self._waiting -= 1

    def _make_busy_error(self) -> BrokerUnavailable:
        return BrokerUnavailable(
            f"all {self._limit} connections to broker {self._dialer.endpoint.masked_url} were busy for "
            f"{self._dialer.timing.reply:g} s; raise the number of connections, or use fewer threads"
        )


def new_breaker(timing: Timing) -> Breaker:
    """Return the breaker of a producer's connections."""
    return Breaker(policy=BreakerPolicy(threshold=timing.breaker_failures, reset=timing.breaker_reset))


def circuit_open(endpoint: Endpoint, timing: Timing) -> CircuitOpen:
    """Return the error of an open breaker."""
    times = format_count(timing.breaker_failures, "time")
    return CircuitOpen(
        f"broker {endpoint.masked_url} could not be reached {times} in a row and is left alone "
        f"for {timing.breaker_reset:g} s; check that it runs"
    )
