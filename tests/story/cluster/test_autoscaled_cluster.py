"""Autoscaled cluster: from jobs that wait, by a real Scheduler, to processes that a real Controller begins and ends."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

import pytest

from celery5 import App, AsyncResult
from celery5.cli.terminal.loading import load_app
from tests.story.cluster.controlling import LIMIT, Controlling, until
from tests.story.conftest import fresh_modules

pytestmark = pytest.mark.timeout(500)

STALL = """
import os
import trio
from celery5 import App

app = App(
    {name!r},
    broker={url!r},
    concurrency=4,
    grace_period=20,
    autoscale={{
        "minimum": 1,
        "maximum": 3,
        "prefetch": 1,
        "cooldown": 0.2,
        "longest_cooldown": 0.5,
        "shrink_after": 1,
    }},
)

@app.task
async def squeeze(number: int, seconds: float) -> int:
    await trio.sleep(seconds)
    with open("done", "a") as file:  # one write of a short line: nobody else's comes between
        file.write(f"{{number}} {{os.getpid()}}\\n")
    return number
"""
CLUSTER = """
[schedulers.default]
[workers.default]
count = 1
"""
MANY = 160
WORKERS = tuple(f"worker-default-{number}" for number in (1, 2, 3))

__all__ = ["fresh_modules"]


@pytest.fixture
def stall(
    tmp_path: Path, app_name: str, url: str, fresh_modules: None, monkeypatch: pytest.MonkeyPatch
) -> Iterator[App]:
    """An application that is scaled between one and three workers, in its own folder."""
    (tmp_path / "stall.py").write_text(STALL.format(name=app_name, url=url))
    monkeypatch.chdir(tmp_path)
    app = load_app("stall")
    yield app
    app.close()


def workers(controller: Controlling) -> list[str]:
    """The workers whose processes are there."""
    return sorted(name for name in controller.pids() if name.startswith("worker"))


def steps(controller: Controlling) -> list[int]:
    """How many workers its Controller was told to have, one after the other."""
    return [line["workers"] for line in controller.logged("cluster:scaled")]


class Customers:
    """Send a few jobs again and again while the block lasts, so that there always is something to lose."""

    def __init__(self, send: Callable[[], AsyncResult[int]]) -> None:
        self._send = send
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._come)
        self.results: list[AsyncResult[int]] = []

    def _come(self) -> None:
        while not self._over.wait(0.2):
            self.results.append(self._send())

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._over.set()
        self._thread.join()


def test_waiting_jobs_start_processes_that_end_in_order(stall: App, tmp_path: Path) -> None:
    squeeze = "stall.squeeze"
    numbers = iter(range(MANY, 10**6))
    with Controlling(tmp_path, CLUSTER, target="stall").up() as controller:
        assert workers(controller) == [WORKERS[0]]
        loaded = stall.send_many([stall.signature(squeeze, number, 0.5) for number in range(MANY)])
        until(lambda: workers(controller) == list(WORKERS))
        until(lambda: all(controller.of(name, "started") for name in WORKERS))
        crowd = controller.pids()
        with Customers(lambda: stall.send_many([stall.signature(squeeze, next(numbers), 0.5)])[0]) as few:
            assert [job.get(timeout=LIMIT) for job in loaded] == list(range(MANY))
            until(lambda: workers(controller) == [WORKERS[0]])
        results = [result.get(timeout=LIMIT) for result in few.results]
        assert results == list(range(MANY, MANY + len(results)))
        assert controller.pids()[WORKERS[0]] == crowd[WORKERS[0]]  # who was there first goes on all the time
        assert {member["phase"] for member in controller.members().values()} == {"up"}
        done = [tuple(map(int, line.split())) for line in Path("done").read_text().splitlines()]
        ended = [(line["name"], line["code"]) for line in controller.logged("member:ended")]
        assert sorted(ended) == [(name, 0) for name in WORKERS[1:]]
        assert controller.logged("member:killed") == []
        assert (max(steps(controller)), steps(controller)[-1]) == (3, 1)
    assert Counter(number for number, _ in done) == Counter(range(MANY + len(results)))
    assert {pid for _, pid in done} == {crowd[name] for name in WORKERS}
