"""Runs inside runs: what is known only later lives, holds, ends, is retried, undone, counted and kept with its run."""

from collections.abc import Callable
from typing import Any

import pytest
import redis
import trio

from celery5 import App, first, group
from celery5.broker.calls import workflows as calls
from celery5.errors import Misconfigured, RunNotRetried, WorkflowCancelled, WorkflowExpired, WorkflowFailed
from celery5.workflows import NodeState, Outcome, RunState, WorkflowRun
from celery5.workflows.compose import Workflow
from tests.redis.worker.workers import until, until_async, working
from tests.redis.workflows.sample_tasks import until_state

COUNT = 6


class NestedTasks:
    """Tasks that bring more work. `step` fails for one number until it is mended; `done` says what was done."""

    def __init__(self, app: App) -> None:  # noqa: C901  one task after another
        self.app = app
        self.done: list[tuple[str, Any]] = []
        self.is_broken = True
        self.gate = trio.Event()
        done = self.done

        @app.task(name="step", max_retries=0)
        async def step(number: int) -> int:
            done.append(("step", number))
            if number == COUNT - 1 and self.is_broken:
                raise ValueError(number)
            return number

        @app.task(name="numbers")
        async def numbers(count: int) -> list[int]:
            return list(range(count))

        @app.task(name="total")
        async def total(values: list[int]) -> int:
            return sum(values)

        @app.task(name="wait")
        async def wait(number: int) -> int:
            done.append(("wait", number))
            await self.gate.wait()
            return number

        @app.task(name="refund")
        async def refund(number: int) -> None:
            done.append(("refund", number))

        @app.task(name="charge", undo=refund)
        async def charge(number: int) -> int:
            done.append(("charge", number))
            return number

        @app.task(name="fail", max_retries=0)
        async def fail(_: Any = None) -> None:
            if self.is_broken:
                raise ValueError("at the end")

        @app.task(name="show")
        async def show(value: Any) -> str:
            return repr(value)

        self.step, self.numbers, self.total, self.wait = step, numbers, total, wait
        self.refund, self.charge, self.fail, self.show = refund, charge, fail, show

    def returning(self, workflow: Callable[[], Any], **options: Any) -> Any:
        """Return a call of a dynamic task that returns a workflow."""

        async def dynamic() -> Any:
            self.done.append(("returned", None))
            return workflow()

        task: Any = self.app.task(name=f"returning-{len(self.app.tasks)}", dynamic=True, **options)(dynamic)
        return task.s()

    def count(self, name: str) -> int:
        """Return how often a task has run."""
        return sum(1 for undone, _ in self.done if undone == name)

    def of(self, name: str) -> list[Any]:
        """Return with what a task has run, in order."""
        return [number for undone, number in self.done if undone == name]


@pytest.fixture
def tasks(app: App) -> NestedTasks:
    """The tasks of the application."""
    return NestedTasks(app)


Make = Callable[[NestedTasks, dict[str, Any]], Workflow[Any]]
SHAPES: dict[str, tuple[Make, int, int]] = {
    "known map": (lambda t, how: t.step.map(range(COUNT), **how), COUNT, 0),
    "later map": (lambda t, how: t.numbers.s(COUNT) | t.step.map(**how), COUNT + 1, 0),
    "later map beside steps": (
        lambda t, how: group(
            t.numbers.s(2) | t.total.s(),
            t.numbers.s(COUNT) | t.step.map(**how),
            t.numbers.s(0) | t.step.map(**how),
        ),
        COUNT + 4,
        0,
    ),
    "map in a child": (lambda t, how: t.returning(lambda: t.step.map(range(COUNT), **how)), COUNT + 1, 1),
    "later map in a child": (
        lambda t, how: t.returning(lambda: t.numbers.s(COUNT) | t.step.map(**how)),
        COUNT + 2,
        1,
    ),
    "child in a child": (
        lambda t, how: t.returning(
            lambda: t.numbers.s(1) >> t.returning(lambda: t.step.map(range(COUNT), **how))
        ),
        COUNT + 3,
        2,
    ),
    "calls in a child": (
        lambda t, how: t.returning(lambda: group(*[t.step.options(**how).s(n) for n in range(COUNT)])),
        COUNT + 1,
        1,
    ),
}
"""What brings COUNT steps, the last of which fails; how many jobs it has that people count; and how many of them have
returned the others, and so end with them."""
shaped = pytest.mark.parametrize(("make", "size", "parents"), SHAPES.values(), ids=SHAPES)


async def until_failed(run: WorkflowRun[Any]) -> None:
    """Wait until a run has failed, and all its jobs have ended."""
    with pytest.raises(WorkflowFailed):
        await run.aget(30)

    async def has_stopped() -> bool:
        return (await run.astatus()).active == 0

    await until_async(has_stopped)


def find_keys(client: "redis.Redis", app: App) -> dict[str, int]:
    """Return the keys of runs, with their time to live in ms, -1 for ever."""
    prefix = app.queue("default").run_prefix
    keys: Any = client.keys(f"{prefix}*")
    return {key.decode(): int(client.pttl(key)) for key in keys}


@shaped
async def test_a_retry_runs_again_only_what_has_failed(
    app: App, tasks: NestedTasks, make: Make, size: int, parents: int
) -> None:
    async with working(app):
        run = await make(tasks, {}).astart()
        await until_failed(run)
        status = await run.astatus()
        assert (status.state, status.failed, status.total) == (RunState.FAILED, 1 + parents, size)
        assert status.done + status.failed + status.skipped == size
        ran, returned = tasks.count("step"), tasks.count("returned")
        tasks.is_broken = False
        await run.aretry()
        await run.aget(30)
        status = await run.astatus()
        assert (status.state, status.done, status.total, status.skipped) == (RunState.SUCCESS, size, size, 0)
        assert tasks.count("step") <= COUNT + 1  # one may have been stopped before it ran
        assert sorted(set(tasks.of("step"))) == list(range(COUNT))
        assert (tasks.of("step")[ran:].count(COUNT - 1), tasks.count("returned")) == (1, returned)


@shaped
@pytest.mark.parametrize("way", ["replay", "purge"])
async def test_a_held_job_holds_the_run_until_its_dead_letter_is_gone(
    app: App, tasks: NestedTasks, make: Make, size: int, parents: int, way: str
) -> None:
    async with working(app):
        run = await make(tasks, {"on_error": "hold"}).astart()
        await until_state(run, RunState.HELD)
        await until_async(lambda: settled(run, size - 1 - parents))
        tasks.is_broken = False
        if way == "replay":
            await app.dlq.areplay()
            await run.aget(30)
        else:
            await app.dlq.apurge()
            await until_failed(run)
        status = await run.astatus()
        assert (status.held, status.total, status.failed) == (
            0,
            size,
            1 + parents if way == "purge" else 0,
        )
        assert tasks.count("step") == COUNT + (way == "replay")


async def settled(run: WorkflowRun[Any], count: int) -> bool:
    """Return whether this many jobs have succeeded."""
    return (await run.astatus()).done == count


@shaped
async def test_what_is_known_of_a_live_run_never_expires(
    app: App, tasks: NestedTasks, make: Make, size: int, parents: int, redis_client: "redis.Redis"
) -> None:
    tasks.is_broken = False
    async with working(app):
        run = await (make(tasks, {}) | tasks.show.s() >> tasks.wait.s(1)).astart()
        await until(lambda: tasks.count("wait") == 1)
        status = await run.astatus()
        assert (status.done, status.active, status.total) == (size + 1, 1, size + 2)
        keys = find_keys(redis_client, app)
        assert len(keys) >= 1
        assert set(keys.values()) == {-1}
        tasks.gate.set()
        await run.aget(30)
        await until(lambda: min(find_keys(redis_client, app).values()) > 0)


@shaped
async def test_a_cancelled_run_ends_after_all_that_is_part_of_it(
    app: App, tasks: NestedTasks, make: Make, size: int, parents: int
) -> None:
    tasks.is_broken = False
    async with working(app):
        run = await (make(tasks, {}) | tasks.show.s() >> tasks.wait.s(1)).astart()
        await until(lambda: tasks.count("step") >= 1)
        assert await run.acancel()
        with pytest.raises(WorkflowCancelled):
            await run.aget(30)
        begun = len(tasks.done)
        status = await run.astatus()
        assert (status.state, status.active) == (RunState.CANCELLED, 0)
        assert status.done + status.failed + status.skipped == status.total
        await tasks.total.s([1]).astart()
        assert len(tasks.done) == begun


async def test_cancelling_stops_a_step_that_returns_itself_without_end(app: App, tasks: NestedTasks) -> None:
    @app.task(dynamic=True)
    async def again() -> Any:
        tasks.done.append(("again", None))
        return again.s()

    async with working(app):
        run = await again.s().astart()
        await until(lambda: tasks.count("again") > 10)
        assert await run.acancel()
        with pytest.raises(WorkflowCancelled):
            await run.aget(30)
        begun = tasks.count("again")
        assert (await run.astatus()).active == 0
        await (await tasks.total.s([1]).astart()).aget(30)
        assert tasks.count("again") == begun


async def test_a_long_chain_of_dynamic_steps_comes_to_its_value(app: App) -> None:
    @app.task(dynamic=True)
    async def down(number: int) -> Any:
        return down.s(number - 1) if number else 7

    @app.task(dynamic=True)
    async def wrap(number: int) -> Any:
        return group(wrap.s(number - 1)) if number else "x"

    async with working(app):
        run = await (down.s(250) | wrap.s()).astart()
        value = await run.aget(60)
        depth = 0
        while isinstance(value, list):
            (value,), depth = value, depth + 1
        assert (value, depth) == ("x", 7)
        run = await wrap.s(300).astart()
        value, depth = await run.aget(60), 0
        while isinstance(value, list):
            (value,), depth = value, depth + 1
        assert (value, depth) == ("x", 300)
        assert (await run.astatus()).total == 301


async def test_a_step_that_holds_is_not_held_when_what_it_has_returned_fails(
    app: App, tasks: NestedTasks
) -> None:
    inner = tasks.fail.options(on_error="fail")  # so no dead letter is held that could be replayed
    async with working(app):
        run = await tasks.returning(lambda: inner.s(), on_error="hold").astart()
        await until_failed(run)
        status = await run.astatus()
        assert (status.state, status.held, status.failed) == (RunState.FAILED, 0, 2)
        tasks.is_broken = False
        await run.aretry()
        assert await run.aget(30) is None


async def test_a_failure_deep_inside_is_passed_on_unchanged(app: App, tasks: NestedTasks) -> None:
    @app.task(dynamic=True)
    async def down(number: int) -> Any:
        return down.s(number - 1) if number else tasks.fail.s()

    async with working(app):
        run = await down.s(300).astart()
        with pytest.raises(WorkflowFailed, match="at the end") as caught:
            await run.aget(30)
        status = await run.astatus()
        assert (caught.value.task, caught.value.run, status.failed_task) == ("fail", run.id, "fail")
        assert (status.error, status.failed) == ("ValueError: at the end", 302)
        (outcome,) = await (await group(down.s(2), on_error="continue").astart()).aget(30)
        assert outcome["error"]["failure"]["message"] == "at the end"


async def test_nesting_has_a_bound_that_can_be_set(app: App, tasks: NestedTasks) -> None:
    app.configure(workflow_nesting_limit=3)

    @app.task(dynamic=True)
    async def down(number: int) -> Any:
        tasks.done.append(("down", number))
        return down.s(number - 1) if number else 7

    async with working(app):
        assert await (await down.s(3).astart()).aget(30) == 7
        with pytest.raises(
            WorkflowFailed, match="inside 3 others, as many as the setting workflow_nesting_limit"
        ):
            await (await down.s(4).astart()).aget(30)
    assert tasks.of("down") == [3, 2, 1, 0, 4, 3, 2, 1]


UNDONE: dict[str, tuple[Callable[[NestedTasks], Workflow[Any]], list[int]]] = {
    "child": (lambda t: t.returning(lambda: t.charge.s(1) >> t.charge.s(2)), [2, 1]),
    "child in a child": (
        lambda t: t.returning(lambda: t.charge.s(1) >> t.returning(lambda: t.charge.s(2)) >> t.charge.s(3)),
        [3, 2, 1],
    ),
    "between others": (
        lambda t: t.charge.s(1) >> t.returning(lambda: t.charge.s(2)) >> t.charge.s(3),
        [3, 2, 1],
    ),
    "winner": (lambda t: first(t.returning(lambda: t.charge.s(1) >> t.charge.s(2))), [2, 1]),
}


@pytest.mark.parametrize(("make", "undone"), UNDONE.values(), ids=UNDONE)
async def test_children_that_have_succeeded_are_undone_with_their_run(
    app: App, tasks: NestedTasks, make: Callable[[NestedTasks], Workflow[Any]], undone: list[int]
) -> None:
    async with working(app):
        run = await (make(tasks) >> tasks.fail.s()).astart()
        await until_failed(run)
        assert tasks.of("refund") == undone
        assert (await run.astatus()).state is RunState.FAILED
        with pytest.raises(RunNotRetried, match="undone"):
            await run.aretry()


async def test_a_child_that_fails_is_undone_and_then_what_was_before_it(app: App, tasks: NestedTasks) -> None:
    inner = tasks.returning(lambda: tasks.charge.s(2) >> tasks.fail.s())
    async with working(app):
        await until_failed(await (tasks.charge.s(1) >> inner >> tasks.charge.s(3)).astart())
        assert tasks.of("refund") == [2, 1]
        tasks.done.clear()
        caught = inner.options(on_error="continue") if hasattr(inner, "options") else inner.outcome()
        run = await (tasks.charge.s(1) >> caught >> tasks.charge.s(3)).astart()
        assert await run.aget(30) == 3
        assert tasks.of("refund") == [2]


async def test_a_child_that_was_undone_is_done_as_a_whole_by_a_retry(app: App, tasks: NestedTasks) -> None:
    inner = tasks.returning(lambda: tasks.charge.s(2) >> tasks.fail.s())
    async with working(app):
        run = await (tasks.numbers.s(1) >> inner).astart()
        await until_failed(run)
        tasks.is_broken = False
        await run.aretry()
        await run.aget(30)
    assert (tasks.of("charge"), tasks.of("refund"), tasks.count("returned")) == ([2, 2], [2], 2)


async def test_a_child_is_not_retried_apart_from_its_run(app: App, tasks: NestedTasks) -> None:
    async with working(app):
        run = await tasks.returning(lambda: tasks.step.map(range(COUNT))).astart()
        await until_failed(run)
        (node,) = (await run.agraph()).nodes
        assert (node.state, bool(node.run)) == (NodeState.FAILED, True)
        child = await app.workflows.afind(node.run)
        assert child is not None
        with pytest.raises(RunNotRetried, match="part of another run"):
            await child.aretry()
        assert run.id in {status.id for status in await app.workflows.alist_runs()}
        assert child.id not in {status.id for status in await app.workflows.alist_runs()}


async def test_steps_that_lose_in_a_first_stop_with_their_children(app: App, tasks: NestedTasks) -> None:
    slow = tasks.returning(lambda: tasks.wait.s(1) >> tasks.charge.s(2))

    @app.task
    async def win() -> None:
        await until(lambda: 1 in tasks.of("wait"))

    async with working(app):
        run = await (first(slow, win.s()) >> tasks.total.s([3]) >> tasks.wait.s(4)).astart()
        await until(lambda: 4 in tasks.of("wait"))

        async def has_stopped() -> bool:
            return (await run.astatus()).active == 1

        await until_async(has_stopped)
        tasks.gate.set()
        assert await run.aget(30) == 4
        assert tasks.of("charge") == []


async def test_nothing_of_a_child_begins_when_the_run_around_it_has_stopped(
    app: App, tasks: NestedTasks
) -> None:
    async with working(app):
        run = await tasks.returning(lambda: tasks.wait.s(1) >> tasks.charge.s(2)).astart()
        await until(lambda: tasks.count("wait") == 1)
        (node,) = (await run.agraph()).nodes
        # In one call, so that the child itself is not stopped yet when its step ends.
        records = [calls.pack_record("cancel", run.id), calls.pack_record("one", f"{node.run}~0", "1")]
        redis = await app.connections.get_async_driver()
        await redis.perform(calls.advance(app.queue("default"), records, ttl=60))
        with pytest.raises(WorkflowCancelled):
            await run.aget(30)
        tasks.gate.set()
        await (await tasks.total.s([1]).astart()).aget(30)
        assert tasks.of("charge") == []


async def test_nodes_that_a_failed_child_has_not_begun_are_skipped(app: App, tasks: NestedTasks) -> None:
    child = tasks.returning(lambda: tasks.fail.s() >> tasks.numbers.s(1) >> tasks.numbers.s(2))
    async with working(app):
        run = await (child.outcome() >> tasks.wait.s(1)).astart()
        await until(lambda: tasks.count("wait") == 1)
        status = await run.astatus()
        assert (status.total, status.failed, status.skipped, status.active, status.pending) == (5, 2, 2, 1, 0)
        tasks.gate.set()
        assert await run.aget(30) == 1


async def test_a_run_that_expires_ends_its_children(app: App, tasks: NestedTasks) -> None:
    inner = tasks.returning(lambda: tasks.charge.s(1) >> tasks.wait.s(2) >> tasks.charge.s(3))
    async with working(app):
        run = await inner.astart(deadline=2.0)
        with pytest.raises(WorkflowExpired):
            await run.aget(30)
        status = await run.astatus()
        assert (status.state, status.active) == (RunState.EXPIRED, 0)
        assert (tasks.of("charge"), tasks.of("refund")) == ([1], [1])


OUTCOMES: dict[str, tuple[Callable[[NestedTasks], Workflow[Any]], Any]] = {
    "map": (lambda t: t.returning(lambda: t.step.map(range(3))), [0, 1, 2]),
    "call": (lambda t: t.returning(lambda: t.step.s(4)), 4),
    "group": (lambda t: t.returning(lambda: group(t.step.s(1), t.step.s(2))), [1, 2]),
    "child": (lambda t: t.returning(lambda: t.returning(lambda: t.step.map(range(3)))), [0, 1, 2]),
    "plain": (lambda t: t.returning(lambda: {"$run": "mine"}), {"$run": "mine"}),
    "map reference": (lambda t: t.returning(lambda: {"$map": 0}), {"$map": 0}),
}


@pytest.mark.parametrize(("make", "value"), OUTCOMES.values(), ids=OUTCOMES)
async def test_no_internal_reference_reaches_the_code_of_tasks(
    app: App, tasks: NestedTasks, make: Callable[[NestedTasks], Any], value: Any
) -> None:
    outcome = {"state": "SUCCESS", "value": value}
    async with working(app):
        for workflow, wanted in (
            (make(tasks), value),
            (make(tasks) | tasks.show.s(), repr(value)),
            (make(tasks).outcome(), outcome),
            (make(tasks).outcome() | tasks.show.s(), repr(outcome)),
            (group(make(tasks), on_error="continue"), [outcome]),
            (group(make(tasks), on_error="continue") | tasks.show.s(), repr([outcome])),
        ):
            run = await workflow.astart()
            found = await run.aget(30)
            assert repr(found) == repr(wanted) or msg_of(found) == wanted


def msg_of(value: Any) -> Any:
    """Return outcomes as what JSON says of them."""
    if isinstance(value, list):
        return [msg_of(item) for item in value]
    return {"state": value.state, "value": value.value} if isinstance(value, Outcome) else value


def test_a_map_of_a_dynamic_task_is_refused(app: App, tasks: NestedTasks) -> None:
    @app.task(dynamic=True)
    async def grow(number: int) -> Any:
        return tasks.step.s(number)

    for workflow in (grow.map([1]), tasks.numbers.s(1) | grow.map(), grow.chunks([1], 1)):
        with pytest.raises(Misconfigured, match="is dynamic, and cannot be mapped"):
            workflow.start()


@pytest.mark.parametrize("policy", ["fail", "skip", "continue", "hold"])
async def test_a_map_whose_items_are_no_list_ends_as_its_policy_says(
    app: App, tasks: NestedTasks, policy: str
) -> None:
    tasks.is_broken = False
    async with working(app):
        run = await (tasks.total.s([1]) | tasks.step.map(on_error=policy) | tasks.show.s()).astart()  # type: ignore[call-overload]
        if policy == "hold":
            await until_state(run, RunState.HELD)
            await app.dlq.apurge()
        if policy in ("fail", "hold"):
            await until_failed(run)
        elif policy == "skip":
            assert await run.aget(30) is None
        else:
            assert "takes a list from the step before it, got 1" in await run.aget(30)
        status = await run.astatus()
        assert status.done + status.failed + status.skipped == status.total == 3
