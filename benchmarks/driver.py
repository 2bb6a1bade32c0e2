"""Measure what one trip to Redis costs by celery5's Trio driver and by redis-py's clients.

    python benchmarks/driver.py [--rounds 3] [--seconds 1.0]

Each variant runs in its own process, in turn. Throughput: 100 tasks (or pipelines of 100) doing GET; latency: one
GET after another. CPU is the client's, user and system, per GET. celery5 must be importable: run it in its environment.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import median
from typing import Any

import redis
import redis.asyncio
import trio

sys.path.append(str(Path(__file__).resolve().parent.parent))

TASKS = 100
LIMIT = 60.0
Figures = dict[str, float]
Get = Callable[[], Awaitable[object]]


class Meter:
    """Counts trips in a period of time, and the processor time that they take."""

    def __init__(self, seconds: float) -> None:
        self.trips = 0
        self.laps: list[float] = []
        self._cpu, self._start = time.process_time(), time.perf_counter()
        self.end = self._start + seconds

    def told(self) -> Figures:
        """Return the figures of the period."""
        wall, cpu = time.perf_counter() - self._start, time.process_time() - self._cpu
        figures = {"per_second": self.trips / wall, "cpu_us": cpu / self.trips * 1e6}
        if self.laps:
            laps = sorted(self.laps)
            figures |= {"p50_us": laps[len(laps) // 2] * 1e6, "p99_us": laps[int(len(laps) * 0.99)] * 1e6}
        return figures


async def one_task(get: Get, meter: Meter) -> None:
    """GET until the period ends."""
    while time.perf_counter() < meter.end:
        await get()
        meter.trips += 1


async def one_by_one(get: Get, meter: Meter) -> None:
    """GET until the period ends, and time each."""
    while (start := time.perf_counter()) < meter.end:
        await get()
        meter.trips += 1
        meter.laps.append(time.perf_counter() - start)


def ours(url: str, seconds: float, how: str) -> Figures:
    """Measure celery5 on Trio."""
    from celery5.broker.call import Call
    from celery5.broker.drivers.on_trio import TrioRedis
    from celery5.broker.endpoint import Endpoint

    call: Call[object] = Call(("GET", "small"), lambda raw: raw, repeatable=True)

    async def run() -> Figures:
        client = TrioRedis(endpoint=Endpoint.from_url(url))
        async with trio.open_nursery() as nursery:
            await nursery.start(client.run)
            meter = Meter(seconds)
            if how == "tasks":
                async with trio.open_nursery() as tasks:
                    for _ in range(TASKS):
                        tasks.start_soon(one_task, lambda: client.perform(call), meter)
            elif how == "pipeline":
                while time.perf_counter() < meter.end:
                    await client.perform_all([call] * TASKS)
                    meter.trips += TASKS
            else:
                await one_by_one(lambda: client.perform(call), meter)
            figures = meter.told()
            nursery.cancel_scope.cancel()
        return figures

    return trio.run(run)


def blocking(url: str, seconds: float, how: str) -> Figures:
    """Measure redis-py's blocking client."""
    client: Any = redis.Redis.from_url(url)
    client.ping()
    meter = Meter(seconds)
    while (start := time.perf_counter()) < meter.end:
        if how == "pipeline":
            pipe = client.pipeline(transaction=False)
            for _ in range(TASKS):
                pipe.get("small")
            pipe.execute()
            meter.trips += TASKS
        else:
            client.get("small")
            meter.trips += 1
            meter.laps.append(time.perf_counter() - start)
    return meter.told()


def asynchronous(url: str, seconds: float, how: str) -> Figures:
    """Measure redis-py's asyncio client."""

    async def run() -> Figures:
        client: Any = redis.asyncio.Redis.from_url(url)
        await asyncio.gather(*[client.ping() for _ in range(TASKS if how == "tasks" else 1)])
        meter = Meter(seconds)
        if how == "tasks":
            await asyncio.gather(*[one_task(lambda: client.get("small"), meter) for _ in range(TASKS)])
        elif how == "pipeline":
            while time.perf_counter() < meter.end:
                pipe = client.pipeline(transaction=False)
                for _ in range(TASKS):
                    pipe.get("small")
                await pipe.execute()
                meter.trips += TASKS
        else:
            await one_by_one(lambda: client.get("small"), meter)
        figures = meter.told()
        await client.aclose()
        return figures

    return asyncio.run(run())


VARIANTS: dict[str, tuple[Callable[[str, float, str], Figures], str]] = {
    "celery5 on Trio, 100 tasks": (ours, "tasks"),
    "celery5 on Trio, calls of 100 at once": (ours, "pipeline"),
    "celery5 on Trio, one by one": (ours, "one"),
    "redis.asyncio, 100 tasks": (asynchronous, "tasks"),
    "redis.asyncio, pipelines of 100": (asynchronous, "pipeline"),
    "redis.asyncio, one by one": (asynchronous, "one"),
    "redis-py blocking, pipelines of 100": (blocking, "pipeline"),
    "redis-py blocking, one by one": (blocking, "one"),
}


def measured(variant: str, url: str, seconds: float) -> Figures | str:
    """Measure one variant in its own process; return its figures, or a text with the reason of a failure."""
    command = [sys.executable, __file__, "--variant", variant, "--url", url, "--seconds", str(seconds)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT + seconds, check=True)
    except subprocess.TimeoutExpired:
        return f"no end after {LIMIT + seconds:.0f} s"
    except subprocess.CalledProcessError as error:
        return (error.stderr.strip().splitlines() or ["failed"])[-1]
    figures: Figures = json.loads(done.stdout)
    return figures


def compare(rounds: int, seconds: float) -> None:
    """Measure all variants in turn, and print the table of medians."""
    from server import Server

    samples: dict[str, list[Figures]] = {variant: [] for variant in VARIANTS}
    failed: dict[str, str] = {}
    with Server() as server:
        server.client.set("small", b"x" * 64)
        for _ in range(rounds):
            for variant in VARIANTS:
                figures = measured(variant, server.url, seconds)
                if isinstance(figures, str):
                    failed[variant] = figures
                else:
                    samples[variant].append(figures)
        machine = f"{server.version}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.2f}"
    print(f"Medians of {rounds} rounds of {seconds:g} s; {machine}.\n")
    print("| GET of 64 bytes | per second | CPU µs each | p50 µs | p99 µs |\n|---|---:|---:|---:|---:|")
    for variant, kept in samples.items():
        cells = []
        for figure in ("per_second", "cpu_us", "p50_us", "p99_us"):
            values = [figures[figure] for figures in kept if figure in figures]
            cells.append(f"{median(values):,.0f}" if figure == "per_second" and values else "")
            if values and figure != "per_second":
                cells[-1] = f"{median(values):.1f}"
        print(f"| {variant} | {' | '.join(cells)} |")
    for variant, reason in failed.items():
        print(f"\n{variant} failed: {reason}")


def main() -> None:
    """Compare all variants, or measure one."""
    parser = argparse.ArgumentParser(description="Compare our Trio driver with redis-py's clients.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--variant", choices=list(VARIANTS), help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.variant:
        run, how = VARIANTS[options.variant]
        print(json.dumps(run(options.url, options.seconds, how)))
    else:
        compare(options.rounds, options.seconds)


if __name__ == "__main__":
    main()
