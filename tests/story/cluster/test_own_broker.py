"""Own broker: a Controller runs the broker itself: it outlives its deaths with all it had, and ends last."""

import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from celery5 import App, AsyncResult
from celery5.errors import BrokerUnavailable
from tests.redis.commands.staff import is_alive
from tests.story.cli.commands import celery5
from tests.story.cluster.controlling import LIMIT, Controlling, until

pytestmark = pytest.mark.timeout(500)

BANK = """
import trio
from celery5 import App

app = App("bank", grace_period=20)

@app.task
async def pay(number: int, seconds: float = 0.05) -> int:
    await trio.sleep(seconds)
    return number

@app.task(queue="nobody")
async def wait() -> None:
    pass
"""
CLUSTER = """
[broker]
server = "{server}"
folder = "data"
{more}
[workers.default]
count = 2
queues = ["default"]
"""
MORE = 'fsync = "always"'


@pytest.fixture
def bank(short_path: Path, server_binary: str | None) -> Path:
    """A folder with an application that says nothing of its broker, and the description of its cluster."""
    (short_path / "bank.py").write_text(BANK)
    (short_path / "cluster.toml").write_text(CLUSTER.format(server=server_binary or "auto", more=MORE))
    return short_path


@contextmanager
def running(bank: Path) -> Iterator[tuple[Controlling, App]]:
    """Its Controller, which runs the broker, and the application here."""
    with Controlling(bank, (bank / "cluster.toml").read_text(), target="bank") as controller:
        url = bank / "data" / "url"
        until(lambda: url.exists() or controller.process.poll() is not None)
        controller.up()
        controller.surroundings["CELERY5_BROKER"] = url.read_text().strip()
        app = App("bank", broker=controller.surroundings["CELERY5_BROKER"])
        app.task(name="bank.pay")(pay)
        app.task(name="bank.wait", queue="nobody")(wait)
        try:
            yield controller, app
        finally:
            app.close()


async def pay(number: int, seconds: float = 0.05) -> int:
    """As in the application."""
    return number


async def wait() -> None:
    """As in the application."""


def server_of(bank: Path) -> int:
    """The server's process."""
    return int((bank / "data" / "server.lock").read_text())


def send(app: App, numbers: Iterable[int]) -> list[AsyncResult[int]]:
    """Send jobs, again if need be: what was not answered may be there or not."""
    jobs = [app.signature("bank.pay", number) for number in numbers]
    while True:
        try:
            return app.send_many(jobs)
        except BrokerUnavailable:
            time.sleep(0.1)


def kill(bank: Path, controller: Controlling, jobs: Sequence[object]) -> None:
    """Kill the server when more jobs have been sent, and wait until there is another one."""
    before, known, started = server_of(bank), len(jobs), len(controller.logged("broker:started"))
    until(lambda: len(jobs) > known + 50)
    os.kill(before, signal.SIGKILL)
    until(lambda: len(controller.logged("broker:started")) > started)
    assert server_of(bank) != before


def test_the_server_is_killed_under_load_again_and_again_and_nothing_is_lost(bank: Path) -> None:
    with running(bank) as (controller, app):
        jobs = list[AsyncResult[int]]()
        over = threading.Event()

        def load() -> None:
            while not over.wait(0.05):
                jobs.extend(send(app, range(len(jobs), len(jobs) + 10)))

        thread = threading.Thread(target=load)
        thread.start()
        try:
            for _ in range(3):
                kill(bank, controller, jobs)
        finally:
            over.set()
            thread.join()
        assert [job.get(timeout=LIMIT) for job in jobs] == list(range(len(jobs)))
        assert len(controller.logged("broker:ended")) == 3
        until(lambda: controller.tell("status").code == 0)


def test_it_is_up_first_and_ends_last_and_what_it_had_is_there_again(bank: Path) -> None:
    with running(bank) as (controller, app):
        (member,) = {pid for name, pid in controller.pids().items() if name == "worker-default-1"}
        assert (
            controller.environment_of(member)["CELERY5_BROKER"] == controller.surroundings["CELERY5_BROKER"]
        )
        app.send_many([app.signature("bank.wait") for _ in range(7)])
        (running_,) = send(app, [1])
        assert running_.get(timeout=LIMIT) == 1
        first = server_of(bank)
        assert controller.tell("stop").out == "stopped\n"
        assert controller.ended().code == 0
        assert not is_alive(first)
        assert controller.logged("member:killed") == []
    with running(bank) as (controller, app):
        assert server_of(bank) != first
        assert app.info().queues["nobody"].waiting == 7


def test_broker_survives_a_killed_controller_and_is_adopted(bank: Path) -> None:
    with running(bank) as (controller, app):
        server, members = server_of(bank), controller.pids()
        app.send_many([app.signature("bank.wait")])
        controller.process.kill()
        until(lambda: not any(map(is_alive, members.values())))
    assert is_alive(server)
    with running(bank) as (controller, app):
        assert server_of(bank) == server
        assert app.info().queues["nobody"].waiting == 1
        os.kill(server, signal.SIGKILL)  # it is no child of this one
        until(lambda: controller.logged("broker:started"))
        assert send(app, [2])[0].get(timeout=LIMIT) == 2
    assert not is_alive(server_of(bank))


def test_there_is_one_controller_with_a_broker_of_its_own(bank: Path) -> None:
    with running(bank) as (controller, _app):
        other = celery5("-A", "bank", "controller", "start", cwd=bank)
        assert other.code != 0
        assert f"another Controller (process {controller.process.pid}) runs the broker in" in other.error
        (bank / "cluster.toml").write_text((bank / "cluster.toml").read_text().replace("always", "no"))
        told = controller.tell("reload")
        assert "another [broker] needs a Controller that is started again" in told.err


@pytest.mark.parametrize(
    ("said", "wrong"),
    [
        ({"CELERY5_BROKER": "redis://elsewhere/0"}, "CELERY5_BROKER names another broker than [broker]"),
        ({"CELERY5_CONFIG": "redis"}, "Error: "),
    ],
)
def test_another_broker_is_told_of_in_one_line(bank: Path, said: dict[str, str], wrong: str) -> None:
    ended = celery5("-A", "bank", "controller", "start", cwd=bank, env=said)
    assert ended.code != 0
    assert wrong in ended.error


def test_a_server_that_hangs_is_killed_and_started_again(bank: Path) -> None:
    (bank / "cluster.toml").write_text("hung_after = 6\n" + (bank / "cluster.toml").read_text())
    with running(bank) as (controller, app):
        before = server_of(bank)
        os.kill(before, signal.SIGSTOP)
        until(lambda: controller.logged("broker:started"))
        assert len(controller.logged("broker:hung")) == 1
        assert server_of(bank) != before
        assert send(app, [3])[0].get(timeout=LIMIT) == 3


def test_who_stops_while_the_broker_reads_its_data_ends_in_order(bank: Path) -> None:
    slow = bank / "slow"  # as silent as a server that has much to read
    slow.write_text("#!/bin/sh\nexec sleep 1000\n")
    slow.chmod(0o755)
    with Controlling(bank, CLUSTER.format(server=slow, more=MORE), target="bank") as controller:
        said = bank / "data" / "server.lock"
        until(lambda: said.exists() and said.read_text().strip())
        controller.process.send_signal(signal.SIGTERM)
        assert controller.process.wait(LIMIT) == 0, controller.err
        assert not is_alive(server_of(bank))
