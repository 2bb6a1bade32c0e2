"""Idempotency: however often and from wherever a job is sent, one of its key lives, and all get that one's result."""

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import redis
import trio

from celery5 import App, AsyncResult, JobState, Retry, TaskFailed, TaskRevoked, gather
from celery5.broker.servers.embedded import EmbeddedServer
from celery5.errors import TaskRejected
from tests.redis.commands.staff import Staff, wait_until
from tests.redis.worker.workers import LEASE, leftovers, until, until_async, working


async def in_thread(work: Callable[[], Any]) -> Any:
    """What plain Python gives, from a test that has an event loop."""
    return await trio.to_thread.run_sync(work)


async def test_duplicates_are_given_the_handle_of_the_first_and_its_result(app: App) -> None:
    go, runs = trio.Event(), []

    @app.task
    async def charge(order: int) -> str:
        runs.append(order)
        await go.wait()
        return f"charged {order}"

    keyed = charge.options(key="order-7")
    async with working(app):
        first = await keyed.adelay(7)
        again = [
            await keyed.adelay(8),
            await in_thread(lambda: keyed.delay(9)),
            await in_thread(lambda: asyncio.run(keyed.adelay(10))),
            *await app.asend_many([keyed.s(11), keyed.options(countdown=5).s(12)]),
        ]
        assert [job.id for job in again] == [first.id] * 5
        assert [job.duplicate for job in (first, *again)] == [False, *[True] * 5]
        other = await charge.options(key="order-8").adelay(8)
        plain = await charge.adelay(9)
        assert not other.duplicate
        assert not plain.duplicate
        go.set()
        assert [await job.aget() for job in (first, *again)] == ["charged 7"] * 6
        assert sorted([await other.aget(), await plain.aget()]) == ["charged 8", "charged 9"]
    assert sorted(runs) == [7, 8, 9]


async def test_one_batch_sends_one_job_of_each_key_in_its_order(app: App) -> None:
    @app.task
    async def number(n: int) -> int:
        return n

    batch = [number.options(key=f"k{n % 3}").s(n) if n % 2 else number.s(n) for n in range(8)]
    sent = await app.asend_many(batch)
    assert [job.duplicate for job in sent] == [False, False, False, False, False, False, False, True]
    assert sent[7] == sent[1]
    async with working(app):
        assert [await job.aget() for job in sent] == [0, 1, 2, 3, 4, 5, 6, 1]


def test_of_threads_that_race_for_a_key_one_wins(
    url: str, app_name: str, redis_client: "redis.Redis"
) -> None:
    app = App(app_name, broker=url)
    task = app.task(name="t")(lambda n: n)
    ready = threading.Barrier(8)
    sent: list[AsyncResult[Any]] = []

    def race() -> None:
        for number in range(25):
            ready.wait(30)
            sent.append(task.options(key=f"k{number}").delay(number))

    threads = [threading.Thread(target=race) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    app.close()
    assert len(sent) == 200
    assert len({job.id for job in sent}) == sum(not job.duplicate for job in sent) == 25
    assert redis_client.xlen(app.queue("default").stream) == 25


RACER = """
import sys, time
from pathlib import Path
from celery5 import App
from celery5.broker.calls.queues import list_queues
app = App(sys.argv[1], broker=sys.argv[2])
task = app.task(name="t")(lambda n: n)
app.perform(list_queues(app.keys))
print("ready", flush=True)
while not Path(sys.argv[3]).exists():
    time.sleep(0.001)
for number in range(100):
    print(task.options(key=f"k{number}").delay(number).id)
"""


def test_of_processes_that_race_for_a_key_one_wins(
    url: str, app_name: str, tmp_path: Path, redis_client: "redis.Redis"
) -> None:
    gate = tmp_path / "gate"
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACER, app_name, url, str(gate)], stdout=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    for racer in racers:
        assert racer.stdout is not None
        assert racer.stdout.readline() == "ready\n"
    gate.touch()
    answers = [process.communicate(timeout=30)[0].split() for process in racers]
    assert [len(answer) for answer in answers] == [100] * 3
    assert answers[0] == answers[1] == answers[2]
    assert len(set(answers[0])) == redis_client.xlen(App(app_name).queue("default").stream) == 100


@pytest.mark.parametrize("end", ["success", "failure", "expiry", "rejection"])
async def test_a_key_is_free_when_its_job_has_ended(app: App, redis_client: "redis.Redis", end: str) -> None:
    def unwanted(fail: bool) -> bool:
        return end == "rejection"

    @app.task(max_retries=0, deduplicate=unwanted)
    def work(fail: bool) -> None:
        if fail:
            raise ValueError

    late: dict[str, Any] = {"countdown": 0.02, "expires": 0.001} if end == "expiry" else {}
    keyed = work.options(key="k", **late)
    first = await keyed.adelay(end == "failure")
    assert (await keyed.adelay(False)).duplicate
    assert redis_client.hlen(app.queue("default").unique) == 1
    async with working(app):
        if end == "success":
            await first.aget()
        else:
            with pytest.raises(TaskFailed):
                await first.aget()
        assert not redis_client.exists(app.queue("default").unique)
        assert not (await keyed.adelay(False)).duplicate


async def test_a_key_is_kept_while_its_job_waits_for_its_next_attempt(app: App) -> None:
    @app.task
    async def work() -> None:
        raise Retry(countdown=60)

    keyed = work.options(key="k")
    async with working(app):
        first = await keyed.adelay()
        await until_async(lambda: _is(first, JobState.RETRY))
        again = await keyed.adelay()
        assert (again.id, again.duplicate) == (first.id, True)


async def _is(result: AsyncResult[Any], state: JobState) -> bool:
    return await result.astatus() is state


def test_a_key_is_kept_through_the_death_of_a_worker_and_a_restart_of_redis(
    own_server: EmbeddedServer, own_staff: Staff, tmp_path: Path
) -> None:
    app, gate = own_staff.app, tmp_path / "gate"
    task = app.tasks["gate"].options(key="k")
    first = own_staff.start(lease=LEASE)
    sent = task.delay(str(gate))
    wait_until(lambda: len(own_staff.notes()) == 1)
    first.process.kill()
    first.wait()
    assert task.delay(str(gate)) == sent
    own_staff.start(lease=LEASE)
    wait_until(lambda: len(own_staff.notes()) == 2)
    assert task.delay(str(gate)) == sent
    own_server.kill()
    own_server.revive()
    again = task.delay(str(gate))
    assert (again.id, again.duplicate) == (sent.id, True)
    gate.touch()
    sent.get(timeout=30)
    assert not task.delay(str(gate)).duplicate


async def test_unique_for_takes_the_arguments_for_a_key_and_outlasts_the_job(
    app: App, redis_client: "redis.Redis"
) -> None:
    @app.task(unique_for=60)
    async def greet(name: str, loudly: bool = False) -> str:
        return name.upper() if loudly else name

    async with working(app):
        first = await greet.adelay("ada")
        assert await first.aget() == "ada"
        assert (await first.astatus()) is JobState.SUCCESS
        again = await app.asend_many([greet.s(name="ada"), greet.s("ada", loudly=False)])
        assert [(job.id, job.duplicate) for job in again] == [(first.id, True)] * 2
        assert await again[0].aget() == "ada"
        assert await (await greet.adelay("ada", True)).aget() == "ADA"
        assert await (await greet.adelay("bob")).aget() == "bob"
        window = app.queue("default").unique_window(f"{greet.name} {_key_of(redis_client, app, first.id)}")
        redis_client.pexpire(window, 1)
        await until(lambda: not redis_client.exists(window))
        later = await greet.adelay("ada")
        assert (later.duplicate, await later.aget()) == (False, "ada")


def _key_of(client: "redis.Redis", app: App, job_id: str) -> str:
    """The key under which a window remembers a job."""
    looked: Any = client
    for key in looked.scan_iter(f"celery5:{{{app.name}:default}}:unique:*"):
        if looked.get(key) == job_id.encode():
            return str(key.decode().rpartition(" ")[2])
    raise LookupError(job_id)


async def test_a_job_with_an_id_of_its_own_is_sent_once_however_often(
    app: App, redis_client: "redis.Redis"
) -> None:
    @app.task
    async def work(n: int) -> int:
        return n

    mine = work.options(id=f"mine-{uuid4().hex[:8]}")
    sent = [await mine.adelay(1), await mine.adelay(1), *await app.asend_jobs([mine.job(1)])]
    assert {job.id for job in sent} == {mine.send_options.id}
    assert redis_client.xlen(app.queue("default").stream) == 1
    async with working(app):
        assert await sent[0].aget() == 1
        assert await (await mine.adelay(2)).aget() == 1, "it has run already"
    assert await in_thread(lambda: gather(app.send_jobs([mine.job(3)]))) == [1]


async def test_nothing_is_left_of_ten_thousand_keys(app: App, redis_client: "redis.Redis") -> None:
    @app.task(ignore_result=True)
    async def work(n: int) -> None: ...

    sent = await app.asend_many([work.options(key=f"key-{n}", unique_for=0.001).s(n) for n in range(10_000)])
    assert not any(job.duplicate for job in sent)
    keys = app.queue("default")
    with trio.fail_after(30):
        async with working(app, burst=True) as one:
            await one.done.wait()
    left = {
        key: kind
        for key, kind in leftovers(redis_client, app).items()
        if not key.startswith(
            (keys.result_prefix, f"celery5:{{{app.name}}}:metrics:", f"celery5:{{{app.name}}}:history:")
        )
        and not key.startswith((keys.code_versions, keys.flow, keys.steady_since, keys.consumers_checked))
    }
    assert left == {keys.stream: "stream", app.keys.queues: "set"}


async def test_a_rejected_job_keeps_no_key(app: App) -> None:
    async def sent_already(to: str) -> str:
        return f"{to} has it" if to == "ada" else ""

    @app.task(deduplicate=sent_already)
    async def welcome(to: str) -> str:
        return f"welcome, {to}"

    async with working(app):
        with pytest.raises(TaskRejected, match="ada has it"):
            await (await welcome.options(key="k").adelay("ada")).aget()
        assert await (await welcome.options(key="k").adelay("bob")).aget() == "welcome, bob"


@pytest.mark.parametrize("where", ["queued", "scheduled", "running"])
async def test_a_revoked_job_keeps_no_key(app: App, where: str) -> None:
    @app.task
    async def work() -> None:
        await trio.sleep(60)

    keyed = work.options(key="k")
    sent = await keyed.options(countdown=60 if where == "scheduled" else None).adelay()
    if where != "running":
        assert await sent.arevoke()
        assert not (await keyed.adelay()).duplicate
        return
    async with working(app):
        await until_async(lambda: _is(sent, JobState.EXECUTING))
        assert await sent.arevoke()
        with pytest.raises(TaskRevoked):
            await sent.aget()
        again = await keyed.adelay()
        assert not again.duplicate
        await again.arevoke()


async def test_a_dead_job_that_is_replayed_has_its_key_again_unless_another_has_it(
    app: App, redis_client: "redis.Redis"
) -> None:
    @app.task(max_retries=0)
    async def work(fail: bool) -> None:
        if fail:
            raise ValueError

    keyed = work.options(key="k")

    async def dead() -> AsyncResult[None]:
        sent = await keyed.adelay(True)
        async with working(app):
            with pytest.raises(TaskFailed):
                await sent.aget()
        return sent

    first = await dead()
    other = await keyed.adelay(False)
    assert not other.duplicate
    assert (await app.dlq.areplay()).done == 0
    async with working(app):
        await other.aget()
    assert (await app.dlq.areplay()).done == 1
    again = await keyed.adelay(False)
    assert (again.id, again.duplicate) == (first.id, True)
    async with working(app):
        with pytest.raises(TaskFailed):
            await first.aget()
    redis_client.hset(app.queue("default").unique, f"{work.name} k", "a job that is gone")
    assert (await app.dlq.areplay()).done == 1
