"""Own health: the example's own health check trips the breaker of its task, and jobs wait for paper."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from celery5 import JobState
from celery5.broker.servers.embedded import EmbeddedServer
from celery5.examples.own_health import app, print_page
from tests.story.cli.commands import Serving, until

EXAMPLE = "celery5.examples.own_health"


@pytest.fixture
def office(own_server: EmbeddedServer) -> Iterator[EmbeddedServer]:
    """A server of the test's own, which the example's application uses meanwhile."""
    before = app.settings.broker
    app.use_broker(own_server.url)
    yield own_server
    app.use_broker(before)


def test_pages_wait_while_there_is_no_paper_and_none_is_lost(office: EmbeddedServer, tmp_path: Path) -> None:
    tray = tmp_path / "tray"
    tray.write_text("5")
    env = {"CELERY5_BROKER": office.url, "TRAY": str(tray)}
    with Serving("-A", EXAMPLE, "worker", "start", cwd=tmp_path, env=env) as worker:
        worker.ready()
        assert print_page.delay("hello").get(timeout=30) == "printed: hello"
        low = until(lambda: worker.logged("health:changed"))
        assert [(line["check"], line["state"]) for line in low] == [("paper", "low")]
        tray.write_text("0")
        (tripped, *_) = until(lambda: worker.logged("breaker:tripped"))
        assert tripped["why"] == "health check paper is empty"
        pages = [print_page.delay(f"page {n}") for n in range(20)]
        until(lambda: any(page.status() is JobState.HELD for page in pages))
        tray.write_text("500")
        assert [page.get(timeout=30) for page in pages] == [f"printed: page {n}" for n in range(20)]
        worker.signal(signal.SIGTERM)
        assert worker.ended().code == 0
    assert worker.logged("breaker:closed")
