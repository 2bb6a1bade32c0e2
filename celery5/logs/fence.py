"""The fence around everything that only observes: history, metrics, progress, alerts, audit, traces and logs.

What only observes never ends, stops or changes what it observes. Whatever it raises is caught here, is logged once for
each observer and class of error, is counted, and is forgotten. In producers it is the same as in processes.
"""

import threading
from collections import Counter
from collections.abc import Mapping
from types import TracebackType
from typing import Final

from celery5.broker.colour import current_colour
from celery5.protocol.masking import MAX_ERROR_LENGTH, describe_error
from celery5.runners.context import LOG_EVENT

MAX_LOGGED = 1000
"""Observers and classes of errors that are remembered as logged."""
_HINT = "nothing else is affected: further errors of this kind are only counted, in celery5_observer_failures_total"


class ObserverFence:
    """Catches what observers raise. There is one in each operating system process: `FENCE`."""

    def __init__(self) -> None:
        self._logged: set[tuple[str, type]] = set()
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def __call__(self, observer: str) -> "FencedBlock":
        """Return a block for `with`: what the code in it raises is noted, and the block ends normally.

        A cancellation of the task and Ctrl-C pass.

        Args:
            observer: What observes: one of a few fixed names, such as `history`.
        """
        return FencedBlock(self, observer)

    def note(self, observer: str, error: BaseException) -> None:
        """Count an error of an observer, and log the first one of its class. Never raises."""
        kind = (observer, type(error))
        with self._lock:
            self._counts[observer] += 1
            if kind in self._logged:
                return
            if len(self._logged) >= MAX_LOGGED:
                self._logged.clear()
            self._logged.add(kind)
        try:
            why = describe_error(error, MAX_ERROR_LENGTH)
            LOG_EVENT.get()("observer:failed", "warning", observer=observer, why=why, hint=_HINT)
        except BaseException as failure:  # the log is an observer, too
            pass_cancellation(failure)
            self.count("log")

    def count(self, observer: str) -> None:
        """Count an error of an observer that is logged elsewhere."""
        with self._lock:
            self._counts[observer] += 1

    def forget_logged(self) -> None:
        """Log the next error of each kind again."""
        with self._lock:
            self._logged.clear()

    def take_counts(self) -> Mapping[str, int]:
        """Return how many errors were counted since the last call, by observer."""
        if not self._counts:
            return {}
        with self._lock:
            counts, self._counts = self._counts, Counter()
        return counts


class FencedBlock:
    """A block whose errors are noted and do not leave it."""

    __slots__ = ("_fence", "_observer")

    def __init__(self, fence: ObserverFence, observer: str) -> None:
        self._fence = fence
        self._observer = observer

    def __enter__(self) -> None: ...

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _traceback: TracebackType | None
    ) -> bool:
        if error is None:
            return False
        if not isinstance(error, Exception) or isinstance(error, BaseExceptionGroup):
            if current_colour() == "asyncio" and type(error).__name__ == "CancelledError":
                return False
            pass_cancellation(error)
        self._fence.note(self._observer, error)
        return True


def pass_cancellation(error: BaseException) -> None:
    """Raise a cancellation of this task, or Ctrl-C, if `error` is or contains one; else return."""
    from celery5.runners.user_errors import reraise_cancellation  # needs Trio, which few producers do

    reraise_cancellation(error)


FENCE: Final = ObserverFence()
"""The fence of this process. It keeps nothing but counts, and what was logged."""
