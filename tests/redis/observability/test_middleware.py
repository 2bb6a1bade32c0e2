"""Middleware: it surrounds sending, running and settling, sees every outcome, and never harms a job."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from typing import Any

import pytest
import redis
import trio

from celery5 import App, Event, Reject, RetryPolicy, TaskFailed, TaskRevoked, current_job
from celery5.errors import BoxCrashed
from celery5.observability import (
    Dead,
    Expired,
    IncomingJob,
    JobOutcome,
    MessageOperation,
    Middleware,
    Rejected,
    Released,
    Retrying,
    Revoked,
    SendingBatch,
    SettlingBatch,
    Succeeded,
)
from celery5.protocol.job.messages import read_command
from celery5.protocol.job.verdict import Reason
from celery5.protocol.scaling import prefetch
from celery5.services.job import job_middleware
from celery5.services.worker import consumer
from celery5.tasks import Box
from celery5.testing import running_worker
from tests.redis.worker.workers import LEASE, Lines, entries, of_kind, start, until, working

TENANT: ContextVar[str] = ContextVar("tenant", default="nobody")


class Notes(Middleware):
    """Notes whatever happens, under a name."""

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.lines: list[str] = []
        self.outcomes: list[tuple[int, JobOutcome | None]] = []
        self.exceptions: list[BaseException | None] = []
        self.unstarted_outcomes: list[tuple[str, JobOutcome | None]] = []
        self.settled: list[str] = []
        self.received_ids: list[str] = []

    @contextmanager
    def running(self, job: IncomingJob) -> Iterator[None]:
        assert job.outcome is None
        current = current_job()
        assert current is not None
        assert (current.id, current.attempt) == (job.id, job.attempt)
        self.lines.append(f"{self.name} in")
        yield
        self.lines.append(f"{self.name} out")
        self.outcomes.append((job.attempt, job.outcome))
        self.exceptions.append(job.exception)

    def unstarted(self, job: IncomingJob) -> None:
        self.unstarted_outcomes.append((job.task, job.outcome))
        self.exceptions.append(job.exception)

    def received(self, jobs: Sequence[IncomingJob]) -> None:
        self.received_ids += [job.id for job in jobs]

    @contextmanager
    def settling(self, batch: SettlingBatch) -> Iterator[None]:
        yield
        assert batch.error is None
        self.settled += [job.id for job in batch.jobs]


class Tenants(Middleware):
    """Passes a context variable from the producer to the task."""

    @contextmanager
    def sending(self, batch: SendingBatch) -> Iterator[None]:
        for job in batch.jobs:
            job.headers.setdefault("tenant", TENANT.get())
        yield

    @asynccontextmanager
    async def running(self, job: IncomingJob) -> AsyncIterator[None]:
        await trio.lowlevel.checkpoint()
        TENANT.set(job.headers["tenant"])  # never reset: it is gone with the job
        yield


# ---- running


async def test_the_first_middleware_is_the_outermost_and_a_job_is_received_run_and_settled(app: App) -> None:
    outer, inner = Notes("outer"), Notes("inner")
    inner.lines = outer.lines
    app.add_middleware(outer)
    app.add_middleware(inner)

    @app.task
    async def work() -> None:
        outer.lines.append("task")

    async with working(app):
        result = await work.adelay()
        await result.aget()
        await until(lambda: bool(outer.settled))
    assert outer.lines == ["outer in", "inner in", "task", "inner out", "outer out"]
    assert outer.outcomes == [(1, Succeeded())]
    assert outer.received_ids == outer.settled == [result.id]
    assert outer.unstarted_outcomes == []


class Nested(Middleware):
    """Notes the blocks that it opens and closes, under a name."""

    def __init__(self, name: str, lines: list[str]) -> None:
        self.name = name
        self.lines = lines

    @contextmanager
    def _surround(self, what: str) -> Iterator[None]:
        self.lines.append(f"{what}: {self.name} in")
        yield
        self.lines.append(f"{what}: {self.name} out")

    def sending(self, batch: SendingBatch) -> Any:
        return self._surround("sending")

    def settling(self, batch: SettlingBatch) -> Any:
        return self._surround("settling")

    def operating(self, operation: MessageOperation) -> Any:
        return self._surround(f"{operation.name} {operation.resource}")


async def test_blocks_of_several_middleware_are_nested_in_each_other(app: App) -> None:
    lines = list[str]()
    app.add_middleware(Nested("outer", lines))
    app.add_middleware(Nested("inner", lines))

    @app.task
    async def work() -> None: ...

    await app.stream("numbers", int).asend(1)
    async with working(app):
        await (await work.adelay()).aget()
        await until(lambda: "settling: outer out" in lines)
    for what in ("send numbers", "sending", "settling"):
        expected = [f"{what}: {text}" for text in ("outer in", "inner in", "inner out", "outer out")]
        assert [line for line in lines if line.startswith(f"{what}:")] == expected


@pytest.mark.parametrize("kind", ["trio", "asyncio", "thread"])
async def test_what_is_set_around_a_job_is_seen_in_it_and_gone_after_it(app: App, kind: str) -> None:
    app.add_middleware(Tenants())
    before: list[str] = []

    class Before(Middleware):
        def running(self, job: IncomingJob) -> None:
            before.append(TENANT.get())

    app.add_middleware(Before())
    task = of_kind(app, kind, TENANT.get)
    app.configure(concurrency=1, cpu_slots=1)
    async with working(app):
        for name in ("ada", "bob"):
            token = TENANT.set(name)
            sent = await task.adelay()
            TENANT.reset(token)
            assert await sent.aget() == name
    # The second one looks after the first one has set it, in the same job; between the jobs it is not set.
    assert before == ["ada", "bob"]


async def test_between_two_jobs_nothing_is_left_of_the_first(app: App) -> None:
    seen: list[str] = []

    class Leaving(Middleware):
        def running(self, job: IncomingJob) -> None:
            seen.append(TENANT.get())
            TENANT.set("left over")

    app.add_middleware(Leaving())

    @app.task
    async def work() -> None: ...

    app.configure(concurrency=1)
    async with working(app):
        for _ in range(3):
            await (await work.adelay()).aget()
    assert seen == ["nobody"] * 3


@pytest.mark.parametrize("kind", ["trio", "asyncio", "thread"])
async def test_a_retry_and_the_end_are_outcomes_with_the_error_itself(app: App, kind: str) -> None:
    notes = Notes()
    app.add_middleware(notes)

    def fail() -> None:
        raise LookupError("no such order")

    task = of_kind(app, kind, fail)
    async with working(app):
        with pytest.raises(TaskFailed):
            await (await task.adelay()).aget()
    attempts = [attempt for attempt, _ in notes.outcomes]
    first, second, last = [outcome for _, outcome in notes.outcomes]
    assert attempts == [1, 2, 3]
    assert isinstance(first, Retrying)
    assert isinstance(second, Retrying)
    assert first.delay == pytest.approx(0.01)
    assert isinstance(last, Dead)
    assert (last.reason, last.error.type, last.timed_out) == (Reason.EXHAUSTED, "LookupError", False)
    assert [repr(error) for error in notes.exceptions] == ["LookupError('no such order')"] * 3


@pytest.mark.parametrize("is_given", [True, False], ids=["exc", "handled"])
@pytest.mark.parametrize("kind", ["trio", "asyncio", "thread"])
async def test_requested_retry_ends_with_the_error_that_it_was_for(
    app: App, kind: str, is_given: bool
) -> None:
    notes = Notes()
    app.add_middleware(notes)

    def ask() -> None:
        job, busy = current_job(), ConnectionError("busy")
        assert job is not None
        if is_given:
            job.retry(exc=busy, countdown=0, max_retries=1)
        try:
            raise busy
        except ConnectionError:
            job.retry(countdown=0, max_retries=1)

    task = of_kind(app, kind, ask)
    async with working(app):
        with pytest.raises(TaskFailed) as failed:
            await (await task.adelay()).aget()
    assert (failed.value.type, failed.value.message) == ("ConnectionError", "busy")
    *_, place, last = failed.value.traceback.strip().splitlines()
    assert last == "ConnectionError: busy", "what the user has raised is at the end, and not Retry"
    assert "in ask" in failed.value.traceback
    assert ("raise retry from exc" in place) is is_given, (
        "an error that was never raised shows where it was given"
    )
    assert [type(outcome) for _, outcome in notes.outcomes] == [Retrying, Dead]
    assert [repr(error) for error in notes.exceptions] == ["ConnectionError('busy')"] * 2


@pytest.mark.parametrize("kind", ["trio", "asyncio", "thread"])
async def test_a_time_limit_is_an_outcome(app: App, kind: str) -> None:
    notes = Notes()
    app.add_middleware(notes)

    def block() -> None:
        while True:
            trio.from_thread.check_cancelled()

    if kind == "thread":
        task: Any = app.task(time_limit=0.2, max_retries=0)(block)
    elif kind == "asyncio":

        @app.task(time_limit=0.2, max_retries=0, loop="asyncio")
        async def sleep_on_asyncio() -> None:
            await asyncio.sleep(100)

        task = sleep_on_asyncio
    else:

        @app.task(time_limit=0.2, max_retries=0)
        async def sleep() -> None:
            await trio.sleep_forever()

        task = sleep
    async with working(app):
        with pytest.raises(TaskFailed, match="time_limit"):
            await (await task.adelay()).aget()
    [(_, outcome)] = notes.outcomes
    assert isinstance(outcome, Dead)
    assert outcome.timed_out
    assert outcome.error.type == "TimeLimitExceeded"
    [error] = notes.exceptions
    assert "time_limit" in str(error)


async def test_a_revoked_job_and_a_rejected_one_are_outcomes(app: App) -> None:
    notes = Notes()
    app.add_middleware(notes)
    begun = trio.Event()

    @app.task
    async def sleep() -> None:
        begun.set()
        await trio.sleep_forever()

    @app.task
    async def refuse() -> None:
        raise Reject("not wanted")

    async with working(app):
        sent = await sleep.adelay()
        await begun.wait()
        await sent.arevoke()
        with pytest.raises(TaskRevoked):
            await sent.aget()
        await refuse.adelay()
        await until(lambda: len(notes.outcomes) == 2)
    assert [outcome for _, outcome in notes.outcomes] == [Revoked(), Rejected("not wanted")]


async def test_a_worker_that_stops_releases_its_job_and_the_block_may_still_wait(app: App) -> None:
    ended: list[JobOutcome | None] = []
    begun = trio.Event()

    class Slow(Middleware):
        @asynccontextmanager
        async def running(self, job: IncomingJob) -> AsyncIterator[None]:
            yield
            await trio.sleep(0.05)
            ended.append(job.outcome)

    app.add_middleware(Slow())

    @app.task
    async def sleep() -> None:
        begun.set()
        await trio.sleep_forever()

    app.configure(grace_period=0.0)
    async with working(app):
        await sleep.adelay()
        await begun.wait()
    assert ended == [Released()]


async def test_a_box_that_crashed_is_an_outcome(app: App) -> None:
    notes = Notes()
    app.add_middleware(notes)

    @app.task(boxed=Box(command=["false"]), max_retries=0)
    def crash() -> None: ...

    task = crash
    async with working(app):
        with pytest.raises(TaskFailed):
            await (await task.adelay()).aget()
    [(_, outcome)] = notes.outcomes
    assert isinstance(outcome, Dead)
    assert outcome.error.type == "BoxCrashed"
    [error] = notes.exceptions
    assert isinstance(error, BoxCrashed)


async def test_jobs_that_are_not_run_are_noted_with_their_ends(app: App, redis_client: "redis.Redis") -> None:
    notes = Notes()
    app.add_middleware(notes)

    @app.task
    async def late() -> None: ...

    @app.task
    async def waiting() -> None:
        await trio.sleep_forever()

    await late.options(expires=0.001).adelay()
    stream = app.queue("default").stream
    redis_client.xadd(stream, {"job": '{"v":1,"id":"j-1","task":"nobody.knows"}'})
    redis_client.xadd(stream, {"job": "no JSON"})
    await trio.sleep(0.01)
    async with working(app):
        await until(lambda: len(notes.unstarted_outcomes) == 3)
    found = dict(notes.unstarted_outcomes)
    assert found[late.name] == Expired()
    assert isinstance(found["nobody.knows"], Dead)
    assert found["nobody.knows"].reason is Reason.UNKNOWN_TASK
    assert isinstance(found[""], Dead)
    assert found[""].reason is Reason.CORRUPT
    assert notes.outcomes == []
    errors = [error.reason for error in notes.exceptions if isinstance(error, TaskFailed)]
    assert sorted(errors) == ["corrupt", "unknown-task"]
    assert notes.exceptions.count(None) == 1  # it came too late, which is no failure


async def test_a_job_that_is_revoked_before_it_runs_is_noted(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumer, "STALE_HORIZONS", 60.0)  # it is not given back meanwhile
    monkeypatch.setattr(prefetch, "HORIZON", 10.0)  # however slow this machine is
    notes = Notes()
    app.add_middleware(notes)
    begun = trio.Event()

    @app.task
    async def hold() -> None:
        begun.set()
        await trio.sleep_forever()

    @app.task
    async def short() -> None: ...

    app.configure(concurrency=1)
    async with working(app):
        for _ in range(3):  # now the worker knows that these are short, and reads ahead
            await (await short.adelay()).aget()
        first, second = await app.asend_many([hold.s(), short.s()])
        await begun.wait()
        await until(lambda: len(notes.received_ids) == 5)
        await second.arevoke()
        await until(lambda: notes.unstarted_outcomes == [(short.name, Revoked())])
        await first.arevoke()


async def test_the_death_of_another_worker_is_noted(app: App) -> None:
    deaths: list[tuple[str, str, int]] = []

    class Deaths(Middleware):
        def recovered(self, worker: str, queue: str, count: int) -> None:
            deaths.append((worker, queue, count))

    @app.task
    async def sleep() -> None: ...

    await sleep.adelay()
    from celery5.broker.calls import jobs, leases  # what a worker does that then dies

    keys = app.queue("default")
    await app.aperform(leases.join_queue(keys, "dead", lease=LEASE))
    await app.aperform(jobs.read_jobs([keys], "dead", count=1, block_seconds=0))
    app.add_middleware(Deaths())
    async with working(app):
        await until(lambda: bool(deaths))
    assert deaths == [("dead", "default", 1)]


async def test_a_process_tells_when_it_is_ready_and_when_it_has_ended(app: App) -> None:
    told: list[tuple[str, str, str]] = []

    class Process(Middleware):
        def process_started(self, kind: str, name: str) -> None:
            told.append(("started", kind, name))

        def process_stopped(self, kind: str, name: str) -> None:
            told.append(("stopped", kind, name))

    app.add_middleware(Process())
    async with working(app, name="w1"):
        assert told == [("started", "worker", "w1")]
    assert told == [("started", "worker", "w1"), ("stopped", "worker", "w1")]


def test_middleware_hears_of_the_processes_of_a_running_worker_in_a_test(url: str, app_name: str) -> None:
    told: list[tuple[str, str]] = []

    class Process(Middleware):
        def process_started(self, kind: str, name: str) -> None:
            told.append(("started", kind))

        def process_stopped(self, kind: str, name: str) -> None:
            told.append(("stopped", kind))

    app = App(app_name, middleware=[Process()])

    @app.task(schedule="0 3 * * *")
    async def nightly() -> None: ...

    with running_worker(app, broker=url):
        assert sorted(told) == [("started", "scheduler"), ("started", "worker")]
    assert sorted(told[2:]) == [("stopped", "scheduler"), ("stopped", "worker")]


# ---- what fails


class Failing(Middleware):
    """Fails wherever it can, in one of several ways."""

    def __init__(self, how: str) -> None:
        self.how = how
        self.calls = 0

    def _block(self) -> Any:
        self.calls += 1
        if self.how == "at once":
            raise SystemExit("bad middleware")
        return self._fail()

    @contextmanager
    def _fail(self) -> Iterator[None]:
        if self.how == "before":
            raise RuntimeError("bad middleware")
        yield
        if self.how == "after":
            raise RuntimeError("bad middleware")
        if self.how == "twice":
            yield

    def sending(self, batch: SendingBatch) -> Any:
        return self._block()

    def running(self, job: IncomingJob) -> Any:
        return self._block()

    def settling(self, batch: SettlingBatch) -> Any:
        return self._block()

    def received(self, jobs: Sequence[IncomingJob]) -> None:
        raise RuntimeError("bad middleware")


@pytest.mark.parametrize("how", ["at once", "before", "after", "twice"])
async def test_middleware_that_fails_is_logged_once_and_changes_nothing(app: App, how: str) -> None:
    failing, notes = Failing(how), Notes()
    app.add_middleware(failing)
    app.add_middleware(notes)

    @app.task
    async def double(n: int) -> int:
        return 2 * n

    @app.task(max_retries=1)
    async def fail() -> None:
        raise ValueError("of the task")

    with Lines() as lines:
        async with working(app):
            sent = await app.asend_many([double.s(n) for n in range(5)])
            assert [await job.aget() for job in sent] == [0, 2, 4, 6, 8]
            with pytest.raises(TaskFailed, match="of the task"):
                await (await fail.adelay()).aget()
    logged = lines.of("middleware:failed")
    assert len(logged) <= 1  # the first failure was perhaps in the producer, which has no log of a worker
    assert failing.calls >= 9
    assert [type(outcome) for _, outcome in notes.outcomes] == [Succeeded] * 5 + [Retrying, Dead]


async def test_a_failure_of_middleware_names_it(app: App) -> None:
    class Broken(Middleware):
        def running(self, job: IncomingJob) -> None:
            raise LookupError("no such key")

    app.add_middleware(Broken())

    @app.task
    async def work() -> None: ...

    with Lines() as lines:
        async with working(app):
            for _ in range(3):
                await (await work.adelay()).aget()
    [line] = lines.of("middleware:failed")
    assert line["hook"] == "running"
    assert line["why"] == "LookupError: no such key"
    assert "Broken" in line["middleware"]


@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_block_that_waits_for_ever_is_left(
    app: App, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_middleware, "RUNNING_TIMEOUT", 0.1)

    class Hanging(Middleware):
        @asynccontextmanager
        async def running(self, job: IncomingJob) -> AsyncIterator[None]:
            if when == "before":
                await trio.sleep_forever()
            yield
            await trio.sleep_forever()

    app.add_middleware(Hanging())

    @app.task
    async def work() -> int:
        return 7

    with Lines() as lines:
        async with working(app):
            assert await (await work.adelay()).aget() == 7
    [line] = lines.of("middleware:failed")
    assert "within 0.1 s" in line["why"]


async def test_headers_that_make_no_sense_are_left_out(app: App, redis_client: "redis.Redis") -> None:
    class Large(Middleware):
        @contextmanager
        def sending(self, batch: SendingBatch) -> Iterator[None]:
            for job in batch.jobs:
                job.headers["large"] = "x" * 10_000
            yield

    app.add_middleware(Large())

    @app.task
    async def work() -> None: ...

    await work.adelay()
    [entry] = entries(redis_client, app.queue("default").stream)
    assert read_command(entry[b"job"]).headers is None


# ---- sending


def messages(client: "redis.Redis", app: App, queue: str = "default") -> list[Any]:
    """The messages on a queue."""
    return [read_command(entry[b"job"]) for entry in entries(client, app.queue(queue).stream)]


async def test_headers_go_along_from_every_colour(app: App, redis_client: "redis.Redis") -> None:
    app.add_middleware(Tenants())

    @app.task
    async def work(n: int) -> None: ...

    def in_plain_python() -> None:
        TENANT.set("plain")
        work.delay(1)
        app.send_many([work.s(2), work.s(3)])
        app.send_jobs([work.job(4)])

    async def on_asyncio() -> None:
        TENANT.set("asyncio")
        await work.adelay(5)

    TENANT.set("trio")
    await trio.to_thread.run_sync(in_plain_python)
    await trio.to_thread.run_sync(lambda: asyncio.run(on_asyncio()))
    await work.adelay(6)
    await app.asend_many([work.s(7), work.s(8)])
    await app.asend_jobs([work.job(9)])
    found = [message.headers["tenant"] for message in messages(redis_client, app)]
    assert found == ["plain"] * 4 + ["asyncio"] + ["trio"] * 4


async def test_what_cannot_be_sent_is_an_error_of_the_batch(app_name: str) -> None:
    errors: list[BaseException | None] = []

    class Errors(Middleware):
        @contextmanager
        def sending(self, batch: SendingBatch) -> Iterator[None]:
            yield
            errors.append(batch.error)

    app = App(app_name, broker="redis://127.0.0.1:1/0", middleware=[Errors()], backlog=0)

    @app.task
    async def work() -> None: ...

    with pytest.raises(Exception, match=r"127\.0\.0\.1:1") as caught:
        await work.adelay()
    assert [str(error) for error in errors] == [str(caught.value)]
    app.close()


async def test_headers_travel_through_retries_and_more_may_be_added(app: App) -> None:
    seen: list[dict[str, str]] = []

    class Attempts(Middleware):
        @contextmanager
        def running(self, job: IncomingJob) -> Iterator[None]:
            seen.append(dict(job.headers))
            yield
            if isinstance(job.outcome, Retrying):
                job.carry({"attempts": f"{job.headers.get('attempts', '')}{job.attempt}"})

    app.add_middleware(Tenants())
    app.add_middleware(Attempts())

    @app.task(max_retries=2)
    async def fail() -> None:
        raise ValueError

    TENANT.set("ada")
    async with working(app):
        with pytest.raises(TaskFailed):
            await (await fail.adelay()).aget()
    assert seen == [
        {"tenant": "ada"},
        {"tenant": "ada", "attempts": "1"},
        {"tenant": "ada", "attempts": "12"},
    ]


async def test_headers_that_cannot_be_carried_harm_no_retry(app: App) -> None:
    class Wrong(Middleware):
        @contextmanager
        def running(self, job: IncomingJob) -> Iterator[None]:
            yield
            job.carry({"attempt": job.attempt})  # type: ignore[dict-item]

    app.add_middleware(Wrong())

    @app.task
    async def succeed_later() -> int:
        job = current_job()
        assert job is not None
        if job.attempt == 1:
            raise ValueError
        return job.attempt

    async with working(app):
        assert await (await succeed_later.adelay()).aget() == 2


async def test_a_traceparent_among_the_headers_is_the_trace_of_the_job(app: App) -> None:
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    seen: list[Any] = []

    class Traced(Middleware):
        @contextmanager
        def sending(self, batch: SendingBatch) -> Iterator[None]:
            batch.jobs[0].headers["traceparent"] = trace
            yield

        def running(self, job: IncomingJob) -> None:
            seen.append((job.trace, dict(job.headers)))

    app.add_middleware(Traced())

    @app.task
    async def work() -> str:
        job = current_job()
        return job.trace if job else ""

    async with working(app):
        assert await (await work.adelay()).aget() == trace
    assert seen == [(trace, {"traceparent": trace})]


async def test_headers_of_a_workflow_are_those_of_all_its_jobs(app: App) -> None:
    app.add_middleware(Tenants())
    kinds: list[tuple[str, str]] = []

    class Kinds(Middleware):
        @contextmanager
        def sending(self, batch: SendingBatch) -> Iterator[None]:
            kinds.extend((job.kind, job.run_id) for job in batch.jobs)
            yield

    app.add_middleware(Kinds())

    @app.task
    async def first() -> str:
        return TENANT.get()

    @app.task
    async def then(before: str) -> str:
        return f"{before} {TENANT.get()}"

    TENANT.set("ada")
    async with working(app):
        run = await (first.s() | then.s()).astart()
        assert await run.aget() == "ada ada"
    assert kinds == [("run", run.id)]


async def test_headers_of_an_event_are_those_of_its_subscribers_jobs(app: App) -> None:
    from celery5.processes.router import ROUTER

    app.add_middleware(Tenants())
    seen: list[str] = []

    @app.event
    class Paid(Event):
        order: int

    @app.task
    async def thank(order: int) -> None:
        seen.append(TENANT.get())

    Paid.subscribe(thank)
    TENANT.set("ada")
    async with trio.open_nursery() as nursery:
        await start(nursery, app)
        await start(nursery, app, page=ROUTER)
        await Paid.adelay(order=7)
        await until(lambda: bool(seen))
        nursery.cancel_scope.cancel()
    assert seen == ["ada"]


async def test_a_schedule_sends_through_the_middleware_of_its_scheduler(app: App) -> None:
    from celery5 import every
    from celery5.processes.scheduler import SCHEDULER

    app.add_middleware(Tenants())
    seen: list[str] = []

    @app.task(schedule=every(0.2))
    async def tick() -> None:
        seen.append(TENANT.get())

    async with trio.open_nursery() as nursery:
        await start(nursery, app)
        TENANT.set("of the scheduler")
        await start(nursery, app, page=SCHEDULER)
        await until(lambda: bool(seen))
        await app.schedule.atrigger(tick.name)
        nursery.cancel_scope.cancel()
    assert seen[0] == "of the scheduler"


async def test_policies_and_bad_arguments_are_inside_of_the_block(
    app: App, redis_client: "redis.Redis"
) -> None:
    notes = Notes()
    app.add_middleware(notes)

    @app.task(retry_policy=RetryPolicy(max_retries=0))
    async def work(n: int) -> None: ...

    message = f'{{"v":1,"id":"j-1","task":"{work.name}","args":["x"]}}'
    redis_client.xadd(app.queue("default").stream, {"job": message})
    async with working(app):
        await until(lambda: bool(notes.outcomes))
    [(_, outcome)] = notes.outcomes
    assert isinstance(outcome, Dead)
    assert outcome.reason is Reason.BAD_ARGUMENTS
    [error] = notes.exceptions
    assert isinstance(error, TaskFailed)
    assert (error.job_id, error.type, error.message) == ("j-1", "BadArguments", outcome.error.message)
