"""Celery's canvas: a chord of signatures, and chains."""

import os

from celery import chain, chord
from celery_app import app
from contract import VARIANT, Workflows, become, clock
from stamps import done

LIMIT = 60.0


@app.task(name="inc")
def inc(n: int) -> int:
    """Return the next number."""
    done()
    return n + 1


@app.task(name="total")
def total(numbers: list[int]) -> int:
    """Return the sum."""
    return sum(numbers)


def fan_in(n: int, laps: int) -> None:
    """Run chords."""
    chord([inc.s(i) for i in range(10)], total.s())().get(timeout=LIMIT)
    for _ in range(laps):
        with clock.lap():
            result = chord([inc.s(i) for i in range(n)], total.s())().get(timeout=LIMIT)
        assert result == sum(range(1, n + 1))


def run_chain(n: int) -> object:
    """Start a chain of n jobs."""
    return chain(inc.s(0), *[inc.s() for _ in range(n - 1)]).apply_async()


def chain_laps(n: int, laps: int) -> None:
    """Run chains one after another."""
    run_chain(5).get(timeout=LIMIT)
    for _ in range(laps):
        with clock.lap():
            result = run_chain(n).get(timeout=LIMIT)
        assert result == n


def chains(count: int, n: int) -> None:
    """Start many chains."""
    app.connection_for_write().ensure_connection(max_retries=1)
    clock.start()
    for _ in range(count):
        run_chain(n)


def worker(processes: int, concurrency: int) -> None:
    """Prefork: one child for each process. Threads: `concurrency` threads in one process."""
    threads = VARIANT == "threads"
    pool = ("-P", "threads", "-c", str(concurrency)) if threads else ("-P", "prefork", "-c", str(processes))
    quiet = ("--without-gossip", "--without-mingle", "--without-heartbeat", "-l", "WARNING")
    become("celery", "-A", "celery_workflows", "worker", "-n", f"bench-{os.getpid()}@%h", *quiet, *pool)


workflows = Workflows(fan_in, chain_laps, chains, worker)
