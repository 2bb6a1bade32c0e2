"""Erasing: an application that was made for a moment leaves nothing in Redis."""

from collections.abc import Iterator
from dataclasses import fields

import redis

from celery5 import App, group
from celery5.broker.calls.health import erase_app
from celery5.broker.keys import EVENTS, Keys, QueueKeys
from celery5.protocol.limits import AdmissionRule
from celery5.workflows import Flow
from tests.redis.limits.limited_jobs import TASK, Gated
from tests.redis.worker.one_queue import Queue
from tests.redis.worker.workers import leftovers

CHANNELS = {"wake", "revoke", "slots_freed", "schedule_changes"}
STAY = {"settings", "pattern"}
"""They are whose who set them; and what is no key."""


def lasting(keys: Keys, queue: QueueKeys) -> Iterator[str]:
    """Every key of a queue and its application that is made without more words."""
    for field in fields(QueueKeys):
        value = getattr(queue, field.name)
        is_key = (
            isinstance(value, str) and value.startswith("celery5:") and not field.name.endswith("_prefix")
        )
        if is_key and field.name not in CHANNELS:
            yield value
    yield from (
        queue.documents_for("s"),
        queue.claimed_documents("s"),
        queue.document_progress("s"),
        queue.result("a"),
    )
    yield from (
        keys.schedules(queue.queue),
        keys.schedule_times(queue.queue),
        keys.live_processes("scheduler"),
    )
    for name, value in vars(Keys).items():
        if (
            isinstance(value, property)
            and name not in CHANNELS | STAY
            and isinstance(getattr(keys, name), str)
        ):
            yield getattr(keys, name)


def test_every_key_of_an_application_goes(queue: Queue, app: App, redis_client: "redis.Redis") -> None:
    for key in (*lasting(app.keys, queue.keys), app.queue(EVENTS).stream, app.queue(EVENTS).dead):
        if key not in (queue.keys.jobs, queue.keys.foreign_jobs, queue.keys.code_versions):
            redis_client.set(key, "something")
    redis_client.hset(queue.keys.jobs, "a", "D")
    redis_client.hset(queue.keys.foreign_jobs, "task", "1")
    redis_client.zadd(queue.keys.code_versions, {"version": 1})
    for call in erase_app(app.keys, [queue.keys], ["a"], ["s"]):
        queue(call)
    assert leftovers(redis_client, app) == {}


def test_waiting_rooms_go_whatever_their_lines_are_called(
    queue: Queue, app: App, redis_client: "redis.Redis"
) -> None:
    gate = Gated(queue.driver, queue.keys, queue.client)
    gate.rule = AdmissionRule(TASK, max_running=1, keyed=True, fair=True)
    gate.join("w")
    for n, (token, fair) in enumerate([("", ""), ("ann b", ""), ("ann b", "100% [x]"), ("a\nb", "c")]):
        gate.come("w", *f"{n}a {n}b {n}c".split(), token=token, fair=fair)
    assert len(gate.room()) == 8
    redis_client.sadd(f"{queue.keys.waiting_list_prefix}unlimited", TASK)
    for call in erase_app(app.keys, [queue.keys]):
        queue(call)
    assert leftovers(redis_client, app) == {}


def test_runs_of_workflows_go_with_their_maps(queue: Queue, app: App, redis_client: "redis.Redis") -> None:
    @app.task(name="one", queue="mail")
    async def one(number: int) -> int:
        return number

    @app.workflow
    def later(flow: Flow) -> list[int]:
        flow.wait_for("go")
        return flow.map(one, [1, 2, 3])

    waits = later.start()
    assert redis_client.hexists(queue.keys.idle_runs, waits.id)
    assert redis_client.exists(queue.keys.run_items(waits.id, 1))
    run = one.map(range(300)).start()
    long = group(one.s(number) for number in range(100)).start()
    assert redis_client.exists(queue.keys.run_arguments(long.id))
    ended = one.map(range(3)).start()
    ended.cancel()
    assert redis_client.exists(queue.keys.run_items(run.id, 0))
    for call in erase_app(app.keys, [queue.keys]):
        queue(call)
    left = [key for key in leftovers(redis_client, app) if ":workflow:" not in key and ":result:" not in key]
    assert left == []
