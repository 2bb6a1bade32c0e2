"""RQ as a peer: its worker that does not fork, results kept only when asked for."""

import time

from contract import PATIENCE, RESULTS, SLEEP, URL, Peer, chunks, clock, command_line, trips
from redis import Redis
from rq import Queue
from stamps import done

KEPT = 500 if RESULTS else 0


def noop(n: int) -> int:
    """The smallest job."""
    done()
    return n


def nap(n: int) -> int:
    """A job that waits."""
    time.sleep(SLEEP)
    done()
    return n


def opened() -> Queue:
    """The queue, on its own connection."""
    return Queue("bench", connection=Redis.from_url(URL))


def enqueue(n: int) -> None:
    """One by one."""
    queue = opened()
    queue.enqueue("rq_app.noop", 0, result_ttl=KEPT)
    with clock.running():
        for i in range(n):
            queue.enqueue("rq_app.noop", i, result_ttl=KEPT)


def bulk(n: int) -> None:
    """In pipelines."""
    queue = opened()
    queue.enqueue("rq_app.noop", 0, result_ttl=KEPT)
    with clock.running():
        for chunk in chunks(n):
            queue.enqueue_many([Queue.prepare_data("rq_app.noop", (i,), result_ttl=KEPT) for i in chunk])


def sleep(n: int) -> None:
    """Jobs that wait."""
    queue = opened()
    for chunk in chunks(n + 1):
        queue.enqueue_many([Queue.prepare_data("rq_app.nap", (i,), result_ttl=KEPT) for i in chunk])


def latency(n: int) -> None:
    """Round trips, with a blocking read of the result."""
    queue = opened()
    for i in trips(n):
        with clock.lap():
            queue.enqueue("rq_app.noop", i, result_ttl=KEPT).latest_result(timeout=int(PATIENCE))


def worker(processes: int, concurrency: int) -> list[str]:
    """Its own command; a process runs one job at a time."""
    quiet = ("-q", "--disable-job-desc-logging")
    return command_line("rq", "worker", "bench", "--url", URL, "-w", "rq.worker.SimpleWorker", *quiet)


peer = Peer(enqueue, bulk, sleep, latency, worker)
