"""Two data centres, each with a Redis Cluster of its own: one is cut off, and the control plane of the other is
restarted meanwhile. It comes up with what it reaches, its queues are served and its schedules fire; what is sent to the
other side waits, and runs afterwards.
"""

import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from celery5 import App
from celery5.errors import BrokerUnavailable
from tests.cluster_servers import TestCluster, running_cluster
from tests.night import with_clusters
from tests.story.cluster.controlling import LIMIT, Controlling, until, working_in
from tests.story.conftest import fresh_modules

pytestmark = [
    pytest.mark.timeout(500),
    with_clusters("two minutes"),
]

SHOP = """
from pathlib import Path

from celery5 import App, every

app = App(
    {name!r},
    broker={frankfurt!r},
    brokers={{"dublin": {dublin!r}}},
    routes={{"dublin-*": "dublin"}},
    backlog=1000,
    concurrency=4,
    lease=3,
    grace_period=5,
)

def note(name: str) -> None:
    with Path({ticks!r}).open("a") as file:
        file.write(name + "\\n")

@app.task(queue="orders")
async def order(number: int) -> int:
    return number

@app.task(queue="dublin-mails")
async def mail(number: int) -> int:
    return number

@app.task(queue="orders", schedule=every(0.5))
async def order_tick() -> None:
    note("order")

@app.task(queue="dublin-mails", schedule=every(0.5))
async def mail_tick() -> None:
    note("mail")
"""
CLUSTER = """
[workers.default]
count = 1
queues = ["orders", "dublin-mails"]

[schedulers.default]
count = 1
"""

__all__ = ["fresh_modules"]


@pytest.fixture(scope="module")
def clusters(server_binary: str | None) -> Iterator[dict[str, TestCluster]]:
    """The brokers of the data centres, by the name of the task that is performed there."""
    with running_cluster(server_binary) as frankfurt, running_cluster(server_binary) as dublin:
        yield {"order": frankfurt, "mail": dublin}


@pytest.fixture
def shop(
    tmp_path: Path,
    app_name: str,
    clusters: dict[str, TestCluster],
    fresh_modules: None,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[App]:
    """An application with a broker in each data centre: `default` is the one in Frankfurt."""
    urls = {"frankfurt": clusters["order"].url, "dublin": clusters["mail"].url}
    source = SHOP.format(name=app_name, ticks=str(tmp_path / "ticks"), **urls)
    (tmp_path / "ticks").touch()
    with working_in(tmp_path, "shop", source, monkeypatch) as app:
        yield app


def wake(cluster: TestCluster) -> None:
    """Have all nodes go on, and wait until they are a cluster again."""
    for node in cluster.nodes:
        node.send_signal(signal.SIGCONT)
    cluster.wait_until_whole()


@pytest.mark.parametrize(("near", "far"), [("mail", "order"), ("order", "mail")])
def test_a_data_centre_that_is_restarted_while_the_other_is_cut_off_does_its_own_work(
    shop: App, clusters: dict[str, TestCluster], tmp_path: Path, near: str, far: str
) -> None:
    def count_ticks() -> Counter[str]:
        return Counter((tmp_path / "ticks").read_text().split())

    def fires(name: str) -> None:
        before = count_ticks()[name]
        until(lambda: count_ticks()[name] >= before + 2)

    with Controlling(tmp_path, CLUSTER).up():
        fires("order")
        fires("mail")
    for node in clusters[far].nodes:
        node.send_signal(signal.SIGSTOP)
    try:
        with Controlling(tmp_path, CLUSTER) as controller:
            until(lambda: "worker-default-1" in controller.pids())
            assert shop.tasks[f"shop.{near}"].delay(1).get(timeout=LIMIT) == 1
            fires(near)
            waiting = shop.tasks[f"shop.{far}"].delay(2)
            assert shop.backlog.size == 1, "published later: available"
            with pytest.raises(BrokerUnavailable):
                waiting.status()  # no old answer: consistent
            wake(clusters[far])
            assert waiting.get(timeout=LIMIT) == 2
            fires(far)
            fires(near)
            until(lambda: controller.logged("leadership:acquired"))
    finally:
        wake(clusters[far])
