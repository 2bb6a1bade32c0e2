"""The index of dead letters: its groups are those of the library, whatever is sent, replayed, purged and trimmed."""

import random
from typing import Any

import httpx
import msgspec
import pytest
import trio

from celery5 import App
from celery5.broker.calls.dead_letters import DeadLetterEntry
from celery5.broker.calls.queues import register_queue
from celery5.dashboard import Dashboard, Identify, dead_letter_index
from celery5.dashboard.dead_letter_index import DeadLetterIndex
from celery5.protocol.job.dead_letters import DeadJobFilter, parse_filter
from celery5.protocol.job.failure_groups import DeadJobGroups
from celery5.protocol.job.messages import Command, Document, Failure, encode
from tests.redis.dashboard.client import looking_at
from tests.redis.dashboard.site import identify

QUEUES = ("mail", "money", "stock")
FILTERS: tuple[DeadJobFilter, ...] = (
    {},
    {"queue": "mail"},
    {"task": "shop.a*", "reason": "exhausted"},
    {"error": ["Value*", "Key*"], "queue": ["stock", "money"]},
    {"newer_than": 0.05},
    {"older_than": 0.05},
)


def trim(client: Any, key: str) -> None:
    """Remove all entries but the newest 90."""
    client.xtrim(key, maxlen=90, approximate=False)


def forget_places(client: Any, app: App) -> None:
    """Remove the places of jobs whose entries were removed by hand: a check of all tests looks for them."""
    for keys in map(app.queue, QUEUES):
        entries: Any = client.xrange(keys.dead)
        places: Any = client.hgetall(keys.jobs)
        left = {b"X" + entry for entry, _ in entries}
        for job_id, place in places.items():
            if place[:1] == b"X" and place not in left:
                client.hdel(keys.jobs, job_id)


class Dying:
    """Puts dead jobs into queues, as a worker's script does."""

    def __init__(self, app: App, client: Any, seed: int) -> None:
        self._app, self._client, self.random, self._number = app, client, random.Random(seed), 0
        for queue in QUEUES:
            app.perform(register_queue(app.keys, queue))

    def dead_letter_jobs(
        self, count: int, *, message: str = "", queue: str = "", has_place: bool = True
    ) -> None:
        pipe = self._client.pipeline(transaction=False)
        made: list[tuple[str, str]] = []
        for _ in range(count):
            self._number += 1
            job_id, where = f"j{self._number}", queue or self.random.choice(QUEUES)
            task, error = (
                self.random.choice(("shop.a1", "shop.a2", "b")),
                self.random.choice(("ValueError", "KeyError")),
            )
            text = message or f"order {self._number} of {self.random.choice(('anna', 'ben'))}"
            failure = Failure(type=error, message=text, traceback=f"Traceback of {self._number}")
            reason = self.random.choice(("exhausted", "poisonous"))
            document = Document(v=1, id=job_id, task=task, state="DEAD", reason=reason, failure=failure)
            raw = encode(Command(v=1, id=job_id, task=task)) if self.random.random() < 0.98 else b"broken"
            pipe.xadd(self._app.queue(where).dead, {"job": raw, "document": encode(document)})
            made.append((job_id, where))
        replies: list[Any] = pipe.execute()
        for (job_id, where), entry in zip(made, replies, strict=True):
            if has_place:
                pipe.hset(self._app.queue(where).jobs, job_id, f"X{entry.decode()}")
        pipe.execute()


def newest_first(conditions: DeadJobFilter) -> DeadJobFilter:
    """The filter of the library that reads as the index does."""
    ordered = conditions.copy()
    ordered["newest_first"] = True
    return ordered


async def compare(app: App, index: DeadLetterIndex, conditions: DeadJobFilter) -> DeadJobGroups:
    """The groups of the index, which are those of the library."""
    found = await index.group(parse_filter(conditions))
    assert found is not None
    if "newer_than" in conditions or "older_than" in conditions:  # time goes by between the two
        return found
    wanted = await app.dlq.agroups(**newest_first(conditions))
    assert msgspec.to_builtins(found) == msgspec.to_builtins(wanted)
    return found


@pytest.mark.parametrize("seed", range(4))
async def test_groups_are_those_of_the_library_after_random_changes(
    app: App, redis_client: Any, seed: int
) -> None:
    dying = await trio.to_thread.run_sync(Dying, app, redis_client, seed)
    index = DeadLetterIndex(app)
    for _ in range(12):
        match dying.random.randrange(6):
            case 0 | 1:
                await trio.to_thread.run_sync(dying.dead_letter_jobs, dying.random.randrange(1, 400))
            case 2:
                await app.dlq.areplay(limit=dying.random.randrange(1, 60))
            case 3:
                queue, task = dying.random.choice(QUEUES), dying.random.choice(("shop.a1", "b"))
                await app.dlq.apurge(queue=queue, task=task, limit=dying.random.randrange(1, 60))
            case 4:
                key = app.queue(dying.random.choice(QUEUES)).dead
                await trio.to_thread.run_sync(trim, redis_client, key)
            case _:
                await index.group(parse_filter({}), within=0.0)
        for conditions in FILTERS:
            await compare(app, index, conditions)
    await trio.to_thread.run_sync(forget_places, redis_client, app)


async def test_a_part_is_read_by_each_look_until_all_is_known(app: App, redis_client: Any) -> None:
    dying = await trio.to_thread.run_sync(Dying, app, redis_client, 1)
    await trio.to_thread.run_sync(dying.dead_letter_jobs, 3000)
    index = DeadLetterIndex(app)
    first = await index.group(parse_filter({}), within=0.002)
    assert first is not None
    assert 0 < first.looked_at < 3000
    assert (first.total, first.matched, bool(first.next)) == (3000, first.looked_at, True)
    same = await app.dlq.agroups(newest_first=True, limit=first.looked_at)
    assert msgspec.to_builtins(first) == msgspec.to_builtins(same)
    while (found := await index.group(parse_filter({}), within=0.002)) is not None and found.next:
        await trio.to_thread.run_sync(dying.dead_letter_jobs, 1)
    await compare(app, index, {})


async def test_only_what_is_new_is_read_again(
    app: App, redis_client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    dying = await trio.to_thread.run_sync(Dying, app, redis_client, 1)
    await trio.to_thread.run_sync(dying.dead_letter_jobs, 500)
    index = DeadLetterIndex(app)
    await index.group(parse_filter({}))
    read: list[str] = []
    make = DeadLetterIndex._make_letter  # pyright: ignore[reportPrivateUsage]

    def note(self: DeadLetterIndex, queue: str, entry: DeadLetterEntry) -> Any:
        read.append(entry.entry)
        return make(self, queue, entry)

    monkeypatch.setattr(DeadLetterIndex, "_make_letter", note)
    await app.dlq.areplay(limit=40)
    await trio.to_thread.run_sync(dying.dead_letter_jobs, 7)
    await compare(app, index, {})
    assert len(read) == 7


async def test_the_index_keeps_to_its_bounds(
    app: App, redis_client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dead_letter_index, "MAX_LETTERS", 300)
    monkeypatch.setattr(dead_letter_index, "MAX_NEW", 200)
    dying = await trio.to_thread.run_sync(Dying, app, redis_client, 2)
    index = DeadLetterIndex(app)
    for count in (250, 150, 20, 700, 199):
        await trio.to_thread.run_sync(dying.dead_letter_jobs, count)
        found = await index.group(parse_filter({}))
        assert found is not None
        assert index.count() == found.looked_at == min(300, found.total)
        wanted = await app.dlq.agroups(newest_first=True, limit=300)
        assert msgspec.to_builtins(found) == msgspec.to_builtins(wanted)
    await app.dlq.apurge(newest_first=True, limit=50)
    found = await index.group(parse_filter({}))
    assert found is not None
    assert (index.count(), found.total) == (300, 1269)
    monkeypatch.setattr(dead_letter_index, "MAX_KINDS", 5)
    await trio.to_thread.run_sync(dying.dead_letter_jobs, 100)
    found = await index.group(parse_filter({}))
    assert found is not None
    assert len(found.groups) <= 5
    assert (found.total, bool(found.next)) == (1369, True)


async def test_of_too_many_groups_the_same_are_listed_as_by_the_library(app: App, redis_client: Any) -> None:
    dying = await trio.to_thread.run_sync(Dying, app, redis_client, 3)

    def dead_letter_jobs() -> None:
        letters = random.Random(3)
        for _ in range(1100):
            dying.dead_letter_jobs(1, message="".join(letters.choices("abcdefgh", k=9)))

    await trio.to_thread.run_sync(dead_letter_jobs)
    found = await compare(app, DeadLetterIndex(app), {})
    assert (len(found.groups), found.ungrouped > 0) == (1000, True)


async def test_what_was_removed_by_hand_is_noticed(app: App, redis_client: Any) -> None:
    dying = await trio.to_thread.run_sync(Dying, app, redis_client, 4)
    await trio.to_thread.run_sync(dying.dead_letter_jobs, 300)
    index = DeadLetterIndex(app)
    await compare(app, index, {})

    def remove() -> None:
        key = app.queue("mail").dead
        entries: Any = redis_client.xrange(key)
        redis_client.xdel(key, *[entry for entry, _ in entries[5:25]])
        redis_client.delete(app.queue("stock").dead)

    await trio.to_thread.run_sync(remove)
    await compare(app, index, {})
    await trio.to_thread.run_sync(lambda: dying.dead_letter_jobs(30, has_place=False))
    await compare(app, index, {})
    await app.dlq.apurge(queue="money", limit=3)
    await compare(app, index, {})
    await trio.to_thread.run_sync(forget_places, redis_client, app)


async def test_pages_show_new_dead_jobs_and_drop_those_that_were_replayed_and_purged(
    app: App, redis_client: Any
) -> None:
    dying = await trio.to_thread.run_sync(Dying, app, redis_client, 5)
    await trio.to_thread.run_sync(lambda: dying.dead_letter_jobs(3, message="no bank", queue="mail"))
    async with looking_at(app) as client:
        assert "no bank" in await client.look("dead")
        await trio.to_thread.run_sync(lambda: dying.dead_letter_jobs(2, message="no card", queue="mail"))
        assert "deleted" in await client.press("dlq:purge", message="no bank")
        text = await client.look("dead")
        assert "no card" in text
        assert "no bank" not in text
        assert "sent again" in await client.press("dlq:replay", message="no card")
        left = sum([1 async for _ in app.dlq.aread()])
        groups = await client.ask("dlq:groups")
        assert (groups["total"], groups["looked_at"], groups["next"]) == (left, left, "")


async def test_what_is_left_is_read_ahead_after_a_look(app: App, redis_client: Any) -> None:
    dying = await trio.to_thread.run_sync(Dying, app, redis_client, 6)
    await trio.to_thread.run_sync(dying.dead_letter_jobs, 2000)
    index = DeadLetterIndex(app)
    await index.read_ahead()
    assert index.count() == 0  # nobody has looked
    await index.group(parse_filter({}), within=0.0)
    assert 0 < index.count() < 2000
    while index.count() < 2000:
        before = index.count()
        await index.read_ahead()
        assert index.count() > before
    await compare(app, index, {})


async def test_a_server_that_runs_the_lifespan_has_the_dashboard_read_ahead(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_reading = trio.Event()

    async def note(self: DeadLetterIndex) -> None:
        is_reading.set()
        raise RuntimeError("broken")  # the next look says so

    monkeypatch.setattr(DeadLetterIndex, "read_ahead", note)
    monkeypatch.setattr("celery5.dashboard.performing.READ_AHEAD_PAUSE", 0.01)
    dashboard = Dashboard(app, authenticator=Identify(identify), hosts=["jobs.example"])
    phases, receive = trio.open_memory_channel[Any](2)
    sent: list[str] = []

    async def send(message: Any) -> None:
        sent.append(message["type"])

    async with trio.open_nursery() as nursery:
        nursery.start_soon(dashboard, {"type": "lifespan"}, receive.receive, send)
        await phases.send({"type": "lifespan.startup"})
        transport = httpx.ASGITransport(app=dashboard)
        async with httpx.AsyncClient(transport=transport, base_url="http://jobs.example") as client:
            page = await client.get(f"/{app.name}/dead", headers={"x-test-role": "viewer"})
            assert page.status_code == 200
        await is_reading.wait()
        await phases.send({"type": "lifespan.shutdown"})
    assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
