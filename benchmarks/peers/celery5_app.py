"""celery5 itself: blocking producers, the worker as it ships, with its results, log, leases and breakers on."""

import os

import trio
from contract import PATIENCE, SLEEP, URL, Peer, become, chunks, clock, trips
from stamps import done

from celery5 import App

app = App("bench", broker=URL)


@app.task(name="noop")
async def noop(n: int) -> int:
    """The smallest job."""
    done()
    return n


@app.task(name="nap")
async def nap(n: int) -> int:
    """A job that waits."""
    await trio.sleep(SLEEP)
    done()
    return n


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


def latency(n: int) -> None:
    """Round trips."""
    for i in trips(n):
        with clock.lap():
            noop.delay(i).get(timeout=PATIENCE)


def worker(processes: int, concurrency: int) -> None:
    """Its own command."""
    size = ("--processes", str(processes), "--concurrency", str(concurrency))
    options = os.environ.get("BENCH_OPTIONS", "").split()
    become("celery5", "-A", "celery5_app:app", "worker", "start", *size, *options)


peer = Peer(enqueue, bulk, sleep, latency, worker)
