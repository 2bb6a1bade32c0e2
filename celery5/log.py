"""Log: structured messages through eliot, to a bounded buffer that a thread writes out.

Floor: domain. Reads: NO_COLOR. Writes: JSON lines (or lines for people) on the stream it is given.

One completion message for each job inside a worker-long action; never a write on the event loop; what does not fit
the buffer is shed and counted. No other module imports eliot.
"""

import fcntl
import json
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from textwrap import indent
from typing import Any, Literal, Self, TextIO, cast

import eliot
import msgspec

Format = Literal["json", "console"]
Level = Literal["debug", "info", "warning", "error"]

_RANK: Mapping[str, int] = {"debug": 10, "info": 20, "warning": 30, "error": 40}
_ENCODER = msgspec.json.Encoder(enc_hook=str)
_HIDDEN = {
    "timestamp",
    "task_uuid",
    "task_level",
    "message_type",
    "action_type",
    "action_status",
    "level",
    "worker",
    "traceback",
}
_SAID = {*_HIDDEN, "logger", "message"}
_COLOURS: Mapping[str, str] = {"debug": "\x1b[2m", "warning": "\x1b[33m", "error": "\x1b[31m"}
_PLAIN = "\x1b[0m"


class Journal:
    """An eliot destination: keeps messages in a bounded buffer, which a thread of its own writes out in batches.

    `named`: lines for people say which worker they are from, as JSON lines always do.
    """

    def __init__(
        self,
        stream: TextIO | None = None,
        *,
        form: Format = "json",
        level: Level = "info",
        capacity: int = 20_000,
        named: bool = False,
    ) -> None:
        self._named = named
        self._stream = stream or sys.stdout
        self._encoding = self._stream.encoding or "utf-8"
        self._form = form
        self._coloured = self._stream.isatty() and not os.environ.get("NO_COLOR")
        self._least = _RANK[level]
        self._buffer: deque[dict[str, Any]] = deque()
        self._capacity = capacity
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._counting = threading.Lock()
        self._shed = 0

    @property
    def shed(self) -> int:
        """How many messages were lost and not told of yet."""
        return self._shed

    def __call__(self, message: dict[str, Any]) -> None:
        """Take one message; called by eliot, from any thread."""
        if _RANK.get(message.get("level", "info"), 20) < self._least:
            return
        if len(self._buffer) >= self._capacity:
            with self._counting:
                self._shed += 1
        else:
            self._buffer.append(message)

    def __enter__(self) -> Self:
        """Install it for this process."""
        eliot.add_destinations(self)
        self._stop.clear()
        self._thread = threading.Thread(target=self._write_on, name="celery5-log", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        """Take it out again and write what is left."""
        eliot.remove_destination(self)
        self._stop.set()
        if self._thread is not None:
            self._thread.join(2.0)

    def _write_on(self) -> None:
        while not self._stop.wait(0.05):
            self._flush()
        self._flush()

    def _flush(self) -> None:
        """Write what is there, 256 messages at a time. A stream that is gone costs the messages, never the process."""
        while self._buffer or self._shed:
            batch = [self._buffer.popleft() for _ in range(min(256, len(self._buffer)))]
            with self._counting:
                shed, self._shed = self._shed, 0
            text = self._text([*batch, _shed(shed)] if shed else batch)
            try:
                with _turn(self._stream):
                    self._stream.write(text)
                    self._stream.flush()
            except (OSError, ValueError):
                with self._counting:
                    self._shed += shed + len(batch)
                return

    def _text(self, batch: list[dict[str, Any]]) -> str:
        """The lines of a batch. The stream's encoding takes every one of them."""
        try:
            if self._form != "json":
                raise ValueError("lines for people are made one by one")
            text = _ENCODER.encode_lines(batch).decode()
        except Exception:  # values of user code, with methods of their own
            text = "".join([self._shown(message) for message in batch])
        if text.isascii():
            return text
        return text.encode(self._encoding, "backslashreplace").decode(self._encoding)

    def _shown(self, message: dict[str, Any]) -> str:
        """One line. A message that cannot be shown is told of in its place."""
        try:
            return self._line(message)
        except Exception as error:  # values of user code, with methods of their own
            return self._line(_unshowable(message, error))

    def _line(self, message: dict[str, Any]) -> str:
        return _console(message, self._coloured, self._named) if self._form == "console" else _json(message)


class Log:
    """What one process writes: all inside one action, so that every line says which process it is from."""

    def __init__(self, *, worker: str, app: str) -> None:
        self._worker = worker
        self._action = eliot.start_action(action_type="celery5:worker", worker=worker, app=app)
        self._write = self._action.log
        # Jobs are written on a branch of the action that is reserved for them: counting along it costs a third of
        # the action's own bookkeeping.
        self._uuid, _, branch = self._action.serialize_task_id().decode().partition("@")
        self._branch = [int(part) for part in branch.split("/") if part]
        self._jobs = 0
        self._write_job = eliot.Logger().write

    def named(self, worker: str) -> None:
        """From here on this is the worker's name: each of its incarnations has another."""
        self._worker = worker

    def event(self, name: str, level: Level = "info", /, **fields: Any) -> None:
        """Something happened to the process: `celery5:<name>`."""
        fields.setdefault("worker", self._worker)
        self._write(message_type=f"celery5:{name}", level=level, **fields)

    def job(self, level: Level, **fields: Any) -> None:
        """A job has ended here: the one message of its run."""
        self._jobs += 1
        fields["worker"] = self._worker
        fields["timestamp"] = time.time()
        fields["level"] = level
        fields["message_type"] = "celery5:job"
        fields["task_uuid"] = self._uuid
        fields["task_level"] = [*self._branch, self._jobs]
        self._write_job(fields)

    def finish(self, error: BaseException | None = None) -> None:
        """The process ends, by an `error` if there is one; of a group its first."""
        first = error
        while isinstance(first, BaseExceptionGroup):
            first = cast("BaseExceptionGroup[BaseException]", first).exceptions[0]
        self._action.finish(first)


@contextmanager
def _turn(stream: TextIO) -> Generator[None, None, None]:
    """Have the stream to ourselves: several processes that write to one pipe would break each other's lines (F63)."""
    try:
        mine = stream.fileno()
        fcntl.lockf(mine, fcntl.LOCK_EX)
    except (OSError, ValueError):  # no file, or one that cannot be locked
        yield
        return
    try:
        yield
    finally:
        with suppress(OSError):
            fcntl.lockf(mine, fcntl.LOCK_UN)


def _shed(count: int) -> dict[str, Any]:
    return {
        "message_type": "celery5:log:shed",
        "count": count,
        "timestamp": time.time(),
        "level": "warning",
    }


def _unshowable(message: dict[str, Any], error: Exception) -> dict[str, Any]:
    """What is left of a message with a value that has no text. The names are ours and can be shown."""
    kept = {name: message.get(name) for name in ("timestamp", "task_uuid", "task_level", "level")}
    what = str(message.get("message_type") or message.get("action_type"))
    return {
        **kept,
        "message_type": "celery5:log:unshowable",
        "of": ascii(what),
        "fields": ascii(sorted(map(str, message))),
        "error": type(error).__name__,
    }


def _json(message: dict[str, Any]) -> str:
    try:
        return _ENCODER.encode(message).decode() + "\n"
    except ValueError:  # half of a surrogate pair, as in the name of a file: the standard library escapes it
        return json.dumps(message, default=str) + "\n"


def _fields(message: dict[str, Any], hidden: set[str]) -> list[str]:
    return [f"{name}={value}" for name, value in message.items() if name not in hidden]


def _console(message: dict[str, Any], coloured: bool, named: bool) -> str:
    """For people: when, how bad, what, and its fields; below them the traceback of a job that failed. With several
    processes (`named`) the worker is one of the fields."""
    also = {"worker"} if named else set[str]()
    at = datetime.fromtimestamp(message.get("timestamp", 0.0), UTC).astimezone()
    when = at.strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
    what = str(message.get("message_type") or f"{message.get('action_type')} {message.get('action_status')}")
    level = str(message.get("level", "info"))
    if what == "celery5:log":  # said by others: their words first
        text = str(message.get("message")).replace("\n", "\n    ")
        what, shown = str(message.get("logger")), "  ".join([text, *_fields(message, _SAID - also)])
    else:
        shown = "  ".join(_fields(message, _HIDDEN - also))
    colour = _COLOURS.get(level, "") if coloured else ""
    line = f"{when} {colour}{level:7}{colour and _PLAIN} {what.removeprefix('celery5:'):16} {shown}\n"
    return (
        line + indent(str(message.get("traceback") or "").rstrip(), "    ") + "\n" * ("traceback" in message)
    )
