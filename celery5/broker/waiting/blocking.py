"""Waiting, blocking: threads wait for documents, all on one connection and without a thread of our own.

Leader and follower: one of the waiting threads reads the connection for all, wakes those whose documents have
come, and hands over when it has its own. A lone waiter so reads its own answer straight from the socket,
which a reader thread would have to pass on.
"""

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence

from celery5.broker.connection.exchange import ProtocolError, ReplyError
from celery5.broker.connection.socket_link import SocketLink
from celery5.broker.drivers.blocking import BlockingRedis
from celery5.broker.endpoint import Endpoint
from celery5.broker.timing import Outage
from celery5.broker.translate import translate_error
from celery5.broker.waiting.conversation import (
    READ_AT_ONCE,
    ResultWaitProtocol,
    get_reread_interval,
    read_documents,
)
from celery5.broker.waiting.waits import ResultWait, StopCondition
from celery5.errors import BrokerError, BrokerUnavailable


class BlockingResultWaiter:
    """Waits for documents in plain Python; thread safe and fork safe.

    `redis`: the driver whose breaker guards new connections, too. `endpoint`: where the broker is.
    """

    def __init__(self, redis: BlockingRedis, endpoint: Endpoint) -> None:
        self._redis = redis
        self._timing = redis.timing
        self._where = endpoint.masked_url
        self.reset()
        _all_results.add(self)

    def reset(self) -> None:
        """Begin without a connection, with nobody waiting and a free lock, as a forked child must."""
        self._lock = threading.Lock()
        self._talk = ResultWaitProtocol()
        self._outage = Outage(self._timing)
        self._link: SocketLink | None = None
        # Weak: a thread that was interrupted on its way out must neither lead nor count for ever.
        self._leader: weakref.ref[_Follower] | None = None
        self._followers: weakref.WeakSet[_Follower] = weakref.WeakSet()
        self._orphans: deque[ResultWait] = deque()
        # On the monotonic clock: when the server must have answered, and when to look again.
        self._answer_due = 0.0
        self._look_due = 0.0

    def wait(
        self, keys: Sequence[str], *, timeout: float | None, enough: StopCondition | None = None
    ) -> dict[str, bytes]:
        """What has arrived of the documents under `keys`: all, `enough`, or whatever is there after `timeout` seconds.

        With no time at all it looks once. A lost connection is made again and nothing is missed; raises
        `BrokerUnavailable` when there is none at the end of the time, or none for half a minute, and
        `BrokerDenied` at once.
        """
        if timeout is not None and timeout <= 0:
            return self._look(keys)
        follower = _Follower(self._orphans)
        wait = follower.wait = ResultWait(keys, enough=enough, wake=_wake_weakly(follower))
        if wait.finished:
            return wait.found
        deadline = float("inf") if timeout is None else time.monotonic() + timeout
        try:
            with self._lock:
                self._bury_orphans()
                if not self._followers:
                    self._outage.reset()
                self._followers.add(follower)
                self._talk.add(wait)
                self._say()
            self._until_finished(wait, follower, deadline)
        finally:
            with self._lock:
                self._talk.remove(wait)
                self._followers.discard(follower)
                self._say()
                if self._is_leader(follower):
                    self._hand_over()
                follower.wait = None
        return wait.get_documents(self._outage.error)

    def close(self) -> None:
        """Close the connection. Whoever waits makes a new one."""
        with self._lock:
            self._drop()

    def _look(self, keys: Sequence[str]) -> dict[str, bytes]:
        found: dict[str, bytes] = {}
        for start in range(0, len(keys), READ_AT_ONCE):
            some = keys[start : start + READ_AT_ONCE]
            documents = self._redis.perform(read_documents(some))
            found |= documents
        return found

    def _until_finished(self, wait: ResultWait, follower: "_Follower", deadline: float) -> None:
        # An interrupted leader may have found the last document and told nobody.
        while not wait.finished and wait.missing:
            left = deadline - time.monotonic()
            if left <= 0:
                return
            with self._lock:
                if self._leader is None or self._leader() is None:
                    self._leader = weakref.ref(follower)
                leading = self._is_leader(follower)
            if leading:
                self._lead(left)
            else:
                # In short turns: a leader that was interrupted wakes nobody.
                follower.sleep(min(left, 1.0))

    def _lead(self, left: float) -> None:
        """Read once for everybody, for at most `left` seconds."""
        link = self._link
        if link is None:
            self._connect(left)
            return
        now = time.monotonic()
        due = min(self._look_due, self._answer_due if self._talk.is_reply_due else self._look_due)
        readable = link.wait(min(left, due - now))
        with self._lock:
            if self._link is not link:
                return
            try:
                if readable:
                    self._talk.receive(link.drain())
                self._keep_time()
                self._say()
            except (OSError, ProtocolError, ReplyError) as error:
                self._lost(error)
            except BaseException:
                # Interrupted with a part of what was read in hand.
                self._drop()
                raise

    def _connect(self, left: float) -> None:
        """One attempt, for at most `left` seconds; then, if it failed, the pause before the next one."""
        try:
            link = self._redis.dialer.dial(resp=3, within=left)
        except BrokerError as error:
            with self._lock:
                pause = self._failed(error)
            time.sleep(min(pause, left))
            return
        with self._lock:
            self._link = link
            self._outage.reset()
            self._talk.reset()
            self._look_due = time.monotonic() + get_reread_interval(self._timing)
            self._say()

    def _say(self) -> None:
        """Send what is to be sent. With the lock held."""
        link = self._link
        if link is None:
            return
        asked = self._talk.is_reply_due
        try:
            packed = self._talk.data_to_send()
            if packed:
                link.send(packed)
        except OSError as error:
            self._lost(error)
        except BaseException:
            self._drop()
            raise
        if self._talk.is_reply_due and not asked:
            self._answer_due = time.monotonic() + self._timing.reply

    def _keep_time(self) -> None:
        """Look again when it is time; raises TimeoutError when an answer is overdue."""
        now = time.monotonic()
        if self._talk.is_reply_due and now >= self._answer_due:
            raise TimeoutError
        if now >= self._look_due:
            self._look_due = now + get_reread_interval(self._timing)
            self._talk.recheck()

    def _lost(self, error: Exception) -> None:
        """The connection is over; the leader will make a new one. With the lock held."""
        self._drop()
        translation = translate_error(error, maybe_done=False, where=self._where)
        if not isinstance(translation, BrokerUnavailable):
            self._talk.fail(translation)

    def _failed(self, error: BrokerError) -> float:
        if self._outage.record_failure(error, time.monotonic()):
            self._talk.fail(error)
            self._outage.reset()
            return 0.0
        return self._outage.next_pause()

    def _drop(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None

    def _is_leader(self, follower: "_Follower") -> bool:
        return self._leader is not None and self._leader() is follower

    def _hand_over(self) -> None:
        """Somebody else reads from here on. With the lock held."""
        following = next(iter(self._followers), None)
        self._leader = None if following is None else weakref.ref(following)
        if following is not None:
            following.wake()

    def _bury_orphans(self) -> None:
        """Forget the waits of threads that were interrupted on their way out. With the lock held."""
        while self._orphans:
            self._talk.remove(self._orphans.popleft())


class _Follower:
    """A thread that waits to be told: its documents are there, or it is its turn to read.

    Only the thread itself holds it. When it dies with its `wait` still set, nobody has said good-bye for it.
    """

    __slots__ = ("__weakref__", "_orphans", "_told", "wait")

    def __init__(self, orphans: deque[ResultWait]) -> None:
        # A bare lock: an Event costs five times as much, and most waiters never sleep on it.
        self._told = threading.Lock()
        self._told.acquire()
        self._orphans = orphans
        self.wait: ResultWait | None = None

    def __del__(self) -> None:
        if self.wait is not None:
            self._orphans.append(self.wait)

    def sleep(self, seconds: float) -> None:
        self._told.acquire(timeout=seconds)

    def wake(self) -> None:
        """Let it go on, now or when it next sleeps. Only called with the results' lock held."""
        if self._told.locked():
            self._told.release()


def _wake_weakly(follower: _Follower) -> Callable[[], None]:
    weakly = weakref.ref(follower)

    def wake() -> None:
        alive = weakly()
        if alive is not None:
            alive.wake()

    return wake


_all_results: weakref.WeakSet[BlockingResultWaiter] = weakref.WeakSet()


def _after_fork() -> None:
    for results in list(_all_results):
        results.reset()


os.register_at_fork(after_in_child=_after_fork)
