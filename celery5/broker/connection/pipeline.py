"""Send the commands of many callers over one connection, many in one write, and return to each caller its reply.

There are two queues. Requests in `unsent` wait for the writer, which sends all of them in one write: so calls that are
made in the same turn of the scheduler share a write. Requests in `inflight` wait for replies, which come in the order
of the commands.

It is fast because a call needs no event, no future, no channel and no task: the calling task is suspended and
rescheduled once, and its reply is an attribute of the request. When no reply is awaited and the last write had a single
command, the caller itself sends: a single caller saves the switch to the writer. Without the second condition the first
of a hundred callers would send alone each time, and split every batch.
"""

from collections import deque
from collections.abc import Callable
from typing import Any

import trio
from trio.lowlevel import Abort, current_task, reschedule, wait_task_rescheduled

from celery5.broker.connection.exchange import NEED_DATA, PushNotification, ReplyError, ReplyParser
from celery5.broker.connection.transport import Transport
from celery5.errors import BrokerError, BrokerUnavailable


class PendingRequest:
    """One write of `count` commands and the task that waits for their replies.

    A request that was not sent yet can be withdrawn. One that was sent stays in the queue until its replies have come,
    because only their order shows which request they belong to. When no task waits for them any more they are dropped.
    """

    __slots__ = (
        "allows_error_replies",
        "awaited",
        "count",
        "data",
        "deadline",
        "error",
        "is_done",
        "missing",
        "on_reply",
        "repeatable",
        "replies",
        "reply",
        "sent",
        "sent_before",
        "task",
        "withdrawn",
    )

    def __init__(self, data: bytes, deadline: float, repeatable: bool, count: int = 1) -> None:
        self.data = data
        self.deadline = deadline  # on Trio's clock
        # It may be sent once more when it is unknown whether it ran.
        self.repeatable = repeatable
        self.count = count
        self.missing = count
        # A single reply, the common case, needs no list.
        self.replies: list[Any] | None = None if count == 1 else []
        self.reply: Any = None
        self.error: BrokerError | None = None
        # Called with a single reply in the step in which it comes, before the task is woken.
        self.on_reply: Callable[[Any], None] | None = None
        self.task: trio.lowlevel.Task | None = None
        # A task will wait for it, if none does yet.
        self.awaited = False
        self.is_done = False
        # Whether it was sent over this connection, and whether it was sent over an earlier one.
        self.sent = False
        self.sent_before = False
        self.withdrawn = False
        self.allows_error_replies = False

    def allow_error_replies(self) -> None:
        """Take error replies as additional ones: the expected reply still follows (see `push.py`)."""
        self.allows_error_replies = True
        self.replies = []

    def finish(self) -> None:
        """Mark it as done, and wake the task that waits for it."""
        self.is_done = True
        task = self.task
        if task is not None:
            self.task = None
            trio.lowlevel.reschedule(task)

    def add_reply(self, reply: Any) -> bool:
        """Add one of several replies. Return whether that was the last."""
        if self.replies is not None:
            self.replies.append(reply)
        if not (self.allows_error_replies and type(reply) is ReplyError):
            self.missing -= 1
        return self.missing == 0

    def fail(self, error: BrokerError) -> None:
        """Finish it with an error."""
        self.error = error
        self.finish()

    def reset(self) -> None:
        """Prepare it to be sent once more."""
        self.repeatable = False
        self.sent = False
        self.sent_before = True
        self.missing = self.count
        if self.replies is not None:
            self.replies = []


# The most bytes of one write: the rest waits for the next one, so that replies can begin to come back.
MAX_BATCH_BYTES = 256 * 1024


class Pipeline:
    """The two queues of one link, and the writer and the reader that move requests through them.

    It outlives connections: `write` and `read` run once for each. `disconnect` decides what becomes of in-flight
    requests when a connection is lost.
    """

    __slots__ = (
        "_parked",
        "_push",
        "_rest",
        "_transport",
        "_withdrawn",
        "batches",
        "commands",
        "inflight",
        "last_batch",
        "last_received",
        "max_unsent_bytes",
        "unsent",
        "unsent_bytes",
        "where",
    )

    def __init__(self, *, where: str, max_unsent_bytes: int, push: Callable[[list[Any]], None]) -> None:
        self.where = where
        self.max_unsent_bytes = max_unsent_bytes
        self.unsent: deque[PendingRequest] = deque()
        self.inflight: deque[PendingRequest] = deque()
        self.unsent_bytes = 0
        self.commands = 0
        self.batches = 0
        self.last_batch = 1
        self.last_received = 0.0
        self._push = push
        self._transport: Transport | None = None
        # The writer while it has nothing to do.
        self._parked: trio.lowlevel.Task | None = None
        self._withdrawn = 0
        self._rest: bytes | memoryview = b""

    @property
    def unsent_count(self) -> int:
        """The number of requests that wait to be sent."""
        return len(self.unsent) - self._withdrawn

    @property
    def sends_at_once(self) -> bool:
        """Whether the next request would be sent at once by its caller."""
        return self._parked is not None and self.last_batch == 1 and not self.inflight

    def submit(self, request: PendingRequest) -> None:
        """Queue a request, or send it if it is the only one. Raises BrokerUnavailable when too many bytes wait."""
        parked = self._parked
        if parked is not None and self.last_batch == 1 and not self.inflight and self.send_alone(request):
            return
        size = len(request.data)
        if self.unsent_bytes + size > self.max_unsent_bytes and self.unsent:
            raise BrokerUnavailable(
                f"broker {self.where}: {self.unsent_bytes} bytes wait to be sent already; nothing was sent"
            )
        self.unsent_bytes += size
        self.unsent.append(request)
        if parked is not None:
            self._wake_writer()

    def send_alone(self, request: PendingRequest) -> bool:
        """Send a request at once. Return False if that is not possible. Call it only while `sends_at_once`."""
        transport = self._transport
        if transport is None or not transport.immediate:
            return False
        data = request.data
        try:
            sent = transport.send_now(data)
        except OSError:
            return False  # nothing was sent: the writer will meet the same error and report it
        if not sent:
            return False
        self._begin(request)
        if sent != len(data):
            # The socket's buffer is full after a part: the writer sends the rest before anything else.
            self._rest = memoryview(data)[sent:]
            self._wake_writer()
        return True

    def _begin(self, request: PendingRequest) -> None:
        request.sent = True
        self.inflight.append(request)
        self.commands += request.count
        self.batches += 1
        self.last_batch = request.count

    def _wake_writer(self) -> None:
        parked, self._parked = self._parked, None
        if parked is not None:
            reschedule(parked)

    async def wait(self, request: PendingRequest) -> None:
        """Suspend the calling task until its request is done.

        If the task is cancelled, the request is withdrawn, or its replies are dropped.
        """

        def abandon(_raise_cancel: object) -> Abort:
            request.task = None
            request.awaited = False
            if not request.sent:
                self.withdraw(request)
            return Abort.SUCCEEDED

        request.task = current_task()
        await wait_task_rescheduled(abandon)

    def withdraw(self, request: PendingRequest) -> None:
        """Withdraw a request from `unsent`: it will not be sent."""
        self.unsent_bytes -= len(request.data)
        request.data = b""
        request.withdrawn = True
        self._withdrawn += 1

    async def write(self, transport: Transport) -> None:
        """Send what is queued, all of it together, until cancelled. Raises what the transport raises."""
        self._transport = transport
        self._rest = b""
        try:
            while True:
                if self._rest:
                    rest, self._rest = self._rest, b""
                    await transport.send(rest)
                    continue
                if not self.unsent:
                    await self._park()
                    continue
                batch = self._next_batch()
                if not batch:
                    continue
                data = b"".join([request.data for request in batch])
                try:
                    sent = transport.send_now(data)
                except BaseException:
                    # No byte was sent, so these may wait for the next connection.
                    self._put_back(batch)
                    raise
                self._sent(batch)
                if sent < len(data):
                    await transport.send(memoryview(data)[sent:])
        finally:
            self._transport = None
            self._parked = None

    async def _park(self) -> None:
        def leave(_raise_cancel: object) -> Abort:
            self._parked = None
            return Abort.SUCCEEDED

        self._parked = current_task()
        await wait_task_rescheduled(leave)

    def _next_batch(self) -> list[PendingRequest]:
        unsent = self.unsent
        if self.unsent_bytes <= MAX_BATCH_BYTES:
            whole = list(unsent)
            unsent.clear()
            self.unsent_bytes = 0
            if self._withdrawn:
                self._withdrawn = 0
                return [request for request in whole if not request.withdrawn]
            return whole
        batch: list[PendingRequest] = []
        size = 0
        while unsent and size < MAX_BATCH_BYTES:
            request = unsent.popleft()
            if request.withdrawn:
                self._withdrawn -= 1
                continue
            batch.append(request)
            size += len(request.data)
        self.unsent_bytes -= size
        return batch

    def _put_back(self, batch: list[PendingRequest]) -> None:
        self.unsent.extendleft(reversed(batch))
        self.unsent_bytes += sum(len(request.data) for request in batch)

    def _sent(self, batch: list[PendingRequest]) -> None:
        count = 0
        for request in batch:
            request.sent = True
            count += request.count
        self.inflight.extend(batch)
        self.commands += count
        self.batches += 1
        self.last_batch = count

    async def read(self, transport: Transport, replies: ReplyParser) -> None:
        """Pass each reply to its request, until cancelled. Raises what the transport raises, and ProtocolError."""
        inflight = self.inflight
        receive, feed, following = transport.receive, replies.feed, replies.next
        while True:
            while True:
                reply = following()
                if reply is NEED_DATA:
                    break
                if type(reply) is PushNotification:
                    self._push(reply)
                    continue
                if not inflight:
                    raise trio.BrokenResourceError("a reply that nobody asked for")
                request = inflight[0]
                if request.replies is None:
                    inflight.popleft()
                    request.reply = reply
                    if request.on_reply is not None:
                        request.on_reply(reply)
                    request.finish()
                elif request.add_reply(reply):
                    inflight.popleft()
                    request.finish()
            data = await receive()
            if not data:
                raise trio.BrokenResourceError("closed by the server")
            self.last_received = trio.current_time()
            feed(data)

    def disconnect(self, reason: str) -> tuple[int, int]:
        """End the connection: in-flight requests fail with `reason`, but for those that may be sent again.

        Returns:
            How many failed, and how many wait to be sent now.
        """
        again: list[PendingRequest] = []
        failed = 0
        for request in self.inflight:
            if request.task is None and not request.awaited:
                continue  # no task waits for it any more
            if request.repeatable:
                request.reset()
                again.append(request)
            else:
                failed += 1
                request.fail(BrokerUnavailable(reason, maybe_done=True))
        self.inflight.clear()
        self._put_back(again)
        self.last_batch = 1
        return failed, self.unsent_count

    def fail_unsent(self, error: Callable[[bool], BrokerError], *, until: float = float("inf")) -> None:
        """Fail the requests that wait to be sent and have their deadline at `until` or before.

        `error` is called with whether the request was sent before.
        """
        unsent = self.unsent
        while unsent and (unsent[0].withdrawn or unsent[0].deadline <= until):
            request = unsent.popleft()
            if request.withdrawn:
                self._withdrawn -= 1
                continue
            self.unsent_bytes -= len(request.data)
            request.fail(error(request.sent_before))
