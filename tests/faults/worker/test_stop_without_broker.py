"""Stopping without a broker: a process that is told to stop while its broker is lost ends in order, and in time."""

import os
import random
import signal
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio

from celery5 import App
from celery5.errors import BrokerReplied, BrokerUnavailable, LeaseLost
from celery5.processes.foreground import WORKER, serve_in_process
from celery5.processes.lifecycle.incarnations import ProcessKind
from celery5.processes.lifecycle.signals import Interruption
from celery5.processes.router import ROUTER
from celery5.processes.scheduler import SCHEDULER
from celery5.processes.worker import WorkerOptions
from celery5.services.process.lease import Heartbeat
from celery5.services.process.presence import Presence
from celery5.services.worker.consumer import Consumer
from celery5.services.worker.result_publisher import ResultPublisher
from tests.faults.connections.proxy import FaultyProxy

LIMIT = 60.0
"""Seconds within which a process ends whose broker is lost: its grace period is 1 s, the times of its steps follow."""


async def serve(app: App, kind: ProcessKind, meanwhile: Callable[[trio.Event], Awaitable[None]]) -> None:
    """Serve until `meanwhile` has asked it to stop. Raises what the process ends with: then it exits with 1."""
    ready = trio.Event()
    with Interruption() as interruption:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(meanwhile, ready)
            await serve_in_process(app, WorkerOptions(), interruption, ready.set, kind=kind)


def ask_to_stop() -> None:
    """Send SIGTERM to this process, which handles it as a worker does."""
    os.kill(os.getpid(), signal.SIGTERM)


def make_fail(original: Any, error: Exception, when: str) -> Any:
    """Return a service's `run` that raises `error` once: as it is stopped, or after it was up."""
    tries = [error]

    async def run(self: Any, *, task_status: Any = trio.TASK_STATUS_IGNORED) -> None:
        try:
            with trio.move_on_after(0.3 if when == "up" and tries else float("inf")):
                await original(self, task_status=task_status)
        finally:
            if tries:
                raise tries.pop()

    return run


ERRORS = {
    "unreachable": BrokerUnavailable("connection lost"),
    "refused": BrokerReplied("OOM command not allowed", code="OOM"),
    "fenced": LeaseLost("taken for dead"),
}


@pytest.mark.parametrize("error", list(ERRORS))
@pytest.mark.parametrize(
    ("kind", "service"),
    [
        (WORKER, Consumer),
        (WORKER, ResultPublisher),
        (WORKER, Heartbeat),
        (ROUTER, Consumer),
        (SCHEDULER, Presence),
    ],
    ids=lambda value: getattr(value, "name", None) or value.__name__,
)
async def test_a_step_that_loses_the_broker_as_it_is_stopped_is_no_failure_of_the_process(
    url: str, app_name: str, monkeypatch: pytest.MonkeyPatch, kind: ProcessKind, service: Any, error: str
) -> None:
    monkeypatch.setattr(service, "run", make_fail(service.run, ERRORS[error], "stop"))
    app = App(app_name, broker=url, grace_period=1.0)

    async def stop(ready: trio.Event) -> None:
        await ready.wait()
        ask_to_stop()

    with trio.fail_after(LIMIT):
        await serve(app, kind, stop)
    app.close()


@pytest.mark.parametrize("error", list(ERRORS))
async def test_started_worker_begins_again_when_it_loses_the_broker(
    url: str, app_name: str, monkeypatch: pytest.MonkeyPatch, error: str
) -> None:
    monkeypatch.setattr(Consumer, "run", make_fail(Consumer.run, ERRORS[error], "up"))
    app = App(app_name, broker=url, grace_period=1.0)

    @app.task(name="one")
    async def one() -> int:
        return 1

    async def stop(ready: trio.Event) -> None:
        await ready.wait()
        await trio.sleep(0.5)  # it fails meanwhile
        assert await (await one.adelay()).aget(30) == 1
        ask_to_stop()

    with trio.fail_after(LIMIT):
        await serve(app, WORKER, stop)
    app.close()


@pytest.mark.parametrize("kind", [WORKER, ROUTER, SCHEDULER], ids=lambda kind: kind.name)
@pytest.mark.parametrize("fault", ["refuse", "stall", "cut_all"])
async def test_a_process_stops_in_time_whenever_the_broker_is_lost(
    proxy: FaultyProxy, app_name: str, kind: ProcessKind, fault: str
) -> None:
    chance = random.Random(f"{kind.name} {fault}")
    app = App(app_name, broker=proxy.url, lease=0.6, grace_period=1.0)

    @app.task(name="nap")
    async def nap(seconds: float) -> None:
        await trio.sleep(seconds)

    async def stop(ready: trio.Event) -> None:
        await ready.wait()
        if kind is WORKER:
            for _ in range(5):
                await nap.adelay(chance.random())
        getattr(proxy, fault)()
        await trio.sleep(chance.choice([0.0, 0.05, 0.5]))
        ask_to_stop()

    with trio.fail_after(LIMIT):
        await serve(app, kind, stop)
    proxy.accept()
    proxy.resume()
    app.close()
