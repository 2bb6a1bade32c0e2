"""Own a terminal: single keys instead of lines, a second screen that leaves the first as it was, and its size."""

import os
import select
import signal
import sys
import termios
from collections.abc import Iterator
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any, Self

ENTER = "\x1b[?1049h\x1b[?25l\x1b[?7l"
"""Switches to the second screen, hides the cursor, and does not wrap lines."""
LEAVE = "\x1b[?7h\x1b[?25h\x1b[?1049l"
KEYS = {
    "\x1b[A": "up",
    "\x1bOA": "up",
    "\x1b[B": "down",
    "\x1bOB": "down",
    "\x1b[C": "right",
    "\x1bOC": "right",
    "\x1b[D": "left",
    "\x1bOD": "left",
    "\x1b[H": "home",
    "\x1bOH": "home",
    "\x1b[1~": "home",
    "\x1b[F": "end",
    "\x1bOF": "end",
    "\x1b[4~": "end",
    "\x1b[5~": "page-up",
    "\x1b[6~": "page-down",
    "\x1b[Z": "back-tab",
    "\x1b": "escape",
    "\r": "enter",
    "\n": "enter",
    "\t": "tab",
    "\x7f": "backspace",
    "\x08": "backspace",
    "\x1a": "ctrl-z",
}
"""The names of keys, by what a terminal sends for them."""
MAX_READ = 1024
"""Bytes that are read at once."""


def decode_keys(sent: bytes) -> Iterator[str]:
    """Yield the keys in what a terminal has sent: names of KEYS, or characters. Unknown sequences are left out."""
    text = sent.decode(errors="ignore")
    at = 0
    while at < len(text):
        sequence = _take_sequence(text, at)
        at += len(sequence)
        if sequence in KEYS:
            yield KEYS[sequence]
        elif len(sequence) == 1 and sequence.isprintable():
            yield sequence


def _take_sequence(text: str, at: int) -> str:
    """Return the escape sequence that begins at a place, or the character there."""
    if text[at] != "\x1b" or at + 1 == len(text):
        return text[at]
    if text[at + 1] == "O":
        return text[at : at + 3]
    if text[at + 1] != "[":
        return text[at]
    end = at + 2
    while end < len(text) and not "\x40" <= text[end] <= "\x7e":
        end += 1
    return text[at : end + 1]


class KeyTerminal:
    """The terminal of this process, while the block lasts. It is restored at the end, whatever happens.

    Signals still arrive: ctrl-c ends the command, and a new size wakes `wait`.
    """

    def __init__(self) -> None:
        self._stdin, self._stdout = sys.stdin.fileno(), sys.stdout.fileno()
        self._wake_reader, self._wake_writer = os.pipe()
        for end in (self._wake_reader, self._wake_writer):
            os.set_blocking(end, False)
        self._saved: list[Any] = termios.tcgetattr(self._stdin)
        self._old_handler: Any = None

    def __enter__(self) -> Self:
        self._old_handler = signal.signal(signal.SIGWINCH, self._note_resize)
        try:
            self._begin()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGWINCH, self._old_handler)
        self._end()

    def _begin(self) -> None:
        mode = termios.tcgetattr(self._stdin)
        mode[3] &= ~(termios.ICANON | termios.ECHO)
        mode[6][termios.VMIN], mode[6][termios.VTIME] = 1, 0
        mode[6][termios.VSUSP] = b"\x00"  # ctrl-z is a key: the screen must be left before the process stops
        termios.tcsetattr(self._stdin, termios.TCSADRAIN, mode)
        self.write(ENTER)

    def _end(self) -> None:
        # The terminal may be gone: then there is nothing to restore.
        with suppress(OSError):
            self.write(LEAVE)
        with suppress(termios.error):
            termios.tcsetattr(self._stdin, termios.TCSADRAIN, self._saved)

    def _note_resize(self, _number: int, _frame: FrameType | None) -> None:
        self.wake()

    def wake(self) -> None:
        """Have `wait` return. From any thread, or a signal handler."""
        with suppress(BlockingIOError):
            os.write(self._wake_writer, b"x")

    def wait(self, seconds: float) -> list[str]:
        """Wait for keys, at most so long; return them. Raises EOFError when the terminal is gone."""
        ready, _, _ = select.select([self._stdin, self._wake_reader], [], [], max(0.0, seconds))
        if self._wake_reader in ready:
            with suppress(BlockingIOError):
                os.read(self._wake_reader, MAX_READ)
        if self._stdin not in ready:
            return []
        sent = os.read(self._stdin, MAX_READ)
        if not sent:
            raise EOFError
        return list(decode_keys(sent))

    def suspend(self) -> None:
        """Stop this process, as ctrl-z does, and go on when it is continued."""
        self._end()
        os.kill(os.getpid(), signal.SIGTSTP)
        self._begin()

    def get_size(self) -> tuple[int, int]:
        """Return columns and lines."""
        try:
            size = os.get_terminal_size(self._stdout)
        except OSError:
            return 80, 24
        return (size.columns or 80, size.lines or 24)

    def write(self, text: str) -> None:
        """Write all of a text."""
        left = text.encode()
        while left:
            left = left[os.write(self._stdout, left) :]
