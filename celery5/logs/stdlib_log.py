"""Stdlib log: what tasks and libraries say through the standard library's `logging` goes into the worker's log.

Only a worker process of the `celery5` command does this, and only while the application has no root handler of its own.
"""

import logging
import os
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from traceback import format_exception
from typing import Any

from celery5.errors import TimeLimitExceeded
from celery5.logs.log import Level
from celery5.runners.context import current_job

_NUMBER: dict[Level, int] = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}
_PLAIN_VALUES = (str, int, float, bool, type(None))
_OF_EVERY_RECORD = {*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"}


@contextmanager
def captured_logging(
    take: Callable[[dict[str, Any]], None], level: Level
) -> Generator[Callable[[Level], None], None, None]:
    """Have the standard library's logging, from `level` on, come to `take` for as long as the block lasts. Gives what
    changes the level.

    An application that has given the root logger handlers knows what it wants: then nothing is touched. A level that it
    has given the root logger stays.
    """
    root = logging.getLogger()
    if root.handlers:
        yield lambda _level: None
        return
    handler, before = _Routed(take), root.level
    ours = before == logging.WARNING  # what it is when nobody has said anything

    def follow(level: Level) -> None:
        nonlocal ours
        ours = ours and root.level in (before, handler.level)  # else the application has changed it since
        handler.setLevel(_NUMBER[level])
        if ours:
            root.setLevel(_NUMBER[level])

    follow(level)
    root.addHandler(handler)
    try:
        yield follow
    finally:
        root.removeHandler(handler)
        if ours and root.level == handler.level:
            root.setLevel(before)


class _Routed(logging.Handler):
    """Makes a message of each record. Without the usual lock: `take` needs none, and a time limit that ended a job in
    the middle of it would leave it locked for ever."""

    def __init__(self, take: Callable[[dict[str, Any]], None]) -> None:
        super().__init__()
        self._take = take
        self._pid = os.getpid()
        self._here = threading.local()

    def createLock(self) -> None:
        self.lock = None

    def handle(self, record: logging.LogRecord) -> bool:
        """Called from any thread. Never raises but for a time limit that hits it, and takes nothing that it causes."""
        if os.getpid() != self._pid:  # a process that a task has forked: nobody writes a journal there
            last = logging.lastResort
            return bool(last and record.levelno >= last.level and last.handle(record))
        if getattr(self._here, "busy", False):  # a value's `__str__` logs
            return False
        try:
            self._here.busy = True
            self._take(_message(record))
        except TimeLimitExceeded:
            raise
        except Exception:
            return False
        finally:
            self._here.busy = False
        return True


def _message(record: logging.LogRecord) -> dict[str, Any]:
    """A record as a message. What `extra` gave it is among the fields."""
    said = {name: _plain(value) for name, value in vars(record).items() if name not in _OF_EVERY_RECORD}
    said |= {
        "timestamp": record.created,
        "message_type": "celery5:log",
        "level": _level(record.levelno),
        "logger": record.name,
        "message": _text(record),
    }
    job = current_job()
    if job is not None:
        said |= {"job": job.id, "task": job.task, "worker": job.worker}
        said |= {"trace": job.trace} if job.trace else {}
    below = _traceback(record)
    if below:
        said["traceback"] = below
    return said


def _level(number: int) -> Level:
    for name in reversed(_NUMBER):
        if number >= _NUMBER[name]:
            return name
    return "debug"


def _text(record: logging.LogRecord) -> str:
    """What was said. Words and values that do not fit each other are told of as they are, as `logging` does."""
    try:
        return record.getMessage()
    except TimeLimitExceeded:
        raise
    except Exception as error:
        return f"{_plain(record.msg)} (its values do not fit: {type(error).__name__})"


def _traceback(record: logging.LogRecord) -> str:
    found = record.exc_text or ""
    if record.exc_info and record.exc_info[1] is not None:
        found = "".join(format_exception(record.exc_info[1]))
    return "\n".join(filter(None, (found.rstrip(), record.stack_info)))


def _plain(value: Any) -> Any:
    """A value that nobody can change until it is written."""
    if isinstance(value, _PLAIN_VALUES):
        return value
    try:
        return repr(value)
    except TimeLimitExceeded:
        raise
    except Exception:
        return f"<{type(value).__name__}>"
