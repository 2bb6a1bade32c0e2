"""Pipeline: many callers, one connection: their commands leave together and each gets its own reply.

Two queues. `unsent` waits for the writer, which sends all of it in one go: calls made in the same turn of the
scheduler share one write without knowing of each other. `inflight` waits for replies, which come in the order
of the commands.

The speed comes from what is left out. A task parks itself and is rescheduled once; its reply lies in the
ticket. There is no event, no future, no channel and no task per call. When nothing else is under way and the
last write carried one command, a call is sent at once by the caller itself: a lone caller saves the trip
through the writer. Without the second condition the first of a hundred callers would travel alone each time
and split every batch.
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

    A ticket that was not sent yet can be withdrawn without a trace. One that was sent keeps its place in the
    row until its replies have come, because replies are told apart by their order alone; when nobody waits
    any more they are dropped. `deadline` is a time of Trio's clock. `repeatable`: may be sent once more when
    nobody knows whether it ran. `awaited`: if nobody waits for it yet, somebody will. `on_reply` is called with a
    single reply in the very step in which it comes, before the task is woken.
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
        self.deadline = deadline
        self.repeatable = repeatable
        self.count = count
        self.missing = count
        # A single reply, the common case, needs no list.
        self.replies: list[Any] | None = None if count == 1 else []
        self.reply: Any = None
        self.error: BrokerError | None = None
        self.on_reply: Callable[[Any], None] | None = None
        self.task: trio.lowlevel.Task | None = None
        self.awaited = False
        self.is_done = False
        # Whether its bytes have left us over this connection, and whether they had over an earlier one.
        self.sent = False
        self.sent_before = False
        self.withdrawn = False
        self.allows_error_replies = False

    def allow_error_replies(self) -> None:
        """An error reply is an extra one here, and the expected reply still follows (see `push`)."""
        self.allows_error_replies = True
        self.replies = []

    def finish(self) -> None:
        """It is over: let the task that waits go on."""
        self.is_done = True
        task = self.task
        if task is not None:
            self.task = None
            trio.lowlevel.reschedule(task)

    def add_reply(self, reply: Any) -> bool:
        """Keep one of several replies; true when that was the last."""
        if self.replies is not None:
            self.replies.append(reply)
        if not (self.allows_error_replies and type(reply) is ReplyError):
            self.missing -= 1
        return self.missing == 0

    def fail(self, error: BrokerError) -> None:
        """End it with an error."""
        self.error = error
        self.finish()

    def reset(self) -> None:
        """Make ready to be sent again, once."""
        self.repeatable = False
        self.sent = False
        self.sent_before = True
        self.missing = self.count
        if self.replies is not None:
            self.replies = []


# One write: more than this waits for the next one, so that replies can begin to come back.
MAX_BATCH_BYTES = 256 * 1024


class Pipeline:
    """The two queues of one link, and the writer and the reader that move tickets through them.

    It outlives connections: `write` and `read` run once for each, `cut` says what a lost connection means for
    what was under way.
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
        self._rest = b""

    @property
    def unsent_count(self) -> int:
        """How many tickets wait to be sent."""
        return len(self.unsent) - self._withdrawn

    @property
    def sends_at_once(self) -> bool:
        """Whether the next ticket would be sent at once by its caller."""
        return self._parked is not None and self.last_batch == 1 and not self.inflight

    def submit(self, ticket: PendingRequest) -> None:
        """Queue a ticket, or send it when it would be alone.

        Raises BrokerUnavailable when too much waits already.
        """
        parked = self._parked
        if parked is not None and self.last_batch == 1 and not self.inflight and self.send_alone(ticket):
            return
        size = len(ticket.data)
        if self.unsent_bytes + size > self.max_unsent_bytes and self.unsent:
            raise BrokerUnavailable(
                f"broker {self.where}: {self.unsent_bytes} bytes wait to be sent already; nothing was sent"
            )
        self.unsent_bytes += size
        self.unsent.append(ticket)
        if parked is not None:
            self._wake_writer()

    def send_alone(self, ticket: PendingRequest) -> bool:
        """Send a ticket, or say that it cannot be sent at once: ask only while `eager`."""
        transport = self._transport
        if transport is None or not transport.immediate:
            return False
        data = ticket.data
        try:
            sent = transport.send_now(data)
        except OSError:
            return False  # nothing was sent: the writer will meet the same error and report it
        if not sent:
            return False
        self._begin(ticket)
        if sent != len(data):
            # The socket's buffer is full after a part: the writer sends the rest before anything else.
            self._rest = data[sent:]
            self._wake_writer()
        return True

    def _begin(self, ticket: PendingRequest) -> None:
        ticket.sent = True
        self.inflight.append(ticket)
        self.commands += ticket.count
        self.batches += 1
        self.last_batch = ticket.count

    def _wake_writer(self) -> None:
        parked, self._parked = self._parked, None
        if parked is not None:
            reschedule(parked)

    async def wait(self, ticket: PendingRequest) -> None:
        """Park the calling task until its ticket is done.

        Cancellation withdraws it or leaves its replies to be dropped.
        """

        def abandon(_raise_cancel: object) -> Abort:
            ticket.task = None
            ticket.awaited = False
            if not ticket.sent:
                self.withdraw(ticket)
            return Abort.SUCCEEDED

        ticket.task = current_task()
        await wait_task_rescheduled(abandon)

    def withdraw(self, ticket: PendingRequest) -> None:
        """Take back a ticket that waits in `unsent`: it will not be sent."""
        self.unsent_bytes -= len(ticket.data)
        ticket.data = b""
        ticket.withdrawn = True
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
                data = b"".join([ticket.data for ticket in batch])
                try:
                    sent = transport.send_now(data)
                except BaseException:
                    # Not one byte has left, so these may wait for the next connection.
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
                return [ticket for ticket in whole if not ticket.withdrawn]
            return whole
        batch: list[PendingRequest] = []
        size = 0
        while unsent and size < MAX_BATCH_BYTES:
            ticket = unsent.popleft()
            if ticket.withdrawn:
                self._withdrawn -= 1
                continue
            batch.append(ticket)
            size += len(ticket.data)
        self.unsent_bytes -= size
        return batch

    def _put_back(self, batch: list[PendingRequest]) -> None:
        self.unsent.extendleft(reversed(batch))
        self.unsent_bytes += sum(len(ticket.data) for ticket in batch)

    def _sent(self, batch: list[PendingRequest]) -> None:
        count = 0
        for ticket in batch:
            ticket.sent = True
            count += ticket.count
        self.inflight.extend(batch)
        self.commands += count
        self.batches += 1
        self.last_batch = count

    async def read(self, transport: Transport, replies: ReplyParser) -> None:
        """Give each reply to its ticket, until cancelled.

        Raises what the transport raises, and ProtocolError.
        """
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
                ticket = inflight[0]
                if ticket.replies is None:
                    inflight.popleft()
                    ticket.reply = reply
                    if ticket.on_reply is not None:
                        ticket.on_reply(reply)
                    ticket.finish()
                elif ticket.add_reply(reply):
                    inflight.popleft()
                    ticket.finish()
            data = await receive()
            if not data:
                raise trio.BrokenResourceError("closed by the server")
            self.last_received = trio.current_time()
            feed(data)

    def disconnect(self, reason: str) -> tuple[int, int]:
        """The connection is over: what was in flight fails with `reason`, or is kept where the call may be
        sent again.

        Says how many failed and how many are kept, those that were not sent yet included.
        """
        again: list[PendingRequest] = []
        failed = 0
        for ticket in self.inflight:
            if ticket.task is None and not ticket.awaited:
                continue  # nobody waits for it any more
            if ticket.repeatable:
                ticket.reset()
                again.append(ticket)
            else:
                failed += 1
                ticket.fail(BrokerUnavailable(reason, maybe_done=True))
        self.inflight.clear()
        self._put_back(again)
        self.last_batch = 1
        return failed, self.unsent_count

    def fail_unsent(self, error: Callable[[bool], BrokerError], *, until: float = float("inf")) -> None:
        """Fail what waits to be sent and has its deadline at `until` or before.

        `error` is told whether it was sent before.
        """
        unsent = self.unsent
        while unsent and (unsent[0].withdrawn or unsent[0].deadline <= until):
            ticket = unsent.popleft()
            if ticket.withdrawn:
                self._withdrawn -= 1
                continue
            self.unsent_bytes -= len(ticket.data)
            ticket.fail(error(ticket.sent_before))
