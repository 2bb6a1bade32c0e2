"""Stamps: when each job ran, written by the workers of any peer and read by the runner, without asking Redis.

CLOCK_MONOTONIC is one clock for all processes of a machine, so stamps of several workers can be put in one order.
A stamp costs about a third of a microsecond and is the same for every peer. Reading them puts no load on the server.
"""

import mmap
import os
import threading
from array import array
from collections.abc import Callable
from itertools import count
from pathlib import Path
from time import monotonic_ns

ROOM = 1 << 20
"""Jobs that one process may stamp."""

MARKS = os.environ.get("BENCH_MARKS", "")
"""A file with a byte for each job, or nothing."""

_opening = threading.Lock()
_ended: mmap.mmap | None = None
_marks: memoryview | None = None
_slot: Callable[[], int] = count().__next__


def done() -> None:
    """Say that a job is running now. Called once by each job, from any thread."""
    marks = _marks if _marks is not None else _open()
    marks[_slot()] = monotonic_ns()


def mark(n: int) -> None:
    """Say that job `n` has ended, where the runner wants to know it of each."""
    global _ended
    if _ended is None and MARKS:
        with Path(MARKS).open("r+b") as file:
            _ended = mmap.mmap(file.fileno(), 0)
    if _ended is not None:
        _ended[n] = 1


def _open() -> memoryview:
    global _marks, _slot
    with _opening:
        if _marks is None:
            path = Path(os.environ["BENCH_STAMPS"]) / f"{os.getpid()}.stamps"
            with path.open("w+b") as file:
                file.truncate(ROOM * 8)
                _slot = count().__next__
                _marks = memoryview(mmap.mmap(file.fileno(), ROOM * 8)).cast("q")
        return _marks


def _forget() -> None:
    """A forked child writes a file of its own."""
    global _marks, _opening
    _marks = None
    _opening = threading.Lock()


os.register_at_fork(after_in_child=_forget)


class Reader:
    """Reads what the workers stamp into `folder`, while they do."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._maps: dict[Path, tuple[memoryview, int]] = {}

    def total(self) -> int:
        """Jobs done so far by all processes. Cheap: looks only at what came since the last call."""
        for path in self._folder.glob("*.stamps"):
            if path not in self._maps and path.stat().st_size == ROOM * 8:
                with path.open("rb") as file:
                    view = mmap.mmap(file.fileno(), ROOM * 8, prot=mmap.PROT_READ)
                self._maps[path] = (memoryview(view).cast("q"), 0)
        for path, (marks, seen) in self._maps.items():
            for stride in (256, 1):
                while seen + stride <= ROOM and marks[seen + stride - 1]:
                    seen += stride
            self._maps[path] = (marks, seen)
        return sum(seen for _, seen in self._maps.values())

    def by_process(self) -> "list[array[int]]":
        """The stamps of each process that did anything, each in order."""
        self.total()
        return [array("q", sorted(marks[:seen])) for marks, seen in self._maps.values() if seen]
