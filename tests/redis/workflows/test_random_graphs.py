"""Random workflows over four queues come to what a reference interpreter says."""

import os
import random
from typing import Any

import pytest
import redis
import trio

from celery5 import App, RetryPolicy, chain, first, fork, group
from celery5.broker.servers.embedded import EmbeddedServer
from celery5.errors import WorkflowFailed
from celery5.protocol.workflows.plan import OnError
from celery5.workflows.compose import Workflow
from celery5.workflows.tree import describe
from tests.night import NIGHTLY
from tests.redis.worker.workers import working
from tests.redis.workflows.reference import Reference, RunFails, digest, plain

SEEDS = range(*map(int, os.environ.get("CELERY5_WORKFLOW_SEEDS", "0:300" if NIGHTLY else "0:150").split(":")))
AT_ONCE = 40
SETTINGS: dict[str, Any] = {
    "concurrency": 200,
    "retry_policy": RetryPolicy(max_retries=0),
    "results_ttl": 60,
    "unknown_task_grace": 0.0,
}
QUEUES = ("one", "two", "three", "four")
POLICIES: tuple[OnError | None, ...] = (None, None, None, "skip", "continue")


def mix(value: Any = 0, other: int = 0) -> int:
    """Return a number that depends on both arguments."""
    return digest(value, other)


def risk(value: Any = 0, other: int = 0) -> int:
    """Return a number like `mix`; fail for some arguments."""
    number = digest(value, other)
    if number % 4 == 0:
        raise ValueError(number)
    return number


def spread(value: Any = 0, other: int = 0) -> list[int]:
    """Return a list of up to four numbers."""
    number = digest(value, other)
    return [number + n for n in range(number % 5)]


class Graphs:
    """Makes random workflows of three tasks."""

    def __init__(self, app: App) -> None:
        self.functions: dict[str, Any] = {}
        self.tasks = {function.__name__: self._declare(app, function) for function in (mix, risk, spread)}
        self.dynamic = self._declare_dynamic(app)

    def _declare(self, app: App, function: Any) -> Any:
        async def run(value: Any = 0, other: int = 0) -> Any:
            return function(value, other)

        self.functions[function.__name__] = function
        return app.task(name=function.__name__, max_retries=0)(run)

    def _declare_dynamic(self, app: App) -> Any:
        mixed: Any = self.tasks["mix"].options(queue="one")

        def grow(value: Any = 0, other: int = 0) -> Any:
            number = digest(value, other)
            if number % 3 == 0:
                return number
            return group(mixed.s(number, n) for n in range(number % 4)) | mixed.partial(other)

        async def run(value: Any = 0, other: int = 0) -> Any:
            return grow(value, other)

        self.functions["grow"] = grow
        return app.task(name="grow", max_retries=0, dynamic=True)(run)

    def make(self, rnd: random.Random) -> Workflow[Any]:
        """Return a random workflow."""
        workflow: Workflow[Any] = self._step(rnd, 4, False)
        return workflow

    def _task(self, rnd: random.Random) -> Any:
        name = rnd.choice(("mix", "mix", "mix", "risk", "grow"))
        task = self.dynamic if name == "grow" else self.tasks[name]
        options: dict[str, Any] = {"queue": rnd.choice(QUEUES)}
        if rnd.random() < 0.2:
            options["on_error"] = rnd.choice(("skip", "continue"))
        if rnd.random() < 0.1:
            options["ignore"] = {"DEAD"}
        return task.options(**options)

    def _step(self, rnd: random.Random, depth: int, is_partial: bool) -> Any:
        if depth == 0 or rnd.random() < 0.3:
            return self._call(rnd, is_partial)
        kind = rnd.choice(("chain", "chain", "group", "fork", "first", "map", "order"))
        if kind == "chain":
            steps = [self._step(rnd, depth - 1, is_partial)]
            steps += [self._step(rnd, depth - 1, True) for _ in range(rnd.randrange(3))]
            return chain(*steps)
        if kind == "order":
            before = self._step(rnd, depth - 1, is_partial)
            return before >> self._step(rnd, depth - 1, False)
        if kind == "map":
            return self._map(rnd, is_partial)
        if kind == "fork" and is_partial:
            return fork(*(self._step(rnd, depth - 1, True) for _ in range(rnd.randrange(1, 4))))
        if kind == "first" and not is_partial:
            # Only one of them can succeed: which one is first would depend on the time.
            return first(self._call(rnd, False), on_error=rnd.choice(POLICIES))
        members = [self._step(rnd, depth - 1, is_partial) for _ in range(rnd.randrange(1, 4))]
        need = rnd.choice((None, None, 0.5, 1.0))
        return group(*members, on_error=rnd.choice(POLICIES), need=need)

    def _call(self, rnd: random.Random, is_partial: bool) -> Any:
        task, other = self._task(rnd), rnd.randrange(100)
        return task.partial(other) if is_partial else task.s(rnd.randrange(100), other)

    def _map(self, rnd: random.Random, is_partial: bool) -> Any:
        task: Any = self.tasks[rnd.choice(("mix", "risk"))].options(queue=rnd.choice(QUEUES))
        options: dict[str, Any] = {
            "at_once": rnd.choice((None, 1, 2)),
            "need": rnd.choice((None, None, 0.5)),
            "on_error": rnd.choice(POLICIES),
        }
        kind = rnd.choice(("map", "map", "starmap", "chunks"))
        if is_partial:
            spreading: Any = self.tasks["spread"].options(queue=rnd.choice(QUEUES)).partial(rnd.randrange(9))
            mapped = task.chunks(n=2, **options) if kind == "chunks" else task.map(**options)
            return chain(spreading, mapped)
        items = [rnd.randrange(100) for _ in range(rnd.randrange(6))]
        if kind == "chunks":
            return task.chunks(items, rnd.randrange(1, 4), **options)
        if kind == "starmap":
            return task.starmap([(item, 1) for item in items], **options)
        return task.map(items, **options)


def expect(graphs: Graphs, workflow: Workflow[Any]) -> Any:
    """Return what a workflow must come to; RunFails when the run must fail."""
    try:
        return Reference(graphs.functions).run(workflow.tree)
    except RunFails:
        return RunFails


async def come_to(app: App, workflow: Workflow[Any]) -> Any:
    """Return what a workflow comes to."""
    run = await app.workflows.astart(workflow)
    try:
        return plain(await run.aget(timeout=30))
    except WorkflowFailed:
        return RunFails
    except Exception as error:
        return f"{type(error).__name__}: {error}"


async def check_all(app: App, seeds: range) -> None:
    """Run random workflows, and compare what they come to with what the reference says."""
    graphs = Graphs(app)
    limiter, wrong = trio.CapacityLimiter(AT_ONCE), list[str]()

    async def check(seed: int) -> None:
        async with limiter:
            workflow = graphs.make(random.Random(seed))
            wanted = expect(graphs, workflow)
            found = await come_to(app, workflow)
            if found != (wanted if wanted is RunFails else plain(wanted)):
                wrong.append(f"seed {seed}: {found!r}, not {wanted!r}: {describe(workflow.tree)}")

    async with working(app, queues=QUEUES), trio.open_nursery() as nursery:
        for seed in seeds:
            nursery.start_soon(check, seed)
    assert not wrong, f"{len(wrong)} of {len(seeds)} are wrong; the first:\n" + "\n".join(wrong[:10])
    app.close()


@pytest.mark.timeout(1200)
async def test_random_workflows_come_to_what_the_reference_says(
    url: str, app_name: str, redis_client: "redis.Redis"
) -> None:
    await check_all(App(app_name, broker=url, **SETTINGS), SEEDS)


@pytest.mark.timeout(600)
async def test_random_workflows_over_three_servers_come_to_what_the_reference_says(
    url: str, app_name: str, server_binary: str | None
) -> None:
    with EmbeddedServer.start(server_binary) as second, EmbeddedServer.start(server_binary) as third:
        brokers = {"second": second.url, "third": third.url}
        routes = {"two": "second", "three": "third"}
        await check_all(
            App(app_name, broker=url, brokers=brokers, routes=routes, **SETTINGS), SEEDS[: len(SEEDS) // 2]
        )
