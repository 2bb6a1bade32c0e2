"""Router: the process that routes, from its start to its end."""

import os
import signal
from pathlib import Path

import redis
import trustme  # noqa: F401  the desk forgets what is imported while it is used, and this bears no second time

from celery5.broker.keys import EVENTS, GROUP
from tests.story.cli.commands import Serving, celery5, until
from tests.story.conftest import Desk


def routing(desk: Desk, *words: object, routers: int = 1) -> Serving:
    """Routers that are up."""
    serving = Serving("-A", "shop", "router", "start", *words, cwd=desk.folder)
    until(lambda: len(serving.logged("router:started")) >= routers or serving.process.poll() is not None)
    assert serving.process.poll() is None, serving.err
    return serving


def members(desk: Desk, url: str) -> list[bytes]:
    """Who counts as a living Router."""
    with redis.Redis.from_url(url) as client:
        found: list[bytes] = client.zrange(desk.app.queue(EVENTS).leases, 0, -1)
        return found


def test_a_router_starts_takes_commands_and_stops_in_order(desk: Desk, url: str) -> None:
    with routing(desk, "--name", "r1") as serving:
        assert [member.rpartition(b":")[0] for member in members(desk, url)] == [b"r1"]
        (reply,) = desk.app.control.send("ping", to="r1")
        assert (reply.ok, reply.answer["pong"].rpartition(":")[0]) == (True, "r1")
        (strange,) = desk.app.control.send("pause-queue", {"queue": "default"}, to="r1")
        assert (strange.ok, strange.reason) == (False, "refused")
        serving.signal(signal.SIGTERM)
        assert serving.ended().code == 0
        assert serving.logged("router:stopped")
        assert {message["process"] for message in serving.logged("process:started")} == {"router"}
        assert not members(desk, url)


def test_a_router_ends_when_it_is_told_to(desk: Desk, url: str) -> None:
    with routing(desk, "--name", "r1") as serving:
        (reply,) = desk.app.control.send("shutdown", to="r1")
        assert reply.ok
        assert serving.ended().code == 0


def test_of_several_router_processes_one_that_dies_is_replaced(desk: Desk, url: str) -> None:
    with routing(desk, "--processes", 2, routers=2) as serving:
        first = {line["name"] for line in serving.logged("router:boot-started")}
        (pid, *_) = [int(name.rpartition(":")[0].rpartition(":")[2]) for name in first]
        os.kill(pid, signal.SIGKILL)
        until(lambda: len(serving.logged("router:started")) == 3)
        assert f"router process {pid} ended with -9" in serving.err
    with redis.Redis.from_url(url) as client:
        groups = client.xinfo_groups(desk.app.queue(EVENTS).stream)
        assert [group["name"] for group in groups] == [GROUP.encode()]


def test_a_router_without_redis_says_so_in_one_line(tmp_path: Path) -> None:
    tmp_path.joinpath("shop.py").write_text(
        "from celery5 import App\napp = App('shop', broker='redis://127.0.0.1:1/0')"
    )
    ended = celery5("-A", "shop", "router", "start", cwd=tmp_path)
    assert ended.code != 0
    assert "127.0.0.1:1" in ended.err.splitlines()[-1]
    assert "Traceback" not in ended.err
