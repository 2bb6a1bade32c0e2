"""The Django project among the examples: its own tests, and orders whose receipts a worker writes."""

import json
import socket
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from celery5.broker.servers.embedded import EmbeddedServer
from tests.postgres import find_missing, running_postgres
from tests.story.cli.commands import LIMIT, Serving, environment, until

MANAGE = [sys.executable, "-W", "error", "-m", "celery5.examples.django_shop.manage"]


@pytest.fixture(params=["sqlite", "postgresql"])
def env(
    request: pytest.FixtureRequest, own_server: EmbeddedServer, tmp_path: Path
) -> Iterator[dict[str, str]]:
    """The environment of the project: its broker and its database."""
    broker = {"CELERY5_BROKER": own_server.url}
    if request.param == "sqlite":
        yield {**broker, "DATABASE_URL": "", "SHOP_DATABASE": str(tmp_path / "shop.db")}
        return
    if why := find_missing():
        pytest.skip(why)
    with running_postgres() as folder:
        yield {**broker, "DATABASE_URL": f"postgres://postgres@/postgres?host={folder}"}


def run_manage(*words: str, env: dict[str, str], folder: Path) -> str:
    ended = subprocess.run(
        [*MANAGE, *words],
        env=environment(**env),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout + ended.stderr


def test_its_own_tests_pass(env: dict[str, str], tmp_path: Path) -> None:
    text = run_manage("test", "celery5.examples.django_shop", env=env, folder=tmp_path)
    assert "Ran 6 tests" in text
    assert "Warning" not in text


def test_a_view_sends_receipts_which_a_worker_writes(env: dict[str, str], tmp_path: Path) -> None:
    run_manage("migrate", "--run-syncdb", env=env, folder=tmp_path)
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
    serving = ("runserver", "--noreload", f"127.0.0.1:{port}")
    url = f"http://127.0.0.1:{port}/orders/"

    def ask(path: str = "", **fields: str) -> tuple[int, dict[str, Any]]:
        body = urllib.parse.urlencode(fields).encode() if fields else None
        try:
            with urllib.request.urlopen(url + path, body, timeout=LIMIT) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)

    def is_up() -> bool:
        with closing(socket.socket()) as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    with (
        Serving("celery5", "worker", "start", cwd=tmp_path, env=env, program=MANAGE) as worker,
        Serving(*serving, cwd=tmp_path, env=env, program=MANAGE),
    ):
        worker.ready()
        until(is_up)
        assert ask(customer="eve", card="refused")[0] == 402
        status, order = ask(customer="ada")
        assert status == 201
        path = f"{order['order']}/"
        until(lambda: ask(path)[1]["receipt"])
        assert ask(path) == (200, {"customer": "ada", "receipt": "receipt for ada"})
    assert worker.ended().code == 0, worker.err
    assert [line for line in worker.messages if line.get("task")] != []
    assert worker.logged("job:failed") == []
