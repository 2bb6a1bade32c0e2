"""Ticket: one request on its way: its bytes, who waits for it, and what came back.

Floor: broker. Reads: nothing. Writes: nothing.
"""

from collections.abc import Callable
from typing import Any

import trio

from celery5.broker.wire import ReplyError
from celery5.errors import BrokerError


class Ticket:
    """One write of `count` commands and the task that waits for their replies.

    A ticket that was not sent yet can be withdrawn without a trace. One that was sent keeps its place in the
    row until its replies have come, because replies are told apart by their order alone; when nobody waits
    any more they are dropped. `deadline` is a time of Trio's clock. `repeatable`: may be sent once more when
    nobody knows whether it ran. `awaited`: if nobody waits for it yet, somebody will. `heard` is called with a
    single reply in the very step in which it comes, before the task is woken.
    """

    __slots__ = (
        "awaited",
        "count",
        "data",
        "deadline",
        "error",
        "heard",
        "missing",
        "over",
        "patient",
        "repeatable",
        "replies",
        "reply",
        "sent",
        "task",
        "was_sent",
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
        self.heard: Callable[[Any], None] | None = None
        self.task: trio.lowlevel.Task | None = None
        self.awaited = False
        self.over = False
        # Whether its bytes have left us over this connection, and whether they had over an earlier one.
        self.sent = False
        self.was_sent = False
        self.withdrawn = False
        self.patient = False

    def be_patient(self) -> None:
        """An error reply is an extra one here, and the expected reply still follows (see `push`)."""
        self.patient = True
        self.replies = []

    def wake(self) -> None:
        """It is over: let the task that waits go on."""
        self.over = True
        task = self.task
        if task is not None:
            self.task = None
            trio.lowlevel.reschedule(task)

    def take(self, reply: Any) -> bool:
        """Keep one of several replies; true when that was the last."""
        if self.replies is not None:
            self.replies.append(reply)
        if not (self.patient and type(reply) is ReplyError):
            self.missing -= 1
        return self.missing == 0

    def fail(self, error: BrokerError) -> None:
        """End it with an error."""
        self.error = error
        self.wake()

    def reset(self) -> None:
        """Make ready to be sent again, once."""
        self.repeatable = False
        self.sent = False
        self.was_sent = True
        self.missing = self.count
        if self.replies is not None:
            self.replies = []
