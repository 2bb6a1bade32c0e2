"""A Controller that begins while the default broker cannot be reached: it keeps the members that its host needs."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from celery5 import App
from celery5.broker.servers.embedded import EmbeddedServer
from tests.story.cluster.controlling import LIMIT, Controlling, until, working_in
from tests.story.conftest import fresh_modules

pytestmark = pytest.mark.timeout(500)

POST = """
from celery5 import App

app = App(
    {name!r},
    broker={url!r},
    brokers={{"mails": {second!r}}},
    routes={{"letters": "mails"}},
    concurrency=4,
    lease=3,
    grace_period=5,
)

@app.task(queue="letters")
async def letter(number: int) -> int:
    return number
"""
CLUSTER = """
[workers.default]
count = 1
queues = ["letters"]
"""

__all__ = ["fresh_modules"]


@pytest.fixture
def office(
    tmp_path: Path,
    app_name: str,
    url: str,
    own_server: EmbeddedServer,
    fresh_modules: None,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[App]:
    """An application whose default broker is the test's own server, and whose letters are on another one."""
    source = POST.format(name=app_name, url=own_server.url, second=url)
    with working_in(tmp_path, "post", source, monkeypatch) as app:
        yield app


def test_its_members_do_the_work_of_the_broker_that_is_there(
    office: App, own_server: EmbeddedServer, tmp_path: Path
) -> None:
    letter = office.tasks["post.letter"]
    own_server.kill()
    with Controlling(tmp_path, CLUSTER, target="post").up() as controller:
        assert letter.delay(1).get(timeout=LIMIT) == 1
        assert controller.logged("broker:connect-failed")
        own_server.revive()
        until(lambda: controller.logged("leadership:acquired"))
        until(lambda: len(controller.of("worker-default-1", "started")) == 2)
        assert letter.delay(2).get(timeout=LIMIT) == 2
        assert set(controller.members()) == {"worker-default-1"}
