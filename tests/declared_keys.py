"""Watch which keys scripts touch: each must be declared, or Redis Cluster cannot tell where a script runs."""

import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import redis

_LINE = re.compile(rb'\+[\d.]+ \[\d+ (\S+)\] (".*")\r?$')
_ARGUMENT = re.compile(rb'"((?:[^"\\]|\\.)*)"')
_SCRIPT_COMMANDS = {b"EVALSHA", b"EVAL", b"EVALSHA_RO", b"EVAL_RO"}
_STREAM_READS = {b"XREAD", b"XREADGROUP"}


@contextmanager
def only_declared_keys(url: str) -> Iterator[None]:
    """Read MONITOR of a server while the block runs.

    Args:
        url: The server's URL.

    Raises:
        AssertionError: At the end, if a script touched a key that is none of its KEYS and begins with none of them.
    """
    with redis.Redis.from_url(url) as client, _connect(url) as connection:
        positions = _read_key_positions(client)
        lines: list[bytes] = []
        connection.sendall(b"MONITOR\r\n")
        reader = threading.Thread(target=_collect, args=(connection, lines), daemon=True)
        reader.start()
        try:
            yield
        finally:
            client.echo("the end of the block")
            reader.join(30)
    undeclared = find_undeclared(lines, positions)
    assert not undeclared, f"scripts touched keys that are not declared: {sorted(undeclared)[:10]}"


def find_undeclared(lines: list[bytes], positions: dict[bytes, tuple[int, int, int]]) -> set[tuple[str, str]]:
    """Find the keys that scripts touched without declaring them or a prefix of theirs.

    Args:
        lines: What MONITOR printed. The line of a script stands before those of its commands.
        positions: For each command where its keys are: the first, the last (negative: from the end), and the step.

    Returns:
        The command and the key of each.
    """
    declared: list[bytes] = []
    undeclared: set[tuple[str, str]] = set()
    for line in lines:
        match = _LINE.match(line)
        if match is None:
            continue
        name, *arguments = _ARGUMENT.findall(match[2])
        command = name.upper()
        if command in _SCRIPT_COMMANDS:
            declared = arguments[2 : 2 + int(arguments[1])]
            assert all(declared), "an empty key is a prefix of everything"
        elif match[1] == b"lua":
            undeclared |= {
                (command.decode(), key.decode())
                for key in _select_keys(command, arguments, positions)
                if not key.startswith(tuple(declared))
            }
    return undeclared


def _connect(url: str) -> socket.socket:
    address = urlsplit(url)
    if address.scheme != "unix":
        return socket.create_connection((address.hostname, address.port), timeout=30)
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address.path)
    return connection


def _collect(connection: socket.socket, lines: list[bytes]) -> None:
    with connection.makefile("rb") as replies:
        for line in replies:
            if b'"the end of the block"' in line:
                return
            lines.append(line)


def _read_key_positions(client: Any) -> dict[bytes, tuple[int, int, int]]:
    client.response_callbacks.pop("COMMAND", None)  # the raw reply: each client shapes it in another way
    return {entry[0].upper(): (entry[3], entry[4], entry[5]) for entry in client.execute_command("COMMAND")}


def _select_keys(
    command: bytes, arguments: list[bytes], positions: dict[bytes, tuple[int, int, int]]
) -> list[bytes]:
    if command in _STREAM_READS:
        upper = [argument.upper() for argument in arguments]
        streams = arguments[upper.index(b"STREAMS") + 1 :]
        return streams[: len(streams) // 2]
    first, last, step = positions[command]
    if command in {b"XGROUP", b"XINFO", b"OBJECT", b"MEMORY"}:  # containers: the key follows the subcommand
        first, last, step = 2, 2, 1
    if first == 0:
        return []
    words = [command, *arguments]
    return words[first : (last if last >= 0 else len(words) + last) + 1 : step]
