"""`on_failure` of a job that is in no workflow: a job that is sent once when it is dead, whatever it died of."""

from hashlib import sha1
from typing import Any, cast

import pytest
import redis
import trio

from celery5 import App
from celery5.broker.calls import jobs
from celery5.errors import Misconfigured, Reject
from celery5.events.event import Event
from celery5.processes.router import ROUTER
from celery5.protocol.job.failure_call import MAX_MESSAGE, make_failure_job
from celery5.protocol.job.messages import Document, Failure, encode, read_command
from celery5.protocol.job.verdict import Reason
from celery5.workflows import StepFailure
from tests.redis.worker.one_queue import Queue
from tests.redis.worker.workers import Lines, until, working


class Notified:
    """Tasks that fail, and what the task got that is called then."""

    def __init__(self, app: App) -> None:
        self.calls: list[tuple[StepFailure, str]] = []
        self.is_broken = True

        @app.task(name="notify", queue="far")
        async def notify(failures: list[StepFailure], channel: str = "all") -> None:
            self.calls.extend((failure, channel) for failure in failures)

        @app.task(name="charge", max_retries=1, backoff=0.01, on_failure=notify)
        async def charge(number: int) -> int:
            if self.is_broken:
                raise ValueError(f"no account {number}")
            return number

        @app.task(name="sleepy", time_limit=0.05, max_retries=0)
        async def sleepy() -> None:
            await trio.sleep_forever()

        @app.task(name="picky")
        async def picky() -> None:
            raise Reject("not today")

        self.notify, self.charge, self.sleepy, self.picky = notify, charge, sleepy, picky


QUEUES = ("default", "far")


@pytest.fixture
def tasks(app: App) -> Notified:
    """The tasks of the application."""
    return Notified(app)


async def test_on_failure_is_called_once_when_a_job_is_dead(app: App, tasks: Notified) -> None:
    async with working(app, queues=QUEUES):
        result = await tasks.charge.adelay(7)
        await until(lambda: bool(tasks.calls))
        assert tasks.calls == [
            (
                StepFailure(
                    id=result.id,
                    task="charge",
                    state="DEAD",
                    type="ValueError",
                    message="no account 7",
                    reason="exhausted",
                ),
                "all",
            )
        ]
        assert await result.astatus() == "DEAD"
        await app.dlq.areplay()
        await until(lambda: len(tasks.calls) == 2)  # it has died again
        tasks.is_broken = False
        await app.dlq.areplay()
        assert await result.aget(30) == 7
    assert len(tasks.calls) == 2


async def test_a_call_may_name_its_own_on_failure_with_arguments(app: App, tasks: Notified) -> None:
    ways: list[Any] = [
        tasks.notify.partial("ops"),
        tasks.notify.options(countdown=0.01, priority="high", expires=60),
    ]
    async with working(app, queues=QUEUES):
        await tasks.charge.options(on_failure=None).adelay(1)
        await app.asend_many(
            [tasks.charge.options(on_failure=way).s(number) for number, way in enumerate(ways, 2)]
        )
        await until(lambda: len(tasks.calls) == 2)
    assert sorted((failure.message, channel) for failure, channel in tasks.calls) == [
        ("no account 2", "ops"),
        ("no account 3", "all"),
    ]


async def test_on_failure_is_called_whatever_a_job_dies_of(
    app: App, tasks: Notified, redis_client: "redis.Redis"
) -> None:
    template = tasks.charge.job(1)
    unknown = template.message.replace(b'"charge"', b'"gone"')
    wrong = template.message.replace(b'"args":[1]', b'"args":["one"]')
    keys = app.queue("default")
    async with working(app, queues=QUEUES):
        redis_client.xadd(keys.stream, {"job": unknown.replace(template.id.encode(), b"a")})
        redis_client.xadd(keys.stream, {"job": wrong.replace(template.id.encode(), b"b")})
        await tasks.sleepy.options(on_failure=tasks.notify).adelay()
        await until(lambda: len(tasks.calls) == 3)
    assert sorted((failure.reason, failure.type) for failure, _ in tasks.calls) == [
        ("bad-arguments", "BadArguments"),
        ("not-retried", "TimeLimitExceeded"),
        ("unknown-task", "UnknownTask"),
    ]


async def test_on_failure_is_called_for_a_job_that_killed_its_workers(
    app: App, tasks: Notified, queue: Queue
) -> None:
    job = tasks.charge.options(queue="mail").job(7)
    queue(jobs.publish(queue.keys, [(job.id, job.message)]))
    queue.join("killed")
    queue.read("killed")
    queue.lapse("killed")
    assert queue.recover(deliveries=0).dead_lettered == 1
    async with working(app, queues=(*QUEUES, "mail")):
        await until(lambda: bool(tasks.calls))
    ((failure, _),) = tasks.calls
    assert (failure.id, failure.reason, failure.type) == (job.id, Reason.POISONED, "WorkerDied")


async def test_on_failure_is_not_called_for_a_job_that_is_not_dead(app: App, tasks: Notified) -> None:
    revoked = await tasks.charge.options(countdown=3600).adelay(1)
    await revoked.arevoke()
    expired = await tasks.charge.options(expires=0.001, countdown=0.01).adelay(2)
    rejected = await tasks.picky.options(on_failure=tasks.notify).adelay()
    async with working(app, queues=QUEUES):
        last = await tasks.charge.adelay(3)
        await until(lambda: bool(tasks.calls))
        assert [await result.astatus() for result in (revoked, expired, rejected)] == [
            "REVOKED",
            "EXPIRED",
            "REJECTED",
        ]
    assert [failure.id for failure, _ in tasks.calls] == [last.id]


async def test_an_on_failure_job_is_sent_once_though_its_sender_died(
    app: App, tasks: Notified, redis_client: "redis.Redis"
) -> None:
    """A worker that has sent it dies before it removes the entry of the outbox: another one sends it again."""
    keys = app.queue("default")
    async with working(app, queues=QUEUES):
        await tasks.charge.adelay(7)
        await until(lambda: bool(tasks.calls))
        ((entry, letter),) = cast("list[tuple[bytes, dict[bytes, bytes]]]", redis_client.xrange(keys.dead))
        job_id = sha1(tasks.calls[0][0].id.encode() + b" " + entry, usedforsecurity=False).hexdigest()
        assert await app.result(job_id, queue="far").astatus() == "SUCCESS"
        again = {"failed": job_id, "message": letter[b"job"], "document": letter[b"document"]}
        redis_client.xadd(keys.run_outbox, cast("dict[Any, Any]", again))
        await tasks.charge.adelay(8)
        await until(lambda: len(tasks.calls) == 2 and redis_client.xlen(keys.run_outbox) == 0)
    assert [failure.message for failure, _ in tasks.calls] == ["no account 7", "no account 8"]


async def test_a_death_wakes_the_worker_that_sends_the_on_failure_job(
    app: App, tasks: Notified, redis_client: "redis.Redis"
) -> None:
    heard: list[object] = []
    with cast("Any", redis_client).pubsub(ignore_subscribe_messages=True) as pubsub:
        pubsub.subscribe(app.queue("default").wake)

        def is_woken() -> bool:
            if message := pubsub.get_message():
                heard.append(message["data"])
            return b"runs" in heard

        async with working(app, queues=QUEUES):
            await tasks.charge.adelay(7)
            await until(is_woken)


async def test_a_step_of_a_workflow_calls_on_failure_once_by_its_run(app: App, tasks: Notified) -> None:
    async with working(app, queues=QUEUES):
        run = await tasks.charge.s(1).astart()
        await until(lambda: len(tasks.calls) == 1)
        await tasks.charge.adelay(2)
        await until(lambda: len(tasks.calls) == 2)
    assert [(failure.run, failure.reason) for failure, _ in tasks.calls] == [
        (run.id, "exhausted"),
        ("", "exhausted"),
    ]


async def test_a_subscriber_of_an_event_has_its_on_failure(app: App, tasks: Notified) -> None:
    @app.event(name="paid")
    class Paid(Event):
        number: int

    Paid.subscribe(tasks.charge)
    async with working(app, queues=QUEUES), working(app, page=ROUTER):
        await Paid.adelay(number=4)
        await until(lambda: [failure.message for failure, _ in tasks.calls] == ["no account 4"])


async def test_an_unreadable_on_failure_delays_no_other_job(
    app: App, tasks: Notified, redis_client: "redis.Redis"
) -> None:
    keys = app.queue("default")
    unreadable = [b"{}", b'{"queue":"far","command":7}', b'{"queue":"far","command":{"v":1}}']
    with Lines() as lines:
        async with working(app, queues=QUEUES):
            for number, raw in enumerate(unreadable):
                message = b'{"v":1,"id":"%d","task":"gone","on_failure":%b}' % (number, raw)
                redis_client.xadd(keys.stream, {"job": message})
            await until(lambda: redis_client.xlen(keys.dead) == 3)
            await tasks.charge.adelay(5)
            await until(lambda: len(tasks.calls) == 1)
            await until(lambda: redis_client.xlen(keys.run_outbox) == 0)
    dropped = lines.of("job:on-failure-dropped")
    assert sorted(line["job"] for line in dropped) == ["0", "1", "2"]


def test_on_failure_of_a_job_is_checked_when_it_is_sent(app: App, tasks: Notified) -> None:
    @app.task(name="wants_number")
    async def wants_number(number: int) -> None: ...

    @app.task(name="returns_run", dynamic=True)
    async def returns_run(failures: list[StepFailure]) -> None: ...

    with pytest.raises(
        Misconfigured, match="on_failure=wants_number: it is called with a list\\[StepFailure\\] first"
    ):
        tasks.charge.options(on_failure=wants_number).job(1)
    refused = tasks.charge.options(on_failure=returns_run)
    for _ in range(2):
        with pytest.raises(Misconfigured, match="on_failure=returns_run: that task is dynamic"):
            refused.job(1)


def test_an_on_failure_job_has_the_options_of_its_call_from_the_failure_on(app: App, tasks: Notified) -> None:
    call = tasks.notify.options(
        countdown=30, expires=60, priority="high", key="ops", unique_for=90, time_limit=5
    )
    failed = tasks.charge.options(on_failure=call).job(1)
    message = failed.message.replace(b'"task"', b'"trace":"00-1-2-01","task"', 1)
    document = encode(Document(1, failed.id, "charge", "DEAD", failure=Failure("ValueError", "x" * 9_000)))
    job = make_failure_job("one", message, document, now=1000.0)
    assert (job.id, job.queue, job.at, job.lane, job.unique_for) == ("one", "far", "+30000", "h", 90)
    command = read_command(job.message)
    assert (command.id, command.task, command.sent, command.expires) == ("one", "notify", 1000, 1060)
    assert (command.trace, command.key, command.time_limit) == ("00-1-2-01", "ops", 5)
    ((failure,),) = tasks.notify.parameters.decode(command.args, command.kwargs)[0]
    assert failure.message == "x" * MAX_MESSAGE


def test_two_tasks_may_be_the_on_failure_of_each_other(app: App) -> None:
    @app.task(name="one")
    def one(failures: list[StepFailure]) -> None: ...

    @app.task(name="two", on_failure=one)
    def two(failures: list[StepFailure]) -> None: ...

    both = one.options(on_failure=two)
    call = read_command(both.job([]).message).on_failure
    assert call is not None
    assert b"on_failure" not in bytes(call.command)
