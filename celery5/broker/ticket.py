"""Ticket: one request on its way: its bytes, who waits for it, and what came back.

Floor: broker. Reads: nothing. Writes: nothing.
"""

from collections.abc import Callable
from typing import Any

import trio

from celery5.broker.wire import ReplyError
from celery5.errors import BrokerError


class PendingRequest:
    """One write of `count` commands and the task that waits for their replies.

    A ticket that was not sent yet can be withdrawn without a trace. One that was sent keeps its place in the
    row until its replies have come, because replies are told apart by their order alone; when nobody waits
    any more they are dropped. `deadline` is a time of Trio's clock. `repeatable`: may be sent once more when
    nobody knows whether it ran. `awaited`: if nobody waits for it yet, somebody will. `on_reply` is called with a
    single reply in the very step in which it comes, before the task is woken.
    """

    __slots__ = (
        "awaited",
        "count",
        "data",
        "deadline",
        "error",
        "on_reply",
        "missing",
        "is_done",
        "allows_error_replies",
        "repeatable",
        "replies",
        "reply",
        "sent",
        "task",
        "sent_before",
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
