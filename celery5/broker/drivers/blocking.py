"""Blocking: performs calls from plain Python, on redis-py's connections, for any number of threads."""

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
    exchange_one,
    may_resend,
    maybe_done,
)
from celery5.broker.connection.pool import Dialer, Pool
from celery5.broker.connection.socket_link import SocketLink
from celery5.broker.endpoint import Endpoint
from celery5.broker.timing import Timing
from celery5.broker.translate import translate_error
from celery5.errors import BrokerError, BrokerReadOnly

T = TypeVar("T")


class BlockingRedis:
    """The blocking driver: thread safe, fork safe, connecting when it is first used.

    `endpoint`: where the broker is. `timing`: every limit in seconds. `connections`: how many at most.

    A command is sent once. It is sent again, on a new connection, only when it cannot have run (the
    connection was found dead before all of it had left), when its call is `repeatable`, or when the server
    did not know the script (NOSCRIPT). Raises the broker's errors of `celery5.errors` and no other;
    `BrokerUnavailable.maybe_done` tells whether the command may have run.
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
        _drivers.add(self)

    def perform(self, call: Call[T]) -> T:
        """Make one trip and read its answer."""
        return self._drive(exchange_one(call, reply_within=self.timing.reply, where=self._where))

    def perform_all(self, calls: Sequence[Call[T]]) -> list[T]:
        """Make many trips as one: a single write, then all the replies, in order.

        They are not one transaction. When some are refused the rest has run all the same, and the first
        refusal is raised.
        """
        if not calls:
            return []
        return self._drive(exchange_all(calls, reply_within=self.timing.reply, where=self._where))

    def close(self) -> None:
        """Close the connections. The driver opens new ones if it is used again."""
        self._pool.close()

    def _drive(self, steps: Generator[WireRequest, list[Any], T]) -> T:
        trip = next(steps)
        # Whether an attempt was lost that may have run: then every later error has `maybe_done`.
        maybe_done_before = False
        try:
            while True:
                link = self._pool.acquire()
                raws: list[Any] | None = None
                try:
                    raws = self._attempt(link, trip, last=False)
                except ResendAllowed as lost:
                    maybe_done_before = maybe_done_before or lost.maybe_done
                if (
                    raws is None
                ):  # outside of the handler: an error in it would keep the lost link in its context
                    raws = self._attempt(self._pool.replace(link), trip, last=True)
                trip = steps.send(raws)
        except StopIteration as end:
            value: T = end.value
            return value
        except BrokerError as error:
            if maybe_done_before or trip.partly_done:
                error.mark_maybe_done()
            if isinstance(error, BrokerReadOnly):
                # The master has moved: the next connection may find the new one behind the same name.
                self._pool.close_idle()
            raise

    def _attempt(self, link: SocketLink, trip: WireRequest, *, last: bool) -> list[Any]:
        """One attempt.

        Raises `SendAgain`, with the link's place in the pool kept, when another one is allowed.
        """
        sent = False
        raws: list[Any] = []
        try:
            link.send(trip.packed)
            sent = True
            for timeout in trip.timeouts:
                link.set_timeout(timeout)
                raws.append(link.receive())
        except (OSError, ProtocolError) as error:
            done = maybe_done(trip, sent=sent)
            if may_resend(trip, sent=sent, last=last):
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
        """Begin anew, in the child: the parent's sockets are closed here and live on there.

        Its locks may be held by threads that the child lacks.
        """
        self.dialer.reset()
        self._pool.reset()


_drivers: weakref.WeakSet[BlockingRedis] = weakref.WeakSet()


def _after_fork() -> None:
    for driver in list(_drivers):
        driver.after_fork()


os.register_at_fork(after_in_child=_after_fork)
