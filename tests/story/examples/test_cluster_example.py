"""Cluster example: the description that the guide shows runs, and is restarted under load without a pause or a loss."""

import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from celery5 import App, AsyncResult
from celery5.broker.servers.embedded import EmbeddedServer
from celery5.examples import cluster
from celery5.examples.cluster import kiosk as example
from celery5.protocol.cluster.description import parse_cluster
from tests.story.cluster.controlling import LIMIT, Controlling, until

pytestmark = pytest.mark.timeout(400)
HERE = Path(__file__).parents[3]
DESCRIPTION = (Path(cluster.__file__).parent / "cluster.toml").read_text()
TARGET = "celery5.examples.cluster.kiosk"


@contextmanager
def kiosk(url: str, folder: Path) -> Iterator[tuple[Controlling, App]]:
    """The example's cluster, and its application here."""
    app = example.app
    app.use_broker(url)
    with TemporaryDirectory(prefix="k-", dir="/tmp") as home:  # a socket's path is short
        homes = dict.fromkeys(("XDG_RUNTIME_DIR", "XDG_STATE_HOME"), home)
        controller = Controlling(folder, DESCRIPTION, target=TARGET, env={"CELERY5_BROKER": url, **homes})
        try:
            with controller.up():
                yield controller, app
        finally:
            app.close()


def sell(app: App, count: int = 1, seconds: float = 0.0) -> list[AsyncResult[str]]:
    """Send so many jobs."""
    return app.send_many([example.sell.s(str(n), seconds) for n in range(count)])


def test_the_guide_shows_the_example_as_it_is() -> None:
    page = (HERE / "docs" / "guide" / "controller.md").read_text()
    (shown,) = re.findall(r"(?ms)^```toml\n(.*?)^```$", page)
    assert shown == DESCRIPTION
    assert parse_cluster(DESCRIPTION.encode()).restart_limit == 10


def test_the_example_is_restarted_under_load_and_no_job_is_lost_or_waits(
    own_server: EmbeddedServer, tmp_path: Path
) -> None:
    with kiosk(own_server.url, tmp_path) as (controller, app):
        before = controller.pids()
        assert sorted(before) == [
            *("publisher-default-1", "router-default-1", "scheduler-default-1"),
            *("worker-default-1", "worker-default-2"),
        ]
        results, over = list[AsyncResult[str]](), threading.Event()

        def load() -> None:
            while not over.is_set():
                results.extend(sell(app, 10, 0.02))
                time.sleep(0.1)

        thread = threading.Thread(target=load)
        thread.start()
        try:
            assert controller.tell("restart").code == 0
            until(lambda: set(before.values()).isdisjoint(controller.pids().values()))
            until(lambda: controller.members() and controller.tell("status").code == 0)
        finally:
            over.set()
            thread.join()
        assert len(results) > 50
        assert {result.get(timeout=LIMIT) for result in results} == {f"sold {n}" for n in range(10)}
        assert controller.logged("member:killed") == []
        assert fewest_up(controller, "worker") >= 1
        assert fewest_up(controller, "router") >= 1
        until(lambda: "router-default-2" not in controller.pids())


def fewest_up(controller: Controlling, kind: str) -> int:
    """The fewest members of a kind that were up at once, from when all were."""
    wanted = {"worker": 2, "router": 1}[kind]
    up, found = set[str](), wanted
    whole = False
    for message in controller.messages:
        what = str(message.get("message_type", "")).removeprefix("celery5:member:")
        name = str(message.get("name", ""))
        if not name.startswith(kind):
            continue
        if what == "started":
            up.add(name)
        elif what in ("stop-requested", "ended"):
            up.discard(name)
        whole = whole or len(up) == wanted
        found = min(found, len(up)) if whole else found
    return found
