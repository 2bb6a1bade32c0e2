"""A worker is killed at each of its calls to Redis, before, within or after it; another one carries its runs on."""

import os
import sys
import tempfile
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
import trio

from celery5 import App, Workflow
from celery5.broker.call import Call
from celery5.errors import WorkflowFailed
from celery5.workflows import RunState, WorkflowRun
from tests.forking import Process, start_process
from tests.night import NIGHTLY
from tests.redis.worker.workers import until
from tests.redis.workflows.mortal import QUEUES, MortalShop
from tests.story.cli.commands import environment

MOMENTS = ("before", "within", "after")
STEP = int(os.environ.get("CELERY5_DEATH_STEP", "2" if NIGHTLY else "7"))
"""One of so many calls is that at which a worker dies; 1 tries each, at each moment."""
CALLS = 31
"""How many calls are tried, from the first one on. No workflow here takes more."""


def make_chain(shop: MortalShop) -> Workflow[Any]:
    """Hand over between two queues, there and back."""
    return shop.near.s(1) | shop.far.s() | shop.near.s() | shop.far.s()


def make_join(shop: MortalShop) -> Workflow[Any]:
    """Join jobs of another queue."""
    return shop.far.options(undo=None).map(range(5)) | shop.total.s()


def make_dynamic(shop: MortalShop) -> Workflow[Any]:
    """Put a workflow in the place of a job of another queue."""
    return shop.near.s(1) | shop.grow.partial() | shop.near.partial()


def make_undone(shop: MortalShop) -> Workflow[Any]:
    """Fail, tell of it, and undo what has been done."""
    return shop.far.s(1) >> shop.far.s(2) >> shop.fail.options(on_failure=shop.tell).s(3)


WORKFLOWS: dict[str, tuple[Callable[[MortalShop], Workflow[Any]], Any, int]] = {
    "chain": (make_chain, 10, 4),
    "join": (make_join, 20, 6),
    "dynamic": (make_dynamic, 8, 6),
    "undone": (make_undone, "ValueError", 2),
}
"""What makes a workflow, what it comes to, and how many jobs are done then."""


async def come_to(run: WorkflowRun[Any]) -> Any:
    """Return the result of a run, or the type of the error with which it has failed."""
    try:
        return await run.aget(timeout=60)
    except WorkflowFailed as error:
        return error.type


@asynccontextmanager
async def mortal_worker(
    shop: MortalShop, url: str, folder: Path, at: int, moment: str = ""
) -> AsyncGenerator[Process]:
    """Run a worker in its own process, which kills itself at a call."""
    out = folder / f"out-{at}"
    words = (shop.app.name, url, str(folder / "notes"), str(at), moment)
    command = [sys.executable, "-m", "tests.redis.workflows.mortal", *words]
    with out.open("wb") as log:
        process = start_process(command, cwd=Path.cwd(), env=environment(), stdout=log, stderr=log)
    try:
        await until(lambda: b"worker:started" in out.read_bytes() or process.poll() is not None)
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(process.wait)


async def let_die(
    shop: MortalShop, folder: Path, url: str, what: str, at: int, moment: str, died: list[int]
) -> str:
    """Have a worker die at a call while it runs a workflow. Returns what is wrong then; "" for nothing."""
    make, wanted, done = WORKFLOWS[what]
    async with mortal_worker(shop, url, folder, at, moment) as victim:
        run = await make(shop).astart(on_failure=shop.tell if what == "undone" else None)
        with trio.move_on_after(1.0):
            await until(lambda: victim.poll() is not None)
        if victim.poll() is not None:
            died.append(at)
        async with mortal_worker(shop, url, folder, 0):
            found = await come_to(run)
            status = await run.astatus()
            left = await wait_until_idle(shop.app)
    ran = shop.count_runs()
    undone, told = ({job for job in ran if job.startswith(task)} for task in ("undo ", "tell "))
    state = RunState.FAILED if wanted == "ValueError" else RunState.SUCCESS
    is_right = (
        found == wanted
        and not left
        and (status.state, status.done, status.active) == (state, done, 0)
        and len(undone) == len(told) == (2 if what == "undone" else 0)
        and max(ran.values()) <= 2
    )
    return "" if is_right else f"{what}, dead {moment} call {at}: {found!r} {left} {status} {ran}"


async def wait_until_idle(app: App) -> dict[str, int]:
    """Wait until nothing is left to hand over; return what is left all the same."""
    driver = await app.connections.get_async_driver()
    deadline = trio.current_time() + 20
    while True:
        left: dict[str, int] = {}
        for queue in QUEUES:
            keys = app.queue(queue)
            words = (("LLEN", keys.run_records), ("XLEN", keys.run_outbox), ("ZCARD", keys.live_runs))
            counts = await driver.perform_all([Call(word, int, repeatable=True) for word in words])
            left |= {key: count for (_, key), count in zip(words, counts, strict=True) if count}
        if not left or trio.current_time() > deadline:
            return left
        await trio.sleep(0.02)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("what", WORKFLOWS)
async def test_wherever_a_worker_dies_its_runs_come_to_their_end(
    url: str, app_name: str, redis_client: "redis.Redis", what: str
) -> None:
    wrong: list[str] = []
    died: list[int] = []
    limiter = trio.CapacityLimiter(4)

    async def check(at: int, moment: str) -> None:
        async with limiter:
            with tempfile.TemporaryDirectory(prefix="m-", dir="/tmp") as folder:
                shop = MortalShop(f"{app_name}-{at}-{moment}", url, Path(folder) / "notes")
                if found := await let_die(shop, Path(folder), url, what, at, moment, died):
                    wrong.append(found)
                shop.app.close()

    async with trio.open_nursery() as nursery:
        for number, at in enumerate(range(1, CALLS, STEP)):
            for moment in MOMENTS if STEP == 1 else (MOMENTS[number % 3],):
                nursery.start_soon(check, at, moment)
    assert not wrong, f"{len(wrong)} are wrong; the first:\n" + "\n".join(wrong[:10])
    assert len(died) > (3 if NIGHTLY else 2)
