"""Receive messages from the queues of Celery, each of which stays there until it is acknowledged."""

import base64
import json
import time
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple, Protocol, cast

from celery5.contrib.celery.messages import CeleryMessage
from celery5.errors import Misconfigured
from celery5.extras import describe_installation

BATCH = 100
"""Messages that are received at once, at most, and that are not acknowledged yet."""
BATCH_BYTES = 4 * 1024 * 1024
"""Bytes of messages after which no more are received."""
WAIT = 0.5
"""Seconds to wait for a message; a stop takes that long."""
TIMEOUT = 10.0
"""Seconds that a connection, or a reply of Redis, may take."""
HEARTBEAT = 30.0
"""Seconds between the heartbeats of AMQP, which notice that a broker is gone."""
RECOVER_AFTER = 5.0
"""Seconds after which messages that a killed Router has left are looked for again."""


class Received(NamedTuple):
    """A message, and the handle by which it is acknowledged."""

    message: CeleryMessage
    handle: Any


class Receiver(Protocol):
    """Receives messages. Its methods block, and are called in a thread, one at a time."""

    @property
    def is_zero_first(self) -> bool:
        """Whether 0 is the highest priority of this broker."""
        ...

    def receive(self) -> list[Received]:
        """Return the next messages, or none after WAIT seconds."""
        ...

    def acknowledge(self, received: Sequence[Received]) -> None:
        """Remove messages from the broker."""
        ...

    def put_aside(self, received: Received, queue: str) -> None:
        """Move a message, as it is, to another queue of the same broker."""
        ...

    def close(self) -> None:
        """Close the connection: messages that are not acknowledged come again."""
        ...


def make_celery(celery: Any, role: str) -> Any:
    """Return an application of Celery: the one that is given, or one for the URL of its `broker` or its `backend`.

    Raises:
        Misconfigured: Celery is not installed, or the argument is neither.
    """
    if find_spec("celery") is None:
        raise Misconfigured(f"celery5.contrib.celery needs Celery: {describe_installation('celery')}")
    kind: Any = import_module("celery").Celery
    if isinstance(celery, str):
        return kind("celery5", set_as_current=False, **{role: celery})
    if not isinstance(celery, kind):
        raise Misconfigured(f"celery is {celery!r}; give the application of Celery, or the URL of its {role}")
    return celery


def open_receiver(celery: Any, queues: Sequence[str], name: str) -> Receiver:
    """Return what receives from these queues, connected."""
    connection = celery.connection_for_read(heartbeat=HEARTBEAT, connect_timeout=TIMEOUT)
    is_redis = connection.transport.driver_type == "redis"
    defaults: dict[str, Any] = (
        {"socket_connect_timeout": TIMEOUT, "socket_timeout": TIMEOUT}
        if is_redis
        else {"confirm_publish": True}
    )
    connection.transport_options = {**defaults, **connection.transport_options}
    declared = [_get_queue(celery, queue) for queue in queues]
    try:
        connection.ensure_connection(max_retries=1, interval_start=0, timeout=TIMEOUT)
        return (
            _RedisReceiver(connection, declared, name) if is_redis else _KombuReceiver(connection, declared)
        )
    except BaseException:
        connection.close()
        raise


def _get_queue(celery: Any, name: str) -> Any:
    """Return a queue as Celery's settings declare it, with its exchange."""
    queues = celery.amqp.queues
    return queues[name] if name in queues else queues.new_missing(name)


class _KombuReceiver:
    """Receives by kombu, from each broker that it knows but Redis."""

    is_zero_first = False

    def __init__(self, connection: Any, queues: Sequence[Any]) -> None:
        kombu: Any = import_module("kombu")
        self._kombu = kombu
        self._connection = connection
        self._channel = connection.channel()
        self._waiting: list[Any] = []
        self._is_closed = False
        self.is_zero_first = getattr(connection.transport, "driver_type", "") != "amqp"
        self._channel.basic_qos(0, BATCH, False)
        consumer = kombu.Consumer(self._channel, list(queues), on_message=self._waiting.append)
        consumer.consume()

    def receive(self) -> list[Received]:
        wait = WAIT
        while len(self._waiting) < BATCH:
            try:
                self._connection.drain_events(timeout=wait)
            except TimeoutError:
                break
            wait = 0.01
        if self._connection.supports_heartbeats:
            self._connection.heartbeat_check()
        received = [Received(_read_kombu(message), message) for message in self._waiting]
        self._waiting.clear()
        return received

    def acknowledge(self, received: Sequence[Received]) -> None:
        for taken in received:
            taken.handle.ack()

    def put_aside(self, received: Received, queue: str) -> None:
        message = received.message
        raw = {name: value for name, value in message.properties.items() if name not in _OF_A_DELIVERY}
        producer = self._kombu.Producer(self._channel, auto_declare=False)
        producer.publish(
            message.body,
            routing_key=queue,
            exchange="",
            declare=[self._kombu.Queue(queue, self._kombu.Exchange(queue), routing_key=queue)],
            content_type=message.content_type,
            content_encoding=message.content_encoding,
            headers=message.headers,
            **raw,
        )
        received.handle.ack()

    def close(self) -> None:
        self._connection.close()


_OF_A_DELIVERY = (
    "delivery_info",
    "delivery_tag",
    "body_encoding",
    "content_type",
    "content_encoding",
    "headers",
)
"""Properties that kombu sets itself."""


def _read_kombu(message: Any) -> CeleryMessage:
    headers = dict(message.headers or {})
    headers.pop("compression", None)  # kombu has decompressed it
    body: Any = message.body
    return CeleryMessage(
        body=body.encode() if isinstance(body, str) else bytes(body or b""),
        content_type=str(message.content_type or ""),
        content_encoding=str(message.content_encoding or ""),
        headers=headers,
        properties=dict(message.properties or {}),
    )


class _RedisReceiver:
    """Receives from Redis: each message is moved, in one step, to a list of this bridge, and stays there.

    kombu takes a message from its list in one step and stores it elsewhere in a second step. If the process is killed
    in between, the message is lost. kombu also delivers unacknowledged messages again after a timeout.
    """

    is_zero_first = True

    def __init__(self, connection: Any, queues: Sequence[Any], name: str) -> None:
        self._connection = connection
        channel = connection.channel()
        for queue in queues:
            queue(channel).declare()
        self._redis = channel.client
        prefix = str(channel.global_keyprefix or "")
        self._prefix = prefix
        self._pending = f"{prefix}{name}.taken"
        names: list[str] = [queue.name for queue in queues]
        self._lists = [
            f"{prefix}{channel._q_for_pri(queue, priority)}"  # kombu's own name of the list of a priority
            for priority in channel.priority_steps
            for queue in names
        ]
        self._next_look = 0.0

    def receive(self) -> list[Received]:
        taken = self._look_for_left() or self._move() or self._wait()
        return [Received(_read_item(item), item) for item in taken]

    def _look_for_left(self) -> list[bytes]:
        """Return messages that a killed Router, or this one before an outage, has not acknowledged.

        Another Router may be about to publish them: an id makes one job, however often it is published.
        """
        now = time.monotonic()
        if now < self._next_look:
            return []
        left = cast("list[bytes]", self._redis.execute_command("LRANGE", self._pending, -BATCH, -1))
        if len(left) < BATCH:
            self._next_look = now + RECOVER_AFTER
        return left

    def _move(self) -> list[bytes]:
        """Move messages that wait, those of higher priority first."""
        taken: list[bytes] = []
        size = 0
        for name in self._lists:
            while len(taken) < BATCH and size < BATCH_BYTES:
                pipeline = self._redis.pipeline(transaction=False)
                for _ in range(10):
                    pipeline.execute_command("RPOPLPUSH", name, self._pending)
                moved = [item for item in pipeline.execute() if item is not None]
                taken += moved
                size += sum(map(len, moved))
                if len(moved) < 10:
                    break
        return taken

    def _wait(self) -> list[bytes]:
        """Wait for a message of the first list; the others are looked at again after that."""
        item = self._redis.execute_command("BRPOPLPUSH", self._lists[0], self._pending, WAIT)
        return [] if item is None else [item]

    def acknowledge(self, received: Sequence[Received]) -> None:
        pipeline = self._redis.pipeline(transaction=False)
        for taken in received:
            pipeline.execute_command("LREM", self._pending, 1, taken.handle)
        pipeline.execute()

    def put_aside(self, received: Received, queue: str) -> None:
        self._redis.execute_command(
            "EVAL", _PUT_ASIDE, 2, self._pending, f"{self._prefix}{queue}", received.handle
        )

    def close(self) -> None:
        self._connection.close()


_PUT_ASIDE = "if redis.call('LREM', KEYS[1], 1, ARGV[1]) == 1 then redis.call('LPUSH', KEYS[2], ARGV[1]) end"
"""Moves a message once, whoever else has seen it. KEYS: the bridge's list, another queue. ARGV: the message."""


def _read_item(item: bytes) -> CeleryMessage:
    """Return the message in an item of a list; one that is no message has the whole item as its body."""
    try:
        fields = cast("dict[str, Any]", json.loads(item))
        properties = dict(fields["properties"])
        body = str(fields["body"])
        is_base64 = properties.get("body_encoding") == "base64"
        return CeleryMessage(
            body=base64.b64decode(body, validate=True) if is_base64 else body.encode(),
            content_type=str(fields.get("content-type") or ""),
            content_encoding=str(fields.get("content-encoding") or ""),
            headers=dict(fields.get("headers") or {}),
            properties=properties,
        )
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return CeleryMessage(body=item)
