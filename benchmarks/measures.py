"""Define what is measured of one contestant, a function for each measure, all by the same method.

Drain: the queue is filled first, then workers start. Each job stamps the time at which it ran. The rate counts from the
time when the last process began its first job to the last job of all, so that neither start-up nor the head start of
one process counts. Filling the queue is the measurement of bulk enqueueing.
"""

import json
import os
import shutil
import time
from array import array
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

import children
from children import Child
from contestants import OURS, Contestant
from peers.contract import SLEEP as NAP
from peers.stamps import Reader
from server import Monitor, Server

Figures = dict[str, float]
PEERS = Path(__file__).resolve().parent / "peers"
NAPS = 5_000
NAPS_AT = 100
START_LIMIT = 30.0
IDLE_AFTER = 2.0
STARTED_AFTER = 1.5
IDLE_FOR = 6.0
PROGRAM_LIMIT = 240.0
KEPT = 60  # seconds; results are kept for at least a minute
NOTHING: Mapping[str, str] = {}


class Told(TypedDict):
    """The output of a producer."""

    queued: int
    seconds: float
    cpu: float
    laps: list[float]


class Failed(Exception):
    """A contestant did not do what it should. The message says how."""


@dataclass
class Stand:
    """One contestant at the server: starts its producers and workers, and watches them."""

    contestant: Contestant
    python: Path
    server: Server
    folder: Path
    scale: float
    limit: float
    jobs: int | None = None

    def amount(self, usual: int) -> int:
        """Return how many jobs to use; `usual` is the contestant's number for a full run."""
        return self.jobs if self.jobs is not None else max(100, int(usual * self.scale))

    def environment(self, results: bool, concurrency: int, more: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of a peer's module."""
        foreign = ("BENCH_", "CELERY", "PYTHON")
        return {key: value for key, value in os.environ.items() if not key.startswith(foreign)} | {
            "BENCH_URL": self.server.url,
            "BENCH_STAMPS": str(self.stamps),
            "BENCH_RESULTS": "1" if results else "0",
            "BENCH_VARIANT": self.contestant.variant,
            "BENCH_OPTIONS": self.contestant.options,
            "BENCH_CONCURRENCY": str(concurrency),
            "PYTHONPATH": str(PEERS),
            "PYTHONDONTWRITEBYTECODE": "1",
            **more,
        }

    @property
    def stamps(self) -> Path:
        """The folder into which workers write stamps."""
        return self.folder / "stamps"

    def ask(self, verb: str, *numbers: int) -> list[str]:
        """Return the command line of a verb for this contestant."""
        return [str(self.python), str(PEERS / "ask.py"), self.contestant.module, verb, *map(str, numbers)]

    def produce(self, verb: str, n: int, *, results: bool = False) -> "Told":
        """Run a producer to its end and return its output."""
        environment = self.environment(results, NAPS_AT, {})
        try:
            out = children.run(self.ask(verb, n), environment, self.folder / "producer.log", self.limit)
            output: Told = json.loads(out.strip().splitlines()[-1])
        except (RuntimeError, ValueError, IndexError) as error:
            raise Failed(f"{verb}: {error}") from None
        return output

    @contextmanager
    def workers(
        self, processes: int, concurrency: int, *, results: bool = False, more: Mapping[str, str] = NOTHING
    ) -> Iterator[list[Child]]:
        """Run workers during the block, with `more` in their environment."""
        shutil.rmtree(self.stamps, ignore_errors=True)
        self.stamps.mkdir(parents=True)
        own = self.contestant.own_processes
        environment = self.environment(results, concurrency, more)
        command = self.ask("worker", processes if own else 1, concurrency)
        logs = [self.folder / f"worker-{i}.log" for i in range(1 if own else processes)]
        started = [Child(command, environment, log) for log in logs]
        try:
            yield started
        finally:
            for child in started:
                child.end()

    def drained(self, queued: int, workers: list[Child]) -> "Drained":
        """Wait for a limited time until all jobs ran and while the workers live. Raises Failed."""
        reader = Reader(self.stamps)
        _until(reader, 1, workers, START_LIMIT)
        ran_before, worker_time, server_time = (
            reader.total(),
            children.processor(workers),
            self.server.processor(),
        )
        _until(reader, queued, workers, self.limit)
        jobs = max(reader.total() - ran_before, 1)
        return Drained(
            stamps=reader.by_process(),
            worker_us=(children.processor(workers) - worker_time) / jobs * 1e6,
            server_us=(self.server.processor() - server_time) / jobs * 1e6,
        )


@dataclass
class Drained:
    """The result of a drained queue: when each job ran, by process, and processor time per job in microseconds."""

    stamps: "list[array[int]]"
    worker_us: float
    server_us: float

    def first(self) -> int:
        """Return when the first job ran, in nanoseconds of the monotonic clock."""
        return min(process[0] for process in self.stamps)

    def last(self) -> int:
        """Return when the last job ran."""
        return max(process[-1] for process in self.stamps)

    def rate(self) -> float:
        """Return the jobs per second from the last process's first job to the last job of all."""
        start = max(process[0] for process in self.stamps)
        counted = sum(1 for process in self.stamps for stamp in process if stamp > start)
        return counted / max((self.last() - start) / 1e9, 1e-9)


def _check_alive(workers: list[Child]) -> None:
    for child in workers:
        if reason := child.failed():
            raise Failed(f"a worker ended, {reason}")


def _until(reader: Reader, jobs: int, workers: list[Child], limit: float) -> None:
    deadline = time.monotonic() + limit
    while (ran := reader.total()) < jobs:
        _check_alive(workers)
        if time.monotonic() > deadline:
            raise Failed(f"{ran} of {jobs} jobs ran in {limit:.0f} s; worker: {workers[0].last_words()}")
        time.sleep(0.005)


def enqueue(stand: Stand) -> Figures:
    """Send one by one, and measure the memory of the queued jobs.

    What remains after a first job was deleted, scripts and buffers, does not count.
    """
    stand.server.flush()
    stand.produce("enqueue", 1)
    stand.server.client.flushall()
    before = stand.server.memory()
    output = stand.produce("enqueue", stand.amount(stand.contestant.enqueue))
    growth = stand.server.memory() - before
    jobs = output["queued"] - 1
    return {
        "enqueue": jobs / output["seconds"],
        "enqueue_cpu_us": output["cpu"] / jobs * 1e6,
        "bytes": growth / output["queued"],
    }


def bulk(stand: Stand) -> Figures:
    """Send many jobs at once."""
    stand.server.flush()
    output = stand.produce("bulk", stand.amount(stand.contestant.drain))
    return {"bulk": (output["queued"] - 1) / output["seconds"], "queued": output["queued"]}


def drain(stand: Stand, processes: int) -> Figures:
    """Fill the queue, then empty it by `processes` workers."""
    filled = bulk(stand)
    queued = int(filled.pop("queued"))
    start = time.monotonic_ns()
    with stand.workers(processes, stand.contestant.drain_at) as workers:
        drained = stand.drained(queued, workers)
        logged = _logged_share(workers, queued) if stand.contestant.name == OURS else {}
    return (
        filled
        | logged
        | {
            f"drain{processes}": drained.rate(),
            f"startup{processes}": (drained.first() - start) / 1e9,
            f"worker_cpu_us{processes}": drained.worker_us,
            f"server_cpu_us{processes}": drained.server_us,
            f"ran{processes}": sum(map(len, drained.stamps)) / queued,
        }
    )


def _logged_share(workers: list[Child], queued: int) -> Figures:
    """Return the share of jobs with a log line of celery5's; a full log buffer drops lines."""
    for child in workers:
        child.stop(10)
    return {"logged": sum(child.said().count('"celery5:job"') for child in workers) / queued}


def naps(stand: Stand) -> Figures:
    """Run 5,000 jobs of 50 ms at a concurrency of 100, from the start of the first to the end of the last."""
    stand.server.flush()
    queued = stand.produce("sleep", NAPS - 1)["queued"]
    with stand.workers(1, NAPS_AT) as workers:
        drained = stand.drained(queued, workers)
    return {"naps": (drained.last() - drained.first()) / 1e9 + NAP}


def latency(stand: Stand) -> Figures:
    """Measure round trips to an idle worker."""
    stand.server.flush()
    with stand.workers(1, stand.contestant.drain_at, results=True) as workers:
        laps = _trips(stand, stand.amount(400), workers)
    return {"p50": laps[len(laps) // 2], "p99": laps[min(len(laps) - 1, int(len(laps) * 0.99))]}


def _trips(stand: Stand, n: int, workers: list[Child]) -> list[float]:
    time.sleep(STARTED_AFTER)  # saq's worker drops jobs that it reads while it starts
    try:
        laps = sorted(stand.produce("latency", n, results=True)["laps"])
    except Failed:
        _check_alive(workers)  # if a worker has ended, that is the better message
        raise
    if not laps:
        raise Failed("no round trip was measured")
    return laps


def idle(stand: Stand) -> Figures:
    """Measure what an idle worker costs that has run a few jobs."""
    stand.server.flush()
    with stand.workers(1, stand.contestant.drain_at, results=True) as workers:
        _trips(stand, 10, workers)
        time.sleep(IDLE_AFTER)
        with Monitor(stand.server.port) as monitor:
            used, before = children.processor(workers), monitor.count
            time.sleep(IDLE_FOR)
            requests, used = monitor.count - before, children.processor(workers) - used
        _check_alive(workers)
        return {
            "idle_commands": requests / IDLE_FOR,
            "idle_cpu_ms": used / IDLE_FOR * 1000,
            "rss": children.memory(workers),
        }


def commands(stand: Stand) -> Figures:
    """Count the requests of one worker process for each job, its start-up included."""
    stand.server.flush()
    queued = stand.produce("bulk", min(stand.contestant.drain, 5_000))["queued"]
    with Monitor(stand.server.port) as monitor, stand.workers(1, stand.contestant.drain_at) as workers:
        stand.drained(queued, workers)
        time.sleep(0.3)
        return {"commands": monitor.count / queued}


def left(stand: Stand) -> Figures:
    """Measure what remains in the server after workers have stopped and all results have expired.

    Returns bytes and keys beyond those of ten jobs, and as `fixed` the bytes of ten jobs, which is the queue itself.
    """
    few, many = _remains(stand, 10), _remains(stand, 5_000)
    return {
        "left": float(max(sum(many.values()) - sum(few.values()), 0)),
        "left_keys": float(max(len(many) - len(few), 0)),
        "fixed": float(sum(few.values())),
    }


def _remains(stand: Stand, jobs: int) -> dict[str, int]:
    stand.server.flush()
    queued = stand.produce("bulk", jobs - 1)["queued"]
    with stand.workers(1, stand.contestant.drain_at, more={"CELERY5_RESULTS_TTL": str(KEPT)}) as workers:
        stand.drained(queued, workers)
        for child in workers:
            child.stop(10)
    time.sleep(KEPT + 1)
    return stand.server.holdings()


def due(stand: Stand) -> Figures:
    """Measure what promoting a due job costs while a thousand, and a million, other jobs wait."""
    return _run_program(stand, "due")


def gates(stand: Stand) -> Figures:
    """Measure what jobs with a concurrency key cost, with one key, a dozen and a thousand."""
    return _run_program(stand, "gates")


def _run_program(stand: Stand, name: str) -> Figures:
    """Run a program of this folder at the server, and return the figures that it prints."""
    command = [str(stand.python), str(PEERS.parent / f"{name}.py"), "--url", stand.server.url]
    try:
        out = children.run(
            command, stand.environment(False, 1, {}), stand.folder / f"{name}.log", PROGRAM_LIMIT
        )
        figures: Figures = json.loads(out.strip().splitlines()[-1])
    except (RuntimeError, ValueError, IndexError) as error:
        raise Failed(f"{name}: {error}") from None
    return figures


def drain1(stand: Stand) -> Figures:
    """Drain with one worker process."""
    return drain(stand, 1)


def drain2(stand: Stand) -> Figures:
    """Drain with two worker processes."""
    return drain(stand, 2)


EVERY_ROUND: dict[str, Callable[[Stand], Figures]] = {
    "enqueue": enqueue,
    "bulk": bulk,
    "drain1": drain1,
    "drain2": drain2,
    "latency": latency,
    "naps": naps,
}
ONCE: dict[str, Callable[[Stand], Figures]] = {
    "idle": idle,
    "commands": commands,
    "left": left,
    "due": due,
    "gates": gates,
}
OURS_ONLY = {"left", "due", "gates"}
