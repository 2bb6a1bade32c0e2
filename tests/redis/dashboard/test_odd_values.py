"""Whatever lies in Redis, each page is shown: every leaf of every key is replaced by what no program of ours writes."""

import traceback
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlencode

import pytest
import redis

from celery5 import App
from celery5.dashboard import performing
from celery5.operations.table import OPERATIONS
from tests.night import NIGHTLY
from tests.redis.dashboard import test_secrets as filled
from tests.redis.dashboard.site import browsing
from tests.redis.worker.workers import working

ODD: list[bytes] = [
    b"\xff\xfe",
    b"nan",
    b"1e999",
    b"-1",
    b"9" * 400,
    b"",
    b"[" * 3000,
    b'{"v":1,"id":1e400,"task":[],"sent":"x"}',
    b"99999999999999999999",
    b"\x1b[31m\xc2\x9b\xe2\x80\xae",
]
"""Values that stand in for any other: no text, no number, out of range, nothing, no JSON, JSON of the wrong types."""
PAGES = (
    *("alerts", "bulk", "events", "health", "limits", "queues", "queues/default", "settings", "storage"),
    *("streams", "streams/orders", "tasks", "workers", "workflows"),
)
"""Pages besides those of `list_pages`, and but those that ask processes."""
ALL_VALUES = NIGHTLY
"""Whether each key is tried by itself with each value, which takes minutes, or with one and some others beside it."""
AT_ONCE = 4
"""Keys that are spoilt at once, of different subjects."""


def replace_leaves(client: "redis.Redis", key: bytes, odd: bytes) -> None:
    """Put `odd` in place of each value that a key has: strings, fields, members, scores, and fields of entries."""
    any_client: Any = client
    match any_client.type(key):
        case b"string":
            any_client.set(key, odd, keepttl=True)
        case b"hash":
            for field in any_client.hkeys(key):
                any_client.hset(key, field, odd)
            any_client.hset(key, odd, odd)
        case b"set":
            any_client.sadd(key, odd)
        case b"zset":
            any_client.zadd(key, {odd: 1e18, odd + b"2": "-inf", odd + b"3": 0})
        case b"list":
            for number in range(any_client.llen(key)):
                any_client.lset(key, number, odd)
        case b"stream":
            for _, fields in any_client.xrange(key, count=3):
                any_client.xadd(key, dict.fromkeys(fields, odd))
            any_client.xadd(key, {odd: odd})
        case _:
            pass


def copy_keys(client: "redis.Redis", app: App) -> dict[bytes, tuple[bytes, int]]:
    """Each key of the application as it is, and its time to live."""
    any_client: Any = client
    keys = sorted(any_client.scan_iter(f"celery5:{{{app.name}*", count=1000))
    return {key: (any_client.dump(key), max(0, any_client.pttl(key))) for key in keys}


def restore(client: "redis.Redis", key: bytes, copy: tuple[bytes, int]) -> None:
    """Put a key back as it was."""
    any_client: Any = client
    any_client.restore(key, copy[1], copy[0], replace=True)


@pytest.fixture
def _cleared(app: App, redis_client: "redis.Redis") -> Iterator[None]:
    yield
    any_client: Any = redis_client
    for key in any_client.scan_iter(f"celery5:{{{app.name}*", count=1000):
        any_client.delete(key)


@pytest.mark.usefixtures("_cleared")
@pytest.mark.timeout(1700)
async def test_every_page_is_shown_whatever_lies_in_redis(
    app: App, redis_client: "redis.Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(performing, "READ_ONCE", 0.0)
    monkeypatch.setattr(performing, "SHARED_FACTOR", 0.0)
    app.configure(metrics_interval=0.1, grace_period=0.1)
    filled.declare(app)
    async with working(app, name="one"):
        ids = await filled.fill(app)
        await app.schedule.aadd(app.tasks["later"].s("bob", "x"), 3600.0, name="nightly")
        await app.limits.aset("later", 3)
        await app.limits.asuspend("stuck", why="a test")
        await app.alerts.asilence("*", 60.0)
        await filled.until_filled(app, ids)
    copies = copy_keys(redis_client, app)
    pages = [*PAGES, *(page for page in filled.list_pages(app, ids) if not page.startswith("workers"))]
    looks = [f"/{app.name}", *(f"/{app.name}/{page}" for page in pages)]
    looks += list_looks(app, ids) if ALL_VALUES else []
    errors: list[str] = []
    failed: list[str] = []

    def note(_: str, error: Exception) -> None:
        errors.append(find_place(error))

    async with browsing(app, on_error=note) as client:
        for spoilt in list_spoilt(list(copies)):
            for key, odd in spoilt.items():
                replace_leaves(redis_client, key, odd)
            for look in dict.fromkeys(looks):
                answer = await client.get(look)
                if answer.status_code >= 500 or "cannot be shown" in answer.text:
                    failed.append(f"{spoilt!r:.200} {look}: {answer.status_code} {errors[-1:]}")
            for key in spoilt:
                restore(redis_client, key, copies[key])
    assert not failed, "\n".join(failed)


def list_spoilt(keys: list[bytes]) -> list[dict[bytes, bytes]]:
    """Return which keys get which values, one round after the other."""
    if ALL_VALUES:
        return [{key: odd} for key in keys for odd in ODD]
    rounds = -(-len(keys) // AT_ONCE)
    numbered = list(enumerate(keys))
    return [{key: ODD[number % len(ODD)] for number, key in numbered[at::rounds]} for at in range(rounds)]


def list_looks(app: App, ids: dict[str, str]) -> list[str]:
    """The address of each operation of the JSON API that changes nothing, and asks no process."""
    questions = filled.list_questions(ids)
    return [
        f"/api/v1/{app.name}/{operation.noun}/{operation.verb}?{urlencode(asked, doseq=True)}"
        for operation in OPERATIONS.values()
        if not operation.is_change and operation.noun not in ("worker", "controller", "doctor")
        for asked in questions.get(operation.name, [{}])
    ]


def find_place(error: BaseException) -> str:
    """Where an error comes from, in one line."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [
        f"{frame.filename.rpartition('celery5/')[2]}:{frame.lineno}"
        for frame in frames
        if "celery5" in frame.filename or "template" in frame.filename
    ]
    return f"{type(error).__name__}: {str(error)[:100]} at {' '.join(ours[-4:])}"
