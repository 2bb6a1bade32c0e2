"""Own steps live: what an application adds to a worker sends jobs, outlives an outage, and begins again with its
worker."""

import asyncio
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import redis
import trio

from celery5 import App, BootStep, BrokerUnavailable, RetryPolicy, service
from celery5.boot_step import PROCESS_KINDS
from celery5.bootsteps.boot import BootGraph
from celery5.broker.servers.embedded import EmbeddedServer
from celery5.errors import BootStepFailed, Misconfigured
from celery5.logs.log import Log
from celery5.processes import controller, router, scheduler
from celery5.processes.controller import ClusterOptions
from celery5.processes.foreground import WORKER
from celery5.processes.lifecycle.incarnations import ProcessKind
from celery5.processes.process_parts import Incarnation
from celery5.processes.router import ROUTER
from celery5.processes.scheduler import SCHEDULER
from celery5.processes.worker import WorkerOptions, check, make_incarnation_values
from celery5.processes.worker_parts import WorkerParts
from celery5.services.process.reloader import NextIncarnation
from celery5.wiring import build
from tests.redis.worker.workers import LEASE, Lines, until, working


async def test_a_service_sends_jobs_and_waits_for_their_results(url: str, app_name: str) -> None:
    got: list[int] = []

    async def ask() -> None:
        got.append(await (await double.adelay(7)).aget())

    app = App(app_name, broker=url, services=[service(ask, requires="publishing")])

    @app.task
    async def double(n: int) -> int:
        return 2 * n

    async with working(app):
        await until(lambda: got == [14])
    app.close()


@pytest.mark.parametrize("name", PROCESS_KINDS)
async def test_services_run_in_the_kinds_of_processes_that_they_name(
    url: str, app_name: str, name: str, tmp_path: Path
) -> None:
    notes = list[str]()
    (tmp_path / "cluster.toml").write_text("[workers.none]\ncount = 0\n")
    options = ClusterOptions("shop", file=str(tmp_path / "cluster.toml"))
    run = partial(controller.run, cluster_options=options)
    kinds = (WORKER, ROUTER, SCHEDULER, ProcessKind("controller", run, lambda _app: None))
    (kind,) = [candidate for candidate in kinds if candidate.name == name]

    async def prepare() -> str:
        return "prepared"

    def undo() -> None:
        notes.append("undone")

    async def ask(prepare: str, worker: str) -> None:
        await noop.adelay()
        notes.append(prepare)
        await trio.sleep_forever()

    async def elsewhere() -> None:
        notes.append("elsewhere")

    others = [name for name in PROCESS_KINDS if name != kind.name]
    app = App(
        app_name,
        broker=url,
        bootsteps=[BootStep("prepare", prepare, undo=undo, process_kinds=kind.name)],
        services=[
            service(ask, requires=["prepare", "publishing"], process_kinds=[kind.name]),
            service(elsewhere, process_kinds=others),
        ],
    )

    @app.task(queue="nobodys")
    async def noop() -> None: ...

    async with working(app, page=kind):
        await until(lambda: notes == ["prepared"])
    assert notes == ["prepared", "undone"]
    app.close()


async def test_a_service_of_a_scheduler_that_crashes_is_restarted_or_ends_it(url: str, app_name: str) -> None:
    crashes = list[int]()

    async def crash() -> None:
        crashes.append(1)
        if len(crashes) < 3:
            raise ValueError("it crashes")
        await trio.sleep_forever()

    quick = RetryPolicy(max_retries=5, backoff=0.01, jitter=False)
    app = App(app_name, broker=url, services=[service(crash, retry=quick, process_kinds=["scheduler"])])
    async with working(app, page=SCHEDULER):
        await until(lambda: len(crashes) == 3)
    app.close()

    async def fail() -> None:
        raise ValueError("it fails")

    app = App(app_name, broker=url, bootsteps=[BootStep("fail", fail, process_kinds=["scheduler"])])
    with pytest.RaisesGroup(BootStepFailed, flatten_subgroups=True):
        async with working(app, page=SCHEDULER):
            pass
    app.close()


@pytest.mark.parametrize(
    ("kinds", "words"),
    [(["workers"], "did you mean 'worker'"), ([], "process_kinds is empty"), (["publisher"], "publisher")],
)
def test_kinds_that_do_not_exist_are_refused_in_one_line(kinds: list[str], words: str) -> None:
    with pytest.raises(Misconfigured, match=words):
        BootStep("one", lambda: None, process_kinds=kinds)


def test_who_has_steps_for_a_router_or_a_scheduler_needs_one(app_name: str) -> None:
    async def stay() -> None: ...

    for kind, needed in (("router", router.is_needed), ("scheduler", scheduler.is_needed)):
        assert not needed(App(app_name))
        assert needed(App(app_name, services=[service(stay, process_kinds=[kind])]))


class Pool:
    """A pool of connections, bound to the loop in which it is opened, as those of asyncpg are."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.keeper = asyncio.ensure_future(asyncio.sleep(3600))

    async def fetch(self) -> int:
        assert self.loop is asyncio.get_running_loop()
        return await asyncio.wait_for(asyncio.sleep(0, 1), 10)

    async def close(self) -> None:
        assert self.loop is asyncio.get_running_loop()
        self.keeper.cancel()
        with suppress(asyncio.CancelledError):
            await self.keeper


async def test_a_step_on_asyncio_opens_a_pool_that_the_jobs_there_share(url: str, app_name: str) -> None:
    pools, notes = list[Pool](), list[str]()

    async def open_pool() -> Pool:
        pools.append(Pool())
        return pools[-1]

    async def close_pool(pool: Pool) -> None:
        await pool.close()
        notes.append("closed")

    async def watch(pool: Pool) -> None:
        notes.append(f"watched {await pool.fetch()}")
        await asyncio.sleep(3600)

    app = App(
        app_name,
        broker=url,
        bootsteps=[BootStep("pool", open_pool, undo=close_pool, loop="asyncio")],
        services=[service(watch, requires=["pool"], loop="asyncio")],
    )

    @app.task(loop="asyncio")
    async def query() -> int:
        return await pools[-1].fetch()

    async with working(app):
        assert [await job.aget(timeout=30) for job in await app.asend_many([query.s()] * 20)] == [1] * 20
        await until(lambda: notes == ["watched 1"])
    assert notes == ["watched 1", "closed"]
    assert len(pools) == 1
    assert pools[0].keeper.cancelled()
    app.close()


async def test_a_step_on_asyncio_that_fails_ends_the_worker_in_one_line(url: str, app_name: str) -> None:
    async def fail() -> None:
        await asyncio.sleep(0)
        raise OSError("no such database")

    app = App(app_name, broker=url, bootsteps=[BootStep("pool", fail, loop="asyncio")])
    with pytest.RaisesGroup(
        pytest.RaisesExc(BootStepFailed, match="pool.*no such database"), flatten_subgroups=True
    ):
        async with working(app):
            pass
    app.close()


def test_a_step_that_cannot_run_on_asyncio_is_refused(url: str, app_name: str) -> None:
    async def wait(task_status: object) -> None: ...

    with pytest.raises(Misconfigured, match="give 'trio' or 'asyncio'"):
        BootStep("one", wait, loop="curio")  # type: ignore[arg-type]
    app = App(app_name, broker=url, bootsteps=[BootStep("one", wait, loop="asyncio")])
    with pytest.raises(Misconfigured, match="task_status is Trio's"):
        check(app)


async def test_celery5s_own_services_are_registered_as_an_applications_are(url: str, app_name: str) -> None:
    app, log = App(app_name, broker=url), Log(worker="w", app=app_name)

    @app.task
    async def double(n: int) -> int:
        return 2 * n

    incarnation = Incarnation("w", log, trio.Event(), NextIncarnation())
    values = make_incarnation_values(app, WorkerOptions(), incarnation)
    usual = build(BootGraph, WorkerParts, *values)
    assert {type(step) for step in usual._steps} == {BootStep}
    # A worker that has nothing of its own: each of its parts is given to it as an application's would be.
    strange = BootGraph(
        steps=(),
        added=usual._steps,
        offered=usual._offered,
        step_status=usual._step_status,
        self_commands=usual._posts,
        log=log,
    )
    async with trio.open_nursery() as nursery:
        with trio.fail_after(30):
            await nursery.start(strange.run)
            result = await double.adelay(7)
            assert await result.aget() == 14
        nursery.cancel_scope.cancel()
    log.finish()
    assert set(usual._step_status.to_json()) == {step.name for step in usual._steps}
    app.close()


async def test_a_service_does_not_cost_a_second_connection(
    url: str, app_name: str, redis_client: "redis.Redis"
) -> None:
    async def send() -> None:
        await noop.adelay()
        sent.set()
        await trio.sleep_forever()

    sent = trio.Event()
    plain = App(app_name, broker=url)
    app = App(app_name, broker=url, services=[send])

    @app.task
    async def noop() -> None: ...

    plain.task(name="noop")(noop.__wrapped__)
    counts: list[int] = []
    for application in (plain, app):
        async with working(application, name=app_name):
            if application is app:
                await sent.wait()
            named = [client["name"] for client in redis_client.client_list()]
            counts.append(len([name for name in named if app_name in name]))
    assert counts[0] == counts[1] > 0


async def test_a_worker_that_was_taken_for_dead_brings_them_up_anew(
    url: str, app_name: str, redis_client: "redis.Redis"
) -> None:
    notes: list[str] = []

    async def fill(worker: str) -> str:
        notes.append(f"fill {worker}")
        return worker

    async def empty(cache: str) -> None:
        notes.append(f"empty {cache}")

    class Watch:
        async def run(self, *, task_status: trio.TaskStatus[None]) -> None:
            notes.append("watch")
            task_status.started()
            await trio.sleep_forever()

    app = App(
        app_name, broker=url, lease=LEASE, bootsteps=[BootStep("cache", fill, undo=empty)], services=[Watch]
    )
    async with working(app):
        first = notes[0].removeprefix("fill ")
        redis_client.zrem(app.queue("default").leases, first)
        await until(lambda: notes.count("watch") == 2)
        second = [note for note in notes if note.startswith("fill")][1].removeprefix("fill ")
        assert first != second
    assert [note for note in notes if note.startswith("empty")] == [f"empty {first}", f"empty {second}"]
    app.close()


async def test_a_mandatory_step_that_fails_in_a_later_life_stops_the_worker_too(
    url: str, app_name: str, redis_client: "redis.Redis"
) -> None:
    lives: list[str] = []

    async def fill(worker: str) -> None:
        lives.append(worker)
        if len(lives) > 1:
            raise ValueError("no second life")

    app = App(app_name, broker=url, lease=LEASE, bootsteps=[BootStep("cache", fill)])
    failed = pytest.RaisesGroup(
        pytest.RaisesExc(
            BootStepFailed, match="boot step 'cache' did not come up: ValueError: no second life"
        ),
        flatten_subgroups=True,
    )
    with failed:
        async with working(app) as one:
            redis_client.zrem(app.queue("default").leases, lives[0])
            with trio.fail_after(30):
                await one.ended.wait()
    assert len(lives) == 2
    app.close()


@pytest.mark.parametrize("inbox", [True, False])
async def test_an_optional_step_that_failed_is_tried_again_by_a_command_through_the_inbox(
    url: str, app_name: str, redis_client: "redis.Redis", inbox: bool
) -> None:
    tries: list[int] = []
    ready = trio.Event()

    async def fill() -> None:
        tries.append(len(tries))
        if not ready.is_set():
            raise ValueError("nothing there yet")

    once = RetryPolicy(max_retries=1, backoff=0.01)
    app = App(
        app_name, broker=url, inbox=inbox, bootsteps=[BootStep("cache", fill, optional=True, retry=once)]
    )

    @app.task
    async def double(n: int) -> int:
        return 2 * n

    with Lines() as lines:
        async with working(app, name="w1"):
            assert await (await double.adelay(7)).aget() == 14  # the worker goes on without it
            await until(lambda: bool(lines.of("step:abandoned")), within=30)
            assert len(lines.of("step:failed")) == 1
            assert tries == [0, 1]
            (done,) = lines.of("inbox:command-executed")
            assert (done["command"], done["sender"], done["ok"]) == ("retry-boot-step", "w1", True)
            assert redis_client.exists(app.keys.inbox("w1")) == inbox  # what was read is kept for a while
            assert not lines.of("step:retry-send-failed")
            (reply,) = await app.control.asend("stats", to="w1") if inbox else (None,)
            assert reply is None or reply.answer["steps"]["cache"]["why"] == "ValueError: nothing there yet"
            if inbox:  # and by whoever else asks, again and again: no breaker ever says no
                for _ in range(4):
                    (reply,) = await app.control.asend("retry-boot-step", {"step": "cache"}, to="w1")
                    assert reply.answer == {"step": "cache", "tries": 1}
                    await until(lambda: len(lines.of("step:abandoned")) == len(tries) - 1, within=30)
                ready.set()
                await app.control.asend("retry-boot-step", {"step": "cache"}, to="w1")
                await until(lambda: bool(lines.of("step:started")))
                (reply,) = await app.control.asend("retry-boot-step", {"step": "cache"}, to="w1")
                assert (reply.ok, "is up" in reply.why) == (False, True)
    app.close()


async def test_a_service_that_sends_goes_on_after_an_outage(
    own_server: EmbeddedServer, app_name: str
) -> None:
    sent: list[float] = []
    policy = {"max_retries": 1, "backoff": 0.02, "cap": 0.1}

    async def send() -> None:
        while True:
            await noop.adelay()
            sent.append(trio.current_time())
            await trio.sleep(0.01)

    app = App(app_name, broker=own_server.url, services=[service(send, retry=policy)], backlog=0)

    @app.task
    async def noop() -> None: ...

    with Lines() as lines:
        async with working(app):
            await until(lambda: len(sent) > 3)
            own_server.kill()
            await until(lambda: len(lines.of("step:crashed")) > 3, within=30)
            assert BrokerUnavailable.__name__ in lines.of("step:crashed")[0]["why"] or (
                "CircuitOpen" in lines.of("step:crashed")[0]["why"]
            )
            own_server.revive()
            before = len(sent)
            await until(lambda: len(sent) > before + 3, within=30)
    app.close()
