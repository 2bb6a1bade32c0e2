"""Operations: middleware around records of streams, documents of sinks, events in a Router, and a Publisher daemon."""

import asyncio
from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, cast

import pytest
import trio

from celery5 import App, Event, RetryPolicy
from celery5.errors import StreamFull
from celery5.observability import MessageOperation, Middleware, OpenTelemetryMiddleware
from celery5.processes.publisher import PUBLISHER
from celery5.processes.router import ROUTER
from celery5.streams import BlockingEvents, Keep, ProcessorMiddleware, Record, StreamEntry, StreamEvents
from celery5.streams.codec import MAX_HEADERS, read_record_headers
from tests.redis.events.sinking import Kept
from tests.redis.worker.workers import Lines, start, until, working

TENANT: ContextVar[str] = ContextVar("tenant", default="nobody")


class Noted(Middleware):
    """Notes each operation, and passes on whose it is in the headers of records."""

    def __init__(self) -> None:
        self.all: list[MessageOperation] = []

    @contextmanager
    def operating(self, operation: MessageOperation) -> Generator[None]:
        if operation.name == "send":
            for headers in operation.headers:
                headers["tenant"] = TENANT.get()
        elif operation.name == "process":
            TENANT.set(operation.headers[0].get("tenant", "?"))
        yield
        self.all.append(operation)

    def of(self, name: str, resource: str) -> list[MessageOperation]:
        """Those of a name and a resource, in the order of their ends."""
        return [
            operation for operation in self.all if (operation.name, operation.resource) == (name, resource)
        ]


@pytest.fixture
def noted(app: App) -> Noted:
    """What the application's middleware has noted."""
    one = Noted()
    app.add_middleware(one)
    return one


class Amount(Record, primitive=True):
    n: int


class Number(Record):
    n: int


RECORDS: dict[str, tuple[Any, Callable[[int], Any]]] = {
    "dict": ({"kind": dict}, lambda n: {"n": n}),
    "msgpack": ({"kind": dict, "codec": "msgpack+gzip"}, lambda n: {"n": n}),
    "primitive": ({"kind": Amount}, lambda n: Amount(n=n)),
}


def _n(record: Any) -> int:
    return int(getattr(record, "n", 0) or record["n"])


@pytest.mark.parametrize("kind", ["trio", "asyncio", "thread"])
@pytest.mark.parametrize("name", RECORDS)
async def test_headers_travel_with_records_to_whatever_processes_them(
    app: App, noted: Noted, name: str, kind: str
) -> None:
    options, make = RECORDS[name]
    numbers: Any = app.stream("numbers", options["kind"], **{k: v for k, v in options.items() if k != "kind"})
    doubled: Any = app.stream("doubled", Number)
    seen = list[tuple[int, str, str]]()

    def note(events: Any, entry: Any) -> None:
        seen.append((_n(entry.record), entry.headers["tenant"], TENANT.get()))
        events.send(Number(n=_n(entry.record) * 2))

    if kind == "thread":

        @app.processor(numbers, into=doubled)
        def blocking(events: BlockingEvents[Any]) -> None:
            for entry in events:
                note(events, entry)
    else:

        @app.processor(numbers, into=doubled, loop=cast("Any", kind))
        async def awaiting(events: StreamEvents[Any]) -> None:
            async for entry in events:
                note(events, entry)

    outputs = list[tuple[int, str]]()

    @app.processor(doubled)
    async def collect(events: StreamEvents[Any]) -> None:
        async for entry in events:
            outputs.append((_n(entry.record), entry.headers["tenant"]))

    async with working(app):
        TENANT.set("acme")
        await numbers.asend(make(1))
        TENANT.set("emca")
        await numbers.asend(make(2))
        await until(lambda: len(outputs) == 2)
        await until(lambda: len(noted.of("process", "numbers")) == 2)
    assert sorted(seen) == [(1, "acme", "acme"), (2, "emca", "emca")]
    assert sorted(outputs) == [(2, "acme"), (4, "emca")]
    assert noted.of("commit", "numbers")


async def test_sending_is_surrounded_in_every_colour_and_its_error_is_noted(app: App, noted: Noted) -> None:
    few: Any = app.stream("few", Number, partitions=1, keep=Keep(records=3))
    enough = trio.Event()

    @app.processor(few)
    async def slow(events: StreamEvents[Any]) -> None:
        async for _ in events:
            await enough.wait()

    async with working(app):
        await trio.to_thread.run_sync(few.send, Number(n=1))
        await few.asend(Number(n=2))
        await trio.to_thread.run_sync(lambda: asyncio.run(_send(few)))
        assert [(operation.count, operation.error) for operation in noted.of("send", "few")] == [
            (1, None)
        ] * 3
        with pytest.raises(StreamFull):
            await few.asend(Number(n=4))
        enough.set()
    assert isinstance(noted.of("send", "few")[-1].error, StreamFull)


async def _send(stream: Any) -> None:
    await stream.asend(Number(n=3))


async def test_a_batch_is_one_operation_and_a_failure_is_noted(app: App, noted: Noted) -> None:
    numbers: Any = app.stream("numbers", Number, partitions=1)
    batches = list[int]()

    @app.processor(numbers, on_error=RetryPolicy(max_retries=2, backoff=0.01, jitter=False))
    async def sum_up(events: StreamEvents[Any]) -> None:
        async for batch in events.take(3, within=1):
            batches.append(len(batch))
            if len(batches) == 1:
                raise ValueError("the first attempt")

    async with working(app):
        await numbers.asend(Number(n=1), Number(n=2), Number(n=3))
        await until(lambda: len(batches) >= 2)
        await until(lambda: len(noted.of("process", "numbers")) >= 2)
    first, second = noted.of("process", "numbers")[:2]
    assert first.count == len(first.headers) == batches[0] > 1
    assert isinstance(first.error, ValueError)
    assert second.error is None


async def test_headers_stay_where_middleware_passes_on_another_record(app: App, noted: Noted) -> None:
    class Doubles(ProcessorMiddleware[Number]):
        def before(self, entry: StreamEntry[Number]) -> Number:
            return Number(n=entry.record.n * 2)

    numbers, seen = app.stream("numbers", Number), list[tuple[int, str]]()

    @app.processor(numbers, middleware=[Doubles()])
    async def note(events: StreamEvents[Number]) -> None:
        async for entry in events:
            seen.append((entry.record.n, entry.headers["tenant"]))

    async with working(app):
        TENANT.set("acme")
        await numbers.asend(Number(n=2))
        await until(lambda: bool(seen))
    assert seen == [(4, "acme")]


async def test_a_router_surrounds_documents_and_events(app: App, noted: Noted) -> None:
    kept = Kept(refuses=lambda document: document.value == 2)

    @app.event(name="ordered")
    class Ordered(Event):
        number: int

    @Ordered.subscribe
    @app.task(name="ship", sinks=[kept])
    async def ship(number: int) -> int:
        return number

    async with working(app), working(app, page=ROUTER):
        await Ordered.adelay(number=1)
        await until(lambda: len(noted.of("deliver", "kept")) >= 1)
        await Ordered.adelay(number=2)
        await until(lambda: any(operation.error for operation in noted.of("deliver", "kept")))
    assert noted.of("deliver", "kept")[0].error is None
    assert [operation.target for operation in noted.of("deliver", "events")][:2] == ["events", "events"]
    del ship


async def test_a_publisher_surrounds_what_it_publishes(app: App, noted: Noted, short_path: Path) -> None:
    @app.task(name="one", queue="mails")
    async def one() -> int:
        return 1

    app.configure(publisher_socket=str(short_path / "p"))
    producer = App(app.name, broker=app.settings.broker, publisher=f"unix://{short_path / 'p'}")

    @producer.task(name="one", queue="mails")
    async def sent() -> int:
        return 1

    async with trio.open_nursery() as nursery:
        daemon = await start(nursery, app, page=PUBLISHER)
        await sent.adelay()
        await until(lambda: bool(noted.of("publish", "mails")))
        await daemon.stop()
    producer.close()
    assert [operation.count for operation in noted.of("publish", "mails")] == [1]
    del one


class Nonsense(Middleware):
    def operating(self, operation: MessageOperation) -> None:
        for headers in operation.headers:
            headers["n"] = 1  # type: ignore[assignment]


class Broken(Middleware):
    def operating(self, operation: MessageOperation) -> Any:
        if operation.name == "process":
            raise ValueError("broken")
        return None


async def test_middleware_that_fails_or_adds_nonsense_harms_no_record(
    app: App, caplog: pytest.LogCaptureFixture
) -> None:
    app.add_middleware(Broken())
    app.add_middleware(Nonsense())
    numbers: Any = app.stream("numbers", Number)
    got = list[Any]()

    @app.processor(numbers)
    async def note(events: StreamEvents[Any]) -> None:
        async for entry in events:
            got.append((entry.record, dict(entry.headers)))

    with Lines() as lines:
        async with working(app):
            await numbers.asend(Number(n=1))
            await until(lambda: bool(got))
    assert got == [(Number(n=1), {})]
    assert [line["middleware"] for line in lines.of("middleware:failed")] == ["Broken"]
    assert "header 'n' is 1: names and values are texts" in caplog.text


@pytest.mark.parametrize(
    "raw", [b"", b"[]", b'{"a": 1}', b"\xff", b"null", b'{"a": "' + b"x" * MAX_HEADERS + b'"}']
)
def test_headers_of_other_programs_are_ignored_unless_they_are_valid(raw: bytes) -> None:
    assert read_record_headers([b"=json", b"{}", b"=h", raw]) == {}
    assert read_record_headers([b"=json"]) == read_record_headers([]) == {}
    assert read_record_headers([b"=json", b"{}", b"=h", b'{"a": "b"}']) == {"a": "b"}


async def test_records_are_spans_linked_to_who_sent_them(app: App) -> None:
    sdk: Any = pytest.importorskip("opentelemetry.sdk.trace")
    export: Any = pytest.importorskip("opentelemetry.sdk.trace.export")
    memory: Any = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    spans, provider = memory.InMemorySpanExporter(), sdk.TracerProvider()
    provider.add_span_processor(export.SimpleSpanProcessor(spans))
    app.add_middleware(OpenTelemetryMiddleware(tracer_provider=provider))
    numbers: Any = app.stream("numbers", Number)
    inner = list[Any]()

    @app.processor(numbers)
    async def note(events: StreamEvents[Any]) -> None:
        async for _ in events:
            with provider.get_tracer("test").start_as_current_span("inner") as span:
                inner.append(span)

    async with working(app):
        with provider.get_tracer("test").start_as_current_span("request") as request:
            await numbers.asend(Number(n=1))
        await until(lambda: any(span.name == "process numbers" for span in spans.get_finished_spans()))
        await until(lambda: any(span.name == "commit numbers" for span in spans.get_finished_spans()))
    found = {span.name: span for span in spans.get_finished_spans()}
    send, process = found["send numbers"], found["process numbers"]
    assert send.parent.span_id == request.get_span_context().span_id
    assert send.kind.name == "PRODUCER"
    assert [link.context.span_id for link in process.links] == [send.context.span_id]
    assert inner[0].parent.span_id == process.context.span_id
    assert process.attributes["messaging.destination.name"] == "numbers"
