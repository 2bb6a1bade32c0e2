"""taskiq-pipelines: a map whose waiter polls inside a worker, and steps called one after another."""

import asyncio

import uvloop
from contract import Workflows, become, clock
from stamps import done
from taskiq_app import broker
from taskiq_pipelines import Pipeline, PipelineMiddleware

LIMIT = 60.0
POLLED = 0.01
"""Seconds between two looks of the waiter at its members; its default is 0.5."""
broker.add_middlewares(PipelineMiddleware())


@broker.task(task_name="numbers")
async def numbers(n: int) -> list[int]:
    """Return what is mapped: a pipeline begins with a task."""
    return list(range(n))


@broker.task(task_name="inc")
async def inc(n: int) -> int:
    """Return the next number."""
    done()
    return n + 1


@broker.task(task_name="total")
async def total(found: list[int]) -> int:
    """Return the sum."""
    return sum(found)


async def run_map(n: int) -> int:
    """Map, and add up."""
    task = await Pipeline(broker, numbers).map(inc, check_interval=POLLED).call_next(total).kiq(n)
    return (await task.wait_result(check_interval=0.001, timeout=LIMIT)).return_value


async def fan_in(n: int, laps: int) -> None:
    """Run maps."""
    await broker.startup()
    await run_map(10)
    for _ in range(laps):
        with clock.lap():
            result = await run_map(n)
        assert result == sum(range(1, n + 1))


def make_chain(n: int):  # noqa: ANN201  its own type
    """Return a pipeline of n tasks."""
    pipeline = Pipeline(broker, inc)
    for _ in range(n - 1):
        pipeline = pipeline.call_next(inc)
    return pipeline


async def chain(n: int, laps: int) -> None:
    """Run pipelines one after another."""
    await broker.startup()
    await (await make_chain(5).kiq(0)).wait_result(check_interval=0.001, timeout=LIMIT)
    for _ in range(laps):
        with clock.lap():
            task = await make_chain(n).kiq(0)
            result = await task.wait_result(check_interval=0.001, timeout=LIMIT)
        assert result.return_value == n


async def chains(count: int, n: int) -> None:
    """Start many pipelines."""
    await broker.startup()
    await inc.kiq(0)
    clock.start()
    await asyncio.gather(*[make_chain(n).kiq(0) for _ in range(count)])


def worker(processes: int, concurrency: int) -> None:
    """Its own command, which runs uvloop by itself when that is installed."""
    size = ("--workers", str(processes), "--max-async-tasks", str(concurrency))
    become("taskiq", "worker", "taskiq_workflows:broker", *size, "--log-level", "WARNING", "--no-parse")


workflows = Workflows(
    lambda n, laps: uvloop.run(fan_in(n, laps)),
    lambda n, laps: uvloop.run(chain(n, laps)),
    lambda count, n: uvloop.run(chains(count, n)),
    worker,
)
