"""Failing: what becomes of a run when a job fails, how it is healed, retried, cancelled and undone."""

from typing import Any

import pytest
import redis

from celery5 import App, first, group
from celery5.broker.calls import workflows as calls
from celery5.errors import Misconfigured, RunNotRetried, WorkflowCancelled, WorkflowExpired, WorkflowFailed
from celery5.protocol.workflows.member_ids import MemberId, parse_member_id
from celery5.workflows import Flow, RunState, WorkflowRun
from tests.redis.worker.workers import until_async, working
from tests.redis.workflows.sample_tasks import QUEUES, SampleTasks, until_state


@pytest.fixture
def tasks(app: App) -> SampleTasks:
    """The tasks of the application."""
    return SampleTasks(app)


async def result_of(workflow: Any, **options: Any) -> Any:
    """What a workflow comes to."""
    return await (await workflow.astart(**options)).aget(timeout=20)


async def failure_of(run: WorkflowRun[Any]) -> WorkflowFailed:
    """How a run failed."""
    with pytest.raises(WorkflowFailed) as caught:
        await run.aget(timeout=20)
    return caught.value


async def test_a_failure_ends_the_run_and_the_error_names_what_failed_once(
    app: App, tasks: SampleTasks
) -> None:
    nested = (
        group(tasks.add.s(1, 2), group(tasks.fail.s(7) | tasks.double.s()) | tasks.total.s())
        | tasks.total.s()
    )
    async with working(app, queues=QUEUES, name="w1"):
        run = await nested.astart()
        error = await failure_of(run)
    member = parse_member_id(error.job_id)
    assert member is not None
    assert (error.task, error.type, error.message, error.attempt) == ("fail", "ValueError", "no 7", 1)
    assert (error.run, error.node, member.run) == (run.id, member.node, run.id)
    assert error.worker
    assert 'raise ValueError(f"no {number}")' in error.traceback
    assert str(error).count("no 7") == 1
    assert (await run.astatus()).state is RunState.FAILED


async def test_a_failure_inside_a_dynamic_workflow_is_told_as_it_is(app: App, tasks: SampleTasks) -> None:
    fail = tasks.fail

    @app.task(dynamic=True)
    async def outer() -> object:
        return fail.s(3) | fail.s()

    async with working(app, queues=QUEUES):
        error = await failure_of(await outer.s().astart())
    assert (error.task, error.message) == ("fail", "no 3")


async def test_what_runs_is_revoked_and_what_has_not_begun_does_not_begin(
    app: App, tasks: SampleTasks
) -> None:
    async with working(app, queues=QUEUES):
        run = await group(tasks.block.s(1), tasks.fail.s(1) | tasks.add.s(1)).astart()
        await failure_of(run)

        async def nothing_runs() -> bool:
            return (await run.astatus()).active == 0

        await until_async(nothing_runs)
    assert tasks.count("add") == 0


async def test_continue_gives_an_outcome_to_what_depends_on_the_node(app: App, tasks: SampleTasks) -> None:
    async with working(app, queues=QUEUES):
        assert await result_of(tasks.fail.s(1).outcome() | tasks.tell.s()) == "DEAD None True"
        tasks.is_broken = False
        assert await result_of(tasks.fail.s(1).outcome() | tasks.tell.s()) == "SUCCESS 1 False"


async def test_skip_leaves_out_the_node_and_what_depends_on_it(app: App, tasks: SampleTasks) -> None:
    async with working(app, queues=QUEUES):
        members = group(tasks.fail.s(1) | tasks.double.s(), tasks.double.s(4), on_error="skip")
        run = await (members | tasks.total.s()).astart()
        assert await run.aget() == 8
        status = await run.astatus()
    assert (status.failed, status.skipped, status.done) == (1, 1, 2)


async def test_ignored_end_states_count_as_success(app: App, tasks: SampleTasks) -> None:
    async with working(app, queues=QUEUES):
        assert await result_of(tasks.fail.options(ignore={"DEAD"}).s(1) >> tasks.add.s(1, 2)) == 3


async def test_what_start_says_of_failures_holds_where_nothing_else_is_said(
    app: App, tasks: SampleTasks
) -> None:
    skipped = tasks.fail.options(on_error="skip").s(1)
    async with working(app, queues=QUEUES):
        found = await result_of(group(tasks.fail.s(2), skipped, tasks.add.s(1, 2)), on_error="continue")
    assert [outcome["state"] for outcome in found] == ["DEAD", "SUCCESS"]


async def test_a_map_too_few_of_whose_members_succeed_is_skipped_where_it_may_be(
    app: App, tasks: SampleTasks
) -> None:
    enough = tasks.fail.map([1, 2], on_error="skip", need=0.0)
    too_few = tasks.fail.map([1, 2], on_error="skip", need=0.5)
    async with working(app, queues=QUEUES):
        assert await result_of(enough | tasks.total.s()) == 0
        assert await result_of(too_few | tasks.total.s()) is None


@pytest.mark.parametrize("on_error", ["continue", "skip"])
async def test_a_run_that_succeeds_has_a_value_whatever_the_annotations_say(
    app: App, tasks: SampleTasks, on_error: Any
) -> None:
    typed: Any = tasks.add

    @app.workflow(on_error=on_error)
    def declared(flow: Flow) -> int:
        last: int = flow.call(tasks.fail, 1)
        return last

    async with working(app, queues=QUEUES):
        last = await result_of(typed.s(1, 2), on_error=on_error)
        behind = await result_of(tasks.fail.options(on_error=on_error).s(1) >> typed.s(1, 2))
        step = await result_of(declared)
        failing: Any = tasks.fail.options(on_error="continue").s(1)
        no_items = failing | tasks.double.map(on_error=on_error)
        mapped = await result_of(no_items)
    assert mapped is None if on_error == "skip" else mapped["state"] == "DEAD"
    assert last == ({"state": "SUCCESS", "value": 3} if on_error == "continue" else 3)
    assert behind == (3 if on_error == "continue" else None)
    assert step is None if on_error == "skip" else step["state"] == "DEAD"


def test_what_becomes_of_failures_is_checked_where_a_run_starts(app: App, tasks: SampleTasks) -> None:
    wrong: Any = "skp"
    with pytest.raises(Misconfigured, match=r"^start: on_error is 'skp'.*did you mean 'skip'"):
        tasks.add.s(1, 2).start(on_error=wrong)


async def test_a_revoked_job_counts_as_success_where_that_is_ignored(app: App, tasks: SampleTasks) -> None:
    block = tasks.block.options(ignore={"REVOKED"})
    run = await (block.s(1) >> tasks.add.s(1, 2)).astart()
    failing = await (tasks.block.s(1) >> tasks.add.s(1, 2)).astart()
    assert await app.aempty("default") == 2
    async with working(app, queues=QUEUES):
        assert await run.aget() == 3
        assert (await failure_of(failing)).type == "Revoked"


async def test_the_deadline_ends_a_run_that_is_held(app: App, tasks: SampleTasks) -> None:
    async with working(app, queues=QUEUES):
        run = await tasks.fail.options(on_error="hold").s(1).astart(deadline=1.0)
        await until_state(run, RunState.HELD)
        with pytest.raises(WorkflowExpired):
            await run.aget(timeout=20)


async def test_a_map_of_a_task_with_undo_is_refused(app: App, tasks: SampleTasks) -> None:
    with pytest.raises(Misconfigured, match="task add: the members of a map are not undone"):
        await tasks.add.options(undo=tasks.undo).starmap([(1, 2)]).astart()


@pytest.mark.parametrize(("need", "is_enough"), [(0.5, True), (0.75, True), (0.9, False)])
async def test_a_group_and_a_map_need_a_fraction_of_their_members(
    app: App, tasks: SampleTasks, need: float, is_enough: bool
) -> None:
    one_fails = [tasks.fail.s(1), *(tasks.double.s(number) for number in range(3))]

    @app.task(max_retries=0)
    async def odd(number: int) -> int:
        if number == 2:
            raise ValueError(number)
        return number

    async with working(app, queues=QUEUES):
        for workflow, value in ((group(one_fails, need=need), 6), (odd.map(range(4), need=need), 4)):
            run = await (workflow | tasks.total.s()).astart()
            if is_enough:
                assert await run.aget() == value
            else:
                assert (await failure_of(run)).message == f"3 of 4 succeeded, needed were {int(need * 4) + 1}"


async def test_the_first_to_succeed_decides_and_the_others_are_stopped(app: App, tasks: SampleTasks) -> None:
    async with working(app, queues=QUEUES):
        run = await first(tasks.fail.s(1), tasks.block.s(1) | tasks.add.s(1), tasks.double.s(3)).astart()
        assert await run.aget() == 6
        with pytest.raises(WorkflowFailed):
            await result_of(first(tasks.fail.s(1), tasks.fail.s(2)))
    assert tasks.count("add") == 0


async def test_a_held_run_is_healed_by_the_replay_of_the_dead_letter(app: App, tasks: SampleTasks) -> None:
    hold = tasks.fail.options(on_error="hold")
    async with working(app, queues=QUEUES):
        for workflow in (hold.s(1) | tasks.add.s(1), hold.map([1, 2]) | tasks.total.s()):
            tasks.is_broken = True
            run = await workflow.astart()
            await until_state(run, RunState.HELD)
            tasks.is_broken = False
            await app.dlq.areplay()
            assert await run.aget(timeout=20) in (2, 3)


async def test_a_held_run_fails_when_the_dead_letter_is_purged(app: App, tasks: SampleTasks) -> None:
    hold = tasks.fail.options(on_error="hold")
    async with working(app, queues=QUEUES):
        for workflow in (hold.s(1) | tasks.add.s(1), hold.map([1]) | tasks.total.s()):
            run = await workflow.astart()
            await until_state(run, RunState.HELD)
            await app.dlq.apurge()
            await failure_of(run)


async def test_a_retry_runs_what_failed_and_what_depends_on_it(app: App, tasks: SampleTasks) -> None:
    workflow = group(tasks.double.s(1), tasks.fail.s(5), tasks.fail.map([1, 2])) >> tasks.add.s(1, 2)
    async with working(app, queues=QUEUES):
        run = await workflow.astart()
        await failure_of(run)

        async def is_stopped() -> bool:
            return (await run.astatus()).active == 0

        await until_async(is_stopped)
        tasks.is_broken = False
        await run.aretry()
        assert await run.aget(timeout=20) == 3
        with pytest.raises(RunNotRetried, match="has not failed"):
            await run.aretry()
        status = await run.astatus()
    assert (status.done, status.failed, status.state) == (5, 0, RunState.SUCCESS)
    assert (tasks.count("double"), tasks.count("add")) == (1, 1)


async def test_a_retry_after_many_failures_of_a_map_sends_those_members_again(
    app: App, tasks: SampleTasks
) -> None:
    async with working(app, queues=QUEUES):
        run = await (tasks.fail.map(range(400), need=1.0) | tasks.total.s()).astart()
        await failure_of(run)
        tasks.is_broken = False
        await run.aretry()
        assert await run.aget(timeout=20) == sum(range(400))


async def test_a_cancelled_run_stops_and_can_be_retried(app: App, tasks: SampleTasks) -> None:
    async with working(app, queues=QUEUES):
        run = await (tasks.block.s(1) | tasks.add.s(1)).astart()
        await tasks.begun.wait()
        assert await run.acancel()
        with pytest.raises(WorkflowCancelled):
            await run.aget()
        assert not await run.acancel()

        async def is_stopped() -> bool:
            return (await run.astatus()).active == 0

        await until_async(is_stopped)
        tasks.gate.set()
        await run.aretry()
        assert await run.aget() == 2


async def test_nothing_of_a_cancelled_run_begins_when_a_worker_comes_later(
    app: App, tasks: SampleTasks, redis_client: "redis.Redis"
) -> None:
    run = await tasks.add.starmap([(1, 2)] * 500).astart()
    assert await run.acancel()
    async with working(app, queues=QUEUES):
        assert await (await tasks.double.s(1).astart()).aget() == 2
    assert tasks.count("add") == 0
    assert redis_client.hlen(app.queue("default").jobs) == 0


async def test_a_dead_letter_that_was_purged_before_its_run_knew_holds_nothing(
    app: App, tasks: SampleTasks
) -> None:
    redis, keys = await app.connections.get_async_driver(), app.queue("default")
    document = '{"v":1,"id":"x","task":"fail","state":"DEAD","failure":{"type":"E","message":"m"}}'
    for workflow, name in (
        (tasks.fail.options(on_error="hold").s(1), "0"),
        (tasks.fail.map([1], on_error="hold"), "0~0"),
    ):
        run = await workflow.astart()
        for words in (("PURGED", ""), ("DEAD", document)):  # as the outbox of another queue may tell them
            record = calls.pack_record("end", f"{run.id}~{name}", *words)
            await redis.perform(calls.advance(keys, [record], ttl=60))
        status = await run.astatus()
        assert (status.state, status.held, status.failed) == (RunState.FAILED, 0, 1)
        await run.aretry()
        again = MemberId(run.id, 0, 1, 0 if "~" in name else None)
        for job_id, state, text in (
            (str(again), "PURGED", ""),
            (f"{run.id}~{name}", "PURGED", ""),  # of the letter that the retry has replaced
            (str(again), "DEAD", document),
        ):
            record = calls.pack_record("end", job_id, state, text)
            await redis.perform(calls.advance(keys, [record], ttl=60))
        status = await run.astatus()
        assert (status.state, status.held) == (RunState.FAILED, 0)


async def test_a_run_that_has_ended_is_kept_for_a_minute_at_least(
    app: App, tasks: SampleTasks, redis_client: "redis.Redis"
) -> None:
    app.configure(results_ttl=0.5)
    async with working(app, queues=QUEUES):
        run = await tasks.fail.s(1).astart()
        await failure_of(run)
    left: Any = redis_client.pttl(f"{app.queue(run.queue).run_prefix}{run.id}")
    assert left > 30_000


async def test_what_has_succeeded_is_undone_in_reverse_order_each_once(app: App, tasks: SampleTasks) -> None:
    add = tasks.add.options(undo=tasks.undo)
    async with working(app, queues=QUEUES):
        run = await (add.s(1, 2) | add.s(10) | tasks.fail.s()).astart()
        await failure_of(run)
        with pytest.raises(RunNotRetried, match="was undone"):
            await run.aretry()
    assert [call for call in tasks.done if call[0] == "undo"] == [("undo", 13), ("undo", 3)]


async def test_a_cancelled_run_is_undone_when_what_runs_has_stopped(app: App, tasks: SampleTasks) -> None:
    add = tasks.add.options(undo=tasks.undo)
    async with working(app, queues=QUEUES):
        run = await (add.s(1, 2) | tasks.block.s()).astart()
        await tasks.begun.wait()
        assert await run.acancel()
        with pytest.raises(WorkflowCancelled):
            await run.aget(timeout=20)
    assert tasks.done[-1] == ("undo", 3)


async def test_the_deadline_takes_the_path_of_a_failure(app: App, tasks: SampleTasks) -> None:
    add = tasks.add.options(undo=tasks.undo)
    async with working(app, queues=QUEUES):
        run = await (add.s(1, 2) | tasks.block.s()).astart(deadline=0.3)
        with pytest.raises(WorkflowExpired):
            await run.aget(timeout=20)
    assert tasks.done[-1] == ("undo", 3)
    assert (await run.astatus()).state is RunState.EXPIRED


async def test_the_graph_shows_each_node_and_its_state(app: App, tasks: SampleTasks) -> None:
    async with working(app, queues=QUEUES):
        run = await (
            tasks.double.map(range(3)) | tasks.total.s() | tasks.fail.s() | tasks.double.s()
        ).astart()
        await failure_of(run)
        graph = await run.agraph()
    assert [(node.name, node.state.value) for node in graph.nodes] == [
        ("double", "SUCCESS"),
        ("total", "SUCCESS"),
        ("fail", "FAILED"),
        ("double", "SKIPPED"),
    ]
    assert (graph.nodes[0].total, graph.nodes[0].done) == (3, 3)
    assert '    n0["double<br/>3 of 3"]:::success' in graph.to_mermaid()
    assert "    n0 --> n1" in graph.to_mermaid()
