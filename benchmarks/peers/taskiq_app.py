"""taskiq as a peer: uvloop, the list broker or the stream broker of taskiq-redis, results only when asked for."""

import asyncio

import uvloop
from contract import PATIENCE, RESULTS, SLEEP, URL, VARIANT, Peer, chunks, clock, command_line, trips
from stamps import done
from taskiq_redis import ListQueueBroker, RedisAsyncResultBackend, RedisStreamBroker

OPEN = {"max_connection_pool_size": 100, "socket_timeout": None}
"""redis-py 8 reads for 5 s at most unless told otherwise, and the list broker blocks for ever: its worker would die."""
streams = VARIANT == "stream"
broker = RedisStreamBroker(URL, consumer_id="0", **OPEN) if streams else ListQueueBroker(URL, **OPEN)
if RESULTS:
    broker = broker.with_result_backend(RedisAsyncResultBackend(URL, result_ex_time=60))


@broker.task(task_name="noop")
async def noop(n: int) -> int:
    """The smallest job."""
    done()
    return n


@broker.task(task_name="nap")
async def nap(n: int) -> int:
    """A job that waits."""
    await asyncio.sleep(SLEEP)
    done()
    return n


async def enqueue(n: int) -> None:
    """One by one."""
    await broker.startup()
    await noop.kiq(0)
    with clock.running():
        for i in range(n):
            await noop.kiq(i)


async def bulk(n: int) -> None:
    """Many calls at once: there is no call for many."""
    await broker.startup()
    await noop.kiq(0)
    with clock.running():
        for chunk in chunks(n):
            await asyncio.gather(*[noop.kiq(i) for i in chunk])


async def sleep(n: int) -> None:
    """Jobs that wait."""
    await broker.startup()
    for chunk in chunks(n + 1):
        await asyncio.gather(*[nap.kiq(i) for i in chunk])


async def latency(n: int) -> None:
    """Round trips; the result is polled for every millisecond."""
    await broker.startup()
    for i in trips(n):
        with clock.lap():
            task = await noop.kiq(i)
            await task.wait_result(check_interval=0.001, timeout=PATIENCE)


def worker(processes: int, concurrency: int) -> list[str]:
    """Its own command, which runs uvloop by itself when that is installed."""
    size = ("--workers", str(processes), "--max-async-tasks", str(concurrency))
    return command_line(
        "taskiq", "worker", "taskiq_app:broker", *size, "--log-level", "WARNING", "--no-parse"
    )


peer = Peer(
    lambda n: uvloop.run(enqueue(n)),
    lambda n: uvloop.run(bulk(n)),
    lambda n: uvloop.run(sleep(n)),
    lambda n: uvloop.run(latency(n)),
    worker,
)
