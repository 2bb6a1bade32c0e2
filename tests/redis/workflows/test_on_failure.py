"""`on_failure` of a step and of a run: a job that is called once with what has failed."""

from collections.abc import Callable
from typing import Any

import pytest
import redis

from celery5 import App, first, fork, group
from celery5.errors import Misconfigured, WorkflowCancelled, WorkflowFailed
from celery5.workflows import Flow, RunState, StepFailure, WorkflowRun
from celery5.workflows.compose import Workflow
from tests.redis.worker.workers import Lines, until, until_async, working
from tests.redis.workflows.sample_tasks import QUEUES, SampleTasks


class OnFailureTasks(SampleTasks):
    """Tasks that get failures: `of_step` and `of_run` have what each call got."""

    def __init__(self, app: App) -> None:
        super().__init__(app)
        self.of_step: list[list[StepFailure]] = []
        self.of_run: list[list[StepFailure]] = []

        @app.task(name="tell_step", queue="far")
        async def tell_step(failures: list[StepFailure], channel: str = "") -> None:
            self.of_step.append(failures)

        @app.task(name="tell_run")
        async def tell_run(failures: list[StepFailure]) -> None:
            self.of_run.append(failures)

        @app.task(name="slow", undo=self.undo)
        async def slow(number: int) -> int:
            return number

        self.numbers: Any = None
        self.grows: Any = None
        self.tell_step, self.tell_run, self.slow = tell_step, tell_run, slow
        self.breaks: Any = self.fail.options(on_failure=tell_step)

    def nodes(self) -> tuple[list[list[Any]], list[list[Any]]]:
        """The steps of each call: of steps, and of runs."""
        return [[step.node for step in call] for call in self.of_step], [
            [step.node for step in call] for call in self.of_run
        ]


@pytest.fixture
def tasks(app: App) -> OnFailureTasks:
    """The tasks of the application."""
    return OnFailureTasks(app)


async def until_ended(run: WorkflowRun[Any]) -> RunState:
    """Wait until a run has ended and return its state."""

    async def has_ended() -> bool:
        return (await run.astatus()).ended is not None

    await until_async(has_ended)
    return (await run.astatus()).state


CASES: dict[
    str, tuple[Callable[[OnFailureTasks], Workflow[Any]], str, list[int], list[list[Any]], list[list[Any]]]
] = {
    "a step of a chain": (lambda t: t.add.s(1, 2) | t.breaks.s() | t.double.s(), "FAILED", [1], [[1]], [[1]]),
    "beside others": (lambda t: group(t.add.s(1, 2), t.breaks.s(1)), "FAILED", [1], [[1]], [[1]]),
    "two branches of a fork": (
        lambda t: t.add.s(1, 2) | fork(t.breaks.partial(), t.breaks.partial()),
        "FAILED",
        [2, 4],
        [[2], [4]],
        [[2, 4]],
    ),
    "a step that is skipped": (
        lambda t: group(t.breaks.options(on_error="skip").s(1), t.add.s(1, 2)),
        "SUCCESS",
        [],
        [[0]],
        [],
    ),
    "a step whose outcome is passed on": (
        lambda t: t.breaks.s(1).outcome() | t.tell.s(),
        "SUCCESS",
        [],
        [[0]],
        [],
    ),
    "an ignored end": (
        lambda t: t.breaks.options(ignore={"DEAD"}).s(1) >> t.add.s(1, 2),
        "SUCCESS",
        [],
        [],
        [],
    ),
    "a loser of a first": (
        lambda t: first(t.breaks.s(1), t.add.s(1, 2) >> t.add.s(1, 2)) | t.double.s(),
        "SUCCESS",
        [],
        [[0]],
        [],
    ),
    "a first of failures": (lambda t: first(t.breaks.s(1), t.fail.s(2)), "FAILED", [3], [[0]], [[3]]),
    "a map": (lambda t: t.breaks.map([7]) | t.total.s(), "FAILED", [0], [[0]], [[0]]),
    "a map that skips": (
        lambda t: t.breaks.map(range(30), on_error="skip") | t.total.s(),
        "SUCCESS",
        [],
        [[0] * 20],
        [],
    ),
    "a map too few of which succeed": (
        lambda t: t.breaks.map(range(3), need=0.5) | t.total.s(),
        "FAILED",
        [0],
        [[0] * 4],
        [[0] * 4],
    ),
    "a step that was undone": (lambda t: t.slow.s(1) >> t.breaks.s(2), "FAILED", [2], [[2]], [[2]]),
}


@pytest.mark.parametrize("name", CASES)
async def test_on_failure_is_called_once_for_a_step_and_a_run_that_fail(
    app: App, tasks: OnFailureTasks, name: str
) -> None:
    make, state, failed_nodes, of_step, of_run = CASES[name]
    async with working(app, queues=QUEUES):
        run = await make(tasks).astart(on_failure=tasks.tell_run)
        assert (await until_ended(run)).value == state
        await until(lambda: len(tasks.of_step) == len(of_step) and len(tasks.of_run) == len(of_run))
        status = await run.astatus()
    assert status.failed_node in failed_nodes or (not failed_nodes and status.failed_node is None)
    assert sorted(tasks.nodes()[0]) == of_step
    assert [sorted(call) for call in tasks.nodes()[1]] == of_run


async def test_a_failure_says_which_job_of_which_task_failed_and_why(app: App, tasks: OnFailureTasks) -> None:
    @app.task(name="give_up", dynamic=True)
    async def give_up() -> object:
        return group(tasks.add.s(1, 2), tasks.fail.s(9))

    async with working(app, queues=QUEUES):
        run = await (tasks.add.s(1, 2) >> give_up.s()).astart(on_failure=tasks.tell_run.s())
        await until(lambda: bool(tasks.of_run))
        status = await run.astatus()
        (listed,) = await app.workflows.alist_runs()
    ((failure,),) = tasks.of_run
    child = failure.id.partition("~")[0]
    assert failure == StepFailure(
        id=failure.id,
        run=run.id,
        node=1,
        task="fail",
        state="DEAD",
        type="ValueError",
        message="no 9",
        reason="not-retried",
    )
    assert child != run.id
    assert listed == status
    assert (status.failed_node, status.failed_task, status.failed_job, status.error) == (
        1,
        "fail",
        failure.id,
        "ValueError: no 9",
    )


async def test_a_long_message_is_cut_between_two_characters(app: App, tasks: OnFailureTasks) -> None:
    @app.task(name="complain", max_retries=0)
    async def complain(text: str) -> None:
        raise ValueError(text)

    async with working(app, queues=QUEUES):
        await complain.s("a" + "\u20ac" * 5000).astart(on_failure=tasks.tell_run)
        await until(lambda: bool(tasks.of_run))
    ((failure,),) = tasks.of_run
    assert failure.message == "a" + "\u20ac" * 666 + "..."


async def test_a_retry_that_fails_again_is_a_new_failure(app: App, tasks: OnFailureTasks) -> None:
    async with working(app, queues=QUEUES):
        run = await (tasks.breaks.s(1) >> tasks.breaks.map([2, 3])).astart(on_failure=tasks.tell_run)
        for count in (1, 2):
            assert await until_ended(run) is RunState.FAILED
            await until(lambda count=count: (len(tasks.of_step), len(tasks.of_run)) == (count, count))  # type: ignore[misc]
            await run.aretry()
        await until(lambda: len(tasks.of_run) == 3)
        tasks.is_broken = False
        await run.aretry()
        assert await run.aget(30) == [2, 3]
        status = await run.astatus()
    assert tasks.nodes() == ([[0]] * 3, [[0]] * 3)
    assert (status.failed_node, status.failed_task, status.error) == (None, "", "")


async def test_a_held_step_has_failed_when_its_dead_letter_is_purged(app: App, tasks: OnFailureTasks) -> None:
    async with working(app, queues=QUEUES):
        run = await (tasks.breaks.options(on_error="hold").s(1) >> tasks.add.s(1, 2)).astart(
            on_failure=tasks.tell_run
        )

        async def is_held() -> bool:
            return (await run.astatus()).state is RunState.HELD

        await until_async(is_held)
        assert not tasks.of_step
        await app.dlq.apurge()
        await until(lambda: len(tasks.of_step) == len(tasks.of_run) == 1)
        status = await run.astatus()
    assert tasks.of_step == tasks.of_run
    assert (tasks.of_run[0][0].state, tasks.of_run[0][0].message) == ("PURGED", "its dead letter was purged")
    assert (status.failed_node, status.failed_task) == (0, "fail")


async def test_on_failure_is_called_for_an_expired_run_but_not_for_a_cancelled_one(
    app: App, tasks: OnFailureTasks
) -> None:
    async with working(app, queues=QUEUES):
        expired = await tasks.block.s(1).astart(deadline=0.2, on_failure=tasks.tell_run)
        await until(lambda: bool(tasks.of_run))
        assert await until_ended(expired) is RunState.EXPIRED
        cancelled = await (tasks.slow.s(1) >> tasks.block.s(1)).astart(on_failure=tasks.tell_run)
        await until(lambda: tasks.begun.is_set())
        await cancelled.acancel()
        with pytest.raises(WorkflowCancelled):
            await cancelled.aget(30)
        assert await (await tasks.total.adelay([1])).aget(30) == 1  # behind whatever was sent
    ((failure,),) = tasks.of_run
    assert (failure.id, failure.run, failure.node, failure.state) == (expired.id, expired.id, None, "EXPIRED")


async def test_on_failure_is_called_for_an_undo_that_fails(app: App, tasks: OnFailureTasks) -> None:
    slow: Any = tasks.slow.options(undo=tasks.breaks)
    async with working(app, queues=QUEUES):
        run = await (slow.s(4) >> tasks.fail.s(1)).astart(on_failure=tasks.tell_run)
        await until(lambda: len(tasks.of_step) == len(tasks.of_run) == 1)
        status = await run.astatus()
    (of_step,) = tasks.of_step
    assert [(failure.task, failure.message) for failure in of_step] == [("fail", "no 4")]
    assert [failure.message for failure in tasks.of_run[0]] == ["no 1", "no 4"]
    assert (status.undos, status.undone, status.undo_failed) == (1, 0, 1)


async def test_a_run_neither_waits_for_its_on_failure_jobs_nor_stops_them(
    app: App, tasks: OnFailureTasks
) -> None:
    received: list[str] = []

    @app.task(name="tell_slowly")
    async def tell_slowly(failures: list[StepFailure]) -> None:
        tasks.begun.set()
        await tasks.gate.wait()
        received.append(failures[0].type)

    async with working(app, queues=QUEUES):
        run = await tasks.fail.options(on_failure=tell_slowly).s(1).astart()
        with pytest.raises(WorkflowFailed):
            await run.aget(30)
        await tasks.begun.wait()
        for entry in ({}, {"from": b"0", "to": b"9"}):
            await app.workflows.revoke_members(run.queue, {"revoke": run.id.encode(), **entry})
        assert (await run.astatus()).active == 0
        tasks.is_broken = False
        await run.aretry()  # which waits for none either
        assert await run.aget(30) == 1
        tasks.gate.set()
        await until(lambda: received == ["ValueError"])


@pytest.mark.parametrize("is_forgotten", [False, True])
async def test_a_dead_on_failure_job_is_replayed_when_its_run_has_ended(
    app: App, redis_client: "redis.Redis", is_forgotten: bool
) -> None:
    received: list[int] = []
    is_down = True

    @app.task(name="tell_late", max_retries=0)
    async def tell_late(failures: list[StepFailure]) -> None:
        if is_down:
            raise ConnectionError
        received.append(len(failures))

    @app.task(name="trip", max_retries=0, on_failure=tell_late)
    async def trip() -> None:
        raise ValueError

    async with working(app, queues=QUEUES):
        run: WorkflowRun[Any] = await trip.s().astart()

        async def are_dead() -> bool:
            return (await app.dlq.areplay(dry_run=True)).matched == 2

        await until_async(are_dead)
        is_down = False
        if is_forgotten:
            redis_client.delete(app.queue(run.queue).run(run.id))
        tally = await app.dlq.areplay()
        assert (tally.done, tally.left) == (1, {"run-ended": 1})
        await until(lambda: received == [1])


async def test_on_failure_takes_a_task_without_parameters_or_a_call_of_one(
    app: App, tasks: OnFailureTasks
) -> None:
    calls: list[tuple[int, str]] = []

    @app.task(name="clean", queue="far", loop="asyncio")
    async def clean() -> None:
        calls.append((0, ""))

    @app.task(name="tidy")
    def tidy(failures: list[dict[str, Any]], room: str, *, tries: int = 0) -> None:
        calls.append((len(failures), f"{room}{tries}"))

    ways: list[Any] = [clean, clean.s(), tidy.partial("hall", tries=2)]
    async with working(app, queues=QUEUES):
        for way in ways:
            await tasks.fail.s(1).astart(on_failure=way)
        await until(lambda: len(calls) == 3)
    assert sorted(calls) == [(0, ""), (0, ""), (1, "hall2")]


async def test_the_outbox_sends_the_on_failure_job_of_a_declared_workflow(
    app: App, tasks: OnFailureTasks, redis_client: "redis.Redis"
) -> None:
    @app.workflow(on_failure=tasks.tell_step.options(countdown=0.01).partial(channel="ops"))
    def order(flow: Flow, number: int) -> int:
        return flow.call(tasks.fail, number)

    run = await order.astart(3)
    assert run.queue == "default"
    async with working(app, queues=QUEUES):
        await until(lambda: len(tasks.of_step) == 1)
        await until(lambda: not redis_client.xlen(app.queue("default").run_outbox))
    assert tasks.of_step[0][0].message == "no 3"


def test_a_wrong_on_failure_is_refused_where_it_is_declared(app: App, tasks: OnFailureTasks) -> None:
    @app.task(name="grumble")
    async def grumble(text: str) -> None: ...

    @app.task(name="branch", dynamic=True)
    async def branch(failures: list[StepFailure]) -> object: ...

    for wrong in (5, "tell_run", tasks.add.s(1, 2) | tasks.double.s(), tasks.double.map([1])):
        with pytest.raises(Misconfigured, match=r"on_failure is .*: give a task, or one call of it"):
            tasks.add.options(on_failure=wrong)
        with pytest.raises(Misconfigured, match="on_failure is "):
            app.workflow(name="wrong", on_failure=wrong)(lambda _flow: None)
        with pytest.raises(Misconfigured, match="start: on_failure is "):
            tasks.add.s(1, 2).start(on_failure=wrong)
    for wrong_task, why in ((grumble, r"called with a list\[StepFailure\] first"), (branch, "is dynamic")):
        with pytest.raises(Misconfigured, match=f"on_failure={wrong_task.name}: .*{why}"):
            tasks.add.s(1, 2).start(on_failure=wrong_task)


LOGGED: dict[str, tuple[Callable[[OnFailureTasks], Workflow[Any]], tuple[Any, ...]]] = {
    "a step": (lambda t: t.add.s(1, 2) >> t.fail.s(7), ("FAILED", 1, "fail", "ValueError: no 7")),
    "a step of another queue": (
        lambda t: group(t.add.s(1, 2), t.add.s(2, 3), t.fail.options(queue="far").s(7)),
        ("FAILED", 2, "fail", "ValueError: no 7"),
    ),
    "after its undo": (lambda t: t.slow.s(1) >> t.fail.s(7), ("FAILED", 2, "fail", "ValueError: no 7")),
    "its deadline": (lambda t: t.block.s(1), ("EXPIRED", None, "", "WorkflowExpired: its deadline is over")),
}


@pytest.mark.parametrize("name", LOGGED)
async def test_a_run_that_fails_is_logged_once_with_where_and_why(
    app: App, tasks: OnFailureTasks, name: str
) -> None:
    make, logged = LOGGED[name]
    with Lines() as log:
        async with working(app, queues=QUEUES):
            run = await make(tasks).astart(deadline=0.3 if name == "its deadline" else 600)
            await until(lambda: bool(log.of("workflow:failed")))
            other = await tasks.block.s(1).astart()
            await other.acancel()  # which is no failure
            assert await until_ended(other) is RunState.CANCELLED
        (line,) = log.of("workflow:failed")
    assert (line["run"], line["queue"]) == (run.id, run.queue)
    assert tuple(line.get(key) for key in ("state", "node", "task", "why")) == logged


INSIDE: dict[str, tuple[Callable[[OnFailureTasks], Workflow[Any]], list[str]]] = {
    "a map over what the step before returns": (
        lambda t: t.numbers.s() | t.breaks.map(on_error="skip") | t.total.s(),
        ["no 1", "no 2"],
    ),
    "items that are no list": (lambda t: t.add.s(1, 2) | t.breaks.map(), ["takes a list"]),
    "a step that has returned a workflow": (lambda t: t.grows.s() >> t.add.s(1, 2), ["no 5"]),
}


@pytest.mark.parametrize("name", INSIDE)
async def test_on_failure_is_called_for_steps_that_are_known_only_later(
    app: App, tasks: OnFailureTasks, name: str
) -> None:
    @app.task(name="numbers")
    async def numbers() -> list[int]:
        return [1, 2]

    @app.task(name="grows", dynamic=True, on_failure=tasks.tell_step)
    async def grows() -> object:
        return tasks.fail.s(5) >> tasks.add.s(1, 2)

    tasks.numbers, tasks.grows = numbers, grows
    make, messages = INSIDE[name]
    async with working(app, queues=QUEUES):
        await make(tasks).astart()
        await until(lambda: bool(tasks.of_step))
    (received,) = tasks.of_step
    assert len(received) == len(messages)
    assert all(any(message in failure.message for failure in received) for message in messages)
