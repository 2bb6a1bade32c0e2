"""Declared workflows: what a function describes, what it must not do, and what its runs wait for."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import pytest
import redis

from celery5 import App, Event, current_job
from celery5.broker.calls.workflows import read_run
from celery5.errors import BadArguments, Misconfigured, WorkflowFailed
from celery5.processes.router import ROUTER
from celery5.workflows import Flow, NodeState, RunState, WorkflowRun
from tests.redis.worker.workers import until, until_async, working
from tests.redis.workflows.sample_tasks import QUEUES, SampleTasks


@dataclass
class Payment:
    """What has been paid."""

    order: int
    items: list[str]


@pytest.fixture
def tasks(app: App) -> SampleTasks:
    """The tasks of the application."""
    return SampleTasks(app)


async def until_waiting(run: WorkflowRun[Any], count: int = 1) -> None:
    """Wait until so many nodes of a run wait."""

    async def is_there() -> bool:
        graph = await run.agraph()
        return sum(node.state is NodeState.WAITING for node in graph.nodes) == count

    await until_async(is_there)


async def test_results_their_fields_and_arguments_are_passed_on(app: App, tasks: SampleTasks) -> None:
    @app.task
    async def pay(order: int) -> Payment:
        return Payment(order, ["cup", "pen"])

    @app.task(queue="far")
    async def pack(item: str) -> str:
        return item.upper()

    @app.task
    async def ship(order: int, parcels: list[str], *, note: str, both: dict[str, int]) -> str:
        return f"{order} {parcels} {note} {both}"

    @app.workflow
    def order(flow: Flow, number: int, note: str = "none") -> str:
        payment = flow.call(pay, number)
        parcels = flow.map(pack, payment.items)
        return flow.call(
            ship, payment.order, [parcels[0], payment.items[1]], note=note, both={"one": 1, "two": number}
        )

    async with working(app, queues=QUEUES):
        run = await order.astart(7, note="soon")
        assert await run.aget() == "7 ['CUP', 'pen'] soon {'one': 1, 'two': 7}"
        assert await (await order.astart(8)).aget() == "8 ['CUP', 'pen'] none {'one': 1, 'two': 8}"
    with pytest.raises(BadArguments, match="parameter 'number' takes int"):
        await order.astart("x")  # type: ignore[arg-type]


async def test_steps_follow_each_other_unless_they_are_parallel(app: App, tasks: SampleTasks) -> None:
    @app.workflow
    def steps(flow: Flow) -> int:
        flow.call(tasks.double, 1)
        with flow.parallel():
            flow.call(tasks.double, 2)
            with flow.sequence():
                flow.call(tasks.double, 3)
                flow.call(tasks.double, 4)
        return flow.call(tasks.add, 1, 2)

    async with working(app, queues=QUEUES):
        run = await steps.astart()
        assert await run.aget() == 3
        graph = await run.agraph()
    feeds = {node.id: node.feeds for node in graph.nodes}
    one, two, three, four, last = sorted(feeds)
    assert feeds == {one: (two, three), two: (last,), three: (four,), four: (last,), last: ()}


MISUSES: dict[str, Callable[[Any, Any], Any]] = {
    "condition": lambda flow, value: 1 if value else 2,
    "iterated": lambda flow, value: list(value),
    "length": lambda flow, value: len(value),
    "compared": lambda flow, value: value == 3,
    "text": lambda flow, value: f"{value}",
    "computation": lambda flow, value: value + 1,
    "called": lambda flow, value: value(),
    "slice": lambda flow, value: value[1:],
}


@pytest.mark.parametrize("how", MISUSES)
def test_a_value_that_is_not_known_yet_refuses_and_names_the_line(app: App, how: str) -> None:
    @app.workflow(name=f"misuse.{how}")
    def wrong(flow: Flow, value: int) -> int:
        result: int = MISUSES[how](flow, value)
        return result

    with pytest.raises(
        Misconfigured, match=rf"the argument 'value' is not known.*{re.escape(__file__)}, line \d+"
    ):
        wrong.compiled  # noqa: B018


@pytest.mark.parametrize(
    "timeout", [math.inf, math.nan, -1, 0, 10**400, "5", timedelta(days=1), True], ids=repr
)
def test_a_wait_takes_seconds_of_at_most_ten_years(app: App, timeout: Any) -> None:
    @app.workflow
    def waits(flow: Flow) -> object:
        return flow.wait_for("answer", timeout=timeout)

    with pytest.raises(
        Misconfigured, match=r"flow.wait_for: timeout is .*: give seconds, more than 0 and at most"
    ):
        waits.compiled  # noqa: B018


async def test_a_signal_that_cannot_be_sent_is_refused_by_what_is_wrong(app: App) -> None:
    @app.workflow
    def waits(flow: Flow) -> object:
        return flow.wait_for("answer")

    run = await waits.astart()
    for name in ("half of a pair: \udc80", 5, None):
        with pytest.raises(BadArguments, match=r"the name of a signal is .*: give a text"):
            await run.asignal(cast("str", name), 1)
    with pytest.raises(TypeError, match="the value of a signal of type object cannot be encoded"):
        await run.asignal("answer", object())
    await run.acancel()


async def test_a_run_keeps_the_graph_that_it_began_with(app: App, tasks: SampleTasks) -> None:
    @app.workflow(name="deployed")
    def before(flow: Flow) -> int:
        number: int = flow.wait_for("go")
        return flow.call(tasks.add, number, 1)

    async with working(app, queues=QUEUES):
        run = await before.astart()
        await until_waiting(run)
        other = App(app.name, broker=app.settings.broker)
        later = SampleTasks(other)

        @other.workflow(name="deployed")
        def after(flow: Flow) -> int:
            number: int = flow.wait_for("go")
            return flow.call(later.add, number, 1000)

        second = await after.astart()
        for handle in (run, second):
            await handle.asignal("go", 5)
        assert (await run.aget(), await second.aget()) == (6, 1005)
        other.close()


async def test_signals_are_kept_and_each_is_consumed_once(app: App, tasks: SampleTasks) -> None:
    @app.workflow
    def waits(flow: Flow) -> list[int]:
        first: int = flow.wait_for("number")
        second: int = flow.wait_for("number")
        return [flow.call(tasks.double, first), flow.call(tasks.double, second)]

    async with working(app, queues=QUEUES):
        run = await waits.astart()
        assert await run.asignal("number", 1, id="a")
        assert await run.asignal("number", 1, id="a")
        assert await run.asignal("other", 9)
        await until_waiting(run)
        assert await run.asignal("number", 2, id="b")
        assert await run.aget() == [2, 4]
        assert not await run.asignal("number", 3)


async def test_signals_that_come_before_their_waits_are_taken_in_order_each_once(
    app: App, tasks: SampleTasks
) -> None:
    @app.workflow
    def waits_late(flow: Flow) -> list[int]:
        flow.sleep(0.2)
        first: int = flow.wait_for("number")
        second: int = flow.wait_for("number")
        return [flow.call(tasks.double, first), flow.call(tasks.double, second)]

    async with working(app, queues=QUEUES):
        run = await waits_late.astart()
        assert await run.asignal("number", 1, id="a")
        assert await run.asignal("number", 2, id="b")
        assert await run.aget() == [2, 4]


async def test_a_wait_that_takes_too_long_fails_by_its_policy(app: App, tasks: SampleTasks) -> None:
    @app.workflow
    def strict(flow: Flow) -> None:
        flow.wait_for("never", timeout=0.2)

    @app.workflow
    def lenient(flow: Flow) -> Any:
        answer = flow.wait_for("never", timeout=0.2, on_error="continue")
        return answer.state

    async with working(app, queues=QUEUES):
        with pytest.raises(WorkflowFailed, match="no never came in time"):
            await (await strict.astart()).aget()
        assert await (await lenient.astart()).aget() == "EXPIRED"


async def test_a_run_that_sleeps_holds_no_job(
    app: App, tasks: SampleTasks, redis_client: "redis.Redis"
) -> None:
    @app.workflow
    def nap(flow: Flow) -> int:
        flow.sleep(0.3)
        return flow.call(tasks.add, 1, 2)

    async with working(app, queues=QUEUES):
        run = await nap.astart()
        assert redis_client.hlen(app.queue("default").jobs) == 0
        assert (await run.astatus()).active == 0
        assert await run.aget() == 3


async def test_an_event_reaches_the_runs_that_wait_for_it_also_when_it_is_early(
    app: App, tasks: SampleTasks, redis_client: "redis.Redis"
) -> None:
    @app.event
    class Approved(Event):
        order: int
        by: str

    @app.workflow
    def order(flow: Flow, number: int) -> list[str]:
        flow.wait_for("go")
        approved = flow.wait_for(Approved, where={"order": number})
        return [approved.by]

    app.load()
    async with working(app, page=ROUTER), working(app, queues=QUEUES):
        runs = [await order.astart(number) for number in (1, 2)]
        await Approved.adelay(order=1, by="Ann")

        def is_delivered() -> bool:
            call, client = (
                read_run(app.queue("default"), runs[0].id, ["kept:event 2"]),
                cast("Any", redis_client),
            )
            return bool(call.decode(client.execute_command(*call.with_script_text)))

        await until(is_delivered)
        for run in runs:
            await run.asignal("go")
        assert await runs[0].aget() == ["Ann"]
        await until_waiting(runs[1])
        await Approved.adelay(order=3, by="Bo")
        await Approved.adelay(order=2, by="Cy")
        assert await runs[1].aget() == ["Cy"]


async def test_an_event_must_equal_all_fields_of_a_wait_also_those_that_a_step_returns(
    app: App, tasks: SampleTasks, redis_client: "redis.Redis"
) -> None:
    @app.event
    class Approved(Event):
        order: int
        by: str

    @app.workflow
    def order(flow: Flow, number: int) -> str:
        doubled = flow.call(tasks.double, number)
        return flow.wait_for(Approved, where={"order": doubled, "by": "Ann"}).by

    app.load()
    async with working(app, page=ROUTER), working(app, queues=QUEUES):
        run = await order.astart(2)
        await until(lambda: bool(list(redis_client.scan_iter(app.keys.event_waits("*")))))
        await Approved.adelay(order=4, by="Bo")
        await Approved.adelay(order=2, by="Ann")
        await until(lambda: redis_client.xlen(app.queue("default").stream) == 0)
        await until_waiting(run)
        await Approved.adelay(order=4, by="Ann")
        assert await run.aget() == "Ann"


async def test_a_run_with_less_time_does_not_end_the_wait_of_another_one(
    app: App, redis_client: "redis.Redis"
) -> None:
    @app.event
    class Closed(Event):
        day: int

    @app.workflow
    def closing(flow: Flow) -> None:
        flow.wait_for(Closed, where={"day": 1})

    app.load()
    async with working(app):
        keys = app.keys.event_waits("*")
        for deadline in (86400, 200):
            await closing.options(deadline=deadline).astart()
            await until(lambda: redis_client.xlen(app.queue("default").run_outbox) == 0)
        (key,) = redis_client.scan_iter(keys)
        await until(lambda: redis_client.ttl(key) > 80_000)
        assert redis_client.scard(key) == 2


async def test_a_signal_may_have_any_name(app: App, tasks: SampleTasks) -> None:
    @app.workflow
    def waits(flow: Flow) -> int:
        number: int = flow.wait_for("undo")
        return flow.call(tasks.double, number)

    async with working(app, queues=QUEUES):
        run = await waits.astart()
        assert await run.asignal("undo", 2)
        assert await run.aget() == 4


async def test_a_declared_workflow_says_what_becomes_of_failures(app: App, tasks: SampleTasks) -> None:
    @app.workflow(on_error="skip")
    def skipping(flow: Flow) -> int:
        with flow.parallel():
            flow.call(tasks.fail, 1)
            number = flow.call(tasks.add, 1, 2)
        return number

    async with working(app, queues=QUEUES):
        assert await (await skipping.astart()).aget() == 3


async def test_a_workflow_is_started_by_a_job_once(app: App, tasks: SampleTasks) -> None:
    @app.workflow
    def order(flow: Flow, number: int) -> int:
        return flow.call(tasks.add, number, 1)

    @app.task
    async def starts(number: int) -> str:
        job = current_job()
        assert job is not None
        run = await order.options(id=f"of-{number}").astart(number)
        return run.id

    async with working(app, queues=QUEUES):
        run_id = await (await order.task.adelay(4)).aget()
        run = await app.workflows.afind(run_id)
        assert run is not None
        assert await run.aget() == 5
        assert await (await starts.adelay(6)).aget() == "of-6"
        other = await app.workflows.afind("of-6")
        assert other is not None
        assert await other.aget() == 7


async def test_a_workflow_is_started_by_an_event_and_by_a_schedule(app: App, tasks: SampleTasks) -> None:
    @app.event
    class Placed(Event):
        number: int

    @app.workflow
    def order(flow: Flow, number: int) -> int:
        return flow.call(tasks.double, number)

    Placed.subscribe(order.task)
    async with working(app, page=ROUTER), working(app, queues=QUEUES):
        await Placed.adelay(number=21)
        await until(lambda: ("double", 21) in tasks.done)
    found = await app.workflows.alist_runs()
    assert [(run.name.rpartition(".")[2], run.state) for run in found] == [("order", RunState.SUCCESS)]


def test_what_cannot_be_declared_is_refused(app: App, tasks: SampleTasks) -> None:
    with pytest.raises(Misconfigured, match="is a plain function of a Flow and arguments"):

        @app.workflow  # type: ignore[arg-type]
        def nothing() -> None: ...

    @app.workflow(name="one")
    def one(flow: Flow) -> None: ...

    with pytest.raises(Misconfigured, match="two workflows are named 'one'"):

        @app.workflow(name="one")
        def two(flow: Flow) -> None: ...

    options: Any = {"on_error": "skipp"}
    with pytest.raises(Misconfigured, match=r"on_error is 'skipp'.*skip"):
        app.workflow(**options)(one.function)

    @app.event
    class Placed(Event):
        number: int

    @app.workflow(name="four")
    def four(flow: Flow) -> None:
        flow.wait_for(Placed, where={"numbr": 1})

    with pytest.raises(Misconfigured, match=r"event .* has no field 'numbr' to wait for; it has: number"):
        four.compiled  # noqa: B018
