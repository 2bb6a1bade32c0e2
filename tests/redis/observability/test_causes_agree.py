"""How many jobs died of a cause, and when the first did, is exact at once on every surface."""

import re
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
import redis
import trio

from celery5 import App
from celery5.cli.top.sources import TopSources
from celery5.cli.top.tables import View
from celery5.protocol.job.failure_groups import DeadJobGroup
from tests.redis.dashboard.client import looking_at
from tests.redis.observability.seeding import Ended, seed_history
from tests.redis.observability.surfaces import Surfaces
from tests.redis.observability.surfaces_app import SETTINGS, declare
from tests.redis.worker.workers import until_async, working

FIRST, NEWER = 3, 700
"""Jobs that die first, of one cause; and then of another: more than `top` reads."""


@pytest.fixture
def broken(url: str, app_name: str) -> Iterator[App]:
    """An application whose jobs die of what their argument says."""
    with closing(declare(App(app_name, broker=url, **SETTINGS))) as app:
        yield app


async def make_dead(app: App, *, why: str, count: int, queue: str = "crm") -> None:
    """Have so many jobs die of one cause."""
    before = (await app.ainfo()).dead
    await app.asend_many(
        [
            app.tasks["break"].options(queue=queue).s(why, f"{number:x}8c9a330bcaeba4c1")
            for number in range(count)
        ]
    )
    async with working(app, queues=[queue]):

        async def are_dead() -> bool:
            return (await app.ainfo()).dead == before + count

        await until_async(are_dead)


async def read_all(app: App) -> dict[str, dict[str, tuple[int, int]]]:
    """For each surface the count of each cause and when its first job died, in whole seconds, by its pattern."""

    def pick(groups: list[DeadJobGroup]) -> dict[str, tuple[int, int]]:
        return {group.pattern: (group.count, int(group.first_died)) for group in groups}

    surfaces = Surfaces(app)
    async with looking_at(app) as client:
        asked: dict[str, Any] = {
            "JSON API": await client.ask("dlq:groups"),
            "JSON API, by task": await client.ask("dlq:groups", task="break"),
            "JSON API, a few": await client.ask("dlq:groups", limit=10),
        }
    asked["dlq groups --json"] = await surfaces.run_json("dlq", "groups")
    found: dict[str, dict[str, tuple[int, int]]] = {
        name: {
            group["pattern"]: (group["count"], int(group["first_died"]))
            for group in (reply if isinstance(reply, list) else reply["groups"])
        }
        for name, reply in asked.items()
    }
    found["app.dlq.groups"] = pick(list((await app.dlq.agroups()).groups))
    found["app.dlq.groups, a few"] = pick(list((await app.dlq.agroups(newest_first=True, limit=10)).groups))
    reading = await trio.to_thread.run_sync(lambda: TopSources(app, since=3600).read(View.DEAD, ""))
    found["top"] = pick(list(reading.dead or ()))
    return found


async def test_each_cause_has_the_same_count_and_beginning_everywhere(broken: App) -> None:
    before = int(time.time())
    await make_dead(broken, why="old", count=FIRST)
    between = int(time.time()) + 1
    await make_dead(broken, why="new", count=NEWER)
    found = await read_all(broken)
    (expected, *_) = found.values()
    assert {name for name, shown in found.items() if shown != expected} == set(), found
    assert {pattern: count for pattern, (count, _) in expected.items()} == {
        "old: request #": FIRST,
        "new: request #": NEWER,
    }
    assert before - 1 <= expected["old: request #"][1] <= between
    async with looking_at(broken) as client:
        for path in ("dead", "tasks/break"):
            text = await client.look(path)
            assert "old: request #" in text, path
            assert f"{NEWER}" in text, path


async def test_a_new_cause_is_not_said_to_last_as_long_as_its_task_fails(
    broken: App, redis_client: "redis.Redis"
) -> None:
    now = time.time()
    begin = int(now - 5400) // 60 * 60
    minutes: dict[int, Ended] = {
        at: {"break": (0, 5) if at >= begin else (20, 0)} for at in range(begin - 600, int(now) - 60, 60)
    }
    seed_history(redis_client, broken, "crm", minutes, now)
    await make_dead(broken, why="new", count=3)
    surfaces = Surfaces(broken)
    shown = next(
        candidate for candidate in (await broken.metrics.aoverview()).tasks if candidate.name == "break"
    )
    assert shown.failing_since == begin
    assert shown.last_error is not None
    assert shown.last_error.first is not None
    assert abs(shown.last_error.first - now) < 60
    texts = {
        "top --once": await surfaces.run("top", "--once"),
        "overview page": await surfaces.look(""),
        "tasks page": await surfaces.look("tasks"),
        "task page": await surfaces.look("tasks/break"),
    }
    said = {
        name: bool(re.search(r"first (just now|\d+ s ago) ?: ValueError: new", text))
        for name, text in texts.items()
    }
    assert said == dict.fromkeys(texts, True), texts
    for answer in (await surfaces.run_json("top"), await surfaces.ask("top:show")):
        (task,) = (candidate for candidate in answer["tasks"] if candidate["name"] == "break")
        assert (task["failing_since"], task["last_error"]["first"]) == (begin, shown.last_error.first)
    await broken.dlq.apurge()


async def test_a_cause_on_two_queues_began_with_the_first_of_both_everywhere(
    broken: App, redis_client: "redis.Redis"
) -> None:
    now = time.time()
    minutes: dict[int, Ended] = {int(now) // 60 * 60 - 120: {"break": (0, 5)}}
    seed_history(redis_client, broken, "crm", minutes, now)
    await make_dead(broken, why="old", count=1)
    first = (await broken.dlq.agroups()).groups[0].first_died
    await make_dead(broken, why="old", count=1, queue="web")
    (group,) = (await broken.dlq.agroups()).groups
    assert (group.count, group.first_died, group.queues) == (2, first, ("crm", "web"))
    assert await read_first(broken) == {"overview": first, "JSON API": first}
    await broken.dlq.apurge(queue="crm")
    (group,) = (await broken.dlq.agroups()).groups
    assert group.first_died > first
    assert set((await read_first(broken)).values()) == {group.first_died}
    await broken.dlq.apurge()


async def read_first(app: App) -> dict[str, float | None]:
    """For each surface when the first job died of the last error of the task."""
    shown = {task.name: task for task in (await app.metrics.aoverview()).tasks}
    error = shown["break"].last_error
    assert error is not None
    tasks = {task["name"]: task for task in (await Surfaces(app).ask("top:show"))["tasks"]}
    return {"overview": error.first, "JSON API": tasks["break"]["last_error"]["first"]}


async def test_causes_are_counted_down_as_their_jobs_leave(broken: App, redis_client: "redis.Redis") -> None:
    await make_dead(broken, why="old", count=4)
    causes = broken.queue("crm").dead_causes
    (group,) = (await broken.dlq.agroups()).groups
    await broken.dlq.apurge(ids=[group.ids[0]])
    assert [cause.count for cause in (await broken.dlq.agroups()).groups] == [3]
    await broken.dlq.areplay(ids=[group.ids[1]])
    assert [cause.count for cause in (await broken.dlq.agroups()).groups] == [2]
    assert 0 < redis_client.ttl(causes) <= 90 * 86_400
    await broken.dlq.apurge()
    assert (await broken.dlq.agroups()).groups == ()
    assert redis_client.exists(causes) == 0
    await broken.aempty("crm")


async def test_causes_are_bounded_and_further_ones_are_counted_together(
    broken: App, redis_client: "redis.Redis"
) -> None:
    causes = broken.queue("crm").dead_causes
    fields = [f"{what} {number:012x}" for number in range(1000) for what in ("count", "first", "last")]
    redis_client.hset(causes, mapping=dict.fromkeys(fields, 1))
    await make_dead(broken, why="old", count=2)
    assert redis_client.hget(causes, "count others") == b"2"
    assert redis_client.hlen(causes) == 3003
    assert [group.count for group in (await broken.dlq.agroups()).groups] == [2]
    await broken.dlq.apurge()


async def test_jobs_that_died_before_causes_were_counted_are_in_the_count(
    broken: App, redis_client: "redis.Redis"
) -> None:
    await make_dead(broken, why="old", count=3)
    redis_client.delete(broken.queue("crm").dead_causes)
    assert [group.count for group in (await broken.dlq.agroups()).groups] == [3]
    await make_dead(broken, why="old", count=1)
    assert [group.count for group in (await broken.dlq.agroups()).groups] == [4]
    await broken.dlq.apurge()
