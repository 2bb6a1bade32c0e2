"""Define what is measured of one contestant, a function for each measure, all by the same method.

Drain: the queue is filled first, then workers start. Each job stamps the time at which it ran. The rate counts from the
time when the last process began its first job to the last job of all, so that neither start-up nor the head start of
one process counts. Filling the queue is the measurement of bulk enqueueing.
"""

import json
import mmap
import os
import shutil
import time
from array import array
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypedDict

import children
from children import Child
from contestants import NEW, NONE, OLDER, OURS, OWN, TRIO, Contestant
from peers.contract import QUEUES
from peers.contract import SLEEP as NAP
from peers.stamps import Reader
from server import Monitor, Server

Figures = dict[str, float]
PEERS = Path(__file__).resolve().parent / "peers"
NAPS = 5_000
NAPS_AT = 100
START_LIMIT = 15.0
IDLE_AFTER = 2.0
STARTED_AFTER = 1.5
IDLE_FOR = 6.0
KEPT = 60  # seconds; results are kept for at least a minute
WORK, WORK_SIZE = 1_500, 1_024
"""Realistic jobs, and the bytes of their text."""
ECHOES = {"echo1k": (6_000, 1_024), "echo100k": (300, 102_400)}
"""Jobs with a payload, and its bytes."""
SPREAD = 10_000
KILLED_JOBS, KILLED_AT = 1_500, 1_000
"""Jobs of 50 ms of which a worker is killed, and after how many."""
RESTART_AFTER = 0.5
RECOVERY = 10.0
"""Seconds after which a lost worker's jobs run again, where that can be set."""


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
    # Seconds that one measure may take.
    limit: float
    jobs: int | None = None
    deadline: float = float("inf")
    commands: dict[tuple[object, ...], list[str]] = field(default_factory=dict)

    def begin(self) -> None:
        """Count the seconds of a measure from now."""
        self.deadline = time.monotonic() + self.limit

    def remaining(self) -> float:
        """Return the seconds that are left to the measure. Raises Failed when there are none."""
        left = min(self.deadline - time.monotonic(), self.limit)
        if left <= 0:
            raise Failed(f"not done after {self.limit:.0f} s")
        return left

    def amount(self, usual: int) -> int:
        """Return how many jobs to use; `usual` is the number for a full run."""
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
            **self.contestant.settings,
            **more,
        }

    @property
    def stamps(self) -> Path:
        """The folder into which workers write stamps."""
        return self.folder / "stamps"

    def ask(self, verb: str, *numbers: int) -> list[str]:
        """Return the command line of a verb for this contestant."""
        return [str(self.python), str(PEERS / "ask.py"), self.contestant.module, verb, *map(str, numbers)]

    def produce(
        self, verb: str, *numbers: int, results: bool = False, more: Mapping[str, str] = NONE
    ) -> "Told":
        """Run a producer to its end and return its output."""
        output: Told = self.run(self.ask(verb, *numbers), self.environment(results, NAPS_AT, more), verb)
        return output

    def run(self, command: list[str], environment: dict[str, str], name: str) -> Any:
        """Run a program to its end, and return the JSON of its last line. Raises Failed."""
        try:
            out = children.run(command, environment, self.folder / f"{name}.log", self.remaining())
            return json.loads(out.strip().splitlines()[-1])
        except (RuntimeError, ValueError, IndexError) as error:
            raise Failed(f"{name}: {error}") from None

    def command(
        self, processes: int, concurrency: int, number: int, environment: dict[str, str]
    ) -> list[str]:
        """Return the command line of worker `number`; start-up is measured without what finds it out."""
        key = (processes, concurrency, number, *sorted(environment.items()))
        if key not in self.commands:
            ask = self.ask("command", processes, concurrency)
            self.commands[key] = self.run(ask, environment, "command")
        return self.commands[key]

    @contextmanager
    def workers(
        self, processes: int, concurrency: int, *, results: bool = False, more: Mapping[str, str] = NONE
    ) -> Iterator[list[Child]]:
        """Run workers during the block, with `more` in their environment. What is added to the list ends with them."""
        shutil.rmtree(self.stamps, ignore_errors=True)
        self.stamps.mkdir(parents=True)
        own = self.contestant.own_processes
        numbers = range(1 if own else processes)
        environment = self.environment(results, concurrency, more)
        commands = [
            self.command(processes if own else 1, concurrency, number, environment) for number in numbers
        ]
        started = [self.start(command, environment, number) for number, command in enumerate(commands)]
        try:
            yield started
        finally:
            for child in started:
                child.end()

    def start(self, command: list[str], environment: dict[str, str], number: int) -> Child:
        """Start a worker."""
        return Child(command, environment, self.folder / f"worker-{number}.log")

    def drained(self, queued: int, workers: list[Child]) -> "Drained":
        """Wait for a limited time until all jobs ran and while the workers live. Raises Failed."""
        reader = Reader(self.stamps)
        _until(reader, 1, workers, min(START_LIMIT, self.remaining()))
        ran_before, worker_time, server_time = (
            reader.total(),
            children.processor(workers),
            self.server.processor(),
        )
        _until(reader, queued, workers, self.remaining())
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
    jobs = output["queued"] - 1
    return {
        "bulk": jobs / output["seconds"],
        "bulk_cpu_us": output["cpu"] / jobs * 1e6,
        "queued": output["queued"],
    }


def drain(stand: Stand, processes: int) -> Figures:
    """Fill the queue, then empty it by `processes` workers."""
    filled = bulk(stand)
    queued = int(filled.pop("queued"))
    contestant = stand.contestant
    with stand.workers(processes, contestant.drain_at) as workers:
        drained = stand.drained(queued, workers)
        logs = contestant.name == TRIO and processes == 1
        logged = _logged_share(workers, queued) if logs else {}
    return (
        filled
        | logged
        | {
            f"drain{processes}": drained.rate(),
            f"startup{processes}": (drained.first() - workers[-1].began) / 1e9,
            f"worker_cpu_us{processes}": drained.worker_us,
            f"server_cpu_us{processes}": drained.server_us,
            f"cpu_us{processes}": drained.worker_us + drained.server_us,
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


def work(stand: Stand) -> Figures:
    """Drain realistic jobs by one process, with their results: 1 ms of computing, 5 ms of waiting, 1 KiB."""
    return {"work": _drain_texts(stand, "work", stand.amount(WORK), WORK_SIZE).rate()}


def echo(stand: Stand) -> Figures:
    """Drain jobs that return a payload by one process, with their results."""
    return {
        name: _drain_texts(stand, "echo", stand.amount(number), size).rate()
        for name, (number, size) in ECHOES.items()
    }


def _drain_texts(stand: Stand, task: str, number: int, size: int) -> "Drained":
    stand.server.flush()
    queued = stand.produce(task, number, size, results=True)["queued"]
    with stand.workers(1, NAPS_AT if task == "work" else stand.contestant.drain_at, results=True) as workers:
        return stand.drained(queued, workers)


def spread(stand: Stand) -> Figures:
    """Drain no-op jobs over 20 queues by one process."""
    stand.server.flush()
    more = {"BENCH_QUEUES": ",".join(QUEUES)}
    queued = stand.produce("spread", stand.amount(SPREAD), more=more)["queued"]
    with stand.workers(1, stand.contestant.drain_at, more=more) as workers:
        return {"spread": stand.drained(queued, workers).rate()}


def kill(stand: Stand) -> Figures:
    """Kill one of two workers while they run jobs, start it again, and measure when the last job has ended."""
    stand.server.flush()
    marks = stand.folder / "marks"
    queued = stand.produce("sleep", KILLED_JOBS - 1)["queued"]
    marks.write_bytes(bytes(queued))
    more = {"BENCH_MARKS": str(marks), "BENCH_RECOVERY": f"{RECOVERY:g}"}
    two = replace(stand, contestant=replace(stand.contestant, own_processes=False), commands={})
    with marks.open("r+b") as file, two.workers(2, NAPS_AT, more=more) as workers:
        ended = mmap.mmap(file.fileno(), 0)
        _until_ended(ended, KILLED_AT, stand)
        workers.pop(0).end()
        killed = time.monotonic()
        environment = two.environment(False, NAPS_AT, more)
        command = two.command(1, NAPS_AT, 0, environment)
        while ended[:].count(1) < queued and time.monotonic() < killed + RESTART_AFTER:
            time.sleep(0.005)
        if ended[:].count(1) < queued:
            workers.append(two.start(command, environment, 2))
            _until_ended(ended, queued, stand)
        return {"recovery": time.monotonic() - killed}


def _until_ended(ended: mmap.mmap, jobs: int, stand: Stand) -> None:
    """Wait until so many different jobs have ended."""
    while (count := ended[:].count(1)) < jobs:
        if time.monotonic() > stand.deadline:
            raise Failed(f"{len(ended) - count:,} of {len(ended):,} jobs not done in {stand.limit:.0f} s")
        time.sleep(0.01)


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
            "pss": children.proportional_memory(workers),
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
    with Server() as other:  # the results of both expire meanwhile
        beside = replace(stand, server=other, commands={})
        _run_and_stop(beside, 10)
        _run_and_stop(stand, 5_000)
        time.sleep(KEPT + 1)
        few, many = other.holdings(), stand.server.holdings()
    return {
        "left": float(max(sum(many.values()) - sum(few.values()), 0)),
        "left_keys": float(max(len(many) - len(few), 0)),
        "fixed": float(sum(few.values())),
    }


def _run_and_stop(stand: Stand, jobs: int) -> None:
    stand.server.flush()
    queued = stand.produce("bulk", jobs - 1)["queued"]
    with stand.workers(1, stand.contestant.drain_at, more={"CELERY5_RESULTS_TTL": str(KEPT)}) as workers:
        stand.drained(queued, workers)
        for child in workers:
            child.stop(10)


def due(stand: Stand) -> Figures:
    """Measure what promoting a due job costs while a thousand, and a million, other jobs wait."""
    return _run_program(stand, "due")


def gates(stand: Stand) -> Figures:
    """Measure what jobs with a concurrency key cost, with one key, a dozen and a thousand."""
    return _run_program(stand, "gates")


def _run_program(stand: Stand, name: str) -> Figures:
    """Run a program of this folder at the server, and return the figures that it prints."""
    command = [str(stand.python), str(PEERS.parent / f"{name}.py"), "--url", stand.server.url]
    figures: Figures = stand.run(command, stand.environment(False, 1, {}), name)
    return figures


def drain1(stand: Stand) -> Figures:
    """Drain with one worker process."""
    return drain(stand, 1)


def drain2(stand: Stand) -> Figures:
    """Drain with two worker processes."""
    return drain(stand, 2)


@dataclass(frozen=True)
class Measure:
    """One measure: of which groups it is made, how often, and how long it may take."""

    run: Callable[[Stand], Figures]
    groups: frozenset[str] = frozenset({NEW, OURS, OWN, OLDER})
    # In the first round only.
    once: bool = False
    # Seconds.
    limit: float = 45.0
    # The only contestant that it is made of; "" is all.
    only: str = ""
    # Not in a quick run.
    slow: bool = False


MODERN = frozenset({NEW, OURS})
COMPARED = frozenset({NEW, OURS, OLDER})
MEASURES = {
    "enqueue": Measure(enqueue),
    "bulk": Measure(bulk),
    "drain1": Measure(drain1),
    "drain2": Measure(drain2, COMPARED),
    "latency": Measure(latency, COMPARED),
    "naps": Measure(naps, COMPARED),
    "work": Measure(work, MODERN),
    "echo": Measure(echo, MODERN),
    "spread": Measure(spread, MODERN),
    "kill": Measure(kill, MODERN, once=True, limit=25.0),
    "idle": Measure(idle, COMPARED, once=True),
    "commands": Measure(commands, COMPARED, once=True),
    "left": Measure(left, once=True, limit=120.0, only=TRIO, slow=True),
    "due": Measure(due, once=True, limit=180.0, only=TRIO, slow=True),
    "gates": Measure(gates, once=True, limit=240.0, only=TRIO, slow=True),
}
