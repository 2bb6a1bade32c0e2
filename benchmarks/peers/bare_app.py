"""Bare redis-py, no task queue: XADD of a small job one by one and in pipelines, the measure for our own producer."""

import json

from contract import URL, Peer, chunks, clock
from redis import Redis


def fields(n: int) -> dict[str, str]:
    """One small job, encoded as plainly as can be."""
    return {"id": f"{n:032x}", "job": json.dumps({"task": "noop", "args": [n], "kwargs": {}})}


def enqueue(n: int) -> None:
    """One round trip each."""
    client = Redis.from_url(URL)
    client.xadd("bare", fields(0))  # type: ignore[arg-type]
    with clock.running():
        for i in range(n):
            client.xadd("bare", fields(i))  # type: ignore[arg-type]


def bulk(n: int) -> None:
    """One round trip for each chunk."""
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
    raise SystemExit("bare redis-py has no worker")


peer = Peer(enqueue, bulk, nothing, nothing, nothing)
