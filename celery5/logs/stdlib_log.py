"""Write what tasks and libraries log through the standard library to the worker's log.

Only a worker process of the `celery5` command does this, and only if the application has no root handler of its
own.
"""

import logging
import os
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from celery5.errors import TimeLimitExceeded
from celery5.logs.log import Level
from celery5.protocol.job.tracebacks import format_traceback
from celery5.runners.context import get_log_fields

_NUMBER: dict[Level, int] = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}
_PLAIN_VALUES = (str, int, float, bool, type(None))
_STANDARD_ATTRIBUTES = {*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"}


@contextmanager
def captured_logging(
    take: Callable[[dict[str, Any]], None], level: Level
) -> Generator[Callable[[Level], None], None, None]:
    """Pass the records of the standard library, from `level` on, to `take` while the block lasts.

    An application that has given the root logger handlers wants something else: then nothing is changed. A level that
    it has given the root logger stays.

    Yields:
        A function that changes the level.
    """
    root = logging.getLogger()
    if root.handlers:
        yield lambda _level: None
        return
    handler, old_level = _RecordHandler(take), root.level
    is_ours = old_level == logging.WARNING  # the default level

    def follow(level: Level) -> None:
        nonlocal is_ours
        is_ours = is_ours and root.level in (
            old_level,
            handler.level,
        )  # else the application has changed it since
        handler.setLevel(_NUMBER[level])
        if is_ours:
            root.setLevel(_NUMBER[level])

    follow(level)
    root.addHandler(handler)
    try:
        yield follow
    finally:
        root.removeHandler(handler)
        if is_ours and root.level == handler.level:
            root.setLevel(old_level)


class _RecordHandler(logging.Handler):
    """Makes a message of each record.

    It has no lock: `take` needs none, and a time limit that ends a job within it would leave it locked for ever.
    """

    def __init__(self, take: Callable[[dict[str, Any]], None]) -> None:
        super().__init__()
        self._take = take
        self._pid = os.getpid()
        self._thread_state = threading.local()

    def createLock(self) -> None:
        self.lock = None

    def handle(self, record: logging.LogRecord) -> bool:
        """Take a record, in any thread. Raises only TimeLimitExceeded, and ignores records that it causes itself."""
        if os.getpid() != self._pid:  # a process that a task has forked: nothing writes its log
            last = logging.lastResort
            return bool(last and record.levelno >= last.level and last.handle(record))
        if getattr(self._thread_state, "busy", False):  # a value's `__str__` logs
            return False
        try:
            self._thread_state.busy = True
            self._take(_message(record))
        except TimeLimitExceeded:
            raise
        except Exception:
            return False
        finally:
            self._thread_state.busy = False
        return True


def _message(record: logging.LogRecord) -> dict[str, Any]:
    """Return a record as a message; what is in `extra` is among its fields."""
    message = {
        name: _plain(value) for name, value in vars(record).items() if name not in _STANDARD_ATTRIBUTES
    }
    message |= {
        "timestamp": record.created,
        "message_type": "celery5:log",
        "level": _level(record.levelno),
        "logger": record.name,
        "message": _text(record),
    }
    message |= get_log_fields()
    traceback = _format_traceback(record)
    if traceback:
        message["traceback"] = traceback
    return message


def _level(number: int) -> Level:
    for name in reversed(_NUMBER):
        if number >= _NUMBER[name]:
            return name
    return "debug"


def _text(record: logging.LogRecord) -> str:
    """Return the text of a record; where its values do not fit its format, the format alone."""
    try:
        return record.getMessage()
    except TimeLimitExceeded:
        raise
    except Exception as error:
        return f"{_plain(record.msg)} (its values do not fit: {type(error).__name__})"


def _format_traceback(record: logging.LogRecord) -> str:
    text = record.exc_text or ""
    if record.exc_info and record.exc_info[1] is not None:
        text = format_traceback(record.exc_info[1])
    return "\n".join(filter(None, (text.rstrip(), record.stack_info)))


def _plain(value: Any) -> Any:
    """Return a value that nobody can change before it is written."""
    if isinstance(value, _PLAIN_VALUES):
        return value
    try:
        return repr(value)
    except TimeLimitExceeded:
        raise
    except Exception:
        return f"<{type(value).__name__}>"
