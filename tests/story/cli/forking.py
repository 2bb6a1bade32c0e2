"""Forking: commands of `celery5` in forks of one process that has imported what they import.

A command's own work takes milliseconds, what it imports half a second of CPU, and the stories run hundreds of commands.
A fork has its own environment, folder, output and end, as a process has that is started. What it does not show is what
a command imports and how it starts: `test_cli.py`, `test_importing.py`, and whatever serves, start real processes.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from select import select
from typing import Any

MORE = (
    "celery5.app",
    "celery5.broker.drivers.blocking",
    "celery5.processes.controller",
    "celery5.processes.publisher",
    "celery5.processes.router",
    "celery5.processes.scheduler",
    "celery5.processes.worker",
    "celery5.processes.worker_parts",
    "rich.console",
    "rich.table",
    "trio",
)
"""What commands import when they run, besides the modules of the commands."""
AT_START = ("LANG", "LC_", "PYTHON", "TZ")
"""How variables begin that an interpreter reads when it starts: a command that is given one needs its own."""


class ForkServer:
    """Runs one command after the other, each in a fork of a process that is started for the first."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def run(
        self, words: Sequence[str], *, cwd: Path, env: Mapping[str, str], timeout: float
    ) -> tuple[int, str, str] | None:
        """Run one command and return its exit code and what it prints, or None while another one runs.

        Raises:
            subprocess.TimeoutExpired: It takes longer than `timeout` seconds; it has been killed.
        """
        if not self._lock.acquire(blocking=False):
            return None
        try:
            with tempfile.NamedTemporaryFile() as out, tempfile.NamedTemporaryFile() as err:
                request = {
                    "words": words,
                    "cwd": str(cwd),
                    "env": dict(env),
                    "out": out.name,
                    "err": err.name,
                }
                code = self._ask(request, timeout)
                return code, out.read().decode(), err.read().decode()
        finally:
            self._lock.release()

    def _ask(self, request: dict[str, Any], timeout: float) -> int:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, __file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
        process = self._process
        assert process.stdin
        assert process.stdout
        process.stdin.write(json.dumps(request).encode() + b"\n")
        process.stdin.flush()
        if not select([process.stdout], [], [], timeout)[0]:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            self._process = None
            raise subprocess.TimeoutExpired(request["words"], timeout)
        return int(process.stdout.readline())


def serve() -> None:
    """Fork for each request and answer with the exit code; in the fork, return ready to run the command."""
    for module in iter_modules(import_module("celery5.cli.commands").__path__, "celery5.cli.commands."):
        import_module(module.name)
    for name in MORE:
        import_module(name)
    answers = os.dup(1)
    for line in sys.stdin.buffer:
        pid = os.fork()
        if pid == 0:
            os.close(answers)
            become(json.loads(line))
            return
        _, status = os.waitpid(pid, 0)
        os.write(answers, b"%d\n" % os.waitstatus_to_exitcode(status))
    sys.exit()


def become(request: dict[str, Any]) -> None:
    """Make this process what the request describes."""
    for number, name in enumerate((os.devnull, request["out"], request["err"])):
        opened = os.open(name, os.O_RDONLY if number == 0 else os.O_WRONLY)
        os.dup2(opened, number)
        os.close(opened)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.argv[1:] = request["words"]
    sys.path[0] = request["cwd"]


if __name__ == "__main__":
    serve()
    import_module("celery5.cli.main").main()
