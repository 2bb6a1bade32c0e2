"""Two Controllers: one acts; the other takes over when it is killed or frozen, and nothing is lost under load."""

import json
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import pytest

from celery5 import App, AsyncResult
from celery5.broker.servers.embedded import EmbeddedServer
from celery5.examples.cluster import kiosk as example
from celery5.protocol.cluster.leadership import EPOCH_VARIABLE
from tests.story.cluster.controlling import LIMIT, Controlling, until

pytestmark = pytest.mark.timeout(400)
TARGET = "celery5.examples.cluster.kiosk"
CLUSTER = "[workers.default]\ncount = 1\n"


class Pair:
    """Two Controllers of one cluster, and its application here."""

    def __init__(self, url: str, folder: Path, stack: ExitStack) -> None:
        self.app: App = example.app
        self.app.use_broker(url)
        env = {"CELERY5_BROKER": url, "CELERY5_GRACE_PERIOD": "2"}
        self.all: dict[str, Controlling] = {}
        for name in ("one", "two"):
            (folder / name).mkdir()
            one = Controlling(folder / name, CLUSTER, "--name", name, target=TARGET, env=env)
            self.all[name] = stack.enter_context(one.up())

    def leader(self) -> str:
        """Who leads, by what all say, and by who has members that are up; '' while they do not agree."""
        told: list[dict[str, Any]] = json.loads(self.all["one"].tell("status", "--json").out or "[]")
        leading = [line["controller"] for line in told if line.get("leads") and line["whole"]]
        return leading[0].split(":")[0] if len(leading) == 1 else ""

    def led_by(self, name: str) -> None:
        """Wait until this one leads, and has its members up."""
        until(
            lambda: (
                len(self.all[name].logged("leadership:acquired"))
                > len(self.all[name].logged("leadership:lost"))
            )
        )
        until(lambda: bool(self.all[name].pids()))
        until(lambda: bool(self.all[name].of("worker-default-1", "started")))


@pytest.fixture
def pair(own_server: EmbeddedServer, tmp_path: Path) -> Iterator[Pair]:
    """Two of them, of which `one` leads."""
    with ExitStack() as stack:
        both = Pair(own_server.url, tmp_path, stack)
        yield both
        for process in both.all.values():
            if process.process.poll() is None:
                process.signal(signal.SIGCONT)
    both.app.close()


class Load:
    """Jobs, all the time, while the block lasts."""

    def __init__(self, app: App) -> None:
        self.app, self.over = app, threading.Event()
        self.results: list[AsyncResult[str]] = []
        self.thread = threading.Thread(target=self.send)

    def send(self) -> None:
        """Ten each tenth of a second."""
        while not self.over.is_set():
            self.results.extend(self.app.send_many([example.sell.s(str(n), 0.02) for n in range(10)]))
            time.sleep(0.1)

    def __enter__(self) -> Self:
        self.thread.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self.over.set()
        self.thread.join()

    def check(self) -> None:
        """All of them were done."""
        assert len(self.results) > 50
        assert {result.get(timeout=LIMIT) for result in self.results} == {f"sold {n}" for n in range(10)}


def test_when_the_leader_is_killed_the_other_one_takes_over_under_load(pair: Pair) -> None:
    one, two = pair.all["one"], pair.all["two"]
    pair.led_by("one")
    assert two.pids() == {}
    (stands_by,) = two.logged("leadership:changed")
    assert stands_by["role"] == "standby"
    assert pair.leader() == "one"
    assert "stands by: one:" in two.tell("status").out
    (first,) = one.pids().values()
    with Load(pair.app) as load:
        one.signal(signal.SIGKILL)
        pair.led_by("two")
    load.check()
    (led,) = two.logged("leadership:acquired")
    assert led["epoch"] > one.logged("leadership:acquired")[0]["epoch"]
    (pid,) = two.pids().values()
    assert pid != first
    assert two.environment_of(pid)[EPOCH_VARIABLE] == str(led["epoch"])


def test_a_frozen_leader_finds_out_ends_its_members_in_order_and_stands_by(pair: Pair) -> None:
    one, two = pair.all["one"], pair.all["two"]
    pair.led_by("one")
    with Load(pair.app) as load:
        one.signal(signal.SIGSTOP)
        pair.led_by("two")
        one.signal(signal.SIGCONT)
        until(lambda: one.logged("leadership:lost"))
        until(lambda: one.pids() == {})
    load.check()
    assert one.logged("member:killed") == []
    until(lambda: pair.leader() == "two")
    two.signal(signal.SIGTERM)  # and now the other way round, in order
    pair.led_by("one")
    assert two.ended().code == 0
