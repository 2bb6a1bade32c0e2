"""Messages Backlogs: in memory and in SQLite: in order, bounded, once, and what becomes of them when the disk fails."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
import trio

from celery5.errors import BacklogFull, Misconfigured
from celery5.logs.log import Log
from celery5.protocol.publisher.frames import JobMessage
from celery5.sending.bounded_queue import BacklogCapacity
from celery5.sending.messages_backlog import (
    MAX_READ_MESSAGES,
    MemoryBacklog,
    MessagesBacklog,
    SQLiteBacklog,
    make_backlog,
)
from celery5.services.publisher import messages_store
from celery5.services.publisher.messages_store import MessagesStore

T = TypeVar("T", bound=MessagesBacklog | MessagesStore)


def pairs(*ids: str, queue: str = "q", size: int = 1) -> list[tuple[JobMessage, int | None]]:
    """Messages to put."""
    return [(JobMessage(job_id, queue, b"x" * size), None) for job_id in ids]


@asynccontextmanager
async def opened(one: T) -> AsyncGenerator[T, None]:
    """It runs while the block does."""
    async with trio.open_nursery() as nursery:
        await nursery.start(one.run)
        yield one
        nursery.cancel_scope.cancel()


@pytest.fixture(params=["memory", "sqlite"])
def backlog(request: pytest.FixtureRequest, tmp_path: Path) -> MessagesBacklog:
    """One of each kind, with room for 500 messages of 10,000 bytes in all."""
    room = BacklogCapacity(500, 10_000)
    return (
        MemoryBacklog(capacity=room)
        if request.param == "memory"
        else SQLiteBacklog(path=tmp_path / "b.db", capacity=room)
    )


async def ids(backlog: MessagesBacklog, queue: str = "q", after: int = 0) -> list[str]:
    return [stored.job.id for stored in await backlog.first(queue, after)]


async def test_each_queue_comes_out_in_the_order_in_which_it_was_put(backlog: MessagesBacklog) -> None:
    async with opened(backlog):
        await backlog.put([*pairs("a", "b"), *pairs("c", queue="r")])
        await backlog.put(pairs("d", "a"))  # a waits already
        assert (await ids(backlog), await ids(backlog, "r"), await ids(backlog, "s")) == (
            ["a", "b", "d"],
            ["c"],
            [],
        )
        assert sorted(await backlog.queues()) == ["q", "r"]
        first = await backlog.first("q", 0)
        assert await ids(backlog, after=first[0].number) == ["b", "d"]
        await backlog.gone([stored.number for stored in first[:2]])
        await backlog.gone([first[0].number])  # twice
        assert (await ids(backlog), backlog.size) == (["d"], 2)
        last = first[-1].number
        await backlog.gone([last])
        await backlog.put(pairs("a"))
        assert (await backlog.first("q", 0))[0].number > last  # a number is never used again


async def test_no_more_is_given_at_once_than_goes_in_one_trip(backlog: MessagesBacklog) -> None:
    async with opened(backlog):
        await backlog.put(pairs(*[f"{n:03}" for n in range(MAX_READ_MESSAGES + 50)]))
        assert len(await ids(backlog)) == MAX_READ_MESSAGES


async def test_what_there_is_no_room_for_is_refused_as_a_whole(backlog: MessagesBacklog) -> None:
    async with opened(backlog):
        await backlog.put(pairs("a", size=9_000))
        with pytest.raises(BacklogFull, match="9000 of at most 10000 bytes"):
            await backlog.put(pairs("b", "c", size=600))
        await backlog.put(pairs("d", size=600))
        with pytest.raises(BacklogFull, match="2 of at most 500 messages"):
            await backlog.put(pairs(*[str(n) for n in range(499)], size=0))
        assert await ids(backlog) == ["a", "d"]


async def test_what_is_in_a_file_is_there_again(tmp_path: Path) -> None:
    path, parcel = tmp_path / "deep" / "b.db", JobMessage("a", "q", b"\x00\xff", "+500", "h")
    async with opened(SQLiteBacklog(path=path, capacity=BacklogCapacity(9, 999))) as one:
        await one.put([(parcel, 1234)])
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    async with opened(SQLiteBacklog(path=path, capacity=BacklogCapacity(9, 999))) as one:
        (kept,) = await one.first("q", 0)
        assert (kept.job, kept.due, one.size) == (parcel, 1234, 1)


async def test_many_who_put_at_once_share_a_few_transactions(tmp_path: Path) -> None:
    one = SQLiteBacklog(path=tmp_path / "b.db", capacity=BacklogCapacity(1000, 9999))
    written = list[int]()
    inner = one._insert

    def insert(kept: Any) -> None:
        written.append(len(kept))
        inner(kept)

    one._insert = insert  # type: ignore[method-assign]
    async with opened(one), trio.open_nursery() as nursery:
        for n in range(200):
            nursery.start_soon(one.put, pairs(str(n)))
    assert sum(written) == 200
    assert len(written) < 20


async def test_what_one_of_many_puts_too_much_of_costs_no_other_anything(tmp_path: Path) -> None:
    async def too_much() -> None:
        with pytest.raises(BacklogFull):
            await one.put(pairs("b", "c", "d", "e"))

    async with opened(SQLiteBacklog(path=tmp_path / "b.db", capacity=BacklogCapacity(3, 999))) as one:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(one.put, pairs("a"))
            nursery.start_soon(too_much)
            nursery.start_soon(one.put, pairs("f"))
        assert sorted(await ids(one)) == ["a", "f"]


async def test_message_put_during_the_end_is_written_and_commits_reach_the_disk(tmp_path: Path) -> None:
    path = tmp_path / "b.db"
    one = SQLiteBacklog(path=path, capacity=BacklogCapacity(9, 999))
    async with trio.open_nursery() as nursery:
        await nursery.start(one.run)
        asked = [one._open_file.execute(f"PRAGMA {pragma}") for pragma in ("synchronous", "journal_mode")]
        assert [cursor.fetchone()[0] for cursor in asked] == [2, "wal"]
        nursery.cancel_scope.cancel()
        with trio.CancelScope(shield=True):
            await one.put(pairs("a"))
    async with opened(SQLiteBacklog(path=path, capacity=BacklogCapacity(9, 999))) as again:
        assert await ids(again) == ["a"]


async def refusal(path: Path) -> str:
    """Why a backlog does not come up."""
    try:
        async with opened(SQLiteBacklog(path=path, capacity=BacklogCapacity(9, 999))):
            return ""
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        assert isinstance(error, Misconfigured)
        return str(error)


async def test_a_file_is_one_daemons_alone_and_must_be_a_backlog(tmp_path: Path) -> None:
    path = tmp_path / "b.db"
    async with opened(SQLiteBacklog(path=path, capacity=BacklogCapacity(9, 999))):
        assert "another Publisher" in await refusal(path)
    path.write_bytes(b"this is no database, and long enough to be seen as none" * 100)
    assert "cannot be opened: file is not a database" in await refusal(path)


def test_which_backlog_is_meant(tmp_path: Path) -> None:
    room = BacklogCapacity(1, 1)
    assert isinstance(make_backlog("memory", app="a", broker="b", capacity=room), MemoryBacklog)
    assert "b.sqlite3" in repr(make_backlog(f"{tmp_path}/", app="a", broker="b", capacity=room))
    own = make_backlog("tests.trio.publisher.test_messages_backlogs:own", app="a", broker="b", capacity=room)
    assert isinstance(own, MemoryBacklog)
    for wrong in ("sqlit", "no_such_module:x", "tests.trio.publisher.test_messages_backlogs:pairs"):
        with pytest.raises(Misconfigured, match="publisher_backlog"):
            make_backlog(wrong, app="a", broker="b", capacity=room)


def own(*, app: str, broker: str, capacity: BacklogCapacity) -> MemoryBacklog:
    """A backlog of a user's own."""
    return MemoryBacklog(capacity=capacity)


async def test_full_disk_moves_messages_to_memory_which_goes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages_store, "MAX_MEMORY_MESSAGES", 3)
    backlog = SQLiteBacklog(path=tmp_path / "b.db", capacity=BacklogCapacity(1000, 10**9))
    store = MessagesStore(broker="default", backlog=backlog, log=Log(worker="w", app="a"))
    async with trio.open_nursery() as nursery:
        await nursery.start(store.run)
        assert await store.put([JobMessage("old", "q", b"x" * 1000)])
        assert store.is_durable
        file: Any = backlog._file
        file.execute("PRAGMA max_page_count=1")  # it has more already: not one is to be had
        large = b"x" * 100_000
        assert not await store.put([JobMessage("a", "q", large), JobMessage("b", "q", large)])
        assert (store.in_memory, store.is_durable) == (2, False)
        assert "full" in store.problem
        assert store.conditions() == {"backlog default": store.problem}
        assert not await store.put([JobMessage("a", "q", large)])  # sent again
        with pytest.raises(BacklogFull, match=r"cannot be written .*2 of at most 3 wait there"):
            await store.put([JobMessage("c", "q", large), JobMessage("d", "q", large)])
        first = await store.read_first("q")
        assert [stored.job.id for stored in first] == ["a", "b"]
        store.mark_published("q", first)
        file.execute("PRAGMA max_page_count=100000")
        assert await store.put([JobMessage("new", "q", large)])
        assert (store.problem, store.in_memory) == ("", 0)
        last = await store.read_first("q")
        assert [stored.job.id for stored in last] == ["old", "new"]
        store.mark_published("q", last)
        assert list(await store.read_first("q")) == []
        with trio.fail_after(30):
            while backlog.size:
                await trio.sleep(0.01)
        nursery.cancel_scope.cancel()


async def test_nothing_stays_in_memory_of_queues_whose_messages_are_published(tmp_path: Path) -> None:
    backlog = SQLiteBacklog(path=tmp_path / "b.db", capacity=BacklogCapacity(1000, 10**9))
    store = MessagesStore(broker="default", backlog=backlog, log=Log(worker="w", app="a"))
    async with opened(store):
        for number in range(50):
            queue = f"customer-{number}"
            await store.put([JobMessage("a", queue, b"{}"), JobMessage("b", queue, b"{}")])
            store.take_queue(queue)
            first, *_ = await store.read_first(queue)
            store.mark_published(queue, [first])
            assert [stored.job.id for stored in await store.read_first(queue)] == ["b"]
            store.release_queue(queue)
        with trio.fail_after(30):
            while backlog.size > 50 or store._last_published:
                await trio.sleep(0.01)
        assert (store._waiting_queues, store._taken_queues) == ({}, set())
        assert [stored.job.id for stored in await store.read_first("customer-7")] == ["b"]


async def test_queue_taken_by_a_stopped_store_waits_again(
    tmp_path: Path,
) -> None:
    backlog = SQLiteBacklog(path=tmp_path / "b.db", capacity=BacklogCapacity(1000, 10**9))
    store = MessagesStore(broker="default", backlog=backlog, log=Log(worker="w", app="a"))
    async with opened(store):
        file: Any = backlog._file
        file.execute("PRAGMA max_page_count=1")
        assert not await store.put([JobMessage("a", "q", b"x" * 100_000)])
        assert store.find_free_queue() == "q"
        store.take_queue("q")
        assert (store.find_free_queue(), store.has_work) == (None, True)
        store.release_queue("q")
        assert (store.find_free_queue(), store.has_work) == (None, False)
    async with opened(store):
        assert store.find_free_queue() == "q"
        assert [stored.job.id for stored in await store.read_first("q")] == ["a"]
