"""OpenTelemetry: spans, links and metrics of real jobs, read from the in-memory exporters of the SDK."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import trio

from celery5 import App, Event, TaskFailed, current_job
from celery5.errors import BrokerUnavailable, Misconfigured
from celery5.logs import tracing
from celery5.observability import OpenTelemetryMiddleware
from celery5.observability import opentelemetry as module
from celery5.processes.router import ROUTER
from tests.redis.worker.workers import start, until, working

sdk_trace: Any = pytest.importorskip("opentelemetry.sdk.trace")
sdk_metrics: Any = pytest.importorskip("opentelemetry.sdk.metrics")
export: Any = pytest.importorskip("opentelemetry.sdk.trace.export")
memory: Any = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
metrics_export: Any = pytest.importorskip("opentelemetry.sdk.metrics.export")

SAMPLED = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
UNSAMPLED = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"


@dataclass
class Telemetry:
    """The exporters of one test, and what they have."""

    spans: Any = field(default_factory=memory.InMemorySpanExporter)
    reader: Any = field(default_factory=metrics_export.InMemoryMetricReader)

    def __post_init__(self) -> None:
        self.tracers = sdk_trace.TracerProvider()
        self.tracers.add_span_processor(export.SimpleSpanProcessor(self.spans))
        self.meters = sdk_metrics.MeterProvider([self.reader])
        self.tracer = self.tracers.get_tracer("test")

    def make(self, **options: Any) -> OpenTelemetryMiddleware:
        """Middleware with these exporters."""
        return OpenTelemetryMiddleware(tracer_provider=self.tracers, meter_provider=self.meters, **options)

    def named(self, name: str) -> list[Any]:
        """The ended spans of a name, in the order of their ends."""
        return [span for span in self.spans.get_finished_spans() if span.name == name]

    def one(self, name: str) -> Any:
        """The only ended span of a name."""
        [span] = self.named(name)
        return span

    def points(self, name: str) -> list[Any]:
        """The data points of one metric."""
        data = self.reader.get_metrics_data()
        return [
            point
            for resource in (data.resource_metrics if data else ())
            for scope in resource.scope_metrics
            for metric in scope.metrics
            if metric.name == name
            for point in metric.data.data_points
        ]


@pytest.fixture
def telemetry() -> Iterator[Telemetry]:
    made = Telemetry()
    yield made
    made.tracers.shutdown()
    made.meters.shutdown()


def linked(span: Any) -> list[int]:
    """The ids of the spans that a span has links to."""
    return [link.context.span_id for link in span.links]


async def test_a_job_has_the_spans_of_the_conventions(app: App, telemetry: Telemetry, url: str) -> None:
    app.add_middleware(telemetry.make())

    @app.task
    async def work(n: int) -> int:
        return n

    async with working(app, name="w"):
        sent = await work.adelay(1)
        assert await sent.aget() == 1
        await until(lambda: bool(telemetry.named("ack default")))
    send, process = telemetry.one("send default"), telemetry.one("process default")
    receive, ack = telemetry.one("receive default"), telemetry.one("ack default")
    kinds = {span.name.split()[0]: span.kind.name for span in (send, process, receive, ack)}
    assert kinds == {"send": "PRODUCER", "process": "CONSUMER", "receive": "CLIENT", "ack": "CLIENT"}
    types = {
        span.attributes["messaging.operation.name"]: span.attributes["messaging.operation.type"]
        for span in (send, process, receive, ack)
    }
    assert types == {"send": "send", "process": "process", "receive": "receive", "ack": "settle"}
    server = module.get_server_attributes(app.connections.endpoint)
    for span in (send, process, receive, ack):
        assert span.attributes["messaging.system"] == "celery5"
        assert span.attributes["messaging.destination.name"] == "default"
        assert {name: span.attributes.get(name) for name in server} == server
        assert span.instrumentation_scope.schema_url == "https://opentelemetry.io/schemas/1.44.0"
        assert "error.type" not in span.attributes
        assert span.status.is_unset
    assert send.attributes["messaging.message.id"] == process.attributes["messaging.message.id"] == sent.id
    assert send.attributes["messaging.message.body.size"] > 50
    assert receive.attributes["messaging.batch.message_count"] == 1
    assert ack.attributes["messaging.batch.message_count"] == 1
    assert process.attributes["messaging.client.id"].startswith("w:")
    assert linked(process) == linked(receive) == linked(ack) == [send.context.span_id]
    assert process.parent is None
    assert process.context.trace_id != send.context.trace_id


async def test_a_job_is_a_child_where_the_setting_says_so(app: App, telemetry: Telemetry) -> None:
    app.add_middleware(telemetry.make(relation="parent"))

    @app.task
    async def outer() -> str:
        inner_sent = await inner.adelay()
        return inner_sent.id

    @app.task
    def inner() -> str:
        job = current_job()
        return job.trace if job else ""

    async with working(app):
        with telemetry.tracer.start_as_current_span("request") as request:
            sent = await outer.adelay()
        inner_trace = await app.result(await sent.aget(), task=inner).aget()
        await until(lambda: len(telemetry.named("process default")) == 2)
    process, inner_process = telemetry.named("process default")
    send, inner_send = telemetry.named("send default")
    assert send.parent.span_id == request.get_span_context().span_id
    assert process.parent.span_id == send.context.span_id
    assert inner_send.parent.span_id == process.context.span_id
    assert inner_process.parent.span_id == inner_send.context.span_id
    assert inner_trace.split("-")[1] == f"{send.context.trace_id:032x}"
    assert process.links == inner_process.links == ()


@pytest.mark.parametrize("creates", [True, False])
async def test_each_job_of_a_batch_may_have_a_span(app: App, telemetry: Telemetry, creates: bool) -> None:
    app.add_middleware(telemetry.make(create_spans=creates))

    @app.task
    async def work(n: int) -> None: ...

    async with working(app):
        sent = await app.asend_many([work.s(n) for n in range(3)])
        for job in sent:
            await job.aget()
        await until(lambda: len(telemetry.named("process default")) == 3)
    send, created = telemetry.one("send default"), telemetry.named("create default")
    assert send.attributes["messaging.batch.message_count"] == 3
    assert send.kind.name == ("CLIENT" if creates else "PRODUCER")
    assert len(created) == (3 if creates else 0)
    sources = {
        process.attributes["messaging.message.id"]: linked(process)
        for process in telemetry.named("process default")
    }
    if creates:
        assert {span.kind.name for span in created} == {"PRODUCER"}
        assert linked(send) == [span.context.span_id for span in created]
        expected = {span.attributes["messaging.message.id"]: [span.context.span_id] for span in created}
        assert sources == expected
    else:
        assert list(sources.values()) == [[send.context.span_id]] * 3


async def test_attempts_are_linked_to_the_creation_and_to_the_one_before(
    app: App, telemetry: Telemetry
) -> None:
    app.add_middleware(telemetry.make())

    @app.task(max_retries=2)
    async def fail() -> None:
        raise LookupError("no such order, api_key=hush")

    async with working(app):
        with pytest.raises(TaskFailed):
            await (await fail.adelay()).aget()
    send = telemetry.one("send default")
    first, second, third = telemetry.named("process default")
    assert linked(first) == [send.context.span_id]
    assert linked(second) == [send.context.span_id, first.context.span_id]
    assert linked(third) == [send.context.span_id, second.context.span_id]
    outcomes = [span.attributes["celery5.outcome"] for span in (first, second, third)]
    assert outcomes == ["retrying", "retrying", "dead"]
    for span in (first, second, third):
        assert span.attributes["error.type"] == "LookupError"
        assert span.status.status_code.name == "ERROR"
        assert span.status.description == "no such order, api_key=***"
        recorded = span.events[0].attributes
        assert recorded["exception.type"] == "LookupError"
        assert recorded["exception.message"] == "no such order, api_key=***"
        assert "in fail" in recorded["exception.stacktrace"]
        assert "hush" not in recorded["exception.stacktrace"]


async def test_a_job_that_is_not_sampled_makes_no_span_and_passes_the_flag_on(
    app: App, telemetry: Telemetry, monkeypatch: pytest.MonkeyPatch
) -> None:
    middleware = telemetry.make(metrics=False)
    app.add_middleware(middleware)
    traces: list[str] = []

    def allocate(*_words: object) -> None:
        raise AssertionError("it was decided too late")

    monkeypatch.setattr(middleware, "_trace_running", allocate)
    monkeypatch.setattr(middleware, "_trace_sending", allocate)
    monkeypatch.setattr(middleware, "_extract", allocate)

    @app.task
    async def work(depth: int) -> None:
        job = current_job()
        traces.append(job.trace if job else "")
        if depth:
            await work.adelay(depth - 1)

    async with working(app):
        with tracing(UNSAMPLED):
            await work.adelay(1)
        await until(lambda: len(traces) == 2)
    assert traces == [UNSAMPLED] * 2
    assert telemetry.spans.get_finished_spans() == ()


async def test_a_traceparent_of_other_code_is_the_parent_of_the_send(app: App, telemetry: Telemetry) -> None:
    app.add_middleware(telemetry.make())

    @app.task
    async def work() -> None: ...

    with tracing(SAMPLED):
        await work.adelay()
    assert f"{telemetry.one('send default').parent.span_id:016x}" == "b7ad6b7169203331"


async def test_the_jobs_of_an_event_are_linked_to_who_published_it(app: App, telemetry: Telemetry) -> None:
    app.add_middleware(telemetry.make())

    @app.event
    class Paid(Event):
        order: int

    @app.task
    async def thank(order: int) -> None: ...

    @app.task
    async def ship(order: int) -> None: ...

    Paid.subscribe(thank)
    Paid.subscribe(ship)
    async with trio.open_nursery() as nursery:
        await start(nursery, app)
        await start(nursery, app, page=ROUTER)
        await Paid.adelay(order=7)
        await until(lambda: len(telemetry.named("process default")) == 2)
        nursery.cancel_scope.cancel()
    published = telemetry.one("send events")
    assert [linked(span) for span in telemetry.named("process default")] == [[published.context.span_id]] * 2


async def test_the_jobs_of_a_workflow_are_linked_to_its_start_and_have_its_id(
    app: App, telemetry: Telemetry
) -> None:
    app.add_middleware(telemetry.make())

    @app.task
    async def first() -> int:
        return 1

    @app.task
    async def then(n: int) -> int:
        return n + 1

    async with working(app):
        run = await (first.s() | then.s()).astart()
        assert await run.aget() == 2
        await until(lambda: len(telemetry.named("process default")) == 2)
    send = telemetry.one("send default")
    spans = [send, *telemetry.named("process default")]
    assert {span.attributes["messaging.message.conversation_id"] for span in spans} == {run.id}
    assert [linked(span) for span in spans[1:]] == [[send.context.span_id]] * 2


async def test_what_cannot_be_sent_is_an_error(app_name: str, telemetry: Telemetry) -> None:
    app = App(app_name, broker="redis://127.0.0.1:1/0", backlog=0, middleware=[telemetry.make()])

    @app.task
    async def work() -> None: ...

    with pytest.raises(BrokerUnavailable):
        await work.adelay()
    send = telemetry.one("send default")
    assert send.attributes["error.type"] == "BrokerUnavailable"
    assert (send.attributes["server.address"], send.attributes["server.port"]) == ("127.0.0.1", 1)
    assert send.status.status_code.name == "ERROR"
    [point] = telemetry.points("messaging.client.sent.messages")
    assert point.attributes["error.type"] == "BrokerUnavailable"
    app.close()


async def test_the_metrics_of_the_conventions_are_there(app: App, telemetry: Telemetry) -> None:
    app.add_middleware(telemetry.make(traces=False))

    @app.task(max_retries=0)
    async def work(n: int) -> None:
        if n == 2:
            raise LookupError

    async with working(app):
        sent = await app.asend_many([work.s(n) for n in range(3)])
        for job in sent[:2]:
            await job.aget()
        with pytest.raises(TaskFailed):
            await sent[2].aget()
    assert telemetry.spans.get_finished_spans() == ()
    [sent_messages] = telemetry.points("messaging.client.sent.messages")
    [consumed] = telemetry.points("messaging.client.consumed.messages")
    assert (sent_messages.value, consumed.value) == (3, 3)
    processed = {
        point.attributes.get("error.type"): point for point in telemetry.points("messaging.process.duration")
    }
    assert {error: point.count for error, point in processed.items()} == {None: 2, "LookupError": 1}
    bounds = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
    assert processed[None].explicit_bounds == bounds
    operations = {
        point.attributes["messaging.operation.name"]: point
        for point in telemetry.points("messaging.client.operation.duration")
    }
    assert set(operations) == {"send", "ack"}
    assert operations["send"].explicit_bounds == bounds
    assert operations["ack"].attributes["messaging.operation.type"] == "settle"
    for point in (sent_messages, consumed, *processed.values(), *operations.values()):
        assert point.attributes["messaging.system"] == "celery5"
        assert point.attributes["messaging.destination.name"] == "default"
        assert "messaging.message.id" not in point.attributes


@pytest.mark.parametrize(("setting", "spans", "metrics"), [("traces", True, False), ("metrics", False, True)])
async def test_a_setting_turns_it_on(
    app: App, telemetry: Telemetry, setting: Any, spans: bool, metrics: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[dict[str, Any]] = []

    class Made(OpenTelemetryMiddleware):
        def __init__(self, **options: Any) -> None:
            made.append(options)
            super().__init__(tracer_provider=telemetry.tracers, meter_provider=telemetry.meters, **options)

    monkeypatch.setattr(module, "OpenTelemetryMiddleware", Made)
    assert len(app.middleware) == 0
    app.configure(opentelemetry=setting, trace_relation="parent")

    @app.task
    async def work() -> None: ...

    await work.adelay()
    assert made == [{"traces": spans, "metrics": metrics, "relation": "parent"}]
    assert bool(telemetry.named("send default")) is spans
    assert bool(telemetry.points("messaging.client.sent.messages")) is metrics


def test_without_the_package_the_error_names_it(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(module, "import_module", fail)
    app.configure(opentelemetry="all")
    with pytest.raises(Misconfigured, match=r"pip install 'opentelemetry-api>=.*celery5\[otel\]"):
        len(app.middleware)
