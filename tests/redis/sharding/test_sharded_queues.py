"""Sharded queues on a real server: who sends to them and who reads them sees one queue."""

from collections import Counter
from typing import Any

import pytest
import trio

from celery5 import App, Misconfigured, current_job
from celery5.cli.commands.queue import format_unread_warning
from celery5.errors import TaskFailed
from celery5.observability import overview, storage
from celery5.observability.metrics import Metrics
from celery5.operations.queues import QueueListing
from celery5.operations.table import OPERATIONS
from celery5.processes.scheduler import resolve_rules
from celery5.protocol.job.states import JobState
from celery5.protocol.scheduling.declaration import Periodic
from celery5.scheduling.schedules import make_definition
from tests.redis.sharding.declaring import QUEUE, SHARDS, declare
from tests.redis.worker.workers import until_async, working


@pytest.fixture
def sharded(app: App) -> App:
    """The application, with a queue of four shards."""
    app.configure(shards={QUEUE: 4})
    return app


def make_push() -> Any:
    async def push(customer: str = "", order: int = 0) -> str:
        return f"{customer} {order}"

    return push


async def test_jobs_are_spread_over_the_shards_and_run(sharded: App) -> None:
    push = declare(sharded, make_push())
    results = await sharded.asend_many([push.s("ann", n) for n in range(60)])
    assert Counter(result.queue for result in results).keys() == set(SHARDS)
    async with working(sharded, queues=(QUEUE,)):
        assert [await result.aget() for result in results] == [f"ann {n}" for n in range(60)]


async def test_a_result_is_found_by_its_id_alone_and_by_its_queue(sharded: App) -> None:
    push = declare(sharded, make_push())
    sent = [
        *(await sharded.asend_many([push.s("ann", n) for n in range(8)])),
        await push.options(key="x").adelay("bo"),
    ]
    async with working(sharded):
        values = [await result.aget() for result in sent]
    for result, value in zip(sent, values, strict=True):
        assert await sharded.result(result.id, queue=QUEUE).aget() == value
        assert await sharded.result(result.id).aget() == value
        assert await sharded.result(result.id, task=push).aget() == value
        story = await sharded.jobs.astory(result.id, queue=QUEUE)
        assert story is not None
        assert story.queue == result.queue


async def test_waiting_jobs_are_revoked_by_id_alone(sharded: App) -> None:
    push = declare(sharded, make_push())
    sent = await sharded.asend_many([push.s("ann", n) for n in range(8)])
    assert all([await sharded.result(result.id, queue=QUEUE).arevoke() for result in sent])


async def test_a_unique_key_holds_over_all_shards(sharded: App) -> None:
    push = declare(sharded, make_push())
    sent = [await push.options(key="nightly").adelay("ann", n) for n in range(12)]
    assert [result.duplicate for result in sent] == [False] + [True] * 11
    assert len({result.id for result in sent}) == 1


async def test_a_limit_and_one_by_key_hold_over_all_shards(sharded: App) -> None:
    running, most = Counter[str](), Counter[str]()

    async def enter(name: str) -> None:
        running[name] += 1
        most[name] = max(most[name], running[name])
        await trio.sleep(0.01)
        running[name] -= 1

    @sharded.task(queue=QUEUE, name="narrow", limit=2)
    async def narrow(n: int) -> None:
        await enter("narrow")

    @sharded.task(queue=QUEUE, name="keyed", limit=1, concurrency_key="customer")
    async def keyed(customer: str) -> None:
        await enter(customer)

    customers = [f"c{n}" for n in range(10)]
    jobs = [narrow.s(n) for n in range(30)] + [keyed.s(customer) for customer in customers * 3]
    results = await sharded.asend_many(jobs)
    async with working(sharded), working(sharded):
        for result in results:
            await result.aget()
    assert most.pop("narrow") == 2
    assert most == dict.fromkeys(customers, 1)


async def test_a_paused_queue_is_paused_with_all_its_shards(sharded: App) -> None:
    push = declare(sharded, make_push())
    async with working(sharded):
        assert [reply.ok for reply in await sharded.control.asend("pause-queue", {"queue": QUEUE})] == [True]
        sent = await sharded.asend_many([push.s("ann", n) for n in range(12)])
        await trio.sleep(0.1)
        states: list[Any] = [await result.astatus() for result in sent]
        assert states == [JobState.SENT] * 12
        for name in (QUEUE, SHARDS[1]):
            assert (await sharded.ainfo(name)).queues[name].paused
        await sharded.control.asend("resume-queue", {"queue": QUEUE})
        for result in sent:
            await result.aget()


async def test_dead_jobs_of_all_shards_are_replayed_on_their_shards(sharded: App) -> None:
    fails = [True]

    @sharded.task(queue=QUEUE, name="fail", max_retries=0)
    async def fail(n: int) -> int:
        if fails[0]:
            raise ValueError(n)
        return n

    results = await sharded.asend_many([fail.s(n) for n in range(12)])
    async with working(sharded):
        for result in results:
            with pytest.raises(Exception, match="ValueError"):
                await result.aget()
        fails[0] = False
        assert (await sharded.dlq.areplay(queue=QUEUE)).done == 12
        for n, result in enumerate(results):
            assert await sharded.result(result.id, queue=QUEUE).aget() == n


async def test_dead_jobs_of_all_shards_are_read_in_the_order_in_which_they_died(sharded: App) -> None:
    @sharded.task(queue=QUEUE, name="fail", max_retries=0)
    async def fail(n: int) -> int:
        raise ValueError(n)

    async with working(sharded):
        for n in range(12):
            result = await fail.options(id=f"job-{n}").adelay(n)
            with pytest.raises(TaskFailed):
                await result.aget()
            await trio.sleep(0.002)  # of jobs that died in the same millisecond no order is known
    expected = [f"job-{n}" for n in range(12)]

    async def read(**choice: Any) -> list[str]:
        return [job.id async for job in sharded.dlq.aread(**choice)]

    dead = [job async for job in sharded.dlq.aread(queue=QUEUE)]
    assert [job.id for job in dead] == expected
    assert {job.queue for job in dead} == set(SHARDS)
    assert await read() == expected
    assert await read(queue=QUEUE, limit=5) == expected[:5]
    assert await read(queue=QUEUE, newest_first=True) == expected[::-1]
    for number, job in enumerate(dead):
        after = f"{job.queue}:{job.entry}"
        assert await read(queue=QUEUE, after=after) == expected[number + 1 :]
        assert await read(queue=QUEUE, after=after, newest_first=True) == expected[:number][::-1]
    assert (await sharded.dlq.apurge(queue=QUEUE, limit=3)).done == 3
    assert await read(queue=QUEUE) == expected[3:]
    assert (await sharded.dlq.areplay(queue=QUEUE, limit=4)).done == 4
    assert await read(queue=QUEUE) == expected[7:]
    assert (await sharded.dlq.apurge(queue=QUEUE)).done == 5
    assert await sharded.aempty(QUEUE) == 4


async def test_a_worker_reads_shards_of_an_earlier_number_and_new_ones(sharded: App) -> None:
    push = declare(sharded, make_push())
    before = await sharded.asend_many([push.s("ann", n) for n in range(24)])
    sharded.configure(shards={QUEUE: 2})
    after = await sharded.asend_many([push.s("bo", n) for n in range(24)])
    assert {result.queue for result in after} == set(SHARDS[:2])
    async with working(sharded):
        for result in before + after:
            await result.aget()


async def test_operators_see_one_queue(sharded: App) -> None:
    @sharded.task(queue=QUEUE, name="fail", max_retries=0)
    async def fail(n: int) -> int:
        raise ValueError(n)

    push = declare(sharded, make_push())
    dead = await sharded.asend_many([fail.s(n) for n in range(8)])
    async with working(sharded):
        for result in dead:
            with pytest.raises(TaskFailed):
                await result.aget()
        state = (await sharded.ainfo()).queues
        assert [worker.alive for worker in state[QUEUE].workers] == [True]
    await sharded.asend_many([push.s("ann", n) for n in range(10)])
    await sharded.asend_many([push.options(countdown=60).s("ann", n) for n in range(10)])
    for state in ((await sharded.ainfo()).queues, (await sharded.ainfo(QUEUE)).queues):
        assert {name for name in state if name.startswith(QUEUE)} == {QUEUE}
        assert (state[QUEUE].waiting, state[QUEUE].scheduled, state[QUEUE].dead) == (10, 10, 8)
    shard = (await sharded.ainfo(SHARDS[1])).queues[SHARDS[1]]
    assert 0 < shard.dead + shard.waiting + shard.scheduled < 28
    assert await sharded.dlq.acount(by="queue", queue=QUEUE) == {QUEUE: 8}
    (group,) = (await sharded.dlq.agroups(queue=QUEUE)).groups
    assert (group.queues, group.count) == ((QUEUE,), 8)
    assert len((await sharded.jobs.asearch(queue=QUEUE, task="push")).jobs) == 20
    assert await sharded.aempty(QUEUE) == 20
    assert (await sharded.dlq.apurge(queue=QUEUE)).done == 8


async def test_each_shard_is_listed_when_an_operator_asks_for_it(sharded: App) -> None:
    push = declare(sharded, make_push())
    results = await sharded.asend_many([push.s("ann", n) for n in range(40)])
    await sharded.asend_many([push.options(queue="reports").s("ann", n) for n in range(2)])
    counts = Counter(result.queue for result in results)
    sharded.configure(shards={QUEUE: 3})
    states = (await sharded.ainfo(shards=True)).queues
    assert {name: state.waiting for name, state in states.items()} == {**counts, "reports": 2}
    assert list((await sharded.ainfo(QUEUE, shards=True)).queues) == SHARDS
    is_cluster = sharded.settings.broker.startswith("redis+cluster:")
    assert all(bool(state.node) == is_cluster for state in states.values())
    warning = format_unread_warning(sharded, list(states.values()))
    assert f"{SHARDS[3]} ({counts[SHARDS[3]]} jobs, no worker)" in warning
    listed = await OPERATIONS["queue:list"].perform(sharded, QueueListing(shards=True))
    assert {state.queue: state.waiting for state in listed} == {**counts, "reports": 2}
    assert await sharded.aempty(QUEUE) == 40


async def test_the_overview_has_the_last_error_of_shards_of_an_earlier_number(sharded: App) -> None:
    sharded.configure(metrics_interval=0.1)

    @sharded.task(queue=QUEUE, name="fail", max_retries=0)
    async def fail(n: int) -> int:
        raise ValueError(n)

    async with working(sharded):
        await declare(sharded, make_push()).adelay("ann")
        failed = next(job for job in (fail.job(n) for n in range(100)) if job.queue == SHARDS[3])
        (result,) = await sharded.asend_jobs([failed])
        with pytest.raises(TaskFailed):
            await result.aget()

        async def is_measured() -> bool:
            return any(task.name == "fail" for task in (await sharded.metrics.aoverview()).tasks)

        await until_async(is_measured)
    sharded.configure(shards={QUEUE: 2})
    overviews = Metrics(sharded)  # one that has read nothing before
    (task,) = [task for task in (await overviews.aoverview()).tasks if task.name == "fail"]
    assert task.last_error is not None
    assert (task.last_error.job, task.last_error.queue) == (failed.id, SHARDS[3])
    assert task.last_error.first is not None


async def test_a_bound_on_queues_that_are_shown_counts_no_shards(
    sharded: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "MAX_QUEUES", 1)
    monkeypatch.setattr(overview, "MAX_SCHEDULE_QUEUES", 1)
    push = declare(sharded, make_push())
    await sharded.asend_many([push.s("ann", n) for n in range(40)])
    await sharded.asend_many([push.options(queue="reports").s("ann", n) for n in range(20)])
    for n in range(16):
        await sharded.schedule.aadd(push.s("ann", n), 3600.0, name=f"schedule-{n}")
    found = await sharded.metrics.astorage()
    assert [(row.queue, row.jobs) for row in found.queues] == [(QUEUE, 40)]
    assert found.queues_left_out == 1
    shown = (await sharded.metrics.aoverview()).schedules
    assert {schedule.queue for schedule in shown} == {QUEUE}
    assert len(shown) == min(16, overview.MAX_DUE)


async def test_a_limit_from_outside_is_refused_where_it_would_count_on_each_shard(sharded: App) -> None:
    push = declare(sharded, make_push())

    async def narrow() -> None: ...

    async def keyed(customer: str) -> None: ...

    narrow_task = declare(sharded, narrow, limit=2)
    by_key = declare(sharded, keyed, limit=1, concurrency_key="customer")
    assert await sharded.limits.aset(by_key, 3)
    with pytest.raises(Misconfigured, match="declare a limit or a rate"):
        await sharded.limits.aset(by_key, "5/s")
    for limit in (3, "5/s"):
        with pytest.raises(Misconfigured, match="declare a limit or a rate"):
            await sharded.limits.aset(push, limit)
        assert await sharded.limits.aset(narrow_task, limit)
    assert await sharded.limits.aset(push, 0)
    assert await sharded.limits.asuspend(push)
    sharded.limits.rule("night", task=push, limit=1)
    with pytest.raises(Misconfigured, match="declare a limit or a rate"):
        resolve_rules(sharded)
    for task in (push, narrow_task, by_key):
        await sharded.limits.alift(task)
    await sharded.limits.aresume(push)


async def test_a_suspended_task_is_held_on_all_shards(sharded: App) -> None:
    push = declare(sharded, make_push())
    await sharded.limits.asuspend(push)
    async with working(sharded):
        sent = await sharded.asend_many([push.s("ann", n) for n in range(12)])
        await until_async(lambda: _are_held(sharded, 12))
        await sharded.limits.aresume(push)
        for result in sent:
            await result.aget()


async def _are_held(app: App, count: int) -> bool:
    state = (await app.ainfo(QUEUE)).queues[QUEUE]
    return state.held_tasks == {"push": count} and "suspended" in state.held_by


async def test_a_job_of_an_event_and_of_a_schedule_have_a_shard(sharded: App) -> None:
    push = declare(sharded, make_push())
    template = push.make_template()
    assert (template.queue, template.shards) == (QUEUE, 4)
    queues = {make_definition(sharded, push.s("ann"), Periodic(60.0, f"s{n}")).queue for n in range(40)}
    assert queues == set(SHARDS)
    assert len({make_definition(sharded, push.s("ann"), Periodic(60.0, "s")).queue for _ in range(20)}) == 1


async def test_a_schedule_with_a_key_has_the_shard_of_its_key(sharded: App) -> None:
    async def keyed(customer: str) -> None: ...

    push = declare(sharded, make_push()).options(key="nightly")
    by_key = declare(sharded, keyed, limit=1, concurrency_key="customer")
    for task in (push, by_key):
        queues = {make_definition(sharded, task.s("ann"), Periodic(60.0, f"s{n}")).queue for n in range(20)}
        assert queues == {task.job("ann").queue}


async def note_order(app: App, count: int, **settings: Any) -> list[str]:
    """Return the queues of so many jobs of a sharded queue and as many of another, in the order in which they began."""
    app.configure(concurrency=1, **settings)
    begun: list[str] = []

    async def note(queue: str) -> None:
        begun.append(queue)
        await trio.sleep(0.001)

    jobs = [declare(app, note, name=queue, queue=queue).s(queue) for queue in (QUEUE, "reports")]
    results = await app.asend_many([job for job in jobs for _ in range(count)])
    async with working(app, queues=(QUEUE, "reports")):
        for result in results:
            await result.aget()
    return begun


async def test_a_sharded_queue_has_the_share_of_one_queue(sharded: App) -> None:
    begun = await note_order(sharded, 160)
    assert 45 <= begun[:160].count("reports") <= 115


@pytest.mark.parametrize("order", ["reports > mails", "mails > reports"])
async def test_an_order_of_queues_holds_for_all_shards(sharded: App, order: str) -> None:
    first = order.split()[0]
    begun = await note_order(sharded, 40, queue_order=order)
    assert begun[:40].count(first) >= 38


async def test_a_rate_holds_over_all_shards(sharded: App) -> None:
    ran: list[int] = []

    async def mail(n: int) -> None:
        ran.append(n)

    mail_task = declare(sharded, mail, rate_limit="3/h")
    results = await sharded.asend_many([mail_task.s(n) for n in range(12)])
    async with working(sharded), working(sharded):
        await until_async(lambda: _are_held_by_rate(sharded, 9))
        assert len(ran) == 3
        for result in results:
            await result.arevoke()


async def _are_held_by_rate(app: App, count: int) -> bool:
    return (await app.ainfo(QUEUE)).queues[QUEUE].held_tasks == {"mail": count}


@pytest.mark.parametrize("number", [4, 2])
async def test_priorities_hold_within_a_shard_also_of_an_earlier_number(sharded: App, number: int) -> None:
    sharded.configure(concurrency=1, priorities="strict")
    begun: list[tuple[str, str]] = []

    async def note(priority: str) -> None:
        job = current_job()
        assert job is not None
        begun.append((priority, job.queue))

    note_task = declare(sharded, note)
    results = [
        await note_task.options(priority=priority, id=f"{priority}-{n}").adelay(priority)
        for priority in ("low", "normal", "high")
        for n in range(20)
    ]
    assert {result.queue for result in results} == set(SHARDS)
    sharded.configure(shards={QUEUE: number})
    async with working(sharded):
        for result in results:
            await result.aget()
    for shard in SHARDS:
        of_shard = [priority for priority, queue in begun if queue == shard]
        assert of_shard == sorted(of_shard, key=["high", "normal", "low"].index)
