"""Beside Celery: its producers and its workers, and ours, all in processes of their own, which are killed."""

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from celery5.broker.servers.embedded import EmbeddedServer
from celery5.cli.terminal.loading import load_app
from tests.story.cli.commands import Serving, until

celery: Any = pytest.importorskip("celery", reason="needs Celery: uv pip install --group celery")
OLD = """
from celery import Celery

app = Celery("old", broker={url!r}, backend={url!r}, set_as_current=False)
app.conf.worker_hijack_root_logger = False


@app.task(name="warehouse.ship")
def ship(order):
    with open("shipped", "a") as file:
        file.write(f"{{ship.request.id}} {{order}}\\n")
"""
SHOP = """
import os
import signal

import old
from celery5 import App, current_job
from celery5.contrib.celery import CeleryBridge, CeleryResults, celery_task
from celery5.contrib.celery.receivers import _RedisReceiver


def die_once(where):
    try:
        open(f"died-{{where}}", "x").close()
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


class Shop(App):
    async def asend_jobs(self, jobs):
        await super().asend_jobs(jobs)
        die_once("published")


def dying(receive, acknowledge):
    def receive_and_die(self):
        received = receive(self)
        if received:
            die_once("received")
        return received

    def acknowledge_and_die(self, received):
        acknowledge(self, received[: len(received) // 2])
        die_once("acknowledging")
        acknowledge(self, received)

    return receive_and_die, acknowledge_and_die


_RedisReceiver.receive, _RedisReceiver.acknowledge = dying(_RedisReceiver.receive, _RedisReceiver.acknowledge)
app = Shop({name!r}, broker={broker!r})


@app.task(name="shop.charge", sinks=[CeleryResults(old.app)])
async def charge(order: int) -> int:
    with open("ran", "a") as file:
        file.write(f"{{current_job().id}}\\n")
    return order * 2


@celery_task(app, old.app, name="warehouse.ship", celery_queue="ship")
def ship(order: int) -> None: ...


CeleryBridge(app, old.app)
"""


@pytest.fixture
def folder(
    tmp_path: Path,
    app_name: str,
    server: EmbeddedServer,
    fresh_modules: None,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Path]:
    """A folder with an application of Celery's and one of ours, which dies at each step of its bridge, once."""
    path = server.url.removeprefix("unix://").partition("?")[0]
    with redis.Redis(unix_socket_path=path, db=9) as client:
        client.flushdb()
        url = f"redis+socket://{path}?virtual_host=9"
        (tmp_path / "old.py").write_text(OLD.format(url=url))
        (tmp_path / "shop.py").write_text(SHOP.format(name=app_name, broker=server.url))
        monkeypatch.chdir(tmp_path)
        yield tmp_path
        client.flushdb()


def read_lines(file: str) -> list[str]:
    """Return the lines of a file that may not be there yet."""
    return Path(file).read_text().splitlines() if Path(file).exists() else []


def test_a_bridge_that_is_killed_at_each_step_loses_and_doubles_nothing(folder: Path) -> None:
    app = load_app("shop")
    old: Any = sys.modules["old"]
    results = [old.app.send_task("shop.charge", (number,)) for number in range(250)]
    with (
        Serving("-A", "shop", "worker", "start", cwd=folder).ready(),
        Serving("-A", "shop", "router", "start", "--processes", "2", cwd=folder),
    ):
        until(lambda: len(read_lines("ran")) >= 250)
        until(
            lambda: all(Path(f"died-{step}").exists() for step in ("received", "published", "acknowledging"))
        )
        last = old.app.send_task("shop.charge", (1000,))
        assert last.get(timeout=20) == 2000
        assert [result.get(timeout=20) for result in results] == [number * 2 for number in range(250)]
    assert Counter(read_lines("ran")) == Counter(result.id for result in [*results, last])
    app.close()


def test_a_worker_of_celery_runs_what_ours_send(folder: Path) -> None:
    app = load_app("shop")
    ship: Any = app.tasks["warehouse.ship"]
    sent = [ship.delay(number) for number in range(3)]
    worker = ("-m", "celery", "-A", "old", "worker", "-P", "solo", "-Q", "ship", "-l", "error")
    quiet = ("--without-gossip", "--without-mingle", "--without-heartbeat")
    with (
        Serving("-A", "shop", "worker", "start", cwd=folder).ready(),
        Serving(cwd=folder, program=(sys.executable, *worker, *quiet)),
    ):
        until(lambda: len(read_lines("shipped")) == 3)
    assert {line.split()[0] for line in read_lines("shipped")} == {result.id for result in sent}
    app.close()
