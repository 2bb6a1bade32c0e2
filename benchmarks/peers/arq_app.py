"""arq as a peer: uvloop, a poll every 10 ms (its default of 500 ms caps the drain), no results unless asked for."""

import asyncio
import os

import uvloop
from arq import create_pool
from arq.connections import ArqRedis, RedisSettings
from arq.worker import run_worker
from contract import PATIENCE, RESULTS, SLEEP, URL, Peer, clock, trips
from stamps import done

POLL = 0.01


async def noop(ctx: object, n: int) -> int:
    """The smallest job."""
    done()
    return n


async def nap(ctx: object, n: int) -> int:
    """A job that waits."""
    await asyncio.sleep(SLEEP)
    done()
    return n


class WorkerSettings:
    """What arq's worker reads."""

    functions = (noop, nap)
    redis_settings = RedisSettings.from_dsn(URL)
    keep_result = 60 if RESULTS else 0
    poll_delay = POLL
    max_jobs = int(os.environ.get("BENCH_CONCURRENCY", "100"))


async def opened() -> ArqRedis:
    """A pool of connections."""
    return await create_pool(WorkerSettings.redis_settings)


async def enqueue(n: int) -> None:
    """One by one."""
    pool = await opened()
    await pool.enqueue_job("noop", 0)
    with clock.running():
        for i in range(n):
            await pool.enqueue_job("noop", i)


async def send(pool: ArqRedis, task: str, n: int) -> None:
    """A hundred calls at a time: arq has no call for many."""
    for start in range(0, n, 100):
        await asyncio.gather(*[pool.enqueue_job(task, i) for i in range(start, min(start + 100, n))])


async def bulk(n: int) -> None:
    """Many calls at once."""
    pool = await opened()
    await pool.enqueue_job("noop", 0)
    with clock.running():
        await send(pool, "noop", n)


async def sleep(n: int) -> None:
    """Jobs that wait."""
    await send(await opened(), "nap", n + 1)


async def latency(n: int) -> None:
    """Round trips; the result is polled for every millisecond."""
    pool = await opened()
    for i in trips(n):
        with clock.lap():
            job = await pool.enqueue_job("noop", i)
            assert job is not None
            await job.result(timeout=PATIENCE, poll_delay=0.001)


def serve(processes: int, concurrency: int) -> None:
    """Its own entry point, after uvloop has been installed as its documentation shows."""
    WorkerSettings.max_jobs = concurrency
    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    run_worker(WorkerSettings)


peer = Peer(
    lambda n: uvloop.run(enqueue(n)),
    lambda n: uvloop.run(bulk(n)),
    lambda n: uvloop.run(sleep(n)),
    lambda n: uvloop.run(latency(n)),
    None,
    serve,
)
