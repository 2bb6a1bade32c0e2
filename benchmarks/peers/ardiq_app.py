"""ArdiQ as a peer: coroutines, its batches of prepared calls, no results unless asked for; a lane is a queue."""

import asyncio
import os

from ardiq import Ardiq
from contract import (
    PATIENCE,
    QUEUES,
    RESULTS,
    SLEEP,
    URL,
    WAIT,
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
spreads = bool(os.environ.get("BENCH_QUEUES"))
app = Ardiq(
    URL,
    "bench",
    QUEUES if spreads else None,
    # Lanes without weights are served strictly by priority.
    weights=dict.fromkeys(QUEUES, 1) if spreads else None,
    concurrency=int(os.environ.get("BENCH_CONCURRENCY", "100")),
    idle_timeout_ms=int(RECOVERY * 1000),
    result_ttl_ms=60_000 if RESULTS else 0,
)


@app.task(name="noop")
async def noop(n: int) -> int:
    """The smallest job."""
    done()
    return n


@app.task(name="nap")
async def nap(n: int) -> int:
    """A job that waits."""
    await asyncio.sleep(SLEEP)
    done()
    mark(n)
    return n


@app.task(name="work")
async def work(text: str) -> str:
    """A realistic job."""
    done()
    compute()
    await asyncio.sleep(WAIT)
    return text


@app.task(name="echo")
async def echo(text: str) -> str:
    """A job that returns what it got."""
    done()
    return text


async def enqueue(n: int) -> None:
    """One by one."""
    await noop.enqueue(0)
    with clock.running():
        for i in range(n):
            await noop.enqueue(i)


async def bulk(n: int) -> None:
    """In batches."""
    await noop.enqueue(0)
    with clock.running():
        for chunk in chunks(n):
            await app.enqueue_many([noop.prepare(i) for i in chunk])


async def sleep(n: int) -> None:
    """Jobs that wait."""
    for chunk in chunks(n + 1):
        await app.enqueue_many([nap.prepare(i) for i in chunk])


async def fill(task: str, n: int, size: int) -> None:
    """Jobs with a text."""
    text, sender = "x" * size, {"work": work, "echo": echo}[task]
    for portion in portions(n, size):
        await app.enqueue_many([sender.prepare(text) for _ in range(portion)])


async def spread(n: int) -> None:
    """Jobs over all lanes."""
    for name in QUEUES:
        lane = noop.options(priority=name)
        await app.enqueue_many([lane.prepare(i) for i in range(n // len(QUEUES))])


async def latency(n: int) -> None:
    """Round trips; the core waits for the result."""
    for i in trips(n):
        with clock.lap():
            job = await noop.enqueue(i)
            assert await job.result(timeout=PATIENCE) is not None


def worker(processes: int, concurrency: int) -> list[str]:
    """Its own command; the concurrency is the application's."""
    return command_line("ardiq", "run", "--quiet", "--workers", str(processes), "ardiq_app:app")


peer = Peer(
    lambda n: asyncio.run(enqueue(n)),
    lambda n: asyncio.run(bulk(n)),
    lambda n: asyncio.run(sleep(n)),
    lambda n: asyncio.run(latency(n)),
    worker,
    fill=lambda task, n, size: asyncio.run(fill(task, n, size)),
    spread=lambda n: asyncio.run(spread(n)),
)
