"""Stored settings: whatever anyone writes into the hash of settings in Redis, no process ends or fails to start."""

import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from celery5 import App
from celery5.config.settings import Settings, find_hash_fault
from celery5.processes import router, scheduler, worker
from celery5.processes.options import resolve_budgets
from tests.redis.commands.staff import Staff, wait_until

NESTED = '{"a":' * 3000 + "1" + "}" * 3000
HOSTILE: dict[str, bytes] = {
    "empty": b"",
    "word": b"elsewhere",
    "true": b"true",
    "zero": b"0",
    "negative": b"-1",
    "one": b"1",
    "huge number": b"9" * 5000,
    "exponent": b"1e999",
    "not a number": b"nan",
    "binary": bytes(range(256)),
    "not UTF-8": b"\xff\xfe7",
    "long": b"x" * 200_000,
    "nested": NESTED.encode(),
    "escape": b"\x1b[2J\x00\n",
    "surrogate": b'"\\ud800"',
    "table": b'{"a": {"task": "no.such.task", "every": 1}}',
    "schedule": b'{"a": {"task": "nap", "cron": "99 99 * * *"}}',
    "arguments": b'{"a": {"task": "nap", "every": 5, "args": [1, 2, 3], "options": {"no": 1}}}',
    "list": b"[1, 2]",
    "budget": b"no.such.task=1..2",
    "reservation": b"thread=1..2 nap.a=9..9",
    "code": b"module:function",
    "zone": b"Mars/Olympus",
    "path": b"../../etc/passwd",
    "format": b"journal",
    "all": b"all",
}
SETTINGS = Settings.__struct_fields__


async def nap(seconds: float) -> float:
    return seconds


@pytest.fixture
def stored(url: str, app_name: str, redis_client: "redis.Redis") -> Iterator[App]:
    """An application whose configuration is the hash."""
    app = App(app_name, broker=url, config="redis")
    app.task(name="nap")(nap)
    app.load()
    yield app
    redis_client.delete(app.keys.settings)
    app.close()


@pytest.mark.parametrize("value", HOSTILE, ids=[*HOSTILE])
def test_no_value_of_any_stored_setting_stops_a_process_from_using_the_rest(
    stored: App, redis_client: "redis.Redis", value: str, caplog: pytest.LogCaptureFixture
) -> None:
    default = stored.settings
    fields: dict[Any, Any] = dict.fromkeys(SETTINGS, HOSTILE[value])
    redis_client.hset(
        stored.keys.settings,
        mapping={**fields, "max_deliveries": b"7", HOSTILE[value] or b"-": b"1", "no_setting": b"1"},
    )
    stored.reload_configuration()
    _, apply = stored.reload_configuration()
    apply()
    assert stored.settings.max_deliveries == 7
    for name in SETTINGS:
        if find_hash_fault(name, "1") == f"{name} cannot be set in the broker":
            assert getattr(stored.settings, name) == getattr(default, name)
    worker.check(stored)
    router.check(stored)
    scheduler.check(stored)
    resolve_budgets(stored)
    assert stored.middleware is not None
    assert "no_setting" in caplog.text
    assert len(caplog.messages) == len(set(caplog.messages))  # each fault once
    assert all(len(message) < 1000 and message.isprintable() for message in caplog.messages)
    # A process that starts now sees the same.
    another = App(stored.name, broker=default.broker, config="redis")
    another.task(name="nap")(nap)
    another.load()
    assert another.settings == stored.settings
    another.close()


def test_a_key_of_another_type_in_place_of_the_hash_sets_nothing(
    stored: App, redis_client: "redis.Redis", caplog: pytest.LogCaptureFixture
) -> None:
    redis_client.set(stored.keys.settings, "concurrency 3")
    assert stored.reload_configuration()[0] == ()
    assert "cannot be read" in caplog.text


def test_a_package_that_is_missing_is_not_asked_for_by_the_hash(
    stored: App,
    redis_client: "redis.Redis",
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert stored.settings.concurrency != 3

    def find_nothing(_name: str) -> None:
        return None

    monkeypatch.setattr("celery5.stored_settings.find_spec", find_nothing)
    redis_client.hset(
        stored.keys.settings, mapping={"sentry": "true", "opentelemetry": "all", "concurrency": "3"}
    )
    assert stored.reload_configuration()[0] == ("concurrency",)
    assert "sentry: it needs a package: pip install 'sentry-sdk>=" in caplog.text
    assert "opentelemetry: it needs a package: pip install 'opentelemetry-api>=" in caplog.text


BLOCKER = (
    "import sys\n"
    "sys.modules['sentry_sdk'] = sys.modules['opentelemetry'] = None\n"
    "from celery5.cli.main import main\n"
    "main()\n"
)
"""A program where two packages are not installed."""


@pytest.mark.parametrize("kind", ["worker", "router", "scheduler", "controller", "publisher", "dashboard"])
def test_each_kind_of_process_starts_with_a_hash_of_nonsense_and_survives_another(
    staff: Staff, redis_client: "redis.Redis", tmp_path: Path, kind: str
) -> None:
    key = staff.app.keys.settings
    nonsense: dict[Any, Any] = dict.fromkeys(SETTINGS, "elsewhere")
    nonsense |= {"timezone": "Mars/Olympus", "no_setting": b"\xff"}
    redis_client.hset(key, mapping={**nonsense, "sentry": "true", "opentelemetry": "all"})
    flags = {"dashboard": ["--port", "0"], "publisher": ["--socket", str(tmp_path / "s")]}.get(kind, [])
    try:
        one = staff.launch(
            [sys.executable, "-c", BLOCKER, "-A", "tests.redis.events.historian:app", kind, "start", *flags],
            forked=False,
            config="redis",
            publisher_socket=str(tmp_path / "s"),
        )
        started = "dashboard: http" if kind == "dashboard" else f"{kind}:started"
        wait_until(lambda: started in one.output.read_text() or one.process.poll() is not None)
        assert one.process.poll() is None, one.output.read_text()
        assert "sentry: it needs a package" in one.output.read_text()
        if kind != "dashboard":  # it reads the hash once
            redis_client.hset(key, mapping={"schedules": '{"a": {"task": 7}}', "budgets": "x.y=1..2"})
            one.signal(signal.SIGHUP)
            wait_until(lambda: "no task of this application" in one.output.read_text())
            assert one.process.poll() is None
        one.signal(signal.SIGTERM)
        assert one.wait() == 0
    finally:
        redis_client.delete(key)
