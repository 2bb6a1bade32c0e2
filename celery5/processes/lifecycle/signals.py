"""Signals: stopping a process in order: the first signal asks, the second insists, and so does a clock. SIGHUP has it
read its configuration again.

The handlers stay from before a Trio run until after it, so a signal never is an exception out of nowhere:
KeyboardInterrupt may strike between making a folder and noting that it must be removed, or in the winding up. They run
between two bytecodes of the main thread, so they end a process whose event loop a job has blocked, too.
"""

import os
import select
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any, Self

from celery5.logs.printed_lines import format_printed

_WATCHED = (signal.SIGTERM, signal.SIGINT)


class Terminal:
    """The terminal that this process was started from, if it was."""

    def __init__(self) -> None:
        # Whoever was started by nohup is to outlive it.
        self._there = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN and _has_terminal()

    def is_gone(self) -> bool:
        """Whether it was closed: that is what SIGHUP means, then, and not what it means to a daemon."""
        return self._there and not _has_terminal()


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True


class Interruption:
    """A context manager for the main thread, around a Trio run and what belongs to it.

    Who has not left the block `limit` seconds after the first signal is ended all the same: nothing waits for ever on
    a job that takes no notice of being cancelled. Further signals within `duplicate_window` seconds of the first are
    taken for the same one; with a `parent`, only when that has died: the kernel tells of it more than once. What ends
    without a signal, because it was commanded to, `must_end` by the same clock.
    """

    def __init__(self, *, limit: float | None = None, duplicate_window: float = 0.0, parent: int = 0) -> None:
        self._parent = parent
        self._limit = limit
        self._duplicate_window = duplicate_window
        self._first: signal.Signals | None = None
        self._at = 0.0
        self._end: Callable[[signal.Signals], object] | None = None
        self._reload: Callable[[], object] | None = None
        self._terminal = Terminal()
        self._last_things: Callable[[], object] | None = None
        self._on_deadline: Callable[[], object] | None = None
        self._on_fork: Callable[[], object] | None = None
        self._before: dict[signal.Signals, Any] = {}
        self._bell = (-1, -1)
        self._ticks = False

    @property
    def was_requested(self) -> bool:
        """Whether a signal has arrived."""
        return self._first is not None

    def on_stop(self, end: Callable[[signal.Signals], object]) -> None:
        """Call `end`, which must be safe in a signal handler, at the first signal; at once if it has already been."""
        self._end = end
        if self._first is not None:
            end(self._first)

    def on_reload(self, reload: Callable[[], object]) -> None:
        """Call `reload`, which must be safe in a signal handler, at each SIGHUP. Without it SIGHUP ends the process in
        order, as it does when its terminal was closed."""
        self._reload = reload

    def start_deadline(self) -> None:
        """The block is to be left, as after a signal: should it not be within `limit` seconds, the process is ended."""
        if self._bell[1] >= 0 and not self._ticks:
            self._ticks = True
            if self._on_deadline is not None:
                self._on_deadline()
            os.write(self._bell[1], b"!")  # starting a thread here could wait for a lock that we hold

    def on_deadline(self, do: Callable[[], object] | None) -> None:
        """Call `do`, which must be safe in a signal handler, when the time to leave the block begins."""
        self._on_deadline = do

    def set_exit_hook(self, do: Callable[[], object] | None) -> None:
        """Call `do` before the process is ended at once. It must neither wait nor lock."""
        self._last_things = do

    def on_fork(self, do: Callable[[], object]) -> None:
        """Call `do` in each process that a job forks, before its signals are its own."""
        self._on_fork = do

    def __enter__(self) -> Self:
        if self._limit is not None:
            self._bell = os.pipe()
            threading.Thread(target=self._watch_clock, name="celery5-stop", daemon=True).start()
        self._before = {signal_number: signal.signal(signal_number, self._note) for signal_number in _WATCHED}
        self._before[signal.SIGHUP] = signal.signal(signal.SIGHUP, self._hung_up)
        os.register_at_fork(after_in_child=self._release_signals)
        return self

    def __exit__(self, *_exc: object) -> None:
        for signal_number, handler in self._before.items():
            signal.signal(signal_number, handler)
        if self._bell[1] >= 0:
            # The end of the pipe alone may not come: forked processes have it, too.
            os.write(self._bell[1], b".")
            os.close(self._bell[1])

    def _release_signals(self) -> None:
        """Have the signals end a process that a job has forked, as they end any other.

        Python 3.13.0 calls no handler in a process that a thread has forked while that process runs Python code, so
        the handlers cannot do it.
        """
        if self._on_fork is not None:
            self._on_fork()
        for number in (*_WATCHED, signal.SIGHUP):
            if signal.getsignal(number) in (self._note, self._hung_up):  # the block has not ended
                signal.signal(number, signal.SIG_DFL)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if self._first is None:
            self._first, self._at = signal.Signals(number), time.monotonic()
            if self._parent and _lives(self._parent):
                self._duplicate_window = 0.0
            self.start_deadline()
            if self._end is not None:
                self._end(self._first)
        elif time.monotonic() - self._at >= self._duplicate_window:
            self._exit(number, f"{signal.Signals(number).name} for the second time")

    def _hung_up(self, number: int, frame: FrameType | None) -> None:
        if self._reload is None or self._terminal.is_gone():
            self._note(number, frame)
        else:
            self._reload()

    def _watch_clock(self) -> None:
        """In a thread: once it must end, wait for the end of the block, but not for ever."""
        ear = self._bell[0]
        try:
            if os.read(ear, 1) != b"!":
                return
            if not select.select([ear], [], [], self._limit)[0]:
                first = self._first or signal.SIGTERM
                what = "the request to stop" if self._first is None else first.name
                self._exit(first, f"not stopped {self._limit:g} s after {what}")
        finally:
            os.close(ear)

    def _exit(self, number: int, why: str) -> None:
        """End this process now. What it held is put back by its sidecar, or when its lease lapses."""
        try:
            with suppress(Exception):
                if self._last_things is not None:
                    self._last_things()
            if select.select([], [2], [], 0)[1]:  # a terminal that is held up must not hold us up
                os.write(2, format_printed(f"{why}: exiting at once").encode())
        finally:
            os._exit(128 + number)


def _lives(pid: int) -> bool:
    """Whether a process runs; one whose first thread has ended does not."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False
