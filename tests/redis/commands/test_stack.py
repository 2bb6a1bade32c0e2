"""Stacks: where the code of running jobs stands, as their worker answers."""

import asyncio
import threading
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
import trio
import trio.testing

from celery5 import App
from celery5.observability import IncomingJob, Middleware
from celery5.runners.stacks import MAX_SIZE
from tests.redis.worker.workers import until_async, working

FUNCTIONS = {"trio": "wait_for_bank", "thread": "wait_for_disk", "asyncio": "wait_for_letter"}
"""The function in which the job of each kind waits."""


class Shop:
    """Jobs that wait until they are released, one of each kind."""

    def __init__(self, app: App) -> None:
        self.app = app
        self.released = threading.Event()
        self.ids: dict[str, str] = {}

    async def start(self, *, soft_time_limit: float | None = None) -> None:
        """Send the jobs, and wait until each waits in its function."""
        released = self.released

        async def wait_for_bank(secret: str) -> None:
            await trio.to_thread.run_sync(released.wait)

        def wait_for_disk(secret: str) -> None:
            released.wait()

        async def wait_for_letter(secret: str) -> None:
            await asyncio.to_thread(released.wait)

        @self.app.task(name="pay", soft_time_limit=soft_time_limit)
        async def pay(secret: str) -> None:
            await wait_for_bank(secret)

        @self.app.task(name="store", soft_time_limit=soft_time_limit)
        def store(secret: str) -> None:
            wait_for_disk(secret)

        @self.app.task(name="mail", loop="asyncio", soft_time_limit=soft_time_limit)
        async def mail(secret: str) -> None:
            await wait_for_letter(secret)

        for kind, task in (("trio", pay), ("thread", store), ("asyncio", mail)):
            self.ids[kind] = (await task.adelay("hush-1234")).id

    async def ask(self, job: str | None = None) -> Any:
        """The stacks that the worker answers."""
        (reply,) = await self.app.control.astack(job, to="w1")
        assert reply.ok, reply
        return reply.answer["stacks"]

    async def until_all_wait(self) -> None:
        """Wait until each job is in its function."""

        async def do_wait() -> bool:
            stacks = await self.ask()
            return all(name in find_functions(stacks) for name in FUNCTIONS.values())

        await until_async(do_wait)


def find_functions(stacks: list[Any]) -> list[str]:
    """The names of the functions of stacks."""
    lines = [line for stack in stacks for line in stack["lines"]]
    return [line.rpartition(", in ")[2] for line in lines if line.startswith('File "')]


@asynccontextmanager
async def shop_at_work(app: App, **options: Any) -> AsyncGenerator[Shop, None]:
    """A worker whose jobs of each kind wait; they are released with the block."""
    shop = Shop(app)
    async with working(app, name="w1"):
        try:
            await shop.start(**options)
            await shop.until_all_wait()
            yield shop
        finally:
            shop.released.set()


@pytest.mark.parametrize("soft_time_limit", [None, 60.0])
async def test_each_job_is_shown_in_its_own_function_and_in_no_other(
    app: App, soft_time_limit: float | None
) -> None:
    async with shop_at_work(app, soft_time_limit=soft_time_limit) as shop:
        for kind, function in FUNCTIONS.items():
            (stack,) = await shop.ask(shop.ids[kind])
            assert (stack["job"], stack["kind"]) == (shop.ids[kind], kind)
            functions = find_functions([stack])
            assert functions[0] == stack["task"], "it begins with the function of the task"
            assert functions[1] == function
            assert not set(FUNCTIONS.values()) - {function} & set(functions)
            assert any("released.wait" in line for line in stack["lines"]), "the source is shown"
        stacks = await shop.ask()
        assert {stack["job"] for stack in stacks} == {*shop.ids.values(), ""}
        assert "hush-1234" not in msgspec.json.encode(stacks).decode()
        assert [stack["kind"] for stack in stacks if not stack["job"]] == ["worker"]


async def test_a_job_that_does_not_run_is_answered_in_one_line(app: App) -> None:
    async with working(app, name="w1"):
        (reply,) = await app.control.astack("none", to="w1")
        assert (reply.ok, reply.reason) == (False, "refused")
        assert reply.why == "job 'none' does not run on this worker now"
        (reply,) = await app.control.astack(to="w1")
        assert [stack["kind"] for stack in reply.answer["stacks"]] == ["worker"]


async def test_the_trio_tasks_of_a_job_are_shown_those_that_are_alike_once(app: App) -> None:
    gate, started = trio.Event(), trio.Event()

    async def fetch_page() -> None:
        await gate.wait()

    @app.task(name="crawl")
    async def crawl() -> None:
        async with trio.open_nursery() as nursery:
            for _ in range(30):
                nursery.start_soon(fetch_page)
            await trio.testing.wait_all_tasks_blocked()
            started.set()

    async with working(app, name="w1"):
        handle = await crawl.adelay()
        with trio.fail_after(30):
            await started.wait()
        (reply,) = await app.control.astack(handle.id, to="w1")
        gate.set()
        await handle.aget(timeout=30)
    own, child = reply.answer["stacks"]
    assert find_functions([own])[0] == "crawl"
    assert child["child"].endswith("fetch_page")
    assert child["note"] == "30 tasks stand here"
    assert "fetch_page" in find_functions([child])


async def test_an_asyncio_job_that_blocks_its_loop_is_shown_where_it_does(app: App) -> None:
    released, started = threading.Event(), threading.Event()

    def block_the_loop() -> None:
        started.set()
        released.wait()

    @app.task(name="freeze", loop="asyncio")
    async def freeze() -> None:
        block_the_loop()

    async with working(app, name="w1"):
        try:
            handle = await freeze.adelay()
            assert await trio.to_thread.run_sync(started.wait, 30)
            (reply,) = await app.control.astack(handle.id, to="w1")
        finally:
            released.set()
        await handle.aget(timeout=30)
    (stack,) = reply.answer["stacks"]
    assert find_functions([stack])[:2] == ["freeze", "block_the_loop"]


async def test_a_job_inside_of_middleware_is_shown_from_its_own_function_on(app: App) -> None:
    gate, entering, running = trio.Event(), trio.Event(), trio.Event()

    class Slow(Middleware):
        @asynccontextmanager
        async def running(self, job: IncomingJob) -> AsyncGenerator[None, None]:
            entering.set()
            await gate.wait()
            yield

    @app.task(name="pay")
    async def pay() -> None:
        running.set()
        await trio.sleep_forever()

    app.add_middleware(Slow())
    async with working(app, name="w1"):
        handle = await pay.adelay()
        with trio.fail_after(30):
            await entering.wait()
            (before,) = await app.control.astack(handle.id, to="w1")
            gate.set()
            await running.wait()
        (reply,) = await app.control.astack(handle.id, to="w1")
        await app.control.asend("revoke", {"id": handle.id}, to="w1")
    assert "running" in find_functions(before.answer["stacks"])
    assert "pay" not in find_functions(before.answer["stacks"])
    assert find_functions(reply.answer["stacks"])[0] == "pay"


async def test_an_answer_stays_within_its_bound_and_keeps_the_innermost_functions(app: App) -> None:
    gate, started = trio.Event(), 0

    async def tick(left: int) -> None:
        if left:
            await tock(left - 1)
        else:
            await wait_at_the_end()

    async def tock(left: int) -> None:
        await tick(left)

    async def wait_at_the_end() -> None:
        nonlocal started
        started += 1
        await gate.wait()

    @app.task(name="recurse")
    async def recurse() -> None:
        await tick(150)

    async with working(app, name="w1"):
        handles = [await recurse.adelay() for _ in range(20)]
        with trio.fail_after(30):
            while started < 20:
                await trio.testing.wait_all_tasks_blocked(0.01)
        (reply,) = await app.control.astack(to="w1")
        gate.set()
        for handle in handles:
            await handle.aget(timeout=30)
    stacks = reply.answer["stacks"]
    assert MAX_SIZE / 4 < len(msgspec.json.encode(reply.answer)) <= MAX_SIZE
    assert len([stack for stack in stacks if stack["job"]]) == 20
    for stack in stacks:
        if stack["job"]:
            assert "wait_at_the_end" in find_functions([stack])
            assert "lines of the stack are left out" in stack["note"]
