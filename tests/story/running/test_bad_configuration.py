"""Bad configuration: it keeps nobody from looking at workers that run, and from commanding them."""

import signal
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest
import redis

from celery5.broker.servers.embedded import EmbeddedServer
from tests.story.cli.commands import Serving, celery5


def write_shop(folder: Path, config: str) -> None:
    """An application with a task, configured from somewhere."""
    (folder / "shop.py").write_text(
        dedent(
            f"""
            from celery5 import App

            app = App("shop", config={config!r})

            @app.task
            async def noop() -> None: ...
            """
        )
    )


@pytest.mark.parametrize("config", ["celery5.toml"])  # of the hash in Redis only the bad field is skipped
def test_workers_are_seen_and_commanded_whatever_the_configuration_says_by_now(
    own_server: EmbeddedServer, redis_of: "redis.Redis", tmp_path: Path, config: str
) -> None:
    write_shop(tmp_path, config)
    file = tmp_path / "celery5.toml"
    file.write_text("concurrency = 5\n")
    env = {"CELERY5_BROKER": own_server.url, "CELERY5_KEYS": str(tmp_path / "keys")}
    with Serving("-A", "shop", "worker", "start", cwd=tmp_path, env=env) as worker:
        worker.ready()
        file.write_text("concurency = 5\n")
        redis_of.hset("celery5:{shop}:settings", "concurency", "5")
        warning = "Warning: going on without the configuration: setting 'concurency'"
        seen = celery5("-A", "shop", "info", cwd=tmp_path, env=env)
        assert (seen.code, warning in seen.err) == (0, True), seen
        served = celery5("-A", "shop", "worker", "start", cwd=tmp_path, env=env)
        assert (served.code, "Error: setting 'concurency'" in served.err) == (2, True), served
        ended = celery5("-A", "shop", "worker", "shutdown", cwd=tmp_path, env=env)
        assert (ended.code, warning in ended.err) == (0, True), ended
        assert worker.ended().code == 0


def test_in_development_the_hash_of_a_server_that_is_not_there_yet_is_not_asked_for(tmp_path: Path) -> None:
    write_shop(tmp_path, "redis")
    with Serving("-A", "shop", "controller", "start", "--development", cwd=tmp_path) as worker:
        worker.ready()
        worker.signal(signal.SIGTERM)
        assert worker.ended().code == 0


@pytest.fixture
def redis_of(own_server: EmbeddedServer) -> Iterator["redis.Redis"]:
    """A plain client of the test's own server."""
    with redis.Redis.from_url(own_server.url) as client:
        yield client
        client.delete("celery5:{shop}:settings")
