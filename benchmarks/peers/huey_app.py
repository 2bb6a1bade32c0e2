"""Huey as a peer: its Redis storage with a blocking pop, threads, results by notification and only when asked for."""

import time

from contract import PATIENCE, RESULTS, SLEEP, URL, Peer, clock, command_line, trips
from huey import RedisHuey
from stamps import done

huey = RedisHuey("bench", url=URL, results=RESULTS, notify_result=RESULTS)


@huey.task()
def noop(n: int) -> int:
    """The smallest job."""
    done()
    return n


@huey.task()
def nap(n: int) -> int:
    """A job that waits."""
    time.sleep(SLEEP)
    done()
    return n


def enqueue(n: int) -> None:
    """One by one."""
    noop(0)
    with clock.running():
        for i in range(n):
            noop(i)


def bulk(n: int) -> None:
    """Its `map`, which sends one by one."""
    noop(0)
    with clock.running():
        noop.map(range(n))


def sleep(n: int) -> None:
    """Jobs that wait."""
    for i in range(n + 1):
        nap(i)


def latency(n: int) -> None:
    """Round trips."""
    for i in trips(n):
        with clock.lap():
            noop(i).get(blocking=True, timeout=PATIENCE)


def worker(processes: int, concurrency: int) -> list[str]:
    """Its own command, with threads and without its timer of periodic tasks."""
    return command_line("huey_consumer", "huey_app.huey", "-k", "thread", "-w", str(concurrency), "-n", "-q")


peer = Peer(enqueue, bulk, sleep, latency, worker)
