"""Django: after a broken connection, or a transaction that was left open, the next job of a thread is well again."""

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from celery5 import App, TaskFailed
from celery5.broker.servers.embedded import EmbeddedServer
from celery5.contrib.django import DjangoConnections
from celery5.middleware import django_connections
from celery5.middleware.django_connections import is_django_configured
from tests.postgres import find_missing, running_postgres
from tests.redis.commands.staff import wait_until
from tests.story.cli.commands import LIMIT, environment
from tests.watched import watched

MODULE = "tests.redis.observability.django_shop"


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def database(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, str]]:
    """The environment that names the database: a PostgreSQL really ends connections."""
    if request.param == "sqlite":
        yield {"DJANGO_DB": str(tmp_path_factory.mktemp("database") / "db")}
        return
    if why := find_missing():
        pytest.skip(why)
    with running_postgres() as socket_folder:
        yield {
            "DJANGO_ENGINE": "django.db.backends.postgresql",
            "DJANGO_DB": "postgres",
            "DJANGO_HOST": socket_folder,
        }


@pytest.fixture(scope="module")
def shop(
    server: EmbeddedServer, tmp_path_factory: pytest.TempPathFactory, database: dict[str, str]
) -> Iterator[App]:
    """A producer for the project, whose worker runs: no Django here."""
    folder = tmp_path_factory.mktemp("django")
    name = f"django-{os.getpid()}-{'postgresql' if 'DJANGO_HOST' in database else 'sqlite'}"
    # Queries on Trio, which are refused otherwise.
    env = environment(CELERY5_BROKER=server.url, DJANGO_APP=name, DJANGO_ALLOW_ASYNC_UNSAFE="1", **database)
    command = [sys.executable, "-m", "celery5", "-A", MODULE, "worker", "start"]
    with (folder / "log").open("wb") as log:
        worker = subprocess.Popen(command, env=env, stdout=log, stderr=log)
    with watched(server):
        app = App(name, broker=server.url)
        for task in ("thread", "boxed", "asyncio", "trio", "asyncio-again"):

            @app.task(name=task)
            def act(action: str = "") -> Any: ...

        app.stream("orders", partitions=1)
        # Then it has begun: before that, the signal to stop would just end it.
        app.tasks["thread"].delay("query").get(timeout=LIMIT)
        yield app
        worker.terminate()
        assert worker.wait(LIMIT) == 0, (folder / "log").read_text()
        assert "middleware:failed" not in (folder / "log").read_text()
        app.close()


def act(app: App, task: str, *args: str) -> Any:
    """Return the result of a job."""
    return app.tasks[task].delay(*args).get(timeout=LIMIT)


@pytest.mark.parametrize("kind", ["thread", "boxed", "asyncio", "trio"])
def test_no_later_job_fails_after_a_connection_broke(shop: App, kind: str) -> None:
    assert act(shop, kind, "query") == 7
    act(shop, kind, "break")
    outcomes: list[object] = []
    for _ in range(4):
        try:
            outcomes.append(act(shop, kind, "query"))
        except TaskFailed as error:
            outcomes.append(error.type)
    # A connection shows that it is broken by failing once, where it may stay open between jobs, as it does here.
    assert outcomes[1:] == [7, 7, 7]


@pytest.mark.parametrize("kind", ["thread", "boxed", "asyncio"])
def test_no_job_fails_after_a_connection_broke_whose_health_is_checked(
    shop: App, database: dict[str, str], kind: str
) -> None:
    if "DJANGO_HOST" not in database:
        pytest.skip("sqlite says of every connection that it is usable")
    assert act(shop, kind, "query checked") == 7
    act(shop, kind, "break checked")
    assert [act(shop, kind, "query checked") for _ in range(2)] == [7, 7]


@pytest.mark.parametrize(("kind", "other"), [("thread", "boxed"), ("boxed", "thread"), ("asyncio", "thread")])
def test_no_connection_without_an_age_stays_open_after_a_job(
    shop: App, database: dict[str, str], kind: str, other: str
) -> None:
    if "DJANGO_HOST" not in database:
        pytest.skip("sqlite has no list of connections")
    assert act(shop, kind, "query short") == 7
    wait_until(lambda: act(shop, other, "count short") == 0)


@pytest.mark.parametrize("kind", ["thread", "boxed", "asyncio"])
def test_a_transaction_that_was_left_open_does_not_take_in_the_next_job(shop: App, kind: str) -> None:
    act(shop, kind, "leave")
    _, is_open, _ = act(shop, kind, "describe")
    assert not is_open
    assert act(shop, kind, "query") == 7


@pytest.mark.parametrize("kind", ["thread", "boxed"])
def test_queries_are_remembered_for_one_job_alone(shop: App, kind: str) -> None:
    for _ in range(3):
        act(shop, kind, "query")
    remembered, _, _ = act(shop, kind, "describe")
    assert remembered == 0


def test_each_asyncio_job_has_one_thread_for_its_queries(shop: App) -> None:
    first, second = act(shop, "asyncio-again")
    assert first == second
    assert act(shop, "asyncio", "query") == 7


def test_a_processor_goes_on_after_a_connection_broke(shop: App) -> None:
    stream: Any = shop.streams["orders"]
    stream.send({"n": 0}, {"n": 1}, {"n": 2})

    def is_done() -> bool:
        groups = shop.streams.info("orders")[0].groups
        return bool(groups) and groups[0].lag == 0

    wait_until(is_done)
    dead = [dead_record.record for dead_record in shop.streams.dead_records.read("orders", "look_up")]
    assert dead in ([], [{"n": 0}])
    shop.streams.dead_records.purge("orders", "look_up")


def test_it_is_there_when_django_is_configured_and_only_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DJANGO_SETTINGS_MODULE", raising=False)
    monkeypatch.delitem(sys.modules, "django.conf", raising=False)
    assert not is_django_configured()
    app = App("shop")
    assert list(app.middleware) == []
    monkeypatch.setenv("DJANGO_SETTINGS_MODULE", "shop.settings")
    app.load()  # Django was configured since
    assert [type(middleware) for middleware in app.middleware] == [DjangoConnections]
    mine = DjangoConnections()
    assert list(App("shop", middleware=[mine]).middleware) == [mine]
    monkeypatch.setattr(django_connections, "find_spec", lambda _name: None)
    assert not is_django_configured()
