"""Refused: while Redis takes no writes, a step of a run changes nothing, and is the same step when it is made again."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from celery5 import App, group
from celery5.broker.calls import workflows as calls
from celery5.broker.servers.embedded import EmbeddedServer
from celery5.broker.transient_errors import is_outage
from celery5.errors import BrokerError
from celery5.workflows import Flow, RunState, WorkflowRun
from tests.redis.worker.workers import until, working

FAILURE = '{"v":1,"id":"x","task":"t","state":"DEAD","failure":{"type":"E","message":"m"}}'
REFUSALS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "full": ({"maxmemory": 1}, {"maxmemory": 0}),
    "too few replicas": ({"min-replicas-to-write": 1}, {"min-replicas-to-write": 0}),
}


class Parts:
    """An application, and its server."""

    def __init__(self, app: App, client: "redis.Redis") -> None:
        self.app, self.client = app, client

        @app.task(name="near", max_retries=0)
        async def near(number: int) -> int:
            return number

        @app.task(name="grow", dynamic=True)
        async def grow(number: int) -> Any:
            return near.s(number)

        @app.workflow
        def waits(flow: Flow) -> object:
            return flow.wait_for("approved")

        self.near, self.grow, self.waits = near, grow, waits

    def apply(self, run: WorkflowRun[Any], *record: Any) -> Any:
        """Apply a record at the home of a run, and return the reply to it."""
        call = calls.advance(self.app.queue(run.queue), [calls.pack_record(*record)], ttl=60)
        return self.app.perform(call).replies[0]

    def everything(self) -> dict[bytes, Any]:
        """What is in Redis. The fields of a hash have no order."""
        client: Any = self.client
        return {
            key: client.hgetall(key) if client.type(key) == b"hash" else client.dump(key)
            for key in client.scan_iter()
        }


@pytest.fixture
def parts(own_server: EmbeddedServer, app_name: str) -> Iterator[Parts]:
    app = App(app_name, broker=own_server.url, backlog=0)
    with redis.Redis.from_url(own_server.url) as client:
        yield Parts(app, client)
    app.close()


Step = tuple[WorkflowRun[Any], tuple[Any, ...]]


def end_last(parts: Parts) -> Step:
    run: WorkflowRun[Any] = parts.near.s(1).start()
    return run, ("one", f"{run.id}~0", "1")


def end_first(parts: Parts) -> Step:
    run: WorkflowRun[Any] = (parts.near.s(1) | parts.near.s()).start()
    return run, ("one", f"{run.id}~0", "1")


def fail(parts: Parts) -> Step:
    run: WorkflowRun[Any] = group(parts.near.s(1), parts.near.s(2)).start()
    return run, ("end", f"{run.id}~0", "DEAD", FAILURE)


def end_members(parts: Parts) -> Step:
    run: WorkflowRun[Any] = parts.near.map(range(3)).start()
    return run, ("members", f"{run.id}~0", [0, 1, 2], ["0", "1", "2"])


def cancel(parts: Parts) -> Step:
    run: WorkflowRun[Any] = parts.near.s(1).start()
    return run, ("cancel", run.id)


def signal(parts: Parts) -> Step:
    run: WorkflowRun[Any] = parts.waits.start()
    return run, ("signal", run.id, "approved", "true", "s1")


def retry(parts: Parts) -> Step:
    run, record = end_last(parts)
    parts.apply(run, "end", record[1], "DEAD", FAILURE)
    return run, ("retry", run.id, 0)


def end_child(parts: Parts) -> Step:
    run: WorkflowRun[Any] = parts.grow.s(1).start()
    return run, ("sub", f"{run.id}~0", "SUCCESS", "5")


STEPS: list[tuple[Callable[[Parts], Step], RunState]] = [
    (end_last, RunState.SUCCESS),
    (end_first, RunState.RUNNING),
    (fail, RunState.FAILED),
    (end_members, RunState.SUCCESS),
    (cancel, RunState.CANCELLING),
    (signal, RunState.SUCCESS),
    (retry, RunState.RUNNING),
    (end_child, RunState.SUCCESS),
]


@pytest.mark.parametrize("refusal", REFUSALS)
@pytest.mark.parametrize(("prepare", "state"), STEPS, ids=lambda function: getattr(function, "__name__", ""))
def test_a_step_that_redis_refuses_changes_nothing_and_is_made_again(
    parts: Parts, prepare: Callable[[Parts], Step], state: RunState, refusal: str
) -> None:
    run, record = prepare(parts)
    before = parts.everything()
    refuse, allow = REFUSALS[refusal]
    for name, value in refuse.items():
        parts.client.config_set(name, value)
    try:
        with pytest.raises(BrokerError) as caught:
            parts.apply(run, *record)
        assert is_outage(caught.value)
        assert parts.everything() == before
    finally:
        for name, value in allow.items():
            parts.client.config_set(name, value)
    parts.apply(run, *record)
    assert run.status().state is state
    if state is RunState.SUCCESS:
        assert run.get(5) is not None


async def test_a_dynamic_step_that_redis_refuses_to_store_is_not_failed(parts: Parts) -> None:
    """Its worker was to publish the workflow that it has returned: no code of the user has failed."""
    runs = refused_before = 0

    def refused() -> int:
        # Redis 6.2 counts what it refuses inside of a script as a plain ERR.
        counts: Any = parts.client.info("errorstats")
        return sum(counts.get(f"errorstat_{name}", {"count": 0})["count"] for name in ("OOM", "ERR"))

    @parts.app.task(name="widen", dynamic=True, max_retries=0)
    async def widen(number: int) -> Any:
        nonlocal runs, refused_before
        runs += 1
        if runs == 1:
            refused_before = refused()
            parts.client.config_set("maxmemory", 1)
        return parts.near.s(number)

    async with working(parts.app):
        run = await widen.s(4).astart()
        await until(lambda: runs > 0 and refused() > refused_before)
        parts.client.config_set("maxmemory", 0)
        assert await run.aget(30) == 4
