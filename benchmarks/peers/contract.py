"""Contract: what a peer's module must be able to do, and the clock that it measures with."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

URL = os.environ.get("BENCH_URL", "redis://127.0.0.1:6379/0")
RESULTS = os.environ.get("BENCH_RESULTS") == "1"
VARIANT = os.environ.get("BENCH_VARIANT", "")
SLEEP = 0.05
WAIT = 0.005
COMPUTED = 0.001
"""Seconds that a realistic job waits and computes."""
QUEUES = [f"q{number}" for number in range(20)]
"""The queues of jobs that are spread."""
WORKER_QUEUES = [name for name in os.environ.get("BENCH_QUEUES", "").split(",") if name]
"""The queues that a worker serves; empty: the usual one."""
CHUNK = 1000
"""Jobs handed over at once by peers that send many in one call."""
WARM_UP_LAPS = 20
TRIPS_LIMIT = 4.0
"""Seconds after which no further round trip is begun."""
PATIENCE = 10.0
"""Seconds that a round trip may take before the peer counts as failed."""


class Clock:
    """What a producer measured."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.cpu = 0.0
        self.laps: list[float] = []
        self.began = 0

    def start(self) -> None:
        """Keep the time, in nanoseconds of the clock that stamps are of."""
        self.began = time.monotonic_ns()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Time a whole block: wall clock and processor time, in seconds."""
        cpu, wall = time.process_time(), time.perf_counter()
        yield
        self.seconds = time.perf_counter() - wall
        self.cpu = time.process_time() - cpu

    @contextmanager
    def lap(self) -> Iterator[None]:
        """Time one round trip, in milliseconds."""
        wall = time.perf_counter()
        yield
        self.laps.append((time.perf_counter() - wall) * 1000)


clock = Clock()


@dataclass(frozen=True)
class Peer:
    """What a peer's module can do. The producers queue one warm-up job, then `n`."""

    enqueue: Callable[[int], object]
    bulk: Callable[[int], object]
    sleep: Callable[[int], object]
    latency: Callable[[int], object]
    # The command line of so many processes with so much concurrency; None when `serve` is the worker.
    worker: Callable[[int, int], list[str]] | None
    # Is a worker, where there is no command for it.
    serve: Callable[[int, int], object] | None = None
    # Queue so many jobs of a task, `work` or `echo`, with a text of so many bytes.
    fill: Callable[[str, int, int], object] | None = None
    # Queue so many no-op jobs, to each of QUEUES in turn.
    spread: Callable[[int], object] | None = None


@dataclass(frozen=True)
class Workflows:
    """What a peer's module can do with workflows. What opens connections comes before what is timed."""

    # A lap for each: so many members and a body, from the start to the body's result.
    fan_in: Callable[[int, int], object]
    # A lap for each: a chain of this many jobs, from the start to the last one's result.
    chain: Callable[[int, int], object]
    # Start so many chains of this many jobs; the jobs stamp when they run.
    chains: Callable[[int, int], object]
    worker: Callable[[int, int], object]


def compute() -> None:
    """Use a processor as long as a realistic job does."""
    end = time.thread_time() + COMPUTED
    while time.thread_time() < end:
        pass


def chunk_size(size: int) -> int:
    """Return how many jobs with a text of `size` bytes go into one call: some 5 MB at most."""
    return max(1, min(CHUNK, 5_000_000 // max(size, 1)))


def portions(n: int, size: int) -> Iterator[int]:
    """Yield numbers of jobs that add up to `n`, each for one call."""
    while n > 0:
        portion = min(n, chunk_size(size))
        yield portion
        n -= portion


def chunks(n: int) -> Iterator[range]:
    """The numbers below `n`, at most CHUNK at a time."""
    for start in range(0, n, CHUNK):
        yield range(start, min(n, start + CHUNK))


def trips(n: int) -> Iterator[int]:
    """The numbers below `n`, as far as one gets in TRIPS_LIMIT seconds: a slow round trip is known after a few."""
    end = time.monotonic() + TRIPS_LIMIT
    for i in range(n):
        if time.monotonic() > end and i > WARM_UP_LAPS:
            return
        yield i


def command_line(*command: str) -> list[str]:
    """Return a command line of a tool of the peer's own environment."""
    return [str(Path(sys.executable).with_name(command[0])), *command[1:]]


def become(*command: str) -> NoReturn:
    """Turn this process into a tool of the peer's own environment."""
    tool, *arguments = command_line(*command)
    os.execv(tool, [tool, *arguments])
