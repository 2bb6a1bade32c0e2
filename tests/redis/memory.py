"""Memory: how much of a server's an application takes."""

from typing import Any

import redis

from celery5 import App


def stored_bytes(client: "redis.Redis", app: App) -> int:
    """Return the bytes that the keys of an application take.

    Not the server's `used_memory`: its buffers for clients and for the append-only file count there, which are as large
    as the last command until the server or the disk has time for them.
    """
    looked: Any = client
    keys = looked.scan_iter(f"celery5:{{{app.name}*", count=1000)
    return sum(looked.memory_usage(key, samples=0) or 0 for key in keys)
