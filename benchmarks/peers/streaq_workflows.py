"""streaQ's dependencies: a task after a list of others, which gets no results, and tasks by `then`."""

import os

import uvloop
from contract import Workflows, become, clock
from stamps import done
from streaq_app import app

LIMIT = 60


@app.task(name="inc", ttl=300, silent=True)
async def inc(n: int) -> int:
    """Return the next number."""
    done()
    return n + 1


@app.task(name="body", ttl=300, silent=True)
async def body() -> int:
    """End a fan-out."""
    return 0


async def run_group(n: int) -> None:
    """Run many tasks and one after them all."""
    members = [inc.enqueue(i) for i in range(n)]
    await app.enqueue_many(members)
    end = await body.enqueue().start(after=[member.id for member in members])
    assert (await end.result(timeout=LIMIT)).success


async def fan_in(n: int, laps: int) -> None:
    """Run groups."""
    async with app:
        await run_group(10)
        for _ in range(laps):
            with clock.lap():
                await run_group(n)


def make_chain(n: int):  # noqa: ANN201  its own type
    """Return the last task of a chain of n tasks."""
    task = inc.enqueue(0)
    for _ in range(n - 1):
        task = task.then(inc)
    return task


async def chain(n: int, laps: int) -> None:
    """Run chains one after another."""
    async with app:
        await (await make_chain(5)).result(timeout=LIMIT)
        for _ in range(laps):
            with clock.lap():
                result = await (await make_chain(n)).result(timeout=LIMIT)
            assert result.result == n


async def chains(count: int, n: int) -> None:
    """Start many chains."""
    async with app:
        await inc.enqueue(0)
        clock.start()
        for _ in range(count):
            await make_chain(n)


def worker(processes: int, concurrency: int) -> None:
    """Its own command."""
    os.environ["BENCH_CONCURRENCY"] = str(concurrency)
    become("streaq", "run", "streaq_workflows:app", "--workers", str(processes))


workflows = Workflows(
    lambda n, laps: uvloop.run(fan_in(n, laps)),
    lambda n, laps: uvloop.run(chain(n, laps)),
    lambda count, n: uvloop.run(chains(count, n)),
    worker,
)
