"""At the server: what one worker asks of Redis: its connections, how long its reads wait, how often its heart beats."""

import asyncio
import itertools
import re
from typing import Any, cast

import pytest
import redis
import trio

from celery5 import App
from tests.redis.worker.workers import until, working

LEASE = 1.8
READ_BLOCK = 0.25
CONNECTIONS = 3
"""One for everything, one to read with, one to listen on: however many jobs a worker runs."""


async def told(client: "redis.Redis", *, until_said: str, times: int) -> list[tuple[float, str]]:
    """What the server is told by whomever, until something was said so often: when, and what."""

    def listen() -> list[tuple[float, str]]:
        found: list[tuple[float, str]] = []
        untyped: Any = client
        with untyped.monitor() as monitor:
            for command in monitor.listen():
                found.append((command["time"], command["command"]))
                if sum(said.startswith(until_said) for _, said in found) == times:
                    return found
        return found

    with trio.fail_after(30):
        return await trio.to_thread.run_sync(listen, abandon_on_cancel=True)


async def test_worker_reads_for_their_timeout_and_beats_thrice_a_lease(
    url: str, app_name: str, redis_client: "redis.Redis"
) -> None:
    app = App(app_name, broker=url, read_block=READ_BLOCK, lease=LEASE)
    keys = app.queue("default")
    async with working(app):
        lines = await told(redis_client, until_said=f"ZADD {keys.leases} ", times=5)
    blocks = [re.findall(r"\bBLOCK (\d+)", said) for _, said in lines if keys.stream in said]
    assert {int(digits) for found in blocks for digits in found} == {int(READ_BLOCK * 1000)}
    beats = [at for at, said in lines if said.startswith(f"ZADD {keys.leases} ")]
    gaps = [later - earlier for earlier, later in itertools.pairwise(beats)]
    assert min(gaps) < LEASE / 2.5
    app.close()


@pytest.mark.parametrize("kind", ["trio", "asyncio"])
async def test_a_worker_has_three_connections_however_many_jobs_it_runs(
    url: str, app_name: str, redis_client: "redis.Redis", kind: str
) -> None:
    app = App(app_name, broker=url)
    running, go = list[int](), trio.Event()

    async def on_trio(number: int) -> None:
        running.append(number)
        await go.wait()

    async def on_asyncio(number: int) -> None:
        running.append(number)
        while not go.is_set():
            await asyncio.sleep(0.01)

    wait: Any = app.task(on_trio) if kind == "trio" else app.task(loop="asyncio")(on_asyncio)
    untyped: Any = redis_client
    before = {client["id"] for client in untyped.client_list()}
    async with working(app, name=app_name):
        await app.asend_many([wait.s(number) for number in range(60)])
        await until(lambda: len(running) == 60)
        names = [client["name"] for client in untyped.client_list() if client["id"] not in before]
        go.set()
    assert len(names) == CONNECTIONS
    assert all(name.startswith(f"celery5:{app_name}") for name in names)
    app.close()


async def test_a_job_that_comes_alone_is_settled_before_the_worker_reads_on(
    url: str, app_name: str, redis_client: "redis.Redis"
) -> None:
    app = App(app_name, broker=url)
    keys, untyped = app.queue("default"), cast("Any", redis_client)

    @app.task
    async def quick(number: int) -> int:
        return number

    def reads() -> bool:
        ours = [
            client for client in untyped.client_list() if client["name"].startswith(f"celery5:{app_name}")
        ]
        return any("b" in connection["flags"] for connection in ours)

    async def send() -> None:
        for number in itertools.count():
            await until(reads)
            await (await quick.adelay(number)).aget()

    async with working(app, name=app_name), trio.open_nursery() as nursery:
        nursery.start_soon(send)
        lines = await told(redis_client, until_said=f"XACK {keys.stream} ", times=20)
        nursery.cancel_scope.cancel()
    words = [said.split()[0] for _, said in lines if keys.stream in said]
    steps = [word for word in words if word in ("XADD", "XACK", "XREADGROUP")]
    after = [second for first, second in itertools.pairwise(steps) if first == "XADD"]
    assert after
    assert set(after) == {"XACK"}
    app.close()
