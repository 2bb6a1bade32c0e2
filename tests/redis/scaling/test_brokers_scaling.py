"""Scaling on several brokers: what waits on any of them, and each worker once (C99, C103, C104, C108)."""

import os
import signal
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import trio

from celery5 import App, agather
from celery5.broker.calls import scaling as scaling_calls
from celery5.broker.calls.scaling import Scaling
from celery5.broker.servers.embedded import EmbeddedServer
from celery5.cli.commands.autoscale import format_scaling
from celery5.processes.scheduler import SCHEDULER
from celery5.protocol.scaling.snapshot import ClusterSnapshot
from celery5.services.health.vitals import ProcessStatus
from celery5.services.scaling import autoscaler, observer, reporter, scaling_commands
from tests.redis.worker.workers import LEASE, Lines, start, until, until_async, working

SCALE = {"minimum": 1, "maximum": 8, "cooldown": 0.1, "longest_cooldown": 0.2, "shrink_after": 0.5}
LOOKS = 20
"""After so many more looks anything would have become less that may."""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks and reports follow each other soon."""
    monkeypatch.setattr(autoscaler, "LOOK", 0.1)
    monkeypatch.setattr(autoscaler, "A_SECOND", 1000)
    monkeypatch.setattr(observer, "SETTLE_SECONDS", 1.0)
    monkeypatch.setattr(reporter, "REPORT_INTERVAL", 0.1)
    monkeypatch.setattr(scaling_commands, "MIN_COMMAND_INTERVAL", 0.2)


class Shop:
    """An application on two brokers, whose jobs take until `go` is set, four at a time in each worker."""

    def __init__(self, name: str, url: str, second: str, **settings: Any) -> None:
        self.go = trio.Event()
        scaled = {"concurrency": 4, "autoscale": SCALE, "grace_period": 1.0, "lease": LEASE, **settings}
        self.app = App(name, broker=url, brokers={"mails": second}, routes={"post": "mails"}, **scaled)

        @self.app.task(name="near", queue="near")
        async def near() -> None:
            await self.go.wait()

        @self.app.task(name="post", queue="post")
        async def post() -> None:
            await self.go.wait()

        self.near, self.post = near, post

    async def where(self) -> Scaling:
        """Where the scaling is."""
        return await self.app.aperform(scaling_calls.get_scaling(self.app.keys)) or Scaling()

    async def seen(self, **fields: Any) -> bool:
        """Whether the scaling is where these fields say."""
        found = await self.where()
        return all(getattr(found, name) == value for name, value in fields.items())

    async def wanted(self, workers: int) -> bool:
        """Whether so many workers are wanted."""
        course = (await self.where()).course
        return course is not None and course.workers == workers

    async def looked(self, times: int) -> None:
        """Until it was looked so many more times."""
        for _ in range(times):
            last = (await self.where()).at
            await until_async(lambda last=last: self._later(last))  # type: ignore[misc]

    async def _later(self, last: float) -> bool:
        return (await self.where()).at > last

    async def factors(self) -> dict[str, float]:
        """How far each life of the workers reads ahead."""
        return {reply.worker: reply.answer["factor"] for reply in await self.app.control.asend("prefetch")}

    async def read_ahead(self, **factors: float) -> bool:
        """Whether they do as far as this: web1, and its life on mails."""
        return await self.factors() == {"web1": factors["near"], "web1@mails": factors["post"]}


@pytest.fixture
def shop(url: str, own_server: EmbeddedServer, app_name: str) -> Iterator[Shop]:
    """It, on two servers, of which the second one is the test's own."""
    one = Shop(app_name, url, own_server.url)
    yield one
    one.app.close()


async def test_load_on_another_broker_scales_up_and_a_worker_of_both_is_one_worker(shop: Shop) -> None:
    with Lines() as lines:
        async with working(shop.app, name="web1"), trio.open_nursery() as nursery:
            one = await start(nursery, shop.app, page=SCHEDULER)
            await until_async(lambda: shop.read_ahead(near=1.0, post=1.0))  # both lives are there
            await until_async(lambda: shop.seen(workers=1, unseen=()))
            jobs = await shop.app.asend_many([shop.post.s() for _ in range(30)])
            await until_async(lambda: shop.wanted(8))
            assert await shop.seen(workers=1, jobs=30, needed=8)
            await until_async(lambda: shop.read_ahead(near=1.0, post=4.0))  # only that one is crowded
            shop.go.set()
            await agather(jobs, timeout=30)
            await until_async(lambda: shop.wanted(1))
            await until_async(lambda: shop.read_ahead(near=1.0, post=1.0))
            await one.stop()
    steps = [(line["of"], line["after"]) for line in lines.of("autoscale:decided")]
    assert steps[:5] == [("prefetch", 2.0), ("prefetch", 4.0), ("workers", 2), ("workers", 4), ("workers", 8)]
    # Each step was told once, and to nobody whom it does not concern.
    told = [(line["before"], line["factor"]) for line in lines.of("prefetch:set")]
    assert told == [(1.0, 2.0), (2.0, 4.0), (4.0, 2.0), (2.0, 1.0)]
    assert not lines.of("autoscale:broker-lost")


async def test_what_waits_on_both_counts_together(shop: Shop) -> None:
    async with working(shop.app, name="web1"), trio.open_nursery() as nursery:
        one = await start(nursery, shop.app, page=SCHEDULER)
        jobs = await shop.app.asend_many([task.s() for _ in range(10) for task in (shop.near, shop.post)])
        await until_async(lambda: shop.seen(workers=1, jobs=20, needed=5))
        shop.go.set()
        await agather(jobs, timeout=30)
        await one.stop()


async def test_while_a_broker_is_away_nothing_becomes_less_and_it_is_told_once(
    shop: Shop, own_server: EmbeddedServer
) -> None:
    with Lines() as lines:
        async with working(shop.app, name="web1"), trio.open_nursery() as nursery:
            one = await start(nursery, shop.app, page=SCHEDULER)
            jobs = await shop.app.asend_many([shop.post.s() for _ in range(30)])
            await until_async(lambda: shop.wanted(8))
            await trio.to_thread.run_sync(own_server.kill)
            await until_async(lambda: shop.seen(unseen=("mails",), jobs=0, needed=0, workers=1))
            await shop.looked(LOOKS)
            course = (await shop.where()).course
            assert course is not None
            assert (course.workers, course.prefetch) == (8, 4.0)
            told = format_scaling(await shop.where(), ["s"])
            assert told["not seen"] == "broker mails: nothing becomes less meanwhile"
            await trio.to_thread.run_sync(own_server.revive)
            await until_async(lambda: shop.seen(unseen=(), workers=1))
            assert await shop.wanted(8)
            shop.go.set()
            await agather(jobs, timeout=60)
            await until_async(lambda: shop.wanted(1))
            await one.stop()
    assert [line["broker"] for line in lines.of("autoscale:broker-lost")] == ["mails"]
    assert [line["broker"] for line in lines.of("autoscale:broker-recovered")] == ["mails"]


async def test_while_a_broker_is_away_what_waits_on_the_others_scales_up(
    shop: Shop, own_server: EmbeddedServer
) -> None:
    async with working(shop.app, name="web1"), trio.open_nursery() as nursery:
        one = await start(nursery, shop.app, page=SCHEDULER)
        await until_async(lambda: shop.seen(workers=1, unseen=()))
        await trio.to_thread.run_sync(own_server.kill)
        await until_async(lambda: shop.seen(unseen=("mails",)))
        jobs = await shop.app.asend_many([shop.near.s() for _ in range(30)])
        await until_async(lambda: shop.wanted(8))
        shop.go.set()
        await agather(jobs, timeout=30)
        await one.stop()


async def test_a_broker_that_hangs_holds_up_no_decision(shop: Shop, own_server: EmbeddedServer) -> None:
    with Lines() as lines:
        async with working(shop.app, name="web1"), trio.open_nursery() as nursery:
            one = await start(nursery, shop.app, page=SCHEDULER)
            await until_async(lambda: shop.seen(workers=1, unseen=()))
            os.kill(own_server.pid, signal.SIGSTOP)
            try:
                jobs = await shop.app.asend_many([shop.near.s() for _ in range(30)])
                await until_async(lambda: shop.seen(unseen=("mails",), jobs=30))
                await until_async(lambda: shop.wanted(8))
            finally:
                os.kill(own_server.pid, signal.SIGCONT)
            await until_async(lambda: shop.seen(unseen=()), within=60)
            shop.go.set()
            await agather(jobs, timeout=30)
            await one.stop()
    assert not lines.of("autoscale:lock-lost")
    assert len(lines.of("autoscale:broker-lost")) == 1


async def test_a_scheduler_that_has_never_seen_all_brokers_tells_nobody_a_number(
    shop: Shop, own_server: EmbeddedServer
) -> None:
    await trio.to_thread.run_sync(own_server.kill)
    with Lines() as lines:
        async with working(shop.app, name="web1"), trio.open_nursery() as nursery:
            one = await start(nursery, shop.app, page=SCHEDULER)
            jobs = await shop.app.asend_many([shop.near.s() for _ in range(30)])
            await until_async(lambda: shop.seen(unseen=("mails",), jobs=30, course=None))
            await shop.looked(3)
            assert await shop.seen(course=None)
            await trio.to_thread.run_sync(own_server.revive)
            await until_async(lambda: shop.wanted(8), within=60)
            shop.go.set()
            await agather(jobs, timeout=30)
            await one.stop()
    assert len(lines.of("autoscale:broker-recovered")) == 1


def posts_first(snapshot: ClusterSnapshot) -> Mapping[str, float]:
    """A strategy of one's own."""
    return {line.task: 4.0 if line.task == "post" else 1.0 for line in snapshot.task_loads}


async def test_each_life_hears_what_is_preferred_on_all_brokers(
    url: str, own_server: EmbeddedServer, app_name: str
) -> None:
    shop = Shop(app_name, url, own_server.url, autoscale="", prioritise=f"{__name__}:posts_first")
    async with working(shop.app, name="web1"), trio.open_nursery() as nursery:
        one = await start(nursery, shop.app, page=SCHEDULER)
        jobs = await shop.app.asend_many([task.s() for _ in range(30) for task in (shop.near, shop.post)])
        heard = {"tasks": {"near": 0.25}, "queues": {"near": 0.25}}
        await until_async(lambda: preferred(shop, {"web1": heard, "web1@mails": heard}))
        shop.go.set()
        await agather(jobs, timeout=30)
        await one.stop()
    shop.app.close()


async def preferred(shop: Shop, what: Mapping[str, Any]) -> bool:
    """Whether the lives prefer this."""
    replies = await shop.app.control.asend("stats")
    return {reply.worker: reply.answer["preferred"] for reply in replies} == what


async def test_a_queue_is_looked_at_only_where_it_is_at_home(shop: Shop, own_server: EmbeddedServer) -> None:
    stranger = App(shop.app.name, broker=own_server.url)
    stays = stranger.task(name="near", queue="near")(shop.near.function)
    left = await stays.adelay()
    async with working(shop.app, name="web1"), trio.open_nursery() as nursery:
        one = await start(nursery, shop.app, page=SCHEDULER)
        await until_async(lambda: shop.seen(workers=1, unseen=()))
        assert await shop.seen(jobs=0)
        await one.stop()
    await left.arevoke()
    stranger.close()


async def test_a_worker_of_the_other_broker_alone_is_told_as_well(shop: Shop) -> None:
    async with working(shop.app, name="web1", queues=("post",)), trio.open_nursery() as nursery:
        one = await start(nursery, shop.app, page=SCHEDULER)
        jobs = await shop.app.asend_many([shop.post.s() for _ in range(30)])
        await until_async(lambda: reads_ahead(shop, {"web1@mails": 4.0}))
        assert await shop.seen(workers=1)
        shop.go.set()
        await agather(jobs, timeout=30)
        await one.stop()


async def reads_ahead(shop: Shop, factors: Mapping[str, float]) -> bool:
    """Whether the lives read so far ahead."""
    return await shop.factors() == factors


async def test_metrics_tell_how_many_brokers_are_not_seen(shop: Shop, own_server: EmbeddedServer) -> None:
    vitals = ProcessStatus(app=shop.app.name)

    def unseen() -> float | None:
        found = {
            family.name: family.samples[0].value
            for family in vitals.metric_families()
            if len(family.samples) == 1
        }
        return found.get("celery5_scaling_brokers_unreachable")

    async with trio.open_nursery() as nursery:
        one = await start(nursery, shop.app, page=SCHEDULER, process_status=vitals)
        await until(lambda: unseen() == 0)
        await trio.to_thread.run_sync(own_server.kill)
        await until(lambda: unseen() == 1)
        await one.stop()
