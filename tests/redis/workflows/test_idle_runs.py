"""Runs that only wait are kept packed: they take little memory, and nobody sees a difference."""

from contextlib import closing
from importlib.resources import files
from typing import Any

import pytest
import redis
import trio

from celery5 import App
from celery5.broker.servers.embedded import EmbeddedServer
from celery5.errors import WorkflowCancelled, WorkflowExpired
from celery5.workflows import Flow, NodeState, RunState, WorkflowRun
from tests.redis.memory import stored_bytes
from tests.redis.worker.workers import until, working
from tests.redis.workflows.sample_tasks import QUEUES, SampleTasks

DAY = 86400.0
SLEEPERS = 2000
ALLOWED_BYTES = 300
"""Bytes of Redis that a sleeping run may take."""

ODD_FIELDS: dict[str, str | bytes] = {
    "def": "dGhlIGRpZ2VzdA==",
    "state": "live",
    "created": "1795517323886",
    "done": "007",
    "bad": "-1",
    "wakes": b"\x91\x92\xcf\x00\x00\x01\xa2\xa7\xaa\xe2n\x01",
    "node:0": "done",
    "node:41": "waiting 3",
    "node:1000000": "waiting",
    "value:2": "1e3",
    "value:3": '"live"',
    "value:4": "999999999999999",
    "value:5": "1000000000000000",
    "value:6": "12345678901234567890",
    "value:7": "",
    "left:3": "1",
    "kept:node:1": "done",
    "kept:grün": '"grün"',
    "total:2": "300",
}


@pytest.fixture
def tasks(app: App) -> SampleTasks:
    """The tasks of the application."""
    return SampleTasks(app)


def is_idle(app: App, client: Any, run: WorkflowRun[Any]) -> bool:
    """Return whether a run is among the idle ones. It is never there and in its own hash."""
    keys = app.queue(run.queue)
    idle, own = client.hexists(keys.idle_runs, run.id), client.exists(keys.run(run.id))
    assert not (idle and own)
    return bool(idle)


@pytest.mark.parametrize("calls_before", [False, True])
def test_a_run_that_sleeps_takes_at_most_300_bytes(
    own_server: EmbeddedServer, app_name: str, *, calls_before: bool
) -> None:
    with closing(App(app_name, broker=own_server.url)) as app, redis.Redis.from_url(own_server.url) as client:

        @app.task
        async def charge(order: int) -> int:
            return order

        @app.workflow(name="shop.workflows.remind_customer", deadline=60 * DAY)
        def remind(flow: Flow, order: int) -> None:
            paid = flow.call(charge, order) if calls_before else order
            flow.sleep(30 * DAY)
            flow.call(charge, paid)

        keys = app.queue("default")

        async def start(first: int, last: int) -> None:
            async with trio.open_nursery() as nursery:
                for order in range(first, last):
                    nursery.start_soon(remind.astart, order)
            await until(lambda: client.hlen(keys.idle_runs) == last)

        async def main() -> float:
            async with working(app):
                await start(0, 100)
                before = stored_bytes(client, app)
                await start(100, 100 + SLEEPERS)
                await until(lambda: not client.xlen(keys.stream) and not client.exists(keys.jobs))
                return (stored_bytes(client, app) - before) / SLEEPERS

        assert trio.run(main) <= ALLOWED_BYTES


def test_every_field_of_a_run_is_the_same_when_it_was_packed(redis_client: "redis.Redis") -> None:
    library = files("celery5.broker").joinpath("lua", "lib", "idle_runs.lua").read_text()
    script = f"""{library}
    local fields = {{missing = false}}
    for n = 1, #ARGV, 2 do fields[ARGV[n]] = ARGV[n + 1] end
    -- what a script has just counted is a number
    fields['until'], fields.held, fields.active, fields.skipped = 1800701323886, 2, 0, '0'
    local flat = {{}}
    for name, value in pairs(unpack_run(pack_run(fields))) do
      flat[#flat + 1], flat[#flat + 2] = name, value
    end
    return flat"""
    words: list[str | bytes] = [word for pair in ODD_FIELDS.items() for word in pair]
    flat: Any = redis_client.eval(script, 0, *words)
    found = dict(zip(flat[::2], flat[1::2], strict=True))
    expected = {**ODD_FIELDS, "until": "1800701323886", "held": "2"}
    assert found == {
        name.encode(): value if isinstance(value, bytes) else value.encode()
        for name, value in expected.items()
    }


async def test_an_idle_run_is_seen_as_any_other(
    app: App, tasks: SampleTasks, redis_client: "redis.Redis"
) -> None:
    @app.workflow(name="naps")
    def nap(flow: Flow, number: int) -> int:
        one = flow.call(tasks.add, number, 1)
        flow.sleep(DAY)
        return flow.call(tasks.add, one, 1)

    async with working(app, queues=QUEUES):
        run = await nap.astart(4)
        await until(lambda: is_idle(app, redis_client, run))
        status = await run.astatus()
        assert (status.name, status.state, status.total, status.done) == ("naps", RunState.RUNNING, 3, 1)
        assert (status.pending, status.active, status.error) == (2, 0, "")
        assert status.deadline is not None
        assert status.deadline - status.created == pytest.approx(30 * DAY)
        graph = await run.agraph()
        assert [node.state for node in graph.nodes] == [
            NodeState.SUCCESS,
            NodeState.WAITING,
            NodeState.PENDING,
        ]
        assert await app.workflows.alist_runs() == [status]
        found = await app.workflows.afind(run.id)
        assert found == run
        assert (await app.ainfo()).runs == 1
        assert await run.acancel()
        assert not is_idle(app, redis_client, run)
        assert (await run.astatus()).state is RunState.CANCELLED
        assert (await run.astatus()).name == "naps"
        assert redis_client.pttl(app.queue(run.queue).run(run.id)) > 0
        with pytest.raises(WorkflowCancelled):
            await run.aget()


async def test_an_idle_run_takes_signals_and_goes_on(
    app: App, tasks: SampleTasks, redis_client: "redis.Redis"
) -> None:
    @app.workflow
    def order(flow: Flow, number: int) -> list[int]:
        flow.wait_for("paid")
        flow.sleep(0.2)
        flow.wait_for("packed")
        total = flow.call(tasks.add, number, 1)
        return [total, number]

    async with working(app, queues=QUEUES):
        run = await order.astart(7)
        assert is_idle(app, redis_client, run)
        assert await run.asignal("packed", id="early")
        assert is_idle(app, redis_client, run)
        assert await run.asignal("packed", id="early")
        assert await run.asignal("paid")
        assert await run.aget() == [8, 7]
        assert redis_client.hlen(app.queue(run.queue).idle_runs) == 0


async def test_an_idle_run_expires_and_is_retried(
    app: App, tasks: SampleTasks, redis_client: "redis.Redis"
) -> None:
    @app.workflow(deadline=0.3)
    def late(flow: Flow) -> int:
        number = flow.call(tasks.add, 1, 1)
        flow.wait_for("go")
        return flow.call(tasks.add, number, 1)

    async with working(app, queues=QUEUES):
        run = await late.astart()
        with pytest.raises(WorkflowExpired):
            await run.aget()
        for _ in range(2):  # a second retry has the same time as the first one
            await run.aretry()
            assert is_idle(app, redis_client, run)
            status = await run.astatus()
            assert status.deadline is not None
            assert redis_client.ttl(app.queue(run.queue).run(run.id)) == -2
            with pytest.raises(WorkflowExpired):
                await run.aget()
        await run.aretry()
        assert await run.asignal("go")
        assert await run.aget() == 3
    assert tasks.count("add") == 2


async def test_an_idle_run_is_started_once(app: App, tasks: SampleTasks, redis_client: "redis.Redis") -> None:
    @app.workflow
    def doubled(flow: Flow) -> list[int]:
        flow.wait_for("go")
        return flow.map(tasks.double, [1, 2, 3])

    async with working(app, queues=QUEUES):
        for is_new in (True, False, False):
            run = await doubled.options(id="doubled-1").astart()
            assert run.is_new is is_new
            assert is_idle(app, redis_client, run)
        assert (await run.astatus()).total == 4
        assert await run.asignal("go")
        assert await run.aget() == [2, 4, 6]
    assert tasks.count("double") == 3


async def test_a_run_with_many_fields_waits_in_a_hash_of_its_own(
    app: App, tasks: SampleTasks, redis_client: "redis.Redis"
) -> None:
    @app.workflow
    def wide(flow: Flow) -> int:
        with flow.parallel():
            numbers = [flow.call(tasks.add, number, 0) for number in range(60)]
        flow.wait_for("go")
        return flow.call(tasks.total, numbers)

    async with working(app, queues=QUEUES):
        run = await wide.astart()
        assert is_idle(app, redis_client, run) is False
        await until(lambda: tasks.count("add") == 60)
        assert await run.asignal("go")
        assert await run.aget() == sum(range(60))


async def test_a_run_with_a_long_value_waits_in_a_hash_of_its_own(
    app: App, tasks: SampleTasks, redis_client: "redis.Redis"
) -> None:
    @app.task
    async def write(size: int) -> str:
        return size * "x"

    @app.workflow
    def order(flow: Flow, note: str) -> list[str]:
        text = flow.call(write, 5000)
        flow.wait_for("go")
        return [flow.wait_for("note"), note, text]

    async with working(app, queues=QUEUES):
        run = await order.astart("short")
        await until(lambda: redis_client.hexists(app.queue(run.queue).run(run.id), "waiting:go"))
        assert await run.asignal("go")
        assert not is_idle(app, redis_client, run)
        assert await run.asignal("note", "there")
        assert await run.aget() == ["there", "short", 5000 * "x"]
        idle = await order.astart(5000 * "y")
        await until(lambda: redis_client.hexists(app.queue(idle.queue).run(idle.id), "waiting:go"))


async def test_a_run_that_waits_for_a_dead_letter_is_idle(
    app: App, tasks: SampleTasks, redis_client: "redis.Redis"
) -> None:
    async with working(app, queues=QUEUES):
        run = await tasks.fail.options(on_error="hold").s(1).astart()
        await until(lambda: is_idle(app, redis_client, run))
        assert (await run.astatus()).state is RunState.HELD
        tasks.is_broken = False
        await app.dlq.areplay()
        assert await run.aget() == 1
