"""Each rule of alerts fires and resolves with real jobs, and what is silenced notifies nobody."""

import json

import pytest
import redis
import trio

from celery5 import App
from celery5.audit import AuditEntry
from celery5.broker.calls.workflows import list_undoing_runs
from celery5.errors import Misconfigured
from celery5.observability import (
    dead_letters,
    failures,
    no_workers,
    not_undone,
    oldest,
    stream_lag,
)
from celery5.streams import StreamEvents
from tests.redis.commands.staff import Staff, wait_until
from tests.redis.observability.alerted import QUICK, declare, get_changes, get_statuses
from tests.redis.worker.workers import until_async, working


async def wait_for(app: App, *changes: tuple[str, str]) -> None:
    """Wait until these changes have come, and no others before."""

    async def have_come() -> bool:
        return await get_changes(app) == list(changes)

    await until_async(have_come)


async def test_jobs_that_no_worker_reads_fire_and_resolve_when_one_reads_them(app: App) -> None:
    app.configure(**QUICK)
    declare(app, no_workers())

    @app.task(name="work", queue="lonely")
    async def work() -> None: ...

    @app.task(name="other")
    async def other() -> None: ...

    await work.adelay()
    async with working(app, queues=["default"]):
        await wait_for(app, ("fired", "queue lonely"))
        assert await get_statuses(app) == {("tested", "queue lonely"): "firing"}
        async with working(app, queues=["lonely"], name="late"):
            await wait_for(app, ("fired", "queue lonely"), ("resolved", "queue lonely"))
    assert await get_statuses(app) == {}


async def test_the_age_of_the_oldest_job_fires_and_resolves_when_it_runs(app: App) -> None:
    app.configure(**QUICK)
    declare(app, oldest("lonely", above=0.5))

    @app.task(name="work", queue="lonely")
    async def work() -> None: ...

    await work.adelay()
    async with working(app, queues=["default"]):
        await wait_for(app, ("fired", "queue lonely"))
        (fired,) = await app.alerts.ahistory()
        assert fired.value > 0.5
        assert fired.description.startswith("the oldest job of queue lonely has waited ")
        async with working(app, queues=["lonely"], name="late"):
            await wait_for(app, ("fired", "queue lonely"), ("resolved", "queue lonely"))


async def test_an_old_job_on_a_paused_queue_fires_and_says_that_it_is_paused(app: App) -> None:
    app.configure(**QUICK)
    declare(app, oldest(above=0.5))

    @app.task(name="work")
    async def work() -> None: ...

    async with working(app, queues=["default"]):
        await app.control.asend("pause-queue", {"queue": "default"})
        await work.adelay()
        await wait_for(app, ("fired", "queue default"))
        (fired,) = await app.alerts.ahistory()
        assert fired.description.endswith("; paused")


async def test_a_task_that_fails_too_often_fires_and_resolves_when_it_succeeds(app: App) -> None:
    app.configure(**QUICK)
    declare(app, failures(above=0.5, below=0.4, within=2, least=10))
    fails = True

    @app.task(name="fickle", max_retries=0)
    async def fickle() -> None:
        if fails:
            raise ValueError("no")

    async with working(app):
        await fickle.adelay()
        await until_async(lambda: has_counted(app, "fickle"))
        await app.asend_many([fickle.s() for _ in range(30)])
        await wait_for(app, ("fired", "task fickle"))
        fails = False
        await app.asend_many([fickle.s() for _ in range(300)])
        await wait_for(app, ("fired", "task fickle"), ("resolved", "task fickle"))


async def has_counted(app: App, task: str) -> bool:
    """Whether the totals have the task, and a sample of them was taken."""
    points = await app.metrics.ahistory("default")
    return any(counted.task == task for point in points for counted in point.tasks)


async def test_dead_letters_that_grow_fire_and_resolve_when_they_grow_no_more(app: App) -> None:
    app.configure(**QUICK)
    declare(app, dead_letters(above=5, within=2), for_=0)

    @app.task(name="hopeless", max_retries=0)
    async def hopeless() -> None:
        raise ValueError("no")

    async with working(app):
        await hopeless.adelay()
        await until_async(lambda: has_counted(app, "hopeless"))
        await app.asend_many([hopeless.s() for _ in range(10)])
        await wait_for(app, ("fired", "queue default"))
        await wait_for(app, ("fired", "queue default"), ("resolved", "queue default"))


async def test_a_group_of_a_stream_that_is_behind_fires_and_resolves(app: App) -> None:
    app.configure(**QUICK)
    declare(app, stream_lag(above=0.5))
    orders = app.stream("orders", int, partitions=1)
    may_go_on = trio.Event()

    @app.processor(orders, name="billing", start="earliest")
    async def bill(events: StreamEvents[int]) -> None:
        async for _ in events.records():
            await may_go_on.wait()

    await orders.asend(1)
    async with working(app):
        await wait_for(app, ("fired", "group orders:billing"))
        may_go_on.set()
        await wait_for(app, ("fired", "group orders:billing"), ("resolved", "group orders:billing"))


async def test_alert_of_a_failed_undo_ends_when_its_job_is_replayed(app: App) -> None:
    app.configure(**{**QUICK, "alert_undo": 60})
    is_down = True

    @app.task(name="refund", max_retries=0)
    async def refund(number: int) -> None:
        if is_down:
            raise ConnectionError("the bank is closed")

    @app.task(name="charge", undo=refund)
    async def charge(number: int) -> int:
        return number

    @app.task(name="ship", max_retries=0)
    async def ship() -> None:
        raise ValueError

    async with working(app):
        run = await (charge.s(4) >> ship.s()).astart()
        await wait_for(app, ("fired", "queue default"))
        (fired,) = await app.alerts.ahistory()
        assert (fired.name, fired.severity, fired.value) == ("not-undone", "critical", 1)
        assert fired.description.startswith(
            f"1 run is not undone on queue default: run {run.id} (charge) is FAILED, "
            "undone 0 of 1; refund of node 0 died: ConnectionError: the bank is closed, since "
        )
        is_down = False
        await app.dlq.areplay()

        async def is_undone() -> bool:
            return (await run.astatus()).undone == 1

        await until_async(is_undone)
        assert not await (await app.connections.get_async_driver()).perform(
            list_undoing_runs(app.queue("default"), count=9)
        )


async def test_a_run_that_is_undone_for_long_fires_until_its_dead_undo_is_purged(app: App) -> None:
    app.configure(**QUICK)
    declare(app, not_undone(within=0.5))

    @app.task(name="refund", queue="lonely", max_retries=0)
    async def refund(number: int) -> None:
        raise ValueError(number)

    @app.task(name="charge", undo=refund)
    async def charge(number: int) -> int:
        return number

    @app.task(name="ship", max_retries=0)
    async def ship() -> None:
        raise ValueError

    async with working(app, queues=["default"]):
        run = await (charge.s(4) >> ship.s()).astart()
        await wait_for(app, ("fired", "queue default"))
        (fired,) = await app.alerts.ahistory()
        assert "is UNDOING, undoing 1 of 1" in fired.description
        async with working(app, queues=["lonely"], name="late"):

            async def has_ended() -> bool:
                return (await run.astatus()).ended is not None

            await until_async(has_ended)
            assert await get_changes(app) == [("fired", "queue default")]
            await app.dlq.apurge(queue="lonely")
            await wait_for(app, ("fired", "queue default"), ("resolved", "queue default"))


def test_an_event_loop_that_is_blocked_fires_and_resolves(staff: Staff) -> None:
    rules = json.dumps({"slow loop": "loop-lag above=0.5 for=0 keep_firing_for=0"})
    staff.start(**{**QUICK, "alerts": rules})
    staff.app.tasks["block"].delay(2)
    wait_until(lambda: [transition.change for transition in staff.app.alerts.history()] == ["fired"])
    (fired,) = staff.app.alerts.history()
    assert fired.description.startswith("the event loop of a process woke up ")
    wait_until(
        lambda: [transition.change for transition in staff.app.alerts.history()] == ["resolved", "fired"]
    )


async def test_a_silenced_rule_notifies_nobody_and_is_audited(app: App) -> None:
    app.configure(**QUICK)
    declare(app, no_workers())

    @app.task(name="work", queue="lonely")
    async def work() -> None: ...

    await app.alerts.asilence("tested", 60, "we know")
    await work.adelay()
    async with working(app, queues=["default"]):
        await wait_for(app, ("fired", "queue lonely"))
        (fired,) = await app.alerts.ahistory()
        assert fired.silenced
        assert await get_statuses(app) == {("tested", "queue lonely"): "silenced"}
        assert await app.alerts.aunsilence("tested")
        await wait_for(app, ("fired", "queue lonely"), ("fired", "queue lonely"))  # the second is sent
        assert [transition.silenced for transition in await app.alerts.ahistory()] == [False, True]
        assert not await app.alerts.aunsilence("tested")
    entries: list[AuditEntry] = await app.audit.alist(action="alert")
    assert [(entry.action, entry.target, dict(entry.filter)) for entry in entries] == [
        ("alert:unsilence", "tested", {}),
        ("alert:silence", "tested", {"seconds": 60, "why": "we know"}),
    ]


async def test_only_rules_that_there_are_can_be_silenced_and_for_30_days_at_most(app: App) -> None:
    with pytest.raises(Misconfigured, match=r"^there is no alert 'oldest-jo'; did you mean 'oldest-job'\?"):
        await app.alerts.asilence("oldest-jo", 60)
    with pytest.raises(Misconfigured, match=r"^seconds is 0: give up to 2592000, which is 30 days$"):
        await app.alerts.asilence("oldest-job", 0)


async def test_the_built_in_rules_are_inactive_while_all_is_well(app: App) -> None:
    states = await app.alerts.alist()
    assert [(state.name, state.status, state.above) for state in states] == [
        ("oldest-job", "inactive", 300.0),
        ("failure-rate", "inactive", 0.25),
        ("no-workers", "inactive", 0.0),
        ("dead-letters", "inactive", 10),
        ("worker-deaths", "inactive", 0),
        ("worker-lost", "inactive", 0),
        ("member-missing", "inactive", 0),
        ("not-undone", "inactive", 0),
        ("stream-lag", "inactive", 300.0),
        ("loop-lag", "inactive", 1.0),
        ("memory-full", "inactive", 0.9),
    ]


async def test_every_key_of_alerts_has_a_time_to_live(app: App, redis_client: "redis.Redis") -> None:
    app.configure(**QUICK)
    declare(app, no_workers())

    @app.task(name="work", queue="lonely")
    async def work() -> None: ...

    await app.alerts.asilence("no-workers", 60) if "no-workers" in {
        r.name for r in app.alerts.rules()
    } else None
    await app.alerts.asilence("*", 0.001)
    await work.adelay()
    async with working(app, queues=["default"]):
        await wait_for(app, ("fired", "queue lonely"))
    found = list(redis_client.scan_iter(f"{app.keys.alerts}*"))
    assert found
    assert all(redis_client.pttl(key) > 0 for key in found)
