"""Staff: worker processes of the historian's application, and the history that they leave."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from celery5 import App
from tests.forking import Process, start_process
from tests.pace import Pace
from tests.redis.events.historian import app as historian


def logged(output: Path, name: str) -> list[dict[str, Any]]:
    """What a process has logged in that file under `celery5:<name>`."""
    found = []
    message_type = f"celery5:{name}"
    for line in output.read_text().splitlines():
        if message_type in line:  # most lines need no parsing
            with suppress(ValueError):
                message = json.loads(line)
                if message.get("message_type") == message_type:
                    found.append(message)
    return found


@dataclass(frozen=True)
class Note:
    """One line of the history."""

    job: str
    what: str
    pid: int
    attempt: int
    at: float


@dataclass
class Employee:
    """A `celery5 worker start` that runs."""

    process: Process
    output: Path

    def lines(self, name: str) -> list[dict[str, Any]]:
        """What it has logged under `celery5:<name>`."""
        return logged(self.output, name)

    @property
    def sidecar(self) -> int:
        """The process id of its sidecar; it must log at the level `debug`."""
        return int(self.lines("sidecar:started")[0]["pid"])

    def lose_its_machine(self) -> None:
        """End it and its sidecar so that neither can do anything more."""
        os.kill(self.sidecar, signal.SIGKILL)
        self.signal(signal.SIGKILL)
        self.wait()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process."""
        self.process.send_signal(number)

    def wait(self, limit: float = 30.0) -> int:
        """Its exit code, once it has ended."""
        return self.process.wait(limit)


class Staff:
    """Starts workers for one application, and ends them all."""

    def __init__(self, app: App, folder: Path) -> None:
        self.app = app
        self.folder = folder
        self.history = folder / "history"
        self.history.touch()
        self._all: list[Employee] = []

    def start(self, *flags: str, ready: int = 1, **settings: Any) -> Employee:
        """Start a worker and wait until it consumes (or `ready` of its processes do)."""
        one = self.launch([sys.executable, "-m", "celery5", *_TARGET, "worker", "start", *flags], **settings)
        wait_until(lambda: len(one.lines("worker:started")) >= ready or one.process.poll() is not None)
        assert one.process.poll() is None, one.output.read_text()
        return one

    def launch(
        self, command: list[str], *, stderr: int = subprocess.STDOUT, forked: bool = True, **settings: Any
    ) -> Employee:
        """Start a process in the surroundings of this staff.

        Args:
            command: What to run.
            stderr: Where its stderr goes; by default to its output.
            forked: Whether a fork will do: what a process shows in `/proc` of how it was started is not a fork's own.
            settings: Settings for its environment.
        """
        output = self.folder / f"output-{len(self._all)}"
        said = {f"CELERY5_{name.upper()}": str(value) for name, value in settings.items()}
        environ = {
            **os.environ,
            "CELERY5_BROKER": self.app.settings.broker,
            "HISTORY": str(self.history),
            "HISTORY_APP": self.app.name,
            "PYTHONFAULTHANDLER": "1",
            **said,
        }
        with output.open("wb") as file:
            begin: Any = start_process if forked else subprocess.Popen
            process = begin(
                command, stdout=file, stderr=stderr, env=environ, cwd=_ROOT, start_new_session=True
            )
        one = Employee(process, output)
        self._all.append(one)
        return one

    def notes(self, what: str = "begin") -> list[Note]:
        """The history so far."""
        found = []
        for line in self.history.read_text().splitlines():
            job, said, pid, attempt, at = line.split()
            if said == what:
                found.append(Note(job, said, int(pid), int(attempt), float(at)))
        return found

    def dismiss(self) -> None:
        """End all of them, gently if they let us."""
        for process in self._all:
            if process.process.poll() is None:
                process.signal(signal.SIGCONT)
                process.signal(signal.SIGTERM)
                process.signal(signal.SIGTERM)
        for process in self._all:
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.signal(signal.SIGKILL)
                process.wait(30)
        wait_until(lambda: self.sidecars() == [])  # no worker's outlives it, however the worker ended

    def sidecars(self) -> list[int]:
        """The process ids of all sidecars that speak where these workers do."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has just ended, or is another user's
                if (path / "comm").read_text() == "celery5-sidecar\n" and self._is_ours(path):
                    found.append(int(path.name))
        return found

    def _is_ours(self, process: Path) -> bool:
        return Path(os.readlink(process / "fd" / "2")).parent == self.folder


@contextmanager
def staffed(url: str, name: str, folder: Path) -> Iterator[Staff]:
    """A staff for the application `name`, which has the historian's tasks; all of it ends with the block."""
    app = App(name, broker=url)
    for task in historian.tasks.values():
        app.task(name=task.name)(task.function) if task.kind != "asyncio" else app.task(
            name=task.name, loop="asyncio"
        )(task.function)
    staff = Staff(app, folder)
    yield staff
    staff.dismiss()
    app.close()


def wait_until(condition: Callable[[], bool], *, within: float = 30.0) -> float:
    """Wait until `condition()` holds, for `within` seconds at most. Gives how long it took."""
    began, pace = time.monotonic(), Pace()
    while not pace.look(condition):
        if time.monotonic() - began > within:
            raise TimeoutError(f"not so after {within} s")
        time.sleep(pace.pause)
    return time.monotonic() - began


def is_alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


_ROOT = Path(__file__).parents[3]
_TARGET = ("-A", "tests.redis.events.historian:app")
