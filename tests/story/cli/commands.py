"""Commands: the real `celery5` command in processes of its own, for the tests to run, watch and stop."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from tests.forking import ForkServer, forks, start_process
from tests.pace import Pace

LIMIT = 30.0
"""Seconds that anything here may take."""

COMMAND = (sys.executable, "-m", "celery5")


@dataclass(frozen=True)
class Ended:
    """How a command ended: its exit code and what it printed."""

    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """Its one line on stderr; more than one is a failure of the test, and so is a traceback."""
        assert "Traceback" not in self.out + self.err, self
        (line,) = self.err.splitlines()
        return line


def environment(**more: str) -> dict[str, str]:
    """This process' environment without any setting of celery5, 80 columns wide, and `more`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("CELERY5_")}
    return {**kept, "COLUMNS": "80", **more}


def celery5(
    *words: object,
    cwd: Path,
    env: Mapping[str, str] | None = None,
    command: Sequence[str] | None = None,
    limit: float = LIMIT,
) -> Ended:
    """Run one command to its end: in a fork, or as `command` where that is given or its interpreter matters."""
    whole = [*(command or COMMAND), *map(str, words)]
    environ = environment(**(env or {}))
    if command is None and forks.can_start(whole, environ):
        return Ended(*forks.run(whole[1:], cwd=cwd, env=environ, timeout=limit))
    done = subprocess.run(
        whole,
        cwd=cwd,
        env=environ,
        capture_output=True,
        text=True,
        timeout=limit,
        check=False,
    )
    return Ended(done.returncode, done.stdout, done.stderr)


def until(condition: Callable[[], Any], *, within: float = LIMIT) -> Any:
    """Wait until something is true, looking again every few milliseconds; gives what it was."""
    end, pace = time.monotonic() + within, Pace()
    while not (value := pace.look(condition)):
        assert time.monotonic() < end, f"not true within {within} s"
        time.sleep(pace.pause)
    return value


class Serving:
    """A command that serves, in its own process group, as a terminal would have it. Leaving the block stops it."""

    def __init__(
        self,
        *words: object,
        cwd: Path,
        env: Mapping[str, str] | None = None,
        program: Sequence[str] = COMMAND,
        server: ForkServer = forks,
    ) -> None:
        self._out = cwd / f"out-{time.monotonic_ns()}"
        self._err = self._out.with_suffix(".err")
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = start_process(
                [*program, *map(str, words)],
                cwd=cwd,
                env=environment(**(env or {})),
                stdout=out,
                stderr=err,
                start_new_session=True,
                server=server,
            )

    @property
    def err(self) -> str:
        """What it has said on stderr."""
        return self._err.read_text()

    @property
    def out(self) -> str:
        """What it has written to stdout."""
        return self._out.read_text()

    @property
    def messages(self) -> list[dict[str, Any]]:
        """What it has logged: the whole lines so far."""
        return [json.loads(line) for line in self._out.read_text().splitlines(True) if line.endswith("\n")]

    def logged(self, kind: str) -> list[dict[str, Any]]:
        """The messages of one kind, such as `worker:started`."""
        message_type = f"celery5:{kind}"
        whole = (line for line in self._out.read_text().splitlines(True) if line.endswith("\n"))
        messages = [json.loads(line) for line in whole if message_type in line]  # most lines need no parsing
        return [message for message in messages if message.get("message_type") == message_type]

    def ready(self, workers: int = 1) -> Self:
        """Wait until this many workers consume."""
        until(lambda: len(self.logged("worker:started")) >= workers or self.process.poll() is not None)
        assert self.process.poll() is None, self.err
        return self

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the whole group, as Ctrl-C in a terminal does."""
        os.killpg(self.process.pid, number)

    def ended(self) -> Ended:
        """Wait for its end."""
        code = self.process.wait(LIMIT)
        return Ended(code, self._out.read_text(), self.err)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(LIMIT)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(LIMIT)
                raise
