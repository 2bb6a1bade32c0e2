"""The handshake of a new connection.

`HELLO` sends protocol, user, password and name at once; `SELECT` follows in the same write. Connections for commands
use RESP2, so that all drivers see the same shapes (RESP3 maps are dicts in one and lists in another). Connections for
pushed messages use RESP3, where pushed frames cannot be mistaken for replies.
"""

import re
from collections.abc import Sequence
from typing import Any, Literal, cast

import msgspec

from celery5.broker.call import Word
from celery5.broker.connection.exchange import ReplyError
from celery5.broker.endpoint import Endpoint, Role
from celery5.broker.topologies import ClusterFound, ServerFound
from celery5.broker.translate import translate_reply
from celery5.errors import BrokerReadOnly, BrokerReplied, BrokerTooOld, BrokerUnavailable, BrokerUnsupported

Resp = Literal[2, 3]

MIN_SERVER_VERSION = (6, 2)
"""Of Redis; every Valkey is new enough."""
_SHARDED_CHANNELS = (7, 0)

_UNSUPPORTED_MODES = {
    b"cluster": "is part of a Redis Cluster: write {cluster_url}, with more of its nodes after commas",
    b"sentinel": (
        "is a Sentinel, which keeps no data; name the server that it watches, or ask it for that: "
        "redis+sentinel://host:port/service"
    ),
}
"""What is wrong with a server, by the mode that its reply to HELLO says: a cluster would answer MOVED to most keys."""


class ServerHello(msgspec.Struct, frozen=True):
    """The server's reply to HELLO."""

    server: str  # redis or valkey
    version: str
    client_id: int  # the server's id of the connection

    @property
    def has_sharded_channels(self) -> bool:
        """Whether it knows SSUBSCRIBE, and the scripts on it publish by SPUBLISH: Redis from 7.0, and every Valkey."""
        return self.server != "redis" or _numbers(self.version) >= _SHARDED_CHANNELS


def build_hello(endpoint: Endpoint, *, resp: Resp, name: str) -> list[tuple[Word, ...]]:
    """Return the commands of the handshake."""
    login: tuple[Word, ...] = ()
    if endpoint.password is not None or endpoint.username is not None:
        login = ("AUTH", endpoint.username or "default", endpoint.password or "")
    commands: list[tuple[Word, ...]] = [("HELLO", resp, *login, "SETNAME", _client_name(name))]
    if endpoint.db:
        # Not for 0: a user's ACL may forbid SELECT.
        commands.append(("SELECT", endpoint.db))
    return commands


def parse_server_hello(answers: Sequence[Any], endpoint: Endpoint) -> ServerHello:
    """Read the replies to `build_hello`.

    Args:
        answers: The replies.
        endpoint: The server, and what it must be.

    Raises:
        ClusterFound: It is part of a Redis Cluster, to which the URL may lead.
        ServerFound: It is a single server, in the place of a cluster that was found.
        BrokerUnsupported: It is part of a Redis Cluster, and must not be, or the other way round; or a Sentinel.
        BrokerReadOnly: It is a replica, and must be a primary.
        BrokerUnavailable: It is no Sentinel, and must be one.
        BrokerTooOld: Its version is not supported.
        BrokerError: What an error reply says.
    """
    where, role = endpoint.masked_url, endpoint.role
    hello = answers[0]
    mode = _read_fact(hello, b"mode")
    if role == "sentinel" and mode in (b"standalone", b"cluster"):
        raise BrokerUnavailable(f"broker {where} is no Sentinel")
    # Before the other replies: in a cluster each SELECT fails, and that error does not tell why.
    _check_mode(mode, endpoint)
    if isinstance(hello, ReplyError) and "unknown command" in str(hello):
        raise BrokerTooOld(
            f"broker {where} does not know HELLO, so it is older than {_dotted(MIN_SERVER_VERSION)}; upgrade it"
        )
    for answer in answers:
        if isinstance(answer, ReplyError):
            raise translate_reply(str(answer), where=where)
    if role == "primary" and _read_fact(hello, b"role") in (b"replica", b"slave"):
        raise BrokerReadOnly(
            f"broker {where} is a replica: a failover is under way, or the sentinels asked know no newer primary"
        )
    facts: dict[bytes, Any]
    try:
        facts = _read_facts(hello)
        greeting = ServerHello(facts[b"server"].decode(), facts[b"version"].decode(), int(facts[b"id"]))
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise BrokerReplied(f"broker {where} gave no sensible answer to HELLO", code="HELLO") from error
    if greeting.server == "redis" and _numbers(greeting.version) < MIN_SERVER_VERSION:
        raise BrokerTooOld(
            f"broker {where}: server {greeting.version} is older than {_dotted(MIN_SERVER_VERSION)}; upgrade the server"
        )
    return greeting


def _check_mode(mode: bytes, endpoint: Endpoint) -> None:
    """Raise BrokerUnsupported, ClusterFound or ServerFound for a server that is not what it must be."""
    unsupported = _find_wrong_mode(mode, endpoint.role)
    if unsupported is None:
        return
    named = endpoint.as_named()
    if mode == b"standalone" and named.masked_url == endpoint.found_through:
        raise ServerFound(
            f"broker {named.masked_url} is a single server by now, where this process had found a Redis Cluster; "
            "try again: it is used from now on",
            named,
        )
    message = f"broker {endpoint.masked_url} {unsupported.format(cluster_url=endpoint.masked_cluster_url)}"
    if mode == b"cluster" and endpoint.may_be_cluster:
        raise ClusterFound(message, endpoint)
    raise BrokerUnsupported(message)


def _find_wrong_mode(mode: bytes, role: Role) -> str | None:
    """Return what is wrong with a server of this mode that must be something else; None if nothing is."""
    if role == "node":
        if mode == b"standalone":
            return "is no part of a Redis Cluster; name it with redis:// or rediss://"
        return None if mode == b"cluster" else _UNSUPPORTED_MODES.get(mode)
    return None if role == "sentinel" else _UNSUPPORTED_MODES.get(mode)


def _read_facts(hello: Any) -> dict[bytes, Any]:
    """Return the reply to HELLO as a mapping: RESP2 has a flat list in its place."""
    if isinstance(hello, dict):
        return cast("dict[bytes, Any]", hello)
    return dict(zip(hello[::2], hello[1::2], strict=False))


def _read_fact(hello: Any, name: bytes) -> bytes:
    """Return a word of the reply to HELLO; empty if the reply does not say it, as that of a proxy may not."""
    if not isinstance(hello, list | dict):
        return b""
    fact: Any = _read_facts(hello).get(name)
    return fact if isinstance(fact, bytes) else b""


def _client_name(name: str) -> str:
    return re.sub(r"[^!-~]", "-", name)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
