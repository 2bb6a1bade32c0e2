"""Undoing: whatever succeeds in a run that fails is undone, once, whenever it succeeds, and nothing stops the undo."""

from collections.abc import Callable
from typing import Any

import pytest
import redis
import trio

from celery5 import App, chain, first, fork, group
from celery5.broker.calls import workflows as calls
from celery5.errors import RunNotRetried, TaskFailed, WorkflowCancelled, WorkflowFailed
from celery5.workflows import Flow, RunGraph, RunState, WorkflowRun, registry
from celery5.workflows.compose import Workflow
from tests.redis.worker.workers import until, until_async, working
from tests.redis.workflows.sample_tasks import QUEUES, SampleTasks


class Charges(SampleTasks):
    """Tasks with an undo. A `charge` cannot be interrupted: it succeeds once `gate` is open."""

    def __init__(self, app: App) -> None:
        super().__init__(app)
        self.undo_gate = trio.Event()
        self.undo_gate.set()
        self.undo_begun = trio.Event()

        @app.task(name="refund")
        async def refund(number: int) -> None:
            self.undo_begun.set()
            await self.undo_gate.wait()
            self.done.append(("refund", number))

        @app.task(name="charge", undo=refund)
        async def charge(number: int) -> int:
            self.begun.set()
            with trio.CancelScope(shield=True):
                await self.gate.wait()
            self.done.append(("charge", number))
            return number

        @app.task(name="reserve", undo=refund)
        async def reserve(number: int) -> int:
            self.done.append(("reserve", number))
            return number

        @app.task(name="break", max_retries=0)
        async def break_(number: int = 0) -> int:
            await self.begun.wait()
            raise ValueError(number)

        @app.task(name="wait")
        async def wait() -> None:
            await trio.sleep_forever()

        @app.task(name="fails_inside", dynamic=True)
        async def fails_inside() -> object:
            return group(self.fail.options(on_error="hold").s(1), self.add.s(1, 2))

        self.fails_inside = fails_inside
        self.charge, self.reserve, self.break_, self.wait = charge, reserve, break_, wait

    def undone(self) -> list[int]:
        """What has been undone, in order."""
        return [number for name, number in self.done if name == "refund"]


@pytest.fixture
def tasks(app: App) -> Charges:
    """The tasks of the application."""
    return Charges(app)


async def until_ended(run: WorkflowRun[Any]) -> RunState:
    """Wait until a run has ended, and return its state."""
    with pytest.raises((WorkflowFailed, WorkflowCancelled)):
        await run.aget(30)
    return (await run.astatus()).state


CASES: dict[str, tuple[Callable[[Charges], Workflow[Any]], list[int]]] = {
    "alone": (lambda t: t.charge.s(1) | t.double.s(), [1]),
    "after another": (lambda t: t.reserve.s(1) >> t.charge.s(2) | t.double.s(), [2, 1]),
    "beside others": (lambda t: group(t.charge.s(1), t.charge.s(1)), [1, 1]),
}


@pytest.mark.parametrize("name", CASES)
async def test_what_succeeds_after_the_run_was_cancelled_is_undone(
    app: App, tasks: Charges, name: str
) -> None:
    make, undone = CASES[name]
    async with working(app, queues=QUEUES):
        run = await make(tasks).astart()
        await tasks.begun.wait()
        assert await run.acancel()
        tasks.gate.set()
        assert await until_ended(run) is RunState.CANCELLED
    assert (tasks.undone(), tasks.count("double")) == (undone, 0)


async def test_what_succeeds_after_another_step_has_failed_is_undone(app: App, tasks: Charges) -> None:
    async with working(app, queues=QUEUES):
        run = await group(tasks.charge.s(1), tasks.break_.s()).astart()

        async def has_failed() -> bool:
            return (await run.astatus()).failed == 1

        await until_async(has_failed)
        tasks.gate.set()
        assert await until_ended(run) is RunState.FAILED
        status = await run.astatus()
    assert tasks.undone() == [1]
    assert (status.done, status.failed, status.skipped, status.pending, status.active) == (1, 1, 0, 0, 0)


async def test_the_winner_of_a_first_is_undone_and_so_is_a_loser_that_succeeds(
    app: App, tasks: Charges
) -> None:
    async with working(app, queues=QUEUES):
        run = await (first(tasks.reserve.s(1), tasks.charge.s(2)) >> tasks.wait.s()).astart()
        await tasks.begun.wait()
        tasks.gate.set()
        await until(lambda: tasks.count("charge") == 1)

        async def nothing_else_runs() -> bool:
            return (await run.astatus()).active <= 1

        await until_async(nothing_else_runs)
        await run.acancel()
        await until_ended(run)
    assert sorted(tasks.undone()) == [1, 2]


async def test_an_undo_gets_the_result_also_where_others_get_an_outcome(app: App, tasks: Charges) -> None:
    tasks.begun.set()
    async with working(app, queues=QUEUES):
        run = await (tasks.reserve.options(on_error="continue").s(4) >> tasks.break_.s()).astart()
        assert await until_ended(run) is RunState.FAILED
    assert tasks.undone() == [4]


async def test_the_run_itself_never_stops_the_undo_of_its_steps(app: App, tasks: Charges) -> None:
    """Who revokes what ran when the run failed may come late, and again: the undo runs by then."""
    tasks.undo_gate = trio.Event()
    tasks.gate.set()
    async with working(app, queues=QUEUES):
        run = await (tasks.charge.s(1) >> tasks.break_.s()).astart()
        await tasks.undo_begun.wait()
        for entry in ({}, {"retries": b"0"}, {"from": b"0", "to": b"9"}):
            await app.workflows.revoke_members(run.queue, {"revoke": run.id.encode(), **entry})
        tasks.undo_gate.set()
        assert await until_ended(run) is RunState.FAILED
    assert tasks.undone() == [1]


async def test_a_late_revocation_does_not_stop_what_a_retry_has_begun(app: App, tasks: Charges) -> None:
    flaky = tasks.fail
    async with working(app, queues=QUEUES):
        run = await (flaky.s(1) >> tasks.block.s(2)).astart()
        assert await until_ended(run) is RunState.FAILED
        tasks.is_broken = False
        await run.aretry()
        await tasks.begun.wait()
        await app.workflows.revoke_members(run.queue, {"revoke": run.id.encode(), "retries": b"0"})
        tasks.gate.set()
        assert await run.aget(30) == 2


async def test_what_a_retried_run_has_done_is_undone_when_it_fails_again(app: App, tasks: Charges) -> None:
    async with working(app, queues=QUEUES):
        run = await (tasks.fail.s(1) >> tasks.reserve.s(2) >> tasks.double.s(3) >> tasks.break_.s()).astart()
        assert await until_ended(run) is RunState.FAILED
        tasks.is_broken = False
        await run.aretry()
        tasks.begun.set()
        assert await until_ended(run) is RunState.FAILED
        status = await run.astatus()
    assert tasks.undone() == [2]
    assert (status.done, status.failed, status.pending) == (3, 1, 0)


async def test_a_step_that_will_be_skipped_waits_for_all_that_is_before_it(app: App, tasks: Charges) -> None:
    skipping = tasks.fail.options(on_error="skip")

    @app.workflow
    def order(flow: Flow) -> object:
        with flow.parallel():
            slow = flow.call(tasks.block, 1)
            other = flow.call(skipping, 2)
        flow.call(tasks.double, other)
        return slow

    async with working(app, queues=QUEUES):
        run = await order.astart()
        await until(lambda: tasks.count("fail") == 1)
        assert (await run.astatus()).state is RunState.RUNNING
        tasks.gate.set()
        assert await run.aget(30) == 1
        status = await run.astatus()
    assert (status.done, status.failed, status.skipped, tasks.count("double")) == (1, 1, 1, 0)


@pytest.mark.parametrize("is_in_the_middle", [False, True])
async def test_the_branches_of_a_fork_go_on_when_one_fails(
    app: App, tasks: Charges, is_in_the_middle: bool
) -> None:
    total: Any = tasks.total
    branches: Any = tasks.add.s(1, 1) | fork(tasks.fail.partial(), tasks.block.partial() | tasks.double.s())
    async with working(app, queues=QUEUES):
        run = await (branches | total.s() if is_in_the_middle else branches).astart()
        await tasks.begun.wait()
        await until(lambda: tasks.count("fail") == 1)
        tasks.gate.set()
        assert await until_ended(run) is RunState.FAILED
        status = await run.astatus()
    assert tasks.count("double") == 1
    assert (status.done, status.failed, status.skipped) == (3, 1, int(is_in_the_middle))


ENDS: dict[str, Callable[[Any], Workflow[Any]]] = {
    "succeeded": lambda t: t.add.s(1, 2) | t.double.s(),
    "failed": lambda t: chain(t.fail.s(1), t.fail.s(), t.double.s()),
    "failed beside others": lambda t: group(t.block.s(1), t.fail.s(1) | t.double.s(), t.add.s(1, 2)),
    "skipped": lambda t: group(t.fail.s(1) | t.double.s() | t.double.s(), t.add.s(1, 2), on_error="skip"),
    "first": lambda t: first(t.add.s(1, 2), t.block.s(2) | t.double.s()) | t.double.s(),
    "a first of failures": lambda t: first(t.fail.s(1) | t.double.s(), t.fail.s(2)),
    "a map that fails": lambda t: t.fail.map(range(5)) | t.double.s(),
    "a map too few of which succeed": lambda t: t.fail.map(range(5), need=0.5) | t.double.s(),
}


@pytest.mark.parametrize("name", ENDS)
async def test_when_a_run_has_ended_its_counts_add_up(app: App, tasks: Charges, name: str) -> None:
    tasks.begun.set()
    async with working(app, queues=QUEUES):
        run = await ENDS[name](tasks).astart()

        async def has_ended() -> bool:
            status = await run.astatus()
            return status.ended is not None and status.active == 0

        await until_async(has_ended)
        status = await run.astatus()
        states = {node.state.value for node in (await run.agraph()).nodes}
    assert status.pending == 0
    assert status.done + status.failed + status.skipped == status.total
    assert not states & {"PENDING", "ACTIVE", "WAITING"}


async def test_when_a_run_is_cancelled_nothing_of_it_begins_any_more(app: App, tasks: Charges) -> None:
    begun: list[int] = []

    @app.task(name="nap", queue="far")
    async def nap(number: int) -> None:
        begun.append(number)
        await trio.sleep(0.05)

    app.configure(concurrency=5)
    run: WorkflowRun[Any] = await nap.map(range(2000)).astart()
    async with working(app, queues=QUEUES):
        await until(lambda: bool(begun))
        await run.acancel()
        await until_ended(run)
        status, count = await run.astatus(), len(begun)
        # What is sent behind its jobs runs when those are gone.
        assert await (await tasks.double.adelay(7)).aget(30) == 14
    assert len(begun) == count < 2000
    assert (status.state, status.active, status.pending) == (RunState.CANCELLED, 0, 0)


async def test_a_run_is_cancelling_while_its_jobs_wait(app: App, tasks: Charges) -> None:
    run = await group(tasks.add.s(1, 2), tasks.double.s(3)).astart()
    assert await run.acancel()
    assert (await run.astatus()).state is RunState.CANCELLING
    assert not await run.acancel()
    async with working(app, queues=QUEUES):
        assert await until_ended(run) is RunState.CANCELLED
    assert tasks.done == []


async def test_a_dead_step_of_a_run_that_has_ended_is_not_replayed_alone(app: App, tasks: Charges) -> None:
    async with working(app, queues=QUEUES):
        run = await (tasks.reserve.s(1) >> tasks.fail.s(2)).astart()
        alone = await tasks.fail.adelay(3)
        assert await until_ended(run) is RunState.FAILED
        with pytest.raises(TaskFailed):
            await alone.aget(30)
        tasks.is_broken = False
        for dry_run in (True, False):
            tally = await app.dlq.areplay(dry_run=dry_run)
            assert (tally.matched, tally.done, tally.left) == (2, int(not dry_run), {"run-ended": 1})
        assert await alone.aget(30) == 3
    assert [number for name, number in tasks.done if name == "fail"].count(2) == 1


async def test_a_dead_step_of_a_run_that_succeeded_without_it_is_purged(app: App, tasks: Charges) -> None:
    async with working(app, queues=QUEUES):
        run = await (tasks.fail.options(on_error="skip").map([2]) | tasks.total.s()).astart()
        await run.aget(30)
        tasks.is_broken = False
        tally = await app.dlq.areplay()
        assert (tally.matched, tally.done, tally.left) == (1, 0, {"run-succeeded": 1})
        (letter,) = [job async for job in app.dlq.aread()]
        assert (await app.dlq.apurge(ids=letter.id)).done == 1


async def test_a_run_whose_jobs_wait_on_a_queue_without_workers_is_cancelled(
    app: App, tasks: Charges
) -> None:
    run = await group(tasks.add.s(1, 2), tasks.add.s(2, 3), tasks.double.s(3)).astart()
    async with working(app, queues=["default"]):
        await until(lambda: tasks.count("add") == 2)
        await run.acancel()
        assert await until_ended(run) is RunState.CANCELLED
    assert (await run.astatus()).active == 0


async def test_an_undo_that_comes_too_late_leaves_no_key_for_ever(
    app: App, tasks: Charges, redis_client: "redis.Redis"
) -> None:
    async with working(app, queues=QUEUES):
        run = await first(tasks.add.s(1, 2), tasks.charge.s(2)).astart()
        await tasks.begun.wait()
        assert await run.aget(30) == 3
        tasks.gate.set()
        await until(lambda: tasks.count("charge") == 1)

        async def nothing_runs() -> bool:
            return (await run.astatus()).active == 0

        await until_async(nothing_runs)
        assert redis_client.ttl(f"{app.queue(run.queue).run(run.id)}:undo") != -1


@pytest.mark.parametrize("is_forgotten", [False, True])
async def test_an_undo_that_has_died_is_replayed_when_its_run_has_ended(
    app: App, redis_client: "redis.Redis", is_forgotten: bool
) -> None:
    undone: list[int] = []
    is_down = True

    @app.task(name="give_back", max_retries=0)
    async def give_back(number: int) -> None:
        if is_down:
            raise ConnectionError
        undone.append(number)

    @app.task(name="take", undo=give_back)
    async def take(number: int) -> int:
        return number

    @app.task(name="stop", max_retries=0)
    async def stop() -> None:
        raise ValueError

    async with working(app, queues=QUEUES):
        run: WorkflowRun[Any] = await (take.s(4) >> stop.s()).astart()
        await until_ended(run)
        assert (await run.astatus()).undo == "undone 0 of 1; give_back of node 0 died: ConnectionError"
        is_down = False
        if is_forgotten:
            redis_client.delete(app.queue(run.queue).run(run.id))
        tally = await app.dlq.areplay()
        assert (tally.done, tally.left) == (1, {"run-ended": 1})
        await until(lambda: undone == [4])
        if is_forgotten:
            return

        async def is_undone() -> bool:
            return (await run.astatus()).undo == "undone 1 of 1"

        await until_async(is_undone)
        assert not redis_client.exists(app.queue(run.queue).undoing_runs)


def describe_undos(graph: RunGraph) -> dict[int | None, tuple[str, str, str, str]]:
    """Return the task, the job, the queue and the state of what undoes each step."""
    undos = [node for node in graph.nodes if node.kind == "undo"]
    steps = {node.id: node for node in graph.nodes}
    assert all(undo.of is not None and undo.id in steps[undo.of].feeds for undo in undos)
    return {undo.of: (undo.name, undo.job, undo.queue, undo.state.value) for undo in undos}


async def test_what_is_undone_is_seen_while_it_is_and_afterwards(app: App, tasks: Charges) -> None:
    tasks.undo_gate = trio.Event()
    tasks.begun.set()
    far: Any = tasks.reserve.options(undo=tasks.reserve.send_options.undo.options(queue="far"))
    async with working(app, queues=QUEUES):
        run = await (far.s(1) >> far.s(2) >> tasks.break_.s()).astart()
        await tasks.undo_begun.wait()
        status, graph = await run.astatus(), await run.agraph()
        assert (status.state, status.undo) == (RunState.UNDOING, "undoing 1 of 2")
        assert (status.undos, status.undone, status.undo_failed) == (2, 0, 0)
        second, first_ = describe_undos(graph)[2], describe_undos(graph)[0]
        assert second == ("refund", f"{run.id}~3@{run.queue}", "far", "ACTIVE")
        assert first_ == ("refund", "", "", "PENDING")
        assert "n2 -.->|undo| n3" in graph.to_mermaid()
        tasks.undo_gate.set()
        assert await until_ended(run) is RunState.FAILED
        status = await run.astatus()
    assert (status.undo, status.total, status.active) == ("undone 2 of 2", 3, 0)
    assert (status.failed_node, status.failed_task) == (4, "break")
    assert status.failure == "node 4, break: ValueError: 0"
    assert {undo[3] for undo in describe_undos(await run.agraph()).values()} == {"SUCCESS"}


async def test_a_run_that_succeeds_shows_nothing_to_undo(app: App, tasks: Charges) -> None:
    async with working(app, queues=QUEUES):
        run = await (tasks.reserve.s(1) >> tasks.reserve.s(2)).astart()
        await run.aget(30)
        status, graph = await run.astatus(), await run.agraph()
    assert (status.undos, status.undo, len(graph.nodes)) == (0, "", 2)


UNDO_ENDS: dict[str, tuple[dict[str, Any], str]] = {
    "dies": ({}, "ValueError: nobody answers"),
    "expires": ({"queue": "away", "expires": 0.01}, "EXPIRED"),
    "is revoked": ({"queue": "away"}, "Revoked: "),
}


@pytest.mark.parametrize("name", UNDO_ENDS)
async def test_an_undo_job_that_did_not_succeed_is_counted_and_named(
    app: App, tasks: Charges, name: str
) -> None:
    options, why = UNDO_ENDS[name]

    @app.task(name="give_back", max_retries=0)
    async def give_back(number: int) -> None:
        if number == 1:
            raise ValueError("nobody answers")

    reserve: Any = tasks.reserve
    tasks.begun.set()
    steps = reserve.options(undo=give_back.options(**options)).s(1) >> reserve.options(undo=give_back).s(2)
    async with working(app, queues=QUEUES):
        run = await (steps >> tasks.break_.s()).astart()
        if options:

            async def is_sent() -> bool:
                undos = describe_undos(await run.agraph())
                return 0 in undos and undos[0][3] == "ACTIVE"

            await until_async(is_sent)
            if name == "is revoked":
                await app.workflows.revoke_jobs("away", [f"{run.id}~1@{run.queue}"])
                await app.workflows.apply(
                    run.queue, [calls.pack_record("end", f"{run.id}~1@{run.queue}", "REVOKED", "")]
                )
        async with working(app, queues=["away"] if name == "expires" else ["nothing"]):
            assert await until_ended(run) is RunState.FAILED
        status, states = await run.astatus(), describe_undos(await run.agraph())
    assert (status.undos, status.undone, status.undo_failed) == (2, 1, 1)
    assert status.undo.startswith(f"undone 1 of 2; give_back of node 0 died: {why}")
    assert (states[0][3], states[2][3]) == ("FAILED", "SUCCESS")


@pytest.mark.parametrize("queue", QUEUES)
async def test_replayed_step_of_a_cancelled_run_is_awaited_and_undone(
    app: App, tasks: Charges, queue: str
) -> None:
    is_down = True

    @app.task(name="pay", queue=queue, undo=tasks.undo, on_error="hold", max_retries=0)
    async def pay(number: int) -> int:
        if is_down:
            raise ConnectionError
        charged: int = await tasks.charge.function(number)
        return charged

    async with working(app, queues=QUEUES):
        run = await (pay.s(4) >> tasks.add.s(1, 2)).astart()

        async def has(state: RunState) -> bool:
            return (await run.astatus()).state is state

        await until_async(lambda: has(RunState.HELD))
        is_down = False
        assert (await app.dlq.areplay()).done == 1
        await tasks.begun.wait()
        await run.acancel()
        assert (await run.astatus()).state is RunState.CANCELLING
        tasks.gate.set()
        assert await until_ended(run) is RunState.CANCELLED
        status = await run.astatus()
    assert [call for call in tasks.done if call[0] == "undo"] == [("undo", 4)]
    assert (status.undo, status.done, status.held, status.active) == ("undone 1 of 1", 1, 0, 0)


HELD: dict[str, Callable[[Charges], Workflow[Any]]] = {
    "a step": lambda t: t.fail.options(on_error="hold").s(1) >> t.reserve.s(1),
    "a step of another queue": lambda t: t.fail.options(on_error="hold", queue="far").s(1) >> t.reserve.s(1),
    "members of a map": lambda t: t.fail.map([1, 2], on_error="hold") >> t.reserve.s(1),
    "a step that returned a workflow": lambda t: t.fails_inside.s() >> t.reserve.s(1),
    "with something to undo": lambda t: t.reserve.s(1) >> t.fail.options(on_error="hold").s(1),
}


@pytest.mark.parametrize("name", HELD)
async def test_a_held_run_that_is_cancelled_comes_to_its_end(app: App, tasks: Charges, name: str) -> None:
    async with working(app, queues=QUEUES):
        run = await HELD[name](tasks).astart()

        async def is_held() -> bool:
            status = await run.astatus()
            active = int("returned" in name)  # a step is while what it has returned is
            return (status.held, status.active) == (2 if "map" in name else 1, active)

        await until_async(is_held)
        await run.acancel()
        assert await until_ended(run) is RunState.CANCELLED
        status = await run.astatus()
    assert (status.held, status.active, status.pending) == (0, 0, 0)
    assert status.done + status.failed + status.skipped == status.total
    assert tasks.undone() == ([1] if "undo" in name else [])


async def look_twice(app: App, run: WorkflowRun[Any], redis_client: "redis.Redis") -> None:
    """Have a run that stops looked at twice, as it is once a minute."""
    for _ in range(2):
        await app.workflows.apply(run.queue, [calls.pack_record("due", run.id)])
        await until(lambda: not redis_client.xlen(app.queue(run.queue).run_outbox))


@pytest.mark.parametrize("queue", QUEUES)
async def test_a_run_that_stops_does_not_wait_for_jobs_that_redis_has_lost(
    app: App, tasks: Charges, redis_client: "redis.Redis", monkeypatch: pytest.MonkeyPatch, queue: str
) -> None:
    monkeypatch.setattr(registry, "MISSING_FOR", 0.0)
    keys = app.queue(queue)
    far: Any = tasks.add.options(queue=queue)
    run = await group(tasks.block.s(1), tasks.block.s(2), far.s(1, 2)).astart()
    if queue == "default":
        redis_client.delete(keys.jobs, *keys.streams)
    async with working(app, queues=["default"]):
        if queue == "far":  # the outbox sends it
            await until(lambda: bool(redis_client.exists(keys.jobs)))
            redis_client.delete(keys.jobs, *keys.streams)
        await run.acancel()
        await until(lambda: not redis_client.xlen(app.queue(run.queue).run_outbox))
        assert (await run.astatus()).state is RunState.CANCELLING
        await look_twice(app, run, redis_client)
        assert await until_ended(run) is RunState.CANCELLED
        status = await run.astatus()
    assert (status.failed, status.active) == (3, 0)


async def test_a_run_that_stops_does_not_wait_for_lost_jobs_of_what_a_step_has_returned(
    app: App, tasks: Charges, redis_client: "redis.Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "MISSING_FOR", 0.0)
    far, keys = tasks.add.options(queue="far"), app.queue("far")

    @app.task(dynamic=True)
    async def grow(depth: int) -> Any:
        return grow.s(depth - 1) if depth else far.s(1, 2)

    async with working(app, queues=["default"]):
        run = await grow.s(2).astart()
        await until(lambda: bool(redis_client.exists(keys.jobs)))
        redis_client.delete(keys.jobs, *keys.streams)
        await run.acancel()
        await until(lambda: not redis_client.xlen(app.queue(run.queue).run_outbox))
        await look_twice(app, run, redis_client)
        assert await until_ended(run) is RunState.CANCELLED
        status = await run.astatus()
    assert (status.total, status.failed, status.active) == (4, 4, 0)


async def test_an_undo_job_that_redis_has_lost_has_failed(
    app: App, tasks: Charges, redis_client: "redis.Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "MISSING_FOR", 0.0)
    tasks.begun.set()
    away = app.queue("away")
    refund: Any = tasks.reserve.send_options.undo
    reserve: Any = tasks.reserve.options(undo=refund.options(queue="away"))
    async with working(app, queues=QUEUES):
        run = await (tasks.reserve.s(1) >> reserve.s(2) >> tasks.break_.s()).astart()
        await until(lambda: bool(redis_client.exists(away.jobs)))
        await look_twice(app, run, redis_client)  # nothing is missing
        assert (await run.astatus()).undo == "undoing 1 of 2"
        redis_client.delete(away.jobs, *away.streams)
        await look_twice(app, run, redis_client)
        assert await until_ended(run) is RunState.FAILED
        status = await run.astatus()
    assert status.undo == "undone 1 of 2; refund of node 2 died: Lost: Redis lost the job"
    assert tasks.undone() == [1]


async def test_a_step_that_succeeds_when_its_run_had_ended_is_undone_then(app: App, tasks: Charges) -> None:
    """Its worker was cut off when it was revoked, and so its run took it for revoked."""
    run = await (tasks.reserve.s(4) >> tasks.add.s(1, 2)).astart()
    await run.acancel()
    await app.workflows.apply(run.queue, [calls.pack_record("end", f"{run.id}~0", "REVOKED", "")])
    assert (await run.astatus()).state is RunState.CANCELLED
    for _ in range(2):  # it comes twice
        await app.workflows.apply(run.queue, [calls.pack_record("one", f"{run.id}~0", "4")])
    status = await run.astatus()
    assert (status.state, status.undos, status.active) == (RunState.CANCELLED, 1, 1)
    async with working(app, queues=QUEUES):

        async def is_undone() -> bool:
            return (await run.astatus()).undo == "undone 1 of 1"

        await until_async(is_undone)
        with pytest.raises(RunNotRetried, match="was undone"):
            await run.aretry()
    assert tasks.undone() == [4]
