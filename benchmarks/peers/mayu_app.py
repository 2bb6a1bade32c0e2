"""mayu as a peer: functions in threads, no results unless asked for; it has no call for many jobs."""

import os
import time

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
from mayu import App
from stamps import done, mark

app = App(broker=URL, result_ttl=60 if RESULTS else None, default_queue="bench")


@app.task(name="noop")
def noop(n: int) -> int:
    """The smallest job."""
    done()
    return n


@app.task(name="nap")
def nap(n: int) -> int:
    """A job that waits."""
    time.sleep(SLEEP)
    done()
    mark(n)
    return n


@app.task(name="work")
def work(text: str) -> str:
    """A realistic job."""
    done()
    compute()
    time.sleep(WAIT)
    return text


@app.task(name="echo")
def echo(text: str) -> str:
    """A job that returns what it got."""
    done()
    return text


def enqueue(n: int) -> None:
    """One by one."""
    noop.delay(0)
    with clock.running():
        for i in range(n):
            noop.delay(i)


def sleep(n: int) -> None:
    """Jobs that wait."""
    for i in range(n + 1):
        nap.delay(i)


def fill(task: str, n: int, size: int) -> None:
    """Jobs with a text."""
    text, sender = "x" * size, {"work": work, "echo": echo}[task]
    for _ in range(n):
        sender.delay(text)


def spread(n: int) -> None:
    """Jobs over all queues."""
    for i in range(n):
        noop.send(i, queue=QUEUES[i % len(QUEUES)])


def latency(n: int) -> None:
    """Round trips."""
    for i in trips(n):
        with clock.lap():
            noop.delay(i).result(timeout=PATIENCE)


def worker(processes: int, concurrency: int) -> list[str]:
    """Its own command, with threads, which are far faster than its processes for these jobs."""
    size = ["--mode", "thread", "--processes", str(processes), "--threads", str(concurrency)]
    recovery = ["--visibility-timeout", os.environ.get("BENCH_RECOVERY", "30"), "--heartbeat-interval", "3"]
    queues = ["--queues", ",".join(WORKER_QUEUES)] if WORKER_QUEUES else []
    return command_line("mayu", "worker", "mayu_app:app", "--log-level", "WARNING", *size, *recovery, *queues)


peer = Peer(enqueue, enqueue, sleep, latency, worker, fill=fill, spread=spread)
