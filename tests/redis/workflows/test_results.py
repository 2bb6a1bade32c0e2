"""Results of large maps are read in pages: by the step that follows the map, and by the handle of the run."""

from typing import Any

import pytest

from celery5 import App, Workflow, group
from celery5.broker.call import Call
from celery5.errors import BadArguments, Misconfigured, ResultLost
from celery5.workflows import Flow, Results
from tests.redis.worker.workers import working
from tests.redis.workflows.sample_tasks import QUEUES, SampleTasks

COUNT = 3000


class PagedTasks(SampleTasks):
    """Tasks that read results in pages, one in each kind of task."""

    def __init__(self, app: App) -> None:
        super().__init__(app)

        @app.task(name="sum-on-trio")
        async def sum_on_trio(numbers: Results[int], start: int = 0) -> int:
            total = start
            async for number in numbers:
                total += number
            return total

        @app.task(name="sum-on-asyncio", loop="asyncio")
        async def sum_on_asyncio(numbers: Results[int]) -> int:
            return sum([number async for number in numbers])

        @app.task(name="sum-in-a-thread", queue="far")
        def sum_in_a_thread(numbers: Results[int]) -> int:
            assert list(numbers) == list(numbers)
            return sum(numbers)

        self.sum_on_trio, self.sum_on_asyncio = sum_on_trio, sum_on_asyncio
        self.sum_in_a_thread = sum_in_a_thread


@pytest.fixture
def tasks(app: App) -> PagedTasks:
    """The tasks of the application."""
    return PagedTasks(app)


async def result_of(workflow: Workflow[Any]) -> Any:
    """Start a workflow and return its result."""
    return await (await workflow.astart()).aget(timeout=30)


async def test_a_step_after_a_map_reads_its_results_in_pages(app: App, tasks: PagedTasks) -> None:
    total = sum(2 * number for number in range(COUNT))
    async with working(app, queues=QUEUES):
        doubled = tasks.double.map(range(COUNT))
        for paged in (tasks.sum_on_trio.s(), tasks.sum_on_asyncio.s(), tasks.sum_in_a_thread.s()):
            assert await result_of(doubled | paged) == total
        chunked = tasks.double.chunks(range(COUNT), 7)
        assert await result_of(chunked | tasks.sum_on_trio.s(start=1)) == total + 1


async def test_other_values_are_lists_in_memory(app: App, tasks: PagedTasks) -> None:
    async with working(app, queues=QUEUES):
        assert await result_of(tasks.sum_on_trio.s(Results([1, 2]))) == 3
        assert await (await tasks.sum_on_trio.adelay(Results([1, 2]))).aget() == 3
        assert await result_of(tasks.grow.s(4) | tasks.sum_on_trio.s()) == 12
        from_group: Any = tasks.sum_on_trio.s()
        assert await result_of(group_of_two(tasks) | from_group) == 5


def group_of_two(tasks: SampleTasks) -> Any:
    """Return a workflow whose value is a list that is no map's."""
    return group(tasks.add.s(1, 1), tasks.add.s(1, 2))


async def test_declared_workflows_pass_them_too(app: App, tasks: PagedTasks) -> None:
    @app.workflow
    def declared(flow: Flow, numbers: list[int]) -> int:
        doubled: Any = flow.map(tasks.double, numbers)
        return flow.call(tasks.sum_on_trio, numbers=doubled)

    async with working(app, queues=QUEUES):
        assert await (await declared.astart(list(range(COUNT)))).aget(timeout=30) == COUNT * (COUNT - 1)


async def test_a_handle_reads_the_results_of_a_run_in_pages(app: App, tasks: PagedTasks) -> None:
    async with working(app, queues=QUEUES):
        run = await tasks.double.map(range(COUNT)).astart()
        results = await run.aresults(timeout=30)
        assert [number async for number in results] == [2 * number for number in range(COUNT)]
        found = await app.workflows.afind(run.id)
        assert found is not None
        assert [number async for number in await found.aresults()] == [2 * n for n in range(COUNT)]
        single = await tasks.add.s(1, 2).astart()
        assert [value async for value in await single.aresults()] == [3]
        redis = await app.connections.get_async_driver()
        key = app.queue(run.queue).run(run.id)
        await redis.perform(Call(("DEL", f"{key}:0:r20"), int))
        spoilt = await found.aresults()
        with pytest.raises(ResultLost, match="128 of the 3,000 results of its map are lost"):
            assert [number async for number in spoilt]


def test_results_that_belong_to_nobody_say_so(app: App, tasks: PagedTasks) -> None:
    assert list(Results([1, 2])) == [1, 2]
    assert repr(Results([1])) == "Results([1])"
    with pytest.raises(BadArguments, match="parameter 'numbers' takes"):
        tasks.sum_on_trio.job(Results(["x"]))  # type: ignore[list-item]
    raw_args, raw_kwargs = tasks.sum_on_trio.parameters.encode((Results([1]),), {})
    assert bytes(raw_args) == b"[[1]]"
    raw = b'[{"$results":["default","run",0]}]'
    (unbound,), _ = tasks.sum_on_trio.parameters.decode(type(raw_args)(raw), raw_kwargs)
    with pytest.raises(Misconfigured, match="<Results of run> can be read where it was passed to"):
        list(unbound)
