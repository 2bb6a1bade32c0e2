"""Dead letters: read, counted, replayed and purged, in every colour, while others do the same and workers work."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import pytest
import redis
import trio

from celery5 import App, JobState, Misconfigured, TaskFailed, current_job
from celery5.broker.calls import dead_letters as dead_letter_calls
from celery5.broker.calls import jobs as jobs_calls
from celery5.dead_letters.queues import DeadLetterTally
from celery5.errors import BlockingInEventLoop, UnknownQueue
from celery5.protocol.job.dead_letters import DeadJob, DeadJobFilter, format_position
from celery5.protocol.job.messages import Command, encode
from tests.redis.dead_letters.many_dead_letters import QUEUE, add_dead_letters, numbered, sent, state
from tests.redis.worker.workers import entries, leftovers, working

# Reading


def test_dead_jobs_are_read_queue_by_queue_and_the_oldest_first(
    app: App, redis_client: "redis.Redis"
) -> None:
    assert list(app.dlq.read()) == []
    add_dead_letters(app, redis_client, *numbered(250))
    add_dead_letters(app, redis_client, "s", queue="slow")
    jobs = list(app.dlq.read())
    assert [(job.queue, job.id) for job in jobs] == [(QUEUE, job_id) for job_id in numbered(250)] + [
        ("slow", "s")
    ]
    assert jobs[0].error == "ValueError: ValueError of shop.t"
    assert abs(jobs[0].died - time.time()) < 60
    assert [job.id for job in app.dlq.read(queue="slow")] == ["s"]
    assert [job.id for job in app.dlq.read(queue=["slow", QUEUE], limit=2)] == ["s", "j0"]
    with pytest.raises(UnknownQueue, match="no queue 'slwo' here; did you mean 'slow'"):
        list(app.dlq.read(queue="slwo"))


def test_a_choice_narrows_what_is_read_and_counted(app: App, redis_client: "redis.Redis") -> None:
    add_dead_letters(app, redis_client, "a", "b")
    add_dead_letters(app, redis_client, "c", task="bank.pay", error="OSError")
    entry = add_dead_letters(app, redis_client, "d", task="bank.pay", error="OSError", reason="poisoned")[0]

    def ids(**choice: Any) -> str:
        return "".join(job.id for job in app.dlq.read(**choice))

    assert ids(task="bank.*") == ids(error="OS*") == ids(message="of bank") == "cd"
    assert ids(reason="poisoned") == ids(ids=["d"]) == ids(ids=[entry, "nobody", "9-9"]) == "d"
    assert ids(where=lambda job: job.id > "b", limit=1) == "c"
    assert ids(ids=["d", "a"], task="shop.t") == "a"
    assert app.dlq.count() == {"exhausted": 3, "poisoned": 1}
    assert app.dlq.count(by="task", reason="exhausted") == {"shop.t": 2, "bank.pay": 1}
    assert app.dlq.count(by="cause", error="OSError") == {
        "bank.pay exhausted OSError": 1,
        "bank.pay poisoned OSError": 1,
    }


def test_an_age_goes_by_the_time_of_death_on_the_clock_of_redis(
    app: App, redis_client: "redis.Redis"
) -> None:
    now: Any = redis_client.time()
    for job_id, age in (("old", 7200), ("middle", 3600), ("new", 60)):
        add_dead_letters(app, redis_client, job_id, at=f"{(now[0] - age) * 1000}-0")

    def ids(**choice: Any) -> list[str]:
        return [job.id for job in app.dlq.read(**choice)]

    assert ids(older_than=5000) == ["old"]
    assert ids(newer_than=timedelta(seconds=5000)) == ["middle", "new"]
    assert ids(older_than=100, newer_than=5000) == ["middle"]
    assert ids(older_than=timedelta(days=999_999)) == ids(newer_than=0) == []
    assert ids(older_than=0) == ["old", "middle", "new"]
    assert ids(ids=["old", "new"], newer_than=100) == ["new"]


def test_damaged_dead_letter_is_read_and_purged_but_not_replayed(
    app: App, redis_client: "redis.Redis"
) -> None:
    keys = app.queue(QUEUE)
    add_dead_letters(app, redis_client, "good")
    for job in (b"", b"\xff\xfe", b"[" * 100_000, b'{"v":9}', b'{"id":"odd"}'):
        redis_client.xadd(keys.dead, {b"job": job, b"document": b"\xff"})
    redis_client.xadd(keys.dead, {b"nonsense": b"\x00"})
    (odd,) = [job.entry for job in app.dlq.read() if job.raw == b'{"id":"odd"}']
    redis_client.hset(keys.jobs, "odd", f"X{odd}")
    assert app.dlq.count() == {"corrupt": 6, "exhausted": 1}
    tally = app.dlq.replay()
    assert (tally.matched, tally.done, tally.left) == (7, 1, {"corrupt": 6})
    assert app.dlq.replay(dry_run=True).left == {"corrupt": 6}
    assert app.dlq.purge().done == 6
    assert list(app.dlq.read()) == []
    assert redis_client.hkeys(keys.jobs) == [b"good"]  # no place is left of what only Lua could read


# Replaying


async def test_replayed_job_does_not_show_its_old_failure(app: App) -> None:
    gates: list[trio.Event] = []
    attempts: list[int] = []

    @app.task(name="flaky", max_retries=1, backoff=0.01)
    async def flaky() -> str:
        job = current_job()
        assert job is not None
        attempts.append(job.attempt)
        if not gates:
            raise ValueError("not yet")
        await gates[0].wait()
        return "done"

    async with working(app):
        one = await flaky.adelay()
        with pytest.raises(TaskFailed):
            await one.aget()
        # While it fails it dies again, once, and is not replayed again by the same call.
        assert (await app.dlq.areplay()).done == 1
        with pytest.raises(TaskFailed):
            await one.aget()
        gates.append(trio.Event())
        (dead,) = [job async for job in app.dlq.aread()]
        assert (dead.id, dead.replays, dead.attempt) == (one.id, 1, 2)
        tally = await app.dlq.areplay(ids=one.id)
        assert (tally.matched, tally.done, tally.left) == (1, 1, {})
        assert tally.causes == {"flaky exhausted ValueError": 1}
        assert await one.astatus() in (JobState.SENT, JobState.EXECUTING)
        with trio.move_on_after(0.1):
            await one.aget(timeout=None)  # neither a result nor its old failure
            pytest.fail("it shows an old failure")
        gates[0].set()
        assert await one.aget() == "done"
        assert attempts == [1, 2, 1, 2, 1]
        assert await app.dlq.acount() == {}


def test_a_replayed_job_keeps_what_it_was_and_loses_what_it_suffered(
    app: App, redis_client: "redis.Redis"
) -> None:
    add_dead_letters(app, redis_client, "a", reason="poisoned", expires=1.0, sections={"bank": 3}, trace="t")
    assert app.dlq.replay().done == 1
    (fields,) = entries(redis_client, app.queue(QUEUE).stream)
    assert json.loads(fields[b"job"]) == {"v": 1, "id": "a", "task": "shop.t", "trace": "t", "replays": 1}
    assert list(fields) == [b"job"]  # no deliveries of the old life
    assert not redis_client.exists(app.queue(QUEUE).result("a"))
    assert state(app, "a") is JobState.SENT


def test_a_key_is_taken_again_unless_another_live_job_has_it(app: App, redis_client: "redis.Redis") -> None:
    keys = app.queue(QUEUE)
    add_dead_letters(app, redis_client, "a", "b", "c", key="order-7")
    add_dead_letters(app, redis_client, "d", key="order-8")
    message = encode(Command(v=1, id="alive", task="shop.t", key="order-8"))
    app.perform(jobs_calls.publish_unique(keys, [("alive", message, "", "shop.t order-8", None)]))
    tally = app.dlq.replay()
    assert (tally.matched, tally.done, tally.left) == (4, 1, {"key-taken": 3})
    assert redis_client.hget(keys.unique, "shop.t order-7") == b"a"
    assert redis_client.hget(keys.unique, "shop.t order-8") == b"alive"
    assert [state(app, job_id) for job_id in "abcd"] == [JobState.SENT, *[JobState.DEAD] * 3]
    assert redis_client.exists(keys.result("b"))
    assert app.result("alive", queue=QUEUE).revoke()
    assert app.dlq.replay(ids="d").done == 1


@pytest.mark.plants
def test_a_job_whose_id_is_alive_again_stays_dead(app: App, redis_client: "redis.Redis") -> None:
    add_dead_letters(app, redis_client, "a", "b")
    for job_id, place in (("a", "S9-9"), ("b", "R")):
        redis_client.hset(app.queue(QUEUE).jobs, job_id, place)
    assert app.dlq.replay().left == {"alive": 2}
    assert app.dlq.purge().done == 2
    assert redis_client.hmget(app.queue(QUEUE).jobs, "a", "b") == [
        b"S9-9",
        b"R",
    ]  # the living keep their place


def test_what_is_done_twice_is_done_once(app: App, redis_client: "redis.Redis") -> None:
    add_dead_letters(app, redis_client, "a", "b")
    jobs = list(app.dlq.read())
    words = [(job.entry, job.id, job.raw, "") for job in jobs]
    keys = app.queue(QUEUE)
    assert app.perform(dead_letter_calls.replay_jobs(keys, words[:1])) == [1]
    assert app.perform(dead_letter_calls.replay_jobs(keys, words)) == [0, 1]
    assert not redis_client.exists(keys.dead)  # nothing empty is left
    assert app.perform(dead_letter_calls.purge_jobs(keys, [(job.entry, job.id) for job in jobs])) == [
        0,
        0,
    ]
    assert sent(redis_client, app) == ["a", "b"]
    assert state(app, "a") is state(app, "b") is JobState.SENT
    redis_client.delete(keys.jobs, keys.stream)  # as if both had ended: once more is not again
    assert app.perform(dead_letter_calls.replay_jobs(keys, words)) == [0, 0]
    assert not redis_client.exists(keys.stream)


def test_a_dry_run_changes_nothing(app: App, redis_client: "redis.Redis") -> None:
    add_dead_letters(app, redis_client, *numbered(3))
    before = redis_client.xrange(app.queue(QUEUE).dead)
    assert app.dlq.replay(dry_run=True, limit=2) == DeadLetterTally(matched=2)
    assert app.dlq.purge(dry_run=True) == DeadLetterTally(matched=3)
    assert redis_client.xrange(app.queue(QUEUE).dead) == before
    assert sent(redis_client, app) == []


def test_a_rate_is_kept_and_progress_is_told(app: App, redis_client: "redis.Redis") -> None:
    add_dead_letters(app, redis_client, *numbered(12))
    told: list[int] = []
    began = time.monotonic()
    tally = app.dlq.replay(rate=40, progress=lambda so_far: told.append(so_far.done))
    assert time.monotonic() - began >= 0.2  # the first four go at once, eight more at 40 a second
    assert tally.done == 12
    assert told == [4, 8, 10, 12]  # batches of ten, then of the rest
    for rate in (0, -1, float("nan"), float("inf"), True):
        with pytest.raises(Misconfigured, match="give a number per second"):
            app.dlq.replay(rate=rate)


# Purging


def test_purged_jobs_are_gone_for_good(app: App, redis_client: "redis.Redis") -> None:
    add_dead_letters(app, redis_client, *numbered(205))
    add_dead_letters(app, redis_client, "z", task="bank.pay")
    tally = app.dlq.purge(task="shop.*")
    assert (tally.matched, tally.done, tally.causes) == (205, 205, {"shop.t exhausted ValueError": 205})
    assert [job.id for job in app.dlq.read()] == ["z"]
    assert redis_client.hkeys(app.queue(QUEUE).jobs) == [b"z"]
    assert state(app, "j0") is JobState.DEAD  # its document tells so until it expires
    redis_client.delete(app.queue(QUEUE).result("j0"))
    assert state(app, "j0") is JobState.UNKNOWN
    app.dlq.purge()
    assert [key for key in leftovers(redis_client, app) if not redis_client.ttl(key) > 0] == [app.keys.queues]


# In every colour


async def told_in_a_loop(app: App) -> None:
    """The same story for both loops."""
    assert [job.id async for job in app.dlq.aread(limit=2)] == ["j0", "j1"]
    async for _job in app.dlq.aread():  # leaving early leaves nothing open
        break
    assert await app.dlq.acount("task") == {"shop.t": 9}
    assert (await app.dlq.areplay(limit=4, rate=1000)).done == 4
    assert (await app.dlq.apurge(ids=["j5"])).done == 1
    assert await app.dlq.acount() == {"exhausted": 4}
    refused: list[Callable[[], object]] = [app.dlq.read, app.dlq.count, app.dlq.replay, app.dlq.purge]
    for call in refused:
        with pytest.raises(BlockingInEventLoop, match=rf"await app\.dlq\.a{call.__name__}"):
            call()
    with pytest.raises(UnknownQueue):
        await app.dlq.areplay(queue="nowhere")


@pytest.mark.parametrize("loop", [asyncio.run, trio.run], ids=["asyncio", "trio"])
def test_both_loops_have_the_same(loop: Callable[..., Awaitable[None]], app: App, redis_client: Any) -> None:
    add_dead_letters(app, redis_client, *numbered(9))
    if loop is asyncio.run:
        asyncio.run(told_in_a_loop(app))
    else:
        trio.run(told_in_a_loop, app)
    assert sent(redis_client, app) == numbered(4)


@pytest.mark.parametrize("newest_first", [False, True])
def test_pages_of_any_size_are_the_whole_list_in_its_order(
    app: App, redis_client: "redis.Redis", newest_first: bool
) -> None:
    for queue in ("mail", "cpu", "slow"):  # entries of the same id in all queues, and some more
        for ms in range(1, 13):
            add_dead_letters(app, redis_client, f"{queue}-{ms}", queue=queue, at=f"{1763713000000 + ms}-0")
    add_dead_letters(app, redis_client, "late", queue="cpu", at="1763713000999-7")
    whole = list(app.dlq.read(newest_first=newest_first))
    assert len({job.id for job in whole}) == 37
    order = (lambda job: (-job.died, job.queue)) if newest_first else (lambda job: (job.queue, job.died))
    assert whole == sorted(whole, key=order)
    for size in (1, 5, 36, 37, 100):
        paged: list[DeadJob] = []
        while page := list(
            app.dlq.read(
                newest_first=newest_first, limit=size, after=format_position(paged[-1]) if paged else None
            )
        ):
            assert len(page) <= size
            paged += page
        assert paged == whole
    mail = list(app.dlq.read(queue="mail", newest_first=newest_first))
    rest = list(app.dlq.read(queue="mail", newest_first=newest_first, after=mail[3].entry))
    assert rest == mail[4:]


async def test_the_newest_can_be_chosen_by_age_and_filter_too(app: App, redis_client: "redis.Redis") -> None:
    def plant() -> None:
        for number in range(30):
            add_dead_letters(app, redis_client, f"old-{number}", at=f"1763713000000-{number}")
        add_dead_letters(app, redis_client, *(f"new-{number}" for number in range(30)), queue="mail")

    await trio.to_thread.run_sync(plant)
    jobs = [job.id async for job in app.dlq.aread(newest_first=True, newer_than=60, limit=3)]
    assert jobs == ["new-29", "new-28", "new-27"]
    jobs = [job.id async for job in app.dlq.aread(newest_first=True, older_than=3600, limit=2)]
    assert jobs == ["old-29", "old-28"]
    only = app.dlq.aread(newest_first=True, where=lambda job: job.id.endswith("-0"))
    assert [job.id async for job in only] == ["new-0", "old-0"]


@pytest.mark.parametrize(
    ("choice", "says"),
    [
        ({"after": "soon"}, "after is 'soon': give the entry of a dead job, or queue:entry"),
        ({"after": "1763713000000-0"}, "there are several queues: give the one that 1763713000000-0 is in"),
        ({"after": "mail:1763713000000-0", "ids": ["a"]}, "after is for the next page"),
    ],
)
def test_a_place_that_makes_no_sense_is_refused(
    app: App, redis_client: "redis.Redis", choice: DeadJobFilter, says: str
) -> None:
    for queue in ("mail", "cpu"):
        add_dead_letters(app, redis_client, "a", queue=queue)
    with pytest.raises(Misconfigured, match=says):
        list(app.dlq.read(**choice))
    with pytest.raises(UnknownQueue, match="no queue 'mial' here; did you mean 'mail'"):
        list(app.dlq.read(after="mial:1763713000000-0"))
