"""The application whose facts every surface is asked for: `declare` in the test's process, `app` in a command's."""

import os
import signal
import time
from typing import Any

import trio

from celery5 import App, RetryPolicy
from celery5.observability import no_workers, oldest
from tests.redis.worker.workers import LEASE

SETTINGS: dict[str, Any] = {
    "lease": LEASE,
    "cpu_slots": 4,
    "concurrency": 20,
    "retry_policy": RetryPolicy(max_retries=2, backoff=0.01, jitter=False),
    "unknown_task_grace": 0.0,
    "grace_period": 0.1,
}


def note_begun() -> None:
    """Write down that a job has begun."""
    with open(os.environ["HISTORY"], "a") as history:
        history.write("begun\n")


def declare(app: App) -> App:
    """Declare the tasks on an application."""

    @app.task(name="push", queue="crm")
    async def push() -> None: ...

    @app.task(name="crawl", queue="web", rate_limit="1/h")
    async def crawl(site: str = "", depth: int = 0, *pages: str) -> None: ...

    @app.task(name="sync", queue="keyed", limit=1, concurrency_key="customer")
    async def sync(customer: str) -> None:
        await trio.sleep(600)

    @app.task(name="mail", queue="nobody")
    async def mail() -> None: ...

    @app.task(name="break", queue="crm", max_retries=0)
    async def fail(why: str, request: str) -> None:
        raise ValueError(f"{why}: request {request}")

    @app.task(name="crash", queue="deadly")
    async def crash() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    @app.task(name="linger", queue="frail")
    async def linger() -> None:
        note_begun()
        await trio.sleep(600)

    @app.task(name="stick", queue="frail")
    async def stick(seconds: float) -> None:
        note_begun()
        time.sleep(seconds)  # noqa: ASYNC251  what it is for

    app.alert("old", oldest(above=0.2), for_=0.0)
    app.alert("unread", no_workers("nobody"), for_=0.0)
    return app


app = declare(App(os.environ.get("HISTORY_APP", "surfaces"), **SETTINGS))
