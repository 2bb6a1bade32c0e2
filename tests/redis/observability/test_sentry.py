"""Sentry: transactions, spans and errors of real jobs, as the SDK would send them."""

from collections.abc import Iterator
from typing import Any

import pytest
import redis

from celery5 import App, TaskFailed
from celery5.errors import Misconfigured
from celery5.observability import SentryMiddleware
from celery5.observability import sentry as module
from tests.redis.worker.workers import until, working

sdk: Any = pytest.importorskip("sentry_sdk")


class Envelopes:
    """What was to be sent to Sentry."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def keep(self, event: dict[str, Any], _hint: object) -> None:
        """Keep an event, and have it dropped."""
        self.events.append(event)

    def transactions(self, op: str) -> list[dict[str, Any]]:
        """The transactions of an operation."""
        return [
            event
            for event in self.events
            if event.get("type") == "transaction" and event["contexts"]["trace"]["op"] == op
        ]

    @property
    def errors(self) -> list[dict[str, Any]]:
        """The errors."""
        return [event for event in self.events if event.get("type") != "transaction"]


@pytest.fixture
def envelopes() -> Iterator[Envelopes]:
    kept = Envelopes()
    sdk.init(
        dsn="https://key@sentry.invalid/1",
        traces_sample_rate=1.0,
        before_send=kept.keep,
        before_send_transaction=kept.keep,
        default_integrations=False,
        auto_enabling_integrations=False,
    )
    yield kept
    sdk.get_client().close(timeout=0)
    sdk.get_global_scope().set_client(None)


async def test_a_job_is_a_transaction_of_the_trace_that_sent_it(app: App, envelopes: Envelopes) -> None:
    app.configure(sentry=True)

    @app.task
    async def work(n: int) -> int:
        return n

    async with working(app):
        with sdk.start_transaction(op="http.server", name="/orders"):
            sent = await work.adelay(1)
        assert await sent.aget() == 1
        await until(lambda: bool(envelopes.transactions("queue.process")))
    [request] = envelopes.transactions("http.server")
    [publish] = request["spans"]
    [process] = envelopes.transactions("queue.process")
    assert (publish["op"], publish["description"]) == ("queue.publish", work.name)
    assert publish["data"]["messaging.message.id"] == sent.id
    assert publish["data"]["messaging.destination.name"] == "default"
    assert publish["data"]["messaging.message.body.size"] > 50
    trace = process["contexts"]["trace"]
    assert process["transaction"] == work.name
    assert trace["trace_id"] == request["contexts"]["trace"]["trace_id"]
    assert trace["parent_span_id"] == publish["span_id"]
    assert trace["status"] == "ok"
    data = trace["data"]
    assert data["messaging.message.id"] == sent.id
    assert data["messaging.destination.name"] == "default"
    assert data["messaging.message.body.size"] > 50
    assert 0 <= data["messaging.message.receive.latency"] < 60_000
    assert data["messaging.message.retry.count"] == 0
    assert envelopes.errors == []


@pytest.mark.parametrize("kind", ["trio", "thread"])
async def test_the_error_of_a_dead_job_is_reported_once_and_those_of_retries_are_not(
    app: App, envelopes: Envelopes, kind: str
) -> None:
    app.add_middleware(SentryMiddleware())
    if kind == "trio":

        @app.task(max_retries=2)
        async def fail() -> None:
            raise LookupError("no such order")
    else:

        @app.task(max_retries=2)
        def fail() -> None:
            raise LookupError("no such order")

    async with working(app):
        with pytest.raises(TaskFailed):
            await (await fail.adelay()).aget()
        await until(lambda: len(envelopes.transactions("queue.process")) == 3)
    [error] = envelopes.errors
    [value] = error["exception"]["values"]
    assert (value["type"], value["value"]) == ("LookupError", "no such order")
    assert value["mechanism"] == {"type": "celery5", "handled": False}
    assert value["stacktrace"]["frames"][-1]["function"] == "fail"
    last = envelopes.transactions("queue.process")[-1]
    assert error["contexts"]["trace"]["trace_id"] == last["contexts"]["trace"]["trace_id"]
    assert error["contexts"]["celery5"]["attempt"] == 3
    counts = [
        event["contexts"]["trace"]["data"]["messaging.message.retry.count"]
        for event in envelopes.transactions("queue.process")
    ]
    assert counts == [0, 1, 2]
    assert last["contexts"]["trace"]["status"] == "internal_error"


async def test_errors_of_retries_are_reported_on_demand(app: App, envelopes: Envelopes) -> None:
    app.add_middleware(SentryMiddleware(capture_retries=True))

    @app.task(max_retries=1)
    async def fail() -> None:
        raise LookupError("no such order")

    async with working(app):
        with pytest.raises(TaskFailed):
            await (await fail.adelay()).aget()
        await until(lambda: len(envelopes.errors) == 2)


async def test_a_job_that_died_without_being_run_is_reported(
    app: App, envelopes: Envelopes, redis_client: "redis.Redis"
) -> None:
    app.add_middleware(SentryMiddleware())
    message = '{"v":1,"id":"j-1","task":"nobody.knows"}'
    redis_client.xadd(app.queue("default").stream, {"job": message})
    async with working(app):
        await until(lambda: bool(envelopes.errors))
    [error] = envelopes.errors
    [value] = error["exception"]["values"]
    assert value["type"] == "UnknownTask"
    assert error["contexts"]["celery5"]["job"] == "j-1"


async def test_without_an_initialised_sdk_nothing_is_added(app: App, redis_client: "redis.Redis") -> None:
    app.configure(sentry=True)

    @app.task
    async def work() -> dict[str, str]:
        return {}

    async with working(app):
        assert await (await work.adelay()).aget() == {}


def test_without_the_package_the_error_names_it(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(module, "import_module", fail)
    app.configure(sentry=True)
    with pytest.raises(Misconfigured, match=r"pip install 'sentry-sdk>=.*celery5\[sentry\]"):
        len(app.middleware)
