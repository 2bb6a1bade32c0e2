"""Measure the drain rate while optional features fail: `python benchmarks/degradation.py`.

One worker drains a queue of jobs that do nothing, with every feature in use. Whole and broken runs take turns, each in
a process of its own on its own server. A broken run has an ACL that refuses the keys of metrics, history, inbox,
shared checks and scaling reports, an outlet that raises, and a log that cannot be written. The rate counts from the
first job to the last one. The medians are compared.
"""

import argparse
import json
import subprocess
import sys
import time
from statistics import median

import redis
import trio

from celery5 import App
from celery5.broker.servers.embedded import EmbeddedServer
from celery5.health import HealthCheck
from celery5.logs.log import Log, LogWriter
from celery5.observability import IncomingJob, MetricsReport, Middleware
from celery5.processes.foreground import WORKER
from celery5.processes.worker import WorkerOptions

JOBS = 100_000
TURNS = 7
GOAL = 0.97
"""The share of the drain rate that is left while features fail."""
REFUSED = ("metrics:", "inbox:", "check", "report:")
"""What the keys of the application begin with that a broken run may not touch."""
KEPT = "abcdefghijklmnopqrstuvwxyz"


class Outlet:
    """Takes reports, or raises."""

    def __init__(self, *, is_broken: bool) -> None:
        self.is_broken = is_broken

    async def send(self, _report: MetricsReport) -> None:
        """Do nothing, or fail."""
        if self.is_broken:
            raise OSError("no route to host")


class Exporter(Middleware):
    """Looks at each job, or raises."""

    def __init__(self, *, is_broken: bool) -> None:
        self.is_broken = is_broken

    def running(self, job: IncomingJob) -> None:
        """Do nothing, or fail."""
        if self.is_broken:
            raise ConnectionError("no collector")


class FullDisk:
    """A destination of the log that takes messages, or none."""

    def __init__(self, *, is_broken: bool) -> None:
        self.is_broken = is_broken

    def write(self, messages: object, /) -> int:
        """Drop them, or fail."""
        if self.is_broken:
            raise OSError(28, "No space left on device")
        return len(messages)  # type: ignore[arg-type]


def refuse_keys(url: str, app: App) -> None:
    """Refuse the keys of optional features to the default user."""
    head = f"celery5:{{{app.name}}}:"
    firsts = {prefix[0] for prefix in REFUSED}
    allowed = [f"~celery5:{{{app.name}:*", *(f"~{head}{letter}*" for letter in KEPT if letter not in firsts)]
    allowed += [f"~{head}{prefix}*" for prefix in ("record", "recycling", "run-home", "answer", "imposed")]
    with redis.Redis.from_url(url) as client:
        client.execute_command("ACL", "SETUSER", "default", "resetkeys", *allowed)


async def drain(url: str, *, is_broken: bool, exporter: bool) -> float:
    """Return how many jobs a second one worker does."""
    app = App("bench", broker=url, metrics_interval=0.2, prioritise="saturation")
    app.metrics.add_outlet(Outlet(is_broken=is_broken))
    if exporter:
        app.add_middleware(Exporter(is_broken=is_broken))
    app.health_check.add(HealthCheck("bank", lambda: "healthy", scope="global", period=1))
    stamps: list[float] = []

    @app.task
    async def noop() -> None:
        stamps.append(time.perf_counter())

    for _ in range(JOBS // 1000):
        await app.asend_many([noop.s() for _ in range(1000)])
    if is_broken:
        refuse_keys(url, app)
    log, done = Log(worker="bench", app=app.name), trio.Event()
    async with trio.open_nursery() as nursery:

        async def work() -> None:
            await WORKER.run(app, WorkerOptions(burst=True), log=log, done=done)

        nursery.start_soon(work)
        await done.wait()
        nursery.cancel_scope.cancel()
    assert len(stamps) == JOBS, f"{len(stamps)} of {JOBS} jobs were done"
    if is_broken:
        with redis.Redis.from_url(url) as client:
            refused = {entry["object"].rpartition("}:")[2].partition(":")[0] for entry in client.acl_log()}
        assert {"metrics", "inbox"} <= refused, f"only {refused} were refused"
        print(*sorted(refused), file=sys.stderr)
    return (JOBS - 1) / (stamps[-1] - stamps[0])


def run_turn(*, is_broken: bool, exporter: bool) -> float:
    """Measure once, in its own process."""
    words = [sys.executable, __file__, "--turn", "broken" if is_broken else "whole"]
    ended = subprocess.run(
        words + ["--exporter"] * exporter, capture_output=True, text=True, timeout=300, check=False
    )
    if ended.returncode:
        raise SystemExit(ended.stderr)
    return float(json.loads(ended.stdout.splitlines()[-1]))


def compare(name: str, *, exporter: bool) -> None:
    """Let whole and broken runs take turns, and print their medians."""
    rates: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(TURNS):
        for is_broken in (bool(turn % 2), not turn % 2):
            rates[is_broken].append(run_turn(is_broken=is_broken, exporter=exporter))
    whole, broken = median(rates[False]), median(rates[True])
    print(
        f"{name}: {whole:,.0f} jobs/s whole, {broken:,.0f} broken, share {broken / whole:.3f} (goal {GOAL})"
    )


def main() -> None:
    """Compare, or measure one turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turn", choices=("whole", "broken"))
    parser.add_argument("--exporter", action="store_true", help="also with middleware around each job")
    asked = parser.parse_args()
    if asked.turn is None:
        compare("metrics, history, inbox, checks, scaling reports, outlet, log", exporter=False)
        compare("the same, and middleware that raises around each job", exporter=True)
        return
    is_broken = asked.turn == "broken"
    with EmbeddedServer.start() as server, LogWriter(FullDisk(is_broken=is_broken)):
        rate = trio.run(lambda: drain(server.url, is_broken=is_broken, exporter=asked.exporter))
    print(json.dumps(rate))


if __name__ == "__main__":
    main()
