"""Measure what workflows of celery5 cost: against plain jobs, in large numbers, in memory and in scripts."""

import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from functools import wraps
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import children
import trio
from measures import Failed, Figures
from peers.stamps import Reader
from server import Monitor
from workflow_stand import WorkflowStand

sys.path.append(str(Path(__file__).parent / "peers"))

from celery5_workflows import AT_ONCE, app, ending, inc, inc_there, remind_later

from celery5.workflows.run import WorkflowRun

PAIR = 30_000
LARGE = 100_000
LONG = 10_000
MILLION = 1_000_000
FAN_INS, SMALL = 100, 1_000
CROSSED = 400
COUNTED = 20_000
PATIENCE = 120.0
CANCELLED_AFTER = 10_000
"""Members that have run when the run is cancelled."""
IDLE_AFTER, IDLE = 5.0, 30.0
"""Seconds until a worker has started, and for which it is watched."""
SLOW_SCRIPT = 2_000
"""Microseconds that a script may take."""

GOALS: dict[str, tuple[str, float]] = {
    "plain": ("plain drain, jobs/s", 0),
    "map": ("map of the same jobs, members/s", 0),
    "map_ratio": ("map members, share of a plain drain", 0.9),
    "plain_server_us": ("server CPU µs per plain job", 0),
    "map_server_us": ("server CPU µs per member", 0),
    "server_ratio": ("server CPU per member, times that of a plain job", -1.15),
    "plain_worker_us": ("worker CPU µs per plain job", 0),
    "map_worker_us": ("worker CPU µs per member", 0),
    "published": ("map of 100,000: published, s", -1.0),
    "joined": ("map of 100,000: joined and its body's result, s", -4.0),
    "large_body_ms": ("map of 100,000: the body runs after the last member, ms", 0),
    "body_p50": ("100 maps of 1,000: the body runs after the last member, p50, ms", 0),
    "body_p99": ("the same, p99, ms", -20.0),
    "long": ("chain of 10,000: from the start to its result, s", -6.0),
    "long_published": ("of that, until it is started, s", 0),
    "hop_p50": ("hop of it, p50, ms", -0.5),
    "hop_p99": ("hop of it, p99, ms", 0),
    "cross_p50": ("hop to another queue, p50, ms", -1.0),
    "cross_p99": ("the same, p99, ms", 0),
    "cancel_ms": ("cancelling a run of 100,000: the call, ms", -100.0),
    "began_after": ("members that began more than 1 s after it", -0.5),
    "last_began_ms": ("the last member began after it, ms", 0),
    "bytes_staged": ("bytes of Redis per small member, published", -64.0),
    "bytes_peak": ("bytes of Redis per small member, highest while it runs", -64.0),
    "bytes_ended": ("bytes of Redis per small member with its result, when the run has ended", 0),
    "sleeping_bytes": ("bytes of Redis per run that sleeps for 30 days, of 100,000", -300.0),
    "sleeping_requests": ("requests/s of an idle worker meanwhile", -1.0),
    "plain_requests": ("requests per plain job, of the worker", 0),
    "requests": ("requests per member, of the worker", -0.02),
    "million_s": ("a million from a generator: published, s", 0),
    "million_producer": ("memory that the producer grows by, MiB", -10.0),
    "million_worker": ("memory that the worker grows by, MiB", -20.0),
    "million_rate": ("members/s of that map", 0),
    "plain_script_ms": ("longest script while plain jobs are drained, ms", 0),
    "plain_scripts_slow": ("scripts above 2 ms of these, in 10,000", 0),
    "script_ms": ("longest script in all measures of workflows, ms", -2.0),
    "scripts_slow": ("scripts above 2 ms of these, in 10,000", 0),
    "plain_script_us": ("mean script while plain jobs are drained, µs", 0),
    "script_us": ("mean script while a map is drained, µs", 0),
}
"""What each figure is, and its goal: at least a positive one, at most the amount of a negative one; 0 for none."""


class Scripts:
    """Finds the longest script by the slow log. Its times are of the wall clock: what else the machine does counts."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def begin(self) -> None:
        """Forget what was measured before."""
        self._client.config_set("slowlog-log-slower-than", SLOW_SCRIPT)
        self._client.config_set("slowlog-max-len", 10_000)
        self._client.slowlog_reset()
        self._client.config_resetstat()

    def get_figures(self) -> Figures:
        """Return the longest script, the mean one, and how many of 10,000 took longer than 2 ms."""
        longest, calls, microseconds = 0, 0, 0
        for name, stats in self._client.info("commandstats").items():
            if name in ("cmdstat_eval", "cmdstat_evalsha"):
                calls += stats["calls"]
                microseconds += stats["usec"]
        entries = [entry for entry in self._client.slowlog_get(10_000) if is_script(entry)]
        if entries:
            worst = max(entries, key=lambda entry: int(entry["duration"]))
            longest = int(worst["duration"])
            print(f"    longest script: {longest} us, {worst['command'][:60]!r}", file=sys.stderr)
        calls = max(calls, 1)
        return {
            "script_ms": longest / 1000,
            "script_us": microseconds / calls,
            "scripts_slow": len(entries) / calls * 10_000,
        }


def is_script(entry: dict[str, Any]) -> bool:
    """Return whether an entry of the slow log is a script."""
    return bool(entry["command"].upper().startswith(b"EVAL"))


def watch_scripts(run: Callable[[WorkflowStand], Figures]) -> Callable[[WorkflowStand], Figures]:
    """Add the longest script of a measure, and how many were above 2 ms."""

    @wraps(run)
    def watched(stand: WorkflowStand) -> Figures:
        scripts = Scripts(stand.server.client)
        scripts.begin()
        app.configure(broker=stand.server.url)
        try:
            figures = run(stand)
        finally:
            app.connections.close()
        found = scripts.get_figures()
        return figures | {name: found[name] for name in ("script_ms", "scripts_slow")}

    return watched


def drain_pair(stand: WorkflowStand, kind: str) -> Figures:
    """Drain plain jobs, or a map of the same jobs, that were published before."""
    stand.server.flush()
    scripts = Scripts(stand.server.client)
    scripts.begin()
    if kind == "plain":
        app.send_many([inc.s(i) for i in range(PAIR)])
    else:
        inc.map(range(PAIR)).start()
    with stand.workers(1, stand.contestant.drain_at) as workers:
        drained = stand.drained(PAIR, workers)
    return {
        "rate": drained.rate(),
        "server_us": drained.server_us,
        "worker_us": drained.worker_us,
        **scripts.get_figures(),
    }


def pair(stand: WorkflowStand) -> Figures:
    """Drain plain jobs, and a map of the same jobs, in random order."""
    app.configure(broker=stand.server.url)
    found = {kind: drain_pair(stand, kind) for kind in random.sample(("plain", "map"), 2)}
    app.connections.close()
    plain, members = found["plain"], found["map"]
    return {
        "plain": plain["rate"],
        "map": members["rate"],
        "map_ratio": members["rate"] / plain["rate"],
        "plain_server_us": plain["server_us"],
        "map_server_us": members["server_us"],
        "server_ratio": members["server_us"] / plain["server_us"],
        "plain_worker_us": plain["worker_us"],
        "map_worker_us": members["worker_us"],
        "plain_script_ms": plain["script_ms"],
        "plain_scripts_slow": plain["scripts_slow"],
        "plain_script_us": plain["script_us"],
        "script_ms": members["script_ms"],
        "scripts_slow": members["scripts_slow"],
        "script_us": members["script_us"],
    }


def run_ready(stand: WorkflowStand, workers: list[children.Child]) -> Reader:
    """Wait until the worker has run a job, and return a reader of its stamps."""
    inc.delay(0).get(timeout=30)
    inc_there.delay(0).get(timeout=30)
    if reason := workers[0].failed():
        raise Failed(f"the worker ended, {reason}")
    return Reader(stand.stamps)


def get_stamps(reader: Reader, since: int) -> list[int]:
    """Return when jobs ran after `since`, in order."""
    return sorted(stamp for process in reader.by_process() for stamp in process if stamp > since)


def get_body_delay(reader: Reader, began: int, body: int) -> float:
    """Return the milliseconds from the last member to the body."""
    return (body - get_stamps(reader, began)[-1]) / 1e6


@watch_scripts
def large(stand: WorkflowStand) -> Figures:
    """Map 100,000 items while a worker runs, and join them."""
    with stand.with_worker() as workers:
        reader = run_ready(stand, workers)
        began = time.monotonic_ns()
        run = (inc.map(range(LARGE)) | ending.s()).start()
        published = time.monotonic_ns()
        body, total = run.get(timeout=PATIENCE)
        ended = time.monotonic_ns()
        if total != sum(range(1, LARGE + 1)):
            raise Failed(f"the sum of the members is {total}")
        delay = get_body_delay(reader, began, body)
    return {
        "published": (published - began) / 1e9,
        "joined": (ended - began) / 1e9,
        "large_body_ms": delay,
    }


@watch_scripts
def bodies(stand: WorkflowStand) -> Figures:
    """Measure when bodies run after the last member."""
    delays = []
    with stand.with_worker() as workers:
        reader = run_ready(stand, workers)
        for _ in range(FAN_INS):
            began = time.monotonic_ns()
            body, _ = (inc.map(range(SMALL)) | ending.s()).start().get(timeout=PATIENCE)
            delays.append(get_body_delay(reader, began, body))
    delays.sort()
    return {"body_p50": median(delays), "body_p99": delays[int(len(delays) * 0.99) - 1]}


def get_hops(reader: Reader, began: int) -> tuple[float, float]:
    """Return p50 and p99 of the milliseconds between two jobs of a chain."""
    hops = sorted((after - before) / 1e6 for before, after in pairwise(get_stamps(reader, began)))
    return median(hops), hops[int(len(hops) * 0.99)]


def run_chain(stand: WorkflowStand, count: int, tasks: tuple[Any, ...]) -> tuple[Figures, float, float]:
    """Run a chain whose jobs are of these tasks in turn; return its times, and p50 and p99 of its hops."""
    with stand.with_worker() as workers:
        reader = run_ready(stand, workers)
        began = time.monotonic_ns()
        chain: Any = tasks[0].s(0)
        for number in range(1, count):
            chain = chain | tasks[number % len(tasks)].s()
        run: WorkflowRun[int] = chain.start()
        published = time.monotonic_ns()
        if (value := run.get(timeout=PATIENCE)) != count:
            raise Failed(f"the chain returned {value}")
        ended = time.monotonic_ns()
        p50, p99 = get_hops(reader, began)
    return {"long": (ended - began) / 1e9, "long_published": (published - began) / 1e9}, p50, p99


@watch_scripts
def long(stand: WorkflowStand) -> Figures:
    """Run a chain of 10,000."""
    figures, p50, p99 = run_chain(stand, LONG, (inc,))
    return figures | {"hop_p50": p50, "hop_p99": p99}


@watch_scripts
def cross(stand: WorkflowStand) -> Figures:
    """Run a chain that changes the queue at each hop."""
    _, p50, p99 = run_chain(stand, CROSSED, (inc, inc_there))
    return {"cross_p50": p50, "cross_p99": p99}


@watch_scripts
def cancel(stand: WorkflowStand) -> Figures:
    """Cancel a map of 100,000 while it runs."""
    with stand.with_worker() as workers:
        reader = run_ready(stand, workers)
        before = reader.total()
        run = inc.map(range(LARGE)).start()
        deadline = time.monotonic() + PATIENCE
        while reader.total() - before < CANCELLED_AFTER and time.monotonic() < deadline:
            time.sleep(0.001)
        asked = time.monotonic_ns()
        was_live = run.cancel()
        returned = time.monotonic_ns()
        if not was_live:
            raise Failed("the run had ended before it was cancelled")
        time.sleep(3)
        after = get_stamps(reader, returned)
    return {
        "cancel_ms": (returned - asked) / 1e6,
        "began_after": sum(stamp > returned + 1e9 for stamp in after),
        "last_began_ms": (after[-1] - returned) / 1e6 if after else 0.0,
    }


def get_used(stand: WorkflowStand) -> int:
    """Return the memory that the server uses now, in bytes."""
    return int(stand.server.client.info("memory")["used_memory"])


@watch_scripts
def memory(stand: WorkflowStand) -> Figures:
    """Measure the memory of the server for a map of 100,000 members."""
    stand.server.flush()
    inc.map(range(10)).start()
    stand.server.client.flushall()
    before = stand.server.memory()
    run = inc.map(range(LARGE)).start()
    app.connections.close()
    staged = stand.server.memory() - before
    peak = 0
    with stand.workers(1, stand.contestant.drain_at):
        deadline = time.monotonic() + PATIENCE
        while run.status().state.value == "RUNNING" and time.monotonic() < deadline:
            peak = max(peak, get_used(stand) - before)
            time.sleep(0.02)
        time.sleep(1)
    app.connections.close()
    ended = stand.server.memory() - before
    return {
        "bytes_staged": staged / LARGE,
        "bytes_peak": peak / LARGE,
        "bytes_ended": ended / LARGE,
    }


async def start_sleepers(count: int) -> None:
    """Start runs that sleep, some at once."""
    numbers = iter(range(count))

    async def start() -> None:
        for number in numbers:
            await remind_later.astart(number)

    async with trio.open_nursery() as nursery:
        for _ in range(AT_ONCE):
            nursery.start_soon(start)


def sleeping(stand: WorkflowStand) -> Figures:
    """Measure what 100,000 runs that sleep cost: memory of the server, and requests of a worker."""
    app.configure(broker=stand.server.url)
    stand.server.flush()
    trio.run(start_sleepers, SMALL)
    before = stand.server.memory()
    trio.run(start_sleepers, LARGE)
    taken = stand.server.memory() - before
    with stand.workers(1, stand.contestant.drain_at):
        time.sleep(IDLE_AFTER)
        with Monitor(stand.server.port) as monitor:
            time.sleep(IDLE)
            requests_made = monitor.count
    return {"sleeping_bytes": taken / LARGE, "sleeping_requests": requests_made / IDLE}


def count_requests(stand: WorkflowStand) -> float:
    """Return the requests of a worker that drains what is published, for each job; its start-up counts."""
    app.connections.close()
    with Monitor(stand.server.port) as monitor, stand.workers(1, stand.contestant.drain_at) as workers:
        stand.drained(COUNTED, workers)
        time.sleep(0.3)
        return monitor.count / COUNTED


def requests(stand: WorkflowStand) -> Figures:
    """Count the requests of the worker for each member, and for each plain job."""
    app.configure(broker=stand.server.url)
    stand.server.flush()
    app.send_many([inc.s(i) for i in range(COUNTED)])
    plain = count_requests(stand)
    stand.server.flush()
    inc.map(range(COUNTED)).start()
    return {"plain_requests": plain, "requests": count_requests(stand)}


@watch_scripts
def million(stand: WorkflowStand) -> Figures:
    """Map a million items of a generator; a process of its own produces them."""
    with stand.with_worker() as workers:
        reader = run_ready(stand, workers)
        inc.map(range(2 * SMALL)).start().get(timeout=PATIENCE)
        resident = peak = children.memory(workers)
        before = reader.total()
        command = [str(stand.python), str(Path(__file__)), str(MILLION)]
        environment = stand.environment(False, 1, {})
        output = json.loads(
            children.run(command, environment, stand.folder / "million.log", PATIENCE).splitlines()[-1]
        )
        deadline = time.monotonic() + PATIENCE
        while (ran := reader.total() - before) < MILLION:
            if time.monotonic() > deadline:
                raise Failed(f"{ran} of a million ran")
            peak = max(peak, children.memory(workers))
            time.sleep(0.1)
        stamps = get_stamps(reader, 0)[-MILLION:]
    return {
        "million_s": output["seconds"],
        "million_producer": output["growth"],
        "million_worker": peak - resident,
        "million_rate": MILLION / (stamps[-1] - stamps[0]) * 1e9,
    }


def get_highest_memory() -> float:
    """Return the highest resident memory of this process, in MiB.

    `getrusage` does not do: a process inherits its highest memory from the one that started it.
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def produce(count: int) -> None:
    """Publish a map of a generator; print the seconds, and the MiB that this process grew by."""

    def generate() -> Iterator[int]:
        yield from range(count)

    inc.map(range(2 * SMALL)).start()
    before, start = get_highest_memory(), time.perf_counter()
    inc.map(generate()).start()
    growth = get_highest_memory() - before
    print(json.dumps({"seconds": time.perf_counter() - start, "growth": growth}), flush=True)


LIMITS: dict[str, tuple[Callable[[WorkflowStand], Figures], bool]] = {
    "pair": (pair, True),
    "large": (large, True),
    "bodies": (bodies, True),
    "long": (long, True),
    "cross": (cross, True),
    "cancel": (cancel, True),
    "memory": (memory, False),
    "requests": (requests, False),
    "sleeping": (sleeping, False),
    "million": (million, False),
}
"""The measures, and whether each round makes them."""

if __name__ == "__main__":
    produce(int(sys.argv[1]))
