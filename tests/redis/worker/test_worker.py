"""Worker: jobs of every kind run, end in the right state, and leave nothing behind."""

import asyncio
import threading
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
import redis
import trio
import trio.lowlevel

from celery5 import App, JobState, TaskFailed, agather, current_job
from celery5.errors import ResultsDisabled
from celery5.services.worker.burst import Burst
from celery5.services.worker.result_publisher import ResultPublisher
from celery5.services.workflows.run_progress import RunRelay
from celery5.tasks import CurrentJob
from celery5.workflows import StepFailure
from tests.redis.worker.workers import (
    LEASE,
    Lines,
    held,
    leftovers,
    of_kind,
    start,
    until,
    until_async,
    working,
)


async def test_each_kind_of_task_runs_where_it_belongs(app: App) -> None:
    @app.task
    async def on_trio(a: int) -> list[str]:
        await trio.lowlevel.checkpoint()
        return [str(a), threading.current_thread().name]

    @app.task(loop="asyncio")
    async def on_asyncio(a: int) -> list[str]:
        await asyncio.sleep(0)
        return [str(a), threading.current_thread().name]

    @app.task
    def in_thread(a: int) -> list[str]:
        return [str(a), threading.current_thread().name]

    async with working(app):
        sent = [await on_trio.adelay(1), await on_asyncio.adelay(2), await in_thread.adelay(3)]
        got: Any = await agather(sent)
    (one, here), (two, loop), (three, thread) = got
    assert (one, two, three) == ("1", "2", "3")
    assert here == threading.current_thread().name
    assert loop == "celery5-asyncio"
    assert thread not in (here, loop)


@pytest.mark.parametrize("loop", ["trio", "asyncio"])
async def test_coroutines_run_at_once_in_the_loop_that_they_were_declared_for(app: App, loop: str) -> None:
    inside: set[int] = set()
    libraries: set[str] = set()
    nap: Any = trio.sleep if loop == "trio" else asyncio.sleep

    async def meet(number: int) -> int:
        """It ends when five of them are inside, so one after the other they would never end."""
        libraries.add(
            "trio" if trio.lowlevel.in_trio_run() else asyncio.get_running_loop().__class__.__name__
        )
        inside.add(number)
        while len(inside) < 5:
            await nap(0.001)
        return number

    declare: Any = app.task
    task = declare(loop=loop)(meet)
    async with working(app):
        sent = [await task.adelay(number) for number in range(5)]
        assert await agather(sent, timeout=30) == [0, 1, 2, 3, 4]
    assert len(libraries) == 1
    assert ("trio" in libraries) == (loop == "trio")


async def test_results_come_back_as_the_annotation_says(app: App) -> None:
    @app.task
    async def typed(id_: UUID, price: Decimal, when: datetime, where: Path) -> dict[str, tuple[Any, ...]]:
        assert isinstance(id_, UUID)
        assert isinstance(price, Decimal)
        assert isinstance(where, Path)
        return {"all": (id_, price, when, where)}

    @app.task
    async def path(where: Path) -> Path:
        return where / "b"

    now = datetime.now(UTC)
    async with working(app):
        got = await (await typed.adelay(uuid4(), Decimal("1.10"), now, Path("a"))).aget()
        assert got["all"][1] == "1.10"
        assert await (await path.adelay(Path("a"))).aget() == Path("a/b")


async def test_a_job_starts_at_its_time_and_not_before(app: App) -> None:
    started: list[float] = []

    @app.task
    async def note() -> None:
        started.append(trio.current_time())

    async with working(app):
        first = trio.current_time()
        eta = datetime.now(UTC) + timedelta(seconds=0.9)
        later = await note.options(eta=eta).adelay()
        sooner = await note.options(countdown=0.15).adelay()  # is due before the one that waits already
        assert await later.astatus() is JobState.SCHEDULED
        await agather([later, sooner])
    assert len(started) == 2
    assert started[0] - first >= 0.15
    assert started[1] - first >= 0.89


async def test_a_job_that_is_late_expires_and_does_not_run(app: App) -> None:
    ran: list[int] = []

    @app.task
    async def urgent(n: int) -> int:
        ran.append(n)
        return n

    late = await urgent.options(expires=0.01).adelay(1)
    fine = await urgent.options(expires=60).adelay(2)
    await trio.sleep(0.02)
    async with working(app):
        assert await fine.aget() == 2
        await until_async(lambda: is_(late, JobState.EXPIRED))
    assert ran == [2]


async def is_(sent: Any, state: JobState) -> bool:
    return await sent.astatus() is state


async def test_a_job_without_a_result_leaves_only_a_mark_that_it_ran(
    app: App, redis_client: "redis.Redis"
) -> None:
    ran = trio.Event()

    @app.task(name="silent", ignore_result=True)
    async def silent() -> str:
        ran.set()
        return "x" * 1000

    async with working(app):
        sent = await silent.adelay()
        with pytest.raises(ResultsDisabled):
            await sent.aget()
        with trio.fail_after(30):
            await ran.wait()
        await until_async(lambda: is_(sent, JobState.SUCCESS))
    assert len(redis_client.get(sent.key) or b"") < 300
    assert 0 < redis_client.pttl(sent.key) <= 60_000


async def test_the_state_of_a_job_on_its_way(app: App) -> None:
    go = trio.Event()

    @app.task(backoff=0.3, max_retries=1)
    async def wait_and_fail() -> None:
        job = current_job()
        if job is not None and job.attempt == 1:
            await go.wait()
            raise ValueError

    sent = await wait_and_fail.adelay()
    assert await sent.astatus() is JobState.SENT
    async with working(app):
        await until_async(lambda: is_(sent, JobState.EXECUTING))
        go.set()
        await until_async(lambda: is_(sent, JobState.RETRY))
        await sent.aget()
        assert await sent.astatus() is JobState.SUCCESS
        await sent.aforget()
        assert await sent.astatus() is JobState.UNKNOWN


async def test_a_burst_ends_when_all_is_done_scheduled_jobs_and_retries_included(
    app: App, redis_client: "redis.Redis"
) -> None:
    runs: list[str] = []

    @app.task(backoff=0.2)
    async def once_more() -> None:
        runs.append("retry")
        if len(runs) < 3:
            raise ValueError

    @app.task
    async def more() -> None:
        runs.append("more")
        await once_more.adelay()

    await more.options(countdown=0.2).adelay()
    async with working(app, burst=True) as one:
        with trio.fail_after(30):
            await one.done.wait()
    assert runs == ["more", "retry", "retry"]
    assert redis_client.xlen(app.queue("default").stream) == 0


async def test_a_burst_ends_when_the_failure_task_of_a_dead_job_was_sent_and_has_run(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[str] = []
    looks = 0

    @app.task
    async def notify(failures: list[StepFailure]) -> None:
        called.append(failures[0].message)

    @app.task(max_retries=0, on_failure=notify)
    async def fail() -> None:
        raise LookupError("no such order")

    is_done, send = Burst.is_done, RunRelay._send_for_failure

    async def look(burst: Burst) -> bool:
        nonlocal looks
        looks += 1
        return await is_done(burst)

    async def send_later(progress: RunRelay, fields: Mapping[str, bytes]) -> None:
        first = looks
        await until(lambda: looks > first + 2)
        await send(progress, fields)

    monkeypatch.setattr(Burst, "is_done", look)
    monkeypatch.setattr(RunRelay, "_send_for_failure", send_later)
    await fail.adelay()
    async with working(app, burst=True) as one:
        with trio.fail_after(30):
            await one.done.wait()
    assert called == ["no such order"]


async def test_jobs_send_jobs_in_every_kind_of_task(app: App) -> None:
    @app.task
    async def leaf(n: int) -> int:
        return n + 1

    @app.task
    async def from_trio(n: int) -> int:
        return await (await leaf.adelay(n)).aget()

    @app.task(loop="asyncio")
    async def from_asyncio(n: int) -> int:
        return await (await leaf.adelay(n)).aget()

    @app.task
    def from_thread(n: int) -> int:
        return leaf.delay(n).get()

    async with working(app):
        sent = [await from_trio.adelay(1), await from_asyncio.adelay(2), await from_thread.adelay(3)]
        assert await agather(sent) == [2, 3, 4]


async def test_a_job_knows_itself_in_every_kind_of_task(app: App) -> None:
    def body() -> dict[str, Any]:
        job = current_job()
        assert isinstance(job, CurrentJob)
        return {"id": job.id, "task": job.task, "queue": job.queue, "attempt": job.attempt}

    tasks = []
    for kind in ("trio", "asyncio", "thread"):
        tasks.append(of_kind(app, kind, body))
        tasks[-1].name = f"flaky-{kind}"
        app.tasks.add(tasks[-1])
        dict.pop(app.tasks, "flaky")
    async with working(app, name="knower"):
        for task in tasks:
            sent = await task.adelay()
            got = await sent.aget()
            assert got == {"id": sent.id, "task": task.name, "queue": "default", "attempt": 1}
    assert current_job() is None


async def test_a_thousand_jobs_all_come_back(app: App, redis_client: "redis.Redis") -> None:
    @app.task
    async def square(n: int) -> int:
        return n * n

    async with working(app):
        sent = await app.asend_many([square.s(n) for n in range(1000)])
        assert await agather(sent, timeout=30) == [n * n for n in range(1000)]
    assert redis_client.xlen(app.queue("default").stream) == 0


async def test_a_worker_consumes_several_queues_and_only_its_own(
    app: App, redis_client: "redis.Redis"
) -> None:
    @app.task(queue="a")
    async def one(n: int) -> int:
        return n

    @app.task
    def two(n: int) -> int:
        return n

    other = await one.options(queue="not-consumed").adelay(0)
    async with working(app, queues=("a", "default")):
        sent = [await task.adelay(n) for n in range(20) for task in (one, two)]
        assert await agather(sent) == [n for n in range(20) for _ in range(2)]
        assert await other.astatus() is JobState.SENT


async def test_more_queues_than_room_take_turns(url: str, app_name: str) -> None:
    app = App(app_name, broker=url, lease=LEASE, concurrency=1, cpu_slots=1)

    ran: list[str] = []

    @app.task
    async def note(queue: str) -> None:
        ran.append(queue)
        await trio.sleep(0.12)  # longer than jobs are read ahead

    queues = tuple(f"q{n}" for n in range(5))
    sent = [await note.options(queue=name).adelay(name) for name in queues for _ in range(3)]
    async with working(app, queues=queues):
        assert await agather(sent) == [None] * 15
    assert [sorted(ran[at : at + 5]) for at in (0, 5, 10)] == [list(queues)] * 3


async def test_a_full_kind_does_not_hold_up_the_queue_of_another(url: str, app_name: str) -> None:
    app = App(app_name, broker=url, lease=LEASE, concurrency=5, cpu_slots=1)
    go = threading.Event()

    @app.task(queue="heavy")
    def heavy() -> None:
        go.wait(30)

    @app.task
    async def light() -> int:
        return 1

    async with working(app):
        slow = await app.asend_many([heavy.s() for _ in range(3)])
        await until_async(lambda: is_(slow[0], JobState.EXECUTING))
        try:
            sent = [await light.adelay() for _ in range(5)]
            assert await agather(sent, timeout=30) == [1] * 5
            assert await slow[2].astatus() is JobState.SENT
        finally:
            go.set()
        await agather(slow)


async def test_each_job_is_told_of_in_one_line(app: App) -> None:
    @app.task(max_retries=1)
    async def half(n: int) -> int:
        if n:
            raise ValueError("odd")
        return n

    with Lines() as lines:
        async with working(app):
            good, bad = await half.adelay(0), await half.adelay(1)
            await good.aget()
            with pytest.raises(TaskFailed):
                await bad.aget()
    by_job: dict[str, list[dict[str, Any]]] = {}
    for line in lines.of("job"):
        by_job.setdefault(line["job"], []).append(line)
    (fine,) = by_job[good.id]
    assert (fine["state"], fine["task"], fine["queue"]) == ("SUCCESS", half.name, "default")
    assert (fine["attempt"], fine["level"]) == (1, "info")
    assert fine["seconds"] >= 0
    assert fine["seconds"] == round(fine["seconds"], 6)
    first, second = by_job[bad.id]
    assert (first["state"], first["attempt"], first["error"]) == ("RETRY", 1, "ValueError: odd")
    assert (second["state"], second["attempt"], second["reason"]) == ("DEAD", 2, "exhausted")
    assert "traceback" not in fine
    assert "traceback" not in first
    assert second["traceback"].startswith("Traceback (most recent call last):\n")
    assert 'raise ValueError("odd")' in second["traceback"]
    assert fine["task_uuid"] == first["task_uuid"]


async def test_a_clean_stop_leaves_no_consumer_no_lease_and_nothing_pending(
    app: App, redis_client: "redis.Redis"
) -> None:
    @app.task
    async def nothing() -> None:
        pass

    async with working(app):
        await agather(await app.asend_many([nothing.s() for _ in range(50)]))
    assert held(redis_client, app) == {}
    left = leftovers(redis_client, app)
    kinds = (":result:", ":metrics:", ":history:", ":code", ":flow", ":checked", ":steady")
    expiring = {key for key in left if any(kind in key for kind in kinds)}
    assert {key.rpartition(":")[2] for key in left if key not in expiring} == {"stream", "queues"}
    assert redis_client.xlen(app.queue("default").stream) == 0
    assert all(redis_client.pttl(key) > 0 for key in expiring)


async def test_of_two_workers_in_one_run_either_may_end_first(app: App, nursery: trio.Nursery) -> None:
    @app.task
    async def echo(n: int) -> int:
        return n

    for first in (0, 1):
        two = [await start(nursery, app) for _ in range(2)]
        await two[first].stop()
        assert await (await echo.adelay(1)).aget() == 1
        await two[1 - first].stop()
        assert await (await echo.adelay(2)).astatus() is JobState.SENT


async def test_jobs_whose_outcomes_wait_to_be_settled_count_as_held(
    app: App, redis_client: "redis.Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    app.configure(concurrency=2)
    ended, settling = list[int](), trio.Event()

    @app.task
    async def number(n: int) -> int:
        await trio.sleep(0.2)
        ended.append(n)
        return n

    settle = ResultPublisher.settle

    async def settle_later(publisher: ResultPublisher, outcomes: Any) -> None:
        await settling.wait()
        await settle(publisher, outcomes)

    monkeypatch.setattr(ResultPublisher, "settle", settle_later)
    sent = await app.asend_many([number.s(n) for n in range(8)])
    async with working(app):
        before = -1
        while before != len(ended):  # no job has ended for five times as long as one takes
            before = len(ended)
            await trio.sleep(1)
        assert len(ended) == 2  # as many as it has slots for
        assert sum(held(redis_client, app).values()) == len(ended)
        settling.set()
        assert await agather(sent, timeout=60) == list(range(8))
