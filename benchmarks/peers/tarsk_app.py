"""tarsk as a peer, its build for Redis: coroutines, no results unless asked for; it has no call for many jobs."""

import asyncio
import os

from contract import (
    PATIENCE,
    QUEUES,
    RESULTS,
    SLEEP,
    URL,
    WAIT,
    WORKER_QUEUES,
    Peer,
    clock,
    command_line,
    compute,
    trips,
)
from stamps import done, mark
from tarsk import App

RECOVERY = float(os.environ.get("BENCH_RECOVERY", "0"))
"""Seconds until a lease is dead: half of them are the task's time, half are grace."""
app = App(broker=URL, **({"default_timeout": RECOVERY / 2} if RECOVERY else {}))
TTL = 60.0 if RESULTS else 0.0


@app.task(name="noop", queue="bench", result_ttl=TTL)
async def noop(n: int) -> int:
    """The smallest job."""
    done()
    return n


@app.task(name="nap", queue="bench", result_ttl=TTL)
async def nap(n: int) -> int:
    """A job that waits."""
    await asyncio.sleep(SLEEP)
    done()
    mark(n)
    return n


@app.task(name="work", queue="bench", result_ttl=TTL)
async def work(text: str) -> str:
    """A realistic job."""
    done()
    compute()
    await asyncio.sleep(WAIT)
    return text


@app.task(name="echo", queue="bench", result_ttl=TTL)
async def echo(text: str) -> str:
    """A job that returns what it got."""
    done()
    return text


def enqueue(n: int) -> None:
    """One by one."""
    noop.send(0)
    with clock.running():
        for i in range(n):
            noop.send(i)


def sleep(n: int) -> None:
    """Jobs that wait."""
    for i in range(n + 1):
        nap.send(i)


def fill(task: str, n: int, size: int) -> None:
    """Jobs with a text."""
    text, sender = "x" * size, {"work": work, "echo": echo}[task]
    for _ in range(n):
        sender.send(text)


def spread(n: int) -> None:
    """Jobs over all queues."""
    for i in range(n):
        noop.options(queue=QUEUES[i % len(QUEUES)]).send(i)


def latency(n: int) -> None:
    """Round trips; the result is polled for every millisecond."""
    for i in trips(n):
        with clock.lap():
            app.result(noop.send(i)).get(timeout=PATIENCE, poll=0.001)


def worker(processes: int, concurrency: int) -> list[str]:
    """Its own command: a supervisor, which talks to Redis, and children, which run the jobs."""
    size = ["--children", str(processes), "--slots", str(concurrency)]
    grace = ["--lease-grace", str(RECOVERY / 2)] if RECOVERY else []
    queues = ",".join(WORKER_QUEUES) or "bench"
    return command_line(
        "tarsk", "worker", "--app", "tarsk_app:app", "--broker", URL, "--queues", queues, *size, *grace
    )


peer = Peer(enqueue, enqueue, sleep, latency, worker, fill=fill, spread=spread)
