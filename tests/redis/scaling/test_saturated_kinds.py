"""Saturated kinds: jobs that cannot start wait in Redis, and hold up no job of another kind behind them."""

import asyncio
import itertools
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import trio

from celery5 import App, JobState, agather, gather
from celery5.broker.calls import queues
from celery5.broker.servers.embedded import EmbeddedServer
from celery5.dashboard.pages.jobs import tell_story
from celery5.protocol.job.history import JobRecord
from celery5.protocol.scaling.prefetch import BATCH, HORIZON, MAX_AHEAD
from celery5.scaling import Budget
from celery5.services.worker.capacity import MAX_AWAITING
from tests.night import NIGHTLY
from tests.redis.boxes import boxing
from tests.redis.commands.staff import Staff, wait_until
from tests.redis.worker.workers import held, start, until, until_async, working

FLOOD = 2000
"""Jobs in front of others. A worker that gave 50 of them back in a second would need 40 s to get past them."""
SOON = 30.0
"""Seconds, for a machine that is busy with other things."""
KINDS = ("trio", "asyncio", "thread")
PAIRS = (
    list(itertools.permutations(KINDS, 2))
    if NIGHTLY
    else list(zip(KINDS, (*KINDS[1:], KINDS[0]), strict=True))
)
"""Whose jobs are in front, and whose behind: by day each kind is each once."""

MOST_HELD = MAX_AWAITING + BATCH + MAX_AHEAD
"""The most jobs in a worker: those that await admission, one more read, and those that it will start soon."""

TRIPS = ("cmdstat_eval", "cmdstat_evalsha", "cmdstat_xreadgroup")
"""What a worker calls to read, to admit and to settle."""


class Flood:
    """An application with a task of each kind whose jobs wait until `go` is set, and one whose jobs end at once."""

    def __init__(self, url: str, name: str, **settings: Any) -> None:
        if "budgets" not in settings:
            settings["concurrency"] = 5
        self.app = App(name, broker=url, cpu_slots=2, grace_period=1.0, lease=60.0, **settings)
        self.go = threading.Event()
        self.begun: list[str] = []

        @self.app.task(name="slow.trio")
        async def slow_trio(label: str = "") -> None:
            self.begun.append(label)
            while not self.go.is_set():
                await trio.sleep(0.01)

        @self.app.task(name="slow.asyncio", loop="asyncio")
        async def slow_asyncio(label: str = "") -> None:
            self.begun.append(label)
            while not self.go.is_set():
                await asyncio.sleep(0.01)

        @self.app.task(name="slow.thread")
        def slow_thread(label: str = "") -> None:
            self.begun.append(label)
            self.go.wait(120)

        @self.app.task(name="quick.trio")
        async def quick_trio() -> str:
            return "trio"

        @self.app.task(name="quick.asyncio", loop="asyncio")
        async def quick_asyncio() -> str:
            return "asyncio"

        @self.app.task(name="quick.thread")
        def quick_thread() -> str:
            return "thread"

    async def send(self, task: str, count: int, *args: Any, **options: Any) -> list[Any]:
        signature = self.app.tasks[task].options(**options).s(*args)
        found: list[Any] = []
        for first in range(0, count, 1000):
            found += await self.app.asend_many([signature] * min(1000, count - first))
        return found


@pytest.fixture
def flood(url: str, app_name: str) -> Iterator[Flood]:
    flood = Flood(url, app_name)
    yield flood
    flood.go.set()


@pytest.mark.parametrize(("kind", "other"), PAIRS)
async def test_thousands_of_jobs_of_one_kind_do_not_hold_up_another(
    flood: Flood, redis_client: "redis.Redis", kind: str, other: str
) -> None:
    slow = await flood.send(f"slow.{kind}", FLOOD)
    quick = await flood.send(f"quick.{other}", 30)
    async with working(flood.app):
        assert set(await agather(quick, timeout=SOON)) == {other}
        assert await (await flood.app.tasks[f"quick.{other}"].adelay()).aget(timeout=SOON) == other
        keys = flood.app.queue("default")
        await until(lambda: int(redis_client.hget(keys.limited_counts, f"slow.{kind}") or 0) >= FLOOD - 10)
        assert await slow[-1].astatus() is JobState.HELD
        flood.go.set()
        await agather(slow, timeout=60)
    assert len(flood.begun) == FLOOD
    assert not redis_client.exists(keys.limited_counts, keys.slots, keys.slot_counts, keys.waiting)


async def test_boxed_jobs_and_async_ones_do_not_hold_up_each_other(
    url: str, app_name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("BOXING_APP", app_name)
    app = boxing.make(app_name, url, box_slots=1, concurrency=2, grace_period=1.0)
    path, go = tmp_path / "go", trio.Event()

    @app.task(name="quick")
    async def quick() -> str:
        return "quick"

    @app.task(name="slow")
    async def slow() -> None:
        await go.wait()

    counting = [app.tasks["count"].s(str(path))] + [app.tasks["add"].s(1, 1)] * FLOOD
    boxed = []
    for at in range(0, len(counting), 1000):
        boxed += await app.asend_many(counting[at : at + 1000])
    sent = await app.asend_many([quick.s()] * 10)
    async with working(app):
        assert await agather(sent, timeout=SOON) == ["quick"] * 10
        assert await boxed[0].astatus() is JobState.EXECUTING
        waiting = [job for _ in range(FLOOD // 1000) for job in await app.asend_many([slow.s()] * 1000)]
        sums = await app.asend_many([app.tasks["add"].s(1, n) for n in range(3)])
        path.touch()
        assert await agather(boxed, timeout=120) == ["counted"] + [2] * FLOOD
        assert await agather(sums, timeout=SOON) == [1, 2, 3]
        go.set()
        await agather(waiting, timeout=SOON)
    app.close()


async def test_a_task_with_a_budget_of_its_own_does_not_hold_up_its_kind(url: str, app_name: str) -> None:
    flood = Flood(url, app_name, budgets={"slow.trio": Budget(minimum=1, maximum=1)})
    slow = await flood.send("slow.trio", FLOOD)
    quick = await flood.send("quick.trio", 30)
    try:
        async with working(flood.app):
            assert set(await agather(quick, timeout=SOON)) == {"trio"}
            assert len(flood.begun) == 1
            flood.go.set()
            await agather(slow, timeout=60)
    finally:
        flood.go.set()


async def test_budget_of_a_full_kind_grows_for_jobs_in_redis(url: str, app_name: str) -> None:
    flood = Flood(url, app_name, budgets={"trio": Budget(minimum=2, maximum=30, cooldown=0.2)})
    slow = await flood.send("slow.trio", FLOOD)
    quick = await flood.send("quick.thread", 30)
    try:
        async with working(flood.app):
            assert set(await agather(quick, timeout=SOON)) == {"thread"}
            await until(lambda: len(flood.begun) == 30)
            flood.go.set()
            await agather(slow, timeout=60)
    finally:
        flood.go.set()


async def test_jobs_at_a_limit_and_jobs_of_a_full_kind_let_each_other_pass(url: str, app_name: str) -> None:
    flood = Flood(url, app_name)

    @flood.app.task(name="narrow", limit=1)
    async def narrow() -> str:
        return "narrow"

    slow = await flood.send("slow.thread", FLOOD)
    narrow_ones = await flood.send("narrow", 20)
    try:
        async with working(flood.app):
            assert set(await agather(narrow_ones, timeout=SOON)) == {"narrow"}
            flood.go.set()
            await agather(slow, timeout=60)
    finally:
        flood.go.set()


async def test_short_jobs_of_a_full_kind_do_not_hold_up_another(url: str, app_name: str) -> None:
    app = App(app_name, broker=url, cpu_slots=2, concurrency=5)
    ended = 0

    @app.task
    def short() -> None:
        nonlocal ended
        time.sleep(HORIZON / 5)  # so some are read ahead
        ended += 1

    @app.task
    async def quick() -> int:
        return ended

    sent = [job for _ in range(2) for job in await app.asend_many([short.s()] * 750)]
    quick_ones = await app.asend_many([quick.s()] * 10)
    async with working(app):
        assert all(isinstance(n, int) and n < 750 for n in await agather(quick_ones, timeout=SOON))
        await agather(sent, timeout=60)
    assert ended == 1500


async def test_short_jobs_among_slow_ones_of_each_kind_hold_up_none_of_them(
    url: str, app_name: str, redis_client: "redis.Redis"
) -> None:
    app = App(app_name, broker=url, cpu_slots=2, concurrency=5)
    ended = Counter[str]()

    @app.task(name="short")
    def short() -> None:
        ended["short"] += 1

    @app.task(name="slow.thread")
    def slow_thread() -> None:
        time.sleep(0.1)
        ended["thread"] += 1

    @app.task(name="slow.trio")
    async def slow_trio() -> None:
        await trio.sleep(0.1)
        ended["trio"] += 1

    @app.task(name="slow.asyncio", loop="asyncio")
    async def slow_asyncio() -> None:
        await asyncio.sleep(0.1)
        ended["asyncio"] += 1

    mixed = [*[short.s()] * 150, slow_thread.s(), slow_trio.s(), slow_asyncio.s()]
    sent = [job for _ in range(30) for job in await app.asend_many(mixed)]
    most_held, begun = 0, time.monotonic()
    async with working(app, name="w"):
        while sum(ended.values()) < len(sent):
            most_held = max(most_held, held(redis_client, app).get("w", 0))
            await trio.sleep(0.01)
            assert time.monotonic() - begun < SOON, ended
        await agather(sent, timeout=SOON)
    assert ended == {"short": 4500, "thread": 30, "trio": 30, "asyncio": 30}
    assert most_held <= MOST_HELD
    app.close()


async def test_jobs_that_wait_for_their_kind_keep_their_order_and_priority(flood: Flood) -> None:
    flood.app.configure(cpu_slots=1)
    flood.go.set()

    @flood.app.task(name="other.thread")
    def other(label: str) -> None:
        flood.begun.append(label)

    gate = threading.Event()

    @flood.app.task(name="gate.thread")
    def gate_thread() -> None:
        gate.wait(60)

    tasks = ("slow.thread", "other.thread")
    try:
        async with working(flood.app):
            first = await flood.send("gate.thread", 1)
            await until_async(lambda: has_status(first[0], JobState.EXECUTING))
            sent = []
            for n in range(40):
                sent += await flood.send(tasks[n % 2], 1, f"normal {n}")
            sent += await flood.send("other.thread", 1, "low 0", priority="low")
            for n in range(3):
                sent += await flood.send(tasks[n % 2], 1, f"high {n}", priority="high")
            quick = await flood.send("quick.trio", 3)
            assert set(await agather(quick, timeout=SOON)) == {"trio"}
            await until_async(lambda: has_status(sent[-1], JobState.HELD))
            gate.set()
            await agather([*first, *sent], timeout=SOON)
    finally:
        gate.set()
    expected = [f"high {n}" for n in range(3)] + [f"normal {n}" for n in range(40)] + ["low 0"]
    ahead = len(flood.begun) - len(expected)  # what was read before the kind counted as saturated goes first
    assert ahead == 0
    late = [label for label, right in zip(flood.begun, expected, strict=True) if label != right]
    assert len(late) <= 6, flood.begun


async def has_status(result: Any, state: JobState) -> bool:
    return await result.astatus() is state


async def test_queues_share_the_slots_of_a_full_kind(url: str, app_name: str) -> None:
    app = App(app_name, broker=url, cpu_slots=1, concurrency=5, grace_period=1.0)
    order: list[str] = []

    @app.task
    def slow(queue: str) -> None:
        order.append(queue)
        time.sleep(HORIZON)

    @app.task
    async def quick() -> str:
        return "quick"

    sent, quick_ones = [], []
    for queue in "ab":
        sent += await app.asend_many([slow.options(queue=queue).s(queue)] * 15)
        quick_ones += await app.asend_many([quick.options(queue=queue).s()] * 3)
    async with working(app, queues=("a", "b")):
        assert set(await agather(quick_ones, timeout=SOON)) == {"quick"}
        await agather(sent, timeout=60)
    middle = order[4:-4]
    assert abs(middle.count("a") - middle.count("b")) <= 4, order


async def test_a_full_worker_that_nothing_changes_for_sends_hardly_a_command(
    own_server: EmbeddedServer, app_name: str
) -> None:
    flood = Flood(own_server.url, app_name)
    slow = await flood.send("slow.thread", 1000)
    quick = await flood.send("quick.trio", 3)
    with redis.Redis.from_url(own_server.url) as client:
        async with working(flood.app):
            await agather(quick, timeout=SOON)
            await until(
                lambda: client.hget(flood.app.queue("default").limited_counts, "slow.thread") == b"998"
            )
            client.config_resetstat()
            await trio.sleep(3)  # what it measures is how much happens meanwhile
            stats = client.info("commandstats")
            calls = sum(
                stats.get(f"cmdstat_{name}", {"calls": 0})["calls"]
                for name in ("evalsha", "eval", "xreadgroup")
            )
            flood.go.set()
            await agather(slow, timeout=60)
    assert calls <= 6


async def test_waiting_jobs_are_run_by_workers_that_have_slots_or_start_later(flood: Flood) -> None:
    slow = await flood.send("slow.thread", 8)
    async with trio.open_nursery() as nursery:
        first = await start(nursery, flood.app)
        await agather(await flood.send("quick.trio", 3), timeout=SOON)
        await until_async(lambda: has_status(slow[-1], JobState.HELD))
        second = await start(nursery, flood.app)
        await until(lambda: len(flood.begun) == 4)
        flood.go.set()
        await agather(slow, timeout=SOON)
        await first.stop()
        await second.stop()


async def test_waiting_jobs_are_revoked_and_expire_like_all_others(flood: Flood) -> None:
    slow = await flood.send("slow.thread", 100)
    brief = await flood.send("slow.thread", 5, expires=1.0)
    async with working(flood.app):
        await agather(await flood.send("quick.trio", 3), timeout=SOON)
        await until_async(lambda: has_status(slow[-1], JobState.HELD))
        assert await slow[-1].arevoke()
        assert await slow[-1].astatus() is JobState.REVOKED
        await until_async(lambda: has_status(brief[-1], JobState.EXPIRED))
        flood.go.set()
        await agather(slow[:-1], timeout=SOON)
    assert len(flood.begun) == 99


async def test_a_task_that_is_suspended_keeps_its_jobs_that_wait_for_their_kind(flood: Flood) -> None:
    @flood.app.task(name="other.thread")
    def other() -> str:
        flood.begun.append("other")
        return "other"

    slow = await flood.send("slow.thread", 50)
    others = await flood.send("other.thread", 20)
    async with working(flood.app):
        await agather(await flood.send("quick.trio", 3), timeout=SOON)
        await until_async(lambda: has_status(others[-1], JobState.HELD))
        await flood.app.limits.asuspend("other.thread", why="tested")
        flood.go.set()
        await agather(slow, timeout=SOON)
        assert "other" not in flood.begun
        await flood.app.limits.aresume("other.thread")
        assert set(await agather(others, timeout=SOON)) == {"other"}


def test_workers_that_die_lose_none_of_the_jobs_that_wait_for_a_kind(
    staff: Staff, redis_client: "redis.Redis", tmp_path: Path
) -> None:
    path, app = tmp_path / "go", staff.app
    flags: dict[str, Any] = {"lease": 1.0, "concurrency": 4, "cpu_slots": 2}
    first = staff.start(**flags)
    sent = [job for _ in range(2) for job in app.send_many([app.signature("gate_thread", str(path))] * 250)]
    for _ in range(2):
        second = staff.start(**flags)
        assert gather(app.send_many([app.signature("quiet", n) for n in range(5)]), timeout=SOON) == list(
            range(5)
        )
        first.signal(signal.SIGKILL)
        first.wait()
        first = second
    path.touch()
    gather(sent, timeout=60)
    ended = [note.job for note in staff.notes("end")]
    assert len(ended) == len(set(ended)) == 500
    keys = app.queue("default")
    wait_until(
        lambda: not redis_client.exists(keys.limited_counts, keys.slots, keys.slot_counts, keys.waiting)
    )


async def test_jobs_that_wait_for_their_kind_count_as_waiting_with_their_age(flood: Flood) -> None:
    slow = await flood.send("slow.thread", 50)
    slow += await flood.send("slow.thread", 3, priority="high")
    async with working(flood.app):
        await agather(await flood.send("quick.trio", 3), timeout=SOON)
        await until_async(lambda: has_status(slow[49], JobState.HELD))
        keys = flood.app.queue("default")
        await until_async(lambda: has_waiting(flood.app, 51))
        depth = await flood.app.aperform(queues.get_queue_depth(keys))
        assert (depth.waiting, depth.held) == (51, 0)
        assert depth.oldest is not None
        assert depth.oldest > 0
        state = await flood.app.aperform(queues.get_queue_state(keys))
        assert (state.waiting, state.held, state.running) == (51, 0, 2)
        assert state.oldest_waiting is not None
        flood.go.set()
        await agather(slow, timeout=SOON)
        assert (await flood.app.aperform(queues.get_queue_depth(keys))).waiting == 0


async def has_waiting(app: App, count: int) -> bool:
    return (await app.aperform(queues.get_queue_depth(app.queue("default")))).waiting == count


async def test_a_job_that_waits_for_a_slot_of_its_kind_is_shown_at_no_limit(url: str, app_name: str) -> None:
    flood = Flood(url, app_name)
    app = flood.app
    await app.asend_many([app.tasks["slow.trio"].s() for _ in range(200)])
    async with working(app):

        async def find_listed() -> list[JobRecord]:
            page = await app.jobs.asearch(state="HELD")
            return list(page.jobs)

        async def are_listed() -> bool:
            return bool(await find_listed())

        await until_async(are_listed)
        (listed, *_) = await find_listed()
        found = await app.afind(listed.id)
        (alone,) = (await app.jobs.asearch(id=listed.id)).jobs
        assert found is not None
        assert found.state is JobState.HELD
        assert (listed.limit, alone.limit, found.limit, found.jobs_ahead) == ("", "", "", None)
        (line,) = [line.text for line in tell_story(found, time.time()) if "waits" in line.text]
        assert line == f"waits on queue {listed.queue} for a worker"
        flood.go.set()
