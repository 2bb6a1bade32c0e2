"""Measure what jobs with a concurrency key cost, in time and in Redis commands.

The figures are the rate of jobs, the commands per job, the slowest script, the pause between two jobs of one key, and
how long one trip of a recovery, and of jobs that join waiting lists, holds the server.

    python benchmarks/gates.py [--url redis://127.0.0.1:6379/0]      without a URL, at its own server

celery5 must be importable: run it in its environment. One worker runs jobs of 2 ms of a task with limit=1, with 1, 12
and 1,000 keys, the last with 10,000 jobs. Commands are all that the server runs from the start of the worker to the
last job, inside and outside of scripts, without the calls of the scripts themselves.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import redis
import trio

sys.path.append(str(Path(__file__).resolve().parent.parent))

from celery5 import App
from celery5.broker.call import Call
from celery5.broker.calls import leases as lease_calls
from celery5.broker.calls import limits
from celery5.protocol.limits import AdmissionRule, get_waiting_list
from celery5.sending.publisher import LIMITED_JOBS_PER_TRIP
from celery5.services.worker.recovery import RECOVERY_BATCH as RECOVERED

RUNS = {"1": (1, 300), "12": (12, 1_200), "1000": (1_000, 10_000)}
"""Keys and jobs of each run, by its name."""
TAKES = 0.002
LIMIT = 60.0
SLOTS = 100
"""Jobs that the worker runs at once."""
SLOW = 200
"""Microseconds from which a script is in the slow log."""
NOT_COUNTED = ("cmdstat_info", "cmdstat_evalsha", "cmdstat_eval", "cmdstat_config|resetstat")
STAMPS = os.environ.get("BENCH_GATE_STAMPS", "")

app = App("gates", broker=os.environ.get("BENCH_GATE_URL", "redis://127.0.0.1:6379/0"))


@app.task(name="gates.one", limit=1, concurrency_key="who")
async def one(who: int) -> None:
    """Run for a short time, and write the times to a file."""
    began = time.time()
    await trio.sleep(TAKES)
    with open(STAMPS, "a") as file:  # noqa: ASYNC230  one short write
        file.write(f"{who} {began} {time.time()}\n")


def stamps(path: Path) -> list[tuple[str, float, float]]:
    """Return key, start and end of each job that has ended."""
    lines = path.read_text().splitlines() if path.exists() else []
    words = [line.split() for line in lines if line.count(" ") == 2]
    return [(key, float(began), float(ended)) for key, began, ended in words]


def pauses(jobs: list[tuple[str, float, float]]) -> list[float]:
    """Return the seconds from the end of each job to the next start of its key."""
    by_key: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for key, began, ended in jobs:
        by_key[key].append((began, ended))
    seconds: list[float] = []
    for times in by_key.values():
        times.sort()
        seconds += [after[0] - before[1] for before, after in pairwise(times)]
    return seconds


def commands(client: Any) -> int:
    """Return how many commands the server has run since its counters were reset."""
    statistics = client.info("commandstats")
    return sum(command["calls"] for name, command in statistics.items() if name not in NOT_COUNTED)


def run(url: str, client: Any, folder: Path, name: str) -> dict[str, float]:
    """Drain one queue, and return its figures."""
    keys, count = RUNS[name]
    path = folder / f"stamps-{name}"
    environment = os.environ | {"BENCH_GATE_URL": url, "BENCH_GATE_STAMPS": str(path)}
    environment["PYTHONPATH"] = f"{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}"
    client.flushall()
    sender = App("gates", broker=url)
    task: Any = sender.task(name="gates.one", limit=1, concurrency_key="who")(one.__wrapped__)
    sender.send_many([task.s(n % keys) for n in range(count)])
    sender.close()
    client.config_set("slowlog-log-slower-than", SLOW)
    client.config_set("slowlog-max-len", 100_000)
    client.slowlog_reset()
    client.config_resetstat()
    command = [sys.executable, "-m", "celery5", "-A", "gates:app", "worker", "start", "--log-level", "error"]
    environment["CELERY5_CONCURRENCY"] = str(SLOTS)
    with open(folder / "worker.log", "ab") as log:
        worker = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + LIMIT
        while len(jobs := stamps(path)) < count and time.monotonic() < deadline and worker.poll() is None:
            time.sleep(0.1)
        time.sleep(0.3)
        total = commands(client)
        slow = [entry["duration"] for entry in client.slowlog_get(100_000) if b"EVAL" in entry["command"][:8]]
    finally:
        worker.terminate()
        worker.wait(20)
    if len(jobs) < count:
        raise SystemExit(f"{len(jobs)} of {count} jobs ended: {(folder / 'worker.log').read_text()[-500:]}")
    gaps = pauses(jobs)
    rate = len(jobs) / (max(job[2] for job in jobs) - min(job[1] for job in jobs))
    return {
        f"gated_rate_{name}": rate,
        f"gated_commands_{name}": total / count,
        f"gated_script_ms_{name}": max(slow, default=0) / 1000,
        # With more keys than slots a key waits for a slot of the worker.
        **({f"gated_pause_ms_{name}": median(gaps) * 1000} if keys < SLOTS else {}),
    }


def trip_times(client: Any, trips: list[Call[Any]], app: App) -> list[float]:
    """Make trips. Return how many ms each held the server."""
    times: list[float] = []
    for trip in trips:
        client.config_resetstat()
        app.perform(trip)
        statistics = client.info("commandstats")
        times.append(
            sum(command["usec"] for name, command in statistics.items() if name.startswith("cmdstat_eval"))
            / 1000
        )
    return times


def single_trips(url: str, client: Any) -> dict[str, float]:
    """Measure single scripts: jobs that join new waiting lists; then the recovery of a worker with 96 of them.

    10,000 jobs of 1,000 keys wait. Returns the minimum and the median, since other programs use the machine, too.
    """
    client.flushall()
    sender, rule = App("gates", broker=url), AdmissionRule("gates.one", max_running=1, keyed=True)
    keys = sender.queue("default")
    waiting_jobs = [
        (f"j{n}", b'{"v":1,"id":"j%d"}' % n, get_waiting_list(rule, f"k{n % 1000}", ""), "")
        for n in range(10_000)
    ]
    trips: list[Call[Any]] = [
        limits.add_to_waiting_list(keys, waiting_jobs[at : at + LIMITED_JOBS_PER_TRIP])
        for at in range(0, len(waiting_jobs), LIMITED_JOBS_PER_TRIP)
    ]
    joining = trip_times(client, trips[:10], sender)
    trip_times(client, trips[10:], sender)
    sender.perform(lease_calls.join_queue(keys, "dead", lease=60))
    trip_times(client, [limits.admit_waiting(keys, "dead", [(rule, 32)])] * 3, sender)
    recovery = lease_calls.recover(
        keys, worker="dead", max_deliveries=3, limit=RECOVERED, ttl=60, message_limit=1_000_000
    )
    recovered = trip_times(client, [recovery] * (96 // RECOVERED), sender)
    sender.close()
    times_by_name = {"line_up": joining, "recover": recovered}
    return {
        f"{name}_ms_{statistic}": function(times)
        for name, times in times_by_name.items()
        for statistic, function in (("least", min), ("median", median))
    }


def measured(url: str) -> dict[str, float]:
    """Return the figures of all runs."""
    figures: dict[str, float] = {}
    with redis.Redis.from_url(url) as client, tempfile.TemporaryDirectory() as folder:
        for name in RUNS:
            figures |= run(url, client, Path(folder), name)
        figures |= single_trips(url, client)
    return figures


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
