"""A server that takes no writes, since its memory is full: every surface says so, and what fills it."""

import asyncio
import re
import socket
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
import redis
import trio

from celery5 import App
from celery5.broker.servers.embedded import EmbeddedServer
from celery5.doctor.examination import get_checks, run_checks
from celery5.errors import BrokerReplied
from celery5.observability import Storage, memory_used
from celery5.protocol.observability.alerting import explain_unjudged
from celery5.protocol.observability.overview import REFUSES_WRITES
from tests.redis.commands.staff import Staff, wait_until
from tests.redis.health.test_probes import numbers, probe
from tests.redis.observability.surfaces import ROOT, TARGET, Surfaces
from tests.redis.worker.workers import until_async, working
from tests.story.cli.commands import celery5
from tests.trio.health.test_status_port import free_port

FACT = "full, nothing more is stored: noeviction, "
FILLED = "most of it: queue money "
USED = 'celery5_broker_memory_used_bytes{broker="default"}'


@pytest.fixture
def filled(own_server: EmbeddedServer, app_name: str) -> Iterator[App]:
    """An application with a queue that fills its server, which has no memory left."""
    app = App(app_name, broker=own_server.url)

    @app.task(name="pay", queue="money")
    async def pay(note: str) -> None: ...

    app.send_many([pay.s("x" * 2000) for _ in range(500)])
    with redis.Redis.from_url(own_server.url) as client:
        client.config_set("maxmemory", 1_000_000)
        yield app
        client.config_set("maxmemory", 0)
    app.close()


async def test_every_surface_says_that_memory_is_full_and_what_fills_it(filled: App) -> None:
    surfaces = Surfaces(filled)
    checks = [check for check in get_checks(filled) if check.name == "memory"]
    (found,) = await trio.to_thread.run_sync(lambda: list(run_checks(checks)))
    (memory,) = (await filled.metrics.aoverview()).memory
    assert memory.is_full
    texts = {
        "doctor": found.summary,
        "overview": memory.describe(),
        "top": " ".join((await surfaces.run("top", "--once")).split()),
        "page": await surfaces.look(""),
    }
    assert [name for name, text in texts.items() if FACT not in text or FILLED not in text] == [], texts
    assert found.state == "fail"
    # Only those above ask what fills it, which takes long.
    assert FACT in " ".join((await surfaces.run("info")).split())
    (in_info,) = (await surfaces.run_json("info"))["memory"]
    assert in_info["used"] > in_info["limit"] == 1_000_000
    shown = (await surfaces.run_json("top"))["memory"]
    assert shown[0]["used"] > shown[0]["limit"] == 1_000_000
    assert shown[0]["filled_by"].startswith("queue money ")


REFUSED = r"^Redis is full: \d[\d.]* [KM]iB of 977 KiB; .*memory is full.*raise maxmemory.*queue storage.*send it again"


def test_a_refused_job_says_how_full_memory_is_and_what_to_do(filled: App) -> None:
    with pytest.raises(BrokerReplied, match=REFUSED):
        filled.tasks["pay"].delay("x")
    with pytest.raises(BrokerReplied, match=REFUSED):
        filled.send_many([filled.tasks["pay"].s("x") for _ in range(3)])


@dataclass
class Paid:
    """A record."""

    note: str


def make_writes(app: App) -> dict[str, tuple[Callable[[], object], Callable[[], Awaitable[object]]]]:
    """Return what an application sends to Redis, in plain Python and in an event loop."""
    pay: Any = app.tasks["pay"]

    @app.event
    class Announced:
        note: str

    stream = app.stream("payments", Paid, by="note")
    announced: Any = Announced
    steps = pay.s("x") >> pay.s("y")
    return {
        "job": (lambda: pay.delay("x"), lambda: pay.adelay("x")),
        "later": (
            lambda: pay.options(countdown=60).delay("x"),
            lambda: pay.options(countdown=60).adelay("x"),
        ),
        "records": (lambda: stream.send(Paid("x")), lambda: stream.asend(Paid("x"))),
        "run": (steps.start, steps.astart),
        "event": (lambda: announced.delay(note="x"), lambda: announced.adelay(note="x")),
        "schedule": (
            lambda: app.schedule.add(pay.s("x"), 60, name="daily"),
            lambda: app.schedule.aadd(pay.s("x"), 60, name="daily"),
        ),
    }


WRITES = ("job", "later", "records", "run", "event", "schedule")


@pytest.mark.parametrize("write", WRITES)
def test_refusals_of_a_full_redis_show_its_memory_in_each_colour(filled: App, write: str) -> None:
    send, asend = make_writes(filled)[write]
    with pytest.raises(BrokerReplied, match=REFUSED):
        send()
    with pytest.raises(BrokerReplied, match=REFUSED):
        trio.run(asend)
    with pytest.raises(BrokerReplied, match=REFUSED):
        asyncio.run(cast("Coroutine[Any, Any, object]", asend()))


async def test_the_alert_and_the_metrics_say_that_memory_is_almost_full_before_it_is(
    own_server: EmbeddedServer, app_name: str
) -> None:
    app = App(app_name, broker=own_server.url, metrics_interval=0.1)
    app.alert("memory-soon", memory_used(above=0.9), for_=0.0, keep_firing_for=0.0)
    async with working(app, queues=("q",)):
        with redis.Redis.from_url(own_server.url) as client:
            # So much that what connections take is less than what is left: writes succeed while it is almost full.
            # The server makes it: what is sent to it stays in its buffers for a while, which count, too.
            client.setrange("filling", 120_000_000, b"x")
            client.expire("filling", 600)
            info: Any = client.info("memory")
            limit = int(info["used_memory"] / 0.95)
            assert await get_alert(app) is None
            client.config_set("maxmemory", limit)
            try:
                await until_async(lambda: fires(app), within=60)
                description = await get_alert(app)
                families = {family.name: family for family in await app.metrics.atotals()}
            finally:
                client.config_set("maxmemory", 0)
            await until_async(lambda: is_over(app))
    assert re.fullmatch(r"broker default uses \d\d.* of \d\d.* \(9\d%\)", description or ""), description
    values = {name: family.samples[0].value for name, family in families.items() if family.samples}
    used, share = values["celery5_broker_memory_used_bytes"], values["celery5_broker_memory_used_share"]
    assert values["celery5_broker_memory_limit_bytes"] == limit
    assert share == pytest.approx(used / limit)
    assert 0.9 < share < 1
    rules = {rule.name: rule for rule in app.alerts.rules()}
    assert (rules["memory-full"].condition.above, rules["memory-full"].severity) == (0.9, "critical")
    app.close()


async def get_alert(app: App) -> str | None:
    """The description of the alert on memory that fires; None for none."""
    states = await app.alerts.alist()
    return next(
        (state.description for state in states if (state.name, state.status) == ("memory-soon", "firing")),
        None,
    )


async def fires(app: App) -> bool:
    """Whether the alert fires, and the metrics of the cluster have the limit."""
    names = {family.name for family in await app.metrics.atotals()}
    return await get_alert(app) is not None and "celery5_broker_memory_limit_bytes" in names


async def is_over(app: App) -> bool:
    """Whether the alert does not fire."""
    return await get_alert(app) is None


async def test_results_are_part_of_what_a_server_holds(app: App) -> None:
    @app.task(name="big")
    async def big() -> str:
        return "x" * 5000

    async with working(app):
        sent = await app.asend_many([big.s() for _ in range(300)])
        for job in sent:
            await job.aget(timeout=30)
    found: Storage = await app.metrics.astorage()
    assert 1_500_000 < (found.others["results"] or 0) < 3_500_000
    assert found.results == {"default": found.others["results"]}


def test_a_worker_is_not_ready_while_memory_is_full(own_staff: Staff, own_server: EmbeddedServer) -> None:
    port = free_port()
    own_staff.start(status_port=port)
    wait_until(lambda: probe(port).status == 200)
    wait_until(lambda: numbers(port).get(USED, 0) > 100_000)
    assert not any("memory_limit" in name for name in numbers(port))
    with redis.Redis.from_url(own_server.url) as client:
        client.config_set("maxmemory", 1)
        try:
            wait_until(lambda: b"nothing more is stored" in probe(port).body)
            assert probe(port).status == 503
            found = numbers(port)
            assert found['celery5_broker_memory_limit_bytes{broker="default"}'] == 1
            assert found['celery5_broker_memory_used_share{broker="default"}'] > 1
        finally:
            client.config_set("maxmemory", 0)
    wait_until(lambda: probe(port).status == 200)


async def test_alerts_that_a_full_server_cannot_store_are_judged_when_shown(filled: App) -> None:
    states = {state.name: state for state in await filled.alerts.alist()}
    memory = states.pop("memory-full")
    assert (memory.status, memory.subject, memory.severity) == ("firing", "broker default", "critical")
    assert re.match(r"broker default uses [\d.]+ [KM]iB of 977 KiB \(\d{3}%\)$", memory.description)
    assert {(state.status, state.description) for state in states.values()} == {
        ("unknown", "cannot be judged: Redis is full, and stores no alerts")
    }
    surfaces = Surfaces(filled)
    (doctor,) = [check for check in await surfaces.ask("doctor:run") if check["check"] == "alerts"]
    page = await surfaces.look("")
    for text in (
        doctor["summary"],
        await surfaces.run("info"),
        await surfaces.run("top", "--once"),
    ):
        said = " ".join(text.split())
        assert re.search(
            r"memory-full \(broker default\); \d+ alerts? cannot be judged: Redis is full", said
        ), text
    assert "memory-full (broker default) critical fires" in page
    assert f"{len(states)} alerts cannot be judged: Redis is full" in page
    with redis.Redis.from_url(filled.settings.broker) as client:
        client.config_set("maxmemory", 0)
    assert {state.status for state in await filled.alerts.alist()} == {"inactive"}


async def test_alerts_are_unknown_when_no_process_has_evaluated_them_lately(
    app: App, redis_client: "redis.Redis"
) -> None:
    app.configure(metrics_interval=0.1)
    async with working(app):

        async def is_evaluated() -> bool:
            return bool(redis_client.hexists(app.keys.alerts, "evaluated"))

        await until_async(is_evaluated)
    before = int(cast("bytes", redis_client.hget(app.keys.alerts, "evaluated")))
    redis_client.hset(app.keys.alerts, "evaluated", before - 600_000)
    states = {state.name: state for state in await app.alerts.alist()}
    assert states["oldest-job"].status == "unknown"
    words = "cannot be judged: no process evaluates the rules, the last evaluation was 10 min ago"
    assert states["oldest-job"].description == words
    assert states["memory-full"].status == "inactive"
    surfaces = Surfaces(app)
    (doctor,) = [check for check in await surfaces.ask("doctor:run") if check["check"] == "alerts"]
    assert doctor["summary"] == f"{len(states) - 1} alerts {words}"
    ended = await trio.to_thread.run_sync(
        lambda: celery5("-A", TARGET, "alert", "list", "--check", cwd=ROOT, env=surfaces.environment)
    )
    assert ended.code == 1


@pytest.mark.parametrize(
    ("is_full", "age", "interval", "words"),
    [
        (False, None, 15, ""),
        (False, 44, 0.1, ""),
        (False, 46, 0.1, "no process evaluates the rules, the last evaluation was 46 s ago"),
        (False, 59, 15, ""),
        (False, 61, 15, "no process evaluates the rules, the last evaluation was 1 min ago"),
        (True, None, 15, "Redis is full, and stores no alerts"),
        (True, 5, 15, "Redis is full, and stores no alerts, the last evaluation was 5 s ago"),
    ],
)
def test_alerts_are_unjudged_while_redis_is_full_or_evaluations_are_late(
    is_full: bool, age: float | None, interval: float, words: str
) -> None:
    found = explain_unjudged(
        is_full=is_full, evaluated=None if age is None else 1000 - age, interval=interval, now=1000
    )
    assert found == (f"cannot be judged: {words}" if words else "")


async def test_worker_is_not_healthy_on_any_surface_while_redis_refuses_writes(
    own_staff: Staff,
    own_server: EmbeddedServer,
    app_name: str,
    short_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = str(short_path / "notify")
    monkeypatch.setenv("NOTIFY_SOCKET", path)
    monkeypatch.setenv("WATCHDOG_USEC", "20000000")
    with (
        closing(App(app_name, broker=own_server.url)) as app,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd,
        redis.Redis.from_url(own_server.url) as client,
    ):
        systemd.bind(path)
        systemd.settimeout(60)
        own_staff.start(metrics_interval=0.2)

        def wait_status(pattern: str) -> None:
            while not re.search(pattern, systemd.recv(4096).decode()):
                pass

        await trio.to_thread.run_sync(wait_status, "READY=1")
        client.config_set("maxmemory", 1)
        await trio.to_thread.run_sync(wait_status, "STATUS=.*memory of .*: Redis is full: ")
        shown = [(await app.metrics.aworkers()).workers, (await app.metrics.aoverview()).workers]
        assert [[worker.health for worker in workers] for workers in shown] == [[REFUSES_WRITES]] * 2
        words = ("--app-name", app_name, "health")
        environment = {"CELERY5_BROKER": own_server.url}
        told = await trio.to_thread.run_sync(lambda: celery5(*words, cwd=ROOT, env=environment))
        assert (told.code, "broker default refuses writes: its memory is full" in told.out) == (1, True), told
        client.config_set("maxmemory", 0)
        await trio.to_thread.run_sync(wait_status, "STATUS=(?!.*memory)")
        told = await trio.to_thread.run_sync(lambda: celery5(*words, cwd=ROOT, env=environment))
        assert (told.code, "refuses" in told.out) == (0, False)
