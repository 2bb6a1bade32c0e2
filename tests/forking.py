"""Forking: processes of tests as forks of one process that has imported what they import.

A command's own work takes milliseconds, what it imports half a second of CPU, and the tests start thousands of them.
A fork has its own environment, folder, session, output and end, as a process has that is started. What it does not
show is what a command imports, how its interpreter starts, and its words in `/proc`: `test_cli.py`,
`test_importing.py`, and what a Controller starts, are real processes.
"""

import atexit
import ctypes
import faulthandler
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from io import FileIO
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType
from typing import Any, BinaryIO, cast

MORE = (
    "asyncio",
    "celery5.app",
    "celery5.broker.drivers.blocking",
    "celery5.broker.waiting.on_trio",
    "celery5.broker.waiting.opening",
    "celery5.cli.main",
    "celery5.cli.terminal.loading",
    "celery5.commands.control",
    "celery5.observability.metrics",
    "celery5.operations.table",
    "celery5.processes.controller",
    "celery5.processes.foreground",
    "celery5.processes.publisher",
    "celery5.processes.router",
    "celery5.processes.scheduler",
    "celery5.processes.watch.event_loop",
    "celery5.processes.watch.sidecar",
    "celery5.processes.watch.stacks",
    "celery5.processes.worker",
    "celery5.processes.worker_parts",
    "celery5.services.events.event_ingestion",
    "celery5.services.scaling.autoscaler",
    "celery5.services.scheduling.declarations",
    "multiprocessing",
    "rich.console",
    "rich.table",
    "trio",
)
"""What commands import when they run, besides the modules of the commands."""
AT_START = ("LANG", "LC_", "PYTHON", "TZ")
"""How variables begin that an interpreter reads when it starts: a process that is given others needs its own."""
START_LIMIT = 60.0
"""Seconds until a fork has said its process id."""
LARGEST_REQUEST = 1 << 20
"""Bytes of a request: mostly the environment."""


class ForkedProcess:
    """A process that `start` has started: what the tests use of `subprocess.Popen`."""

    def __init__(self, connection: socket.socket, arguments: Sequence[str], stdout: BinaryIO | None) -> None:
        self.args = arguments
        self.stdout = stdout
        self.returncode: int | None = None
        self._connection = connection
        self._replies = connection.makefile("rb")
        self.pid = int(self._replies.readline() or 0)
        if not self.pid:
            raise ChildProcessError(f"the fork server has not started {arguments}")

    def poll(self) -> int | None:
        """Return its exit code, or None while it runs."""
        if self.returncode is None and select.select([self._connection], [], [], 0)[0]:
            self._read_end()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end and return its exit code.

        Raises:
            subprocess.TimeoutExpired: It has not ended after `timeout` seconds.
        """
        if self.returncode is None:
            if not select.select([self._connection], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            self._read_end()
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send it SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send it SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def _read_end(self) -> None:
        self.returncode = int(self._replies.readline() or -signal.SIGKILL)
        self._replies.close()
        self._connection.close()


Process = subprocess.Popen[bytes] | ForkedProcess
"""A process that a test has started, one way or the other."""


class ForkServer:
    """Starts processes as forks of a process of its own, which it starts for the first."""

    def __init__(self, *modules: str) -> None:
        self._modules = modules
        self._requests: socket.socket | None = None
        self._server: subprocess.Popen[bytes] | None = None
        self._owner = 0
        self._interpreter: dict[str, str] = {}

    def start(
        self,
        arguments: Sequence[str],
        *,
        cwd: Path,
        env: Mapping[str, str],
        stdout: int | FileIO | BinaryIO | Any = None,
        stderr: int | FileIO | BinaryIO | Any = None,
        start_new_session: bool = False,
    ) -> ForkedProcess:
        """Start a process.

        Args:
            arguments: What Python would get: `-m MODULE ...`, `-c CODE ...` or `SCRIPT.py ...`, after `-W FILTER`.
            cwd: Its folder.
            env: Its whole environment.
            stdout: As `subprocess.Popen` has it. Without it, the output goes where that of the tests goes.
            stderr: The same, with `subprocess.STDOUT`.
            start_new_session: Whether it gets a session, and so a process group, of its own.
        """
        here, there = socket.socketpair()
        opened: list[int] = [os.open(os.devnull, os.O_RDONLY)]
        pipe: BinaryIO | None = None
        if stdout == subprocess.PIPE:
            read, write = os.pipe()
            pipe = open(read, "rb")  # noqa: SIM115  # whoever started the process closes it
            opened.append(write)
        else:
            opened.append(os.dup(_number(stdout, 1)))
        opened.append(os.dup(opened[1] if stderr == subprocess.STDOUT else _number(stderr, 2)))
        request = {
            "arguments": list(arguments),
            "cwd": str(cwd),
            "env": dict(env),
            "session": start_new_session,
        }
        try:
            with there:
                socket.send_fds(self._connected(), [json.dumps(request).encode()], [there.fileno(), *opened])
        finally:
            for number in opened:
                os.close(number)
        here.settimeout(START_LIMIT)
        process = ForkedProcess(here, arguments, pipe)
        here.settimeout(None)
        return process

    def run(
        self, arguments: Sequence[str], *, cwd: Path, env: Mapping[str, str], timeout: float
    ) -> tuple[int, str, str]:
        """Run one process to its end and return its exit code and what it printed.

        Raises:
            subprocess.TimeoutExpired: It takes longer than `timeout` seconds; it has been killed.
        """
        with tempfile.NamedTemporaryFile() as out, tempfile.NamedTemporaryFile() as err:
            process = self.start(
                arguments, cwd=cwd, env=env, stdout=out.file, stderr=err.file, start_new_session=True
            )
            try:
                code = process.wait(timeout)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                raise
            return code, Path(out.name).read_text(), Path(err.name).read_text()

    def _connected(self) -> socket.socket:
        """Return the socket for requests, of a server that this process has started."""
        if self._requests is None or self._owner != os.getpid():
            here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            here.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LARGEST_REQUEST)
            with there:
                self._server = subprocess.Popen(
                    [sys.executable, "-m", "tests.forking", str(there.fileno()), *self._modules],
                    cwd=Path(__file__).parents[1],
                    pass_fds=[there.fileno()],
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                )
            atexit.register(self._end, os.getpid())
            self._requests, self._owner, self._interpreter = here, os.getpid(), _of_interpreter(os.environ)
        return self._requests

    def _end(self, owner: int) -> None:
        """End the server, and with it all processes that it has started."""
        if self._requests and self._server and os.getpid() == owner:
            self._requests.close()
            self._server.wait(10)

    def can_start(self, command: Sequence[str], env: Mapping[str, str]) -> bool:
        """Return whether a fork can be what this command starts: the same interpreter, started in the same way."""
        self._connected()
        return (
            command[0] == sys.executable
            and (command[1] in ("-m", "-c", "-W") or command[1].endswith(".py"))
            and _of_interpreter(env) == self._interpreter
        )


def _of_interpreter(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that an interpreter reads when it starts. A fork reports a crash in any case."""
    return {
        name: value
        for name, value in environ.items()
        if name.startswith(AT_START) and name != "PYTHONFAULTHANDLER"
    }


def _number(file: Any, default: int) -> int:
    if file is None:
        return default
    if file == subprocess.DEVNULL:
        return _DEVNULL
    return file if isinstance(file, int) else int(file.fileno())


_KEPT: dict[str, ModuleType] = {}
"""The modules that the server has imported. Nobody frees them."""
_DEVNULL = os.open(os.devnull, os.O_WRONLY)
forks = ForkServer()
"""The server of this process of the tests. Those of Django have one more, which has imported Django."""


def start_process(
    command: Sequence[str],
    *,
    cwd: Path,
    env: Mapping[str, str],
    stdout: Any = None,
    stderr: Any = None,
    start_new_session: bool = False,
    server: ForkServer = forks,
) -> Process:
    """Start a command: as a fork where that makes no difference, else as it is. The arguments are those of `Popen`."""
    if server.can_start(command, env):
        return server.start(
            command[1:],
            cwd=cwd,
            env=env,
            stdout=stdout,
            stderr=stderr,
            start_new_session=start_new_session,
        )
    return subprocess.Popen(
        command, cwd=cwd, env=env, stdout=stdout, stderr=stderr, start_new_session=start_new_session
    )


def serve(requests: socket.socket, modules: Sequence[str]) -> list[str]:
    """Fork for each request until the tests have gone; return, in the process to be, with what Python is to run."""
    faulthandler.enable()
    atexit.register(_keep_modules)  # the first that is registered runs last
    for package in ("celery5.cli.commands", "celery5.cli.standalone"):
        for module in iter_modules(import_module(package).__path__, f"{package}."):
            import_module(module.name)
    for name in (*MORE, *modules):
        import_module(name)
    _KEPT.update(sys.modules)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(_KEPT))
    gc.collect()
    gc.freeze()  # else each fork goes through all that was imported, and copies the pages, at each full collection
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the attendants
    while True:
        message, files, _, _ = socket.recv_fds(requests, LARGEST_REQUEST, 4)
        if not message:
            sys.exit()
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            requests.close()
            return attend(socket.socket(fileno=files[0]), json.loads(message), files[1:])
        for file in files:
            os.close(file)


def _keep_modules() -> None:
    """Take what the server has imported out of the end of a fork, which still takes down what is its own.

    To free these modules costs 50 ms of CPU, four times as much as to fork: each page is copied to be changed.
    """
    for name, module in _KEPT.items():
        if name not in ("sys", "builtins", "__main__") and sys.modules.get(name) is module:
            del sys.modules[name]


def attend(tests: socket.socket, request: dict[str, Any], files: list[int]) -> list[str]:
    """Fork once more, report that process and its end, and end it when the tests have gone; return in that process."""
    pid = os.fork()
    if pid == 0:
        tests.close()
        return become(request, files)
    for file in (0, 1, 2, *files):
        os.close(file)
    tests.sendall(b"%d\n" % pid)
    ended = os.pidfd_open(pid)
    if ended not in select.select([ended, tests.fileno()], [], [])[0]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    with suppress(OSError):
        tests.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))
    os._exit(0)


def become(request: dict[str, Any], files: list[int]) -> list[str]:
    """Make this process what the request describes; return what Python is to run."""
    for number, file in enumerate(files):
        os.dup2(file, number)
    for file in files:
        if file > 2:
            os.close(file)
    if request["session"]:
        os.setsid()
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.path[0] = request["cwd"]
    time.tzset()
    arguments: list[str] = request["arguments"]
    sys.orig_argv[1:] = arguments
    return arguments


def run(arguments: list[str]) -> None:
    """Do what an interpreter does that is started with these arguments."""
    match arguments:
        case ["-W", action, *others]:
            sys.warnoptions.append(action)
            warnings.simplefilter(cast("Any", action))
            run(others)
        case ["-m", module, *words]:
            sys.argv[:] = [module, *words]
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        case ["-c", code, *words]:
            sys.argv[:] = ["-c", *words]
            exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
        case _:
            sys.argv[:] = arguments
            runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    run(serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:]))
