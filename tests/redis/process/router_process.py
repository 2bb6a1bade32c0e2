"""Router process: a real Router that kills itself with SIGKILL at one point of its work, if it is told to."""

import os
import signal
import sys
from functools import partial
from typing import Any

import trio

from celery5 import App
from celery5.logs.log import Log
from celery5.processes.lifecycle.incarnations import new_incarnation_name
from celery5.processes.router import ROUTER
from celery5.processes.worker import WorkerOptions
from celery5.services.events.event_ingestion import EventIngestion
from tests.redis.worker.workers import LEASE

POINTS = ("read", "learnt", "some published", "published", "finished", "forgotten")


def die_at(point: str, times: int) -> None:
    """Have this process killed when it comes to `point` for the so-manieth time."""
    left = [times]

    def passed() -> None:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def after(name: str) -> None:
        inner: Any = getattr(EventIngestion, name)

        async def call(self: Any, *args: Any) -> Any:
            given = await inner(self, *args)
            if name != "_read" or given:
                passed()
            return given

        setattr(EventIngestion, name, call)

    async def in_part(self: Any, jobs: Any) -> Any:
        part = jobs[: max(1, len(jobs) // 2)]
        held = await inner_publish(self, part)
        passed()
        return held | await inner_publish(self, jobs[len(part) :])

    inner_publish: Any = EventIngestion._publish
    if point == "some published":
        EventIngestion._publish = in_part  # type: ignore[method-assign]
        return
    names = ("_read", "_read_subscribers", "", "_publish", "_finish", "_forget")
    after(names[POINTS.index(point)])


async def main(app: App) -> None:
    """Route."""
    name = new_incarnation_name()
    log = Log(worker=name, app=app.name)
    async with trio.open_nursery() as nursery:
        told = WorkerOptions(incarnation=name)
        await nursery.start(partial(ROUTER.run, app, told, log=log, done=trio.Event()))
        sys.stdout.write("up\n")
        sys.stdout.flush()


if __name__ == "__main__":
    _, app_name, url, *where = sys.argv
    if where:
        die_at(where[0], int(where[1]))
    trio.run(main, App(app_name, broker=url, lease=LEASE))
