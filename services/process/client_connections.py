"""Accept the connections of clients on a listening socket, within bounds, whatever the clients do.

Every listening socket of celery5 is served by `accept_connections`: where a process has no descriptor left, it waits
and goes on. So that this does not happen, the connections of a socket have only a share of the descriptors that the
process may open (`limit_places`): the others are for Redis, for logs, and for jobs.
"""

import errno
import math
import resource
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from ipaddress import ip_address, ip_network
from typing import NoReturn

import trio

RETRY_DELAY = 0.1
"""Seconds before accepting is tried again."""
LOG_PERIOD = 60.0
"""Seconds between two reports that connections could not be accepted: clients can cause that at any rate."""
BACKLOG = 128
"""The backlog of listen(2): connections that may wait to be accepted."""
MIN_PLACES = 4
"""Connections that a socket takes however few descriptors the process may have."""
TRANSIENT_ERRORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ECONNABORTED)
"""What accepting fails with while descriptors or memory are short, or because a client has gone already."""


def limit_places(most: int, share: float) -> int:
    """Return how many connections a socket may have at once.

    Args:
        most: The most, if the process may open enough files.
        share: The part of the files which this process may open (RLIMIT_NOFILE) that they may take.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return most
    return min(most, max(MIN_PLACES, int(limit * share)))


def get_host(stream: trio.SocketStream) -> str:
    """Return where a connection comes from, for counting: an address, or the IPv6 network that one host has.

    '' is a unix socket, or a connection that is already closed.
    """
    try:
        peer = ip_address(stream.socket.getpeername()[0].partition("%")[0])
        return str(peer if peer.version == 4 else ip_network((peer, 64), strict=False))
    except (OSError, ValueError, IndexError, TypeError, AttributeError):
        return ""


async def accept_connections(
    listener: trio.SocketListener,
    serve: Callable[[trio.SocketStream], Awaitable[None]],
    *,
    nursery: trio.Nursery,
    on_failure: Callable[[OSError], object] = lambda error: None,
) -> NoReturn:
    """Serve each connection in its own task, until cancelled.

    Args:
        listener: Where clients connect.
        serve: Serves one connection and closes it; it raises nothing because of the client.
        nursery: Where the tasks run.
        on_failure: Called with each error of accepting.
    """
    while True:
        try:
            stream = await listener.accept()
        except OSError as error:
            # Whatever it is: a process that listens no more is worse than one that tries ten times a second in vain.
            on_failure(error)
            await trio.sleep(RETRY_DELAY)
        else:
            nursery.start_soon(serve, stream)


class ClientPlace:
    """The place of one connection: cancelling its `scope` ends the connection."""

    __slots__ = ("host", "is_idle", "scope")

    def __init__(self, host: str) -> None:
        self.host = host
        self.scope = trio.CancelScope()
        self.is_idle = True


class ClientPlaces:
    """The connections of a socket: never more than `most`, nor more than `most_per_host` from one address.

    A connection is idle while the process waits for its client: for a request, for the rest of one, or until an answer
    is read. When there is no place for a new connection, the one is closed that has been idle for longest, of the
    address that has most connections. An address displaces only its own, and those of addresses that have more.

    Args:
        most: The most connections at once.
        most_per_host: The most of one address; None for `most`.
    """

    def __init__(self, most: int, most_per_host: int | None = None) -> None:
        self._most = most
        self._most_per_host = most if most_per_host is None else most_per_host
        self._places: dict[str, dict[ClientPlace, None]] = {}  # of each host, idle for longest first
        self.evicted = 0
        """Connections that were closed to make space."""
        self.refused = 0
        """New connections that found no place."""

    def __len__(self) -> int:
        return sum(map(len, self._places.values()))

    def take(self, host: str) -> ClientPlace | None:
        """Return a place for a new connection from this address; None when all are taken, and none is idle."""
        of_host = self._places.get(host, {})
        has_room = True
        if len(of_host) >= self._most_per_host:
            has_room = self._evict(of_host)
        elif len(self) >= self._most:
            has_room = self.evict_one(host)
        if not has_room:
            self.refused += 1
            return None
        place = ClientPlace(host)
        self._places.setdefault(host, {})[place] = None
        return place

    def evict_one(self, host: str | None = None) -> bool:
        """Close the connection that has been idle for longest of the busiest address; return False when none is.

        For a new connection from `host`, only one of this address, or of one that has more.
        """
        least = 0 if host is None else len(self._places.get(host, ())) + 1
        candidates = [places for name, places in self._places.items() if name == host or len(places) >= least]
        return any(self._evict(places) for places in sorted(candidates, key=len, reverse=True))

    def mark_idle(self, place: ClientPlace) -> None:
        """Mark a connection as idle from now on."""
        places = self._places.get(place.host, {})
        if place in places and not place.is_idle:
            place.is_idle = True
            del places[place]  # to the end
            places[place] = None

    def mark_busy(self, place: ClientPlace) -> None:
        """Mark a connection as busy: it keeps its place until it is idle again."""
        place.is_idle = False

    def give_back(self, place: ClientPlace) -> None:
        """Give a place back."""
        places = self._places.get(place.host, {})
        places.pop(place, None)
        if not places:
            self._places.pop(place.host, None)

    def _evict(self, places: dict[ClientPlace, None]) -> bool:
        oldest = next((place for place in places if place.is_idle), None)
        if oldest is None:
            return False
        self.evicted += 1
        self.give_back(oldest)
        oldest.scope.cancel()
        return True


ServeClient = Callable[[trio.SocketStream, ClientPlace], Awaitable[None]]


class ClientConnections:
    """Serves all connections of some listeners, each in its place; a failure of one ends that one alone.

    Args:
        places: The places.
        serve: Serves one connection, which is closed afterwards.
        on_error: Called with an error that `serve` has raised.
        on_shortage: Called, once a minute at most, with why connections cannot be accepted.
    """

    def __init__(
        self,
        places: ClientPlaces,
        serve: ServeClient,
        *,
        on_error: Callable[[Exception], object],
        on_shortage: Callable[[OSError], object],
    ) -> None:
        self._places = places
        self._serve = serve
        self._on_error = on_error
        self._on_shortage = on_shortage
        self._reported_at = -math.inf

    async def accept(self, listeners: Sequence[trio.SocketListener], nursery: trio.Nursery) -> None:
        """Accept until cancelled. The connections are served in `nursery`, and outlive this call."""
        async with trio.open_nursery() as accepting:
            for listener in listeners:
                accepting.start_soon(
                    partial(
                        accept_connections,
                        listener,
                        self._serve_one,
                        nursery=nursery,
                        on_failure=self._make_space,
                    )
                )

    def _make_space(self, error: OSError) -> None:
        """Close an idle connection, whose descriptor the next one needs."""
        if error.errno in TRANSIENT_ERRORS:
            self._places.evict_one()
        now = time.monotonic()
        if now >= self._reported_at + LOG_PERIOD:
            self._reported_at = now
            self._on_shortage(error)

    async def _serve_one(self, stream: trio.SocketStream) -> None:
        place = self._places.take(get_host(stream))
        try:
            if place is None:
                return
            with place.scope, suppress(trio.BrokenResourceError, trio.ClosedResourceError, OSError):
                await self._serve(stream, place)
        except Exception as error:
            self._on_error(error)
        finally:
            if place is not None:
                self._places.give_back(place)
            await trio.aclose_forcefully(stream)
