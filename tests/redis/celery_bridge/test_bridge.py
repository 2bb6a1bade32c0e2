"""Bridge: what Celery's producers send becomes jobs with the same ids, each once, and nothing is lost."""

import json
import zlib
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

import msgspec
import pytest
import redis

from celery5 import App, current_job
from celery5.contrib.celery import CeleryBridge, CeleryResults
from celery5.contrib.celery.messages import CeleryMessage, MessageRules, Untranslatable, make_job
from celery5.contrib.celery.receivers import open_receiver
from celery5.errors import Misconfigured
from celery5.protocol.events.documents import SourceDocument
from celery5.protocol.events.sinks import get_all_sink_options
from celery5.protocol.job.messages import read_command
from celery5.testing import recorded
from tests.redis.events.sinking import delivering
from tests.redis.events.test_sources import sourcing
from tests.redis.worker.workers import until, until_async, working

celery: Any = pytest.importorskip("celery", reason="needs Celery: uv pip install --group celery")
Ran = list[tuple[str, Any]]


def declare(app: App) -> Ran:
    """Declare a task that notes the ids and the arguments of its jobs."""
    ran: Ran = []

    @app.task(name="shop.charge")
    async def charge(order: int, cents: Decimal = Decimal(0), when: datetime | None = None) -> int:
        job = current_job()
        assert job is not None
        ran.append((job.id, (order, cents, when)))
        return order * 2

    return ran


async def test_messages_of_celery_become_jobs_with_their_ids(app: App, old: Any) -> None:
    ran = declare(app)
    CeleryBridge(app, old)
    now = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    sent = [old.send_task("shop.charge", (number,)).id for number in range(150)]
    typed = old.send_task("shop.charge", (7,), {"cents": Decimal("1.5"), "when": now}, priority=5).id
    async with working(app), sourcing(app):
        await until(lambda: len(ran) == 151)
    assert {job for job, _ in ran} == {*sent, typed}
    assert dict(ran)[typed] == (7, Decimal("1.5"), now)


async def test_redis_keeps_nothing_of_what_was_taken(app: App, old: Any, celery_redis: "redis.Redis") -> None:
    ran = declare(app)
    CeleryBridge(app, old)
    old.send_task("shop.charge", (1,))
    async with working(app), sourcing(app):
        await until(lambda: bool(ran))
        await until(lambda: not celery_redis.exists("celery-bridge.taken", "celery"))


async def test_times_limits_and_priorities_of_a_message_are_those_of_its_job(app: App, old: Any) -> None:
    declare(app)
    bridge = CeleryBridge(app, old)
    later = datetime.now(UTC) + timedelta(hours=1)
    sent = old.send_task(
        "shop.charge", (1,), eta=later, expires=7200, time_limit=30, soft_time_limit=20, priority=2
    )
    async with sourcing(app):
        await until_async(lambda: is_known(app, sent.id))
    details = await app.afind(sent.id)
    assert details is not None
    assert details.state == "SCHEDULED"
    assert bridge.source.name == "celery-bridge"
    assert details.task == "shop.charge"


async def is_known(app: App, job: str) -> bool:
    return await app.afind(job) is not None


async def test_a_message_that_comes_again_makes_no_second_job(
    app: App, old: Any, celery_redis: "redis.Redis"
) -> None:
    ran = declare(app)
    CeleryBridge(app, old)
    old.send_task("shop.charge", (1,))
    item = celery_redis.lindex("celery", 0)
    assert isinstance(item, bytes)
    async with working(app), sourcing(app):
        await until(lambda: len(ran) == 1)
    # The Router was killed before it acknowledged: the message is still in its list. Another one comes for the end.
    celery_redis.lpush("celery-bridge.taken", item)
    last = old.send_task("shop.charge", (2,)).id
    async with working(app), sourcing(app):
        await until(lambda: ran[-1][0] == last)
        await until(lambda: not celery_redis.exists("celery-bridge.taken"))
    assert len(ran) == 2


def send_chain(old: Any) -> None:
    (old.signature("shop.charge", (1,)) | old.signature("shop.charge", (2,))).delay()


REFUSED: dict[str, tuple[Any, str]] = {
    "unknown task": (lambda old: old.send_task("shop.change", (1,)), "did you mean 'shop.charge'"),
    "arguments": (lambda old: old.send_task("shop.charge", ("x",)), "order"),
    "pickle": (lambda old: old.send_task("shop.charge", (1,), serializer="pickle"), "only JSON is read"),
    "chain": (send_chain, "it has a chain"),
    "link": (
        lambda old: old.send_task("shop.charge", (1,), link=old.signature("shop.charge", (1,))),
        "it has a link",
    ),
    "time": (lambda old: old.send_task("shop.charge", (1,), eta="soon"), "soon"),
}


@pytest.mark.parametrize("what", list(REFUSED))
async def test_an_untranslatable_message_becomes_a_dead_letter_and_later_messages_run(
    app: App, old: Any, what: str
) -> None:
    send, why = REFUSED[what]
    ran = declare(app)
    bridge = CeleryBridge(app, old)
    send(old)
    old.send_task("shop.charge", (8,))
    async with working(app), sourcing(app):
        await until(lambda: len(ran) == 1)
        await until_async(lambda: has_dead(app, 1))
    (dead,) = [dead async for dead in app.dlq.aread()]
    assert dead.task == bridge.refused.name
    assert why in str(dead.error)


async def has_dead(app: App, count: int) -> bool:
    return len([dead async for dead in app.dlq.aread()]) == count


async def test_a_refused_message_that_is_replayed_runs_with_its_own_id(app: App, old: Any) -> None:
    CeleryBridge(app, old)
    sent = old.send_task("shop.charge", (3,)).id
    async with working(app), sourcing(app):
        await until_async(lambda: has_dead(app, 1))
    ran = declare(app)
    async with working(app):
        await app.dlq.areplay()
        await until(lambda: bool(ran))
    assert ran[0][0] == sent


async def test_refused_messages_go_to_the_queue_of_celery_that_is_named_as_they_are(
    app: App, old: Any, celery_redis: "redis.Redis"
) -> None:
    declare(app)
    CeleryBridge(app, old, refused_queue="celery-old")
    send_chain(old)
    item = celery_redis.lindex("celery", 0)
    async with sourcing(app):
        await until(lambda: celery_redis.llen("celery-old") == 1)
    assert celery_redis.lindex("celery-old", 0) == item
    assert not celery_redis.exists("celery-bridge.taken")


@pytest.mark.parametrize(
    "item", [b"", b"{", b"[]", b"[" * 100_000, b'{"properties": {}, "body": 1}', b"\xff"]
)
async def test_an_item_that_is_no_message_is_kept_and_the_next_one_runs(
    app: App, old: Any, celery_redis: "redis.Redis", item: bytes
) -> None:
    ran = declare(app)
    CeleryBridge(app, old)
    celery_redis.lpush("celery", item)
    old.send_task("shop.charge", (1,))
    async with working(app), sourcing(app):
        await until(lambda: len(ran) == 1)
        await until_async(lambda: has_dead(app, 1))


async def test_a_message_too_large_for_a_dead_letter_stays_on_a_queue_of_celery(
    app: App, old: Any, celery_redis: "redis.Redis"
) -> None:
    declare(app)
    CeleryBridge(app, old)
    old.send_task("shop.charge", ("x" * 2_000_000,))
    async with sourcing(app):
        await until(lambda: celery_redis.llen("celery-bridge.refused") == 1)
    assert not celery_redis.exists("celery-bridge.taken")


async def test_callers_of_celery_get_how_jobs_end(app: App, old: Any) -> None:
    results = CeleryResults(old)

    @app.task(name="shop.half", sinks=[results], max_retries=0)
    async def half(order: int) -> float:
        return 1 / order

    CeleryBridge(app, old)
    one, failed = old.send_task("shop.half", (2,)), old.send_task("shop.half", (0,))
    expired = old.send_task("shop.half", (3,), expires=datetime.now(UTC) - timedelta(seconds=5))
    results.check()
    async with working(app), sourcing(app), delivering(app):
        await until(lambda: all(result.ready() for result in (one, failed, expired)))
    assert one.get(timeout=5) == 0.5
    with pytest.raises(ZeroDivisionError, match="division by zero"):
        failed.get(timeout=5)
    assert "ZeroDivisionError" in failed.traceback
    assert expired.state == "REVOKED"
    assert get_all_sink_options([half])[0].states == results.on


def test_messages_of_higher_priority_come_first_whatever_their_queue(old: Any) -> None:
    queues = ("celery", "mail")
    sent = [
        old.send_task("shop.charge", (1,), queue=queue, priority=priority).id
        for queue, priority in (("celery", 9), ("mail", 3), ("mail", 9), ("celery", 3))
    ]
    receiver = open_receiver(old, queues, "first")
    received = [taken.message.id for taken in receiver.receive()]
    receiver.close()
    assert received == [sent[at] for at in (3, 1, 0, 2)]


def test_no_more_is_received_than_fits_memory(old: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("celery5.contrib.celery.receivers.BATCH_BYTES", 100)
    for _ in range(30):
        old.send_task("shop.charge", (1,))
    receiver = open_receiver(old, ("celery",), "small")
    assert len(receiver.receive()) == 10, "those of one step"
    receiver.close()


async def test_other_brokers_are_read_by_kombu(app: App, app_name: str) -> None:
    ran = declare(app)
    memory = celery.Celery("memory", broker=f"memory://{app_name}", set_as_current=False)
    CeleryBridge(app, memory, refused_queue="celery-old")
    sent = [memory.send_task("shop.charge", (number,)).id for number in range(120)]
    refused = memory.send_task("shop.change", (1,), priority=5).id
    async with working(app), sourcing(app):
        await until(lambda: len(ran) == 120)
        with memory.connection_for_read() as connection:
            queue = connection.SimpleQueue("celery-old")
            message = queue.get(timeout=10)
            message.ack()
    assert [job for job, _ in ran] == sent
    assert message.headers["task"] == "shop.change"
    assert (message.properties["correlation_id"], message.properties["priority"]) == (refused, 5)
    assert json.loads(message.body)[0] == [1]


def make_message(priority: int | None = None, **headers: Any) -> CeleryMessage:
    return CeleryMessage(
        body=b"[[1], {}, {}]",
        content_type="application/json",
        headers={"task": "shop.charge", "id": "a", **headers},
        properties={} if priority is None else {"priority": priority},
    )


RULES = MessageRules(timezone(timedelta(hours=2)), is_zero_first=True, remember=60.0)


def test_a_job_has_the_times_limits_and_attempts_that_are_left_of_its_message(app: App) -> None:
    declare(app)
    message = make_message(
        eta="2099-01-02T03:04:05",  # by the clock of Celery's time zone
        expires="2099-01-02T03:04:05+00:00",
        timelimit=[30, 20],
        retries=2,
        ignore_result=True,
    )
    job = make_job(app, message, RULES)
    command = read_command(job.message)
    assert job.at == str(int(datetime(2099, 1, 2, 1, 4, 5, tzinfo=UTC).timestamp() * 1000))
    assert command.expires == datetime(2099, 1, 2, 3, 4, 5, tzinfo=UTC).timestamp()
    assert (command.time_limit, command.soft_time_limit, job.ignore_result) == (30, 20, True)
    assert command.retry is not None
    assert command.retry.max_retries == app.tasks["shop.charge"].policy.max_retries - 2


@pytest.mark.parametrize(
    ("number", "in_redis", "elsewhere"),
    [
        (None, "", ""),
        (0, "", ""),
        (1, "h", "l"),
        (3, "h", "l"),
        (4, "", ""),
        (6, "", ""),
        (7, "l", "h"),
        (99, "l", "h"),
    ],
)
def test_priorities_of_celery_are_read_as_its_broker_means_them(
    app: App, number: int | None, in_redis: str, elsewhere: str
) -> None:
    declare(app)
    message = make_message(number)
    lanes = [
        make_job(app, message, msgspec.structs.replace(RULES, is_zero_first=is_zero_first)).lane
        for is_zero_first in (True, False)
    ]
    assert lanes == [in_redis, elsewhere]


@pytest.mark.parametrize(("zero_first", "priority"), [("yes", "high"), ("", "low")])
def test_a_refused_message_keeps_the_priority_that_its_broker_meant(
    app: App, old: Any, zero_first: str, priority: str
) -> None:
    declare(app)
    bridge = CeleryBridge(app, old)
    body = msgspec.json.encode(make_message(2))
    with recorded(app) as sent:
        bridge.refused(SourceDocument(id="a", body=body, attributes={"zero_first": zero_first}))
    assert [job.priority for job in sent.jobs] == [priority]


def test_a_task_that_is_unique_by_itself_stays_so(app: App) -> None:
    declare(app)
    by_id = make_job(app, make_message(), RULES)
    assert (read_command(by_id.message).key, by_id.unique_for) == ("celery a", 60)

    @app.task(name="shop.once", unique_for=5)
    async def once(order: int) -> None: ...

    own = [make_job(app, make_message(task="shop.once", id=name), RULES) for name in "ab"]
    assert {job.unique_for for job in own} == {5}
    assert len({job.lock for job in own}) == 1, "their arguments are their key"


def test_invalid_arguments_are_refused_in_one_line_each(app: App, old: Any) -> None:
    for make in (
        lambda: CeleryBridge(app, object()),
        lambda: CeleryBridge(app, old, queues="celery"),
        lambda: CeleryBridge(app, old, queues=[]),
        lambda: CeleryBridge(app, old, refused_queue="celery"),
        lambda: CeleryResults("").check(),
    ):
        with pytest.raises(Misconfigured) as caught:
            make()
        assert "\n" not in str(caught.value)


def test_a_body_over_the_limit_is_not_decompressed() -> None:
    bomb = CeleryMessage(
        body=zlib.compress(b" " * 50_000_000),
        content_type="application/json",
        headers={"task": "shop.charge", "id": "a", "compression": "application/x-gzip"},
    )
    with pytest.raises(Untranslatable, match="over the limit"):
        make_job(App("bomb"), bomb, MessageRules(UTC, is_zero_first=True, remember=60.0))
    assert msgspec.json.decode(msgspec.json.encode(bomb), type=CeleryMessage) == bomb
