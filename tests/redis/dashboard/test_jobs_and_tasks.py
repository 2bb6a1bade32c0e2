"""Jobs and tasks in the dashboard: whoever is paged finds what fails, since when and why, and what one job did."""

import re
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

import pytest
import redis
import trio

from celery5 import App, AsyncResult, Event
from celery5.dashboard.pages.jobs import has_all_arguments, tell_story
from celery5.processes.router import ROUTER
from celery5.protocol.job.job import derive_job_id
from celery5.protocol.job.messages import Failure
from celery5.protocol.job.states import JobState
from celery5.protocol.job.story import JobDetails
from tests.redis.dashboard.client import find_links, looking_at
from tests.redis.dashboard.site import browsing, press
from tests.redis.worker.workers import start, until_async, working

FAST: dict[str, Any] = {"metrics_interval": 0.1}


def declare(app: App) -> None:
    """Tasks that succeed, fail and are slow."""
    app.configure(**FAST)

    @app.task(name="shop.pay", queue="till", redact=["card"])
    async def pay(order: int, card: str = "") -> int:
        return order

    @app.task(name="shop.fail", queue="till", max_retries=1, backoff=0.0)
    async def fail(order: int) -> None:
        raise ConnectionError(f"no <bank> for order {order}")

    @app.task(name="shop.sleep", queue="till")
    async def sleep(seconds: float) -> None:
        await trio.sleep(seconds)


async def until_dead(app: App, count: int) -> None:
    """Wait until this many jobs are dead, and in the history."""

    async def are_dead() -> bool:
        page = await app.jobs.asearch(state="DEAD")
        return (await app.ainfo()).dead == count == len(page.jobs)

    await until_async(are_dead)


async def until_failing(app: App) -> None:
    async def is_failing() -> bool:
        return any(task.failing_since for task in (await app.metrics.aoverview()).tasks)

    await until_async(is_failing)


async def test_three_clicks_show_which_task_fails_since_when_and_why(app: App) -> None:
    declare(app)
    await app.asend_many([app.tasks["shop.fail"].s(number) for number in range(3)])
    async with working(app):
        await until_dead(app, 3)
        await until_failing(app)
    async with looking_at(app, role="viewer") as client:
        tasks = await client.load("tasks")
        text = await client.look("tasks")
        assert "since " in text
        assert "ConnectionError: no <bank> for order" in text
        (link,) = list(find_links(tasks, "/tasks/shop.fail"))
        task = await client.load(link.removeprefix(f"/{app.name}/"))
        text = await client.look("tasks/shop.fail")
        assert "It fails since" in text
        assert "100 % of its attempts" in text
        assert "3 ConnectionError: no <bank> for order #" in text
        assert find_links(task, "/dead/groups/")
        assert find_links(task, "/jobs/")
        assert "/do/" not in task  # a viewer has no buttons


async def test_a_job_tells_its_story(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    declare(app)
    job = await app.tasks["shop.fail"].adelay(7)
    async with working(app, name="one"):
        await until_dead(app, 1)
    async with looking_at(app) as client:
        found = await client.load("jobs", id=job.id)
        (link,) = set(find_links(found, f"/jobs/{job.id}"))
        assert link.endswith("?queue=till")
        monkeypatch.setenv("CELERY5_JOURNAL_SOCKET", "/nowhere")
        monkeypatch.delenv("JOURNAL_STREAM", raising=False)
        assert "journalctl" not in await client.look(f"jobs/{job.id}", queue="till")
        monkeypatch.setenv("CELERY5_JOURNAL_SOCKET", __file__)
        text = await client.look(f"jobs/{job.id}", queue="till")
    for words in (
        "sent to queue till",
        "attempt 1 began on one:",
        "attempt 2 failed for good after",
        "ConnectionError: no <bank> for order 7",
        "Traceback (most recent call last)",
        f"journalctl CELERY5_JOB={job.id}",
    ):
        assert words in text, words
    assert re.search(
        r"attempt 1 failed after [\d.]+ \w+, to be tried again in [\d.]+ \w+: ConnectionError", text
    ), text
    assert text.index("attempt 1 began") < text.index("attempt 1 failed") < text.index("attempt 2 began")


async def test_a_job_names_its_event_while_it_lives_and_when_its_result_has_expired(
    app: App, redis_client: "redis.Redis"
) -> None:
    app.configure(**FAST)

    @app.event(name="shop.Paid")
    class Paid(Event):
        order: int

    @Paid.subscribe
    @app.task(name="shop.thank", queue="till")
    async def thank(order: int) -> None:
        await is_shown.wait()

    is_shown = trio.Event()
    async with working(app), trio.open_nursery() as nursery:
        routing = await start(nursery, app, page=ROUTER)
        event = await Paid.adelay(order=7)
        job_id = derive_job_id(event.id, app.name, "shop.thank")

        async def is_known() -> bool:
            details = await app.afind(job_id)
            return details is not None and details.event == f"shop.Paid {event.id}"

        await until_async(is_known)
        is_shown.set()

        async def is_kept() -> bool:
            return bool((await app.jobs.asearch(id=job_id, state="SUCCESS")).jobs)

        await until_async(is_kept)
        await routing.stop()
    redis_client.delete(app.queue("till").result(job_id))
    async with looking_at(app) as client:
        page = await client.load(f"jobs/{job_id}", queue="till")
        assert list(find_links(page, "/events/shop.Paid"))
        assert event.id in await client.look(f"jobs/{job_id}", queue="till")


async def test_jobs_are_found_by_what_is_known_of_them_and_page_by_page(app: App) -> None:
    declare(app)
    jobs = await app.asend_many([app.tasks["shop.fail"].s(number) for number in range(5)])
    paid = await app.tasks["shop.pay"].adelay(1, card="1234 5678")
    async with working(app, name="one"):
        await until_dead(app, 5)
        await paid.aget()
    async with looking_at(app, role="viewer") as client:
        (found,) = (await client.ask("task:search", argument="order=3", state="DEAD"))["jobs"]
        assert found["id"] == jobs[3].id
        text = await client.look("jobs", argument="order=3", error="ConnectionError", worker="one*", since=60)
        assert jobs[3].id in text
        assert jobs[2].id not in text
        assert "5678" not in await client.look("jobs")
        first = await client.ask("task:search", task="shop.*", since=60, at=4e9, limit=2)
        assert first["jobs"] == []  # that is far from now
        first = await client.ask("task:search", task="shop.f*", limit=2)
        rest = await client.ask("task:search", task="shop.f*", limit=100, cursor=first["cursor"])
        assert len(first["jobs"]) == 2
        assert len(rest["jobs"]) == 8
        wrong = await client.look("jobs", state="BURNT"), await client.look("jobs", queue="tlil")
        assert "no state 'BURNT'" in wrong[0]
        assert "no queue 'tlil' here" in wrong[1]
        assert all("Search Clear" in page for page in wrong)  # the form is there, to be corrected


async def test_slow_jobs_are_found_by_the_page_and_the_api_alike(app: App) -> None:
    app.configure(metrics_interval=0.1)

    @app.task(name="shop.wait", queue="till")
    async def wait(seconds: float) -> None:
        await trio.sleep(seconds)

    async with working(app):
        jobs: list[AsyncResult[None]] = []
        for seconds in (0.8, 0.5, 0.001):  # the fastest is the newest
            jobs.append(await wait.adelay(seconds))
            await jobs[-1].aget(timeout=30)
        slower, slow, fast = jobs

        async def are_found() -> bool:
            return len((await app.jobs.asearch(task="shop.wait", state="SUCCESS")).jobs) == 3

        await until_async(are_found)
    async with looking_at(app) as client:
        asked: dict[str, Any] = {"longer_than": 0.4, "sort": "ran"}
        found = (await client.ask("task:search", **asked))["jobs"]
        page = await client.load("jobs", **asked)
    assert [job["id"] for job in found] == [slower.id, slow.id]
    assert 0 < page.index(slower.id) < page.index(slow.id)
    assert fast.id not in page


async def test_the_next_page_of_a_search_by_time_goes_on_with_it(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("celery5.dashboard.pages.jobs.ROWS", 2)
    declare(app)
    jobs = await app.asend_many([app.tasks["shop.pay"].s(number) for number in range(5)])
    seen: set[str] = set()
    async with looking_at(app) as client:
        address = "jobs?since=3600"
        for _ in range(10):
            page = await client.load(address)
            seen |= {job.id for job in jobs if job.id in page}
            links = find_links(page, "cursor=")
            if not links:
                break
            address = links[0].removeprefix(f"/{app.name}/")
    assert seen == {job.id for job in jobs}


async def test_chosen_jobs_are_counted_and_then_revoked(app: App) -> None:
    declare(app)
    jobs = await app.asend_many([app.tasks["shop.pay"].s(number) for number in range(3)])
    chosen = [jobs[0].id, jobs[2].id]
    async with looking_at(app, role="operator") as client:
        form = await client.load("do/task/revoke", ids=chosen)
        assert "Nothing is done; this would be: 2 of 2 jobs revoked" in form
        assert "\n".join(chosen) in form
        assert "2 jobs revoked" in await client.press("task:revoke", ids="\n".join(chosen))
    assert [await job.astatus() for job in jobs] == ["REVOKED", "SENT", "REVOKED"]
    entry = (await app.audit.alist(action="task:revoke"))[0]
    assert (entry.who, entry.source, entry.count) == ("anna", "dashboard", 2)


@pytest.mark.parametrize(
    "job_id", ["a?b=c", "a#b", "a%2Fb", "a b", "a\x9b\u202e<b>&\"'", "../../sign-in", "ä/b?c"]
)
async def test_a_button_leads_back_to_the_job_whatever_its_id_is(app: App, job_id: str) -> None:
    declare(app)
    await app.tasks["shop.pay"].options(id="a").adelay(1)
    await app.tasks["shop.pay"].options(id=job_id).adelay(7)
    async with browsing(app, role="operator") as client:
        page = await client.get(f"/{app.name}/jobs/{quote(job_id, safe='')}?queue=till")
        (link,) = {link for link in find_links(page.text, "do/task/revoke") if "back=" in link}
        back = parse_qs(urlsplit(link).query)["back"][0]
        done = await press(client, app, "task:revoke", {"ids": job_id, "queue": "till", "back": back})
    assert done.url.path == f"/{app.name}/jobs/{job_id}"
    assert done.url.query == b"queue=till"
    assert await app.result("a").astatus() is not JobState.REVOKED


@pytest.mark.parametrize(
    "job_id", ["../../sign-out", "a/../../../b", "./a", "..\\..\\b", "//evil.example/x", "a?b#c"]
)
async def test_a_link_to_a_job_leads_to_it_whatever_its_id_is(app: App, job_id: str) -> None:
    declare(app)
    await app.tasks["shop.pay"].options(id=job_id).adelay(7)
    async with browsing(app) as client:
        (link,) = set(find_links((await client.get(f"/{app.name}/jobs")).text, "queue=till"))
        page = await client.get(link)
    assert page.url.path == f"/{app.name}/jobs/{job_id}"
    assert page.status_code == 200


async def test_a_job_is_sent_once_more_unless_some_of_its_arguments_are_hidden(app: App) -> None:
    declare(app)
    plain = await app.tasks["shop.pay"].adelay(7)
    async with looking_at(app, role="operator") as client:
        (link,) = find_links(await client.load(f"jobs/{plain.id}"), "do/task/send")
        form = await client.load(link.removeprefix(f"/{app.name}/"))
        assert "shop.pay" in form
        text = await client.press("task:send", task="shop.pay", args="[7]", queue="till")
        assert "is sent" in text
        assert "args is no JSON" in await client.press("task:send", status=400, task="shop.pay", args="7,")
    assert (await app.ainfo()).queues["till"].waiting == 2
    (entry,) = await app.audit.alist()
    assert (entry.action, entry.source, entry.target) == ("task:send", "dashboard", "shop.pay")
    assert set(entry.filter) == {"job", "queue"}
    hidden = JobDetails("8", "till", JobState.SENT, task="shop.pay", args=[8], kwargs={"card": "***"})
    assert not has_all_arguments(hidden)


async def test_a_job_that_nobody_knows_says_so(app: App) -> None:
    async with looking_at(app) as client:
        assert "nothing is known of job 'nobody'" in await client.look("jobs/nobody", status=404)
        assert "belongs to run night-1" in await client.look("jobs/night-1~2", status=404)
        assert "No jobs were found" in await client.look("jobs", id="nobody")


async def test_a_running_job_shows_where_it_is_and_can_be_revoked(app: App) -> None:
    declare(app)
    job = await app.tasks["shop.sleep"].adelay(600)
    async with working(app, name="one"), looking_at(app, role="operator") as client:

        async def is_running() -> bool:
            return await job.astatus() == "EXECUTING"

        await until_async(is_running)
        assert "attempt 1 runs on one:" in await client.look(f"jobs/{job.id}")
        await client.press("task:revoke", ids=job.id, queue="till")
        text = await client.look(f"jobs/{job.id}")
        assert "evoked" in text


def test_a_story_without_a_history_is_told_from_what_the_job_itself_has() -> None:
    failure = Failure("ValueError", "no", traceback="Traceback", attempt=1, worker="one", at=5.0)
    details = JobDetails("7", "till", JobState.DEAD, attempt=1, sent=1.0, started=4.0, finished=5.0,
                         reason="exhausted", failure=failure, failures=(failure,), worker="one")  # fmt: skip
    lines = [line.text for line in tell_story(details, 10.0)]
    assert lines == [
        "sent to queue till",
        "attempt 1 began on one",
        "attempt 1 failed on one: ValueError: no",
        "became a dead letter: exhausted",
    ]
    held = JobDetails("8", "till", JobState.HELD, sent=1.0, limit="shop.pay", jobs_ahead=3)
    assert [line.text for line in tell_story(held, 10.0)][-1] == (
        "waits at the limit of shop.pay; jobs ahead of it: 3"
    )
