"""Killing: an example under a Controller, for tests that kill its processes one after another."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.forking import forks
from tests.story.cli.commands import Ended, environment
from tests.story.cluster.controlling import Controlling

DESCRIPTION = """
[workers.default]
count = 2

[routers.default]
count = 1
"""


class Example:
    """An example whose processes run under a Controller, and the environment of its commands."""

    def __init__(self, target: str, folder: Path, env: dict[str, str]) -> None:
        self.target, self.env = target, env
        self._folder = folder
        self._controller = self._start()

    def _start(self) -> Controlling:
        return Controlling(self._folder, DESCRIPTION, target=self.target, env=self.env).up()

    def run(self, *words: object) -> str:
        """Run a command of the example; return what it has printed."""
        return run_module(self.target, *words, env=self.env)

    def run_and_be_killed(self, code: str, *words: object) -> None:
        """Run Python code that kills its own process."""
        ended = subprocess.run(
            [sys.executable, "-c", code, *map(str, words)],
            env=environment(**self.env),
            timeout=60,
            check=False,
        )
        assert ended.returncode == -signal.SIGKILL

    def kill(self, name: str) -> None:
        """Kill a process of the cluster, and wait until another one is there in its place."""
        pid = self._controller.pids()[name]
        os.kill(pid, signal.SIGKILL)
        self._controller.replaced(name, pid)

    def kill_controller(self) -> None:
        """Kill the Controller, and start another one."""
        os.kill(self._controller.process.pid, signal.SIGKILL)
        self._controller.process.wait()
        self._controller = self._start()

    def stop(self) -> None:
        """Stop everything."""
        self._controller.__exit__()


def run_module(target: str, *words: object, env: dict[str, str]) -> str:
    """Run a command of an example; return what it has printed."""
    ended = run_example(target, *words, env=env)
    assert ended.code == 0, ended.err
    return ended.out


def run_example(target: str, *words: object, env: dict[str, str]) -> Ended:
    """Run a command of an example to its end, in a fork."""
    command = ("-m", target, *map(str, words))
    return Ended(*forks.run(command, cwd=Path.cwd(), env=environment(**env), timeout=150))


@contextmanager
def running_example(target: str, url: str, folder: Path, **env: str) -> Iterator[Example]:
    """Run an example with two workers and a Router."""
    with TemporaryDirectory(prefix="e-", dir="/tmp") as home:  # a socket's path is short
        homes = dict.fromkeys(("XDG_RUNTIME_DIR", "XDG_STATE_HOME"), home)
        example = Example(target, folder, {"CELERY5_BROKER": url, **homes, **env})
        try:
            yield example
        finally:
            example.stop()
