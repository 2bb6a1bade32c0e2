"""Autoscaler: a Scheduler sees what waits, decides, and has workers and Controllers told, whichever Scheduler lives."""

import time
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import pytest
import redis
import trio

from celery5 import App
from celery5.broker.calls import cluster
from celery5.broker.calls import scaling as scaling_calls
from celery5.broker.calls.commands import read_commands
from celery5.broker.calls.scaling import Scaling
from celery5.config.settings import count_cores
from celery5.processes import scheduler
from celery5.protocol.commands.definitions import get_inbox_name
from celery5.protocol.commands.signing import format_audience, verify_command
from celery5.protocol.scaling.autoscale import Load, Scale
from celery5.protocol.scaling.budget import Budget
from celery5.protocol.scaling.snapshot import WorkerReport
from celery5.protocol.scheduling.declaration import every
from celery5.services.health.vitals import ProcessStatus
from celery5.services.scaling import autoscaler, reporter, scaling_commands
from tests.redis.worker.workers import Lines, start, until, until_async, working

SCALE = {"minimum": 1, "maximum": 8, "cooldown": 0.1, "longest_cooldown": 0.2, "shrink_after": 0.3}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks and reports follow each other soon."""
    monkeypatch.setattr(autoscaler, "LOOK", 0.1)
    monkeypatch.setattr(autoscaler, "A_SECOND", 1000)
    monkeypatch.setattr(reporter, "REPORT_INTERVAL", 0.1)
    monkeypatch.setattr(scaling_commands, "MIN_COMMAND_INTERVAL", 0.2)


def scaled(app_name: str, url: str, **settings: Any) -> tuple[App, trio.Event]:
    """An application that is scaled, with a task that takes until an event is set, four at a time."""
    app = App(app_name, broker=url, **{"concurrency": 4, "autoscale": SCALE, "grace_period": 1.0, **settings})
    go = trio.Event()

    @app.task(name="wait")
    async def wait_for_it() -> None:
        await go.wait()

    return app, go


async def where(app: App) -> Scaling:
    """Where the scaling is."""
    found = await app.aperform(scaling_calls.get_scaling(app.keys))
    return found or Scaling()


async def test_jobs_that_wait_raise_the_prefetch_then_the_workers_and_all_goes_back(
    app_name: str, url: str
) -> None:
    app, go = scaled(app_name, url)
    with Lines() as lines:
        async with working(app, name="w"), trio.open_nursery() as nursery:
            one = await start(nursery, app, page=scheduler.SCHEDULER)
            await until_async(lambda: seen(app, workers=1))
            jobs = await app.asend_many([app.tasks["wait"].s() for _ in range(30)])
            await until_async(lambda: wanted(app, 8))
            (stats,) = await app.control.asend("prefetch", to="w")
            assert stats.answer == {"factor": 4.0}
            go.set()
            for job in jobs:
                await job.aget(30)
            await until_async(lambda: wanted(app, 1))
            await until_async(lambda: reads_ahead(app, 1.0))
            await one.stop()
    steps = [(line["of"], line["before"], line["after"]) for line in lines.of("autoscale:decided")]
    assert steps[:5] == [
        ("prefetch", 1.0, 2.0),
        ("prefetch", 2.0, 4.0),
        ("workers", 1, 2),
        ("workers", 2, 4),
        ("workers", 4, 8),
    ]
    assert steps[-5:] == [
        ("workers", 8, 4),
        ("workers", 4, 2),
        ("workers", 2, 1),
        ("prefetch", 4.0, 2.0),
        ("prefetch", 2.0, 1.0),
    ]
    assert [line["factor"] for line in lines.of("prefetch:set")][-1] == 1.0
    assert len(lines.of("autoscale:not-applied")) == 1


async def seen(app: App, **fields: Any) -> bool:
    """Whether the scaling is where these fields say."""
    found = await where(app)
    return all(getattr(found, name) == value for name, value in fields.items())


async def wanted(app: App, workers: int) -> bool:
    """Whether so many workers are wanted."""
    course = (await where(app)).course
    return course is not None and course.workers == workers


async def reads_ahead(app: App, factor: float) -> bool:
    """Whether the worker w reads so far ahead."""
    (reply,) = await app.control.asend("prefetch", to="w")
    return bool(reply.ok and reply.answer == {"factor": factor})


async def test_what_a_worker_reports_is_how_it_does(app_name: str, url: str) -> None:
    app, go = scaled(app_name, url, default_queue="mail")

    @app.task(queue="pics", name="think")
    def think() -> None:
        pass

    async with working(app, name="w"):
        await app.tasks["think"].s().adelay()
        jobs = await app.asend_many([app.tasks["wait"].s() for _ in range(3)])
        await until_async(lambda: reported(app, held={"mail": {"wait": 3}}))
        (said,) = (await reports(app)).values()
        assert said.queues == ("mail", "pics")
        assert said.slots == said.most == {"thread": count_cores(), "trio": 4}
        assert said.executing == {"thread": 0, "trio": 3}
        assert 0 <= said.means["think"] < 1
        go.set()
        await jobs[0].aget(30)


async def reports(app: App) -> Mapping[str, WorkerReport]:
    """What the workers of an application tell."""
    living = (await app.ainfo()).workers
    return await app.aperform(scaling_calls.get_reports(app.keys, living)) if living else {}


async def reported(app: App, **fields: Any) -> bool:
    """Whether the one worker reports these."""
    return any(
        all(getattr(report, name) == value for name, value in fields.items())
        for report in (await reports(app)).values()
    )


async def test_nothing_is_reported_nor_looked_at_unless_somebody_asked_for_it(
    app_name: str, url: str, redis_client: "redis.Redis"
) -> None:
    app, _go = scaled(app_name, url, autoscale="")
    async with working(app, name="w"), trio.open_nursery() as nursery:
        one = await start(nursery, app, page=scheduler.SCHEDULER)
        before, since = redis_client.info("stats")["total_commands_processed"], trio.current_time()
        await trio.sleep(0.5)
        after = redis_client.info("stats")["total_commands_processed"]
        seconds = trio.current_time() - since
        await one.stop()
    # Some beats, and looks at the timetable; looks and reports of scaling would be a hundred in a second.
    assert after - before <= 50 * max(seconds, 0.5)
    assert not redis_client.exists(app.keys.scaling, app.keys.scaling_turn)
    assert not list(redis_client.scan_iter(app.keys.report("*")))


async def test_controllers_are_told_their_shares_by_signed_commands(app_name: str, url: str) -> None:
    app, go = scaled(app_name, url)
    for name in ("host1:aaaaaa", "host2:bbbbbb"):
        await app.aperform(cluster.renew_presence(app.keys, "controller", name, lease=60))
    async with working(app, name="w"), trio.open_nursery() as nursery:
        one = await start(nursery, app, page=scheduler.SCHEDULER)
        jobs = await app.asend_many([app.tasks["wait"].s() for _ in range(10)])
        await until_async(lambda: wanted(app, 3))
        await until_async(lambda: inbox_has(app, "host1", 2))
        await until_async(lambda: inbox_has(app, "host2", 1))
        go.set()
        for job in jobs:
            await job.aget(30)
        await one.stop()
    # Each was told of a number once.
    for name in ("host1", "host2"):
        shares = [order["workers"] for order in await orders(app, name)]
        assert all(share != other for share, other in pairwise(shares))


async def orders(app: App, inbox: str) -> list[dict[str, Any]]:
    """What an inbox was told, of those commands that are signed for it."""
    found = await app.aperform(read_commands(app.keys, inbox, count=100, max_bytes=10**6))
    trust = app.control.keyring.get_trust_store()
    audience = format_audience(app.name, inbox)
    opened = [
        verify_command(message.sealed, audience=audience, trust=trust, now=time.time()) for message in found
    ]
    return [dict(command.parameters) for command in opened if command.command == "scale"]


async def inbox_has(app: App, inbox: str, workers: int) -> bool:
    """Whether an inbox was told of this many workers last."""
    return [order["workers"] for order in await orders(app, inbox)][-1:] == [workers]


async def test_one_scheduler_has_the_turn_and_the_next_goes_on_where_it_was(app_name: str, url: str) -> None:
    app, go = scaled(app_name, url, autoscale={**SCALE, "cooldown": 30, "longest_cooldown": 30})
    with Lines() as lines:
        async with working(app, name="w"), trio.open_nursery() as nursery:
            one = await start(nursery, app, page=scheduler.SCHEDULER, name="one")
            await until_async(lambda: seen(app, workers=1))
            two = await start(nursery, app, page=scheduler.SCHEDULER, name="two")
            jobs = await app.asend_many([app.tasks["wait"].s() for _ in range(30)])
            await until_async(lambda: stepped(app))
            await trio.sleep(0.5)
            left = await where(app)
            assert left.by.startswith("one:")
            await one.stop()
            await until_async(lambda: seen_by(app, "two:"))
            await trio.sleep(0.5)
            now = await where(app)
            # The cool-down that began with the one holds for the other.
            assert now.course == left.course
            go.set()
            for job in jobs:
                await job.aget(30)
            await two.stop()
    assert [line["after"] for line in lines.of("autoscale:decided")] == [2.0]


async def stepped(app: App) -> bool:
    """Whether a step was made."""
    course = (await where(app)).course
    return course is not None and course.at > 0


async def seen_by(app: App, name: str) -> bool:
    """Whether it is the turn of that one."""
    return (await where(app)).by.startswith(name)


async def test_the_turn_of_one_that_is_gone_passes_to_another(app: App, redis_client: "redis.Redis") -> None:
    first = await app.aperform(scaling_calls.claim_scaling_turn(app.keys, "one", seconds=60))
    assert (first.mine, first.scaling) == (True, None)
    assert not (await app.aperform(scaling_calls.claim_scaling_turn(app.keys, "two"))).mine
    assert not await app.aperform(scaling_calls.save_scaling(app.keys, "two", Scaling(jobs=7)))
    assert await app.aperform(scaling_calls.save_scaling(app.keys, "one", Scaling(jobs=5)))
    assert 0 < int(redis_client.pttl(app.keys.scaling_turn)) <= 60_000
    redis_client.delete(app.keys.scaling_turn)  # as if that were over
    second = await app.aperform(scaling_calls.claim_scaling_turn(app.keys, "two", seconds=60))
    assert second.mine
    assert second.scaling is not None
    assert second.scaling.jobs == 5
    assert not await app.aperform(scaling_calls.save_scaling(app.keys, "one", Scaling(jobs=6)))
    await app.aperform(scaling_calls.release_scaling_turn(app.keys, "one"))  # it is not its own
    assert not (await app.aperform(scaling_calls.claim_scaling_turn(app.keys, "one"))).mine
    await app.aperform(scaling_calls.release_scaling_turn(app.keys, "two"))
    assert (await app.aperform(scaling_calls.claim_scaling_turn(app.keys, "one"))).mine


@pytest.mark.parametrize("error", [RuntimeError("no idea"), SystemExit(3)], ids=["error", "exit"])
async def test_a_strategy_that_fails_is_told_of_once_and_changes_nothing(
    app_name: str, url: str, error: BaseException
) -> None:
    def broken(_load: Load) -> Scale:
        raise error

    app, go = scaled(app_name, url, autoscale={**SCALE, "strategy": broken}, prioritise="sys:exit")
    go.set()
    with Lines() as lines:
        async with working(app, name="w"), trio.open_nursery() as nursery:
            one = await start(nursery, app, page=scheduler.SCHEDULER)
            await until(lambda: bool(lines.of("autoscale:failed")))
            await trio.sleep(0.4)
            await one.stop()
    found = {line["of"]: line["why"] for line in lines.of("autoscale:failed")}
    assert len(lines.of("autoscale:failed")) == len(found) == 2
    assert found["autoscale"] == f"its strategy failed: {error!r}"
    assert found["prioritise"].startswith("its strategy failed: SystemExit(")
    assert not lines.of("autoscale:decided")


async def test_a_strategy_of_ones_own_decides(app_name: str, url: str) -> None:
    app, go = scaled(app_name, url, autoscale={**SCALE, "strategy": lambda _load: Scale(5, 3.0)})
    async with working(app, name="w"), trio.open_nursery() as nursery:
        one = await start(nursery, app, page=scheduler.SCHEDULER)
        jobs = await app.asend_many([app.tasks["wait"].s() for _ in range(9)])
        await until_async(lambda: wanted(app, 5))
        await until_async(lambda: reads_ahead(app, 3.0))
        go.set()
        for job in jobs:
            await job.aget(30)
        await one.stop()


async def test_a_worker_gets_more_slots_before_there_are_more_workers_and_loses_them_again(
    app_name: str, url: str
) -> None:
    app, go = scaled(app_name, url, autoscale={**SCALE, "maximum": 1, "prefetch": 1, "concurrency": 4})
    with Lines() as lines:
        async with working(app, name="w"), trio.open_nursery() as nursery:
            one = await start(nursery, app, page=scheduler.SCHEDULER)
            jobs = await app.asend_many([app.tasks["wait"].s() for _ in range(12)])
            await until_async(lambda: runs(app, 12))
            (reply,) = await app.control.asend("budget", {"kind": "trio"}, to="w")
            assert (reply.answer["minimum"], reply.answer["maximum"]) == (16, 16)
            go.set()
            for job in jobs:
                await job.aget(30)
            await until_async(lambda: has_slots(app, 4, 4))
            await one.stop()
    steps = [(line["of"], line["before"], line["after"]) for line in lines.of("autoscale:decided")]
    assert steps == [
        *(("concurrency", 1.0, 2.0), ("concurrency", 2.0, 4.0)),
        *(("concurrency", 4.0, 2.0), ("concurrency", 2.0, 1.0)),
    ]
    assert [line["factor"] for line in lines.of("concurrency:set")] == [2.0, 4.0, 2.0, 1.0]


async def runs(app: App, count: int) -> bool:
    """Whether the worker w runs so many jobs at once."""
    (reply,) = await app.control.asend("budget", {"kind": "trio"}, to="w")
    return bool(reply.ok and reply.answer["executing"] == count)


async def has_usual_factor(app: App) -> bool:
    """Whether the worker w has as many slots as usual."""
    (reply,) = await app.control.asend("concurrency", to="w")
    return bool(reply.ok and reply.answer == {"factor": 1.0})


async def has_slots(app: App, current: int, maximum: int) -> bool:
    """Whether the worker w has so many slots, and may have so many at most."""
    (reply,) = await app.control.asend("budget", {"kind": "trio"}, to="w")
    return bool(reply.ok and (reply.answer["current"], reply.answer["maximum"]) == (current, maximum))


@pytest.mark.parametrize(
    "budget",
    [{}, {"budgets": {"trio": Budget(minimum=600, maximum=600)}}],
    ids=["more", "no more than there may be"],
)
async def test_more_slots_last_as_long_as_they_were_given_for_and_are_for_io_only(
    app_name: str, url: str, budget: dict[str, Any]
) -> None:
    app, _go = scaled(app_name, url, autoscale="", **budget)
    before, most = (600, 600) if budget else (4, 12)
    async with working(app, name="w"):
        (reply,) = await app.control.asend("concurrency", {"factor": 3, "seconds": 2}, to="w")
        assert reply.answer == {"factor": 3.0}
        (reply,) = await app.control.asend("budget", to="w")
        assert reply.answer["trio"]["maximum"] == most
        assert reply.answer["thread"]["maximum"] == max(4, count_cores())
        await until_async(lambda: has_usual_factor(app))
        assert await has_slots(app, before, before)


async def test_a_budget_that_is_set_while_there_are_more_slots_is_what_remains(
    app_name: str, url: str
) -> None:
    app, _go = scaled(app_name, url, autoscale="")
    async with working(app, name="w"):
        await app.control.asend("concurrency", {"factor": 2}, to="w")
        (reply,) = await app.control.asend("budget", {"kind": "trio", "minimum": 3, "maximum": 5}, to="w")
        assert (reply.answer["minimum"], reply.answer["maximum"]) == (3, 10)
        await app.control.asend("concurrency", {"factor": 1}, to="w")
        (reply,) = await app.control.asend("budget", {"kind": "trio"}, to="w")
        assert (reply.answer["minimum"], reply.answer["maximum"]) == (3, 5)


async def test_workers_do_as_usual_again_when_nobody_tells_them_any_more(app_name: str, url: str) -> None:
    app, _go = scaled(app_name, url, autoscale="")
    async with working(app, name="w"):
        (reply,) = await app.control.asend("prefetch", {"factor": 3, "seconds": 0.3}, to="w")
        assert reply.answer == {"factor": 3.0}
        await until_async(lambda: reads_ahead(app, 1.0))


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"factor": 0}, "factor is 0: give a number from 1 to 16"),
        ({"factor": "2"}, "factor is '2': give a number"),
        ({"factor": 2, "seconds": -1}, "seconds is -1: give a number from 0.01 to 3600"),
        ({"faktor": 2}, "prefetch does not take 'faktor': it takes factor and seconds"),
    ],
)
async def test_a_prefetch_that_makes_no_sense_is_refused(
    app_name: str, url: str, said: dict[str, Any], why: str
) -> None:
    app, _go = scaled(app_name, url, autoscale="")
    async with working(app, name="w"):
        (reply,) = await app.control.asend("prefetch", said, to="w")
        assert reply.reason == "refused"
        assert why in reply.why


async def test_the_census_counts_what_nobody_has_and_samples_it(app: App) -> None:
    @app.task(name="a")
    async def a(text: str) -> None:
        pass

    @app.task(name="b")
    async def b(text: str) -> None:
        pass

    await app.asend_many([*[a.s('"task":"c"') for _ in range(50)], *[b.s("x" * 3000) for _ in range(50)]])
    found = await app.aperform(scaling_calls.measure_load(app.keys, app.queue("default")))
    assert (found.queue, found.waiting, found.in_flight, found.workers) == ("default", 100, 0, ())
    # Sixteen of the oldest and sixteen of the newest, as long as they are not too large.
    assert found.sample == {"a": scaling_calls.SAMPLE, "b": scaling_calls.SAMPLE}
    nothing = await app.aperform(scaling_calls.measure_load(app.keys, app.queue("empty")))
    assert (nothing.waiting, nothing.sample) == (0, {})


def test_an_inbox_is_that_of_the_process() -> None:
    assert get_inbox_name("host1:aaaaaa") == "host1"


async def test_leading_scheduler_reports_how_many_workers_it_wants(app_name: str, url: str) -> None:
    app, go = scaled(app_name, url)
    vitals = [ProcessStatus(app=app_name), ProcessStatus(app=app_name)]
    async with working(app, name="w"), trio.open_nursery() as nursery:
        one = await start(nursery, app, page=scheduler.SCHEDULER, process_status=vitals[0])
        await until_async(lambda: seen(app, workers=1))
        two = await start(nursery, app, page=scheduler.SCHEDULER, process_status=vitals[1])
        jobs = await app.asend_many([app.tasks["wait"].s() for _ in range(30)])
        await until_async(lambda: wanted(app, 8))
        await until(lambda: numbers(vitals[0]).get("celery5_scaling_workers_desired") == 8)
        assert numbers(vitals[0])["celery5_scaling_workers_needed"] == 8
        assert numbers(vitals[0])["celery5_scaling_prefetch_factor"] == 4
        assert not any(name.startswith("celery5_scaling") for name in numbers(vitals[1]))
        go.set()
        for job in jobs:
            await job.aget(30)
        await one.stop()
        await two.stop()


def numbers(process_status: ProcessStatus) -> dict[str, float]:
    """The numbers of a process without labels."""
    return {
        family.name: family.samples[0].value
        for family in process_status.metric_families()
        if len(family.samples) == 1
    }


async def test_a_schedule_that_fires_soon_counts_and_one_that_fires_late_does_not(
    app_name: str, url: str
) -> None:
    app, _go = scaled(app_name, url, autoscale="")
    call = app.tasks["wait"].s()
    for name, how in (("soon", every(4)), ("soon too", every(seconds=5)), ("late", every(hours=999))):
        await app.schedule.aadd(call, how, name=name)
    await app.schedule.aadd(call, every(3), name="paused")
    await app.schedule.apause("paused")
    found = await app.aperform(scaling_calls.measure_load(app.keys, app.queue("default")))
    assert found.upcoming == {"wait": 2}
    assert (found.waiting, found.in_flight) == (0, 0)


async def test_jobs_of_a_suspended_task_need_nobody(app_name: str, url: str) -> None:
    app, go = scaled(app_name, url)
    await app.limits.asuspend(app.tasks["wait"])
    async with working(app, name="w"), trio.open_nursery() as nursery:
        one = await start(nursery, app, page=scheduler.SCHEDULER)
        await until_async(lambda: seen(app, workers=1))
        jobs = await app.asend_many([app.tasks["wait"].s() for _ in range(30)])
        await trio.sleep(0.5)
        assert await seen(app, needed=0, jobs=0)
        await app.limits.aresume(app.tasks["wait"])
        await until_async(lambda: wanted(app, 8))
        go.set()
        for job in jobs:
            await job.aget(30)
        await one.stop()
