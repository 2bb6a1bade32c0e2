"""SAQ as a peer: uvloop, its Redis queue, jobs that leave nothing behind unless results are asked for."""

import asyncio

import uvloop
from contract import PATIENCE, RESULTS, SLEEP, URL, Peer, chunks, clock, trips
from saq import Queue, Worker
from stamps import done

TTL = 60 if RESULTS else -1


async def noop(ctx: object, *, n: int) -> int:
    """The smallest job."""
    done()
    return n


async def nap(ctx: object, *, n: int) -> int:
    """A job that waits."""
    await asyncio.sleep(SLEEP)
    done()
    return n


def opened() -> Queue:
    """The queue, with room for a hundred operations at once."""
    return Queue.from_url(URL, max_concurrent_ops=100)


async def enqueue(n: int) -> None:
    """One by one."""
    queue = opened()
    await queue.enqueue("noop", n=0, ttl=TTL)
    with clock.running():
        for i in range(n):
            await queue.enqueue("noop", n=i, ttl=TTL)


async def send(queue: Queue, task: str, n: int) -> None:
    """Many calls at once: SAQ has no call for many jobs without their results."""
    for chunk in chunks(n):
        await asyncio.gather(*[queue.enqueue(task, n=i, ttl=TTL) for i in chunk])


async def bulk(n: int) -> None:
    """Many calls at once."""
    queue = opened()
    await queue.enqueue("noop", n=0, ttl=TTL)
    with clock.running():
        await send(queue, "noop", n)


async def sleep(n: int) -> None:
    """Jobs that wait."""
    await send(opened(), "nap", n + 1)


async def latency(n: int) -> None:
    """Round trips; the result is polled for every millisecond."""
    queue = opened()
    for i in trips(n):
        with clock.lap():
            await queue.apply("noop", timeout=PATIENCE, poll_interval=0.001, n=i, ttl=TTL)


async def run(concurrency: int) -> None:
    """One worker."""
    await Worker(opened(), functions=[noop, nap], concurrency=concurrency).start()


def serve(processes: int, concurrency: int) -> None:
    """Its worker under uvloop."""
    uvloop.run(run(concurrency))


peer = Peer(
    lambda n: uvloop.run(enqueue(n)),
    lambda n: uvloop.run(bulk(n)),
    lambda n: uvloop.run(sleep(n)),
    lambda n: uvloop.run(latency(n)),
    None,
    serve,
)
