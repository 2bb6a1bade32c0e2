"""Unsupported servers: a Redis Cluster whose URL names a database, or a Sentinel, is refused at the handshake in one
line that says so."""

import asyncio
import re
import socket
import subprocess
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

import pytest
import redis
import trio

from celery5 import App
from celery5.broker.servers.embedded import find_binary
from celery5.errors import BrokerUnsupported
from tests.story.cli.commands import Ended, celery5, until

SHOP = """
from celery5 import App

app = App({name!r})

@app.task
async def add(a: int, b: int) -> int:
    return a + b
"""
CLUSTER = """
[workers.default]
count = 1
"""
SLOTS = 16384


def find_free_port() -> int:
    """A port that no one listens on, whose cluster bus (10,000 above) is a port, too."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port: int = probe.getsockname()[1]
        if port < 55_000:
            return port


def answers(client: Any) -> bool:
    """Whether the server takes commands."""
    with suppress(redis.ConnectionError):
        return bool(client.ping())
    return False


@contextmanager
def serving(*words: str, slots: int = 0) -> Generator[str, None, None]:
    """A server on a port until the end of the block, which has so many slots of a cluster. Gives its URL."""
    port = find_free_port()
    server = subprocess.Popen([*words, "--port", str(port)], stdout=subprocess.DEVNULL, env={"LC_ALL": "C"})
    try:
        with redis.Redis(port=port, socket_timeout=10) as connection:
            client: Any = connection
            until(lambda: answers(client))
            if slots:
                client.execute_command("CLUSTER", "ADDSLOTS", *range(slots))
                until(lambda: b"cluster_state:ok" in client.execute_command("CLUSTER", "INFO"))
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        server.kill()
        server.wait()


@pytest.fixture(scope="module")
def cluster(server_binary: str | None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real Redis Cluster of one node, and the URL of a database that no cluster has."""
    folder = str(tmp_path_factory.mktemp("cluster"))
    binary = str(find_binary(server_binary))
    with serving(binary, "--cluster-enabled", "yes", "--save", "", "--dir", folder, slots=SLOTS) as url:
        yield url.replace("/0", "/3")


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    """A folder with an application that names no broker. Its name is short: it is part of the path of a socket."""
    (tmp_path / "shop.py").write_text(SHOP.format(name=f"s{uuid4().hex[:8]}"))
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    return tmp_path


def check_refused(ended: Ended) -> None:
    """The command failed with one line that names the reason and what to do."""
    assert ended.code == 1
    assert "Traceback" not in ended.out + ended.err
    (error,) = [line for line in ended.err.splitlines() if line.startswith("Error: ")]
    assert re.search(
        r"broker redis://(127\.0\.0\.1:\d+)/3 is part of a Redis Cluster: write redis\+cluster://\1, with more",
        error,
    )


PROCESSES = [
    "worker start",
    "worker start --processes 2",
    "worker start --burst",
    "router start",
    "scheduler start",
    "publisher start --backlog memory",
    "dashboard start --port 0",
    "controller start --development",
    "controller start --cluster cluster.toml",
]


@pytest.mark.parametrize("words", PROCESSES)
def test_every_process_refuses_a_redis_cluster_in_one_line(shop: Path, cluster: str, words: str) -> None:
    check_refused(celery5("-A", "shop", *words.split(), cwd=shop, env={"CELERY5_BROKER": cluster}))


@pytest.mark.parametrize(
    "words", ["info", "task send shop.add --args [1,2]", "queue list", "dlq read", "worker list"]
)
def test_every_command_refuses_a_redis_cluster_in_one_line(shop: Path, cluster: str, words: str) -> None:
    check_refused(celery5("-A", "shop", *words.split(), cwd=shop, env={"CELERY5_BROKER": cluster}))


async def _add(a: int, b: int) -> int:
    return a + b


def send_in_trio(app: App) -> None:
    trio.run(app.task(_add).adelay, 1, 2)


def send_in_asyncio(app: App) -> None:
    asyncio.run(app.task(_add).adelay(1, 2))


def start_a_workflow(app: App) -> None:
    add = app.task(_add)
    (add.s(1, 2) | add.s(3)).start()


def get_a_result(app: App) -> None:
    app.result("x").get(timeout=5)


def send_a_record(app: App) -> None:
    app.stream("orders", int).send(1)


PRODUCERS: dict[str, Callable[[App], object]] = {
    "delay": lambda app: app.task(_add).delay(1, 2),
    "adelay in Trio": send_in_trio,
    "adelay in asyncio": send_in_asyncio,
    "many": lambda app: app.send_many([app.task(_add).s(1, 2)] * 3),
    "a stream": send_a_record,
    "a workflow": start_a_workflow,
    "a result": get_a_result,
}


@pytest.mark.parametrize("backlog", [0, 1000])
@pytest.mark.parametrize("producer", PRODUCERS)
def test_every_producer_refuses_a_redis_cluster_in_one_line(
    cluster: str, app_name: str, producer: str, backlog: int
) -> None:
    app = App(app_name, broker=cluster, backlog=backlog)
    with closing(app), pytest.raises(BrokerUnsupported, match="is part of a Redis Cluster") as caught:
        PRODUCERS[producer](app)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("process", ["worker", "scheduler", "publisher", "dashboard"])
def test_a_process_of_several_brokers_refuses_one_that_is_a_redis_cluster(
    shop: Path, cluster: str, url: str, process: str
) -> None:
    env = {
        "CELERY5_BROKER": url,
        "CELERY5_BROKERS": f'{{"mails": "{cluster}"}}',
        "CELERY5_ROUTES": '{"mails": "mails"}',
    }
    more = ["--queues", "default,mails"] if process == "worker" else []
    check_refused(celery5("-A", "shop", process, "start", *more, cwd=shop, env=env))


def test_a_user_with_few_permissions_is_told_of_the_cluster_too(cluster: str, app_name: str) -> None:
    url = cluster.replace("/3", "/0")
    with cast("Any", redis.Redis).from_url(url) as client:
        client.execute_command("ACL", "SETUSER", "few", "on", ">secret", "-@all", "+hello", "+auth")
    app = App(app_name, broker=url.replace("redis://", "redis://few:secret@"))
    with closing(app), pytest.raises(BrokerUnsupported, match="is part of a Redis Cluster"):
        app.task(_add).delay(1, 2)


def test_a_sentinel_is_refused_in_one_line(server_binary: str | None, shop: Path) -> None:
    file = shop / "sentinel.conf"
    file.write_text("")
    with serving(str(find_binary(server_binary)), str(file), "--sentinel") as url:
        ended = celery5("-A", "shop", "worker", "start", cwd=shop, env={"CELERY5_BROKER": url})
    assert ended.code == 1
    assert "is a Sentinel, which keeps no data; name the server that it watches" in ended.error
