"""What surrounds the jobs of a workflow: sinks, boxes, sources, traces, logs, lost results, and great depth."""

from collections.abc import Iterator
from typing import Any

import pytest
import redis

from celery5 import App, Workflow, current_job, group
from celery5.errors import ResultLost
from celery5.events.sources import source
from celery5.logs.trace import tracing
from celery5.protocol.events.documents import SourceDocument
from celery5.workflows import Flow
from tests.redis.boxes import boxing
from tests.redis.events.sinking import Kept, delivering
from tests.redis.events.test_sources import sourcing
from tests.redis.worker.workers import Lines, until, working
from tests.redis.workflows.sample_tasks import QUEUES, SampleTasks

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def tasks(app: App) -> SampleTasks:
    """The tasks of the application."""
    return SampleTasks(app)


@pytest.fixture
def boxed_app(url: str, app_name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[App]:
    """An application whose tasks run in processes of their own."""
    monkeypatch.setenv("BOXING_APP", app_name)
    one = boxing.make(app_name, url, box_slots=2)
    yield one
    one.close()


async def test_sinks_have_the_result_of_each_member_once(app: App, tasks: SampleTasks) -> None:
    kept = Kept()

    @app.task(name="kept", sinks=[kept], max_retries=0)
    async def keep(number: int) -> int:
        if number == 3:
            raise ValueError("three")
        return 10 * number

    async with working(app, queues=QUEUES), delivering(app):
        run = await (keep.map([1, 2, 3], on_error="skip") | tasks.total.s() | keep.s()).astart()
        assert await run.aget() == 300
        await until(lambda: len(kept.documents) == 3)
    assert sorted(kept.values) == [10, 20, 300]
    assert {document.job.partition("~")[0] for document in kept.documents} == {run.id}
    assert {document.state for document in kept.documents} == {"SUCCESS"}


async def test_boxed_jobs_are_members(boxed_app: App) -> None:
    add: Any = boxed_app.tasks["add"]
    bound: Any = boxed_app.tasks["bound"]
    async with working(boxed_app):
        run = await (group(add.s(1, 2), add.s(3)) >> add.map([10, 20])).astart()
        assert await run.aget(timeout=60) == [11, 21]
        chain = await (add.s(1) | bound.partial()).astart()
        assert await chain.aget(timeout=60) == (f"{chain.id}~1", 2)


async def test_a_document_of_a_source_starts_one_run(app: App, tasks: SampleTasks) -> None:
    @source
    class Numbers:
        async def run(self, emit: Any) -> None:
            for _ in range(2):  # the second one is the same document
                await emit(b"21", id="one")

    @app.task(name="parse")
    async def parse(document: SourceDocument) -> int:
        return int(document.body)

    @app.workflow(source=Numbers)
    def doubled(flow: Flow, document: SourceDocument) -> int:
        return flow.call(tasks.double, flow.call(parse, document))

    async with working(app, queues=QUEUES), sourcing(app):
        await until(lambda: tasks.count("double") == 1)
        (status,) = await app.workflows.alist_runs()
        run = await app.workflows.afind(status.id)
        assert run is not None
        assert await run.aget() == 42
    assert tasks.count("double") == 1


async def test_all_jobs_of_a_run_have_its_trace_and_name_it_in_the_log(app: App, tasks: SampleTasks) -> None:
    seen: list[tuple[str, str]] = []

    def note() -> None:
        job = current_job()
        assert job is not None
        seen.append((job.trace, job.run_id))

    @app.task(name="look")
    async def look(_: int) -> None:
        note()

    @app.task(name="bring", dynamic=True)
    async def bring() -> Any:
        note()
        return look.map([0, 0])

    with Lines() as lines:
        async with working(app, queues=QUEUES):
            with tracing(TRACE):
                run = await (bring.s() >> look.map([0, 0])).astart()
            await run.aget()
            alone = await tasks.add.adelay(1, 2)
            await alone.aget()
        await until(lambda: len(lines.of("job")) == 6)
    assert len(seen) == 5
    assert {trace for trace, _ in seen} == {TRACE}
    assert run.id in {value for _, value in seen}
    logged = {line["job"]: line.get("run") for line in lines.of("job")}
    assert logged[alone.id] is None
    assert {job: job.partition("~")[0] for job in logged if job != alone.id} == {
        job: name for job, name in logged.items() if job != alone.id
    }


async def test_live_runs_are_in_the_state_of_the_application(app: App, tasks: SampleTasks) -> None:
    run = await tasks.add.s(1, 2).astart()
    state = await app.ainfo()
    assert (state.runs, state.queues["default"].runs) == (1, 1)
    async with working(app, queues=QUEUES):
        await run.aget()
    assert (await app.ainfo()).runs == 0


async def test_a_value_that_is_lost_is_an_error_and_not_null(
    app: App, tasks: SampleTasks, redis_client: "redis.Redis"
) -> None:
    async with working(app, queues=QUEUES):
        run = await tasks.double.map(range(300)).astart()
        await until(lambda: tasks.count("double") == 300)
        await run.astatus()
        assert len(await run.aget()) == 300
        again = await app.workflows.afind(run.id)
        assert again is not None
        redis_client.delete(app.queue(run.queue).run(run.id) + ":0:r1")
        with pytest.raises(ResultLost, match="128 of the 300 results of its map are lost"):
            await again.aget()


async def test_workflows_are_nested_a_thousand_deep(app: App, tasks: SampleTasks) -> None:
    workflow: Workflow[Any] = tasks.add.s(0, 1)
    for _ in range(1000):
        workflow = group([workflow])
    deep: Workflow[Any] = tasks.add.s(0, 0)
    for _ in range(1000):
        deep = deep >> tasks.add.s(1, 1)
    async with working(app, queues=QUEUES):
        value = await (await workflow.astart()).aget(timeout=30)
        for _ in range(1000):
            (value,) = value
        assert value == 1
        assert await (await deep.astart()).aget(timeout=30) == 2


async def test_a_workflow_in_the_place_of_a_job_has_the_deadline_of_its_run(
    app: App, tasks: SampleTasks
) -> None:
    async with working(app, queues=QUEUES):
        run = await tasks.grow.s(2).astart(deadline=100 * 86400.0)
        assert await run.aget() == [0, 2]
        (node,) = (await run.agraph()).nodes
        part = await app.workflows.afind(node.run)
        assert part is not None
        whole_deadline, deadline = (await run.astatus()).deadline, (await part.astatus()).deadline
        assert whole_deadline is not None
        assert deadline == pytest.approx(whole_deadline, abs=1.0)
        assert [status.id for status in await app.workflows.alist_runs()] == [run.id]
