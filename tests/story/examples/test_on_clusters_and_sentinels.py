"""The examples and the demo on a cluster of three primaries with replicas, with sentinels, and on such a cluster over
TLS for a user who may no more than `celery5 acl` prints: only the URL differs.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from celery5.broker.keys import Keys
from celery5.broker.permissions import make_user
from celery5.examples.log_lines.folder import make_files
from tests.cluster_servers import TestCluster, running_cluster
from tests.night import with_clusters
from tests.redis.permissions.test_roles import PASSWORD, SPARED
from tests.sentinel_servers import watched_servers
from tests.story.cli.commands import celery5
from tests.story.cluster.controlling import until
from tests.story.examples.killing import running_example
from tests.story.examples.test_shop import open_shop, spend_a_day
from tests.tls_files import find_tls_binary, write_certificates

pytestmark = [
    pytest.mark.timeout(300),
    with_clusters("minutes"),
]
APPLICATIONS = ("corner-shop", "log-lines", "order-workflow")
"""The names of the applications of the examples. Each demo has one of its own, which begins with `demo-`."""


@pytest.fixture(scope="module", params=["cluster", "sentinel", "cluster over TLS for a user"])
def broker(
    request: pytest.FixtureRequest, server_binary: str | None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """The URL of a broker."""
    if request.param == "sentinel":
        with watched_servers(server_binary) as servers:
            yield servers.url
    elif request.param == "cluster":
        with running_cluster(server_binary, has_replicas=True) as cluster:
            yield cluster.url
    else:
        certificates = write_certificates(tmp_path_factory.mktemp("tls"))
        binary = find_tls_binary(server_binary)
        with (
            running_cluster(binary, has_replicas=True, certificates=certificates) as cluster,
            denying_nothing(cluster) as url,
        ):
            yield url


@contextmanager
def denying_nothing(cluster: TestCluster) -> Iterator[str]:
    """Make a user who may no more than operators of these applications; afterwards nothing was denied."""
    user = make_user(APPLICATIONS[0], "operator", on_cluster=cluster.primaries[0].has_sharded_channels)
    patterns = [pattern for app in APPLICATIONS for pattern in Keys(app).patterns] + ["celery5:{demo-*"]
    more = [f"{kind}{pattern}" for pattern in patterns for kind in "~&"]
    for node in cluster.nodes:
        node.client.execute_command("ACL", "SETUSER", user.user, f">{PASSWORD}", *user.rules, *more)
    yield cluster.url.replace("://", f"://{user.user}:{PASSWORD}@")
    denied = {entry["object"].encode() for node in cluster.nodes for entry in node.client.acl_log()}
    assert denied <= SPARED, "something was denied that it cannot do without"


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
