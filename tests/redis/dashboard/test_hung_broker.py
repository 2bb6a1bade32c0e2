"""The dashboard while Redis hangs: it accepts connections, and answers nothing."""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

import httpx
import pytest
import trio

from celery5 import App
from celery5.broker.servers.embedded import EmbeddedServer
from tests.redis.dashboard.site import browsing, press, read_text

SOON = 5.0
"""Seconds within which a page must answer here, on a machine that has other work; it takes about 2."""
PAGES = ("/queues", "/workers", "/dead", "/alerts", "/tasks", "/health")
NO_ANSWER = "gave no answer within 2 s"


@contextmanager
def hanging(server: EmbeddedServer) -> Generator[None, None, None]:
    """Have a server hang during the block."""
    os.kill(server.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(server.pid, signal.SIGCONT)


async def ask(client: httpx.AsyncClient, path: str) -> tuple[int, str]:
    """Return the status of a page, and its text; it must answer soon."""
    began = time.monotonic()
    answer = await client.get(path)
    assert time.monotonic() - began < SOON, path
    return answer.status_code, read_text(answer.text)


async def look_during_an_outage(app: App, server: EmbeddedServer) -> None:
    """Look at pages before, during and after an outage of their broker."""
    async with browsing(app) as client:
        assert (await ask(client, f"/{app.name}"))[0] == 200
        with hanging(server):
            for page in PAGES:
                status, text = await ask(client, f"/{app.name}{page}")
                assert NO_ANSWER in text, (page, text)
                assert status == 503 or "cannot be shown" in text, page
        await until_shown(client, f"/{app.name}/queues")


async def until_shown(client: httpx.AsyncClient, path: str) -> None:
    """Wait until a page is there again."""
    deadline = time.monotonic() + 30
    while (await client.get(path)).status_code != 200:
        assert time.monotonic() < deadline


@pytest.mark.parametrize(
    "run", [trio.run, lambda run, *args: asyncio.run(run(*args))], ids=["trio", "asyncio"]
)
def test_pages_say_within_seconds_that_redis_gives_no_answer(
    own_server: EmbeddedServer, app_name: str, run: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("READ_ONCE", "SHARED_FACTOR"):  # what was just read is shown for a moment
        monkeypatch.setattr(f"celery5.dashboard.performing.{name}", 0.0)
    app = App(app_name, broker=own_server.url)
    run(look_during_an_outage, app, own_server)
    app.close()


async def test_all_who_wait_for_the_same_look_are_told_at_the_same_time(
    own_server: EmbeddedServer, app_name: str
) -> None:
    app = App(app_name, broker=own_server.url)
    async with browsing(app) as client:
        assert (await ask(client, f"/{app.name}/queues"))[0] == 200
        with hanging(own_server):
            async with trio.open_nursery() as nursery:
                for _ in range(3):
                    nursery.start_soon(ask, client, f"/{app.name}/queues")
    app.close()


async def test_a_change_is_not_begun_while_redis_hangs(own_server: EmbeddedServer, app_name: str) -> None:
    app = App(app_name, broker=own_server.url)
    async with browsing(app) as client:
        assert (await ask(client, f"/{app.name}/queues"))[0] == 200
        with hanging(own_server):
            began = time.monotonic()
            answer = await press(client, app, "queue:pause", {"queue": "money"})
            assert time.monotonic() - began < SOON
            assert answer.status_code == 503
            assert NO_ANSWER in read_text(answer.text)
        await until_shown(client, f"/{app.name}/queues")
        assert not any(queue.paused for queue in (await app.ainfo()).queues.values())
    app.close()
