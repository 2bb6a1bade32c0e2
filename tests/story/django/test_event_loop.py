"""Django's queries on the Trio event loop of a worker are refused, whatever part of the application makes them."""

import json
from pathlib import Path

import pytest

from celery5.broker.servers.embedded import EmbeddedServer
from celery5.middleware.django_connections import REFUSAL
from tests.redis.commands.staff import wait_until
from tests.story.django.projects import Project
from tests.watched import watched

PLACES = """
import json
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Annotated

import trio
from celery5 import App, BootStep
from celery5.observability import Middleware
from celery5.tasks import INJECTED, Resource


def query(place: str) -> None:
    from orders.models import Order

    if not trio.lowlevel.in_trio_task():  # a place that is no longer on the loop needs no guard
        return
    try:
        Order.objects.count()
        what = "it was answered"
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
    with Path("queries").open("a") as file:
        file.write(json.dumps([place, what]) + "\\n")


class Around(Middleware):
    def process_started(self, kind, name): query("process_started")
    def process_stopped(self, kind, name): query("process_stopped")
    def received(self, jobs): query("received")
    def unstarted(self, job): query("unstarted")

    @contextmanager
    def running(self, job):
        query("running")
        yield
        query("the end of running")

    @contextmanager
    def calling(self, call):
        query("calling")
        yield

    @contextmanager
    def sending(self, batch):
        query("sending")
        yield

    @contextmanager
    def settling(self, batch):
        query("settling")
        yield

    @contextmanager
    def operating(self, operation):
        query("operating")
        yield


class Awaited(Middleware):
    @asynccontextmanager
    async def running(self, job):
        query("running with await")
        yield


async def start() -> None: query("boot step")
async def undo() -> None: query("undo of a boot step")
async def serve(*, task_status):
    query("service")
    task_status.started()
    await trio.sleep_forever()
async def open_client():
    query("resource")
    return 1


app = App("shop", middleware=[Around(), Awaited()], services=[serve], bootsteps=[BootStep("start", start, undo=undo)])
numbers = app.stream("numbers", partitions=1)


@app.health_check(period=0.05)
async def healthy(): query("health check")

@app.timer(interval=0.1)
async def tick(): query("timer")

@app.on_start
async def on_start(): query("on_start")

@app.processor(numbers)
async def process(events):
    async for _ in events.records():
        query("processor")

@app.command
async def ask() -> None: query("command")

@app.task
async def act(client: Annotated[int, Resource(open_client)] = INJECTED) -> None:
    query("task")
    await plain.adelay()

@app.task
def plain() -> None: ...
"""
SEND = """
from shop.jobs import act, app, numbers, plain
app.load()
plain.options(expires=0.001).delay()
act.delay().get()
numbers.send({"n": 1})
print(app.control.send("ask", {}))
"""
ON_THE_LOOP = (
    *("boot step", "undo of a boot step", "service", "resource", "health check", "timer", "on_start"),
    *("processor", "command", "task", "received", "running", "running with await", "the end of running"),
    *("calling", "sending", "settling", "operating", "process_started", "process_stopped"),
)


@pytest.fixture(scope="module")
def queries(server: EmbeddedServer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """What became of the queries of each place, after a worker has stopped."""
    folder: Path = tmp_path_factory.mktemp("event-loop")
    project = Project(folder, CELERY5_BROKER=server.url)
    project.configure('"orders"', '"app": "shop.jobs:app"')
    project.write("orders/models.py", "from django.db import models\nclass Order(models.Model): pass\n")
    project.write("shop/jobs.py", PLACES)
    found: dict[str, set[str]] = {}

    def read() -> bool:
        for line in (folder / "queries").read_text().splitlines():
            place, what = json.loads(line)
            found.setdefault(place, set()).add(what)
        return found.keys() >= set(ON_THE_LOOP) - {"undo of a boot step", "process_stopped"}

    assert project.manage("migrate", "--run-syncdb").code == 0
    with watched(server), project.serve("worker", "start") as worker:
        worker.ready()
        project.run(SEND)
        wait_until(read)
    read()
    return found


@pytest.mark.parametrize("place", ON_THE_LOOP)
def test_query_on_the_trio_loop_is_refused_in_each_place(queries: dict[str, set[str]], place: str) -> None:
    assert queries[place] == {f"SynchronousOnlyOperation: {REFUSAL}"}
