"""Plans keep the graph and the options only: what a run has of its own is kept with the run, and goes with it."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import redis

from celery5 import App, chain, group
from celery5.broker.calls import workflows as calls
from celery5.errors import WorkflowFailed
from celery5.workflows import Flow, RunState
from celery5.workflows.compiler import compile_workflow
from celery5.workflows.staging import NewRun, stage
from tests.redis.worker.workers import until, working
from tests.redis.workflows.sample_tasks import QUEUES, SampleTasks

LONG = 3000 * "x"


class Shapes(SampleTasks):
    """Workflows of one shape each, with a number as what differs from run to run."""

    def __init__(self, app: App) -> None:
        super().__init__(app)

        @app.task(name="paint", limit=2, concurrency_key="room", fair_key="owner")
        async def paint(room: str, owner: str) -> str:
            return f"{room} {owner}"

        @app.task(name="note", undo=self.undo)
        async def note(number: int, *, text: str = "", more: int = 0) -> int:
            return number + len(text) + more

        @app.task(name="spread", dynamic=True)
        async def spread(number: int) -> Any:
            return chain(self.add.s(number, 1), self.add.s(number))

        @app.task(name="wide_sum")
        async def wide_sum(numbers: list[int], more: int) -> int:
            return sum(numbers) + more

        self.paint, self.note, self.spread, self.wide_sum = paint, note, spread, wide_sum


def in_an_hour(number: int) -> datetime:
    """Return a moment in the future, another one for each number."""
    return datetime.now(UTC) + timedelta(hours=1, seconds=number)


SHAPES: dict[str, Callable[[Shapes, int], tuple[Any, Any]]] = {
    "a call": lambda t, n: (t.add.s(n, 1), n + 1),
    "a chain": lambda t, n: (t.add.s(n, 1) | t.add.s(n) | t.add.s(other=n), 3 * n + 1),
    "keyword arguments": lambda t, n: (t.note.s(n, text=f"{n:03}", more=n), 2 * n + 3),
    "a text with quotes and line ends": lambda t, n: (t.note.s(1, text=f'"{n:03}\n\x01\x06'), 8),
    "a group with a body": lambda t, n: (
        group(t.add.s(n, k) for k in range(3)) | t.total.s(),
        3 * n + 3,
    ),
    "a body that reads its arguments": lambda t, n: (
        group(t.add.s(n, k) for k in range(20)) | t.wide_sum.s(n),
        21 * n + 190,
    ),
    "a map and a step": lambda t, n: (t.double.map([n, n + 1]) | t.wide_sum.s(n), 5 * n + 2),
    "a limit by keys": lambda t, n: (t.paint.s(f"room {n}", f"owner {n}"), f"room {n} owner {n}"),
    "a map with a limit by keys": lambda t, n: (t.paint.starmap([(f"r{n}", "o")]), [f"r{n} o"]),
    "a key": lambda t, n: (t.add.options(key=f"order-{n}").s(n, 1), n + 1),
    "a countdown": lambda t, n: (t.add.options(countdown=0.01 * n).s(n, 1), n + 1),
    "a time to expire": lambda t, n: (t.add.options(expires=60 + n).s(n, 1), n + 1),
    "a moment to expire": lambda t, n: (t.add.options(expires=in_an_hour(n)).s(n, 1), n + 1),
    "a map that expires": lambda t, n: (t.double.options(expires=in_an_hour(n)).map([n]), [2 * n]),
    "a map of later items that expires": lambda t, n: (
        group(t.add.s(n, k) for k in range(2)) | t.double.options(expires=in_an_hour(n)).map(),
        [2 * n, 2 * n + 2],
    ),
    "another queue": lambda t, n: (chain(t.double.s(n), t.add.s(n), t.add.s(n)), 4 * n),
    "a dynamic step": lambda t, n: (t.spread.s(n) | t.add.s(n), 3 * n + 1),
    "a task that is told of failures": lambda t, n: (
        t.add.options(on_failure=t.note.s(n, text=f"{n:03}")).s(n, 1),
        n + 1,
    ),
    "long arguments": lambda t, n: (t.note.s(n, text=f"{n:03}" + LONG), n + 3003),
}
"""What is started, and its value."""


@pytest.fixture
def tasks(app: App) -> Shapes:
    """The tasks of the application."""
    return Shapes(app)


def measure_plans(app: App, client: Any) -> tuple[int, int]:
    """Return how many plans there are, and the bytes of what they have."""
    sizes = [
        sum(len(name) + len(value) for name, value in client.hgetall(key).items())
        for queue in QUEUES
        for key in client.keys(app.queue(queue).plan_prefix.replace("[", "\\[") + "*")
    ]
    return len(sizes), sum(sizes)


@pytest.mark.parametrize("shape", SHAPES)
async def test_runs_of_one_shape_share_one_plan_whatever_their_arguments(
    app: App, tasks: Shapes, redis_client: "redis.Redis", shape: str
) -> None:
    async with working(app, queues=QUEUES):
        workflow, value = SHAPES[shape](tasks, 2)
        assert await (await workflow.astart()).aget() == value
        plans = measure_plans(app, redis_client)
        for number in (3, 4, 41):
            workflow, value = SHAPES[shape](tasks, number)
            assert await (await workflow.astart()).aget() == value
    assert measure_plans(app, redis_client) == plans


async def test_what_a_declared_workflow_says_itself_stands_in_its_plan(
    app: App, tasks: Shapes, redis_client: "redis.Redis"
) -> None:
    @app.workflow
    def order(flow: Flow, number: int) -> list[Any]:
        first = flow.call(tasks.add.options(countdown=0.01, expires=60), number, 1000)
        flow.wait_for("go")
        return [first, flow.call(tasks.note, first, text="text")]

    async with working(app, queues=QUEUES):
        runs = [await order.astart(number) for number in (1, 2)]
        idle = app.queue("default").idle_runs
        await until(lambda: redis_client.hlen(idle) == 2)
        for number, run in enumerate(runs, 1):
            assert b"text" not in redis_client.hgetall(idle)[run.id.encode()]
            assert await run.asignal("go")
            assert await run.aget() == [number + 1000, number + 1004]
    assert measure_plans(app, redis_client)[0] == 1


async def test_a_thousand_calls_of_a_group_leave_nothing_in_the_plan(
    app: App, tasks: Shapes, redis_client: "redis.Redis"
) -> None:
    async with working(app, queues=QUEUES):
        for first in (0, 5000):
            run = await group(tasks.add.s(first, number) for number in range(1000)).astart()
            assert await run.aget(30) == [first + number for number in range(1000)]
        arguments = app.queue(run.queue).run_arguments(run.id)
        assert redis_client.hlen(arguments) == 1000
        await until(lambda: redis_client.ttl(arguments) > 0)
    assert measure_plans(app, redis_client)[0] == 1


@pytest.mark.parametrize("size", [10, 3000])
async def test_a_run_that_waits_is_packed_however_long_its_arguments_are(
    app: App, tasks: Shapes, redis_client: "redis.Redis", size: int
) -> None:
    text = size * "x"
    async with working(app, queues=QUEUES):
        run = await chain(
            tasks.fail.options(on_error="hold").s(1), tasks.note.s(text=text), tasks.add.s(1)
        ).astart()
        keys = app.queue(run.queue)
        await until(lambda: bool(redis_client.hexists(keys.idle_runs, run.id)))
        assert (await run.astatus()).state is RunState.HELD
        assert redis_client.hstrlen(keys.idle_runs, run.id) < 300
        arguments = keys.run_arguments(run.id)
        assert redis_client.ttl(arguments) == (-1 if size > 1000 else -2)
        tasks.is_broken = False
        await app.dlq.areplay()
        assert await run.aget() == size + 2


async def test_a_retried_run_has_its_arguments_however_long_they_are(
    app: App, tasks: Shapes, redis_client: "redis.Redis"
) -> None:
    async with working(app, queues=QUEUES):
        run = await chain(tasks.fail.s(1), tasks.note.s(text=LONG), tasks.add.s(1)).astart()
        with pytest.raises(WorkflowFailed):
            await run.aget()
        arguments = app.queue(run.queue).run_arguments(run.id)
        await until(lambda: redis_client.ttl(arguments) > 0)
        tasks.is_broken = False
        await run.aretry()
        assert await run.aget() == len(LONG) + 2


async def test_a_run_whose_arguments_are_lost_fails_and_runs_nothing_without_them(
    app: App, tasks: Shapes, redis_client: "redis.Redis"
) -> None:
    async with working(app, queues=QUEUES):
        run = await chain(tasks.block.s(1), tasks.note.s(text=LONG)).astart()
        await tasks.begun.wait()
        redis_client.delete(app.queue(run.queue).run_arguments(run.id))
        tasks.gate.set()
        with pytest.raises(WorkflowFailed, match="argument of the run is lost"):
            await run.aget()


async def test_arguments_that_were_published_are_left_alone_once_their_run_is_live(
    app: App, tasks: Shapes, redis_client: "redis.Redis"
) -> None:
    driver, keys = await app.connections.get_async_driver(), app.queue("default")
    new_run = NewRun(run_id="run-1", name="run", life=60.0)
    record = await stage(driver, keys, compile_workflow(tasks.note.s(1, text=LONG).tree), new_run)
    assert record is not None
    assert 0 < redis_client.ttl(keys.run_arguments("run-1")) <= 120
    await driver.perform(calls.advance(keys, [record], ttl=60.0))
    kept = redis_client.hgetall(keys.run_arguments("run-1"))
    other = compile_workflow(tasks.note.s(2, text="y" + LONG).tree)
    assert await stage(driver, keys, other, new_run) is None
    assert redis_client.hgetall(keys.run_arguments("run-1")) == kept
    assert redis_client.ttl(keys.run_arguments("run-1")) == -1


@pytest.mark.parametrize("text", ["", LONG])
async def test_a_plan_that_redis_has_lost_is_published_again_with_the_next_start(
    app: App, tasks: Shapes, redis_client: "redis.Redis", text: str
) -> None:
    async with working(app, queues=QUEUES):
        for number in (1, 2):
            run = await tasks.note.s(number, text=text).astart()
            assert await run.aget() == number + len(text)
            (plan,) = redis_client.keys(app.queue(run.queue).plan_prefix + "*")
            redis_client.delete(plan)
        doubled = await tasks.double.map([1, 2]).astart()
        assert await doubled.aget() == [2, 4]


async def test_a_plan_is_published_once_by_a_process(
    app: App, tasks: Shapes, redis_client: "redis.Redis"
) -> None:
    await tasks.add.s(1, 2).astart()
    before = redis_client.info("commandstats").get("cmdstat_hset", {"calls": 0})["calls"]
    await tasks.add.s(3, 4).astart()
    stats = redis_client.info("commandstats")
    # The run, and the place of its job.
    assert stats["cmdstat_hset"]["calls"] - before == 2


def test_an_argument_of_a_long_list_is_read_alone(app: App, redis_client: "redis.Redis") -> None:
    keys = app.queue("default")
    redis_client.hset(keys.run("r1"), mapping={"def": "d1", "args": 40})
    redis_client.hset(f"{keys.run('r1')}:args", "5", "7")
    for key in (keys.run("r1"), f"{keys.run('r1')}:args"):
        redis_client.expire(key, 60)
    assert app.perform(calls.read_run(keys, "r1", ["arg:5"])) == {"arg:5": b"7"}
