"""Own server: one that dies is started again with a backoff, is asked only if it may hang, and is there until the
end."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import trio
from trio.testing import MockClock

from celery5.logs.log import Log
from celery5.processes.own_broker import resolve_paths, supervised_server
from celery5.protocol.cluster.own_broker import OwnBroker
from celery5.services.controller.broker_supervisor import BrokerSupervisor


class Server:
    """A server that says nothing, and lives as long as it is told to."""

    pid = 7

    def __init__(self, *, dies: bool = False) -> None:
        self.is_running = True
        self.begun = self.killed = 0
        self._dies = dies

    def start(self, _given_up: Callable[[], bool], /) -> bool:
        self.begun += 1
        self.is_running = not self._dies
        return False

    def is_responding(self) -> bool:
        return False

    def kill(self) -> None:
        self.killed += 1


@pytest.fixture(autouse=True)
def no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Virtual time goes on while a thread works, so there is none. Chance takes the longest wait."""

    async def here(work: Callable[..., Any], *args: Any, **_options: Any) -> Any:
        await trio.lowlevel.checkpoint()
        return work(*args)

    monkeypatch.setattr(trio.to_thread, "run_sync", here)
    monkeypatch.setattr(random, "random", lambda: 0.999)


async def looked_at(server: Server, *, hung_after: float, seconds: float) -> None:
    """Look after it for so long."""
    service = BrokerSupervisor(server=server, hung_after=hung_after, log=Log(worker="c", app="shop"))
    with trio.move_on_after(seconds):
        await service.run()


async def test_member_that_keeps_dying_is_started_less_and_less_often(
    autojump_clock: MockClock,
) -> None:
    server = Server(dies=True)
    server.is_running = False
    await looked_at(server, hung_after=0, seconds=60)
    assert 5 <= server.begun <= 15


async def test_silent_member_is_killed_only_where_wanted(
    autojump_clock: MockClock,
) -> None:
    server = Server()
    await looked_at(server, hung_after=0, seconds=1000)
    assert server.killed == 0
    await looked_at(server, hung_after=30, seconds=100)
    assert 2 <= server.killed <= 3


async def test_it_is_looked_after_while_what_needs_it_ends(autojump_clock: MockClock) -> None:
    server = Server()
    with trio.CancelScope() as scope:
        async with supervised_server(cast("Any", server), 0, Log(worker="c", app="shop")):
            try:
                scope.cancel()
                await trio.sleep_forever()
            finally:
                with trio.CancelScope(shield=True):
                    server.is_running = False
                    await trio.sleep(10)
                    assert server.begun == 1
    assert server.is_running


def test_what_is_relative_is_so_to_the_folder_of_the_description() -> None:
    told = resolve_paths(OwnBroker(folder="data", socket="../run/redis.sock"), Path("/etc/shop"))
    assert (told.folder, told.socket) == ("/etc/shop/data", "/etc/run/redis.sock")
    assert resolve_paths(OwnBroker(folder="/var/data"), Path("/etc/shop")).socket == ""
