"""Interruption: Ctrl-C and SIGTERM as something that is noticed in order, never as an exception out of nowhere.

Floor: cli. Reads: SIGINT and SIGTERM. Writes: nothing.

KeyboardInterrupt may strike between making a folder and noting that it must be removed. Within this block a signal is
remembered instead, and whatever Trio run is under way is told to end.
"""

import os
import signal
import time
from collections.abc import Callable
from types import FrameType
from typing import Self

from celery5.cli.boundary import INTERRUPTED

SIGNALS = (signal.SIGINT, signal.SIGTERM)
PATIENCE = 10.0
"""Seconds for tidying up, after which one more signal ends the process at once."""


class Interruption:
    """A context manager for the main thread. `came` says whether a signal has arrived."""

    def __init__(self) -> None:
        self._at: float | None = None
        self._end: Callable[[], object] | None = None
        self._before: dict[signal.Signals, object] = {}

    @property
    def came(self) -> bool:
        """Whether a signal has arrived."""
        return self._at is not None

    def ends(self, end: Callable[[], object]) -> None:
        """Call `end`, which must be safe in a signal handler, when a signal arrives; at once if one already has."""
        self._end = end
        if self.came:
            end()

    def __enter__(self) -> Self:
        self._before = {each: signal.signal(each, self._note) for each in SIGNALS}
        return self

    def __exit__(self, *_exc: object) -> None:
        for each, handler in self._before.items():
            signal.signal(each, handler)  # type: ignore[arg-type]

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        if self._at is None:
            self._at = time.monotonic()
            if self._end is not None:
                self._end()
        elif time.monotonic() - self._at > PATIENCE:
            os._exit(INTERRUPTED)
