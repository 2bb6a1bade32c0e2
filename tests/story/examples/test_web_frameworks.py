"""Web frameworks: the applications of the guide under real servers, which stream, fork, and lose their Redis."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis

from celery5 import App, gather
from celery5.broker.servers.embedded import EmbeddedServer
from tests.redis.process.onlookers import clients, until
from tests.story.examples.test_docs import DOCS, blocks

LIMIT = 30.0
"""Seconds within which a request is answered, and a server starts or ends."""


@contextmanager
def running(folder: Path, url: str, *words: str) -> Iterator["subprocess.Popen[bytes]"]:
    """Run a module of Python in that folder while the block lasts; its output is in `server.log`."""
    env = {**os.environ, "CELERY5_BROKER": url, "PYTHONDEVMODE": "1", "PYTHONPATH": str(folder)}
    with (folder / "server.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", *words],
            cwd=folder,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    try:
        yield process
        process.terminate()
        process.wait(LIMIT)
    finally:
        process.kill()
        process.wait()


def write_page(name: str, folder: Path) -> None:
    """Write the files that a page of the guide shows."""
    for block in blocks(DOCS / "guide" / f"{name}.md"):
        if block.title:
            (folder / block.title).write_text(block.text)


def find_port() -> int:
    """Return a port that is free."""
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port: int = taken.getsockname()[1]
        return port


@contextmanager
def connected(port: int) -> Iterator[httpx.Client]:
    """A client of the server at that port, once it answers."""
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=LIMIT) as client:

        def answers() -> bool:
            with suppress(httpx.TransportError):
                return client.get("/no/such/page").status_code == 404
            return False

        until(answers)
        yield client


SITES = {
    "fastapi": ("fastapi", "uvicorn", "api:api"),
    "starlette": ("fastapi", "uvicorn", "starlette_api:api"),
    "litestar": ("fastapi", "uvicorn", "litestar_api:api"),
    "flask": ("flask", "gunicorn", "web:web"),
}
"""For each framework the page of the guide, the server, and the application there."""
GUNICORN = ("--threads", "4", "--no-control-socket", "--graceful-timeout", "3")


@contextmanager
def serving(folder: Path, url: str, server: str, application: str) -> Iterator[httpx.Client]:
    """Run an application on a free port while the block lasts; yield a client of it."""
    port = find_port()
    words: dict[str, tuple[str, ...]] = {
        "uvicorn": ("--port", str(port)),
        "gunicorn": (*GUNICORN, "--bind", f"127.0.0.1:{port}"),
    }
    with running(folder, url, server, *words[server], application), connected(port) as client:
        yield client


@pytest.fixture(params=SITES)
def site(
    request: pytest.FixtureRequest, own_server: EmbeddedServer, tmp_path: Path
) -> Iterator[tuple[httpx.Client, Path]]:
    """A client of the guide's application in each framework, and its folder."""
    page, server, application = SITES[request.param]
    write_page(page, tmp_path)
    with serving(tmp_path, own_server.url, server, application) as client:
        yield client, tmp_path


def read_events(lines: Iterator[str]) -> Iterator[str]:
    """Yield the states that the events name, as they come."""
    for line in lines:
        if line.startswith("data: "):
            yield line.partition('"state": "')[2].partition('"')[0]


def test_events_reach_the_browser_while_the_job_waits_and_runs(
    site: tuple[httpx.Client, Path], own_server: EmbeddedServer
) -> None:
    client, folder = site
    job = client.post("/reports").json()["job"]
    with client.stream("GET", f"/reports/{job}/events") as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        states = read_events(response.iter_lines())
        assert next(states) == "SENT"  # there is no worker yet
        with running(folder, own_server.url, "celery5", "-A", "shop", "worker", "start"):
            assert list(states)[-1] == "SUCCESS"
    assert client.get("/reports/nobody/events").status_code == 404


def test_views_answer_soon_while_redis_is_down(
    site: tuple[httpx.Client, Path], own_server: EmbeddedServer
) -> None:
    client, folder = site
    job = client.post("/reports").json()["job"]
    own_server.kill()
    began = time.monotonic()
    for path in ("/orders/7", "/reports"):
        assert client.post(path).status_code == 202  # it is in the backlog
    assert client.get(f"/reports/{job}/events").status_code == 503
    assert time.monotonic() - began < 10
    own_server.revive()

    def works_again() -> bool:
        with client.stream("GET", f"/reports/{job}/events") as response:
            return response.status_code == 200

    until(works_again)
    assert "ResourceWarning" not in (folder / "server.log").read_text()


THREADS = """
from threading import Thread

from shop import charge
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.concurrency import run_in_threadpool
from starlette.responses import JSONResponse
from starlette.routing import Route


def send(name):
    charge.options(id=name).delay(7)


async def ask(request):
    way = request.path_params["way"]
    if way == "pool":
        await run_in_threadpool(send, way)
    elif way == "thread":
        Thread(target=send, args=[way]).start()
    return JSONResponse({}, background=BackgroundTask(send, way) if way == "background" else None)


def ask_in_thread(request):
    send("view")
    return JSONResponse({})


api = Starlette(routes=[Route("/view", ask_in_thread), Route("/{way}", ask)])
"""


def test_jobs_are_sent_from_every_thread_of_a_web_application(
    own_server: EmbeddedServer, tmp_path: Path
) -> None:
    write_page("fastapi", tmp_path)
    (tmp_path / "threads.py").write_text(THREADS)
    app = App("shop", broker=own_server.url)
    ways = ["background", "pool", "thread", "view"]
    with (
        serving(tmp_path, own_server.url, "uvicorn", "threads:api") as client,
        running(tmp_path, own_server.url, "celery5", "-A", "shop", "worker", "start"),
    ):
        assert [client.get(f"/{way}").status_code for way in ways] == [200] * len(ways)
        results = gather([app.result(way) for way in ways], timeout=LIMIT)
    assert list(map(str, results)) == ["order 7 is paid"] * len(ways)
    assert "Traceback" not in (tmp_path / "server.log").read_text()
    app.close()


FORKED = """
import os
from shop import charge
from web import web

charge.delay(0)  # before the fork

@web.get("/process")
def show_process():
    return str(os.getpid())
"""


def test_processes_that_gunicorn_forks_share_no_connection(
    own_server: EmbeddedServer, tmp_path: Path
) -> None:
    write_page("flask", tmp_path)
    (tmp_path / "forked.py").write_text(FORKED)
    port = find_port()
    words: list[Any] = ["--preload", "--workers", "2", "--threads", "4", "--no-control-socket"]
    gunicorn = ["gunicorn", *words, "--bind", f"127.0.0.1:{port}", "forked:web"]
    app = App("shop", broker=own_server.url)
    with (
        running(tmp_path, own_server.url, *gunicorn),
        connected(port) as client,
        redis.Redis.from_url(own_server.url) as look,
        ThreadPoolExecutor(8) as pool,
    ):
        processes = set[str]()

        def send(order: int) -> str:
            with httpx.Client(base_url=client.base_url, timeout=LIMIT) as own:
                processes.add(own.get("/process").text)
                job: str = own.post(f"/orders/{order}").json()["job"]
                return job

        jobs: list[str] = []

        def both_have_sent() -> bool:
            jobs.extend(pool.map(send, range(40)))
            return len(processes) == 2

        until(both_have_sent)
        senders = [found for found in clients(look) if found["cmd"] in ("evalsha", "eval")]
        assert len(senders) >= 3  # the one from before the fork, and each process its own
        with running(tmp_path, own_server.url, "celery5", "-A", "shop", "worker", "start"):
            results = gather([app.result(job) for job in jobs], timeout=LIMIT)
    assert list(map(str, results)) == [f"order {number % 40} is paid" for number in range(len(jobs))]
    app.close()
