"""Lost replies: what is asked of a run again is done once, and the answer is that of the first time."""

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import closing, suppress
from functools import partial
from typing import Any, TypeVar

import pytest
import redis
import trio

from celery5 import App, group
from celery5.broker.servers.embedded import EmbeddedServer
from celery5.errors import BrokerError, WorkflowFailed
from celery5.workflows import Flow, RunState, WorkflowRun
from tests.faults.connections.proxy import FaultyProxy
from tests.redis.worker.workers import until, working
from tests.redis.workflows.sample_tasks import QUEUES, SampleTasks

T = TypeVar("T")

MOST_COMMANDS = 30
"""No call here makes more commands than this."""


class Shop:
    """An application with a workflow that waits, and its tasks."""

    def __init__(self, name: str, url: str) -> None:
        self.app = App(name, broker=url, backlog=0)
        self.tasks = tasks = SampleTasks(self.app)

        @self.app.workflow(name="approve")
        def approve(flow: Flow, number: int) -> list[Any]:
            return [flow.wait_for("go"), flow.wait_for("go"), number]

        self.approve = approve
        self.starts: dict[str, Callable[[str], WorkflowRun[Any]]] = {
            "a call": lambda run_id: tasks.add.s(1, 2).start(id=run_id),
            "long arguments": lambda run_id: group(tasks.add.s(1, n) for n in range(50)).start(id=run_id),
            "a map of many steps": lambda run_id: tasks.double.map(range(450)).start(id=run_id),
            "a declared workflow": lambda run_id: approve.options(id=run_id).start(1),
        }


@pytest.fixture
async def near(app_name: str, server: EmbeddedServer) -> AsyncIterator[Shop]:
    """The application of another caller, which loses nothing."""
    shop = Shop(app_name, server.url)
    with closing(shop.app):
        yield shop


async def lose_each_reply(
    proxy: FaultyProxy, name: str, prepare: Callable[[Shop, int], T], call: Callable[[T], Any]
) -> AsyncGenerator[tuple[int, T, Any]]:
    """Make a call again and again, and lose another reply each time; when it raises, it is made once more.

    Yields twice each time a number, what `prepare` made for the call, and the value: None before it is made once more.
    """
    for passing in range(MOST_COMMANDS):
        far = Shop(name, proxy.url)
        with closing(far.app):
            subject = await trio.to_thread.run_sync(prepare, far, passing)
            values: list[Any] = []
            proxy.lose_reply(passing=passing)
            with suppress(BrokerError):
                values.append(await trio.to_thread.run_sync(call, subject))
            is_lost, proxy.loss = proxy.loss is None, None
            proxy.accept()
            yield passing, subject, None
            if not values:
                values.append(await trio.to_thread.run_sync(call, subject))
            yield passing, subject, values[0]
        if not is_lost:
            return
    raise AssertionError("the call makes more commands than this test expects")


@pytest.mark.parametrize("shape", ["a call", "long arguments", "a map of many steps", "a declared workflow"])
@pytest.mark.parametrize("is_first", [True, False])
async def test_a_start_is_new_for_exactly_one_caller_whichever_reply_is_lost(
    proxy: FaultyProxy, app_name: str, near: Shop, shape: str, *, is_first: bool
) -> None:
    def prepare(far: Shop, passing: int) -> Callable[[], WorkflowRun[Any]]:
        return partial(far.starts[shape], f"run-{passing}")

    async for passing, _, mine in lose_each_reply(proxy, app_name, prepare, lambda start: start()):
        # The other one comes before or after the call is made again.
        if (mine is None) is not is_first:
            other = await trio.to_thread.run_sync(near.starts[shape], f"run-{passing}")
        if mine is not None:
            news = [mine.is_new, other.is_new]
            assert sum(news) == 1, f"command {passing + 1}: {news}"
    assert passing > 2


async def test_a_cancellation_is_true_for_exactly_one_caller_whichever_reply_is_lost(
    proxy: FaultyProxy, app_name: str, near: Shop
) -> None:
    def prepare(far: Shop, passing: int) -> WorkflowRun[Any]:
        return far.approve.start(passing)

    async for _, run, value in lose_each_reply(proxy, app_name, prepare, lambda run: run.cancel()):
        if value is not None:
            assert value is True
            other = near.app.workflows.find
            found = await trio.to_thread.run_sync(other, run.id)
            assert found is not None
            assert await found.acancel() is False
            assert (await found.astatus()).state is RunState.CANCELLED


async def test_a_signal_counts_once_whichever_reply_is_lost_also_when_it_ends_the_run(
    proxy: FaultyProxy, app_name: str, near: Shop
) -> None:
    def prepare(far: Shop, passing: int) -> WorkflowRun[Any]:
        return far.approve.start(passing)

    async for passing, run, value in lose_each_reply(
        proxy, app_name, prepare, lambda run: run.signal("go", 7)
    ):
        if value is not None:
            assert value is True
            found = await near.app.workflows.afind(run.id)
            assert found is not None
            assert await found.asignal("go", 8)
            assert await found.aget() == [7, 8, passing]

    def prepare_last(far: Shop, passing: int) -> WorkflowRun[Any]:
        run = prepare(far, passing)
        assert run.signal("go", 6)
        return run

    async for _, run, value in lose_each_reply(
        proxy, app_name, prepare_last, lambda run: run.signal("go", 7)
    ):
        if value is not None:
            assert value is True, "the signal has ended the run"
            assert await trio.to_thread.run_sync(run.signal, "go", 9) is False


async def test_a_run_is_retried_once_whichever_reply_is_lost(
    proxy: FaultyProxy, app_name: str, near: Shop, redis_client: "redis.Redis"
) -> None:
    async with working(near.app, queues=QUEUES):

        def retry(run: WorkflowRun[Any]) -> bool:
            run.retry()
            return True

        def prepare(far: Shop, passing: int) -> WorkflowRun[Any]:
            near.tasks.is_broken = True
            run = far.tasks.fail.s(passing).start()
            with pytest.raises(WorkflowFailed):
                run.get()
            near.tasks.is_broken = False
            return run

        async for passing, run, value in lose_each_reply(proxy, app_name, prepare, retry):
            if value:
                assert await trio.to_thread.run_sync(run.get) == passing
                assert redis_client.hget(near.app.queue(run.queue).run(run.id), "retries") == b"1"


async def test_a_retry_that_is_asked_for_again_after_another_failure_is_one_more(
    proxy: FaultyProxy, app_name: str, near: Shop, redis_client: "redis.Redis"
) -> None:
    far = Shop(app_name, proxy.url)
    async with working(near.app, queues=QUEUES):
        with closing(far.app):
            run = await trio.to_thread.run_sync(far.tasks.fail.s(1).start)
            with pytest.raises(WorkflowFailed):
                await trio.to_thread.run_sync(run.get)
            key = near.app.queue(run.queue).run(run.id)
            proxy.cut_reply("EVALSHA", after=0)
            await trio.to_thread.run_sync(run.retry)
            await until(lambda: redis_client.hget(key, "state") == b"failed")
            assert redis_client.hget(key, "retries") == b"1"
            near.tasks.is_broken = False
            await trio.to_thread.run_sync(run.retry)
            assert await trio.to_thread.run_sync(run.get) == 1
