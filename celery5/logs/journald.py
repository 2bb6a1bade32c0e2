"""Write log messages to systemd's journal, by its native protocol, so that all fields can be searched.

`journalctl CELERY5_JOB=...` finds the lines of a job. Each message is one datagram, with `NAME=value` on a line,
or, for a value with newlines, its name, its length in eight bytes and the value. An entry that is too large for a
datagram is written to a sealed memory file, whose descriptor is passed instead.
"""

import errno
import fcntl
import os
import re
import select
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from celery5.logs.lines import Message, get_message_kind, make_unprintable_message, to_json

JOURNAL_SOCKET = "/run/systemd/journal/socket"
"""Where the journal listens."""
IDENTIFIER = "celery5"
"""What the lines are listed under: `journalctl -t celery5`."""
SEND_TIMEOUT = 0.5
"""Seconds that one batch waits for space in the socket of a journal that is busy."""
MAX_NAME_LENGTH = 64
"""Characters that the journal allows in the name of a field."""

_PRIORITY: Mapping[str, str] = {"debug": "7", "info": "6", "warning": "4", "error": "3"}
_RENAMED = {"message_type": "EVENT", "seconds": "DURATION"}
_NO_FIELDS = {"timestamp", "level"}
_NOT_IN_NAMES = re.compile(r"[^A-Z0-9_]")
_TOO_LARGE = (errno.EMSGSIZE, errno.ENOBUFS)
_SEALED = (
    getattr(fcntl, "F_SEAL_SHRINK", 2)
    | getattr(fcntl, "F_SEAL_GROW", 4)
    | getattr(fcntl, "F_SEAL_WRITE", 8)
    | getattr(fcntl, "F_SEAL_SEAL", 1)
)
_ADD_SEALS = getattr(fcntl, "F_ADD_SEALS", 1033)


class JournaldDestination:
    """A destination that writes entries to the journal at `path`. Raises OSError when there is none."""

    def __init__(self, path: str = JOURNAL_SOCKET) -> None:
        self._path = path
        self._socket = self._connect()

    def write(self, messages: Sequence[Message]) -> int:
        """Send messages in order; return how many were sent.

        Fewer than all are sent when the journal was busy for SEND_TIMEOUT, or went away.

        Raises:
            OSError: The journal is gone and no message was sent.
        """
        deadline = time.monotonic() + SEND_TIMEOUT
        for index, message in enumerate(messages):
            try:
                is_sent = self._send(format_entry(message), deadline)
            except OSError:
                if not index:
                    raise
                return index  # the caller sends the rest again, which raises then
            if not is_sent:
                return index
        return len(messages)

    def close(self) -> None:
        """Close the socket. The next `write` opens a new one."""
        self._socket.close()

    def _connect(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            connection.setblocking(False)
            connection.connect(self._path)
        except BaseException:
            connection.close()
            raise
        return connection

    def _send(self, data: bytes, deadline: float) -> bool:
        """Send one entry; return False when there was no space for it until `deadline`.

        A restarted journal has a new socket of the same name, so connect again once.
        """
        try:
            return self._send_datagram(data, deadline)
        except OSError as error:
            if error.errno in _TOO_LARGE:
                return self._send_file(data, deadline)
        self._socket.close()
        self._socket = self._connect()
        return self._send_datagram(data, deadline)

    def _send_datagram(self, data: bytes, deadline: float) -> bool:
        return self._retry_until(lambda: self._socket.send(data), deadline)

    def _send_file(self, data: bytes, deadline: float) -> bool:
        """Pass a sealed memory file: it cannot be changed any more, so the journal may map it."""
        file = os.memfd_create(IDENTIFIER, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            with os.fdopen(os.dup(file), "wb") as writer:
                writer.write(data)
            fcntl.fcntl(file, _ADD_SEALS, _SEALED)
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", file))]
            return self._retry_until(lambda: self._socket.sendmsg([], rights), deadline)
        finally:
            os.close(file)

    def _retry_until(self, send: Callable[[], int], deadline: float) -> bool:
        while True:
            try:
                send()
                return True
            except BlockingIOError:
                timeout = deadline - time.monotonic()
                if timeout <= 0:
                    return False
            poll = select.poll()
            poll.register(self._socket, select.POLLOUT)
            poll.poll(min(timeout, 0.05) * 1000)


def format_entry(message: Message) -> bytes:
    """Return a message in the journal's format. If it cannot be formatted, return an entry that reports this."""
    try:
        return _entry(message)
    except BaseException as error:  # values are objects of user code
        return _entry(make_unprintable_message(message, error))


def _entry(message: Message) -> bytes:
    level = str(message.get("level", "info"))
    fields = [
        ("MESSAGE", _make_sentence(message)),
        ("PRIORITY", _PRIORITY.get(level, "6")),
        ("SYSLOG_IDENTIFIER", IDENTIFIER),
        ("SYSLOG_PID", str(os.getpid())),
    ]
    custom_fields: dict[str, str] = {}
    for name, value in message.items():
        if name in _NO_FIELDS or value is None:
            continue
        field = _name(_RENAMED.get(name, str(name)))
        # A user's field named JOB or task-uuid must not replace ours, which has the plain name.
        if field not in custom_fields or _is_plain(str(name)):
            custom_fields[field] = _value(name, value)
    fields += custom_fields.items()
    return b"".join([_field(name, value) for name, value in fields])


def _name(name: str) -> str:
    """Return the journal's name of a field: upper-case letters, digits and underscores, with the prefix `CELERY5_`."""
    return ("CELERY5_" + _NOT_IN_NAMES.sub("_", name.upper()))[:MAX_NAME_LENGTH]


def _is_plain(name: str) -> bool:
    return name == name.lower() and not _NOT_IN_NAMES.search(name.upper())


def _value(name: str, value: Any) -> str:
    if name == "task_level" and isinstance(value, list):
        # The position in the action, in the one-line form of eliot.
        return "".join(f"/{part}" for part in cast("list[object]", value))
    if isinstance(value, str):
        return value
    return to_json(value)


def _field(name: str, value: str) -> bytes:
    data = value.encode("utf-8", "backslashreplace")
    if b"\n" in data:
        return b"%b\n%b%b\n" % (name.encode(), struct.pack("<Q", len(data)), data)
    return b"%b=%b\n" % (name.encode(), data)


def _make_sentence(message: Message) -> str:
    """Return what `journalctl` shows: how a job ended, the text of a log record, else the event and its fields."""
    kind = get_message_kind(message).removeprefix("celery5:")
    if kind == "log":
        return f"{message.get('logger')}: {message.get('message')}{_format_traceback(message)}"
    if kind == "job":
        summary = f"{message.get('task')} {message.get('state')} in {message.get('seconds')} s"
        details = [f"{name}={message[name]}" for name in ("job", "attempt", "trace") if name in message]
        error = f": {message['error']}" if message.get("error") else ""
        return f"{summary} ({' '.join(details)}){error}{_format_traceback(message)}"
    return " ".join(
        [kind, *(f"{name}={value}" for name, value in message.items() if name not in _NOT_IN_SENTENCE)]
    )


def _format_traceback(message: Message) -> str:
    return "\n" + str(message["traceback"]).rstrip() if message.get("traceback") else ""


_NOT_IN_SENTENCE = {
    *_NO_FIELDS,
    "task_level",
    "message_type",
    "action_type",
    "action_status",
    "task_uuid",
    "worker",
    "traceback",
}
