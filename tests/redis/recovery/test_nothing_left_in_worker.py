"""Nothing left: after jobs of every runner, a worker has the connections, descriptors and children of before."""

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import redis
import trio

from celery5 import RetryPolicy, TaskFailed
from tests.redis.boxes import boxing
from tests.redis.worker.workers import until, working

LIMIT = 60.0


def count_children() -> int:
    """Return how many children this process has, zombies among them."""
    tasks = Path("/proc/self/task").iterdir()
    return sum(len((task / "children").read_text().split()) for task in tasks)


@pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel as only Linux can be asked")
async def test_a_worker_keeps_nothing_of_jobs_that_end_or_kill_their_boxes(
    url: str, app_name: str, redis_client: "redis.Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BOXING_APP", app_name)
    app = boxing.make(
        app_name, url, lease=1.0, cpu_slots=2, box_slots=1, retry_policy=RetryPolicy(max_retries=0)
    )

    @app.task(name="on-trio")
    async def on_trio() -> None:
        await trio.lowlevel.checkpoint()

    @app.task(name="on-asyncio", loop="asyncio")
    async def on_asyncio() -> None:
        await asyncio.sleep(0)

    @app.task(name="in-thread")
    def in_thread() -> None:
        pass

    def count() -> tuple[int, int, int]:
        client: Any = redis_client
        return len(client.client_list()), len(os.listdir("/proc/self/fd")), count_children()

    async def run_round() -> None:
        for task in (on_trio, on_asyncio, in_thread):
            for sent in [await task.adelay() for _ in range(10)]:
                await sent.aget(LIMIT)
        with pytest.raises(TaskFailed, match="exited with code 3"):
            await (await app.tasks["act"].adelay("exit 3")).aget(LIMIT)
        assert await (await app.tasks["add"].adelay(1, 1)).aget(LIMIT) == 2

    async with working(app):
        await run_round()
        before = count()
        for _ in range(3):
            await run_round()
        await until(lambda: all(now <= then for now, then in zip(count(), before, strict=True)))
    app.close()
