"""Due: what it costs to move jobs whose time has come, while ever more others wait for theirs.

    python benchmarks/due.py [--url redis://127.0.0.1:6379/0]      without a URL, at a server of its own

celery5 must be importable: run it in its environment. The jobs that wait are written with bare commands, since sending
a million would take longer than the measurement; those that fall due are sent and moved by celery5's own calls.
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
"""Jobs in one trip, as the worker's Mover takes them."""
TRIPS = 40
HOUR = 3_600_000


def fill(client: Any, keys: Any, job: Any, numbers: Iterator[int], count: int) -> None:
    """Let `count` jobs wait, an hour and more ahead."""
    far = int(time.time() * 1000) + HOUR
    for _ in range(count // AT_ONCE):
        ids = [f"waiting-{number:014}" for number in [next(numbers) for _ in range(AT_ONCE)]]
        with client.pipeline(transaction=False) as pipe:
            pipe.zadd(keys.due, {each: far + at for at, each in enumerate(ids)})
            pipe.hset(
                keys.waiting,
                mapping={each: job.message.replace(job.id.encode(), each.encode()) for each in ids},
            )
            pipe.hset(keys.jobs, mapping=dict.fromkeys(ids, "D"))
            pipe.execute()


def moving(app: Any, client: Any) -> float:
    """Microseconds that one job costs the server, from sent to moved, in the median trip."""
    from celery5.broker.calls import jobs as jobs_calls

    keys, task = app.queue("default"), app.tasks["nothing"]
    redis_ = app.connections.get_blocking_driver()
    laps = []
    for _ in range(TRIPS):
        jobs = [task.job() for _ in range(MOVED)]
        redis_.perform(jobs_calls.schedule(keys, [(job.id, job.message, "+0") for job in jobs]))
        began = time.perf_counter()
        moved, _ = redis_.perform(jobs_calls.promote_due_jobs(keys, limit=MOVED))
        laps.append(time.perf_counter() - began)
        if moved != MOVED:
            raise SystemExit(f"{moved} of {MOVED} due jobs were moved")
        client.delete(keys.stream)
    return median(laps) / MOVED * 1e6


def measured(url: str) -> dict[str, float]:
    """Microseconds for moving a due job, by how many others wait; and `due_flat`, the most beside the least."""
    from celery5 import App

    app = App("due", broker=url)

    async def nothing() -> None: ...

    app.task(name="nothing")(nothing)
    told: dict[str, float] = {}
    with redis.Redis.from_url(url) as client:
        client.flushall()
        keys, numbers, there = app.queue("default"), iter(range(10_000_000)), 0
        for name, count in WAITING.items():
            fill(client, keys, app.tasks["nothing"].job(), numbers, count - there)
            there = count
            told[f"due_us_{name}"] = moving(app, client)
        client.flushall()
    app.close()
    return told | {"due_flat": told["due_us_1m"] / told["due_us_1k"]}


def main() -> None:
    """Measure at the given server, or at one of our own."""
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
