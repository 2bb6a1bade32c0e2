"""A broker that a class of the user's runs: the Controller starts it, keeps it alive, and ends it last."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from celery5 import App
from celery5.errors import BrokerUnavailable
from tests.redis.commands.staff import is_alive
from tests.story.cli.commands import celery5
from tests.story.cluster.controlling import LIMIT, Controlling, until

pytestmark = pytest.mark.timeout(300)

BANK = """
from celery5 import App

app = App("bank", grace_period=5)

@app.task
async def pay(number: int) -> int:
    return number
"""
GARAGE = """
import json
import subprocess
import time
from pathlib import Path
from typing import Any

from celery5.broker.drivers.blocking import BlockingRedis
from celery5.broker.endpoint import Endpoint
from celery5.broker.calls.jobs import PING
from celery5.platform import BrokerUnavailable, MessageBroker


class Garage(MessageBroker):
    def __init__(self, *, settings, app):
        self.settings, self.app, self.process = settings, app, None
        self.calls = Path(settings.folder) / "calls"
        self.socket = Path(settings.folder) / "s"
        self.note("made", app=app, **settings.options)

    def note(self, what, **more):
        with self.calls.open("a") as file:
            file.write(json.dumps({"what": what, "pid": self.pid, **more}) + "\\n")

    @property
    def url(self):
        return f"unix://{self.socket}?db=0"

    @property
    def is_running(self):
        return self.process is not None and self.process.poll() is None

    def start(self, is_cancelled):
        binary = self.settings.options["binary"]
        command = [binary, "--port", "0", "--unixsocket", str(self.socket), "--dir", self.settings.folder]
        try:
            self.process = subprocess.Popen([*command, "--appendonly", "yes"], stdout=subprocess.DEVNULL)
        except OSError as error:
            raise BrokerUnavailable(f"the garage is closed: {error}") from None
        self.pid = self.process.pid
        while not is_cancelled() and not self.is_responding():
            time.sleep(0.02)
        self.note("started")

    def is_responding(self):
        driver = BlockingRedis(Endpoint.from_url(self.url))
        try:
            driver.perform(PING)
        except BrokerUnavailable:
            return False
        finally:
            driver.close()
        return True

    def kill(self):
        self.process.kill()
        self.process.wait()

    def stop(self):
        if self.is_running:
            self.process.terminate()
            self.process.wait()
        self.note("stopped")


class Closed(Garage):
    def start(self, is_cancelled):
        raise BrokerUnavailable("the garage is closed")


class Wrong:
    def __init__(self, **_options):
        pass
"""
CLUSTER = """
[broker]
server = "garage:{name}"
folder = "."

[broker.options]
binary = "{binary}"

[workers.default]
count = 1
"""


@pytest.fixture
def bank(short_path: Path, server_binary: str | None) -> Path:
    """A folder with an application, and the description of its cluster."""
    (short_path / "bank.py").write_text(BANK)
    (short_path / "garage.py").write_text(GARAGE)
    (short_path / "cluster.toml").write_text(CLUSTER.format(name="Garage", binary=server_binary))
    return short_path


def test_it_is_started_first_and_again_when_it_dies_and_ended_last(bank: Path) -> None:
    url = f"unix://{bank}/s?db=0"
    with Controlling(
        bank, (bank / "cluster.toml").read_text(), target="bank", env={"PYTHONPATH": str(bank)}
    ) as controller:
        controller.up()
        assert f"producers reach the broker with CELERY5_BROKER={url}" in controller.err
        (member,) = controller.pids().values()
        assert controller.environment_of(member)["CELERY5_BROKER"] == url
        app = App("bank", broker=url)
        pay = app.task(name="bank.pay")(_pay)
        assert pay.delay(1).get(timeout=LIMIT) == 1
        first = _calls(bank)[1]["pid"]
        os.kill(first, signal.SIGKILL)
        until(lambda: controller.logged("broker:started"))
        until(lambda: _is_sent(app))
        assert pay.delay(2).get(timeout=LIMIT) == 2
        app.close()
        controller.process.terminate()
        assert controller.ended().code == 0
    calls = _calls(bank)
    assert [call["what"] for call in calls] == ["made", "started", "started", "stopped"]
    assert calls[0]["app"] == "bank"
    assert not any(is_alive(call["pid"]) for call in calls[1:])
    assert not is_alive(member)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("Closed", "Error: the garage is closed"),
        ("Wrong", "broker 'garage:Wrong' is not a subclass of celery5.platform.MessageBroker"),
        ("Missing", "broker 'garage:Missing': module garage has no class Missing"),
    ],
)
def test_what_is_wrong_with_it_is_said_in_one_line(bank: Path, name: str, wrong: str) -> None:
    text = (bank / "cluster.toml").read_text().replace("garage:Garage", f"garage:{name}")
    (bank / "cluster.toml").write_text(text)
    ended = celery5("-A", "bank", "controller", "start", cwd=bank, env={"PYTHONPATH": str(bank)})
    assert ended.code != 0
    assert wrong in ended.error
    assert "Traceback" not in ended.error


def _is_sent(app: App) -> bool:
    try:
        app.info()
    except BrokerUnavailable:
        return False
    return True


def _calls(bank: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (bank / "calls").read_text().splitlines()]


async def _pay(number: int) -> int:
    """As in the application."""
    return number
