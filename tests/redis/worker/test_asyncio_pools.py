"""Real pools of asyncio's libraries: opened once in each worker, on the loop of its tasks, and closed there."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Annotated, Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from celery5 import App, BootStep
from celery5.tasks import INJECTED, Resource
from tests.postgres import find_missing, running_postgres
from tests.redis.worker.workers import working

aiohttp: Any = pytest.importorskip("aiohttp", reason="aiohttp is in the group test of pyproject.toml")
asyncpg: Any = pytest.importorskip("asyncpg", reason="asyncpg is in the group test of pyproject.toml")
JOBS = 20


@contextmanager
def serving_http() -> Iterator[tuple[str, list[object]]]:
    """Run a server that keeps connections; yield its address, and a list with an item for each connection."""
    connections: list[object] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def setup(self) -> None:
            connections.append(self.client_address)
            super().setup()

        def do_GET(self) -> None:
            body = f"page {self.path}".encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_arguments: object) -> None:
            """Log nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, args=[0.01])
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", connections
        finally:
            server.shutdown()
            thread.join()


async def read(session: Any, address: str) -> str:
    """Return what is at an address."""
    async with session.get(address) as response:
        return str(await response.text())


async def test_sessions_of_aiohttp_are_opened_once_on_the_loop_of_their_tasks(
    url: str, app_name: str
) -> None:
    notes: list[tuple[str, asyncio.AbstractEventLoop]] = []
    sessions: list[Any] = []

    async def open_session() -> AsyncIterator[Any]:
        notes.append(("opened", asyncio.get_running_loop()))
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=2)) as session:
            yield session
        notes.append(("closed", asyncio.get_running_loop()))

    async def open_in_step() -> Any:
        notes.append(("step opened", asyncio.get_running_loop()))
        sessions.append(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=2)))
        return sessions[0]

    async def close_in_step(session: Any) -> None:
        notes.append(("step closed", asyncio.get_running_loop()))
        await session.close()

    step = BootStep("session", open_in_step, undo=close_in_step)
    app = App(app_name, broker=url, loop="asyncio", bootsteps=[step])
    resource = Resource(open_session)

    @app.task
    async def by_resource(address: str, session: Annotated[Any, resource] = INJECTED) -> str:
        notes.append(("ran", asyncio.get_running_loop()))
        return await read(session, address)

    @app.task
    async def by_step(address: str) -> str:
        return await read(sessions[0], address)

    with serving_http() as (address, connections):
        async with working(app):
            for task in (by_resource, by_step):
                results = [await task.adelay(f"{address}/{n}") for n in range(JOBS)]
                assert [await result.aget() for result in results] == [f"page /{n}" for n in range(JOBS)]
    assert 2 <= len(connections) <= 4
    names = [name for name, _ in notes]
    assert sorted(name for name in names if name != "ran") == [
        "closed",
        "opened",
        "step closed",
        "step opened",
    ]
    assert len({loop for _, loop in notes}) == 1
    app.close()


async def test_an_engine_of_sqlalchemy_is_opened_once_on_the_loop_of_its_tasks(
    url: str, app_name: str, tmp_path: Path
) -> None:
    notes: list[str] = []

    async def open_engine() -> AsyncIterator[AsyncEngine]:
        notes.append("opened")
        engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path / 'rows'}", pool_size=2, max_overflow=0)
        async with engine.begin() as connection:
            await connection.execute(text("create table rows (n integer primary key)"))
        yield engine
        await engine.dispose()
        notes.append("closed")

    app = App(app_name, broker=url, loop="asyncio", concurrency=5)
    Engine = Annotated[AsyncEngine, Resource(open_engine)]

    @app.task
    async def add_row(n: int, engine: Engine = INJECTED) -> None:
        async with engine.begin() as connection:
            await connection.execute(text("insert into rows values (:n)"), {"n": n})

    @app.task
    async def count_rows(engine: Engine = INJECTED) -> int:
        async with engine.connect() as connection:
            return int((await connection.execute(text("select count(*) from rows"))).scalar_one())

    async with working(app):
        results = [await add_row.adelay(n) for n in range(JOBS)]
        for result in results:
            await result.aget()
        assert await (await count_rows.adelay()).aget() == JOBS
    assert notes == ["opened", "closed"]
    app.close()


@pytest.mark.skipif(find_missing() != "", reason=find_missing())
async def test_a_pool_of_asyncpg_is_opened_once_on_the_loop_of_its_tasks(url: str, app_name: str) -> None:
    notes: list[str] = []
    app = App(app_name, broker=url, loop="asyncio")

    with running_postgres() as folder:

        async def open_pool() -> AsyncIterator[Any]:
            notes.append("opened")
            async with asyncpg.create_pool(host=folder, user="postgres", min_size=1, max_size=2) as pool:
                yield pool
            notes.append("closed")

        @app.task
        async def double(n: int, pool: Annotated[Any, Resource(open_pool)] = INJECTED) -> tuple[int, int]:
            rows = await pool.fetchrow("select $1::int * 2, pg_backend_pid()", n)
            return tuple(rows)

        async with working(app):
            results = [await double.adelay(n) for n in range(JOBS)]
            rows = [await result.aget() for result in results]
    assert [number for number, _ in rows] == [2 * n for n in range(JOBS)]
    assert len({process for _, process in rows}) <= 2
    assert notes == ["opened", "closed"]
    app.close()
