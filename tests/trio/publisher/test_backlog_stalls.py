"""A disk that stands still: what callers gave up on does not pile up, and what was written after all is published."""

import threading
from pathlib import Path
from typing import Any

import trio

from celery5.logs.log import Log
from celery5.protocol.publisher.frames import JobMessage
from celery5.sending.bounded_queue import BacklogCapacity
from celery5.sending.messages_backlog import SQLiteBacklog
from celery5.services.publisher.messages_store import MessagesStore


async def test_abandoned_messages_do_not_pile_up_and_written_ones_are_published(tmp_path: Path) -> None:
    backlog: Any = SQLiteBacklog(path=tmp_path / "b.db", capacity=BacklogCapacity(100, 10**6))
    store = MessagesStore(broker="default", backlog=backlog, log=Log(worker="w", app="shop"))
    update_block, write = threading.Event(), backlog._write

    def stalls(taken: Any) -> None:
        assert update_block.wait(30)
        write(taken)

    backlog._write = stalls

    async def give_up(name: str) -> None:
        with trio.move_on_after(0.01):
            await store.put([JobMessage(name, "q", b"x")])

    async with trio.open_nursery() as nursery:
        await nursery.start(store.run)
        try:
            await give_up("first")  # which is being written
            for number in range(300):
                nursery.start_soon(give_up, str(number))
            with trio.fail_after(30):
                await trio.sleep(0.05)  # they have put by then what they will
                while backlog._puts:
                    await trio.sleep(0.01)
        finally:
            update_block.set()
        assert store.find_free_queue() == "q"
        with trio.fail_after(30):
            assert [stored.job.id for stored in await store.read_first("q")] == ["first"]
        nursery.cancel_scope.cancel()
