"""Jobs are found while they live and after they have ended: by every filter, page by page, each of them once."""

import time
from typing import Any, cast

import pytest
import redis
import trio

from celery5 import App
from celery5.broker.call import Call
from celery5.broker.calls import jobs as job_calls
from celery5.broker.calls import queues as queue_calls
from celery5.broker.servers.embedded import EmbeddedServer
from celery5.errors import Misconfigured, UnknownQueue
from celery5.observability import job_search, job_sources
from celery5.observability.job_search import JobPage
from celery5.protocol.job.history import JobRecord
from tests.redis.worker.workers import until_async, working

FAST: dict[str, Any] = {"metrics_interval": 0.1}


def declare(app: App) -> None:
    """Tasks that succeed, fail and are slow."""

    @app.task(name="shop.pay", queue="till", redact=["card"])
    async def pay(order: dict[str, Any], card: str = "", token: str = "") -> None: ...

    @app.task(name="shop.fail", queue="till", max_retries=1, backoff=0.0)
    async def fail(number: int) -> None:
        raise ValueError(f"no number {number}")

    @app.task(name="shop.sleep", queue="till")
    async def sleep(seconds: float) -> None:
        await trio.sleep(seconds)


async def find(app: App, **filters: Any) -> list[JobRecord]:
    """All pages of a search."""
    found: list[JobRecord] = []
    cursor: str | None = None
    for _ in range(1000):
        page: JobPage = await app.jobs.asearch(cursor=cursor, **filters)
        found += page.jobs
        if (cursor := page.cursor) is None:
            return found
    raise AssertionError("the search has no end")


async def until_found(app: App, count: int, **filters: Any) -> list[JobRecord]:
    """Wait until a search finds so many jobs: one that moves while the pages are read may be found twice."""
    found: list[JobRecord] = []

    async def is_found() -> bool:
        found[:] = await find(app, **filters)
        return len(found) == count

    await until_async(is_found)
    return found


async def test_each_failed_attempt_is_found_by_each_filter(app: App) -> None:
    app.configure(**FAST)
    declare(app)
    begun = time.time()
    sent = await app.asend_many([app.tasks["shop.fail"].s(number) for number in range(5)])
    async with working(app, name="one"):
        failed = await until_found(app, 10, task="shop.fail")
    assert sorted((job.id, job.attempt, job.state) for job in failed) == sorted(
        (job.id, attempt, state) for job in sent for attempt, state in ((1, "RETRY"), (2, "DEAD"))
    )
    assert {len(await find(app, id=job.id)) for job in sent} == {2}
    assert len(await find(app, task="shop.f*", queue="till")) == 10
    assert await find(app, task="shop.pay") == []
    assert len(await find(app, state="dead")) == len(await find(app, state="RETRY")) == 5
    assert len(await find(app, error="ValueError")) == len(await find(app, error="no number")) == 10
    assert [job.error for job in await find(app, error="no number 3", state="DEAD")] == [
        "ValueError: no number 3"
    ]
    assert len(await find(app, worker="one*")) == 10
    assert await find(app, worker="two") == []
    assert {job.id for job in await find(app, argument={"number": 2})} == {sent[2].id}
    assert {job.id for job in await find(app, argument="number=2")} == {sent[2].id}
    assert len(await find(app, since=begun, until=time.time())) == 10
    assert await find(app, since=time.time() + 1) == await find(app, until=begun - 1) == []


async def test_live_jobs_of_each_state_are_found_each_once(app: App) -> None:
    app.configure(**FAST)
    declare(app)
    pay, sleep = app.tasks["shop.pay"], app.tasks["shop.sleep"]
    scheduled = await pay.options(countdown=60).adelay({"id": 1})
    async with working(app, name="one"):
        running = await sleep.adelay(60)

        async def is_running() -> bool:
            return [job.id for job in await find(app, state="EXECUTING")] == [running.id]

        await until_async(is_running)
        (job,) = await find(app, state="EXECUTING")
        assert (job.worker[:4], job.task, job.arguments) == ("one:", "shop.sleep", {"seconds": 60})
        dead = await app.tasks["shop.fail"].options(max_retries=0).adelay(7)
        await until_found(app, 1, state="DEAD")
        retried = await app.tasks["shop.fail"].options(backoff=1000, jitter=False).adelay(8)
        await until_found(app, 2, state="RETRY")  # the attempt that has ended, and the job that waits
        await running.arevoke()
        await until_found(app, 1, state="REVOKED")
    waiting = [await pay.options(priority="high").adelay({"id": 2}), await pay.adelay({"id": 3})]
    found = await until_found(app, 7)
    assert sorted((job.id, job.state) for job in found) == sorted(
        [
            (scheduled.id, "SCHEDULED"),
            (running.id, "REVOKED"),
            (dead.id, "DEAD"),
            (retried.id, "RETRY"),
            (retried.id, "RETRY"),
            *((result.id, "SENT") for result in waiting),
        ]
    )
    by_page: list[JobRecord] = []
    cursor: str | None = None
    for _ in range(8):
        page = await app.jobs.asearch(limit=1, cursor=cursor)
        by_page += page.jobs
        if (cursor := page.cursor) is None:
            break
    assert sorted(by_page, key=str) == sorted(found, key=str)
    assert cursor is None


async def test_the_slowest_successes_are_kept_and_of_the_others_samples(app: App) -> None:
    app.configure(metrics_interval=300)
    declare(app)
    async with working(app, name="one"):
        seconds = [0.001] * 40 + [0.3, 0.2]
        for job in await app.asend_many([app.tasks["shop.sleep"].s(number) for number in seconds]):
            await job.aget(timeout=30)
    found = await find(app, state="SUCCESS")
    assert [job.arguments["seconds"] for job in found if job.kept == "slow"] == [0.3, 0.2]
    assert [job.kept for job in found].count("sample") == 1
    assert all(job.ran is not None and job.ran >= job.arguments["seconds"] for job in found)
    page = await app.jobs.asearch(state="SUCCESS")
    assert page.not_looked_at == "successes that were neither among the slowest nor sampled"


async def test_jobs_that_ran_long_are_found_and_sorted_by_how_long(app: App) -> None:
    app.configure(**FAST)
    declare(app)
    sleep = app.tasks["shop.sleep"]
    async with working(app, name="one"):
        for job in await app.asend_many([sleep.s(number) for number in (0.001, 0.3, 0.2)]):
            await job.aget(timeout=30)
        await until_found(app, 3, task="shop.sleep")
        running = await sleep.adelay(60)
        await until_found(app, 1, state="EXECUTING", longer_than=0.4)
        waiting = await sleep.options(countdown=60).adelay(1)
        (now,) = await find(app, state="EXECUTING")
        assert (now.id, now.ran is not None and 0.4 <= now.ran < 60) == (running.id, True)
        assert [job.id for job in await find(app, id=running.id, longer_than=0.4)] == [running.id]
        assert await find(app, id=waiting.id, longer_than=0.001) == []
        slow = await app.jobs.asearch(longer_than=0.25)
        assert [job.arguments["seconds"] for job in slow.jobs] == [60, 0.3]
        longest = await app.jobs.asearch(sort="ran", limit=3)
        assert [job.arguments["seconds"] for job in longest.jobs] == [60, 0.3, 0.2]
        assert longest.cursor is None
        await running.arevoke()


async def test_a_search_for_the_longest_jobs_is_bounded_and_goes_on(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    app.configure(**FAST)
    declare(app)
    async with working(app, name="one"):
        await app.asend_many([app.tasks["shop.fail"].options(max_retries=0).s(number) for number in range(9)])
        await until_found(app, 9, state="DEAD")
    monkeypatch.setattr(job_search, "MAX_LOOKED_AT", 4)
    first = await app.jobs.asearch(state="DEAD", sort="ran", limit=2)
    assert (len(first.jobs), first.looked_at) == (2, 4)
    assert first.cursor is not None
    with pytest.raises(Misconfigured, match="another search"):
        await app.jobs.asearch(state="DEAD", limit=2, cursor=first.cursor)
    pages = [first]
    while (cursor := pages[-1].cursor) is not None:
        pages.append(await app.jobs.asearch(state="DEAD", sort="ran", limit=2, cursor=cursor))
        assert pages[-1].looked_at <= 4
    assert all(
        [job.ran for job in page.jobs] == sorted((job.ran or 0 for job in page.jobs), reverse=True)
        for page in pages
    )


async def test_search_finds_arguments_by_path_but_no_redacted_ones(
    app: App, redis_client: "redis.Redis"
) -> None:
    app.configure(**FAST)
    declare(app)
    order = {"id": 7, "lines": [{"sku": "a" * 100}], "password": "hidden"}
    sent = await app.tasks["shop.pay"].adelay(order, card="4111-1111", token="t0p")
    for _ in range(2):  # while it waits, and after it has ended
        assert [job.id for job in await find(app, argument="order.id=7")] == [sent.id]
        assert [job.id for job in await find(app, argument={"order.lines.0.sku": "a" * 100})] == [sent.id]
        assert await find(app, argument={"order.lines.0.sku": "a" * 99 + "b"}, state="SENT") == []
        for hidden in ("card=4111-1111", "token=t0p", "order.password=hidden", "order.id=8", "order.id.x=7"):
            assert await find(app, argument=hidden) == []
        (job,) = await find(app)
        assert job.arguments["card"] == job.arguments["token"] == job.arguments["order"]["password"] == "***"
        async with working(app, name="one"):
            await until_found(app, 1, state="SUCCESS")
    stored = str(redis_client.xrange(app.keys.other_jobs))
    assert "4111" not in stored
    assert "t0p" not in stored
    assert "hidden" not in stored


async def test_a_job_of_a_workflow_is_found_with_its_run(app: App) -> None:
    app.configure(**FAST)

    @app.task(name="shop.double", queue="till")
    async def double(number: int) -> int:
        return 2 * number

    async with working(app, name="one"):
        run = await (double.s(2) | double.s()).astart()
        assert await run.aget(timeout=30) == 8
        found = await until_found(app, 2, task="shop.double")
    assert {job.run for job in found} == {run.id}
    assert [job.arguments["number"] for job in found if job.id.endswith("~0")] == [2]


async def test_redacted_parameters_are_shown_nowhere_and_a_replay_has_them(app: App) -> None:
    seen: list[str] = []

    @app.task(name="shop.book", queue="till", max_retries=0, redact=["card"])
    async def book(order: int, card: str) -> None:
        seen.append(card)
        raise ValueError("no")

    sent = [await book.adelay(7, "4111"), await book.adelay(7, card="4111")]
    for result in sent:
        details = await app.afind(result.id)
        assert details is not None
        assert "4111" not in str(details)
        assert "***" in str((details.args, details.kwargs))
    async with working(app):
        await until_found(app, 2, state="DEAD")
        async for job in app.dlq.aread():
            assert (job.args, job.kwargs) in (([7, "***"], {}), ([7], {"card": "***"}))
        await app.dlq.areplay()

        async def have_run_again() -> bool:
            return len(seen) == 4

        await until_async(have_run_again)
    assert seen == ["4111"] * 4


@pytest.mark.parametrize(
    "filters",
    [
        {"state": "GONE"}, {"since": -1}, {"until": "yesterday"}, {"limit": 0}, {"limit": 1001}, {"cursor": "x"},
        {"argument": "order"}, {"argument": 7}, {"id": 7}, {"longer_than": -1}, {"longer_than": "5s"}, {"sort": "task"},
    ],
)  # fmt: skip
def test_filters_that_make_no_sense_are_refused_in_one_line(app: App, filters: dict[str, Any]) -> None:
    with pytest.raises(Misconfigured) as error:
        app.jobs.search(**filters)
    assert "\n" not in str(error.value)


def test_a_queue_that_nobody_knows_is_refused(app: App) -> None:
    with pytest.raises(UnknownQueue):
        app.jobs.search(queue="nobody")


async def test_a_deep_queue_is_read_in_bounded_pages_to_a_depth_that_is_named(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_search, "MAX_LOOKED_AT", 70)
    monkeypatch.setattr(job_sources, "DEPTH", 150)
    monkeypatch.setattr(job_sources, "PAGE", 20)
    declare(app)
    pay = app.tasks["shop.pay"]
    sent = await app.asend_many([pay.s({"id": number}) for number in range(400)])
    await app.asend_many([pay.options(countdown=900 + number % 3).s({"id": number}) for number in range(400)])
    pages: list[JobPage] = []
    cursor: str | None = None
    for _ in range(20):
        pages.append(await app.jobs.asearch(queue="till", limit=1000, cursor=cursor))
        if (cursor := pages[-1].cursor) is None:
            break
    assert cursor is None
    assert all(page.looked_at <= 70 for page in pages)
    found = [job for page in pages for job in page.jobs]
    assert len({job.id for job in found}) == len(found)
    assert 2 * 150 <= len(found) < 2 * (150 + 70)
    newest_first = [job.id for job in found if job.state == "SENT"]
    assert newest_first == [job.id for job in sent[::-1]][: len(newest_first)]
    left = 400 - len(newest_first)
    assert f"{left} waiting jobs beyond the first 150 of queue till" in pages[-1].not_looked_at
    assert any("jobs that wait for their time beyond the first 150" in page.not_looked_at for page in pages)


async def test_a_job_that_waits_at_a_limit_is_found_with_the_limit(app: App) -> None:
    end = trio.Event()

    @app.task(name="shop.narrow", queue="till", limit=1)
    async def narrow(number: int) -> None:
        await end.wait()

    async with working(app, name="one"):
        sent = [await narrow.adelay(number) for number in range(4)]
        held = await until_found(app, 3, state="HELD")
        assert {job.limit for job in held} == {"shop.narrow"}
        assert {job.id for job in held} < {result.id for result in sent}
        (running,) = await find(app, state="EXECUTING")
        assert {running.id, *(job.id for job in held)} == {result.id for result in sent}
        assert [job.state for job in await find(app, id=held[0].id)] == ["HELD"]
        end.set()
        for job in sent:
            await job.aget(timeout=30)


async def test_a_search_of_many_queues_reads_only_places_that_have_jobs(own_server: EmbeddedServer) -> None:
    app = App("many", broker=own_server.url)
    declare(app)
    pay = app.tasks["shop.pay"]
    await app.asend_many([pay.options(queue=f"queue-{number}").s({}) for number in range(30)])
    with redis.Redis.from_url(own_server.url) as client:
        client.config_resetstat()
        assert len(await find(app)) == 30
        assert await find(app, state="EXECUTING") == await find(app, state="DEAD") == []
        stats = cast("dict[str, dict[str, int]]", client.info("commandstats"))
    counts = {name.removeprefix("cmdstat_"): stat["calls"] for name, stat in stats.items()}
    # The places of each stage are counted at once, and the only ones that are read are those with jobs that wait.
    assert counts["evalsha"] >= 3 * 30
    assert counts["xpending"] == 30
    app.close()


async def test_a_job_that_is_revoked_while_it_waits_is_found_and_so_is_its_story(app: App) -> None:
    declare(app)
    pay = app.tasks["shop.pay"]
    waiting = await pay.adelay({"id": 7}, card="4111")
    scheduled = await pay.options(countdown=600).adelay({"id": 8})
    elsewhere = await pay.options(queue="elsewhere").adelay({"id": 9})
    for job in (waiting, scheduled, elsewhere):
        assert await job.arevoke()
        assert await job.arevoke()  # the same again, and not kept twice
    found = await find(app, state="REVOKED")
    assert sorted(job.id for job in found) == sorted([waiting.id, scheduled.id, elsewhere.id])
    assert all(job.task == "shop.pay" and job.ended >= job.sent > 0 and not job.arguments for job in found)
    assert [job.id for job in await find(app, id=elsewhere.id)] == [elsewhere.id]
    assert await find(app, state="REVOKED", worker="*:*") == []
    told = await app.jobs.astory(waiting.id)
    await waiting.aforget()
    for story in (told, await app.jobs.astory(waiting.id)):
        assert story is not None
        assert [(attempt.state, attempt.task) for attempt in story.attempts] == [("REVOKED", "shop.pay")]


async def test_the_last_jobs_of_a_queue_that_were_revoked_are_kept_for_their_time(
    app: App, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_calls, "REVOKED_KEPT", 150)
    declare(app)
    pay, keys = app.tasks["shop.pay"], app.queue("till")
    jobs = await app.asend_many([pay.s({"id": number}) for number in range(1000)])
    assert await app.aempty("till") == 1000
    assert redis_client.zcard(keys.revoked_jobs) == redis_client.hlen(keys.revoked_documents) == 150
    assert redis_client.pttl(keys.revoked_jobs) > 0 < redis_client.pttl(keys.revoked_documents)
    first = await app.jobs.asearch(state="REVOKED", queue="till", limit=70)
    second = await app.jobs.asearch(state="REVOKED", queue="till", limit=1000, cursor=first.cursor)
    found = [job.id for page in (first, second) for job in page.jobs]
    assert len(set(found)) == len(found) == 150
    assert set(found) <= {job.id for job in jobs}
    assert "jobs of queue till that may have been revoked before the last 150" in second.not_looked_at
    oldest = cast("list[bytes]", redis_client.zrange(keys.revoked_jobs, 0, 19))
    redis_client.zadd(keys.revoked_jobs, dict.fromkeys(oldest, 1.0))  # revoked more than 90 days ago
    assert await (await pay.adelay({})).arevoke()
    assert redis_client.zcard(keys.revoked_jobs) == redis_client.hlen(keys.revoked_documents) == 131


async def test_a_job_that_becomes_due_during_a_search_is_found(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    declare(app)
    pay = app.tasks["shop.pay"]
    late = await pay.options(queue="a", countdown=600).adelay({})
    await pay.options(queue="b", countdown=600).adelay({})
    driver = await app.connections.get_async_driver()
    read, keys = job_sources.DueJobSource.read, app.queue("a")

    async def read_late(source: job_sources.DueJobSource) -> Any:
        if source.queue == "b":
            await driver.perform(queue_calls.register_queue(app.keys, "a"))
            redis_words = ("ZADD", keys.due, 1, late.id)
            await driver.perform(Call(redis_words, int))
            await driver.perform(job_calls.promote_due_jobs(keys, limit=10))
        found = await read(source)
        return () if source.queue == "a" else found  # it was not seen there

    monkeypatch.setattr(job_sources.DueJobSource, "read", read_late)
    assert late.id in [job.id for job in await find(app)]


async def test_a_job_that_expires_while_it_waits_at_a_limit_is_found(app: App) -> None:
    app.configure(metrics_interval=0.1)
    end = trio.Event()

    @app.task(name="narrow", queue="narrow", limit=1)
    async def narrow(number: int) -> None:
        await end.wait()

    async with working(app, queues=("narrow",)):
        await narrow.adelay(1)
        late = await narrow.options(expires=0.5).adelay(2)
        (found,) = await until_found(app, 1, state="EXPIRED")
        end.set()
    assert (found.id, found.task, found.arguments) == (late.id, "narrow", {"number": 2})


async def test_a_success_of_which_the_history_has_nothing_is_found_by_its_id(app: App) -> None:
    app.configure(job_history=0)
    declare(app)
    paid = await app.tasks["shop.pay"].adelay({"id": 7})
    async with working(app, queues=("till",)):
        await paid.aget(timeout=30)
    assert [(job.id, job.state) for job in await find(app, id=paid.id)] == [(paid.id, "SUCCESS")]
    assert await find(app, id=paid.id, state="DEAD") == []
    assert await find(app, id="nobody") == []


async def test_replayed_dead_job_is_marked_and_its_story_ends_in_success(app: App) -> None:
    app.configure(**FAST)
    is_mended = False

    @app.task(name="mend", queue="till", max_retries=0)
    async def mend() -> None:
        if not is_mended:
            raise ValueError("not yet")

    job = await mend.adelay()
    async with working(app, queues=("till",)):
        assert (await until_found(app, 1, state="DEAD"))[0].has_left is False
        is_mended = True
        assert (await app.dlq.areplay()).done == 1
        await job.aget(timeout=30)

        async def is_told() -> bool:
            return [record.has_left for record in await find(app, state="DEAD")] == [True]

        await until_async(is_told)
    story = await app.jobs.astory(job.id)
    assert story is not None
    assert [(attempt.replays, attempt.state) for attempt in story.attempts] == [(0, "DEAD"), (1, "SUCCESS")]
