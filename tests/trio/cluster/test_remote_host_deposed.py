"""Remote hosts, scripted: a Controller that leads no more does nothing there; a look that is too large is ignored."""

import re
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import pytest
import trio

from celery5.protocol.cluster.description import parse_cluster
from celery5.protocol.cluster.members import Beat, Ended, MemberEvent, Ready, Unknown
from celery5.protocol.cluster.remote_units import LINE_PREFIX, RemoteSetup, get_unit_name
from celery5.services.controller import remote_host
from celery5.services.controller.multi_host_platform import MultiHostPlatform
from celery5.services.controller.remote_host import RemoteHost
from celery5.services.controller.ssh_line import HostUnreachable
from tests.trio.cluster.test_foreman_service import House, Stage

CLUSTER = parse_cluster({"hosts": {"web2": {}}, "workers": {"default": {"count": 2, "hosts": ["web2"]}}})
ORDER = re.compile(r"^do_(stop|kill) .*worker", re.MULTILINE)


class OneHost:
    """A host whose members are up, to which the line may be cut."""

    def __init__(self, *names: str) -> None:
        self.there, self.cut = trio.Event(), trio.Event()
        self.there.set()
        self.said: list[str] = []
        self.scripts: list[str] = []
        self.shown = [
            f"{line}\n"
            for name in names
            for line in (f"Id={get_unit_name('shop', name)}", "ActiveState=active", "InvocationID=abc", "")
        ]

    @asynccontextmanager
    async def stream_lines(self, _script: bytes) -> AsyncGenerator[Any]:
        if not self.there.is_set():
            raise HostUnreachable("no route")
        self.cut = trio.Event()
        yield self
        raise HostUnreachable("no route")

    async def read_line(self) -> str | None:
        if self.cut.is_set():
            return None
        await trio.sleep(0.05)
        if not self.said:
            self.said = [*(line.strip() for line in self.shown), f"{LINE_PREFIX}seen"]
        return self.said.pop(0)

    async def run_script(self, script: bytes) -> list[str]:
        self.scripts.append(script.decode())
        return []


class Logged:
    """A log that keeps the names of its events."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def event(self, what: str, _level: str = "info", /, **_fields: object) -> None:
        self.events.append(what)


@pytest.mark.parametrize("knows", [True, False])
async def test_deposed_leader_does_not_act_on_a_host_that_returns(knows: bool, autojump_clock: Any) -> None:
    line: Any = OneHost("worker-default-1@web2", "worker-default-2@web2")
    place = RemoteSetup(app="shop", command="celery5", directory="/", hung_after=30.0)
    remote = RemoteHost(name="web2", setup=place, connection=line, interval=0.1)
    house = House(stage=MultiHostPlatform(local=Stage(), remote={"web2": remote}), cluster=CLUSTER)  # type: ignore[arg-type]
    async with trio.open_nursery() as nursery:
        await nursery.start(house.foreman.run)
        await house.foreman.all_ready.wait()
        line.there, gone = trio.Event(), line.cut
        gone.set()  # the host is away
        await trio.sleep(2)
        house.foreman.restart()
        await trio.sleep(2)
        house.lead.become(leads=not knows, sure=False)
        await trio.sleep(2)
        line.there.set()  # it is back, and another Controller looks after it
        await trio.sleep(60)
        nursery.cancel_scope.cancel()
    assert [found[0] for script in line.scripts for found in ORDER.finditer(script)] == []


async def test_connection_breaker_opens_after_three_failures(
    autojump_clock: Any,
) -> None:
    line: Any = OneHost("mail")
    line.there = trio.Event()
    log, attempts = Logged(), list[float]()
    connect = line.stream_lines

    def count(script: bytes) -> Any:
        attempts.append(trio.current_time())
        return connect(script)

    line.stream_lines = count
    place = RemoteSetup(app="shop", command="celery5", directory="/")
    remote = RemoteHost(name="web2", setup=place, connection=line, interval=0.1, log=log)  # type: ignore[arg-type]
    async with trio.open_nursery() as nursery:
        await nursery.start(remote.live, lambda _event: None)
        await trio.sleep(300)
        pauses = [after - before for before, after in pairwise(attempts)]
        assert max(pauses[:2]) < 10, "until it opens, attempts are soon repeated"
        assert 9.9 <= pauses[2] < 15
        assert all(29.9 <= pause < 65 for pause in pauses[4:])
        assert log.events.count("breaker:tripped") == len(attempts) - 2
        assert "breaker:closed" not in log.events
        line.there.set()
        await trio.sleep(70)
        assert log.events[-2:] == ["breaker:closed", "host:connected"]
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("limit", ["_MAX_REPORT_CHARACTERS", "_MAX_REPORT_LINES"])
async def test_a_look_that_is_too_large_ends_no_member_and_is_logged_once(
    limit: str, autojump_clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    line: Any = OneHost("mail")
    log, words = Logged(), list[MemberEvent]()
    place = RemoteSetup(app="shop", command="celery5", directory="/")
    remote = RemoteHost(name="web2", setup=place, connection=line, interval=0.1, log=log)  # type: ignore[arg-type]
    async with trio.open_nursery() as nursery:
        await nursery.start(remote.live, words.append)
        await remote.living()
        await trio.sleep(1)
        assert Ready("mail") in words or any(isinstance(word, Beat) for word in words)
        monkeypatch.setattr(
            remote_host, limit, {"_MAX_REPORT_CHARACTERS": 100, "_MAX_REPORT_LINES": 6}[limit]
        )
        line.shown = [*(f"Description={'x' * 30}" for _ in range(9)), "", *line.shown]
        await trio.sleep(5)
        assert not [word for word in words if isinstance(word, Ended)]
        assert isinstance(words[-1], Unknown)
        assert "too long" in words[-1].why
        assert log.events.count("host:status-ignored") == 1
        monkeypatch.undo()
        since = len(words)
        await trio.sleep(2)
        assert isinstance(words[-1], Beat)
        assert not [word for word in words[since:] if isinstance(word, Ended)]
        nursery.cancel_scope.cancel()
