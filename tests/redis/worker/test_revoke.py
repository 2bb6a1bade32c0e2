"""Revoking: wherever a job is, it does not run any more; what it does to others is nothing."""

import asyncio
import random
import threading
import time
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import pytest
import redis
import trio
from click.testing import CliRunner
from msgspec import Raw

from celery5 import App, AsyncResult, TaskFailed, TaskRevoked
from celery5.broker.calls import queues as queue_calls
from celery5.cli.commands.task import task as task_group
from celery5.errors import UnknownQueue
from celery5.protocol.job.messages import Command, encode
from celery5.protocol.job.states import JobState
from celery5.protocol.scaling import prefetch
from celery5.results.async_result import arevoke, revoke
from celery5.results.job_details import explain_stop
from celery5.services.worker import consumer
from tests.redis.worker.workers import Lines, leftovers, until, until_async, working

KINDS = ("trio", "asyncio", "thread")


@dataclass
class Stage:
    """Tasks of one kind, and what their jobs have done."""

    app: App
    kind: str
    began: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    go: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        loop: Any = "asyncio" if self.kind == "asyncio" else "trio"

        def work(name: str) -> str:
            self.began.append(name)
            while not self.go.is_set():
                time.sleep(0.002)
                trio.from_thread.check_cancelled()
            self.ended.append(name)
            return name

        async def awork(name: str) -> str:
            self.began.append(name)
            while not self.go.is_set():
                await (asyncio.sleep if self.kind == "asyncio" else trio.sleep)(0.002)
            self.ended.append(name)
            return name

        def fail() -> None:
            raise ValueError

        async def afail() -> None:
            raise ValueError

        in_thread = self.kind == "thread"
        task: Any = self.app.task
        self.work = task(name="work")(work) if in_thread else task(name="work", loop=loop)(awork)
        slow = {"backoff": 60.0, "max_retries": 3}
        self.fail = (
            task(name="fail", **slow)(fail) if in_thread else task(name="fail", loop=loop, **slow)(afail)
        )

    async def send(self, name: str, **options: Any) -> AsyncResult[Any]:
        """Send one job."""
        return cast("AsyncResult[Any]", await self.work.options(**options).adelay(name))


@pytest.fixture(params=KINDS)
def stage(request: pytest.FixtureRequest, app: App) -> Stage:
    """Tasks of each kind."""
    return Stage(app, request.param)


async def is_(result: AsyncResult[Any], state: JobState) -> None:
    """Wait until the job is in a state."""

    async def so() -> bool:
        return await result.astatus() is state

    await until_async(so)


async def has_been_revoked(result: AsyncResult[Any]) -> None:
    """The job ends as revoked, soon, for whoever asks."""
    with pytest.raises(TaskRevoked):
        await result.aget(30)
    assert await result.astatus() is JobState.REVOKED
    assert await result.arevoke() is True, "it may be said again"


async def test_a_job_that_waits_does_not_run_any_more(stage: Stage, redis_client: "redis.Redis") -> None:
    stage.go.set()
    queued = await stage.send("queued")
    scheduled = await stage.send("scheduled", countdown=0.2)
    keyed = await stage.send("keyed", countdown=60, key="k")
    many = [await stage.send("many", key=str(n)) for n in range(3)]
    assert await arevoke([queued, scheduled, keyed, *many]) == [True] * 6
    again = await stage.send("again", key="k")
    assert not again.duplicate, "its key is free"
    assert again.id != keyed.id
    async with working(stage.app):
        assert await again.aget(30) == "again"
        failed = await stage.fail.adelay()
        await is_(failed, JobState.RETRY)
        assert await failed.arevoke() is True
        for job in (queued, scheduled, keyed, failed, *many):
            await has_been_revoked(job)
        await trio.sleep(0.25)  # past the time of the scheduled one
    assert stage.began == ["again"]
    assert not redis_client.exists(stage.app.queue("default").due, stage.app.queue("default").waiting)


async def test_a_job_that_has_ended_or_is_not_known_cannot_be_revoked(stage: Stage) -> None:
    stage.go.set()
    async with working(stage.app):
        done = await stage.send("done")
        assert await done.aget(30) == "done"
        dead = await stage.fail.options(max_retries=0).adelay()
        await is_(dead, JobState.DEAD)
        unknown: AsyncResult[Any] = stage.app.result("unknown")
        assert await arevoke([done, dead, unknown]) == [False, False, False]
        assert await done.aget(30) == "done"
        assert [await job.astatus() for job in (done, dead, unknown)] == ["SUCCESS", "DEAD", "UNKNOWN"]


async def test_a_job_that_runs_is_told_to_stop_and_its_neighbours_are_not(stage: Stage) -> None:
    with Lines() as lines:
        async with working(stage.app):
            jobs = [await stage.send(str(n)) for n in range(4)]
            await until(lambda: len(stage.began) == 4)
            assert await jobs[1].arevoke() is True
            await has_been_revoked(jobs[1])
            assert [await job.astatus() for job in jobs[::2]] == [JobState.EXECUTING] * 2
            # Its executor takes other jobs, and its key is free again.
            first = await stage.send("first", key="k")
            await until(lambda: "first" in stage.began)
            assert await first.arevoke() is True
            await has_been_revoked(first)
            second = await stage.send("second", key="k")
            assert not second.duplicate
            stage.go.set()
            assert [await jobs[n].aget(30) for n in (0, 2, 3)] == ["0", "2", "3"]
            assert await second.aget(30) == "second"
    assert sorted(stage.ended) == ["0", "2", "3", "second"]
    said = {line["job"]: line["state"] for line in lines.of("job")}
    assert [said[job.id] for job in (*jobs, first)] == [
        "SUCCESS",
        "REVOKED",
        "SUCCESS",
        "SUCCESS",
        "REVOKED",
    ]
    assert len(lines.of("job")) == 6


@pytest.mark.parametrize("kind", KINDS)
async def test_a_job_that_a_worker_has_read_and_not_begun_is_taken_out(
    url: str, app_name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumer, "STALE_HORIZONS", 60.0)  # it is not given back meanwhile
    monkeypatch.setattr(prefetch, "HORIZON", 10.0)  # however slow this machine is
    app = App(app_name, broker=url, cpu_slots=1, concurrency=1)
    stage = Stage(app, kind)
    stage.go.set()
    async with working(app):
        for _ in range(3):  # now the worker knows that these are short
            await (await stage.send("short")).aget(30)
        stage.go.clear()
        jobs = await app.asend_many([stage.work.s(str(n)) for n in range(5)])
        await until(lambda: "0" in stage.began)
        await is_(jobs[2], JobState.EXECUTING)
        assert await jobs[2].arevoke() is True
        await has_been_revoked(jobs[2])
        story = await app.afind(jobs[2].id)
        assert story is not None
        assert (story.started, story.finished > 0) == (0, True), "it never was begun"
        assert stage.began[-1] == "0"
        stage.go.set()
        assert [await jobs[n].aget(30) for n in (0, 1, 3, 4)] == ["0", "1", "3", "4"]
    assert "2" not in stage.began
    app.close()


async def test_a_revocation_that_no_message_told_of_is_found_at_a_beat(
    stage: Stage, redis_client: "redis.Redis"
) -> None:
    client: Any = redis_client
    async with working(stage.app):
        result = await stage.send("unheard")
        await until(lambda: bool(stage.began))
        jobs = stage.app.queue("default").jobs
        client.hset(jobs, result.id, b"V" + client.hget(jobs, result.id)[1:])
        await has_been_revoked(result)


async def test_revocation_is_found_after_a_reconnection(
    url: str, app_name: str, redis_client: "redis.Redis"
) -> None:
    app = App(app_name, broker=url, lease=30)  # so that no beat comes
    stage, keys, client = Stage(app, "trio"), app.queue("default"), cast("Any", redis_client)
    async with working(app):
        result = await stage.send("unheard")
        await until(lambda: bool(stage.began))
        client.hset(keys.jobs, result.id, b"V" + client.hget(keys.jobs, result.id)[1:])
        for connection in client.client_list(_type="pubsub"):
            client.client_kill_filter(_id=connection["id"])
        await has_been_revoked(result)
    app.close()


async def test_a_revocation_that_is_quicker_than_its_job_is_remembered(
    url: str, app_name: str, redis_client: "redis.Redis"
) -> None:
    app = App(app_name, broker=url, lease=30)
    stage, keys, client = Stage(app, "trio"), app.queue("default"), cast("Any", redis_client)
    async with working(app):
        entry = "99999999999999-1"
        assert client.publish(keys.revoke, entry) == 1
        message = encode(Command(v=1, id="early", task="work", args=Raw(b'["early"]')))
        client.hset(keys.jobs, "early", "V" + entry)
        client.xadd(keys.stream, {"job": message}, id=entry)
        await has_been_revoked(app.result("early"))
        assert stage.ended == []
    app.close()


class Loaded:
    """What a command is given, whose application is loaded."""

    def __init__(self, app: App) -> None:
        self._app = app

    def load(self, **_options: object) -> App:
        return self._app


async def test_thread_that_ignores_cancellation_is_awaited_and_its_result_counts(app: App) -> None:
    began, go = threading.Event(), threading.Event()

    @app.task(name="deaf")
    def deaf() -> int:
        began.set()
        go.wait(30)
        return 1

    async with working(app):
        result = await deaf.adelay()
        await until(began.is_set)
        assert await result.arevoke() is True
        await trio.sleep(0.1)
        assert await result.astatus() is JobState.EXECUTING
        details = await app.afind(result.id)
        assert details is not None
        assert details.stops_when == explain_stop(app.tasks["deaf"])
        assert details.stops_when.startswith("its thread cannot be interrupted: it ends when it returns")
        command = partial(CliRunner().invoke, task_group, obj=Loaded(app))
        printed = await trio.to_thread.run_sync(command, ["revoke", result.id])
        assert printed.stderr == f"{result.id} still runs: {details.stops_when}\n"
        assert details.stops_when in (await trio.to_thread.run_sync(command, ["show", result.id])).stdout
        assert explain_stop(None) == f"if its task is a def: {details.stops_when}"
        go.set()
        assert await result.aget(30) == 1
        ended = await app.afind(result.id)
        assert ended is not None
        assert ended.stops_when == ""


async def test_a_thread_may_be_left_behind_and_has_its_slot_until_it_ends(url: str, app_name: str) -> None:
    app = App(app_name, broker=url, cpu_slots=1)
    go, began = threading.Event(), list[int]()

    @app.task(name="deaf", abandon_on_cancel=True)
    def deaf(n: int) -> int:
        began.append(n)
        go.wait(30)
        return n

    with Lines() as lines:
        async with working(app):
            result = await deaf.adelay(1)
            await until(lambda: bool(began))
            assert await result.arevoke() is True
            await has_been_revoked(result)
            after = await deaf.adelay(2)
            await trio.sleep(0.1)
            assert began == [1]
            go.set()
            assert await after.aget(30) == 2
    assert [line["job"] for line in lines.of("job:abandoned")] == [result.id]
    app.close()


async def test_revoked_job_may_still_return_but_not_fail(
    app: App,
) -> None:
    began = list[str]()

    @app.task(name="unwinding", max_retries=0)
    async def unwinding(returns: bool) -> int:
        began.append("")
        try:
            await trio.sleep(5)
        except trio.Cancelled:
            if returns:
                return 1
        raise ValueError("while it ended")

    async with working(app):
        failing, returning = await unwinding.adelay(False), await unwinding.adelay(True)
        await until(lambda: len(began) == 2)
        assert await arevoke([failing, returning]) == [True, True]
        await has_been_revoked(failing)
        assert await returning.aget(30) == 1


async def test_a_revocation_that_races_with_the_end_is_never_told_wrongly(
    stage: Stage, redis_client: "redis.Redis"
) -> None:
    rng, told, count = random.Random(5), dict[str, bool](), 150
    stage.go.set()

    async def race(n: int) -> None:
        result = await stage.send(str(n))
        await trio.sleep(rng.random() * 0.02)
        told[str(n)] = await result.arevoke()
        with trio.fail_after(30):
            try:
                value = await result.aget(None)
            except TaskRevoked:
                assert told[str(n)], "it was said that it had ended"
                assert await result.astatus() is JobState.REVOKED
            else:
                assert value == str(n)
                assert await result.astatus() is JobState.SUCCESS
                assert str(n) in stage.ended

    async with working(stage.app):
        for at in range(0, count, 15):
            async with trio.open_nursery() as nursery:
                for n in range(at, at + 15):
                    nursery.start_soon(race, n)
    assert len(told) == count
    assert len(stage.began) == len(set(stage.began)), "none ran twice"
    left = {
        kind
        for key, kind in leftovers(redis_client, stage.app).items()
        if not any(part in key for part in (":revoked", ":code", ":audit", ":flow"))
    }
    # Besides those that were revoked while they waited, the versions of code and the audit trail: they expire.
    assert left <= {"stream", "string", "set", "none"}  # none: it has just expired


def test_a_held_job_is_revoked(app: App, redis_client: "redis.Redis") -> None:
    @app.task(name="nothing")
    async def nothing() -> None: ...

    client, keys, held = cast("Any", redis_client), app.queue("default"), nothing.options(key="k").delay()
    ((entry, fields),) = client.xrange(keys.stream)
    client.xdel(keys.stream, entry)  # as whoever holds jobs will have them: no entry, the Command kept
    client.hset(keys.waiting, held.id, fields[b"job"])
    client.hset(keys.jobs, held.id, "H")
    assert held.status() is JobState.HELD
    assert nothing.options(key="k").delay().duplicate
    assert held.revoke() is True
    assert held.status() is JobState.REVOKED
    with pytest.raises(TaskRevoked, match=r"^nothing\["):
        held.get(timeout=1)
    assert not client.exists(keys.waiting, keys.jobs, keys.unique)
    assert not nothing.options(key="k").delay().duplicate, "its key is free"


def test_many_jobs_of_several_queues_are_revoked_in_few_trips(app: App) -> None:
    @app.task(name="nothing")
    async def nothing() -> None: ...

    results = app.send_many([nothing.options(queue=f"q{n % 2}").s() for n in range(900)])
    assert revoke(results) == [True] * 900
    assert revoke([]) == []
    assert results[0].revoke() is True
    assert {result.status() for result in results[::50]} == {JobState.REVOKED}
    for queue in ("q0", "q1"):
        assert app.perform(queue_calls.get_queue_depth(app.queue(queue))).unfinished == 0


def test_revocation_is_remembered_for_results_ttl(app: App, redis_client: "redis.Redis") -> None:
    @app.task(name="nothing")
    async def nothing() -> None: ...

    usual, short, own = (
        nothing.delay(),
        nothing.options(results_ttl=1).delay(),
        nothing.options(results_ttl=90).delay(),
    )
    revoke([usual, short, own])
    ttls = [cast("Any", redis_client).ttl(job.key) for job in (usual, short, own)]
    assert ttls == [pytest.approx(3600, abs=2), pytest.approx(60, abs=2), pytest.approx(90, abs=2)]


def test_a_job_whose_message_makes_no_sense_is_revoked_all_the_same(
    app: App, redis_client: "redis.Redis"
) -> None:
    keys, client = app.queue("default"), cast("Any", redis_client)
    places = {}
    for n, message in enumerate((b"\xff", b"[]", b'{"attempt": "x", "key": 7}', b"{}")):
        places[f"j{n}"] = b"S" + client.xadd(keys.stream, {"job": message})
    places["gone"], places["nonsense"] = b"S1-1", b"Swhere?"
    client.hset(keys.jobs, mapping=places)
    results: list[AsyncResult[Any]] = [app.result(place) for place in places]
    assert revoke(results) == [True] * len(places)
    assert client.xlen(keys.stream) == 0
    assert {result.status() for result in results} == {JobState.REVOKED}


async def test_a_queue_is_emptied_of_all_that_waits_and_of_nothing_else(
    app: App, redis_client: "redis.Redis"
) -> None:
    go = trio.Event()

    @app.task(queue="mail")
    async def nap(seconds: float) -> str:
        await go.wait()
        return "slept"

    @app.task(queue="mail", max_retries=0)
    async def fails() -> None:
        raise ValueError

    async with working(app):
        dead = await fails.adelay()
        with pytest.raises(TaskFailed):
            await dead.aget(timeout=30)
        runs = await nap.adelay(0.5)
        await until_async(lambda: is_in(runs, JobState.EXECUTING))
        await app.control.asend("pause-queue", {"queue": "mail"})
        waiting = await app.asend_many([nap.s(0) for _ in range(450)])
        waiting += [await nap.options(priority="high").adelay(0), await nap.options(countdown=60).adelay(0)]
        waiting.append(await nap.options(key="k").adelay(0))
        other = await app.task(name="other", queue="other")(nap.function).options(countdown=60).adelay(0)
        assert await app.aempty("mail") == 453
        assert {await job.astatus() for job in waiting[::90]} == {JobState.REVOKED}
        go.set()
        assert await runs.aget(timeout=30) == "slept"
        assert (await dead.astatus(), await other.astatus()) == (JobState.DEAD, JobState.SCHEDULED)
        assert not (await nap.options(key="k").adelay(0)).duplicate
        assert await app.aempty("mail") == 1
        with pytest.raises(UnknownQueue):
            await app.aempty("mial")
        await other.arevoke()


async def is_in(handle: AsyncResult[Any], state: JobState) -> bool:
    return await handle.astatus() is state


async def test_only_a_thread_that_runs_is_said_to_stop_late(app: App) -> None:
    @app.task(name="asynchronous")
    async def asynchronous() -> None: ...

    @app.task(name="boxed", boxed=True)
    def boxed() -> None: ...

    @app.task(name="left", abandon_on_cancel=True)
    def left() -> None: ...

    @app.task(name="deaf")
    def deaf() -> None: ...

    assert [explain_stop(task) for task in (asynchronous, boxed, left)] == ["", "", ""]
    result = await deaf.adelay()
    assert await result.arevoke() is True
    details = await app.afind(result.id)
    assert details is not None
    assert (details.state, details.stops_when) == (JobState.REVOKED, "")
