"""Sinks: each is given every document that it wants, whatever becomes of the others."""

import os
import signal
from typing import Any

import pytest
import redis
import trio

from celery5 import App, Reject, TaskFailed
from celery5.broker.call import Call
from celery5.broker.calls.events import count_documents
from celery5.broker.servers.embedded import EmbeddedServer
from celery5.services.health.vital_sources import DocumentMetrics
from tests.redis.events.sinking import Awaited, Hanging, Kept, delivering
from tests.redis.worker.workers import Lines, leftovers, until, until_async, working


async def send(app: App, task: Any, *values: Any) -> None:
    """Send and wait until all have ended."""
    for job in await app.asend_many([task.s(value) for value in values]):
        await job.astatus()
        try:
            await job.aget(timeout=30)
        except Exception:
            continue


async def test_a_sink_has_what_the_tasks_return_with_all_that_is_known_of_it(app: App) -> None:
    kept, awaited = Kept(), Awaited("awaited")

    @app.task(name="double", sinks=[kept, awaited])
    async def double(a: int) -> dict[str, int]:
        return {"twice": 2 * a}

    async with working(app), delivering(app):
        sent = await double.adelay(21)
        assert await sent.aget(timeout=30) == {"twice": 42}
        await until(lambda: bool(kept.documents) and bool(awaited.documents))
    (one,) = kept.documents
    assert (one.id, one.job, one.task, one.queue) == (sent.id, sent.id, "double", "default")
    assert (one.state, one.value, one.error, one.attempt) == ("SUCCESS", {"twice": 42}, "", 1)
    assert 0 < one.sent <= one.started <= one.finished
    assert one.worker
    assert awaited.documents == [one]


async def test_nothing_is_left_when_all_have_been_delivered(app: App, redis_client: "redis.Redis") -> None:
    kept = Kept()

    @app.task(sinks=[kept])
    async def same(a: int) -> int:
        return a

    async with working(app), delivering(app):
        await send(app, same, *range(250))
        await until(lambda: len(kept.documents) == 250)
        await until(
            lambda: (
                not any(
                    "documents" in key and key[-10:] != ":documents" for key in leftovers(redis_client, app)
                )
            )
        )
    assert sorted(kept.values) == list(range(250))


async def test_how_many_documents_wait_for_a_sink_is_seen(app: App) -> None:
    hanging = Hanging()

    @app.task(sinks=[hanging])
    async def same(a: int) -> int:
        return a

    async with working(app):
        await send(app, same, *range(7))
    assert (await app.ainfo()).queues["default"].documents == {hanging.name: 7}
    async with delivering(app) as sinks:
        await until(lambda: sinks.get_waiting_counts() == {hanging.name: 7})
        (waiting,) = [
            family
            for family in DocumentMetrics(
                delivered=sinks.get_counts, waiting=sinks.get_waiting_counts, published=dict
            ).metric_families()
            if family.name == "celery5_sink_documents_waiting"
        ]
        assert waiting.kind == "gauge"
        hanging.go.set()
        await until_async(lambda: _none_wait(app, hanging.name))


async def _none_wait(app: App, sink: str) -> bool:
    return (await app.ainfo()).queues["default"].documents == {sink: 0}


async def test_a_task_without_sinks_costs_nothing(app: App, redis_client: "redis.Redis") -> None:
    @app.task
    async def same(a: int) -> int:
        return a

    async with working(app):
        await send(app, same, 1)
    assert [key for key in leftovers(redis_client, app) if "documents" in key] == []


async def test_a_sink_that_raises_and_one_that_hangs_hold_up_no_other(app: App) -> None:
    fine, bad, hangs = Kept("fine"), Kept("bad", lambda _: True), Hanging(timeout=0.3)

    @app.task(sinks=[bad, hangs, fine])
    async def same(a: int) -> int:
        return a

    with Lines() as lines:
        async with working(app), delivering(app):
            with trio.fail_after(30):
                await send(app, same, *range(20))
                await until(lambda: sorted(fine.values) == list(range(20)), within=30)
                await until(lambda: len(bad.batches) > 5)
                await until(lambda: _blamed(lines) == {"bad", "hanging"})
            assert len(hangs.batches) == 1  # one thread, and no more, hangs
            hangs.go.set()
    assert bad.documents == []


def _blamed(lines: Lines) -> set[str]:
    return {line["sink"] for line in lines.of("sink:failed") if "document" in line}


async def test_only_documents_that_a_sink_refuses_become_dead_letters(app: App) -> None:
    picky = Kept("picky", lambda document: document.value in (13, 66))

    @app.task(sinks=[picky])
    async def same(a: int) -> int:
        return a

    async with working(app):
        await send(app, same, *range(100))
        async with delivering(app) as sinks:
            await until(lambda: sinks.get_counts()["picky"] == (98, 2), within=30)
    assert sorted(picky.values) == [number for number in range(100) if number not in (13, 66)]
    dead = [job async for job in app.dlq.aread()]
    assert [(job.sink, job.reason, job.type, job.task) for job in dead] == [
        ("picky", "undelivered", "ValueError", same.name)
    ] * 2
    assert "will not have" in dead[0].message


async def test_dead_document_is_delivered_when_it_is_replayed(app: App) -> None:
    well: list[bool] = []
    sick = Kept("sick", lambda _: not well)
    ran: list[int] = []

    @app.task(sinks=[sick])
    async def same(a: int) -> int:
        ran.append(a)
        return a

    async with working(app), delivering(app) as sinks:
        await send(app, same, 7)
        await until(lambda: sinks.get_counts()["sick"][1] == 1)
        well.append(True)
        assert await app.dlq.acount("reason", sink="sick") == {"undelivered": 1}
        assert await app.dlq.acount(sink="another") == {}
        tally = await app.dlq.areplay(sink="sick")
        assert (tally.matched, tally.done, tally.left) == (1, 1, {})
        await until(lambda: sick.values == [7])
        assert await app.dlq.acount() == {}
        await until_async(lambda: _empty(app, "sick"))
    assert ran == [7]  # the document is replayed, and not the job


async def _empty(app: App, sink: str) -> bool:
    return await app.aperform(count_documents(app.queue("default"), sink)) == 0


async def test_a_sink_hears_of_the_ends_that_it_wants(app: App) -> None:
    every = Kept("every", on=("SUCCESS", "DEAD", "REJECTED", "EXPIRED"))
    deaths, usual = Kept("deaths", on="DEAD"), Kept("usual")

    @app.task(max_retries=0, sinks=[every, deaths, usual])
    async def ends(how: str) -> str:
        if how == "dies":
            raise RuntimeError("as I was told")
        if how == "declines":
            raise Reject("not wanted")
        return how

    async with working(app), delivering(app):
        await send(app, ends, "well", "dies", "declines")
        late = await ends.options(expires=0.0).adelay("late")
        await until(lambda: len(every.documents) == 4)
        await until(lambda: len(deaths.documents) == len(usual.documents) == 1)
    assert sorted(document.state for document in every.documents) == [
        "DEAD",
        "EXPIRED",
        "REJECTED",
        "SUCCESS",
    ]
    (dead,) = deaths.documents
    assert (dead.state, dead.error, dead.reason, dead.value) == (
        "DEAD",
        "RuntimeError: as I was told",
        "not-retried",
        None,
    )
    assert dead.failure is not None
    assert "RuntimeError" in dead.failure.traceback
    assert [document.state for document in usual.documents] == ["SUCCESS"]
    assert late.id in [document.id for document in every.documents]


async def test_a_sink_has_the_value_of_a_job_whose_result_is_not_kept(app: App) -> None:
    kept = Kept()

    @app.task(ignore_result=True, sinks=[kept])
    async def same(a: int) -> int:
        return a

    async with working(app), delivering(app):
        await same.adelay(42)
        await until(lambda: kept.values == [42])


async def test_a_replayed_job_ends_with_a_document_of_its_own(app: App) -> None:
    kept, well = Kept("kept", on=("SUCCESS", "DEAD")), list[bool]()

    @app.task(max_retries=0, sinks=[kept])
    async def fragile() -> str:
        if not well:
            raise RuntimeError
        return "well"

    async with working(app), delivering(app):
        sent = await fragile.adelay()
        await until(lambda: len(kept.documents) == 1)
        well.append(True)
        await app.dlq.areplay()
        await until(lambda: len(kept.documents) == 2)
    assert [(document.id, document.state) for document in kept.documents] == [
        (sent.id, "DEAD"),
        (f"{sent.id}.1", "SUCCESS"),
    ]


async def test_a_job_that_is_revoked_before_it_runs_has_a_document_too(app: App) -> None:
    kept = Kept("kept", on="REVOKED")

    @app.task(sinks=[kept])
    async def later() -> None: ...

    async with working(app), delivering(app):
        sent = await later.options(countdown=60).adelay()
        await sent.arevoke()
        await until(lambda: [document.id for document in kept.documents] == [sent.id])
    assert kept.documents[0].state == "REVOKED"


async def test_two_routers_give_a_sink_each_document_once(app: App) -> None:
    kept = Kept()

    @app.task(sinks=[kept])
    async def same(a: int) -> int:
        return a

    async with working(app), delivering(app), delivering(app):
        await send(app, same, *range(500))
        await until(lambda: len(kept.documents) >= 500)
        await trio.sleep(0.1)
    assert sorted(kept.values) == list(range(500))


async def test_a_stop_lets_the_write_that_is_under_way_finish(app: App) -> None:
    slow, began = Kept("slow"), trio.Event()

    class Slow(Awaited):
        async def write(self, documents: Any) -> None:
            began.set()
            await trio.sleep(0.3)
            await super().write(documents)

    slow = Slow("slow")

    @app.task(sinks=[slow])
    async def same(a: int) -> int:
        return a

    async with working(app):
        await send(app, same, 1)
        async with delivering(app):
            await began.wait()
        assert slow.values == [1]
        assert await _empty(app, "slow")


async def test_what_takes_long_is_given_to_nobody_else_meanwhile(app: App, monkeypatch: Any) -> None:
    monkeypatch.setattr("celery5.services.events.sink_delivery.LEASE", 1.0)
    began: list[int] = []

    class Slow(Awaited):
        async def write(self, documents: Any) -> None:
            began.append(len(documents))
            await trio.sleep(2.0)
            await super().write(documents)

    slow = Slow("slow")

    @app.task(sinks=[slow])
    async def same(a: int) -> int:
        return a

    async with working(app), delivering(app), delivering(app):
        await send(app, same, 1)
        await until(lambda: slow.values == [1])
    assert began == [1]


async def test_a_task_that_fails_has_failed_whatever_its_sinks(app: App) -> None:
    @app.task(max_retries=0, sinks=[Kept()])
    async def fails() -> None:
        raise RuntimeError("no")

    async with working(app):
        sent = await fails.adelay()
        with pytest.raises(TaskFailed, match="no"):
            await sent.aget(timeout=30)


@pytest.mark.parametrize("how", ["frozen", "restarted"])
async def test_an_outage_of_redis_delays_documents_and_loses_none(
    own_server: EmbeddedServer, app_name: str, how: str
) -> None:
    kept, app = Kept(), App(app_name, broker=own_server.url, lease=5.0)

    @app.task(sinks=[kept])
    async def same(a: int) -> int:
        return a

    async with delivering(app):
        async with working(app):
            await send(app, same, *range(50))
        if how == "frozen":
            os.kill(own_server.pid, signal.SIGSTOP)
            await trio.sleep(1.0)
            os.kill(own_server.pid, signal.SIGCONT)
        else:
            await app.aperform(Call(("SAVE",), str))
            await trio.to_thread.run_sync(own_server.kill)
            await trio.sleep(0.3)
            await trio.to_thread.run_sync(own_server.revive)
        await until(lambda: sorted(set(kept.values)) == list(range(50)), within=30)
        await until_async(lambda: _empty(app, "kept"), within=30)
    app.close()


async def test_a_sink_that_can_be_closed_is_closed_when_the_router_stops(app: App) -> None:
    closed: list[str] = []

    class Closing(Kept):
        def close(self) -> None:
            closed.append(self.name)

    @app.task(sinks=[Closing("plain")])
    async def same(a: int) -> int:
        return a

    async with delivering(app):
        assert closed == []
    assert closed == ["plain"]


async def test_a_write_that_nobody_awaits_has_not_written(app: App) -> None:
    awaited = Awaited()
    sink = Kept("wrapped", write=lambda documents: awaited.write(documents))

    @app.task(sinks=[sink])
    async def same(a: int) -> int:
        return a

    async with working(app), delivering(app) as sinks:
        await send(app, same, 1)
        await until(lambda: sinks.get_counts()["wrapped"] == (0, 1))
    (dead,) = [job async for job in app.dlq.aread(sink="wrapped")]
    assert dead.type == "TypeError"
    assert "expected a sync function" in dead.message
