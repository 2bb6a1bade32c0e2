"""Handshake: the first words on a new connection, and what the server says of itself.

`HELLO` does it in one trip: protocol, user, password and name; `SELECT` follows in the same write. Command
links speak RESP2 so that every driver, Trio or not, sees the same shapes (a map would be a dict here and a
list there); a push link speaks RESP3, where pushed frames cannot be taken for replies.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from celery5.broker.call import Word
from celery5.broker.connection.exchange import ReplyError
from celery5.broker.endpoint import Endpoint
from celery5.broker.translate import translate_reply
from celery5.errors import BrokerReplied, BrokerTooOld

Resp = Literal[2, 3]

MIN_SERVER_VERSION = (6, 2)


@dataclass(frozen=True, slots=True)
class ServerHello:
    """What the server answered: `server` (redis, valkey), its `version`, and its handle for the connection."""

    server: str
    version: str
    client_id: int


def build_hello(endpoint: Endpoint, *, resp: Resp, name: str) -> list[tuple[Word, ...]]:
    """The commands of the handshake."""
    login: tuple[Word, ...] = ()
    if endpoint.password is not None or endpoint.username is not None:
        login = ("AUTH", endpoint.username or "default", endpoint.password or "")
    commands: list[tuple[Word, ...]] = [("HELLO", resp, *login, "SETNAME", _client_name(name))]
    if endpoint.db:
        # Only then: a user's ACL may well forbid it.
        commands.append(("SELECT", endpoint.db))
    return commands


def parse_server_hello(answers: Sequence[Any], *, where: str) -> ServerHello:
    """Read the answers to `greet`. Raises the translated error of a refusal, and `BrokerTooOld`."""
    hello = answers[0]
    if isinstance(hello, ReplyError) and "unknown command" in str(hello):
        raise BrokerTooOld(
            f"broker {where} does not know HELLO, so it is older than {_dotted(MIN_SERVER_VERSION)}; upgrade it"
        )
    for answer in answers:
        if isinstance(answer, ReplyError):
            raise translate_reply(str(answer), where=where)
    facts: dict[bytes, Any]
    try:
        facts = cast("Any", hello) if isinstance(hello, dict) else _pairs(cast("list[Any]", hello))
        greeting = ServerHello(facts[b"server"].decode(), facts[b"version"].decode(), int(facts[b"id"]))
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise BrokerReplied(f"broker {where} gave no sensible answer to HELLO", code="HELLO") from error
    if greeting.server == "redis" and _numbers(greeting.version) < MIN_SERVER_VERSION:
        raise BrokerTooOld(
            f"broker {where}: server {greeting.version} is older than {_dotted(MIN_SERVER_VERSION)}; upgrade the server"
        )
    return greeting


def _pairs(flat: list[Any]) -> dict[bytes, Any]:
    return dict(zip(flat[::2], flat[1::2], strict=False))


def _client_name(name: str) -> str:
    return re.sub(r"[^!-~]", "-", name)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
