"""Dramatiq as a peer: its Redis broker, plain functions in threads, no results unless asked for."""

import time

import dramatiq
from contract import PATIENCE, RESULTS, SLEEP, URL, Peer, chunks, clock, command_line, trips
from dramatiq.brokers.redis import RedisBroker
from dramatiq.results import Results
from dramatiq.results.backends import RedisBackend
from stamps import done

broker = RedisBroker(url=URL)
if RESULTS:
    broker.add_middleware(Results(backend=RedisBackend(url=URL)))
dramatiq.set_broker(broker)
stored = {"store_results": True} if RESULTS else {}


@dramatiq.actor(**stored)
def noop(n: int) -> int:
    """The smallest job."""
    done()
    return n


@dramatiq.actor(**stored)
def nap(n: int) -> int:
    """A job that waits."""
    time.sleep(SLEEP)
    done()
    return n


def enqueue(n: int) -> None:
    """One by one."""
    noop.send(0)
    with clock.running():
        for i in range(n):
            noop.send(i)


def bulk(n: int) -> None:
    """In groups."""
    noop.send(0)
    with clock.running():
        for chunk in chunks(n):
            dramatiq.group([noop.message(i) for i in chunk]).run()


def sleep(n: int) -> None:
    """Jobs that wait."""
    for i in range(n + 1):
        nap.send(i)


def latency(n: int) -> None:
    """Round trips."""
    for i in trips(n):
        with clock.lap():
            noop.send(i).get_result(block=True, timeout=int(PATIENCE * 1000))


def worker(processes: int, concurrency: int) -> list[str]:
    """Its own command."""
    return command_line(
        "dramatiq", "dramatiq_app", "--processes", str(processes), "--threads", str(concurrency)
    )


peer = Peer(enqueue, bulk, sleep, latency, worker)
