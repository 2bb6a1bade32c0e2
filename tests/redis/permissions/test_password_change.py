"""A password of Redis is changed while workers run, as `docs/guide/trust.md` says: nothing is lost or restarted."""

import os
import re
import sys
from pathlib import Path
from typing import Any, cast

import redis

from celery5.broker.servers.embedded import EmbeddedServer
from tests.redis.commands.staff import Employee, Staff, wait_until

PAGE = Path(__file__).parents[3] / "docs/guide/trust.md"
USER = "shop-worker"


def read_steps() -> list[list[str]]:
    """Return the words of the commands for Redis that the page shows, in order."""
    section = PAGE.read_text().partition("## Change a password of Redis")[2].partition("\n## ")[0]
    found = re.findall(r"(?m)^    ```redis\n(.*?)^    ```", section, re.DOTALL)
    return [line.split() for block in found for line in block.splitlines()]


def count_connections(admin: Any) -> int:
    """Return how many connections the user has."""
    return sum(client["user"] == USER for client in admin.client_list())


def start(staff: Staff, config: Path) -> Employee:
    """Start a worker whose URL is in a configuration file alone."""
    command = ["env", "-u", "CELERY5_BROKER", sys.executable, "-m", "celery5"]
    command += ["-A", "tests.redis.events.historian:app", "worker", "start", "--config", str(config)]
    worker = staff.launch(command, forked=False)
    wait_until(lambda: bool(worker.lines("worker:started")) or worker.process.poll() is not None)
    assert worker.process.poll() is None, worker.output.read_text()
    return worker


def test_a_password_is_changed_while_workers_run_and_none_restarts(
    own_staff: Staff, own_server: EmbeddedServer, tmp_path: Path
) -> None:
    add, remove, kill = read_steps()
    config = tmp_path / "celery5.toml"

    def write_url(password: str) -> None:
        url = own_server.url.replace("unix://", f"unix://{USER}:{password}@", 1)
        draft = tmp_path / "draft"
        draft.write_text(f'broker = "{url}"\n')
        os.replace(draft, config)

    def run_job() -> int:
        (job,) = own_staff.app.send_many([own_staff.app.signature("nap", 0.0)])
        return int(job.get(timeout=30))

    with redis.Redis.from_url(own_server.url) as client:
        admin = cast("Any", client)
        admin.execute_command("ACL", "SETUSER", USER, "on", ">old", "~*", "&*", "+@all")
        write_url("old")
        worker = start(own_staff, config)
        long = own_staff.app.send_many([own_staff.app.signature("nap", 2.0)])[0]
        wait_until(lambda: len(own_staff.notes()) == 1)
        admin.execute_command(*add)
        write_url("new")
        wait_until(lambda: len(worker.lines("worker:started")) == 2)
        assert worker.lines("configuration:changed")[0]["settings"] == ["broker"]
        assert long.get(timeout=30) == worker.process.pid
        admin.execute_command(*remove)
        admin.execute_command(*kill)
        assert run_job() == worker.process.pid  # with new connections, which need the new password
        assert count_connections(admin) > 0
        assert len({note.job for note in own_staff.notes()}) == len(own_staff.notes()) == 2
        assert worker.process.poll() is None


def test_a_worker_with_a_removed_password_waits_for_the_new_one(
    own_staff: Staff, own_server: EmbeddedServer, tmp_path: Path
) -> None:
    add, remove, kill = read_steps()
    config, url = tmp_path / "celery5.toml", own_server.url
    with redis.Redis.from_url(url) as client:
        admin = cast("Any", client)
        admin.execute_command("ACL", "SETUSER", USER, "on", ">old", "~*", "&*", "+@all")
        config.write_text(f'broker = "{url.replace("unix://", f"unix://{USER}:old@", 1)}"\n')
        worker = start(own_staff, config)
        for step in (add, remove, kill):
            admin.execute_command(*step)
        (job,) = own_staff.app.send_many([own_staff.app.signature("nap", 0.0)])
        wait_until(lambda: bool(worker.lines("broker:disconnected")))
        config.write_text(f'broker = "{url.replace("unix://", f"unix://{USER}:new@", 1)}"\n')
        assert job.get(timeout=60) == worker.process.pid
