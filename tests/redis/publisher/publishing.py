"""Publishing: a Publisher daemon in its own process, and what it has published, for tests to look at."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import redis

from celery5 import App
from celery5.protocol.job.messages import read_command
from tests.forking import Process, start_process
from tests.redis.commands.staff import logged, wait_until

ROOT = Path(__file__).parents[3]
LONG = 40.0
"""Seconds that a step may take on a machine that has much else to do."""


class Daemon:
    """A `celery5 publisher start` for the application `name`, which can be killed and started again."""

    def __init__(self, name: str, url: str, folder: Path) -> None:
        self.name = name
        self.url = url
        self.folder = folder
        self.output = folder / "daemon.log"
        self.socket = folder / "p.sock"
        self.process: Process | None = None
        self.environ: dict[str, str] = {}
        self._lives = 0

    def app(self, **settings: Any) -> App:
        """The application, as its producers have it: it sends by the daemon."""
        one = App(self.name, broker=self.url, **{"publisher": f"unix://{self.socket}", **settings})

        @one.task(name="number")
        async def number(n: int) -> int:
            return n

        return one

    def launch(self, *flags: str, **settings: Any) -> None:
        """Start it, and do not wait."""
        said = {f"CELERY5_{name.upper()}": str(value) for name, value in settings.items()}
        environ = {
            **os.environ,
            "CELERY5_BROKER": self.url,
            "PUBLISHED_APP": self.name,
            **said,
            **self.environ,
        }
        command = [
            sys.executable,
            "-m",
            "celery5",
            "-A",
            "tests.redis.publisher.publishing_app:app",
            "publisher",
            "start",
        ]
        places = ["--socket", str(self.socket), "--backlog", f"{self.folder}/", *flags]
        self._lives += 1
        self.output = self.folder / f"daemon-{self._lives}.log"
        with self.output.open("wb") as file:
            self.process = start_process(
                [*command, *places], stdout=file, stderr=subprocess.STDOUT, env=environ, cwd=ROOT
            )

    def start(self, *flags: str, **settings: Any) -> None:
        """Start it, and wait until it takes jobs."""
        self.launch(*flags, **settings)
        wait_until(lambda: bool(self.lines("publisher:started")) or not self.lives, within=LONG)
        assert self.lives, self.output.read_text()

    @property
    def lives(self) -> bool:
        """Whether it runs."""
        return self.process is not None and self.process.poll() is None

    def lines(self, name: str) -> list[dict[str, Any]]:
        """What this life has logged under `celery5:<name>`."""
        return logged(self.output, name)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        assert self.process is not None
        self.process.kill()
        self.process.wait(LONG)

    def stop(self) -> int:
        """SIGTERM; gives the exit code."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(LONG)


@contextmanager
def publishing(name: str, url: str, folder: Path) -> Iterator[Daemon]:
    """A daemon that is not started yet, and does not outlive the block."""
    one = Daemon(name, url, folder)
    try:
        yield one
    finally:
        if one.lives:
            one.kill()


def numbers(app: App, queue: str = "default") -> list[int]:
    """What lies on a queue, in its order."""
    with redis.Redis.from_url(app.settings.broker) as client:
        found: Any = client.xrange(app.queue(queue).stream)
    return [int(bytes(read_command(fields[b"job"]).args).strip(b"[]")) for _, fields in found]
