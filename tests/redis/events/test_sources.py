"""Sources: what a Data Source brings becomes a job of each task that has subscribed, once."""

import threading
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import redis
import trio

from celery5 import App
from celery5.errors import BadArguments, MessageTooLarge, Misconfigured
from celery5.events.sources import Source, group_by_source, source
from celery5.health import HealthCheck
from celery5.logs.log import Log
from celery5.protocol.events.documents import SourceDocument
from celery5.runners.on_asyncio import AsyncioRunner
from celery5.services.events import source_ingestion
from celery5.services.events.source_ingestion import SourceIngestion
from celery5.services.process import exclusive_lease
from tests.redis.worker.workers import Lines, until, working


async def sources_of(app: App, name: str = "router") -> SourceIngestion:
    """The service, for the sources that an application's tasks have subscribed to."""
    return SourceIngestion(
        subscriptions=group_by_source(app.tasks.values()),
        send=app.asend_jobs,
        redis=await app.connections.get_async_driver(),
        keys=app.keys,
        log=Log(worker=name, app=app.name),
        worker=name,
        asyncio_runner=AsyncioRunner(),
        default_loop=app.loop,
    )


@asynccontextmanager
async def sourcing(app: App, name: str = "router") -> AsyncGenerator[trio.CancelScope, None]:
    """The sources run while the block lasts. Gives what stops them."""
    async with trio.open_nursery() as nursery:
        await nursery.start((await sources_of(app, name)).run)
        try:
            yield nursery.cancel_scope
        finally:
            nursery.cancel_scope.cancel()


async def test_each_subscribed_task_is_given_the_raw_document(app: App) -> None:
    @source
    class Feed:
        async def run(self, emit: Any) -> None:
            assert await emit(b"\xff raw", id="doc-1", attributes={"kind": "raw"}) == "doc-1"

    one: list[SourceDocument] = []
    other: list[SourceDocument] = []

    @app.task(source=Feed)
    async def first(document: SourceDocument) -> None:
        one.append(document)

    @app.task(source=[Feed], queue="apart")
    async def second(document: SourceDocument) -> None:
        other.append(document)

    async with working(app), sourcing(app):
        await until(lambda: bool(one) and bool(other))
    assert one == other
    assert (one[0].source, one[0].id, one[0].body) == ("feed", "doc-1", b"\xff raw")
    assert one[0].attributes == {"kind": "raw"}
    assert one[0].received > 1.7e9


async def test_a_function_that_yields_without_end_is_published_as_it_yields(app: App) -> None:
    yielded: list[int] = []
    closed: list[bool] = []

    @source(every=60)
    def endless() -> Iterator[bytes]:
        try:
            while True:
                yielded.append(1)
                yield b"%d" % len(yielded)
        finally:
            closed.append(True)

    seen: list[str] = []

    @app.task(source=endless)
    async def take(document: SourceDocument) -> None:
        seen.append(document.text())

    async with working(app):
        async with sourcing(app):
            await until(lambda: len(seen) >= 1100)
            assert len(yielded) < 100_000, "it is no faster than what is published"
        await until(lambda: closed == [True])
    assert {"1", "1000", "1001"} <= set(seen)


async def test_a_function_runs_in_one_thread_and_each_body_is_published_at_once(app: App) -> None:
    threads = set[int]()
    go_on = threading.Event()

    @source(every=60)
    def patient() -> Iterator[bytes]:
        for number in range(1100):
            threads.add(threading.get_ident())
            yield b"%d" % number
        go_on.wait(60)  # for its next body, for ever so long

    seen: list[str] = []

    @app.task(source=patient)
    async def take(document: SourceDocument) -> None:
        seen.append(document.text())

    async with working(app), sourcing(app):
        await until(lambda: "1099" in seen)
        assert len(threads) == 1
        go_on.set()


async def test_what_a_function_has_yielded_before_it_fails_is_published(app: App) -> None:
    @source(every=60)
    def breaks() -> Iterator[bytes]:
        yield b"one"
        yield b"two"
        raise ValueError("no more")

    seen: list[str] = []

    @app.task(source=breaks)
    async def take(document: SourceDocument) -> None:
        seen.append(document.text())

    with Lines() as lines:
        async with working(app), sourcing(app):
            await until(lambda: {"one", "two"} <= set(seen))
            await until(lambda: bool(lines.of("source:failed")))
    assert lines.of("source:failed")[0]["why"] == "ValueError: no more"


async def test_generators_and_functions_are_sources_too(app: App) -> None:
    rounds: list[int] = []

    @source(every=0.01)
    async def ticks() -> AsyncIterator[Any]:
        rounds.append(1)
        yield {"n": len(rounds)}

    @source(every=0.01)
    def files() -> list[Any]:
        return ["text", SourceDocument(body=b"more", attributes={"a": "b"})]

    seen: list[SourceDocument] = []

    @app.task(source=[ticks, files])
    async def take(document: SourceDocument) -> None:
        seen.append(document)

    async with working(app), sourcing(app):
        await until(lambda: len([document for document in seen if document.source == "ticks"]) > 2)
        await until(lambda: len([document for document in seen if document.source == "files"]) > 3)
    assert [document.json() for document in seen if document.source == "ticks"][:2] == [{"n": 1}, {"n": 2}]
    assert {document.text() for document in seen if document.source == "files"} == {"text", "more"}


async def test_what_comes_again_under_its_id_is_one_job(app: App) -> None:
    given: list[str] = []

    @source
    async def feed(emit: Any) -> None:
        given.extend([await emit("same", id=name) for name in ("x", "x", "x", "", "")])

    seen: list[str] = []

    @app.task(source=feed)
    async def take(document: SourceDocument) -> None:
        seen.append(document.id)

    async with working(app):
        for _ in range(2):
            async with sourcing(app):
                before = len(given)
                await until(lambda before=before: len(given) > before)  # type: ignore[misc]
        await until(lambda: len(seen) >= 5)
        await trio.sleep(0.1)
    assert seen.count("x") == 1
    assert sorted(seen) == sorted(set(given))
    assert len(seen) == 5


async def test_a_task_that_failed_on_a_document_is_not_given_it_again_by_itself(app: App) -> None:
    @source
    async def feed(emit: Any) -> None:
        await emit("bad", id="x")
        await done.wait()
        again.append(await emit("bad", id="x"))

    done, again, ran = trio.Event(), list[str](), list[str]()

    @app.task(source=feed, max_retries=0)
    async def take(document: SourceDocument) -> None:
        ran.append(document.id)
        done.set()
        raise RuntimeError(document.text())

    async with working(app), sourcing(app):
        await until(lambda: bool(again))
        while not (dead := await app.dlq.acount()):
            await trio.sleep(0.01)
        await trio.sleep(0.1)
    assert ran == ["x"]
    assert dead == {"not-retried": 1}


async def test_a_source_that_fails_is_begun_again(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_ingestion, "FIRST_DELAY", 0.02)
    starts: list[int] = []

    @source
    class Shaky:
        def __init__(self) -> None:
            starts.append(1)

        async def run(self, emit: Any) -> None:
            if len(starts) < 3:
                raise OSError("the line went dead")
            await emit("at last")
            await trio.sleep_forever()

    seen: list[str] = []

    @app.task(source=Shaky)
    async def take(document: SourceDocument) -> None:
        seen.append(document.text())

    with Lines() as lines:
        async with working(app), sourcing(app):
            await until(lambda: seen == ["at last"])
    assert [line["why"] for line in lines.of("source:failed")] == ["OSError: the line went dead"] * 2


async def test_a_source_that_fails_holds_up_no_other(app: App) -> None:
    @source
    async def broken(_emit: Any) -> None:
        raise RuntimeError("always")

    @source
    async def fine(emit: Any) -> None:
        await emit("fine")

    seen: list[str] = []

    @app.task(source=[broken, fine])
    async def take(document: SourceDocument) -> None:
        seen.append(document.text())

    async with working(app), sourcing(app):
        await until(lambda: seen == ["fine"])


async def test_what_cannot_be_published_is_told_to_the_source(app: App) -> None:
    told: list[BaseException] = []

    @source
    async def feed(emit: Any) -> None:
        for body, name in ((b"x" * 3_000_000, ""), (object(), ""), ("x", "n" * 201)):
            try:
                await emit(body, id=name)
            except Exception as error:
                told.append(error)

    @app.task(source=feed)
    async def take(document: SourceDocument) -> None: ...

    async with sourcing(app):
        await until(lambda: len(told) == 3)
    assert [type(error) for error in told] == [MessageTooLarge, BadArguments, BadArguments]


async def test_the_log_says_which_router_has_a_single_source(app: App) -> None:
    @source(single=True)
    async def only(emit: Any) -> None:
        await trio.sleep_forever()

    @source
    async def each(emit: Any) -> None:
        await trio.sleep_forever()

    @app.task(source=[only, each])
    async def take(document: SourceDocument) -> None: ...

    with Lines() as lines:
        async with sourcing(app, "one"), sourcing(app, "two"):
            await until(lambda: len(lines.of("source:started")) == 3)
        found = sorted((line["source"], line["single"], line["level"]) for line in lines.of("source:started"))
    assert found == [("each", False, "info"), ("each", False, "info"), ("only", True, "info")]


async def test_a_single_source_runs_in_one_router_and_another_takes_over(
    app: App, redis_client: "redis.Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exclusive_lease, "LEASE", 0.5)
    running: list[str] = []

    @source(single=True)
    class Only:
        async def run(self, emit: Any) -> None:
            running.append("run")
            try:
                await trio.sleep_forever()
            finally:
                running.remove("run")

    @app.task(source=Only)
    async def take(document: SourceDocument) -> None: ...

    key = app.keys.source_lease("only")
    async with sourcing(app, "one") as first, sourcing(app, "two"):
        await until(lambda: running == ["run"])
        before = _text(redis_client.get(key))
        await trio.sleep(1.2)  # more than two leases: it is renewed
        assert running == ["run"]
        assert _text(redis_client.get(key)) == before
        first.cancel()
        await until(lambda: running == ["run"] and _text(redis_client.get(key)) == "two", within=30)
    assert running == []
    assert redis_client.get(key) is None


async def test_who_loses_a_single_source_stops_it(
    app: App, redis_client: "redis.Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exclusive_lease, "LEASE", 0.3)
    running: list[str] = []

    @source(single=True)
    async def only(_emit: Any) -> None:
        running.append("run")
        try:
            await trio.sleep_forever()
        finally:
            running.remove("run")

    @app.task(source=only)
    async def take(document: SourceDocument) -> None: ...

    key = app.keys.source_lease("only")
    async with sourcing(app, "one"):
        await until(lambda: running == ["run"])
        redis_client.set(key, "somebody else", px=1000)  # as when we were frozen for longer than the lease
        await until(lambda: running == [])
        await until(lambda: running == ["run"])  # and when that is gone, it is ours again
    assert _text(redis_client.get(key)) in ("", "one")


def _text(raw: Any) -> str:
    return raw.decode() if raw else ""


async def test_a_document_may_feed_a_health_check(app: App) -> None:
    alarm = app.health_check.add(HealthCheck("alarm", states=("raised", "quiet")))
    noticed: list[str] = []

    @source
    async def alerts(emit: Any) -> None:
        await emit({"level": "raised"}, id="alert-1")

    @app.task(source=alerts)
    async def notice(document: SourceDocument) -> None:
        alarm.report(document.json()["level"], "the sensor says so")
        noticed.append(alarm.state)

    async with working(app), sourcing(app):
        await until(lambda: alarm.state == "raised")


def test_what_makes_no_sense_is_refused_at_once() -> None:
    app = App("sourced")

    async def good(emit: Any) -> None: ...

    wrongly: Any = source
    declare: Any = app.task

    def once() -> list[str]:
        return []

    for wrong, said in (
        (lambda: source(7), "is none"),
        (lambda: source(once), "every=5.0"),
        (lambda: source(good, every=-1), "every is -1"),
        (lambda: source(good, name="a b"), "source name 'a b'"),
        (lambda: wrongly(good, often=1), "not 'often'"),
        (lambda: declare(source="feed")(good), "source is 'feed'"),
    ):
        with pytest.raises(Misconfigured, match=said):
            wrong()
    with pytest.raises(Misconfigured, match="cannot take a SourceDocument"):

        @app.task(source=Source(good))
        async def take() -> None: ...

    @app.task(source=[Source(good), Source(good)])
    async def twice(document: SourceDocument) -> None: ...

    with pytest.raises(Misconfigured, match="two sources are named 'good'"):
        group_by_source(app.tasks.values())


def test_a_task_may_subscribe_later() -> None:
    app = App("sourced")

    @source
    async def feed(emit: Any) -> None: ...

    @feed.subscribe
    @app.task
    async def take(document: SourceDocument) -> None: ...

    assert group_by_source(app.tasks.values()) == {feed: [take]}


@pytest.mark.parametrize("bad", ["x" * 2_000_000, {1, object()}], ids=["too-large", "no-json"])
async def test_a_body_that_can_never_be_published_holds_up_none_behind_it(app: App, bad: object) -> None:
    @source(every=60)
    def polled() -> list[object]:
        return [bad, "good"]

    @source(every=60)
    async def yielded() -> AsyncIterator[object]:
        yield bad
        yield "good"

    given: list[str] = []

    @app.task(source=[polled, yielded])
    async def take(document: SourceDocument) -> None:
        given.append(f"{document.source} {document.text()}")

    with Lines() as lines:
        async with working(app), sourcing(app):
            await until(lambda: sorted(given) == ["polled good", "yielded good"])
    assert sorted(line["source"] for line in lines.of("source:document-rejected")) == ["polled", "yielded"]
    assert lines.of("source:failed") == []
