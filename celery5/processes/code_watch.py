"""Watch: runs a development controller in a separate process, and restarts it whenever the code has changed.

Files are polled: that needs no dependency, and works on every file system, also in containers. A look at 2,000
files takes some 10 ms. The server belongs to the watching process, so jobs that wait outlive a restart.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import FrameType

from celery5.broker.servers.embedded import EmbeddedServer
from celery5.protocol.cluster.members import PARENT_VARIABLE
from celery5.similar_names import count_rest

POLL_INTERVAL = 0.5
"""Seconds between two looks."""
MAX_SETTLE_POLLS = 20
"""The most looks after a change until no file changes any more: an editor or git may be writing many."""
MAX_FILES = 20_000
"""The most files that are watched; others are ignored."""
END_LIMIT = 600.0
"""Seconds after which a controller that was told to end is killed. It has its own limit, by its grace period."""
IGNORED_FOLDERS = frozenset({"__pycache__", "node_modules", "site-packages"})

FileStates = Mapping[str, tuple[int, int]]
"""The time in ns and the size of each file."""


def read_file_states(folder: Path) -> FileStates:
    """Return the Python files below a folder as they are now, without hidden folders and virtual environments."""
    found: dict[str, tuple[int, int]] = {}
    for path in _python_files(str(folder)):
        try:
            state = os.stat(path)
        except OSError:
            continue
        found[path] = state.st_mtime_ns, state.st_size
        if len(found) == MAX_FILES:
            break
    return found


def _python_files(folder: str) -> Iterator[str]:
    for where, folders, files in os.walk(folder):
        folders[:] = sorted(
            name
            for name in folders
            if not name.startswith(".")
            and name not in IGNORED_FOLDERS
            and not os.path.exists(os.path.join(where, name, "pyvenv.cfg"))
        )
        for name in sorted(files):
            if name.endswith(".py"):
                yield os.path.join(where, name)


def find_changed_files(before: FileStates, now: FileStates) -> list[str]:
    """Return the names of the files that are new, gone or changed."""
    return sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))


def run_with_restart(command: Sequence[str], folder: Path) -> int:
    """Run `command` until stopped, again whenever a Python file below `folder` has changed. Return its exit code.

    The first SIGTERM or SIGINT is passed on as one that ends it in order, the second as one that ends it at once.
    """
    with ExitStack() as stack:
        environment = dict(os.environ)
        if not environment.get("CELERY5_BROKER"):
            url = stack.enter_context(EmbeddedServer.start()).url
            environment["CELERY5_BROKER"] = url
            sys.stderr.write(f"producers reach this server with CELERY5_BROKER='{url}'\n")
        watched = _Watched(command, environment)
        for number in (signal.SIGTERM, signal.SIGINT):
            stack.callback(signal.signal, number, signal.signal(number, watched.stop))
        return watched.run(folder)


class _Watched:
    """The process that is started again."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._command = command
        self._environment = {**environment, PARENT_VARIABLE: str(os.getpid())}
        self._stopping = False
        self._child: subprocess.Popen[bytes] | None = None

    def stop(self, _number: int, _frame: FrameType | None) -> None:
        """Ask the process to end, and start no other. Called by a signal handler."""
        self._stopping = True
        if self._child is not None:
            self._child.terminate()

    def run(self, folder: Path) -> int:
        seen = read_file_states(folder)
        self._start()
        is_reported = False
        while not self._stopping:
            time.sleep(POLL_INTERVAL)
            now = read_file_states(folder)
            code = None if self._child is None else self._child.poll()
            if names := find_changed_files(seen, now):
                seen, is_reported = self._settled(folder, now), False
                more = count_rest(len(names) - 1)
                _say(f"{os.path.relpath(names[0], folder)}{more} changed: starting again")
                self._end()
                self._start()
            elif code == 0:
                return 0  # a burst, or a command that ended it
            elif code is not None and not is_reported and not self._stopping:
                _say(f"it ended with {code}: waiting for a change of the code")
                is_reported = True
        return self._end()

    def _settled(self, folder: Path, now: FileStates) -> FileStates:
        for _ in range(MAX_SETTLE_POLLS):
            time.sleep(POLL_INTERVAL / 5)
            before, now = now, read_file_states(folder)
            if before == now:
                break
        return now

    def _start(self) -> None:
        if not self._stopping:
            # In its own session: Ctrl-C in the terminal reaches the watching process, which passes it on once.
            self._child = subprocess.Popen(self._command, env=self._environment, start_new_session=True)
            if self._stopping:  # the signal came while it was started
                self._child.terminate()

    def _end(self) -> int:
        """End the process in order; gives its exit code."""
        if self._child is None:
            return 0
        if not self._stopping:
            self._child.terminate()
        try:
            return self._child.wait(END_LIMIT)
        except subprocess.TimeoutExpired:
            self._child.kill()
            return self._child.wait()


def _say(text: str) -> None:
    sys.stderr.write(f"celery5: {text}\n")
    sys.stderr.flush()
