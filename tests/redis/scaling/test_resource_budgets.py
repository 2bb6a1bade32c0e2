"""What tasks take of a worker's capacity: jobs begin only where it fits, and give it back however they end."""

import json
import signal
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any

import click
import pytest
import trio
from click.testing import CliRunner

from celery5 import App, JobState, TaskFailed, agather, current_job
from celery5.cli.main import cli
from celery5.protocol.job.story import explain_awaited_code
from celery5.protocol.scaling.budget import Budget
from celery5.protocol.scaling.resource_budget import ResourceUse, read_use, show_use
from celery5.tasks import INJECTED, Resource
from tests.redis.commands.staff import Staff, wait_until
from tests.redis.worker.workers import LEASE, Lines, held, start, until_async, working

CAPACITY = {"gpu": 2, "vram_gb": 16}


class Meter:
    """What jobs hold at once, and the most of it; which GPUs they have."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.now: Counter[str] = Counter()
        self.most: Counter[str] = Counter()
        self.order: list[str] = []
        self.clashes = 0
        self._devices: Counter[int] = Counter()

    def begin(self) -> None:
        job = current_job()
        assert job is not None
        with self._lock:
            self.order.append(job.task)
            self.now["jobs"] += 1
            for name, amount in job.resources.items():
                self.now[name] += amount  # type: ignore[assignment]
            for device in job.devices:
                self._devices[device] += 1
                self.clashes += self._devices[device] > 1
            self.most = self.most | self.now

    def end(self) -> None:
        job = current_job()
        assert job is not None
        with self._lock:
            self.now["jobs"] -= 1
            for name, amount in job.resources.items():
                self.now[name] -= amount  # type: ignore[assignment]
            self._devices.subtract(job.devices)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        self.begin()
        try:
            yield
        finally:
            self.end()


@pytest.fixture
def meter() -> Meter:
    return Meter()


@pytest.fixture
def app(url: str, app_name: str) -> Iterator[App]:
    app = App(app_name, broker=url, lease=LEASE, capacity=CAPACITY, concurrency=20, cpu_slots=16)
    yield app
    app.close()


def declare(app: App, meter: Meter, kind: str, name: str, seconds: float = 0.01, **options: Any) -> Any:
    """Declare a task of a kind that takes some time, and notes what it has."""
    if kind == "thread":

        @app.task(name=name, **options)  # type: ignore[untyped-decorator]
        def busy(n: int) -> int:
            meter.begin()
            time.sleep(seconds)
            meter.end()
            return n

        return busy

    @app.task(name=name, loop=kind, **options)  # type: ignore[call-overload, untyped-decorator]
    async def waits(n: int) -> int:
        import asyncio

        async with meter.running():
            await (trio.sleep if kind == "trio" else asyncio.sleep)(seconds)
        return n

    return waits


@pytest.mark.parametrize("kind", ["trio", "asyncio", "thread"])
async def test_jobs_begin_only_where_what_they_take_fits(app: App, meter: Meter, kind: str) -> None:
    task = declare(app, meter, kind, "train", resources={"gpu": 1, "vram_gb": 7.5})
    async with working(app):
        sent = await app.asend_many([task.s(n) for n in range(20)])
        assert await agather(list(sent), timeout=20) == list(range(20))
    assert meter.most["jobs"] == 2
    assert meter.clashes == 0, "no two jobs have had the same GPU"


async def test_tasks_of_different_kinds_share_one_capacity(app: App, meter: Meter) -> None:
    tasks = [
        declare(app, meter, kind, f"of_{kind}", 0.003, resources={"vram_gb": size})
        for kind, size in (("trio", 6), ("asyncio", 5), ("thread", 10))
    ]
    plain = declare(app, meter, "trio", "plain", 0.0)
    async with working(app):
        sent = await app.asend_many([task.s(n) for n in range(10) for task in (*tasks, plain)])
        await agather(list(sent), timeout=20)
    assert meter.most["vram_gb"] <= 16
    assert meter.most["vram_gb"] > 10, "what fits runs beside each other"


async def test_jobs_of_several_queues_share_one_capacity(app: App, meter: Meter) -> None:
    queues = ("default", "other")
    task = declare(app, meter, "thread", "train", 0.003, resources={"gpu": 1})
    async with working(app, queues=queues):
        calls = [task.options(queue=queue).s(n) for n in range(10) for queue in queues]
        await agather(list(await app.asend_many(calls)), timeout=20)
    assert meter.most["jobs"] == 2
    assert meter.clashes == 0


async def test_a_large_job_is_not_starved_by_small_ones_that_fit(app: App, meter: Meter) -> None:
    @app.task(name="small", resources={"vram_gb": 4})
    async def small(n: int) -> None:
        async with meter.running():
            await trio.sleep(0.005 * (1 + n % 7))  # they never end all at once

    large = declare(app, meter, "trio", "large", 0.0, resources={"vram_gb": 16})
    async with working(app):
        first = await app.asend_many([small.s(n) for n in range(6)])
        result = await large.adelay(0)
        others = await app.asend_many([small.s(n) for n in range(150)])
        assert await result.aget(timeout=20) == 0
        await agather([*first, *others], timeout=20)
    assert meter.order.index("large") < 60, "many small ones came after it"
    assert meter.most["vram_gb"] == 16


async def test_other_jobs_go_on_while_those_that_do_not_fit_wait(app: App, meter: Meter) -> None:
    go = trio.Event()

    @app.task(name="held", resources={"gpu": 2})
    async def hold() -> None:
        await go.wait()

    plain = declare(app, meter, "trio", "plain", 0.0)
    async with working(app):
        holding = await hold.adelay()

        async def begun() -> bool:
            return await holding.astatus() is JobState.EXECUTING

        await until_async(begun)
        waiting = await app.asend_many([hold.s() for _ in range(60)])
        others = await app.asend_many([plain.s(n) for n in range(60)])
        assert await agather(list(others), timeout=20) == list(range(60))
        go.set()
        await agather([holding, *waiting], timeout=20)


async def fail() -> None:
    raise ValueError


ENDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "success": (trio.lowlevel.checkpoint, {}),
    "failure": (fail, {"max_retries": 0}),
    "retry": (fail, {"retry_policy": {"max_retries": 1, "backoff": 0.01}}),
    "cancel": (trio.sleep_forever, {}),
    "time-limit": (trio.sleep_forever, {"time_limit": 0.1, "max_retries": 0}),
}


def declare_next(app: App) -> Any:
    """Declare a task that takes all GPUs."""

    @app.task(name="next", resources={"gpu": 2})
    async def following() -> int:
        return 7

    return following


@pytest.mark.parametrize("end", ENDS)
async def test_what_a_job_takes_is_returned_however_it_ends(app: App, end: str) -> None:
    act, options = ENDS[end]

    @app.task(name="first", resources={"gpu": 2}, **options)  # type: ignore[untyped-decorator]
    async def first() -> None:
        await act()

    following = declare_next(app)
    async with working(app):
        sent = await first.adelay()
        if end == "cancel":

            async def begun() -> bool:
                return await sent.astatus() is JobState.EXECUTING

            await until_async(begun)
            await sent.arevoke()
        assert await (await following.adelay()).aget(timeout=10) == 7


async def test_an_abandoned_thread_keeps_what_it_has_taken_until_it_ends(app: App) -> None:
    release = threading.Event()

    @app.task(name="first", resources={"gpu": 2}, time_limit=0.1, abandon_on_cancel=True, max_retries=0)
    def first() -> None:
        release.wait()

    following = declare_next(app)
    async with working(app):
        with pytest.raises(TaskFailed):
            await (await first.adelay()).aget(timeout=10)
        second = await following.adelay()
        with pytest.raises(TimeoutError):
            await second.aget(timeout=0.3)
        release.set()
        assert await second.aget(timeout=10) == 7


async def test_a_worker_without_a_resource_leaves_its_jobs_to_one_that_has_it(
    url: str, app_name: str, redis_client: Any
) -> None:
    runs: list[str] = []

    def make(capacity: Any) -> tuple[App, Any]:
        app = App(app_name, broker=url, lease=LEASE, capacity=capacity, unknown_task_grace=0.2)

        @app.task(name="train", resources={"gpu": 1})
        async def train(n: int) -> int:
            runs.append(capacity and "gpu")
            return n

        return app, train

    (plain, task), (able, _) = make(""), make({"gpu": 1})
    async with trio.open_nursery() as nursery:
        without = await start(nursery, plain, name="without")
        sent = await plain.asend_many([task.s(n) for n in range(10)])

        async def all_wait() -> bool:
            return all([await job.astatus() is JobState.HELD for job in sent])

        await until_async(all_wait)
        assert not any(held(redis_client, plain).values()), "it keeps none of them"
        await trio.sleep(0.5)  # longer than the grace period of unknown tasks
        assert await all_wait(), "they wait, however long"
        having = await start(nursery, able, name="having")
        assert await agather(list(sent), timeout=20) == list(range(10))
        await having.stop()
        await without.stop()
    assert runs == ["gpu"] * 10
    for app in (plain, able):
        app.close()


def test_the_jobs_of_a_killed_worker_run_where_there_is_a_gpu(staff: Staff, tmp_path: Path) -> None:
    door = tmp_path / "door"
    first = staff.start(capacity="gpu=2")
    sent = staff.app.send_many([staff.app.signature("gate_gpu", str(door)) for _ in range(4)])
    wait_until(lambda: len(staff.notes("begin")) == 2)
    staff.start("--concurrency", "50")
    first.signal(signal.SIGKILL)
    able = staff.start(capacity="gpu=1")
    wait_until(lambda: len(staff.notes("begin")) == 3)
    door.touch()
    assert {job.get(timeout=30) for job in sent} == {able.process.pid}


async def test_a_task_with_a_budget_of_its_own_keeps_to_both(url: str, app_name: str, meter: Meter) -> None:
    app = App(app_name, broker=url, budgets={"pictures.train": Budget(maximum=2)}, capacity={"vram_gb": 3})
    task = declare(app, meter, "trio", "pictures.train", resources={"vram_gb": 1})
    wide = declare(app, meter, "trio", "wide", resources={"vram_gb": 2})
    async with working(app):
        sent = await app.asend_many([declared.s(n) for n in range(20) for declared in (task, wide)])
        await agather(list(sent), timeout=20)
    assert meter.most["vram_gb"] <= 3
    assert meter.most["jobs"] <= 3
    app.close()


class Models:
    """Models that are opened and closed, with the most that were open at once."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.open = 0
        self.most = 0
        self.used: Counter[str] = Counter()
        self.faults: list[str] = []

    def make(self, name: str, size: float) -> Any:
        """Return a resource."""

        async def load() -> AsyncIterator[str]:
            self.notes.append(f"+{name}")
            self.open += 1
            self.most = max(self.most, self.open)
            yield name
            if self.used[name]:
                self.faults.append(f"{name} is closed while it is used")
            await trio.sleep(0.005)
            self.open -= 1
            self.notes.append(f"-{name}")

        load.__name__ = name
        return Resource(load, size={"vram_gb": size})


async def test_a_model_is_opened_once_and_evicted_when_another_needs_its_space(app: App) -> None:
    models, tasks = Models(), list[Any]()
    for name in ("a", "b", "c"):

        def declare_one(name: str, resource: Any) -> Any:
            @app.task(name=f"use_{name}", resources={"vram_gb": 1})
            async def use(n: int, model: Annotated[str, resource] = INJECTED) -> str:
                models.used[model] += 1
                await trio.sleep(0.002)
                models.used[model] -= 1
                return model

            return use

        tasks.append(declare_one(name, models.make(name, 6)))
    a, b, c = tasks
    async with working(app):
        for task, name in ((a, "a"), (b, "b"), (a, "a")):
            assert await (await task.adelay(0)).aget(timeout=10) == name
        assert models.notes == ["+a", "+b"], "both fit, and each is opened once"
        assert await (await c.adelay(0)).aget(timeout=10) == "c"
        assert models.notes == ["+a", "+b", "-b", "+c"], "the one used least recently"
        sent = await app.asend_many([task.s(n) for n in range(30) for task in tasks])
        assert Counter(await agather(list(sent), timeout=30)) == Counter({"a": 30, "b": 30, "c": 30})
    assert models.most == 2
    assert not models.faults
    assert models.open == 0, "all are closed at the end"


async def test_jobs_of_many_tasks_with_many_resources_all_run(url: str, app_name: str, meter: Meter) -> None:
    names = [f"r{n}" for n in range(30)]
    app = App(app_name, broker=url, lease=LEASE, capacity=dict.fromkeys(names, 1))
    tasks = [
        declare(app, meter, "trio", f"t{n}", 0.0, resources={name: 0.4, names[n - 1]: 0.4})
        for n, name in enumerate(names)
    ]
    async with working(app):
        sent = await app.asend_many([task.s(n) for n in range(3) for task in tasks])
        await agather(list(sent), timeout=30)
    assert all(meter.most[name] <= 1.0001 for name in names)
    app.close()


async def test_capacity_and_its_use_are_the_same_on_every_surface(url: str, app_name: str) -> None:
    app = App(
        app_name, broker=url, capacity={"gpu": 2, "vram_gb": 24}, metrics_interval=0.2, inbox_signatures=False
    )
    go = trio.Event()

    @app.task(name="train", resources={"gpu": 1, "vram_gb": 7.5})
    async def train() -> None:
        await go.wait()

    use = {"gpu": ResourceUse(2, 1), "vram_gb": ResourceUse(24, 7.5)}
    async with working(app):
        sent = await train.adelay()

        async def reported() -> bool:
            return [worker.resources for worker in (await app.metrics.aworkers()).workers] == [use]

        await until_async(reported)
        (reply,) = await app.control.asend("stats")
        assert read_use(reply.answer["resources"]) == use
        assert show_use(use) == "gpu 1 of 2, vram_gb 7.5 of 24"
        listed = await trio.to_thread.run_sync(run_cli, app, ["worker", "list"])
        assert "gpu 1 of 2, vram_gb 7.5 of 24" in listed
        (row,) = json.loads(await trio.to_thread.run_sync(run_cli, app, ["worker", "list", "--json"]))
        assert row["resources"]["vram_gb"] == {"has": 24, "taken": 7.5}
        go.set()
        await sent.aget(timeout=10)
    app.close()


async def test_a_task_that_waits_for_a_resource_is_named_on_every_surface(url: str, app_name: str) -> None:
    app = App(app_name, broker=url, lease=LEASE, capacity={"gpu": 1}, inbox_signatures=False)

    @app.task(name="train", resources={"gpus": 1})
    async def train() -> None: ...

    line = "2 jobs wait for a worker with gpus 1 that train takes"
    with Lines() as lines:
        async with working(app):
            sent = list(await app.asend_many([train.s(), train.s()]))

            async def waits() -> bool:
                return (await app.ainfo()).queues["default"].lacks == line

            await until_async(waits)
            assert line in await trio.to_thread.run_sync(run_cli, app, ["info"])
            assert line in await trio.to_thread.run_sync(run_cli, app, ["doctor"])
            overview = await app.metrics.aoverview()
            assert [queue.lacks for queue in overview.queues if queue.lacks] == [line]
            details = await app.afind(sent[0].id)
            assert details is not None
            assert "resources that train takes" in explain_awaited_code(details, "then")
    (warning,) = lines.of("worker:resources-lacking")
    assert warning["why"] == "train takes gpus 1 (it has 0)"
    assert warning["hint"] == "gpus: did you mean 'gpu'?"
    app.close()


class Loaded:
    """An application that a command need not load."""

    name = app_name = other = ""

    def __init__(self, app: App) -> None:
        self._app = app

    def load(self, *, serves: bool = False, needs_code: bool = False) -> App:
        """Return it."""
        return self._app


def run_cli(app: App, words: list[str]) -> str:
    """Run a command for an application, and return what it prints."""
    command = cli.get_command(click.Context(cli), words[0])
    assert command is not None
    return CliRunner().invoke(command, words[1:], obj=Loaded(app)).output
