"""Wait for result documents in plain Python: all threads share one connection, without a reader thread.

Leader and followers: one of the waiting threads reads the connection for all, wakes those whose documents have
arrived, and passes the lead on when it has its own. So a lone waiter reads its own reply from the socket, without a
switch of threads.
"""

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence

from celery5.broker.connection.exchange import ProtocolError, ReplyError
from celery5.broker.connection.socket_link import SocketLink
from celery5.broker.driver import StopCondition
from celery5.broker.drivers.blocking import BlockingRedis
from celery5.broker.endpoint import Endpoint
from celery5.broker.timing import Outage
from celery5.broker.translate import translate_error
from celery5.broker.waiting.result_waits import (
    ResultWait,
    ResultWaitProtocol,
    get_reread_interval,
    read_documents,
)
from celery5.errors import BrokerError, BrokerUnavailable


class BlockingResultWaiter:
    """Waits for documents in plain Python; safe for threads and forks.

    Args:
        redis: The driver that reads documents; its circuit breaker guards the new connections, too.
        endpoint: Where the broker is.
    """

    def __init__(self, redis: BlockingRedis, endpoint: Endpoint) -> None:
        self._redis = redis
        self._timing = redis.timing
        self._endpoint = endpoint
        self._where = endpoint.masked_url
        self.reset()
        _all_results.add(self)

    def reset(self) -> None:
        """Start without a connection or waits and with a new lock, as a forked child must."""
        self._lock = threading.Lock()
        # Whether a thread is in here already.
        self._thread = _ThreadState()
        self._protocol = ResultWaitProtocol(by_slot=self._endpoint.role == "node")
        self._outage = Outage(self._timing)
        self._link: SocketLink | None = None
        # Weak: a thread that was interrupted while it left must not lead, or count as a follower, for ever.
        self._leader: weakref.ref[_Follower] | None = None
        self._followers: weakref.WeakSet[_Follower] = weakref.WeakSet()
        self._orphans: deque[ResultWait] = deque()
        # On the monotonic clock: when the server must have replied, and when to read again.
        self._reply_due = 0.0
        self._reread_due = 0.0

    def wait(
        self, keys: Sequence[str], *, timeout: float | None, enough: StopCondition | None = None
    ) -> dict[str, bytes]:
        """Wait until all documents are there, `enough` is true of those that are, or the timeout is over.

        With a timeout of 0 the documents are read once. A lost connection is replaced, and no document is missed.

        Raises:
            BrokerUnavailable: There is no connection when the timeout is over, or there was none for half a minute.
            BrokerDenied: At once, when the broker refuses.
        """
        if self._thread.is_waiting:
            return self._wait_apart(keys, timeout=timeout, enough=enough)
        self._thread.is_waiting = True
        try:
            return self._wait(keys, timeout=timeout, enough=enough)
        finally:
            self._thread.is_waiting = False

    def _wait_apart(
        self, keys: Sequence[str], *, timeout: float | None, enough: StopCondition | None
    ) -> dict[str, bytes]:
        """Wait in a signal handler, or a finaliser, that has interrupted a wait of this thread.

        That wait goes on only afterwards. It may hold the lock, lead the other threads, or be in the middle of a reply;
        so nothing of it is touched, and this one has connections of its own.
        """
        redis = BlockingRedis(self._endpoint, max_connections=1, timing=self._timing)
        apart = BlockingResultWaiter(redis, self._endpoint)
        try:
            return apart.wait(keys, timeout=timeout, enough=enough)
        finally:
            apart.close()
            redis.close()

    def _wait(
        self, keys: Sequence[str], *, timeout: float | None, enough: StopCondition | None
    ) -> dict[str, bytes]:
        if timeout is not None and timeout <= 0:
            return self._read_once_for(keys)
        follower = _Follower(self._orphans)
        wait = follower.wait = ResultWait(keys, enough=enough, wake=_wake_weakly(follower))
        if wait.finished:
            return wait.found
        deadline = float("inf") if timeout is None else time.monotonic() + timeout
        try:
            with self._lock:
                self._remove_orphans()
                if not self._followers:
                    self._outage.reset()
                self._followers.add(follower)
                self._protocol.add(wait)
                self._send_pending()
            self._until_finished(wait, follower, deadline)
        finally:
            with self._lock:
                self._protocol.remove(wait)
                self._followers.discard(follower)
                self._send_pending()
                if self._is_leader(follower):
                    self._pass_leadership()
                follower.wait = None
        return wait.get_documents(self._outage.error)

    def close(self) -> None:
        """Close the connection. A thread that still waits opens a new one."""
        with self._lock:
            self._drop()

    def _read_once_for(self, keys: Sequence[str]) -> dict[str, bytes]:
        documents: dict[str, bytes] = {}
        for part in self._protocol.split_for_reading(keys):
            part_documents = self._redis.perform(read_documents(part))
            documents |= part_documents
        return documents

    def _until_finished(self, wait: ResultWait, follower: "_Follower", deadline: float) -> None:
        # An interrupted leader may have received the last document and woken no thread.
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
                # Short sleeps: a leader that was interrupted wakes no thread.
                follower.sleep(min(left, 1.0))

    def _lead(self, left: float) -> None:
        """Read once for all threads, for at most `left` seconds."""
        link = self._link
        if link is None:
            self._connect(left)
            return
        now = time.monotonic()
        next_deadline = min(
            self._reread_due, self._reply_due if self._protocol.is_reply_due else self._reread_due
        )
        readable = link.wait(min(left, next_deadline - now))
        with self._lock:
            if self._link is not link:
                return
            try:
                if readable:
                    self._protocol.receive(link.drain())
                self._check_deadlines()
                self._send_pending()
            except (OSError, ProtocolError, ReplyError) as error:
                self._handle_loss(error)
            except BaseException:
                # Interrupted: a part of the data that was read is lost.
                self._drop()
                raise

    def _connect(self, left: float) -> None:
        """Make one attempt, for at most `left` seconds; after a failure, sleep until the next one."""
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
            greeting = link.greeting
            self._protocol.reset(has_sharded_channels=greeting is not None and greeting.has_sharded_channels)
            self._reread_due = time.monotonic() + get_reread_interval(self._timing)
            self._send_pending()

    def _send_pending(self) -> None:
        """Send the commands that are pending. With the lock held."""
        link = self._link
        if link is None:
            return
        was_reply_due = self._protocol.is_reply_due
        try:
            data = self._protocol.data_to_send()
            if data:
                link.send(data)
        except OSError as error:
            self._handle_loss(error)
        except BaseException:
            self._drop()
            raise
        if self._protocol.is_reply_due and not was_reply_due:
            self._reply_due = time.monotonic() + self._timing.reply

    def _check_deadlines(self) -> None:
        """Read again when that is due. Raises TimeoutError when a reply is overdue."""
        now = time.monotonic()
        if self._protocol.is_reply_due and now >= self._reply_due:
            raise TimeoutError
        if now >= self._reread_due:
            self._reread_due = now + get_reread_interval(self._timing)
            self._protocol.recheck()

    def _handle_loss(self, error: Exception) -> None:
        """Drop the connection; the leader will make a new one. With the lock held."""
        self._drop()
        translation = translate_error(error, maybe_done=False, where=self._where)
        if not isinstance(translation, BrokerUnavailable):
            self._protocol.fail(translation)

    def _failed(self, error: BrokerError) -> float:
        if self._outage.record_failure(error, time.monotonic()):
            self._protocol.fail(error)
            self._outage.reset()
            return 0.0
        return self._outage.next_pause()

    def _drop(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None

    def _is_leader(self, follower: "_Follower") -> bool:
        return self._leader is not None and self._leader() is follower

    def _pass_leadership(self) -> None:
        """Make one of the followers the leader. With the lock held."""
        follower = next(iter(self._followers), None)
        self._leader = None if follower is None else weakref.ref(follower)
        if follower is not None:
            follower.wake()

    def _remove_orphans(self) -> None:
        """Remove the waits of threads that were interrupted before they did. With the lock held."""
        while self._orphans:
            self._protocol.remove(self._orphans.popleft())


class _ThreadState(threading.local):
    """What each thread does in a waiter."""

    is_waiting = False


class _Follower:
    """A thread that sleeps until its documents are there, or until it becomes the leader.

    Only the thread itself has a strong reference. If it is collected with its `wait` set, the thread was
    interrupted before it removed that wait.
    """

    __slots__ = ("__weakref__", "_orphans", "_wakeup", "wait")

    def __init__(self, orphans: deque[ResultWait]) -> None:
        # A bare lock: an Event costs five times as much, and most threads never sleep on it.
        self._wakeup = threading.Lock()
        self._wakeup.acquire()
        self._orphans = orphans
        self.wait: ResultWait | None = None

    def __del__(self) -> None:
        if self.wait is not None:
            self._orphans.append(self.wait)

    def sleep(self, seconds: float) -> None:
        self._wakeup.acquire(timeout=seconds)

    def wake(self) -> None:
        """Let the thread go on, now or when it next sleeps. Only called with the lock of the waiter held."""
        if self._wakeup.locked():
            self._wakeup.release()


def _wake_weakly(follower: _Follower) -> Callable[[], None]:
    reference = weakref.ref(follower)

    def wake() -> None:
        target = reference()
        if target is not None:
            target.wake()

    return wake


_all_results: weakref.WeakSet[BlockingResultWaiter] = weakref.WeakSet()


def _after_fork() -> None:
    for waiter in list(_all_results):
        waiter.reset()


os.register_at_fork(after_in_child=_after_fork)
