"""Start the processes of the benchmark, measure them, and end them for certain.

Each child leads a session of its own. All processes of that session, and all descendants of the child, end with it.
"""

import atexit
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

TICK = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")


class Child:
    """A running process with its session and its descendants."""

    def __init__(self, command: Sequence[str], environment: dict[str, str], log: Path) -> None:
        self.began = time.monotonic_ns()
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._log = log
        _alive.append(self)

    def members(self) -> list[int]:
        """Return the pids of the child, its session and its descendants."""
        pids = {self._process.pid}
        for pid, parent, session in sorted(_processes()):
            if session == self._process.pid or parent in pids:
                pids.add(pid)
        return sorted(pids)

    def failed(self) -> str | None:
        """Return why the child has ended, or None while it runs."""
        code = self._process.poll()
        return None if code is None else f"exit code {code}: {self.last_words()}"

    def last_words(self) -> str:
        """Return the last line of its output, without the frames of exception groups."""
        lines = (line.strip(" |+-") for line in self._log.read_text(errors="replace").splitlines())
        return ([line for line in lines if line] or ["no output"])[-1][:300]

    def said(self) -> str:
        """Return all its output."""
        return self._log.read_text(errors="replace")

    def stop(self, limit: float) -> None:
        """Send SIGTERM, as a service manager does, and kill it after `limit` seconds."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(limit)
        self.end()

    def end(self) -> None:
        """Kill it, its session and its descendants now."""
        for pid in self.members():
            if self._process.returncode is None or pid != self._process.pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        if self in _alive:
            _alive.remove(self)


_alive: list[Child] = []


@atexit.register
def end_all() -> None:
    """End all children that still run."""
    for child in _alive.copy():
        child.end()


def memory(children: Sequence[Child]) -> float:
    """Return the resident memory of children and descendants in MiB. Shared pages count in each process."""
    total = 0
    for child in children:
        for pid in child.members():
            with contextlib.suppress(OSError):
                total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE
    return total / 2**20


def proportional_memory(children: Sequence[Child]) -> float:
    """Return the memory of children and descendants in MiB (PSS). A page that n of them share counts once in all."""
    total = 0
    for child in children:
        for pid in child.members():
            with contextlib.suppress(OSError):
                lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
                total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total / 2**10


def processor(children: Sequence[Child]) -> float:
    """Return the processor time of children and descendants in seconds."""
    ticks = 0
    for child in children:
        for pid in child.members():
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                ticks += int(fields[11]) + int(fields[12])
    return ticks / TICK


def run(command: Sequence[str], environment: dict[str, str], log: Path, limit: float) -> str:
    """Run a child to its end and return its output. Raises RuntimeError if it fails or exceeds `limit` seconds."""
    child = Child(command, environment, log)
    try:
        deadline = time.monotonic() + limit
        while (reason := child.failed()) is None:
            if time.monotonic() > deadline:
                raise RuntimeError(f"not done after {limit:.0f} s; last line: {child.last_words()}")
            time.sleep(0.01)
        if not reason.startswith("exit code 0:"):
            raise RuntimeError(reason)
        return log.read_text(errors="replace")
    finally:
        child.end()


def _processes() -> list[tuple[int, int, int]]:
    """Return pid, parent and session of every process; nothing without /proc."""
    processes = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            processes.append((int(stat.parent.name), int(fields[1]), int(fields[3])))
    return processes
