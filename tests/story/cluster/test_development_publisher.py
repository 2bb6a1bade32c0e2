"""Development: a controller of an application that sends by a Publisher daemon runs that daemon, too (C90)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.story.cli.commands import Serving, environment

DEVELOPMENT = ("-A", "shop", "controller", "start", "--development")
SHOP = """
from celery5 import App

app = App("shop", publisher={publisher!r}, publisher_socket={socket!r}, publisher_backlog="memory")

@app.task
def add(a: int) -> int:
    return a + 1
"""


def serve(folder: Path, publisher: str, socket: str) -> Serving:
    (folder / "shop.py").write_text(SHOP.format(publisher=publisher, socket=socket))
    return Serving(*DEVELOPMENT, cwd=folder, env={"XDG_STATE_HOME": str(folder / "state")})


def test_jobs_are_sent_by_the_publisher_that_it_starts(short_path: Path) -> None:
    socket = str(short_path / "p")
    with serve(short_path, f"unix://{socket}", socket) as controller:
        controller.ready()
        assert controller.logged("publisher:started") or controller.logged("publisher:boot-started")
        assert os.path.exists(socket)
        own = controller.err.split("'")[1]
        sent = subprocess.run(
            [sys.executable, "-c", "from shop import add; print(add.delay(41).get(timeout=30))"],
            cwd=short_path,
            env=environment(CELERY5_BROKER=own),
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert sent.stdout == "42\n"
    assert not os.path.exists(socket)


@pytest.mark.parametrize("publisher", ["", "unix:///nowhere/p"])
def test_it_starts_none_that_nobody_would_send_by(short_path: Path, publisher: str) -> None:
    socket = str(short_path / "p")
    with serve(short_path, publisher, socket) as controller:
        controller.ready()
        assert not controller.logged("publisher:boot-started")
        assert ("which is not started here" in controller.err) == bool(publisher)
    assert not os.path.exists(socket)
