"""Measure what reports on metrics cost a worker and Redis: `python benchmarks/metrics.py [ROUNDS] [JOBS]`.

Workers with `metrics_interval` 0, 15 and 1 drain the same jobs that do nothing, in turns. Of each the medians of the
rate, of the CPU time of the worker and of Redis for a job, and the requests for a job are shown, and what they are of
those with reports off. Recording itself cannot be switched off: the first lines say what it costs a job.
"""

import os
import resource
import statistics
import subprocess
import sys
import time
import timeit

import redis

from celery5 import App
from celery5.broker.servers.embedded import EmbeddedServer
from celery5.protocol.job.delivery import Delivery
from celery5.protocol.observability.job_tally import JobTally
from celery5.services.process.lease import RedisClock

INTERVALS = (0, 15, 1)
app = App("bench", broker=os.environ.get("CELERY5_BROKER", "redis://127.0.0.1:6379/0"))


@app.task
async def nothing(number: int) -> int:
    """Return the number."""
    return number


def time_recording() -> float:
    """Return the microseconds for which a job is counted and its times are recorded."""
    tally, clock = JobTally(), RedisClock()
    delivery = Delivery("default", b"1732443123123-0", b"")
    delivery.start(1732443123.5)

    def record() -> None:
        task_tally = tally.tallies["default", "bench.nothing"]
        task_tally.counts["SUCCESS"] += 1
        task_tally.run_times.add(0.02)
        task_tally.wait_times.add(clock.measure_wait(delivery))

    return min(timeit.repeat(record, number=100_000, repeat=5)) * 10


def drain(server: EmbeddedServer, interval: int, jobs: int) -> dict[str, float]:
    """Drain so many jobs by a worker that ends after them."""
    client = redis.Redis.from_url(server.url)
    client.flushall()
    client.config_resetstat()
    for start in range(0, jobs, 10_000):
        app.send_many([nothing.s(number) for number in range(start, min(start + 10_000, jobs))])
    environment = {**os.environ, "CELERY5_BROKER": server.url, "CELERY5_METRICS_INTERVAL": str(interval)}
    command = [sys.executable, "-m", "celery5", "-A", "metrics", "worker", "start", "--burst"]
    redis_before = _redis_cpu(client)
    calls_before = int(client.info("stats")["total_commands_processed"])
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(
        command, env=environment, cwd=os.path.dirname(__file__), check=True, stdout=subprocess.DEVNULL
    )
    seconds = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "jobs/s": jobs / seconds,
        "worker µs/job": cpu / jobs * 1e6,
        "Redis µs/job": (_redis_cpu(client) - redis_before) / jobs * 1e6,
        "requests/job": (int(client.info("stats")["total_commands_processed"]) - calls_before) / jobs,
    }


def _redis_cpu(client: redis.Redis) -> float:
    found = client.info("cpu")
    return float(found["used_cpu_user"]) + float(found["used_cpu_sys"])


def main() -> None:
    """Measure, and show a table."""
    rounds, jobs = (int(word) for word in (sys.argv[1:] + ["5", "100000"][len(sys.argv) - 1 :])[:2])
    print(f"recording a job: {time_recording():.2f} µs")
    with EmbeddedServer.start() as server:
        app.configure(broker=server.url)
        results: dict[int, list[dict[str, float]]] = {interval: [] for interval in INTERVALS}
        for turn in range(rounds):
            first = turn % len(INTERVALS)  # the first of a round is slower: the machine has been idle
            for interval in INTERVALS[first:] + INTERVALS[:first]:
                results[interval].append(drain(server, interval, jobs))
    for name in results[0][0]:
        medians = {i: statistics.median(drained[name] for drained in found) for i, found in results.items()}
        row = "  ".join(f"{i:>2} s: {value:10.4g} ({value / medians[0]:.3f})" for i, value in medians.items())
        print(f"{name:>14}  {row}")


if __name__ == "__main__":
    main()
