"""Write log messages as lines to a stream: JSON objects, or lines for people."""

import fcntl
import json
import os
import sys
import threading
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from textwrap import indent
from typing import Any, Literal, TextIO, cast

import msgspec

from celery5.protocol.masking import escape_json, escape_text

Message = dict[str, Any]
"""One message, as eliot passes it on: `message_type`, `level`, `timestamp`, and fields of its own."""


class JobLine(msgspec.Struct, gc=False, omit_defaults=True):
    """The message of a job that has ended with nothing unusual: nearly all that a worker logs.

    A dict would take three times the memory, which is cold again when the log's thread reads it, and keep the garbage
    collector busy: together two thirds of what logging costs.
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
    run: str = ""


PROCESS = "celery5:process"
"""The type of the eliot action that lasts as long as a process."""
MAX_PART = 64 * 1024
"""Characters of a line that has not ended that wait for its end."""
_ENCODER = msgspec.json.Encoder(enc_hook=str)
_MULTILINE_FIELDS = ("traceback", "stack")
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
    *_MULTILINE_FIELDS,
}
_HIDDEN_OF_LOG = {*_HIDDEN, "logger", "message"}
_REASON_FIELDS = {"exception", "reason"}
"""The fields in which eliot says why an action has failed."""
_COLOURS: Mapping[str, str] = {"debug": "\x1b[2m", "warning": "\x1b[33m", "error": "\x1b[31m"}
_PLAIN = "\x1b[0m"


class LineWriter:
    """A destination that writes each message as a line on `stream`.

    Lines for people name the worker, or the `process` where a message has no worker. Where such lines go where
    `stderr` leads, the line that a process has failed does not say why: the last line on stderr does.
    """

    def __init__(
        self,
        stream: TextIO,
        *,
        form: Literal["json", "console"] = "json",
        process: str = "",
        stderr: TextIO | None = None,
    ) -> None:
        self._stream = stream
        self._is_beside_stderr = stderr is not None and _is_same_file(stream, stderr)
        self._form = form
        self._process = process
        self._encoding = stream.encoding or "utf-8"
        self._coloured = stream.isatty() and not os.environ.get("NO_COLOR")

    @property
    def accepts_job_lines(self) -> bool:
        """Return whether it takes a JobLine as it is, as well as a dict."""
        return self._form == "json"

    def write(self, messages: Sequence[Message | JobLine]) -> int:
        """Write all messages, however long that takes. Raises OSError or ValueError when the stream is gone."""
        text = self._format_batch(messages)
        with _exclusive(self._stream):
            self._stream.write(text)
            self._stream.flush()
        return len(messages)

    def _format_batch(self, batch: Sequence[Message | JobLine]) -> str:
        """Return the lines of a batch, with escapes for what the stream's encoding does not have."""
        try:
            if self._form != "json":
                raise ValueError("lines for people are made one by one")
            text = _ENCODER.encode_lines(batch).decode()
        except BaseException:  # values of user code, with methods of their own
            text = "".join([self._format_safely(to_message(message)) for message in batch])
        if text.isascii():
            return text
        if self._form == "json":
            text = escape_json(text)
        return text.encode(self._encoding, "backslashreplace").decode(self._encoding)

    def _format_safely(self, message: Message) -> str:
        """Return one line; for a message that cannot be formatted, a line that says so."""
        try:
            return self._format(message)
        except BaseException as error:  # values of user code, with methods of their own
            return self._format(make_unprintable_message(message, error))

    def _format(self, message: Message) -> str:
        if self._form != "console":
            return to_json(message) + "\n"
        if self._is_beside_stderr and _is_process_end(message):
            message = {name: value for name, value in message.items() if name not in _REASON_FIELDS}
        return _console(message, self._coloured, self._process)


def _is_same_file(one: TextIO, other: TextIO) -> bool:
    """Return whether two streams lead to the same file, pipe or terminal."""
    try:
        return os.path.samestat(os.fstat(one.fileno()), os.fstat(other.fileno()))
    except (OSError, ValueError, AttributeError):  # closed, or no file
        return False


def _is_process_end(message: Message) -> bool:
    """Return whether a message is the end of the action of a whole process."""
    return message.get("action_type") == PROCESS and message.get("action_status") != "started"


class WholeLines:
    """Stands for a stream to which code prints: writes whole lines, so that none is split by a line of the log.

    `print` writes its values, separators and the end one by one, and another thread may write in between. What a thread
    has written of a line waits until the line ends, or has `MAX_PART` characters, or the thread's stream is closed.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._parts = threading.local()

    def write(self, text: str, /) -> int:
        """Keep the text until its line ends."""
        part: str = getattr(self._parts, "text", "") + text
        whole, newline, rest = part.rpartition("\n")
        if len(rest) > MAX_PART:
            whole, newline, rest = part, "\n", ""
        self._parts.text = rest
        if newline:
            self.write_whole(whole + newline)
        return len(text)

    def write_whole(self, text: str, /) -> None:
        """Write lines that have ended."""
        self._stream.write(text)
        if getattr(self._stream, "line_buffering", False):
            self._stream.flush()

    def flush(self) -> None:
        """Write what is whole. A line that has not ended waits for its end."""
        self._stream.flush()

    def end_line(self) -> None:
        """Write the line that this thread has begun."""
        if getattr(self._parts, "text", ""):
            self.write("\n")

    def writelines(self, lines: Iterable[str], /) -> None:
        """Write each of the texts."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def whole_lines() -> Generator[None, None, None]:
    """Have what is printed in this block come in whole lines on stdout, where the lines of the log go, too."""
    stream = sys.stdout
    stand_in = WholeLines(stream)
    sys.stdout = cast("TextIO", stand_in)
    try:
        yield
    finally:
        stand_in.end_line()
        if cast("object", sys.stdout) is stand_in:
            sys.stdout = stream


@contextmanager
def _exclusive(stream: TextIO) -> Generator[None, None, None]:
    """Lock the stream: several processes that write to one pipe would break each other's lines."""
    try:
        number = stream.fileno()
        fcntl.lockf(number, fcntl.LOCK_EX)
    except (OSError, ValueError):  # no file, or one that cannot be locked
        yield
        return
    try:
        yield
    finally:
        with suppress(OSError):
            fcntl.lockf(number, fcntl.LOCK_UN)


def to_message(line: Message | JobLine) -> Message:
    """Return a line as a dict."""
    if not isinstance(line, JobLine):
        return line
    message = msgspec.structs.asdict(line)
    message["task_level"] = list(line.task_level)
    for name in ("trace", "run"):
        if not message[name]:
            del message[name]
    return message


def describe_action(message: Message) -> Message:
    """Return a message with `message_type` and `level`, which eliot does not give the start and the end of an action.

    That a process has failed is an error; that any other action has failed is a warning.
    """
    status, level = message.get("action_status"), "info"
    if status == "failed":
        level = "error" if _is_process_end(message) else "warning"
    kind = f"{message.get('action_type')}:{status}" if status else "eliot"
    return {"message_type": kind, "level": level, **message}


def make_dropped_message(count: int, worker: str) -> Message:
    """Return the message that this many others were lost."""
    return {
        "worker": worker,
        "message_type": "celery5:log:dropped",
        "count": count,
        "timestamp": time.time(),
        "level": "warning",
    }


def make_unprintable_message(message: Message, error: BaseException) -> Message:
    """Return what is left of a message with a value that cannot be formatted: the names of its fields."""
    kept = {name: message.get(name) for name in ("worker", "timestamp", "task_uuid", "task_level", "level")}
    return {
        **kept,
        "message_type": "celery5:log:format-failed",
        "of": ascii(get_message_kind(message)),
        "fields": ascii(sorted(map(str, message))),
        "error": type(error).__name__,
    }


def get_message_kind(message: Message) -> str:
    """Return the type of a message, or the type and the state of its action."""
    return str(message.get("message_type") or f"{message.get('action_type')} {message.get('action_status')}")


def to_json(value: object) -> str:
    """Return a value as JSON on one line. Raises what the methods of the user's values raise."""
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
    name = str(message.get("worker") or process)
    logged_at = datetime.fromtimestamp(message.get("timestamp", 0.0), UTC)
    time_text = f"{logged_at.strftime('%Y-%m-%d %H:%M:%S.%f')[:-3]}Z"  # as all commands show times
    kind, level = get_message_kind(message), str(message.get("level", "info"))
    if kind == "celery5:log":  # from the standard library: its text first
        text = escape_text(str(message.get("message")), keep="\n\t").replace("\n", "\n    ")
        kind, shown = (
            escape_text(str(message.get("logger"))),
            "  ".join([text, *_fields(message, _HIDDEN_OF_LOG)]),
        )
    else:
        shown = "  ".join(_fields(message, _HIDDEN))
    kind, level, name = escape_text(kind), escape_text(level), escape_text(name)
    colour = _COLOURS.get(level, "") if coloured else ""
    head = f"{time_text} {colour}{level:7}{colour and _PLAIN}{name and f' {name}'}"
    blocks = [
        escape_text(str(message[field]).rstrip(), keep="\n\t")
        for field in _MULTILINE_FIELDS
        if message.get(field)
    ]
    return "\n".join(
        [f"{head} {kind.removeprefix('celery5:'):16} {shown}", *[indent(text, "    ") for text in blocks], ""]
    )
