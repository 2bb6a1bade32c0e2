"""Bulk actions: counted first, performed at a rate, stopped, interrupted and resumed, and recorded once."""

import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import pytest
import redis
import trio

from celery5 import App, JobState, Misconfigured
from celery5.broker.calls import bulk as calls
from celery5.bulk import BulkRequest, BulkStatus
from celery5.errors import BulkActionRefused, UnknownQueue
from celery5.logs.log import Log
from celery5.protocol.bulk import MAX_COUNTED
from celery5.services.bulk import bulk_performer
from celery5.services.bulk.bulk_performer import BulkPerformer
from tests.redis.dead_letters.many_dead_letters import QUEUE, add_dead_letters, numbered, sent
from tests.redis.worker.workers import until_async, working

REPLAY = BulkRequest(verb="dlq:replay")
KILLED = """
import trio
from celery5 import App
from celery5.bulk import BulkRequest
from celery5.logs.log import NullLog
from celery5.services.bulk.bulk_performer import BulkPerformer

app = App({name!r}, broker={broker!r})

async def main():
    performer = BulkPerformer(app=app, worker="killed", log=NullLog(), bulk_lease=3.0)
    async with trio.open_nursery() as nursery:
        await nursery.start(performer.run)
        print(await performer.submit(BulkRequest(verb="dlq:replay", rate={rate!r})), flush=True)

trio.run(main)
"""


@asynccontextmanager
async def performing(
    app: App, name: str = "one", *, lease: float = 10.0
) -> AsyncGenerator[BulkPerformer, None]:
    """A service that performs bulk actions while the block lasts."""
    performer = BulkPerformer(app=app, worker=name, log=Log(worker=name, app=app.name), bulk_lease=lease)
    async with trio.open_nursery() as nursery:
        await nursery.start(performer.run)
        yield performer
        nursery.cancel_scope.cancel()


async def dead(app: App, client: "redis.Redis", *ids: str, **more: Any) -> None:
    """Dead jobs."""
    await trio.to_thread.run_sync(lambda: add_dead_letters(app, client, *ids, **more))


async def status_of(app: App, action_id: str) -> BulkStatus:
    """Return what is known of an action."""
    status = await app.bulk.aget(action_id)
    assert status is not None
    return status


async def until_ended(app: App, action_id: str) -> BulkStatus:
    """Wait until an action has ended."""

    async def has_ended() -> bool:
        return (await status_of(app, action_id)).has_ended

    await until_async(has_ended)
    return await status_of(app, action_id)


async def until_some_are_done(app: App, action_id: str, count: int = 1) -> None:
    """Wait until an action has done so many."""

    async def has_done() -> bool:
        return (await status_of(app, action_id)).progress.done >= count

    await until_async(has_done)


async def test_what_is_counted_first_is_what_is_done_and_one_entry_says_so(
    app: App, redis_client: "redis.Redis"
) -> None:
    await dead(app, redis_client, *numbered(250))
    await dead(app, redis_client, "other", error="OSError")
    action = BulkRequest(verb="dlq:replay", filter={"error": "ValueError", "queue": QUEUE})
    assert await app.bulk.acount(action) == (250, True)
    async with performing(app) as performer:
        with app.audit.acting_as("anna", source="dashboard"):
            action_id = await performer.submit(action)
        status = await until_ended(app, action_id)
        assert (status.state, status.who, status.source) == ("done", "anna", "dashboard")
        progress = status.progress
        assert (progress.total, progress.done, progress.failed, progress.skipped) == (250, 250, 0, 0)

        async def is_recorded() -> bool:
            return bool(await app.audit.alist())

        await until_async(is_recorded)
    (entry,) = await app.audit.alist()
    assert (entry.who, entry.source, entry.action, entry.target) == ("anna", "dashboard", "dlq:replay", QUEUE)
    assert (entry.count, entry.outcome) == (250, "done")
    assert entry.filter == {"error": "ValueError", "bulk": action_id}
    assert len(sent(redis_client, app)) == 250
    assert [job.id async for job in app.dlq.aread()] == ["other"]
    assert [bulk_action.id for bulk_action in await app.bulk.alist()] == [action_id]


async def test_a_dry_run_counts_and_changes_nothing(app: App, redis_client: "redis.Redis") -> None:
    await dead(app, redis_client, *numbered(5))
    async with performing(app) as performer:
        status = await until_ended(app, await performer.submit(BulkRequest(verb="dlq:purge", dry_run=True)))
    assert (status.progress.total, status.progress.done) == (5, 0)
    assert await app.dlq.acount() == {"exhausted": 5}


async def test_a_rate_holds(app: App, redis_client: "redis.Redis") -> None:
    await dead(app, redis_client, *numbered(40))
    async with performing(app) as performer:
        began = trio.current_time()
        await until_ended(app, await performer.submit(BulkRequest(verb="dlq:purge", rate=40)))
        assert trio.current_time() - began > 0.8  # the first portion is at once


async def test_a_stop_leaves_the_rest_and_is_in_the_trail(app: App, redis_client: "redis.Redis") -> None:
    await dead(app, redis_client, *numbered(300))
    async with performing(app, lease=3.0) as performer:
        action_id = await performer.submit(BulkRequest(verb="dlq:replay", rate="20/s"))
        await until_some_are_done(app, action_id)
        with app.audit.acting_as("bob"):
            assert await app.bulk.astop(action_id)
        status = await until_ended(app, action_id)
        assert status.state == "stopped"
        assert not await app.bulk.astop(action_id)

        async def is_recorded() -> bool:
            return bool(await app.audit.alist())

        await until_async(is_recorded)
    done = status.progress.done
    assert 0 < done < 300
    assert (len(sent(redis_client, app)), await app.dlq.acount()) == (done, {"exhausted": 300 - done})
    (entry,) = await app.audit.alist()
    assert (entry.count, entry.outcome) == (done, "interrupted: stopped by bob")


async def test_action_of_a_dead_process_is_resumed_without_doubling(
    app: App, redis_client: "redis.Redis"
) -> None:
    await dead(app, redis_client, *numbered(300))
    async with performing(app, "one") as performer:
        action_id = await performer.submit(BulkRequest(verb="dlq:replay", rate="100/s"))
        await until_some_are_done(app, action_id, 20)
        async with performing(app, "two") as other:
            with pytest.raises(BulkActionRefused, match="is performed by another process"):
                await other.resume(action_id)
    status = await status_of(app, action_id)
    assert status.state == "interrupted"
    assert 20 <= status.progress.done < 300
    before = sent(redis_client, app)
    await dead(app, redis_client, "later")  # it was not dead when the action was asked for
    async with performing(app, "two") as other:
        await other.resume(action_id)
        status = await until_ended(app, action_id)
        with pytest.raises(BulkActionRefused, match="has ended"):
            await other.resume(action_id)
        with pytest.raises(BulkActionRefused, match="no bulk action nothing: they are kept"):
            await other.resume("nothing")
    assert (status.state, status.progress.total) == ("done", 300)
    assert status.progress.done in range(300 - 10, 301)  # a portion may be missing in the count
    assert len(before) >= 20
    assert sorted(sent(redis_client, app)) == sorted(numbered(300))
    assert [job.id async for job in app.dlq.aread()] == ["later"]


async def test_an_action_that_ends_forgets_no_request_to_resume_it(
    app: App, redis_client: "redis.Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    await dead(app, redis_client, "one")
    ends, may_end, claim_action = trio.Event(), trio.Event(), calls.claim_action

    async def record_late(*_args: Any) -> None:
        ends.set()
        await may_end.wait()

    def claim_as_it_ends(*args: Any, **options: Any) -> Any:
        may_end.set()
        return claim_action(*args, **options)

    monkeypatch.setattr(bulk_performer, "record_outcome", record_late)
    async with performing(app) as performer:
        action_id = await performer.submit(BulkRequest(verb="dlq:replay"))
        with trio.fail_after(30):
            await ends.wait()
            monkeypatch.setattr(calls, "claim_action", claim_as_it_ends)
            with pytest.raises(BulkActionRefused, match="has ended"):
                await performer.resume(action_id)


async def test_a_killed_process_is_seen_by_its_lease(app: App, redis_client: "redis.Redis") -> None:
    """Nothing is given up by a process that is killed: its lease just ends."""
    claim = calls.claim_action(
        app.keys,
        "a",
        "killed",
        {"action": '{"verb":"dlq:replay"}', "who": "anna", "progress": '{"done":3}'},
        lease=1000,
    )
    assert await app.aperform(claim) == calls.CLAIMED
    assert (await status_of(app, "a")).state == "waiting"
    redis_client.delete(app.keys.bulk_lease("a"))  # as its end
    assert (await status_of(app, "a")).state == "interrupted"
    with app.audit.acting_as("bob"):
        assert await app.bulk.astop("a")  # no process has it: it ends now
    assert (await status_of(app, "a")).state == "stopped"
    (entry,) = await app.audit.alist()
    assert (entry.who, entry.count, entry.outcome) == ("anna", 3, "interrupted: stopped by bob")
    save = calls.save_action(app.keys, "a", "killed", {"state": "running"}, lease=10)
    assert await app.aperform(save) == calls.LOST


async def test_an_action_is_not_lost_while_it_is_being_claimed(
    app: App, redis_client: "redis.Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first connection takes longer than the time between two renewals of leases."""
    await dead(app, redis_client, *numbered(3))
    connect, calls_made = app.connections.get_async_driver, 0

    async def connect_slowly() -> Any:
        nonlocal calls_made
        calls_made += 1
        if calls_made == 1:  # that of the claim
            await trio.sleep(0.3)
        return await connect()

    async with performing(app, lease=0.06) as performer:
        with monkeypatch.context() as patch:
            patch.setattr(app.connections, "get_async_driver", connect_slowly)
            action_id = await performer.submit(REPLAY)
        status = await until_ended(app, action_id)
    assert (status.state, status.progress.done) == ("done", 3)


async def test_what_a_killed_process_left_is_resumed_by_another_without_doubling(
    app: App, redis_client: "redis.Redis"
) -> None:
    await dead(app, redis_client, *numbered(150))
    program = KILLED.format(name=app.name, broker=app.settings.broker, rate="50/s")
    process = await trio.lowlevel.open_process([sys.executable, "-c", program], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        with trio.fail_after(30):
            action_id = (await process.stdout.receive_some()).decode().strip()
        await until_some_are_done(app, action_id, 20)
    finally:
        process.kill()
        await process.wait()

    async def is_interrupted() -> bool:
        return (await status_of(app, action_id)).state == "interrupted"

    await until_async(is_interrupted)
    assert 20 <= len(sent(redis_client, app)) < 150
    async with performing(app, "two") as other:
        await other.resume(action_id)
        status = await until_ended(app, action_id)
    assert (status.state, status.progress.total) == ("done", 150)
    assert sorted(sent(redis_client, app)) == sorted(numbered(150))


async def test_waiting_jobs_of_a_task_are_revoked(app: App) -> None:
    @app.task(name="shop.a")
    async def one() -> None: ...

    @app.task(name="shop.b")
    async def two() -> None: ...

    of_one = await app.asend_many([one.s() for _ in range(30)])
    of_two = await app.asend_many([two.s() for _ in range(3)])
    later = await two.options(countdown=1000).adelay()
    action = BulkRequest(verb="task:revoke", filter={"queue": "default", "task": "shop.a"})
    assert await app.bulk.acount(action) == (30, True)
    async with performing(app) as performer:
        status = await until_ended(app, await performer.submit(action))
        assert (status.progress.done, status.progress.skipped) == (30, 0)
        assert {await job.astatus() for job in of_one} == {JobState.REVOKED}
        assert {await job.astatus() for job in of_two} == {JobState.SENT}
        every = BulkRequest(verb="task:revoke", filter={"queue": "default"})
        assert (await until_ended(app, await performer.submit(every))).progress.done == 4
        assert await later.astatus() == JobState.REVOKED
        wrong = BulkRequest(verb="task:revoke", filter={"queue": "defualt"})
        status = await until_ended(app, await performer.submit(wrong))
        assert (status.state, "no queue 'defualt'" in status.progress.error) == ("failed", True)
    with pytest.raises(UnknownQueue):
        await app.bulk.acount(wrong)


async def test_failed_runs_are_retried(app: App) -> None:
    is_open: list[bool] = []

    @app.task(name="pay", max_retries=0)
    async def pay(order: int) -> int:
        if not is_open and order:
            raise ValueError("closed")
        return order

    async with working(app), performing(app) as performer:
        runs = [await (pay.s(order) | pay.s()).astart() for order in (1, 2, 0)]

        async def have_ended() -> bool:
            return {(await run.astatus()).state for run in runs} == {"FAILED", "SUCCESS"} and all(
                [(await run.astatus()).state == "FAILED" for run in runs[:2]]
            )

        await until_async(have_ended)
        is_open.append(True)
        action = BulkRequest(verb="workflow:retry", filter={"workflow": "pay"})
        assert await app.bulk.acount(action) == (2, True)
        status = await until_ended(app, await performer.submit(action))
        assert (status.state, status.progress.done) == ("done", 2)
        assert [await run.aget(timeout=30) for run in runs] == [1, 2, 0]


async def test_what_makes_no_sense_is_refused(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    for verb, words, says in (
        ("dlq:repaly", {}, "no bulk action 'dlq:repaly'; did you mean 'dlq:replay'"),
        ("dlq:replay", {"limit": 3}, "dlq:replay does not select by 'limit', but by queue, task"),
        ("dlq:purge", {"reason": "odd"}, "reason 'odd' is not known"),
        ("task:revoke", {"task": "a"}, "task:revoke: give a queue"),
        ("workflow:retry", {"queue": 7}, "queue is 7: give a text, or several"),
    ):
        with pytest.raises(Misconfigured, match=says):
            await app.bulk.acount(BulkRequest(verb=verb, filter=words))  # type: ignore[arg-type]
    async with performing(app) as performer:
        with pytest.raises(Misconfigured, match="rate is 0"):
            await performer.submit(BulkRequest(verb="dlq:replay", rate=0))
        aged = BulkRequest(verb="dlq:replay", filter={"newer_than": timedelta(hours=1)})
        status = await until_ended(app, await performer.submit(aged))
        assert status.action.filter == {"newer_than": 3600.0}
        monkeypatch.setattr(bulk_performer, "MAX_WAITING", 0)
        with pytest.raises(BulkActionRefused, match="0 bulk actions run or wait: try again later"):
            await performer.submit(REPLAY)
    assert MAX_COUNTED == 100_000
