"""Controlling: a Controller of real processes, and its members, for the tests to watch and to kill."""

import json
import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from celery5 import App
from celery5.cli.terminal.loading import load_app
from tests.story.cli.commands import Ended, Serving, celery5
from tests.story.cli.commands import until as soon

LIMIT = 150.0
"""Seconds that anything may take, with many processes at once on a busy machine."""


def until(condition: Callable[[], Any]) -> Any:
    """Wait until something is true."""
    return soon(condition, within=LIMIT)


@contextmanager
def working_in(folder: Path, module: str, source: str, monkeypatch: pytest.MonkeyPatch) -> Generator[App]:
    """The application of a module in a folder, which is the working directory of the test from now on."""
    (folder / f"{module}.py").write_text(source)
    monkeypatch.chdir(folder)
    app = load_app(module)
    yield app
    app.close()


class Controlling(Serving):
    """A Controller that runs, and its members."""

    def __init__(
        self, folder: Path, cluster: str, *flags: str, target: str = "shop", env: dict[str, str] | None = None
    ) -> None:
        self.folder, self.target, self.surroundings = folder, target, env or {}
        (folder / "cluster.toml").write_text(cluster)
        super().__init__("-A", target, "controller", "start", *flags, cwd=folder, env=self.surroundings)

    def up(self) -> "Controlling":
        """Wait until the whole cluster is."""
        until(lambda: self.logged("controller:started") or self.process.poll() is not None)
        assert self.process.poll() is None, self.err
        return self

    def tell(self, *words: str) -> Ended:
        """A command to it."""
        command = ("-A", self.target, "controller", *words, "--timeout", "60")
        return celery5(*command, cwd=self.folder, env=self.surroundings, limit=LIMIT)

    def members(self) -> dict[str, dict[str, Any]]:
        """How the members are, by name."""
        (told,) = json.loads(self.tell("status", "--json").out)
        return {member["name"]: member for member in told["members"]}

    def pids(self) -> dict[str, int]:
        """The process of each member."""
        found = {}
        for path in Path("/proc").glob("[0-9]*"):
            try:
                words = (path / "cmdline").read_bytes().split(b"\0")
                parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            if parent == self.process.pid and b"--name" in words:
                found[words[words.index(b"--name") + 1].decode()] = int(path.name)
        return found

    def replaced(self, name: str, pid: int) -> int:
        """Wait until another process is there under that name, and is up; gives it."""
        until(lambda: self.pids().get(name, pid) != pid)
        until(lambda: len(self.of(name, "started")) > len(self.of(name, "ended")))
        return self.pids()[name]

    def of(self, name: str, what: str) -> list[dict[str, Any]]:
        """Return what was logged about a member: `what` is `started`, `ended`, `killed` and so on."""
        return [line for line in self.logged(f"member:{what}") if line["name"] == name]

    def environment_of(self, pid: int) -> dict[str, str]:
        """The environment with which a member was started."""
        said = Path(f"/proc/{pid}/environ").read_text().split("\0")
        return dict(line.split("=", 1) for line in said if "=" in line)


def is_group_leader(pid: int) -> bool:
    """Whether a process has its own group, so that Ctrl-C in a terminal is not for it."""
    return os.getpgid(pid) == pid
