"""Onlookers: what a test sees and does from beside the drivers: conditions, settled jobs, the server's list of
clients."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import redis

from tests.pace import Pace


def until(condition: Callable[[], object], limit: float = 30.0) -> None:
    """Look again and again until `condition` holds. Fails after `limit` seconds."""
    end, pace = time.monotonic() + limit, Pace()
    while not pace.look(condition):
        assert time.monotonic() < end, "the condition did not come true in time"
        time.sleep(pace.pause)


def settle(client: "redis.Redis", key: str, document: bytes = b"done") -> None:
    """Store and announce a document as the settle script does."""
    client.set(key, document, px=60_000)
    publish(client, key, document)


def publish(client: "redis.Redis", channel: str, message: bytes) -> None:
    """Publish a message as scripts do: on a cluster from 7.0 only on the node that has the channel."""
    if isinstance(client, redis.RedisCluster):
        node: Any = client.get_node_from_key(channel)
        is_sharded = not str(node.redis_connection.info("server")["redis_version"]).startswith("6.")
        node.redis_connection.execute_command("SPUBLISH" if is_sharded else "PUBLISH", channel, message)
    else:
        client.publish(channel, message)


def listeners(client: "redis.Redis", key: str) -> int:
    """How many connections are subscribed to the channel."""
    if isinstance(client, redis.RedisCluster):
        nodes: list[Any] = client.get_primaries()
        return sum(_count_listeners(node.redis_connection, key) for node in nodes)
    return int(client.pubsub_numsub(key)[0][1])


def _count_listeners(node: "redis.Redis", key: str) -> int:
    of_all_nodes = int(node.pubsub_numsub(key)[0][1])
    try:
        return of_all_nodes + int(node.pubsub_shardnumsub(key)[0][1])
    except redis.ResponseError:  # older than 7.0
        return of_all_nodes


def clients(client: "redis.Redis", **facts: str) -> list[dict[str, Any]]:
    """The server's clients with these entries in CLIENT LIST."""
    every: list[dict[str, Any]] = client.client_list()
    return [line for line in every if all(line.get(name) == fact for name, fact in facts.items())]


def blocked(client: "redis.Redis") -> list[dict[str, Any]]:
    """The server's clients that are in a blocking command."""
    return [connection for connection in clients(client) if "b" in connection["flags"]]


@contextmanager
def meanwhile(action: Callable[[], None]) -> Iterator[None]:
    """Do `action` in another thread during the block, and raise what it raises at the block's end."""
    errors: list[BaseException] = []

    def act() -> None:
        try:
            action()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join(30)
    assert not thread.is_alive(), "the action did not end"
    if errors:
        raise errors[0]
