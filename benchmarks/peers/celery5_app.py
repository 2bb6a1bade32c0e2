"""celery5 itself: blocking producers, the worker as it ships, with its results, log, leases and breakers on."""

import asyncio
import os
import time

import trio
from contract import (
    PATIENCE,
    QUEUES,
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

from celery5 import App

app = App("bench", broker=URL)

if VARIANT in ("def", "boxed"):
    boxed = VARIANT == "boxed"

    @app.task(name="noop", boxed=boxed)
    def noop(n: int) -> int:
        """The smallest job."""
        done()
        return n

    @app.task(name="nap", boxed=boxed)
    def nap(n: int) -> int:
        """A job that waits."""
        time.sleep(SLEEP)
        done()
        mark(n)
        return n

    @app.task(name="work", boxed=boxed)
    def work(text: str) -> str:
        """A realistic job."""
        done()
        compute()
        time.sleep(WAIT)
        return text

    @app.task(name="echo", boxed=boxed)
    def echo(text: str) -> str:
        """A job that returns what it got."""
        done()
        return text

else:
    loop, pause = ("asyncio", asyncio.sleep) if VARIANT == "asyncio" else ("trio", trio.sleep)

    @app.task(name="noop", loop=loop)
    async def noop(n: int) -> int:
        """The smallest job."""
        done()
        return n

    @app.task(name="nap", loop=loop)
    async def nap(n: int) -> int:
        """A job that waits."""
        await pause(SLEEP)
        done()
        mark(n)
        return n

    @app.task(name="work", loop=loop)
    async def work(text: str) -> str:
        """A realistic job."""
        done()
        compute()
        await pause(WAIT)
        return text

    @app.task(name="echo", loop=loop)
    async def echo(text: str) -> str:
        """A job that returns what it got."""
        done()
        return text


def enqueue(n: int) -> None:
    """One by one."""
    noop.delay(0)
    with clock.running():
        for i in range(n):
            noop.delay(i)


def bulk(n: int) -> None:
    """In pipelines."""
    noop.delay(0)
    with clock.running():
        for chunk in chunks(n):
            app.send_many([noop.s(i) for i in chunk])


def sleep(n: int) -> None:
    """Jobs that wait."""
    for chunk in chunks(n + 1):
        app.send_many([nap.s(i) for i in chunk])


def fill(task: str, n: int, size: int) -> None:
    """Jobs with a text."""
    text, sender = "x" * size, {"work": work, "echo": echo}[task]
    for portion in portions(n, size):
        app.send_many([sender.s(text) for _ in range(portion)])


def spread(n: int) -> None:
    """Jobs over all queues."""
    for name in QUEUES:
        sender = noop.options(queue=name)
        app.send_many([sender.s(i) for i in range(n // len(QUEUES))])


def latency(n: int) -> None:
    """Round trips."""
    for i in trips(n):
        with clock.lap():
            noop.delay(i).get(timeout=PATIENCE)


def worker(processes: int, concurrency: int) -> list[str]:
    """Its own command."""
    size = ["--processes", str(processes), "--concurrency", str(concurrency)]
    queues = ["--queues", ",".join(WORKER_QUEUES)] if WORKER_QUEUES else []
    options = os.environ.get("BENCH_OPTIONS", "").split()
    return command_line("celery5", "-A", "celery5_app:app", "worker", "start", *size, *queues, *options)


peer = Peer(enqueue, bulk, sleep, latency, worker, fill=fill, spread=spread)
