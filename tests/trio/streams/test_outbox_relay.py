"""Outbox relay: what is committed while it looks is delivered, too."""

from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec
import trio

from celery5 import App
from celery5.broker.call import Call
from celery5.logs.log import NullLog
from celery5.protocol.job.job import Job
from celery5.services.streams.outbox_relay import OutboxRelay

T = TypeVar("T")


class Outbox:
    """A driver that knows one outbox. What is `late` comes just after it was looked at, before the reply is there."""

    def __init__(self, late: list[bytes]) -> None:
        self.entries: list[tuple[bytes, list[bytes]]] = []
        self.late = late
        self.relay: OutboxRelay | None = None

    async def perform(self, call: Call[T], /) -> T:
        """Answer as Redis does."""
        if call.words[0] == "XDEL":
            self.entries = [entry for entry in self.entries if entry[0] not in call.words]
            return call.decode(1)
        found = list(self.entries)
        if self.late:
            output = self.late.pop()
            self.entries.append((b"%d-1" % (len(self.late) + 1), [b"o", output]))
            assert self.relay is not None
            self.relay.note(0, 1)
        await trio.lowlevel.checkpoint()
        return call.decode(found)

    async def perform_all(self, calls: Any, /) -> Any:
        """Nobody asks."""
        raise NotImplementedError


async def test_what_is_committed_while_the_relay_looks_is_delivered(nursery: trio.Nursery) -> None:
    app, sent = App("shop"), list[Job]()

    async def send(jobs: Sequence[Job]) -> None:
        sent.extend(jobs)

    @app.task
    async def charge(amount: int) -> None: ...

    late = [msgspec.msgpack.encode({"job": charge.s(amount).job().to_bytes()}) for amount in range(3)]
    outbox = Outbox(late)
    relay = outbox.relay = OutboxRelay(
        keys=app.keys.for_stream("orders"),
        group="bill",
        streams={},
        send_jobs=send,
        redis=outbox,
        log=NullLog(),
    )
    await nursery.start(relay.run)
    relay.note(0)
    with trio.fail_after(5):
        await relay.wait_delivered(0)
    assert len(sent) == 3
    assert outbox.entries == []
    nursery.cancel_scope.cancel()
