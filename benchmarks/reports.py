"""Measure how one process rolls up the reports of many workers: `python benchmarks/reports.py [--workers 10000]`.

Simulated workers send real reports, spread over the interval, to their own server. One real rollup runs in a
process of its own, which also measures by how much its event loop wakes up late. The longest calls are those of
SLOWLOG, above 1 ms. At the end each job that was sent must be in the totals of the cluster, once.
"""

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import time
from collections import Counter
from contextlib import ExitStack
from itertools import cycle
from typing import Any, cast

import msgspec
import redis
import trio

from celery5 import App
from celery5.broker.calls import leases as lease_calls
from celery5.broker.calls import observability as calls
from celery5.broker.driver import AsyncDriver
from celery5.broker.servers.embedded import EmbeddedServer
from celery5.logs.log import NullLog
from celery5.protocol.observability.report import MetricsReport, ReportOrigin
from celery5.services.health.vitals import ProcessStatus
from celery5.services.observability.history_rollup import HistoryRollup

JOBS = 100_000
"""Jobs in a second, of all workers together."""
SHAPES = 500
"""Reports that are made of real tallies: workers send them in turns, each with its name and number."""
QUEUES_OF_WORKER = 2
TASKS = 3
LAST_WAIT = 180.0
"""Seconds for which the last reports are waited for."""
SAMPLE = 2.0
"""Seconds between two samples."""


def make_report(number: int, jobs: int, queues: int) -> tuple[MetricsReport, int]:
    """Return the report of a worker that has done so many jobs, and how many it counts."""
    rng, status, done = random.Random(number), ProcessStatus(app="bench"), 0
    status.lag = rng.uniform(0, 0.01)
    per_task = max(jobs // (QUEUES_OF_WORKER * TASKS), 1)
    for queue in name_queues(number, queues):
        for task in range(TASKS):
            tally = status.jobs.tallies[queue, f"shop.orders.task_{task}"]
            tally.counts["SUCCESS"] += per_task
            tally.counts["RETRY"] += 1
            done += per_task
            for _ in range(per_task):
                tally.run_times.add(rng.lognormvariate(-3 + task, 0.8))
                tally.wait_times.add(rng.lognormvariate(-4, 1.2))
    return status.report_maker.make(status.metric_families(), kind="worker"), done


async def roll_up(url: str, name: str, interval: float) -> None:
    """Roll up until cancelled, and print samples of this process."""
    app = App(name, broker=url, metrics_interval=interval)
    driver = await app.connections.get_async_driver()
    rollup = HistoryRollup(
        default_redis=driver,
        all_brokers={"default": driver},
        keys=app.keys,
        worker="rollup",
        metrics_interval=interval,
        log=NullLog(),
    )
    lags: list[float] = []

    async def watch_loop() -> None:
        while True:
            before = trio.current_time()
            await trio.sleep(0.005)
            lags.append(trio.current_time() - before - 0.005)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch_loop)
        await nursery.start(rollup.run)
        while True:
            await trio.sleep(SAMPLE)
            used = resource.getrusage(resource.RUSAGE_SELF)
            pages = int((await trio.Path("/proc/self/statm").read_text()).split()[1])
            sample = {
                "cpu": used.ru_utime + used.ru_stime,
                "rss": pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
                "lag": max(lags, default=0) * 1000,
                "lag_p99": sorted(lags)[len(lags) * 99 // 100] * 1000 if lags else 0,
            }
            lags.clear()
            print(json.dumps(sample), flush=True)


def name_queues(worker: int, queues: int) -> list[str]:
    """Return the queues that a worker reads."""
    return [f"queue-{(worker * QUEUES_OF_WORKER + place) % queues}" for place in range(QUEUES_OF_WORKER)]


def name_worker(number: int) -> str:
    """Return the name of a simulated worker."""
    return f"host-{number % 100}-{number}:1"


async def join_queues(app: App, asked: argparse.Namespace) -> None:
    """Have all workers join their queues, with leases that outlast the measurement."""

    @app.task(name="shop.orders.task_0")
    async def order() -> None: ...

    await app.asend_many([order.options(queue=f"queue-{number}").s() for number in range(asked.queues)])
    driver = await app.connections.get_async_driver()
    for start in range(0, asked.workers, 500):
        await driver.perform_all(
            [
                lease_calls.join_queue(app.queue(queue), name_worker(worker), lease=asked.seconds + 600)
                for worker in range(start, min(start + 500, asked.workers))
                for queue in name_queues(worker, asked.queues)
            ]
        )


async def send(asked: argparse.Namespace, url: str) -> int:
    """Send the reports of all workers, and return how many jobs they count."""
    app = App(asked.app, broker=url, metrics_interval=asked.interval)
    driver = await app.connections.get_async_driver()
    await join_queues(app, asked)
    jobs = int(JOBS / 10_000 * asked.interval)
    shapes = [make_report(number, jobs, asked.queues) for number in range(min(SHAPES, asked.workers))]
    names, started = [name_worker(number) for number in range(asked.workers)], time.time()
    # What is in a report stays the same, so it is packed once: the simulation takes a third of the time.
    packed = [
        msgspec.structs.replace(report, process=name, origin=ReportOrigin(name, started)).pack()
        for name, (report, _) in zip(names, cycle(shapes), strict=False)
    ]
    sent, began, number = 0, trio.current_time(), 0
    pace = asked.interval / asked.workers
    while trio.current_time() < began + asked.seconds:
        await trio.sleep_until(began + number * pace)
        turn, worker = divmod(number, asked.workers)
        await driver.perform(calls.send_report(app.keys, names[worker], turn + 1, packed[worker]))
        sent += shapes[worker % len(shapes)][1]
        number += 1
    await wait_until_counted(app, driver)
    return sent


async def wait_until_counted(app: App, driver: AsyncDriver) -> None:
    """Wait until all reports are rolled up, for LAST_WAIT seconds at most."""
    (last, *_) = await driver.perform(calls.read_latest_reports(app.keys, "", count=1))
    with trio.move_on_after(LAST_WAIT):
        while True:
            state = await driver.perform(calls.read_state(app.keys, ["cursor"]))
            if state.get("cursor", b"").decode() == last.id:
                return
            await trio.sleep(1)


async def watch(asked: argparse.Namespace, url: str, behind: list[float], sizes: list[float]) -> None:
    """Sample how far the rollup is behind, and the memory of the server."""
    client, app = redis.Redis.from_url(url), App(asked.app, broker=url)
    began = trio.current_time()
    while trio.current_time() < began + asked.seconds:
        await trio.sleep(SAMPLE)
        cursor = cast("bytes | None", client.hget(app.keys.metrics_state, "cursor")) or b""
        at = float(cursor.partition(b"-")[0] or 0) / 1000
        behind.append(time.time() - at if at else trio.current_time() - began)
        sizes.append(cast("dict[str, Any]", client.info("memory"))["used_memory"] / 2**20)


async def read(app: App) -> tuple[int, dict[str, float]]:
    """Return the jobs that the totals have, and how long readers take, in ms."""
    counted = sum(
        sample.value
        for family in await app.metrics.atotals()
        if family.name == "celery5_jobs_total"
        for sample in family.samples
        if sample.labels.get("state") == "SUCCESS"
    )
    took: dict[str, float] = {}
    began = time.perf_counter()
    queues = len(await app.metrics.asummary())
    took[f"summary of {queues} queues, ms"] = (time.perf_counter() - began) * 1000
    began = time.perf_counter()
    await app.metrics.ahistory("queue-0")
    took["history of a queue, ms"] = (time.perf_counter() - began) * 1000
    return int(counted), took


def find_longest(client: redis.Redis) -> tuple[dict[str, float], int]:
    """Return the longest time of each command above 1 ms, in ms, and how many took above 2 ms."""
    longest, above = dict[str, float](), Counter[str]()
    for entry in cast("list[dict[str, Any]]", client.slowlog_get(5000)):
        words = cast("bytes", entry["command"]).split()
        name = b" ".join(words[:2]).decode()[:24]
        longest[name] = max(longest.get(name, 0), entry["duration"] / 1000)
        above[name] += entry["duration"] > 2000
    return longest, above.total()


def run_beside_rollup(asked: argparse.Namespace, url: str) -> dict[str, Any]:
    """Send reports while a process of its own rolls them up, and return what was seen of both."""
    command = [sys.executable, __file__, "--rollup", url, "--app", asked.app]
    behind: list[float] = []
    sizes: list[float] = []
    counts: list[int] = []

    async def run() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch, asked, url, behind, sizes)
            counts.append(await send(asked, url))

    with subprocess.Popen(
        [*command, "--interval", str(asked.interval)], stdout=subprocess.PIPE, text=True
    ) as child:
        try:
            trio.run(run)
        finally:
            child.terminate()
        output, _ = child.communicate(timeout=30)
    samples = [json.loads(line) for line in output.splitlines()]
    half = samples[len(samples) // 2 :]
    return {
        "jobs sent": counts[0],
        "cpu share": (samples[-1]["cpu"] - samples[0]["cpu"]) / (SAMPLE * (len(samples) - 1)),
        "rss MiB, at half time": half[0]["rss"],
        "rss MiB, at the end": samples[-1]["rss"],
        "loop late at most, ms": max(sample["lag"] for sample in samples),
        "loop late p99, ms": max(sample["lag_p99"] for sample in samples),
        "behind at most, s": max(behind),
        "behind, at the end, s": behind[-1],
        "Redis MiB, highest": max(sizes),
    }


def measure(asked: argparse.Namespace) -> dict[str, Any]:
    """Return all figures of one run."""
    with ExitStack() as stack:
        url = asked.broker or stack.enter_context(EmbeddedServer.start()).url
        client = stack.enter_context(redis.Redis.from_url(url))
        client.config_set("slowlog-log-slower-than", 1000)
        client.config_set("slowlog-max-len", 5000)
        seen = run_beside_rollup(asked, url)
        app = App(asked.app, broker=url)
        longest, above = find_longest(client)
        counted, took = trio.run(read, app)
        history = cast("int | None", client.memory_usage(app.keys.metrics_state, samples=0)) or 0
        return {
            "jobs counted": counted,
            **seen,
            "reports/s": asked.workers / asked.interval,
            "history MiB": history / 2**20,
            "calls above 2 ms": above,
            "longest calls above 1 ms, ms": longest,
            **took,
        }


def main() -> None:
    """Measure, and print the figures; as JSON for programs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=10_000)
    parser.add_argument("--queues", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--interval", type=float, default=15)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--app", default="bench", help="the name of the application")
    parser.add_argument("--broker", default="", help="a server to use instead of one of its own")
    parser.add_argument("--rollup", default="", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.rollup:
        trio.run(roll_up, asked.rollup, asked.app, asked.interval)
        return
    figures = measure(asked)
    if asked.json:
        print(json.dumps(figures))
        return
    for name, value in figures.items():
        print(f"{name:>32}  {value:,.2f}" if isinstance(value, float) else f"{name:>32}  {value}")


if __name__ == "__main__":
    main()
