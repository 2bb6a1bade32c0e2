"""BlitzQ as a peer: reliable delivery, no results unless asked for, coroutines or, as a variant, functions."""

import asyncio
import os
import time

from blitzq import Queue
from contract import (
    PATIENCE,
    QUEUES,
    RESULTS,
    SLEEP,
    URL,
    VARIANT,
    WAIT,
    WORKER_QUEUES,
    Peer,
    chunks,
    clock,
    command_line,
    compute,
    portions,
    trips,
)
from stamps import done, mark

RECOVERY = float(os.environ.get("BENCH_RECOVERY", "60"))
queue = Queue("bench", redis_url=URL, store_results=RESULTS, result_ttl=60, visibility_timeout=RECOVERY)

if VARIANT == "def":

    @queue.task(name="noop")
    def noop(n: int) -> int:
        """The smallest job."""
        done()
        return n

    @queue.task(name="nap")
    def nap(n: int) -> int:
        """A job that waits."""
        time.sleep(SLEEP)
        done()
        mark(n)
        return n

    @queue.task(name="work")
    def work(text: str) -> str:
        """A realistic job."""
        done()
        compute()
        time.sleep(WAIT)
        return text

    @queue.task(name="echo")
    def echo(text: str) -> str:
        """A job that returns what it got."""
        done()
        return text

else:

    @queue.task(name="noop")
    async def noop(n: int) -> int:
        """The smallest job."""
        done()
        return n

    @queue.task(name="nap")
    async def nap(n: int) -> int:
        """A job that waits."""
        await asyncio.sleep(SLEEP)
        done()
        mark(n)
        return n

    @queue.task(name="work")
    async def work(text: str) -> str:
        """A realistic job."""
        done()
        compute()
        await asyncio.sleep(WAIT)
        return text

    @queue.task(name="echo")
    async def echo(text: str) -> str:
        """A job that returns what it got."""
        done()
        return text


async def enqueue(n: int) -> None:
    """One by one, by its asynchronous call, which is the faster one."""
    await noop.enqueue(0)
    with clock.running():
        for i in range(n):
            await noop.enqueue(i)


async def bulk(n: int) -> None:
    """In pipelines."""
    await noop.enqueue(0)
    with clock.running():
        for chunk in chunks(n):
            await noop.enqueue_many([(i,) for i in chunk])


async def sleep(n: int) -> None:
    """Jobs that wait."""
    for chunk in chunks(n + 1):
        await nap.enqueue_many([(i,) for i in chunk])


async def fill(task: str, n: int, size: int) -> None:
    """Jobs with a text."""
    text, sender = "x" * size, {"work": work, "echo": echo}[task]
    for portion in portions(n, size):
        await sender.enqueue_many([(text,)] * portion)


async def spread(n: int) -> None:
    """Jobs over all queues."""
    for name in QUEUES:
        await noop.options(queue=name).enqueue_many([(i,) for i in range(n // len(QUEUES))])


async def latency(n: int) -> None:
    """Round trips; the result is published to who waits."""
    for i in trips(n):
        with clock.lap():
            task = await noop.enqueue(i)
            await queue.get_result(task.id, timeout=PATIENCE)


def worker(processes: int, concurrency: int) -> list[str]:
    """Its own command, with a thread for each job at once where jobs are functions."""
    size = ["--workers", str(processes), "--concurrency", str(concurrency), "--threads", str(concurrency)]
    queues = ["--queues", ",".join(WORKER_QUEUES)] if WORKER_QUEUES else []
    return command_line("blitzq", "worker", "blitzq_app:queue", "--log-level", "WARNING", *size, *queues)


peer = Peer(
    lambda n: asyncio.run(enqueue(n)),
    lambda n: asyncio.run(bulk(n)),
    lambda n: asyncio.run(sleep(n)),
    lambda n: asyncio.run(latency(n)),
    worker,
    fill=lambda task, n, size: asyncio.run(fill(task, n, size)),
    spread=lambda n: asyncio.run(spread(n)),
)
