"""Log lines: messages as lines of text on a stream: a JSON object each, or lines for people."""

import fcntl
import json
import os
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from textwrap import indent
from typing import Any, Literal, TextIO

import msgspec

from celery5.protocol.masking import escape_json, escape_text

Message = dict[str, Any]
"""One message, as eliot hands it on: `message_type`, `level`, `timestamp`, and fields of its own."""


class JobLine(msgspec.Struct, gc=False, omit_defaults=True):
    """The message of a job of which there is no more to say than that it has ended: nearly all that a worker writes.

    As a dict it would take three times the memory, which is cold again when the log's thread comes to it, and keep the
    garbage collector busy: together two thirds of what the log costs.
    """

    job: str
    task: str
    queue: str
    state: str
    attempt: int
    seconds: float
    worker: str
    timestamp: float
    level: str
    message_type: str
    task_uuid: str
    task_level: tuple[int, ...]
    trace: str = ""


_ENCODER = msgspec.json.Encoder(enc_hook=str)
_BELOW = ("traceback", "stack")
"""Fields of several lines: they are shown below the line."""
_HIDDEN = {
    "timestamp",
    "task_uuid",
    "task_level",
    "message_type",
    "action_type",
    "action_status",
    "level",
    "worker",
    *_BELOW,
}
_SAID = {*_HIDDEN, "logger", "message"}
_COLOURS: Mapping[str, str] = {"debug": "\x1b[2m", "warning": "\x1b[33m", "error": "\x1b[31m"}
_PLAIN = "\x1b[0m"


class LineWriter:
    """An outlet: every message is a line on `stream`. Lines for people begin with who says them: the worker, or the
    `process` where a message names none."""

    def __init__(
        self, stream: TextIO, *, form: Literal["json", "console"] = "json", process: str = ""
    ) -> None:
        self._stream = stream
        self._form = form
        self._process = process
        self._encoding = stream.encoding or "utf-8"
        self._coloured = stream.isatty() and not os.environ.get("NO_COLOR")

    @property
    def accepts_job_lines(self) -> bool:
        """Whether it makes lines of them as they are, as well as of dicts."""
        return self._form == "json"

    def write(self, messages: Sequence[Message | JobLine]) -> int:
        """Write them all, however long that takes. Raises OSError or ValueError when the stream is gone."""
        text = self._text(messages)
        with _turn(self._stream):
            self._stream.write(text)
            self._stream.flush()
        return len(messages)

    def _text(self, batch: Sequence[Message | JobLine]) -> str:
        """The lines of a batch. The stream's encoding takes every one of them."""
        try:
            if self._form != "json":
                raise ValueError("lines for people are made one by one")
            text = _ENCODER.encode_lines(batch).decode()
        except Exception:  # values of user code, with methods of their own
            text = "".join([self._shown(to_message(message)) for message in batch])
        if text.isascii():
            return text
        if self._form == "json":
            text = escape_json(text)
        return text.encode(self._encoding, "backslashreplace").decode(self._encoding)

    def _shown(self, message: Message) -> str:
        """One line. A message that cannot be shown is told of in its place."""
        try:
            return self._line(message)
        except Exception as error:  # values of user code, with methods of their own
            return self._line(make_unprintable_message(message, error))

    def _line(self, message: Message) -> str:
        return (
            _console(message, self._coloured, self._process)
            if self._form == "console"
            else to_json(message) + "\n"
        )


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


def to_message(line: Message | JobLine) -> Message:
    """What was said, as a dict."""
    if not isinstance(line, JobLine):
        return line
    said = msgspec.structs.asdict(line)
    said["task_level"] = list(line.task_level)
    if not line.trace:
        del said["trace"]
    return said


def make_dropped_message(count: int) -> Message:
    """The message that so many others were lost."""
    return {
        "message_type": "celery5:log:dropped",
        "count": count,
        "timestamp": time.time(),
        "level": "warning",
    }


def make_unprintable_message(message: Message, error: Exception) -> Message:
    """What is left of a message with a value that has no text. The names are ours and can be shown."""
    kept = {name: message.get(name) for name in ("timestamp", "task_uuid", "task_level", "level")}
    return {
        **kept,
        "message_type": "celery5:log:format-failed",
        "of": ascii(get_message_kind(message)),
        "fields": ascii(sorted(map(str, message))),
        "error": type(error).__name__,
    }


def get_message_kind(message: Message) -> str:
    """What a message is: its type, or the type and the state of its action."""
    return str(message.get("message_type") or f"{message.get('action_type')} {message.get('action_status')}")


def to_json(value: object) -> str:
    """A value as JSON on one line. Raises what the methods of the user's values raise."""
    try:
        return _ENCODER.encode(value).decode()
    except ValueError:  # half of a surrogate pair, as in the name of a file: the standard library escapes it
        return json.dumps(value, default=str)


def _fields(message: Message, hidden: set[str]) -> list[str]:
    """Return the fields as `name=value`, each on one line."""
    return [
        f"{escape_text(str(name))}={escape_text(str(value))}"
        for name, value in message.items()
        if name not in hidden
    ]


def _console(message: Message, coloured: bool, process: str) -> str:
    """Return a line for people: time, level, process, event and its fields; below it a stack or a traceback."""
    who = str(message.get("worker") or process)
    at = datetime.fromtimestamp(message.get("timestamp", 0.0), UTC).astimezone()
    when = at.strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
    what, level = get_message_kind(message), str(message.get("level", "info"))
    if what == "celery5:log":  # said by others: their words first
        text = escape_text(str(message.get("message")), keep="\n\t").replace("\n", "\n    ")
        what, shown = escape_text(str(message.get("logger"))), "  ".join([text, *_fields(message, _SAID)])
    else:
        shown = "  ".join(_fields(message, _HIDDEN))
    what, level, who = escape_text(what), escape_text(level), escape_text(who)
    colour = _COLOURS.get(level, "") if coloured else ""
    head = f"{when} {colour}{level:7}{colour and _PLAIN}{who and f' {who}'}"
    below = [escape_text(str(message[name]).rstrip(), keep="\n\t") for name in _BELOW if message.get(name)]
    return "\n".join(
        [f"{head} {what.removeprefix('celery5:'):16} {shown}", *[indent(text, "    ") for text in below], ""]
    )
