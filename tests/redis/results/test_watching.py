"""Watching one job: each change of its state and its progress until it has ended, in three colours, at a low cost."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import redis
import trio

from celery5 import App, AsyncResult, JobState, Reject, ResultTimeout, TaskFailed, TaskRevoked, progress
from celery5.broker.servers.embedded import EmbeddedServer
from celery5.errors import BadResult, BlockingInEventLoop, BrokerUnavailable, Misconfigured
from celery5.results import JobUpdate
from tests.redis.connections.colours import COLOURS
from tests.redis.process.onlookers import clients
from tests.redis.process.onlookers import until as until_true
from tests.redis.worker.workers import until, until_async, working

SOON = 0.1
"""The interval of a watch in these tests."""
Updates = list[JobUpdate[Any]]


async def collect(watch: AsyncIterator[JobUpdate[Any]], seen: Updates) -> None:
    """Add all updates to `seen`, one after the other."""
    async for update in watch:
        seen.append(update)


def collect_in(colour: str, start: Callable[[], Any], seen: Updates) -> None:
    """Add all updates of the watch that `start` makes to `seen`, in that colour; blocks."""
    if colour == "blocking":
        for update in start():
            seen.append(update)
        return

    async def story() -> None:
        await collect(start(), seen)

    run_in(colour, story)


def run_in(colour: str, story: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a coroutine in an event loop of its own."""
    if colour == "asyncio":
        asyncio.run(story())
    else:
        trio.run(story)


@pytest.fixture(params=COLOURS)
def colour(request: pytest.FixtureRequest) -> str:
    """Each colour."""
    return str(request.param)


async def watch_in(
    colour: str, result: AsyncResult[Any], seen: Updates | None = None, **options: Any
) -> Updates:
    """Return all updates of a job, watched from beside the test's own loop."""
    found: Updates = [] if seen is None else seen
    start = partial(result.watch, **{"every": SOON, **options})
    with trio.fail_after(60):
        await trio.to_thread.run_sync(collect_in, colour, start, found)
    return found


def state_of(update: JobUpdate[Any]) -> JobState:
    """Its state."""
    return update.state


async def test_each_state_and_each_report_is_seen_until_the_result(app: App, colour: str) -> None:
    step, seen = threading.Event(), Updates()

    @app.task
    def work() -> list[int]:
        progress(1, 4, "first")
        assert step.wait(30)
        return [7]

    sent = await work.adelay()

    async def follow() -> None:
        await watch_in(colour, sent, seen)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(follow)
        await until(lambda: bool(seen))  # before there is a worker
        async with working(app):
            await until(lambda: any(update.progress for update in seen))
            step.set()
            await until(lambda: seen[-1].is_final)
    assert list(dict.fromkeys(map(state_of, seen))) == [JobState.SENT, JobState.EXECUTING, JobState.SUCCESS]
    (report,) = {(found.done, found.total, found.note) for update in seen if (found := update.progress)}
    assert report == (1, 4, "first")
    assert seen[-1] == JobUpdate(JobState.SUCCESS, result=[7])
    assert not any(update.is_final for update in seen[:-1])
    assert all(earlier != later for earlier, later in pairwise(seen))


ENDS: dict[str, tuple[JobState, type[Exception] | None]] = {
    "fine": (JobState.SUCCESS, None),
    "fail": (JobState.DEAD, TaskFailed),
    "reject": (JobState.REJECTED, TaskFailed),
    "wrong type": (JobState.SUCCESS, BadResult),
}


async def test_a_job_that_has_ended_has_one_update_with_its_result_or_its_error(
    app: App, colour: str, redis_client: "redis.Redis"
) -> None:
    @app.task(queue="ends", max_retries=0)
    async def end(how: str) -> int:
        if how == "fail":
            raise ValueError("no")
        if how == "reject":
            raise Reject("no")
        return 1 if how == "fine" else "one"  # type: ignore[return-value]

    async with working(app, queues=("ends",)):
        sent = {how: await end.adelay(how) for how in ENDS}
        expired = await end.options(expires=0).adelay("late")
        revoked = await end.options(countdown=60).adelay("never")
        silent = await end.options(ignore_result=True).adelay("fine")
        assert await revoked.arevoke()
        for result in (*sent.values(), expired, silent):

            async def ended(one: AsyncResult[Any] = result) -> bool:
                return (await one.astatus()) not in (JobState.SENT, JobState.EXECUTING)

            await until_async(ended)
    for how, (state, error) in ENDS.items():
        for handle in (sent[how], app.result(sent[how].id, task=end)):
            (update,) = await watch_in(colour, handle)
            assert update.state is state
            assert (type(update.error) if update.error else None) in (
                (error,) if error is not TaskFailed else (TaskFailed, *TaskFailed.__subclasses__())
            )
            assert update.result == (1 if how == "fine" else None)
    (update,) = await watch_in(colour, expired)
    assert (update.state, update.is_final) == (JobState.EXPIRED, True)
    (update,) = await watch_in(colour, revoked)
    assert isinstance(update.error, TaskRevoked)
    assert await watch_in(colour, silent) == [JobUpdate(JobState.SUCCESS)]
    # The document of a dead job expires, and the job stays dead.
    redis_client.delete(sent["fail"].key)
    (update,) = await watch_in(colour, sent["fail"])
    assert (update.state, str(update.error).partition(": ")[2]) == (JobState.DEAD, "ValueError: no")


async def test_a_job_that_is_revoked_while_it_runs_ends_as_revoked(app: App, colour: str) -> None:
    seen = Updates()

    @app.task
    async def for_ever() -> None:
        await trio.sleep_forever()

    async with working(app):
        sent = await for_ever.adelay()
        async with trio.open_nursery() as nursery:

            async def follow() -> None:
                await watch_in(colour, sent, seen)

            nursery.start_soon(follow)
            await until(lambda: bool(seen) and seen[-1].state is JobState.EXECUTING)
            assert await sent.arevoke()
    assert seen[-1].state is JobState.REVOKED
    assert isinstance(seen[-1].error, TaskRevoked)


async def test_a_job_that_nobody_knows_is_unknown_until_the_timeout(app: App, colour: str) -> None:
    seen, began = Updates(), time.monotonic()
    with pytest.raises(ResultTimeout, match=r"no result after 0\.3 s; the job is UNKNOWN on any queue"):
        await watch_in(colour, app.result("nobody"), seen, timeout=0.3)
    assert list(map(state_of, seen)) == [JobState.UNKNOWN]
    assert 0.3 <= time.monotonic() - began < 20


async def test_a_timeout_says_what_keeps_the_job_from_beginning(app: App, colour: str) -> None:
    @app.task
    async def idle() -> None: ...

    seen = Updates()
    with pytest.raises(ResultTimeout, match="the job is SENT on queue 'default': no worker reads it"):
        await watch_in(colour, await idle.adelay(), seen, timeout=0.3)
    assert list(map(state_of, seen)) == [JobState.SENT]


async def test_redis_may_restart_in_between(own_server: EmbeddedServer, app_name: str, colour: str) -> None:
    app = App(app_name, broker=own_server.url)

    @app.task
    async def idle() -> None: ...

    seen = Updates()
    sent = await idle.adelay()

    async def follow() -> None:
        await watch_in(colour, sent, seen)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(follow)
        await until(lambda: bool(seen))
        await trio.to_thread.run_sync(own_server.kill)
        await trio.sleep(3 * SOON)  # some looks fail
        await trio.to_thread.run_sync(own_server.revive)

        async def revoked() -> bool:
            with suppress(BrokerUnavailable):
                return await sent.arevoke()
            return False

        await until_async(revoked)
    assert list(map(state_of, seen)) == [JobState.SENT, JobState.REVOKED]
    app.close()


async def test_without_redis_the_first_look_fails_at_once(
    app_name: str, colour: str, own_server: EmbeddedServer
) -> None:
    own_server.kill()
    app = App(app_name, broker=own_server.url)
    with pytest.raises(BrokerUnavailable):
        await watch_in(colour, app.result("nobody"))
    app.close()
    own_server.revive()


WATCHES = 1000


@pytest.mark.parametrize("loop", ["asyncio", "trio"])
async def test_a_thousand_watches_cost_few_commands_and_no_connections(
    app: App, loop: str, redis_client: "redis.Redis"
) -> None:
    @app.task
    async def idle(number: int) -> None: ...

    sent = await app.asend_many([idle.s(number) for number in range(WATCHES)])
    seen = {result.id: Updates() for result in sent}
    go_on = threading.Event()
    before = len(clients(redis_client))

    async def follow_all_on_asyncio() -> None:
        tasks = [asyncio.ensure_future(collect(result.watch(every=0.5), seen[result.id])) for result in sent]
        while not go_on.is_set():
            await asyncio.sleep(0.05)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)

    async def follow_all_on_trio() -> None:
        async with trio.open_nursery() as nursery:
            for result in sent:
                nursery.start_soon(collect, result.watch(every=0.5), seen[result.id])
            while not go_on.is_set():
                await trio.sleep(0.05)
            nursery.cancel_scope.cancel()

    def commands() -> int:
        return sum(
            line["calls"]
            for name, line in redis_client.info("commandstats").items()
            if name in ("cmdstat_evalsha", "cmdstat_eval", "cmdstat_mget", "cmdstat_subscribe")
        )

    story = follow_all_on_asyncio if loop == "asyncio" else follow_all_on_trio
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.to_thread.run_sync, run_in, loop, story)
        await until(lambda: all(seen.values()))
        await trio.sleep(1.5)  # the first looks are closer together
        first, began = commands(), time.monotonic()
        await trio.sleep(2.0)
        rate = (commands() - first) / (time.monotonic() - began)
        connections = len(clients(redis_client)) - before
        go_on.set()
    assert rate < 100, rate  # one by one there are 2,000 a second
    assert connections <= 12  # as many as a loop has for its calls, and the one for results
    assert {tuple(map(state_of, updates)) for updates in seen.values()} == {(JobState.SENT,)}


@pytest.mark.parametrize("loop", ["asyncio", "trio"])
async def test_a_watch_that_is_cancelled_stops_no_other(app: App, loop: str) -> None:
    @app.task
    async def one() -> int:
        return 1

    sent, seen = [await one.adelay() for _ in range(20)], [Updates() for _ in range(20)]

    async def on_asyncio() -> None:
        tasks = [
            asyncio.ensure_future(collect(result.watch(every=SOON), updates))
            for result, updates in zip(sent, seen, strict=True)
        ]
        for task in tasks[:19]:  # each has the lead of the others in its turn
            await asyncio.sleep(0.005)
            task.cancel()
        await asyncio.wait_for(tasks[19], 30)

    async def on_trio() -> None:
        scopes = [trio.CancelScope() for _ in sent]

        async def follow(number: int) -> None:
            with scopes[number]:
                await collect(sent[number].watch(every=SOON), seen[number])

        with trio.fail_after(30):
            async with trio.open_nursery() as nursery:
                for number in range(20):
                    nursery.start_soon(follow, number)
                for scope in scopes[:19]:
                    await trio.sleep(0.005)
                    scope.cancel()

    async with working(app):
        await trio.to_thread.run_sync(run_in, loop, on_asyncio if loop == "asyncio" else on_trio)
    assert seen[19][-1] == JobUpdate(JobState.SUCCESS, result=1)


def test_threads_read_their_jobs_together(app: App, redis_client: "redis.Redis") -> None:
    @app.task
    async def idle() -> None: ...

    sent = [idle.delay() for _ in range(8)]
    seen = [Updates() for _ in sent]
    threads = [
        threading.Thread(target=collect_in, args=("blocking", partial(result.watch, every=SOON), updates))
        for result, updates in zip(sent, seen, strict=True)
    ]
    for thread in threads:
        thread.start()
    until_true(lambda: all(seen))
    for result in sent:
        assert result.revoke()
    for thread in threads:
        thread.join(30)
    assert {updates[-1].state for updates in seen} == {JobState.REVOKED}


@pytest.mark.parametrize("loop", ["asyncio", "trio"])
def test_a_plain_loop_in_an_event_loop_names_the_other(app: App, loop: str) -> None:
    async def story() -> None:
        for _ in app.result("a").watch():
            raise AssertionError

    with pytest.raises(BlockingInEventLoop, match=f"block the {loop} event loop: write `async for` instead"):
        run_in(loop, story)


@pytest.mark.parametrize("every", [0, 0.05, -1, float("nan"), True, "1"])
def test_an_interval_that_is_too_short_or_none_is_refused(app: App, every: Any) -> None:
    with pytest.raises(Misconfigured, match=r"every is .*: give seconds, at least 0\.1"):
        app.result("a").watch(every=every)
