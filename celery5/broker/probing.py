"""Probing: the trips with which `celery5 doctor` finds out what the broker is and permits.

Floor: broker. Reads: what the server says of itself; names of keys. Writes: a key of its own that lives for a moment.
"""

from contextlib import closing
from typing import Any

import msgspec

from celery5.broker.call import Call, Script, script_call
from celery5.broker.endpoint import Endpoint
from celery5.broker.socket_link import dial
from celery5.broker.timing import Timing
from celery5.broker.wire import ReplyError, pack_commands

PROBE_PERMISSIONS = Script.load("diagnosis/probe_permissions")

PARAMETERS = ("appendonly", "appendfsync", "save", "maxmemory-policy")


class PermissionProbe(msgspec.Struct, frozen=True):
    """How many commands were tried, and the server's words on each that the user may not."""

    tried: int
    refused: dict[str, str]


def get_server_info() -> Call[dict[str, str]]:
    """What the server says of itself."""
    return Call(("INFO",), _fields, repeatable=True)


def get_parameter(name: str) -> Call[str | None]:
    """One parameter of the server; None where it has none of that name."""
    return Call(("CONFIG", "GET", name), _parameter, repeatable=True)


def get_server_time() -> Call[float]:
    """The server's clock, in seconds since 1970."""
    return Call(("TIME",), lambda raw: int(raw[0]) + int(raw[1]) / 1_000_000, repeatable=True)


def probe_permissions(key: str, channel: str) -> Call[PermissionProbe]:
    """Try the commands that celery5 uses, on a key that nobody uses, which must not outlive the moment."""
    return script_call(PROBE_PERMISSIONS, (key,), (channel,), _attempted, repeatable=True)


def scan_keys(cursor: int, pattern: str, *, count: int) -> Call[tuple[int, list[str]]]:
    """Some keys that fit a pattern, and where to go on; 0 at the end."""
    return Call(("SCAN", cursor, "MATCH", pattern, "COUNT", count), _scanned, repeatable=True)


def get_ttl(key: str) -> Call[int]:
    """In ms; -1 for a key that stays, -2 for one that is gone."""
    return Call(("PTTL", key), int, repeatable=True)


def probe_unblock() -> Call[int]:
    """End the wait of a connection that there is not: whether that is permitted."""
    return Call(("CLIENT", "UNBLOCK", 0), int, repeatable=True)


def probe_subscribe(endpoint: Endpoint, channel: str, timing: Timing) -> str:
    """Subscribe to a channel for a moment, on a connection of its own; gives the server's words if that is refused."""
    with closing(dial(endpoint, timing, resp=2, name="celery5-doctor")) as link:
        link.send(pack_commands([("SUBSCRIBE", channel)]))
        answer = link.receive()
        return str(answer) if isinstance(answer, ReplyError) else ""


def _fields(raw: bytes) -> dict[str, str]:
    lines = raw.decode(errors="replace").splitlines()
    return dict(line.split(":", 1) for line in lines if ":" in line and not line.startswith("#"))


def _parameter(raw: Any) -> str | None:
    values: list[bytes] = list(raw)
    return values[1].decode(errors="replace") if len(values) > 1 else None


def _attempted(raw: Any) -> PermissionProbe:
    tried, *words = raw
    text = [each.decode(errors="replace").strip() for each in words]
    return PermissionProbe(int(tried), dict(zip(text[::2], text[1::2], strict=True)))


def _scanned(raw: Any) -> tuple[int, list[str]]:
    return int(raw[0]), [each.decode(errors="replace") for each in raw[1]]
