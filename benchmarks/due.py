"""Measure what it costs to promote due jobs, while ever more other jobs are scheduled.

    python benchmarks/due.py [--url redis://127.0.0.1:6379/0]      without a URL, at its own server

celery5 must be importable: run it in its environment. The waiting jobs are written with bare commands, since sending
a million would take longer than the measurement; the due jobs are sent and promoted by celery5's own calls.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import redis

sys.path.append(str(Path(__file__).resolve().parent.parent))

WAITING = {"1k": 1_000, "100k": 100_000, "1m": 1_000_000}
AT_ONCE = 1_000
MOVED = 100
"""Jobs in one trip, as many as a worker promotes at once."""
TRIPS = 40
HOUR = 3_600_000


def fill(client: Any, keys: Any, job: Any, numbers: Iterator[int], count: int) -> None:
    """Schedule `count` jobs for an hour from now and later."""
    first_due = int(time.time() * 1000) + HOUR
    for _ in range(count // AT_ONCE):
        ids = [f"waiting-{number:014}" for number in [next(numbers) for _ in range(AT_ONCE)]]
        with client.pipeline(transaction=False) as pipe:
            pipe.zadd(keys.due, {job_id: first_due + offset for offset, job_id in enumerate(ids)})
            pipe.hset(
                keys.waiting,
                mapping={job_id: job.message.replace(job.id.encode(), job_id.encode()) for job_id in ids},
            )
            pipe.hset(keys.jobs, mapping=dict.fromkeys(ids, "D"))
            pipe.execute()


def moving(app: Any, client: Any) -> float:
    """Return the microseconds that the server takes for one job, from sent to promoted, in the median trip."""
    from celery5.broker.calls import jobs as jobs_calls

    keys, task = app.queue("default"), app.tasks["nothing"]
    driver = app.connections.get_blocking_driver()
    laps = []
    for _ in range(TRIPS):
        jobs = [task.job() for _ in range(MOVED)]
        driver.perform(jobs_calls.schedule(keys, [(job.id, job.message, "+0") for job in jobs]))
        start = time.perf_counter()
        moved = driver.perform(jobs_calls.promote_due_jobs(keys, limit=MOVED)).moved
        laps.append(time.perf_counter() - start)
        if moved != MOVED:
            raise SystemExit(f"{moved} of {MOVED} due jobs were moved")
        client.delete(keys.stream)
    return median(laps) / MOVED * 1e6


def measured(url: str) -> dict[str, float]:
    """Return the microseconds for promoting a due job by the number of waiting ones; and `due_flat`, most by least."""
    from celery5 import App

    app = App("due", broker=url)

    async def nothing() -> None: ...

    app.task(name="nothing")(nothing)
    figures: dict[str, float] = {}
    with redis.Redis.from_url(url) as client:
        client.flushall()
        keys, numbers, waiting = app.queue("default"), iter(range(10_000_000)), 0
        for name, count in WAITING.items():
            fill(client, keys, app.tasks["nothing"].job(), numbers, count - waiting)
            waiting = count
            figures[f"due_us_{name}"] = moving(app, client)
        client.flushall()
    app.close()
    return figures | {"due_flat": figures["due_us_1m"] / figures["due_us_1k"]}


def main() -> None:
    """Measure at the given server, or at one of its own."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--url", default="")
    url = parser.parse_args().url
    if url:
        print(json.dumps(measured(url)))
        return
    from server import Server

    with Server() as server:
        print(json.dumps(measured(server.url)))


if __name__ == "__main__":
    main()
