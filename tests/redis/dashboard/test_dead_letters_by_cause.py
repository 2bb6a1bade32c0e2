"""Dead letters in the dashboard: what died from one cause is seen, counted and replayed; many by a bulk action."""

import re

import pytest

from celery5 import App
from celery5.protocol.bulk import BulkStatus
from tests.redis.dashboard.client import find_links, looking_at, summarize_actions
from tests.redis.worker.workers import until_async, working


def declare(app: App) -> None:
    """A task that dies from two causes."""

    @app.task(name="shop.pay", queue="till", max_retries=0)
    async def pay(order: int) -> None:
        if order % 2:
            raise ConnectionError(f"bank {order} is closed")
        raise ValueError(f"order {order} is <empty>")


async def dead_letter_jobs(app: App, count: int) -> list[str]:
    """Have so many jobs die; their ids."""
    declare(app)
    jobs = await app.asend_many([app.tasks["shop.pay"].s(number) for number in range(count)])
    async with working(app):

        async def are_dead() -> bool:
            return (await app.ainfo()).dead == count

        await until_async(are_dead)
    return [job.id for job in jobs]


async def get_group(app: App, error: str) -> str:
    (group,) = (await app.dlq.agroups(error=error)).groups
    return group.id


async def until_ended(app: App) -> BulkStatus:
    """The last bulk action, when it has ended."""

    async def has_ended() -> bool:
        return (await app.bulk.alist())[0].has_ended

    await until_async(has_ended)
    return (await app.bulk.alist())[0]


async def test_three_clicks_replay_what_died_from_one_cause(app: App) -> None:
    await dead_letter_jobs(app, 6)
    async with looking_at(app, role="operator") as client:
        page = await client.load("dead")
        text = await client.look("dead")
        assert "3 shop.pay ConnectionError: bank # is closed" in text
        assert "3 shop.pay ValueError: order # is <empty>" in text
        assert re.search(r"the newest: order \d is <empty>", text)
        group = await get_group(app, "ConnectionError")
        (link,) = [candidate for candidate in find_links(page, "do/dlq/replay") if group in candidate]
        form = await client.look(link.removeprefix(f"/{app.name}/"))
        assert "Nothing is done; this would be: 3 dead jobs sent again" in form
        assert (await app.ainfo()).dead == 6
        assert "3 dead jobs sent again" in await client.press("dlq:replay", group=group)
    assert [job.type async for job in app.dlq.aread()] == ["ValueError"] * 3
    assert summarize_actions(await app.audit.alist(action="dlq:replay"))[0] == {
        "who": "anna",
        "source": "dashboard",
        "action": "dlq:replay",
        "count": 3,
    }


async def test_a_cause_has_a_page_with_its_jobs_and_a_traceback(app: App) -> None:
    ids = await dead_letter_jobs(app, 4)
    async with looking_at(app) as client:
        group = await get_group(app, "ValueError")
        text = await client.look(f"dead/groups/{group}")
        assert "Traceback (most recent call last)" in text
        assert re.search(r"the newest: order \d is <empty>", text)
        assert ids[0] in text
        assert ids[2] in text
        assert ids[1] not in text
        form = await client.load("do/dlq/purge", group=group, ids=[ids[0]])
        assert "1 dead job deleted" in form
        await client.press("dlq:purge", group=group, ids=ids[0])
        await client.press("dlq:purge", group=group)
        assert "No job is dead from this cause any more" in await client.look(f"dead/groups/{group}")
        assert "give the id of a group" in await client.look("dead/groups/nonsense", status=400)
    assert {job.id async for job in app.dlq.aread()} == {ids[1], ids[3]}


async def test_a_replay_with_a_rate_goes_on_by_itself_and_shows_how_far_it_is(app: App) -> None:
    await dead_letter_jobs(app, 6)
    async with looking_at(app, role="operator") as client:
        assert "has begun" in await client.press("dlq:replay", error="ConnectionError", rate="100/s")
    done = await until_ended(app)
    assert (done.state, done.progress.total, done.progress.done, done.who) == ("done", 3, 3, "anna")
    assert (done.action.filter, done.action.rate) == ({"error": ["ConnectionError"]}, 100.0)
    assert (await app.ainfo()).dead == 3
    async with looking_at(app, role="viewer") as client:
        assert "3 of 3" in await client.look("bulk")
        assert (await client.ask("bulk:show", id=done.id))["state"] == "done"
        await client.ask("bulk:show", status=404, id="nobody")
    (entry,) = await app.audit.alist(action="dlq:replay")
    assert (entry.who, entry.source, entry.count) == ("anna", "dashboard", 3)


async def test_many_jobs_are_changed_by_a_bulk_action(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("celery5.operations.dead_letters.MAX_DIRECT", 2)
    await dead_letter_jobs(app, 6)
    async with looking_at(app) as client:
        assert "2 dead jobs deleted" in await client.press("dlq:purge", task="shop.*", limit="2")
        assert "give at most 2" in await client.press("dlq:purge", status=400, limit="3")
        assert "has begun" in await client.press("dlq:purge", task="shop.*")
        assert (await until_ended(app)).state == "done"
        assert "0 dead jobs deleted" in await client.press("dlq:purge")


async def test_a_bulk_action_is_stopped_and_the_others_stay_dead(app: App) -> None:
    await dead_letter_jobs(app, 40)
    async with looking_at(app, role="operator") as client:
        await client.press("dlq:replay", rate="10/s")
        (running,) = await app.bulk.alist()
        assert "Under way" in await client.look("dead")
        await client.press("bulk:stop", id=running.id)
        stopped = await until_ended(app)
        assert (stopped.state, stopped.stopped_by) == ("stopped", "anna")
        assert stopped.progress.done < 40
        assert (await app.ainfo()).dead == 40 - stopped.progress.done
        assert "had ended before" in await client.press("bulk:stop", id=running.id)
    (entry,) = await app.audit.alist(action="dlq:replay")
    assert entry.outcome.startswith("interrupted")


async def test_a_wrong_rate_is_refused_before_anything_begins(app: App) -> None:
    await dead_letter_jobs(app, 2)
    async with looking_at(app) as client:
        assert "rate" in await client.press("dlq:replay", status=400, rate="soon")
    assert await app.bulk.alist() == []
    assert (await app.ainfo()).dead == 2


@pytest.mark.parametrize(
    ("role", "operation"),
    [("viewer", "dlq:replay"), ("viewer", "bulk:stop"), ("viewer", "task:revoke"), ("operator", "dlq:purge")],
)
async def test_lower_roles_are_refused(app: App, role: str, operation: str) -> None:
    async with looking_at(app, role=role) as client:
        assert f"{operation} is for" in await client.press(operation, status=403, id="x", ids="x")
