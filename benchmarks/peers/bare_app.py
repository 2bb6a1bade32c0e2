"""No task queue, the measure for our own producer: XADD of a small job by redis-py, or by a socket with hiredis."""

import json
import socket
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from contract import URL, VARIANT, Peer, chunks, clock
from hiredis import Reader, pack_command
from redis import Redis


def fields(n: int) -> dict[str, str]:
    """One small job, encoded as plainly as can be."""
    return {"id": f"{n:032x}", "job": json.dumps({"task": "noop", "args": [n], "kwargs": {}})}


def packed(n: int) -> bytes:
    """The whole command of one small job."""
    words = ["XADD", "bare", "*"]
    for name, value in fields(n).items():
        words += [name, value]
    command: bytes = pack_command(tuple(words))
    return command


def connected() -> Callable[[bytes, int], None]:
    """Return what sends bytes and reads so many replies."""
    address = urlsplit(URL)
    link = socket.create_connection((str(address.hostname), address.port or 6379))
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    reader = Reader()

    def ask(data: bytes, replies: int) -> None:
        link.sendall(data)
        while replies:
            reply: Any = reader.gets()
            if reply is False:
                reader.feed(link.recv(65536))
            else:
                replies -= 1

    return ask


def enqueue(n: int) -> None:
    """One round trip each."""
    if VARIANT == "socket":
        ask = connected()
        ask(packed(0), 1)
        with clock.running():
            for i in range(n):
                ask(packed(i), 1)
        return
    client = Redis.from_url(URL)
    client.xadd("bare", fields(0))  # type: ignore[arg-type]
    with clock.running():
        for i in range(n):
            client.xadd("bare", fields(i))  # type: ignore[arg-type]


def bulk(n: int) -> None:
    """One round trip for each chunk."""
    if VARIANT == "socket":
        ask = connected()
        ask(packed(0), 1)
        with clock.running():
            for chunk in chunks(n):
                ask(b"".join(map(packed, chunk)), len(chunk))
        return
    client = Redis.from_url(URL)
    client.xadd("bare", fields(0))  # type: ignore[arg-type]
    with clock.running():
        for chunk in chunks(n):
            pipe = client.pipeline(transaction=False)
            for i in chunk:
                pipe.xadd("bare", fields(i))  # type: ignore[arg-type]
            pipe.execute()


def nothing(*_: int) -> None:
    """There is no worker here."""
    raise SystemExit("bare commands have no worker")


peer = Peer(enqueue, bulk, nothing, nothing, None)
