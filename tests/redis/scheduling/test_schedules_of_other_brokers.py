"""Schedules of other brokers: they fire while the default broker cannot be reached."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import redis

from celery5.broker.keys import Keys
from celery5.broker.servers.embedded import EmbeddedServer
from tests.story.cli.commands import Serving, until

SHOP = """
from celery5 import App

app = App({name!r}, brokers={{"mails": {second!r}}}, routes={{"post": "mails"}})

@app.task(queue="post", schedule=0.5)
async def send() -> None: ...

@app.task(queue="near", schedule=0.5)
async def count() -> None: ...
"""


@pytest.fixture
def second_server(server_binary: str | None) -> Iterator[EmbeddedServer]:
    """A server that is the broker `mails`."""
    with EmbeddedServer.start(server_binary) as one:
        yield one


def test_a_schedule_fires_on_its_broker_while_the_default_one_is_away(
    own_server: EmbeddedServer, second_server: EmbeddedServer, tmp_path: Path, app_name: str
) -> None:
    (tmp_path / "shop.py").write_text(SHOP.format(name=app_name, second=second_server.url))
    stream = Keys(app_name).for_queue("post").normal

    def count() -> int:
        with cast("Any", redis.Redis).from_url(second_server.url) as client:
            return int(client.xlen(stream))

    with Serving("-A", "shop", "scheduler", "start", cwd=tmp_path, env={"CELERY5_BROKER": own_server.url}):
        until(lambda: count() > 0)
        own_server.kill()
        before = count()
        until(lambda: count() > before + 4)
    own_server.revive()
