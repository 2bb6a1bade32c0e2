"""Redis refuses the login of running processes, as when a password changes: no process and no job ends."""

from pathlib import Path

import pytest
import redis
import trio

from celery5 import App
from celery5.broker.servers.embedded import EmbeddedServer
from celery5.processes.foreground import WORKER
from tests.faults.worker.test_new_incarnation import pages, shop
from tests.redis.worker.workers import Lines, start, until

PASSWORD = "changed"


class Login:
    """Sets and removes the password of a server, by a connection that stays logged in."""

    def __init__(self, server: EmbeddedServer) -> None:
        self._admin = redis.Redis.from_url(server.url)

    def refuse(self) -> None:
        """Require a password, and close all other connections."""
        self._admin.config_set("requirepass", PASSWORD)
        for kind in ("normal", "pubsub"):
            self._admin.execute_command("CLIENT", "KILL", "TYPE", kind, "SKIPME", "yes")  # type: ignore[no-untyped-call]

    def allow(self) -> None:
        """Require no password."""
        self._admin.config_set("requirepass", "")


@pytest.mark.parametrize("kind", ["worker", "router", "scheduler", "publisher", "controller"])
async def test_process_waits_while_its_login_is_refused(
    own_server: EmbeddedServer, app_name: str, short_path: Path, kind: str
) -> None:
    app, login = shop(app_name, own_server.url), Login(own_server)
    app.configure(publisher_socket=str(short_path / "publisher"))
    with Lines() as lines:
        async with trio.open_nursery() as nursery:
            process = await start(nursery, app, page=pages(short_path)[kind])
            connected = len(lines.of("redis:connected"))
            await trio.to_thread.run_sync(login.refuse)
            await until(
                lambda: any("wants a password" in line["reason"] for line in lines.of("redis:breaker-opened"))
            )
            await trio.to_thread.run_sync(login.allow)
            await until(lambda: len(lines.of("redis:connected")) >= 2 * connected)
            await process.stop()
            nursery.cancel_scope.cancel()
    assert not lines.of(f"{kind}:restarted")
    app.close()


async def test_job_that_runs_while_the_login_is_refused_is_settled_and_runs_once(
    own_server: EmbeddedServer, app_name: str
) -> None:
    app, login = App(app_name, broker=own_server.url, lease=5.0), Login(own_server)
    begun, go_on = list[int](), trio.Event()

    @app.task(max_retries=0)
    async def wait(n: int) -> int:
        begun.append(n)
        await go_on.wait()
        return n

    with Lines() as lines:
        async with trio.open_nursery() as nursery:
            process = await start(nursery, app, page=WORKER)
            result = await wait.adelay(7)
            await until(lambda: begun == [7])
            await trio.to_thread.run_sync(login.refuse)
            await until(lambda: bool(lines.of("heartbeat:missed")))
            go_on.set()
            await until(lambda: bool(lines.of("results:interrupted")))
            await trio.to_thread.run_sync(login.allow)
            assert await result.aget(timeout=30) == 7
            await process.stop()
            nursery.cancel_scope.cancel()
    assert begun == [7]
    app.close()


async def test_first_start_with_a_refused_login_ends_the_process(
    own_server: EmbeddedServer, app_name: str, short_path: Path
) -> None:
    app, login = shop(app_name, own_server.url), Login(own_server)
    await trio.to_thread.run_sync(login.refuse)
    with pytest.RaisesGroup(pytest.RaisesExc(Exception, match="wants a password"), flatten_subgroups=True):
        async with trio.open_nursery() as nursery:
            await start(nursery, app, page=WORKER)
    app.close()
