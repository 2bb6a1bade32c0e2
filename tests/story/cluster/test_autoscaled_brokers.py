"""Autoscaled brokers: load on a second broker begins real processes, and its outage ends none of them (C104, C108)."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from celery5 import App
from celery5.broker.calls import scaling as scaling_calls
from celery5.broker.calls.scaling import Scaling
from celery5.broker.servers.embedded import EmbeddedServer
from tests.story.cluster.controlling import LIMIT, Controlling, until, working_in
from tests.story.conftest import fresh_modules

pytestmark = pytest.mark.timeout(500)

POST = """
from pathlib import Path

import trio
from celery5 import App

app = App(
    {name!r},
    broker={url!r},
    brokers={{"mails": {second!r}}},
    routes={{"letters": "mails"}},
    concurrency=4,
    lease=3,
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

@app.task(queue="letters")
async def letter(number: int) -> int:
    while not Path("go").exists():
        await trio.sleep(0.05)
    return number
"""
CLUSTER = """
[schedulers.default]
[workers.default]
count = 1
"""
WORKERS = ["worker-default-1", "worker-default-2", "worker-default-3"]
LOOKS = 4
"""After so many more looks anything would have become less that may."""

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
    """An application whose letters are on a second server, in its own folder."""
    source = POST.format(name=app_name, url=url, second=own_server.url)
    with working_in(tmp_path, "office", source, monkeypatch) as app:
        yield app


def where(app: App) -> Scaling:
    """Where the scaling is."""
    return app.perform(scaling_calls.get_scaling(app.keys)) or Scaling()


def workers(controller: Controlling) -> list[str]:
    """The workers whose processes are there."""
    return sorted(name for name in controller.pids() if name.startswith("worker"))


def looked(app: App) -> None:
    """Until it was looked some more times."""
    for _ in range(LOOKS):
        last = where(app).at
        until(lambda last=last: where(app).at > last)  # type: ignore[misc]


def test_load_on_a_second_broker_begins_processes_and_its_outage_ends_none(
    office: App, own_server: EmbeddedServer, tmp_path: Path
) -> None:
    with Controlling(tmp_path, CLUSTER, target="office").up() as controller:
        until(lambda: (where(office).workers, where(office).unseen) == (1, ()))
        letters = office.send_many([office.signature("office.letter", n) for n in range(60)])
        until(lambda: workers(controller) == WORKERS)
        until(lambda: where(office).workers == 3)  # of which each has two lives
        own_server.kill()
        until(lambda: where(office).unseen == ("mails",))
        crowd: dict[str, Any] = controller.pids()
        looked(office)
        assert where(office).jobs == 0
        assert controller.pids() == crowd
        own_server.revive()
        until(lambda: where(office).unseen == ())
        assert controller.pids() == crowd
        Path("go").touch()
        assert [job.get(timeout=LIMIT) for job in letters] == list(range(60))
        until(lambda: workers(controller) == WORKERS[:1])
        assert [line["broker"] for line in controller.logged("autoscale:broker-lost")] == ["mails"]
        assert controller.logged("member:killed") == []
