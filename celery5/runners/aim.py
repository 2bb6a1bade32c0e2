"""Aim: raises an error inside one call in another thread, and in nothing that the thread does before or after.

Floor: runners. Reads: nothing. Writes: nothing.

The interpreter can raise an error in a thread between two steps of its Python code. It does so some time after it was
asked to; so what was asked for and has not come is taken back when the call is over. What blocks in C code, a long
`time.sleep` say, hears of it afterwards.
"""

import ctypes
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

T = TypeVar("T")

_raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
_raise_in.argtypes = (ctypes.c_ulong, ctypes.py_object)
_NOTHING: Any = ctypes.py_object()


class CallInterrupter:
    """One call, at which at most two errors may be shot."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: int | None = None
        self._early: type[BaseException] | None = None
        self._over = False

    def interrupt(self, error: Exception) -> None:
        """Raise an error like this one in the call: at once if it runs, when it begins if it has not begun. From any
        other thread."""
        kind = _as_class(error)
        with self._lock:
            if self._over:
                return
            if self._thread is None:
                self._early = kind
            else:
                _raise_in(self._thread, kind)

    def call(self, function: Callable[..., T], args: Sequence[Any], kwargs: Mapping[str, Any]) -> T:
        """Call, here and now. Raises what was shot, too."""
        # An error may hit any step, those of `_done` too: but two errors cannot hit three of it. Whichever of them
        # goes through to its end is the last that can be hit.
        try:
            try:
                try:
                    self._begin()
                    return function(*args, **kwargs)
                finally:
                    self._done()
            finally:
                self._done()
        finally:
            self._done()

    def _begin(self) -> None:
        with self._lock:
            self._thread = threading.get_ident()
        if self._early is not None:
            raise self._early

    def _done(self) -> None:
        with self._lock:
            self._over = True
            if self._thread is not None:
                _raise_in(self._thread, _NOTHING)  # what has not come yet will not come


def _as_class(error: Exception) -> type[BaseException]:
    """A class that makes errors like this one: a thread can only be told to raise a class."""
    kind, text = type(error), str(error)

    def init(self: Exception) -> None:
        Exception.__init__(self, text)

    names = {"__init__": init, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (kind,), names)
