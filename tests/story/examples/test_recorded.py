"""Recorded: inside `recorded(app)` jobs and events are kept, all else is refused, and no connection is opened."""

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

import celery5
from celery5 import App, AsyncResult, Event, Misconfigured, arevoke, revoke
from celery5.bulk import BulkRequest
from celery5.doctor.examination import get_checks
from celery5.errors import BlockingInEventLoop, NotRecorded
from celery5.testing import recorded, running_worker
from celery5.workflows import Flow
from tests.redis.audit.actions import CALLS, Call, a_job, a_run, prepare


class CountingSocket:
    """A broker that only counts who connects."""

    def __init__(self) -> None:
        self.connections = 0
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listening.getsockname()[1]}"
        threading.Thread(target=self._count, daemon=True).start()

    def close(self) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()

    def _count(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                return
            self.connections += 1
            connection.close()


@pytest.fixture
def broker() -> Iterator[CountingSocket]:
    """What no test here connects to."""
    one = CountingSocket()
    yield one
    one.close()
    assert one.connections == 0


@pytest.fixture(params=["one broker", "two brokers", "a Publisher", "settings in Redis"])
def live(request: pytest.FixtureRequest, broker: CountingSocket, tmp_path: Path) -> Iterator[App]:
    """An application whose every address is the counting one's."""
    url = f"redis://{broker.address}/0"
    options: dict[str, dict[str, Any]] = {
        "two brokers": {"brokers": {"far": f"redis://{broker.address}/1"}, "routes": {"far": "far"}},
        "a Publisher": {"publisher": f"tcp://{broker.address}"},
    }
    config = "redis" if request.param == "settings in Redis" else None
    app = App("live", broker=url, keys=str(tmp_path), config=config, **options.get(request.param, {}))
    yield prepare(app)
    app.close()


class Clicked(Event):
    page: str


def read_all(values: Any) -> Any:
    """Read what a call returns: a method that reads returns an iterator."""
    return list(values) if isinstance(values, Iterator) else values


READS = [
    Call("get", a_job, "get"),
    Call("status", a_job, "status"),
    Call("progress", a_job, "progress"),
    Call("forget", a_job, "forget"),
    Call("run", a_run, "get"),
    Call("run", a_run, "results"),
    Call("run", a_run, "status"),
    Call("run", a_run, "graph"),
    Call("app", lambda app: app, "info"),
    Call("app", lambda app: app, "find", ("nobody",)),
    Call("dlq", lambda app: app.dlq, "read"),
    Call("dlq", lambda app: app.dlq, "count"),
    Call("dlq", lambda app: app.dlq, "groups"),
    Call("streams", lambda app: app.streams, "info"),
    Call("streams", lambda app: app.streams, "read", ("orders",), {"limit": 5}),
    Call("streams", lambda app: app.streams.dead_records, "read", ("orders", "books")),
    Call("streams", lambda app: app.streams["orders"], "send", ({"id": 1},)),
    Call("events", lambda app: app.events, "state"),
    Call("schedule", lambda app: app.schedule, "list"),
    Call("limits", lambda app: app.limits, "list"),
    Call("audit", lambda app: app.audit, "list"),
    Call("alerts", lambda app: app.alerts, "list"),
    Call("bulk", lambda app: app.bulk, "list"),
    Call("bulk", lambda app: app.bulk, "get", ("0",)),
    Call("bulk", lambda app: app.bulk, "stop", ("0",)),
    Call("bulk", lambda app: app.bulk, "count", (BulkRequest(verb="dlq:replay"),)),
    Call("workflows", lambda app: app.workflows, "list_runs"),
    Call("workflows", lambda app: app.workflows, "find", ("night-1",)),
    Call("control", lambda app: app.control, "ping", (), {"timeout": 0.01}),
    Call("metrics", lambda app: app.metrics, "overview"),
    Call("metrics", lambda app: app.metrics, "storage"),
    Call("jobs", lambda app: app.jobs, "search"),
    Call("jobs", lambda app: app.jobs, "story", ("nobody",)),
    Call("workflow", lambda app: app.tasks["t"].s() >> app.tasks["t"].s(), "start"),
    Call("workflow", lambda app: app.tasks["t"].map([]), "start"),
    Call("workflow", lambda app: app.workflow(two_steps), "start"),
]
"""Calls that are no actions, and that need a broker."""


def two_steps(flow: Flow) -> None:
    flow.sleep(1)


def arguments(app: App, call: Call) -> tuple[Any, ...]:
    if call.method in ("add", "run"):
        return (app.tasks["t"].s(), 3600.0)[: 2 if call.method == "add" else 1]
    return call.args


@pytest.mark.parametrize(
    "call", [*(call for call in CALLS if call.method != "record_sending"), *READS], ids=str
)
def test_all_but_jobs_and_events_is_refused_in_every_colour(
    broker: CountingSocket, tmp_path: Path, call: Call
) -> None:
    app = prepare(App("live", broker=f"redis://{broker.address}/0", keys=str(tmp_path)))

    async def acall() -> None:
        answer = getattr(owner, f"a{call.method}")(*given, **call.options)
        if isinstance(answer, AsyncIterator):
            async for _ in answer:
                pass
        else:
            await answer

    with recorded(app) as sent:
        owner, given = call.owner(app), arguments(app, call)
        with pytest.raises(NotRecorded, match="recorded") as refused:
            read_all(getattr(owner, call.method)(*given, **call.options))
        for run in (trio.run, lambda function: asyncio.run(function())):
            with pytest.raises(NotRecorded, match="recorded"):
                run(acall)
    assert (sent.jobs, sent.events) == ([], [])
    assert "\n" not in str(refused.value)
    app.close()


def test_what_is_sent_needs_no_connection_wherever_it_would_go(live: App) -> None:
    clicked: Any = live.event(Clicked)
    task = live.tasks["t"]
    with recorded(live) as sent:
        handle = task.delay()
        task.options(queue="far", countdown=5).delay()
        clicked.delay(page="a")
        trio.run(task.adelay)
        asyncio.run(task.adelay())
        with pytest.raises(NotRecorded, match=r"^AsyncResult\.get\(\) needs a broker"):
            handle.get(timeout=1)
        assert sent.run() == [None] * 4
        assert "127.0.0.1" in repr(live)
    assert len(sent.jobs) == 4
    assert len(sent.events) == 1


def test_handles_from_before_and_their_groups_are_refused(live: App) -> None:
    handles: list[AsyncResult[Any]] = []
    calls: list[Callable[[], object]] = [
        lambda: celery5.gather(handles),
        lambda: celery5.wait(handles),
        lambda: revoke(handles),
        lambda: trio.run(celery5.agather, handles),
        lambda: trio.run(arevoke, handles),
        lambda: asyncio.run(arevoke(handles)),
        lambda: live.perform(object()),  # type: ignore[arg-type]
        lambda: live.brokers.get("default").get_blocking_driver().perform(object()),  # type: ignore[arg-type]
        lambda: [check.run() for check in get_checks(live)],
    ]
    with recorded(live):
        handles += [live.result("a", queue="far"), live.result("b")]
        for call in calls:
            with pytest.raises(NotRecorded):
                call()


async def test_a_call_that_would_block_the_loop_says_so_first(live: App) -> None:
    with recorded(live), pytest.raises(BlockingInEventLoop, match="aget"):
        live.result("a").get()


def test_a_refusal_ends_with_the_block_and_an_inner_block_does_not_end_it(broker: CountingSocket) -> None:
    app = prepare(App("live", broker="redis://127.0.0.1:1/0"))
    with recorded(app):
        with recorded(app):
            pass
        with pytest.raises(NotRecorded):
            app.info()
        with pytest.raises(Misconfigured, match="recorded"), running_worker(app):
            raise AssertionError("it runs")
    with pytest.raises(celery5.BrokerUnavailable):
        app.info()
    assert app.settings.broker == "redis://127.0.0.1:1/0"


def test_a_worker_that_runs_here_goes_on_while_jobs_are_recorded(app_name: str) -> None:
    app = prepare(App(app_name))
    doubled: list[int] = []

    @app.task
    async def double(number: int) -> int:
        doubled.append(number)
        await app.tasks["t"].adelay()
        return number * 2

    with running_worker(app):
        assert double.delay(1).get(timeout=30) == 2
        with recorded(app) as sent:
            double.delay(2)
            with pytest.raises(NotRecorded):
                app.info()
        assert len(sent.jobs) == 1
        assert double.delay(3).get(timeout=30) == 6
    assert doubled == [1, 3]
