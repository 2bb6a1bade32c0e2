"""Application: what the workers of a nemesis run do, and where they write it down."""

import os
import time
from typing import Any

import msgspec
import trio

from celery5 import App, Event, RetryPolicy, current_job, every, group
from celery5.streams import Keep, Stream, StreamEvents
from celery5.workflows.compose import Workflow

TICK = 0.5
"""Seconds between two fire times of the schedule."""
RATE = 8
"""Jobs of the task with a rate that may begin in one second."""
BACKOFF = RetryPolicy(max_retries=5, backoff=0.05, jitter=False)


EVENT = "nemesis.Baked"
GROUP = "bill"
"""The processor."""
PARTITIONS = 4
MEMBERS = 5
"""Members of the map of a workflow."""


def note(label: str, what: str) -> None:
    """Write one line, in one piece: label, what, process, attempt, job, time (the clock that all processes share)."""
    job = current_job()
    assert job is not None
    line = f"{label} {what} {os.getpid()} {job.attempt} {job.id} {time.monotonic():.6f}\n"
    file = os.open(os.environ["HISTORY"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(file, line.encode())
    finally:
        os.close(file)


async def noted(label: str, seconds: float) -> None:
    """Sleep; write when it begins, and when it ends or is cancelled."""
    note(label, "begin")
    try:
        await trio.sleep(seconds)
    except BaseException:
        note(label, "stop")
        raise
    note(label, "end")


def built(name: str, **settings: Any) -> App:
    """The application with one task for each kind of work."""
    app = App(name, retry_policy=BACKOFF, max_deliveries=100, **settings)

    @app.task(name="plain")
    async def plain(label: str, seconds: float) -> str:
        await noted(label, seconds)
        return label

    @app.task(name="threaded")
    def threaded(label: str, seconds: float) -> str:
        note(label, "begin")
        time.sleep(seconds)
        note(label, "end")
        return label

    @app.task(name="flaky")
    async def flaky(label: str, failures: int) -> int:
        await noted(label, 0.005)
        job = current_job()
        assert job is not None
        if job.attempt <= failures:
            raise ValueError(f"attempt {job.attempt}")
        return job.attempt

    @app.task(name="dead", max_retries=1)
    async def dead(label: str) -> None:
        await noted(label, 0.005)
        raise ValueError("always")

    @app.task(name="paced", rate_limit=f"{RATE}/1s")
    async def paced(label: str) -> None:
        await noted(label, 0.005)

    limits(app)
    subscribers(app)
    processors(app)
    steps(app)
    app.schedule(app.signature("tick"), every(TICK), name="tick")
    return app


def limits(app: App) -> None:
    """Declare the tasks that have a limit."""

    @app.task(name="two", limit=2)
    async def two(label: str, seconds: float) -> None:
        await noted(label, seconds)

    @app.task(name="one", limit=1)
    async def one(label: str, seconds: float) -> None:
        await noted(label, seconds)

    @app.task(name="keyed", limit=1, concurrency_key="who")
    async def keyed(label: str, who: str, seconds: float) -> None:
        await noted(f"{label}/{who}", seconds)


def subscribers(app: App) -> None:
    """Declare an event, and what is run for each of them and at each fire time."""

    @app.event(name=EVENT)
    class Baked(Event):
        """A loaf is ready."""

        number: int

    @Baked.subscribe
    @app.task(name="smell")
    async def smell(number: int) -> None:
        await noted(f"event-{number}/smell", 0.005)

    @Baked.subscribe
    @app.task(name="taste")
    async def taste(number: int) -> None:
        await noted(f"event-{number}/taste", 0.005)

    @app.task(name="tick")
    async def tick() -> None:
        await noted("tick", 0.005)


class Payment(msgspec.Struct):
    """A record: a number of its customer."""

    customer: str
    number: int


class Total(msgspec.Struct):
    """An output: the sum of the numbers of the customer so far."""

    customer: str
    number: int
    total: int


def payments_of(app: App) -> Stream[Payment]:
    """Declare the stream that is read."""
    return app.stream("payments", Payment, by="customer", partitions=PARTITIONS, keep=Keep(records=100_000))


def totals_of(app: App) -> Stream[Total]:
    """Declare the stream that is written."""
    return app.stream("totals", Total, by="customer", partitions=PARTITIONS, keep=Keep(records=100_000))


def processors(app: App) -> None:
    """Declare a processor that keeps sums, and has an output for each record."""
    payments, totals = payments_of(app), totals_of(app)

    @app.processor(payments, into=totals, name=GROUP)
    async def bill(events: StreamEvents[Payment]) -> None:
        async for payment in events.records():
            await trio.sleep(0.001)
            total = await events.state.get(payment.customer, 0) + payment.number
            events.state.set(payment.customer, total)
            events.send(Total(payment.customer, payment.number, total))


def steps(app: App) -> None:
    """Declare the steps of workflows: two that can be undone, one of a map, and the last one, which may fail."""

    @app.task(name="give-back")
    async def give_back(label: str) -> None:
        await noted(f"{label}/undo", 0.005)

    @app.task(name="take", undo=give_back)
    async def take(label: str, seconds: float) -> str:
        await noted(label, seconds)
        return label

    @app.task(name="member")
    async def member(label: str) -> int:
        await noted(label, 0.005)
        return 1

    @app.task(name="finish", max_retries=0)
    async def finish(ones: list[int], label: str, fails: bool) -> int:
        await noted(label, 0.005)
        if fails:
            raise ValueError("as was to be")
        return sum(ones)


def workflow_of(app: App, label: str, *, fails: bool) -> Workflow[int]:
    """Return a workflow: two steps at once, then a map, then the last step."""
    take, member, finish = (app.tasks[name] for name in ("take", "member", "finish"))
    taken = group(take.s(f"{label}/first", 0.01), take.s(f"{label}/second", 0.03))
    made: Any = taken >> member.map([f"{label}/{number}" for number in range(MEMBERS)])
    workflow: Workflow[int] = made | finish.s(f"{label}/last", fails)
    return workflow


app = built(os.environ.get("HISTORY_APP", "nemesis"))
