"""Workflows of celery5: a map or a group with a body, and chains."""

import os
import time
from functools import reduce

import trio
from celery5_app import app
from contract import Workflows, become, clock
from stamps import done

from celery5 import group
from celery5.workflows import Flow

LIMIT = 60.0
AT_ONCE = 32
"""Runs that the producer of many chains starts at once."""


@app.task(name="inc")
async def inc(n: int) -> int:
    """Return the next number."""
    done()
    return n + 1


@app.task(name="inc-there", queue="there")
async def inc_there(n: int) -> int:
    """Return the next number, from another queue."""
    done()
    return n + 1


@app.task(name="total")
async def total(numbers: list[int]) -> int:
    """Return the sum."""
    return sum(numbers)


@app.workflow(name="benchmarks.workflows.remind_later", deadline=60 * 86400)
def remind_later(flow: Flow, n: int) -> None:
    """Sleep, and then run a job."""
    flow.sleep(30 * 86400)
    flow.call(inc, n)


@app.task(name="ending")
async def ending(numbers: list[int]) -> tuple[int, int]:
    """Return when this job ran, in nanoseconds of the monotonic clock, and the sum."""
    return time.monotonic_ns(), sum(numbers)


def make_fan_in(n: int):  # noqa: ANN201  its type says no more
    """Return members and a body: a map, or a group of calls as a variant."""
    if os.environ.get("BENCH_VARIANT") == "group":
        return group([inc.s(i) for i in range(n)]) | total.s()
    return inc.map(range(n)) | total.s()


def make_chain(n: int):  # noqa: ANN201  its type says no more
    """Return a chain of n jobs."""
    return reduce(lambda chain, _: chain | inc.s(), range(n - 1), inc.s(0))


def fan_in(n: int, laps: int) -> None:
    """Run maps, or groups."""
    make_fan_in(10).start().get(timeout=LIMIT)
    for _ in range(laps):
        with clock.lap():
            result = make_fan_in(n).start().get(timeout=LIMIT)
        assert result == sum(range(1, n + 1))


def chain(n: int, laps: int) -> None:
    """Run chains one after another."""
    make_chain(5).start().get(timeout=LIMIT)
    for _ in range(laps):
        with clock.lap():
            result = make_chain(n).start().get(timeout=LIMIT)
        assert result == n


async def start_chains(count: int, n: int) -> None:
    """Start many chains, some at once."""
    numbers = iter(range(count))

    async def start() -> None:
        for _ in numbers:
            await make_chain(n).astart()

    await inc.adelay(0)
    clock.start()
    async with trio.open_nursery() as nursery:
        for _ in range(AT_ONCE):
            nursery.start_soon(start)


def worker(processes: int, concurrency: int) -> None:
    """Its own command."""
    size = ("--processes", str(processes), "--concurrency", str(concurrency))
    options = os.environ.get("BENCH_OPTIONS", "").split()
    become("celery5", "-A", "celery5_workflows:app", "worker", "start", *size, *options)


workflows = Workflows(fan_in, chain, lambda count, n: trio.run(start_chains, count, n), worker)
