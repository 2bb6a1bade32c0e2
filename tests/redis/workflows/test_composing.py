"""Composing: what each way of composing calls of tasks comes to, on a worker that reads two queues."""

from collections.abc import Iterator
from typing import Any

import pytest
import redis

from celery5 import App, chain, chord, first, fork, group
from celery5.errors import BadArguments, Misconfigured, StagingLost
from celery5.workflows import WorkflowRun, staging
from tests.redis.worker.workers import leftovers, until, working
from tests.redis.workflows.sample_tasks import QUEUES, SampleTasks


@pytest.fixture
def tasks(app: App) -> SampleTasks:
    """The tasks of the application."""
    return SampleTasks(app)


async def result_of(workflow: Any, **options: Any) -> Any:
    """What a workflow comes to."""
    return await (await workflow.astart(**options)).aget(timeout=20)


async def test_each_primitive_comes_to_its_value(app: App, tasks: SampleTasks) -> None:
    add, total, double = tasks.add, tasks.total, tasks.double
    async with working(app, queues=QUEUES):
        assert await result_of(add.s(1, 2) | add.s(3) | double.s()) == 12
        assert await result_of(chain(add.s(1, 2), add.s(3))) == 6
        assert await result_of(group(add.s(1, 2), double.s(5))) == [3, 10]
        assert await result_of(chord([add.s(1, 2), double.s(5)], total.s())) == 13
        assert await result_of(double.map([1, 2, 3])) == [2, 4, 6]
        assert await result_of(add.starmap([(1, 2), (3, 4)]) | total.s()) == 10
        assert await result_of(double.chunks(range(10), 3)) == [2 * number for number in range(10)]
        assert await result_of(add.s(1, 2) | fork(double.s(), add.s(1))) == (6, 4)
        assert await result_of(add.s(1, 2) >> add.s(3, 4)) == 7
        assert await result_of(add.s(1, 2) | group(double.s(), add.s(5, 6))) == [6, 11]
        assert await result_of(first(tasks.block.s(1), double.s(4))) == 8


async def test_primitives_are_nested_in_each_other(app: App, tasks: SampleTasks) -> None:
    add, total, double = tasks.add, tasks.total, tasks.double
    inner = chord([add.s(1, 1), group(double.s(1), double.s(2)) | total.s()], total.s())
    async with working(app, queues=QUEUES):
        assert await result_of(group(inner, inner | double.s(), group(group(add.s(1, 2))))) == [8, 16, [[3]]]


async def test_empty_and_single_groups_and_maps_end(app: App, tasks: SampleTasks) -> None:
    async with working(app, queues=QUEUES):
        run: WorkflowRun[list[int]] = await app.workflows.astart(group([]))
        assert await run.aget() == []
        assert await result_of(tasks.double.map([]) | tasks.total.s()) == 0
        assert await result_of(group(tasks.add.s(1, 2)) | tasks.total.s()) == 3
        assert await result_of(group(group([]), tasks.double.map([])) >> tasks.add.s(1, 2)) == 3
        assert await result_of(tasks.grow.s(0) >> tasks.add.s(1, 2)) == 3


async def test_a_wide_group_and_a_wide_fork_are_joined(app: App, tasks: SampleTasks) -> None:
    async with working(app, queues=QUEUES):
        wide = tasks.add.s(0, 1) | group(tasks.double.s() for _ in range(300)) | tasks.total.s()
        assert await result_of(wide) == 600
        again = group(tasks.add.s(1, 1) for _ in range(150)) | group(tasks.total.s() for _ in range(150))
        assert await result_of(again) == [300] * 150


async def test_a_map_without_items_maps_over_the_value_of_the_step_before(
    app: App, tasks: SampleTasks
) -> None:
    async with working(app, queues=QUEUES):
        assert await result_of(tasks.double.map([1, 2]) | tasks.double.map() | tasks.total.s()) == 12
        assert await result_of(tasks.double.map([1, 2, 3]) | tasks.double.chunks(n=2)) == [4, 8, 12]


async def test_a_dynamic_job_is_replaced_by_the_workflow_that_it_returns(
    app: App, tasks: SampleTasks
) -> None:
    async with working(app, queues=QUEUES):
        assert await result_of(tasks.grow.s(4)) == [0, 2, 4, 6]
        assert await result_of(tasks.grow.s(3) | tasks.total.s()) == 6
    assert tasks.count("grow") == 2


async def test_a_dynamic_job_may_return_a_call_or_a_chain(app: App, tasks: SampleTasks) -> None:
    @app.task(name="choose", dynamic=True)
    async def choose(what: str) -> Any:
        return tasks.double.s(4) if what == "call" else tasks.add.s(1, 2) | tasks.double.s()

    async with working(app, queues=QUEUES):
        assert await result_of(choose.s("call") | tasks.add.s(1)) == 9
        assert await result_of(choose.s("chain") | tasks.add.s(1)) == 7


def test_a_call_that_lacks_an_argument_cannot_be_sent(tasks: SampleTasks) -> None:
    partial: Any = tasks.add.s(1)
    for name in ("delay", "adelay", "start", "astart"):
        with pytest.raises(Misconfigured, match="lacks an argument for 'other'"):
            getattr(partial, name)


async def test_at_most_8192_jobs_of_a_map_are_on_its_queue(
    app: App, tasks: SampleTasks, redis_client: "redis.Redis"
) -> None:
    await tasks.add.starmap([(1, 2)] * 9000).astart()
    await app.workflows.apply("default", [])
    assert redis_client.xlen(app.queue("default").stream) == 8192


async def test_the_same_id_is_the_same_run(app: App, tasks: SampleTasks) -> None:
    async with working(app, queues=QUEUES):
        one = await tasks.add.s(1, 2).astart(id="import-7")
        same = await tasks.add.s(5, 6).astart(id="import-7")
        assert (one.is_new, same.is_new) == (True, False)
        assert await same.aget() == await one.aget() == 3
        found = await app.workflows.afind("import-7")
        assert found is not None
        assert await found.aget() == 3
        assert await app.workflows.afind("import-8") is None
    assert tasks.count("add") == 1


async def test_a_generator_is_read_once_and_in_portions(app: App, tasks: SampleTasks) -> None:
    def numbers() -> Iterator[int]:
        yield from range(2500)

    async with working(app, queues=QUEUES):
        assert await result_of(tasks.double.map(numbers()) | tasks.total.s()) == 2499 * 2500


async def test_at_once_limits_the_jobs_of_a_map_on_the_queue(
    app: App, tasks: SampleTasks, redis_client: "redis.Redis"
) -> None:
    async with working(app, queues=QUEUES):
        run = await tasks.block.map(range(10), at_once=3).astart()
        await tasks.begun.wait()
        assert (await run.astatus()).active == 3
        assert redis_client.hlen(app.queue("default").jobs) == 3
        tasks.gate.set()
        assert await run.aget() == list(range(10))


async def test_what_does_not_fit_is_refused_before_anything_is_sent(
    app: App, tasks: SampleTasks, redis_client: "redis.Redis"
) -> None:
    with pytest.raises(BadArguments, match="add: parameter 'one' takes int, got str"):
        await tasks.add.s("x", 1).astart()  # type: ignore[call-overload]
    with pytest.raises(BadArguments, match="double: parameter 'number' takes int"):
        await tasks.double.map(["x"]).astart()  # type: ignore[list-item]
    with pytest.raises(Misconfigured, match="lacks an argument"):
        await group(tasks.add.s(1)).astart()  # type: ignore[attr-defined]
    with pytest.raises(Misconfigured, match="has all its arguments"):
        tasks.add.s(1, 2) | tasks.add.s(1, 2)  # type: ignore[operator]
    assert [key for key in leftovers(redis_client, app) if ":run:" in key] == []


async def test_a_run_that_was_published_and_not_started_leaves_nothing_for_good(
    app: App, tasks: SampleTasks, redis_client: "redis.Redis"
) -> None:
    def torn() -> Iterator[int]:
        yield from range(9000)
        raise RuntimeError("the producer is gone")

    with pytest.raises(RuntimeError, match="the producer is gone"):
        await tasks.double.map(torn()).astart()
    kept = [key for key in leftovers(redis_client, app) if not key.endswith("}:queues")]
    assert kept
    assert all(0 < redis_client.pttl(key) <= 120_000 for key in kept)
    assert tasks.done == []


@pytest.mark.parametrize("performed", range(6))
async def test_a_producer_that_dies_between_two_calls_leaves_nothing_for_good(
    app: App, tasks: SampleTasks, redis_client: "redis.Redis", monkeypatch: pytest.MonkeyPatch, performed: int
) -> None:
    driver = await app.connections.get_async_driver()
    left = performed

    def limit(name: str) -> None:
        perform: Any = getattr(driver, name)

        async def limited(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            if left == 0:
                raise RuntimeError("the producer is gone")
            left -= 1
            return await perform(*args, **kwargs)

        monkeypatch.setattr(driver, name, limited)

    limit("perform")
    limit("perform_all")
    try:
        await (tasks.double.map(range(10)) | tasks.total.s()).astart(id="torn")
    except RuntimeError:
        kept = [key for key in leftovers(redis_client, app) if not key.endswith("}:queues")]
        assert all(0 < redis_client.pttl(key) <= 120_000 for key in kept)
    else:
        assert redis_client.pttl(app.keys.run_home("torn")) > 120_000


async def test_a_run_whose_items_were_lost_before_it_began_does_not_begin(
    app: App, tasks: SampleTasks, redis_client: "redis.Redis"
) -> None:
    def slow() -> Iterator[int]:
        for key in redis_client.scan_iter(f"celery5:{{{app.name}:*:items"):
            redis_client.delete(key)  # as if it had taken more than two minutes to come here
        yield 1

    portions = (tasks.double.map([1, 2]), tasks.double.map(slow()))
    with pytest.raises(StagingLost, match="was lost before it was started"):
        await group(*portions).astart()


async def test_items_of_a_generator_are_never_read_on_from_where_it_stopped(
    app: App, tasks: SampleTasks, redis_client: "redis.Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "ITEMS_PER_TRIP", 1)
    monkeypatch.setattr(staging, "PORTIONS_PER_WRITE", 1)

    def slow() -> Iterator[int]:
        yield from (1, 2)
        for key in redis_client.scan_iter(f"celery5:{{{app.name}:*:items"):
            redis_client.delete(key)
        yield from (3, 4)

    with pytest.raises(StagingLost, match="were lost before the run was started"):
        await tasks.double.map(slow()).astart()


class LosesItems(list[int]):
    """Items whose first reading takes so long that Redis has lost those of the map before them."""

    def __init__(self, client: "redis.Redis", app: App) -> None:
        super().__init__([4, 5])
        self._client, self._app = client, app
        self.readings = 0

    def __iter__(self) -> Iterator[int]:
        self.readings += 1
        if self.readings == 1:
            for key in self._client.scan_iter(f"celery5:{{{self._app.name}:*:items"):
                self._client.delete(key)
        return super().__iter__()


async def test_a_run_whose_items_were_lost_is_published_again_if_they_can_be_read_again(
    app: App, tasks: SampleTasks, redis_client: "redis.Redis"
) -> None:
    items = LosesItems(redis_client, app)
    async with working(app, queues=QUEUES):
        assert await result_of(group(tasks.double.map([1, 2]), tasks.double.map(items))) == [[2, 4], [8, 10]]
    assert items.readings == 2


async def test_nothing_but_documents_is_left_of_a_run_that_has_ended(
    app: App, tasks: SampleTasks, redis_client: "redis.Redis"
) -> None:
    async with working(app, queues=QUEUES):
        await result_of(tasks.double.map(range(300)) | tasks.total.s())
        keys = [app.queue(queue) for queue in QUEUES]
        await until(lambda: not any(redis_client.llen(queue_keys.run_records) for queue_keys in keys))
        assert all(redis_client.hlen(queue_keys.jobs) == 0 for queue_keys in keys)
        for key in leftovers(redis_client, app):
            assert ":run:" not in key or redis_client.pttl(key) > 0, key
