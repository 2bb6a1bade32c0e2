"""The examples and the demo on a cluster of three primaries with replicas and with sentinels; and on these and on one
server over TLS, for a user who may no more than `celery5 acl` prints: only the URL differs.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis

from celery5.broker.keys import Keys
from celery5.broker.servers.embedded import EmbeddedServer
from celery5.examples.log_lines.folder import make_files
from tests.access import Access, list_denied
from tests.cluster_servers import running_cluster
from tests.night import with_clusters
from tests.sentinel_servers import find_free_ports, watched_servers
from tests.story.cli.commands import celery5
from tests.story.cluster.controlling import until
from tests.story.examples.killing import running_example
from tests.story.examples.test_shop import open_shop, spend_a_day
from tests.tls_files import find_tls_binary

pytestmark = [
    pytest.mark.timeout(300),
    with_clusters("minutes"),
]
APPLICATIONS = ("corner-shop", "log-lines", "order-workflow")
"""The names of the applications of the examples. Each demo has one of its own, which begins with `demo-`."""


@pytest.fixture(scope="module", params=["cluster", "sentinel", "server+tls", "cluster+tls", "sentinel+tls"])
def broker(
    request: pytest.FixtureRequest, server_binary: str | None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """The URL of a broker. With TLS afterwards nothing was denied."""
    ground, _, tls = request.param.partition("+")
    if tls:
        patterns = [pattern for app in APPLICATIONS for pattern in Keys(app).patterns] + ["celery5:{demo-*"]
        rules = [f"{kind}{pattern}" for pattern in patterns for kind in "~&"]
        access = Access(tmp_path_factory.mktemp("tls"), APPLICATIONS[0], ["operator"], rules)
        with SECURED[ground](find_tls_binary(server_binary), access) as (url, clients):
            yield access.make_url(url, "operator")
            assert list_denied(clients) == []
    elif ground == "sentinel":
        with watched_servers(server_binary) as servers:
            yield servers.url
    else:
        with running_cluster(server_binary, has_replicas=True) as cluster:
            yield cluster.url


Secured = Iterator[tuple[str, Sequence[Any]]]
"""The URL of servers that speak TLS, and a client of each server."""


@contextmanager
def _secure_server(binary: str, access: Access) -> Secured:
    (port,) = find_free_ports(1)
    with (
        EmbeddedServer.start(access.write_program(binary, port)) as server,
        redis.Redis.from_url(server.url, decode_responses=True) as client,
    ):
        yield f"rediss://127.0.0.1:{port}/0", [client]


@contextmanager
def _secure_cluster(binary: str, access: Access) -> Secured:
    """Run a cluster. The URL does not say that it is one."""
    with running_cluster(binary, has_replicas=True, access=access) as cluster:
        yield f"rediss://127.0.0.1:{cluster.primaries[1].port}/0", [node.client for node in cluster.nodes]


@contextmanager
def _secure_sentinel(binary: str, access: Access) -> Secured:
    with watched_servers(binary, **access.sentinel_options) as servers:
        yield servers.url, [server.client for server in (*servers.servers, *servers.sentinels)]


SECURED = {"server": _secure_server, "cluster": _secure_cluster, "sentinel": _secure_sentinel}


@pytest.mark.parametrize("flags", [(), ("--streams",)])
def test_the_demo_counts_what_a_plain_count_does(broker: str, tmp_path: Path, flags: tuple[str, ...]) -> None:
    folder = tmp_path / "files"
    make_files(folder, hosts=2, minutes=3, lines=20)
    ended = celery5("demo", folder, "--json", *flags, cwd=tmp_path, env={"CELERY5_BROKER": broker}, limit=120)
    assert (ended.code, ended.err) == (0, "")
    result: dict[str, Any] = json.loads(ended.out)
    assert (result["matches"], result["differences"]) == (True, [])


def test_each_log_line_counts_once(broker: str, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    make_files(logs, hosts=4, minutes=10, lines=100)
    with running_example("celery5.examples.log_lines", broker, tmp_path) as example:
        example.run("send", logs)
        example.kill("worker-default-1")
        assert example.run("check", logs).endswith("as a plain count says\n")


def test_an_order_that_is_refused_is_refunded(broker: str, tmp_path: Path) -> None:
    database = str(tmp_path / "orders.db")
    with running_example("celery5.examples.order_workflow", broker, tmp_path, ORDERS_DB=database) as example:
        assert example.run("place", 7, "cup", "pen") == "order-7 is placed\n"
        until(lambda: "charged 1980" in example.run("show", 7))
        example.kill("worker-default-1")
        example.run("decide", 7, "no", "--by", "Bo")
        until(lambda: example.run("show", 7).startswith("FAILED"))
        assert "refunded 1980" in example.run("show", 7)


def test_a_day_in_the_shop(
    broker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh_modules: None
) -> None:
    with open_shop(tmp_path, monkeypatch, broker=broker) as shop:
        spend_a_day(shop)
