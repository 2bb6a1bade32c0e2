"""Watch which keys scripts touch: each must be declared, or Redis Cluster cannot tell where a script runs."""

import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from itertools import islice
from typing import Any
from urllib.parse import urlsplit

import redis

from celery5.protocol.hash_slots import get_key_slot

_ARGUMENT = re.compile(rb'"((?:[^"\\]|\\.)*)"')
_SCRIPT_COMMANDS = {b"EVALSHA", b"EVAL", b"EVALSHA_RO", b"EVAL_RO"}
_STREAM_READS = {b"XREAD", b"XREADGROUP"}
_END = b"the end of the block"

KeyPositions = dict[bytes, tuple[int, int, int]]
"""For each command where its keys are: the first, the last (negative: from the end), and the step."""


@contextmanager
def only_declared_keys(url: str) -> Iterator[None]:
    """Have MONITOR of a server while the block runs, and read it then.

    The server keeps what it prints until then: a thread that reads it all the time takes as much CPU as many a test.

    Args:
        url: The server's URL.

    Raises:
        AssertionError: At the end, if a script touched a key that is none of its KEYS and begins with none of them, or
            was called with keys of several slots of a Redis Cluster.
    """
    with redis.Redis.from_url(url) as client, _connect(url) as connection:
        positions = _read_key_positions(url)
        connection.sendall(b"MONITOR\r\n")
        try:
            yield
        finally:
            client.echo(_END)
            lines = _read_to_end(connection)
    undeclared = find_undeclared(lines, positions)
    assert not undeclared, f"scripts touched keys that are not declared: {sorted(undeclared)[:10]}"


def find_undeclared(lines: list[bytes], positions: KeyPositions) -> set[tuple[str, str]]:
    """Find the keys that scripts touched without declaring them or a prefix of theirs.

    Args:
        lines: What MONITOR printed. The line of a script stands before those of its commands.
        positions: Where the keys of each command are.

    Returns:
        The command and the key of each. A key that begins with a declared one has its hash tag, and so its slot.
    """
    declared: tuple[bytes, ...] = ()
    undeclared: set[tuple[str, str]] = set()
    for line in lines:
        head, _, text = line.partition(b"] ")  # +1700000000.123456 [0 lua] "SET" "key" "value"
        command = text[1 : text.find(b'"', 1)].upper()
        if command in _SCRIPT_COMMANDS:
            count = int(_parse_words(text, 3)[2])
            declared = tuple(_parse_words(text, 3 + count)[3:])
            assert all(declared), "an empty key is a prefix of everything"
            if len(set(map(get_key_slot, declared))) > 1:
                undeclared.add(("keys of several slots", b" ".join(declared).decode()[:500]))
        elif head.endswith(b" lua"):
            undeclared |= {
                (command.decode(), key.decode())
                for key in _select_keys(command, text, positions)
                if not key.startswith(declared)
            }
    return undeclared


def _parse_words(text: bytes, count: int | None = None) -> list[bytes]:
    """Return the first `count` words of a line, or all of them: values of a megabyte are not to be parsed in vain."""
    return [match[1] for match in islice(_ARGUMENT.finditer(text), count)]


def _connect(url: str) -> socket.socket:
    address = urlsplit(url)
    if address.scheme != "unix":
        return socket.create_connection((address.hostname, address.port), timeout=30)
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(30)
    connection.connect(address.path)
    return connection


def _read_to_end(connection: socket.socket) -> list[bytes]:
    """Return the lines until the end of the block, or until a test has had the connection closed."""
    received = bytearray()
    while chunk := connection.recv(1 << 20):
        received += chunk
        if _END in received[-len(chunk) - len(_END) :]:
            break
    return bytes(received).splitlines()


@cache
def _read_key_positions(url: str) -> KeyPositions:
    with redis.Redis.from_url(url) as opened:
        client: Any = opened
        client.response_callbacks.pop("COMMAND", None)  # the raw reply: each client shapes it in another way
        entries = client.execute_command("COMMAND")
    return {entry[0].upper(): (entry[3], entry[4], entry[5]) for entry in entries}


def _select_keys(command: bytes, text: bytes, positions: KeyPositions) -> list[bytes]:
    if command in _STREAM_READS:
        arguments = _parse_words(text)[1:]
        upper = [argument.upper() for argument in arguments]
        streams = arguments[upper.index(b"STREAMS") + 1 :]
        return streams[: len(streams) // 2]
    first, last, step = positions[command]
    if command in {b"XGROUP", b"XINFO", b"OBJECT", b"MEMORY"}:  # containers: the key follows the subcommand
        first, last, step = 2, 2, 1
    if first == 0:
        return []
    words = _parse_words(text, last + 1 if last >= 0 else None)
    return words[first : (last if last >= 0 else len(words) + last) + 1 : step]
