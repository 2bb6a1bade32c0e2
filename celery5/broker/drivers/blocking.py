"""The blocking driver: performs calls in plain Python, from any number of threads."""

import os
import weakref
from collections.abc import Generator, Sequence
from typing import Any, TypeVar

from celery5.broker.call import Call
from celery5.broker.connection.exchange import (
    ProtocolError,
    ResendAllowed,
    WireRequest,
    exchange_all,
    exchange_each,
    exchange_one,
    exchange_replicated,
    may_resend,
    maybe_done,
)
from celery5.broker.connection.pool import Dialer, Pool
from celery5.broker.connection.sentinel import may_be_elsewhere
from celery5.broker.connection.socket_link import SocketLink
from celery5.broker.endpoint import Endpoint
from celery5.broker.timing import Timing
from celery5.broker.translate import translate_error
from celery5.errors import BrokerError

T = TypeVar("T")


class BlockingRedis:
    """The blocking driver: thread safe, fork safe, connecting when it is first used.

    A command is sent once. It is sent again, on a new connection, only if it cannot have run (the connection broke
    before all of it was sent), if its call is `repeatable`, or if the server did not know the script (NOSCRIPT). All
    errors are BrokerErrors; `BrokerUnavailable.maybe_done` says whether the command may have run.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        timing: Timing = Timing(),  # noqa: B008  frozen
        max_connections: int = 10,
    ) -> None:
        self.endpoint: Endpoint = endpoint
        self.timing = timing
        self.dialer: Dialer = Dialer(endpoint, timing)
        self._pool = Pool(self.dialer, max_connections)
        self._where = endpoint.masked_url
        # Whether the server has answered before: whoever has a wrong URL is told at once.
        self.has_connected: bool = False
        _drivers.add(self)

    def perform(self, call: Call[T]) -> T:
        """Perform one call and return its decoded reply. Raises BrokerError."""
        return self._drive(exchange_one(call, reply_within=self.timing.reply, where=self._where))

    def perform_all(self, calls: Sequence[Call[T]]) -> list[T]:
        """Perform several calls in one write and return their decoded replies in order.

        They are no transaction: if some are refused, the others have run all the same. The first error is raised.
        """
        if not calls:
            return []
        return self._drive(exchange_all(calls, reply_within=self.timing.reply, where=self._where))

    def perform_each(self, calls: Sequence[Call[T]]) -> list[T | BrokerError]:
        """Perform several calls in one write; return the decoded reply of each, or its error."""
        return self._drive(exchange_each(calls, reply_within=self.timing.reply, where=self._where))

    def perform_replicated(
        self, calls: Sequence[Call[T]], waits: Sequence[Call[int]]
    ) -> tuple[list[T], int | BrokerError]:
        """Perform several calls as `perform_all` does, and wait until replicas have what they have written.

        Returns:
            The decoded replies to `calls`, and how many replicas have all, or why that is not known.
        """
        replies, count = self._drive(
            exchange_replicated(calls, waits, reply_within=self.timing.reply, where=self._where)
        )
        wanted = int(waits[-1].words[1])
        if self.endpoint.topology == "sentinel" and (isinstance(count, BrokerError) or count < wanted):
            # It may be cut off from replicas and sentinels: the next connection asks these for the primary.
            self._pool.close_idle()
        return replies, count

    def close(self) -> None:
        """Close the connections. The driver opens new ones if it is used again."""
        self._pool.close()

    def _drive(self, exchange: Generator[WireRequest, list[Any], T]) -> T:
        request = next(exchange)
        # Whether a failed attempt may have run: then every later error has `maybe_done`.
        maybe_done_before = False
        try:
            while True:
                link = self._pool.acquire()
                raws: list[Any] | None = None
                try:
                    raws = self._attempt(link, request, last=False)
                except ResendAllowed as lost:
                    maybe_done_before = maybe_done_before or lost.maybe_done
                if (
                    raws is None
                ):  # outside of the handler: an error in it would keep the lost link in its context
                    raws = self._attempt(self._pool.replace(link), request, last=True)
                request = exchange.send(raws)
        except StopIteration as end:
            self.has_connected = True
            value: T = end.value
            return value
        except BrokerError as error:
            if maybe_done_before or request.partly_done:
                error.mark_maybe_done()
            if may_be_elsewhere(error, self.endpoint):
                # The master has moved: the next connection may find the new one behind the same name.
                self._pool.close_idle()
            raise

    def _attempt(self, link: SocketLink, request: WireRequest, *, last: bool) -> list[Any]:
        """Send a request once and return its replies.

        Raises ResendAllowed if another attempt is allowed; the link keeps its place in the pool then.
        """
        sent = False
        raws: list[Any] = []
        try:
            link.send(request.packed)
            sent = True
            for timeout in request.timeouts:
                link.set_timeout(timeout)
                raws.append(link.receive())
        except (OSError, ProtocolError) as error:
            done = maybe_done(request, sent=sent)
            if may_resend(request, sent=sent, last=last):
                raise ResendAllowed(maybe_done=done) from error
            self._pool.discard(link)
            raise translate_error(error, maybe_done=done, where=self._where) from None
        except BaseException:
            # Interrupted between request and reply: they could be out of step.
            self._pool.discard(link)
            raise
        self._pool.release(link)
        return raws

    def after_fork(self) -> None:
        """Start again in a forked child: its copies of the sockets are closed, the parent's stay open.

        The locks are new: threads that the child lacks may have held the old ones.
        """
        self.dialer.reset()
        self._pool.reset()


_drivers: weakref.WeakSet[BlockingRedis] = weakref.WeakSet()


def _after_fork() -> None:
    for driver in list(_drivers):
        driver.after_fork()


os.register_at_fork(after_in_child=_after_fork)
