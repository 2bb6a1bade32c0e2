"""A rolling deployment: processes with the old and with the new code of an application side by side."""

import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import redis

from celery5 import App, JobState, gather
from celery5.broker.servers.embedded import EmbeddedServer
from tests.story.cli.commands import Serving, until

OLD = """
from celery5 import App
app = App({name!r}, broker={url!r}, lease=1.0, unknown_task_grace=20)

@app.task(name="resize")
async def resize(n: int) -> int:
    return n
"""
NEW = """
from celery5 import App, current_job
app = App({name!r}, broker={url!r}, lease=1.0, unknown_task_grace=20)

@app.task(name="resize")
async def resize(n: int, size: int = 1) -> tuple[int, int]:
    return n * size, current_job().attempt

@app.task(name="rotate")
{colour} rotate(n: int) -> tuple[int, int]:
    return n, current_job().attempt
"""


@dataclass
class Deployment:
    """Folders with both versions of the code, and a producer with the new one."""

    folder: Path
    app: App
    tasks: dict[str, Any]
    client: "redis.Redis"

    def start(self, version: str, **flags: str) -> Serving:
        """Start a worker with one version of the code."""
        return Serving("-A", "shop", "worker", "start", cwd=self.folder / version)

    def send(self, how: str, what: str) -> list[Any]:
        """Send 40 jobs that the old code cannot run."""
        task = self.tasks[what]
        calls = [(n,) if what == "rotate" else (n, 1) for n in range(40)]
        if how == "bulk":
            return list(self.app.send_many([task.s(*call) for call in calls]))
        sent: list[Any] = []
        for call in calls:
            sent.append(task.delay(*call))
            time.sleep(0.01)  # so that both workers take some
        return sent

    def check(self, sent: list[Any]) -> None:
        """Check that all have succeeded, each by its first attempt, and that nothing is dead."""
        assert gather(sent, timeout=30) == [(n, 1) for n in range(40)]
        assert self.client.xlen(self.app.queue("default").dead) == 0


@pytest.fixture(params=["async def", "def"])
def deployment(
    request: pytest.FixtureRequest, server: EmbeddedServer, app_name: str, tmp_path: Path
) -> Iterator[Deployment]:
    app = App(app_name, broker=server.url)

    @app.task(name="resize")
    async def resize(n: int, size: int = 1) -> tuple[int, int]:
        return n, size

    @app.task(name="rotate")
    async def rotate(n: int) -> tuple[int, int]:
        return n, 1

    for version, source in (("old", OLD), ("new", NEW)):
        (tmp_path / version).mkdir()
        text = source.format(name=app_name, url=server.url, colour=request.param)
        (tmp_path / version / "shop.py").write_text(text)
    with redis.Redis.from_url(server.url) as client:
        yield Deployment(tmp_path, app, {"resize": resize, "rotate": rotate}, client)
        app.close()


@pytest.mark.parametrize("how", ["delay", "bulk"])
@pytest.mark.parametrize("what", ["rotate", "resize"])
def test_no_job_of_a_new_task_or_signature_is_lost_to_old_workers(
    deployment: Deployment, what: str, how: str
) -> None:
    with deployment.start("old") as old, deployment.start("new") as new:
        old.ready()
        new.ready()
        deployment.check(deployment.send(how, what))
        refused = [line for line in old.logged("job") if line["state"] == "HELD"]
        assert len(refused) == len({line["job"] for line in refused}), (
            "none was taken twice by the old worker"
        )


@pytest.mark.parametrize("what", ["rotate", "resize"])
def test_jobs_wait_for_new_code_when_the_only_worker_that_has_it_is_killed(
    deployment: Deployment, what: str
) -> None:
    with deployment.start("old") as old:
        with deployment.start("new") as new:
            old.ready()
            new.ready()
            new.process.send_signal(signal.SIGKILL)
            new.process.wait()
            sent = deployment.send("bulk", what)
            until(lambda: all(job.status() is JobState.HELD for job in sent))
        assert not [line for line in old.logged("job") if line["state"] != "HELD"]
        with deployment.start("new") as new:
            new.ready()
            deployment.check(sent)
