"""A server that takes no writes, since its memory is full: every surface says so, and what fills it."""

from collections.abc import Iterator

import pytest
import redis
import trio

from celery5 import App
from celery5.broker.servers.embedded import EmbeddedServer
from celery5.doctor.examination import get_checks, run_checks
from celery5.errors import BrokerReplied
from celery5.observability import Storage
from tests.redis.commands.staff import Staff, wait_until
from tests.redis.health.test_probes import probe
from tests.redis.observability.surfaces import Surfaces
from tests.redis.worker.workers import working
from tests.trio.health.test_status_port import free_port

FACT = "full, nothing more is stored: noeviction, "
FILLED = "most of it: queue money "


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
    shown = (await surfaces.run_json("top"))["memory"]
    assert shown[0]["used"] > shown[0]["limit"] == 1_000_000
    assert shown[0]["filled_by"].startswith("queue money ")


def test_a_refused_job_says_that_memory_is_full_and_what_to_do(filled: App) -> None:
    with pytest.raises(BrokerReplied, match=r"memory is full.*raise maxmemory.*queue storage.*send it again"):
        filled.tasks["pay"].delay("x")


async def test_results_are_part_of_what_a_server_holds(app: App) -> None:
    @app.task(name="big")
    async def big() -> str:
        return "x" * 5000

    async with working(app):
        sent = await app.asend_many([big.s() for _ in range(300)])
        for one in sent:
            await one.aget(timeout=30)
    found: Storage = await app.metrics.astorage()
    assert 1_500_000 < (found.others["results"] or 0) < 3_500_000
    assert found.results == {"default": found.others["results"]}


def test_a_worker_is_not_ready_while_memory_is_full(own_staff: Staff, own_server: EmbeddedServer) -> None:
    port = free_port()
    own_staff.start(status_port=port)
    wait_until(lambda: probe(port).status == 200)
    with redis.Redis.from_url(own_server.url) as client:
        client.config_set("maxmemory", 1)
        try:
            wait_until(lambda: b"nothing more is stored" in probe(port).body)
            assert probe(port).status == 503
        finally:
            client.config_set("maxmemory", 0)
    wait_until(lambda: probe(port).status == 200)
