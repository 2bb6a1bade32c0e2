"""streaQ as a peer: coredis over asyncio with uvloop, results only when asked for, its task log silenced."""

import logging
import os

import anyio
import uvloop
from contract import PATIENCE, RESULTS, SLEEP, URL, Peer, chunks, clock, command_line, trips
from stamps import done
from streaq import Worker

TTL = 60 if RESULTS else 0
logging.getLogger("streaq").setLevel(logging.WARNING)
app = Worker(
    redis_url=URL,
    concurrency=int(os.environ.get("BENCH_CONCURRENCY", "100")),
    anyio_kwargs={"use_uvloop": True},
)


@app.task(name="noop", ttl=TTL, silent=True)
async def noop(n: int) -> int:
    """The smallest job."""
    done()
    return n


@app.task(name="nap", ttl=TTL, silent=True)
async def nap(n: int) -> int:
    """A job that waits."""
    await anyio.sleep(SLEEP)
    done()
    return n


async def enqueue(n: int) -> None:
    """One by one."""
    async with app:
        await noop.enqueue(0)
        with clock.running():
            for i in range(n):
                await noop.enqueue(i)


async def bulk(n: int) -> None:
    """In pipelines."""
    async with app:
        await noop.enqueue(0)
        with clock.running():
            for chunk in chunks(n):
                await app.enqueue_many([noop.enqueue(i) for i in chunk])


async def sleep(n: int) -> None:
    """Jobs that wait."""
    async with app:
        for chunk in chunks(n + 1):
            await app.enqueue_many([nap.enqueue(i) for i in chunk])


async def latency(n: int) -> None:
    """Round trips."""
    async with app:
        for i in trips(n):
            with clock.lap():
                await (await noop.enqueue(i)).result(timeout=int(PATIENCE))


def worker(processes: int, concurrency: int) -> list[str]:
    """Its own command."""
    return command_line("streaq", "run", "streaq_app:app", "--workers", str(processes))


peer = Peer(
    lambda n: uvloop.run(enqueue(n)),
    lambda n: uvloop.run(bulk(n)),
    lambda n: uvloop.run(sleep(n)),
    lambda n: uvloop.run(latency(n)),
    worker,
)
