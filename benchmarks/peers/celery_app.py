"""Celery as a peer: JSON, no results unless asked for, no gossip, wide prefetch; prefork, or threads as a variant."""

import os
import time

from celery import Celery, group
from contract import PATIENCE, RESULTS, SLEEP, URL, VARIANT, Peer, chunks, clock, command_line, trips
from stamps import done

app = Celery("bench", broker=URL, backend=URL if RESULTS else None)
app.conf.update(
    task_ignore_result=not RESULTS,
    worker_prefetch_multiplier=64,
    worker_send_task_events=False,
    broker_connection_retry_on_startup=True,
    worker_enable_remote_control=False,
)


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
    return n


def enqueue(n: int) -> None:
    """One by one."""
    noop.delay(0)
    with clock.running():
        for i in range(n):
            noop.delay(i)


def bulk(n: int) -> None:
    """In groups over one producer."""
    noop.delay(0)
    with clock.running(), app.producer_or_acquire() as producer:
        for chunk in chunks(n):
            group(noop.s(i) for i in chunk).apply_async(producer=producer)


def sleep(n: int) -> None:
    """Jobs that wait."""
    for i in range(n + 1):
        nap.delay(i)


def latency(n: int) -> None:
    """Round trips."""
    for i in trips(n):
        with clock.lap():
            noop.delay(i).get(timeout=PATIENCE)


def worker(processes: int, concurrency: int) -> list[str]:
    """Prefork: one child for each process. Threads: `concurrency` threads in one process."""
    threads = VARIANT == "threads"
    pool = ("-P", "threads", "-c", str(concurrency)) if threads else ("-P", "prefork", "-c", str(processes))
    quiet = ("--without-gossip", "--without-mingle", "--without-heartbeat", "-l", "WARNING")
    return command_line(
        "celery", "-A", "celery_app", "worker", "-n", f"bench-{os.getpid()}@%h", *quiet, *pool
    )


peer = Peer(enqueue, bulk, sleep, latency, worker)
