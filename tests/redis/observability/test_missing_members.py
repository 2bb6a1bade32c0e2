"""Missing members: what the Controller says of them, and that no Scheduler works, is said by every surface."""

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
import redis
import trio

from celery5 import App
from celery5.broker.calls import cluster as calls
from celery5.observability import member_missing
from celery5.protocol.observability import alerting
from celery5.protocol.process.missing import (
    REPORT_TTL,
    GroupReport,
    MembersReport,
    MissingMember,
    format_retry,
)
from celery5.scheduling import every
from tests.redis.observability.alerted import QUICK, declare, get_changes, get_statuses
from tests.redis.observability.surfaces import ROOT, TARGET, Surfaces
from tests.redis.observability.surfaces_app import SETTINGS
from tests.redis.observability.surfaces_app import declare as declare_tasks
from tests.redis.worker.workers import until_async, working
from tests.story.cli.commands import Ended, celery5

NAME = "scheduler-default-1"
CONTROLLER = "web1:4711"
WHY = "it has died 10 times within 300 s: ended with 1: ModuleNotFoundError: No module named 'prices'"
REMEDY = format_retry(NAME)
LINE = f"{NAME} is given up, and has been down for "
SCHEDULER = GroupReport(kind="scheduler", name="default", declared=1, missing=1)
WORKERS = GroupReport(kind="worker", name="mail", declared=2)


@pytest.fixture
def shop(url: str, app_name: str) -> Iterator[App]:
    """An application."""
    with closing(declare_tasks(App(app_name, broker=url, **SETTINGS))) as app:
        yield app


async def report(app: App, *groups: GroupReport) -> None:
    """Have the Controller report these groups; the Scheduler is given up where one of its group is missing."""
    at = (await app.metrics.aoverview()).at
    gone = MissingMember(
        kind="scheduler", name=NAME, group="default", condition="given up", since=at - 300, why=WHY, remedy=REMEDY
    )  # fmt: skip
    missing = (gone,) if any(group.missing for group in groups) else ()
    redis = await app.connections.get_async_driver()
    await redis.perform(calls.renew_presence(app.keys, "controller", CONTROLLER, lease=60))
    await redis.perform(calls.store_members_report(app.keys, MembersReport(groups=groups, missing=missing)))


async def run(app: App, *words: str) -> Ended:
    """A command, whatever its exit code."""
    environment = {"CELERY5_BROKER": app.settings.broker, "HISTORY_APP": app.name, "COLUMNS": "250"}
    return await trio.to_thread.run_sync(
        lambda: celery5("-A", TARGET, *words, cwd=ROOT, env=environment), abandon_on_cancel=True
    )


async def read_health(app: App) -> tuple[int, str]:
    """The exit code of `celery5 health`, and what it says."""
    ended = await run(app, "health")
    return ended.code, ended.out


async def test_member_that_was_given_up_is_said_on_every_surface(shop: App) -> None:
    await report(shop, SCHEDULER, WORKERS)
    surfaces = Surfaces(shop)
    called = f"celery5 -A {TARGET} controller restart {NAME}"
    for words in (("info",), ("top", "--once"), ("health",), ("doctor",)):
        ended = await run(shop, *words)
        assert LINE in ended.out, words
        assert "No module named 'prices'" in ended.out, words
        assert called in ended.out, words
        assert ended.code == (1 if words[0] in ("health", "doctor") else 0), words
    for found in (
        (await surfaces.run_json("info"))["missing"],
        (await surfaces.run_json("top"))["missing"],
        (await surfaces.ask("info:show"))["missing"],
        (await surfaces.ask("top:show"))["missing"],
    ):
        assert [(row["name"], row["condition"], row["why"], row["remedy"]) for row in found] == [
            (NAME, "given up", WHY, REMEDY)
        ]
    page = await surfaces.look("")
    assert f"Needs a person Member {NAME} is given up , since " in page, "before all else"
    assert f"5 min ago : {WHY} . To do: {REMEDY}" in page
    (finding,) = (row for row in await surfaces.ask("doctor:run") if row["check"] == "members")
    assert (finding["state"], finding["remedy"]) == ("fail", REMEDY)


async def test_doctor_names_the_controllers_command_where_one_runs(shop: App) -> None:
    await shop.tasks["mail"].adelay()
    assert await _read_remedy(shop) == "celery5 worker start"
    async with working(shop, queues=["crm"]):
        assert (await _read_remedy(shop)).startswith("celery5 worker start --queues nobody;")
        await report(shop, WORKERS)
        assert (await _read_remedy(shop)).startswith(
            'add [workers.NAME] with queues = ["nobody"] to the cluster description if it has none, then: '
            "celery5 controller reload;"
        )

    async def is_gone() -> bool:
        return not (await shop.ainfo()).workers

    await until_async(is_gone)
    status = "celery5 controller status shows what the Controller does about its workers"
    assert await _read_remedy(shop) == status


async def _read_remedy(app: App) -> str:
    """What the doctor says is to be done about the workers."""
    (finding,) = (row for row in await Surfaces(app).ask("doctor:run") if row["check"] == "workers")
    return str(finding["remedy"])


async def test_schedules_without_any_scheduler_are_said_with_the_right_command(shop: App) -> None:
    await shop.schedule.aadd(shop.tasks["push"].s(), every(3600), name="nightly")
    state = await shop.ainfo()
    assert [(member.name, member.why, member.remedy) for member in state.missing] == [
        ("", "1 schedule does not fire", "celery5 scheduler start, with the code that declares them")
    ]
    code, said = await read_health(shop)
    assert (code, "no Scheduler works: 1 schedule does not fire" in said) == (1, True)
    assert "No Scheduler works : 1 schedule does not fire" in await Surfaces(shop).look("")
    await report(shop, WORKERS)
    (member,) = (await shop.ainfo()).missing
    assert member.remedy.startswith("add [schedulers.NAME] to the cluster description")
    assert "add [schedulers.NAME]" in await Surfaces(shop).look("schedules")
    await report(shop, SCHEDULER)
    (member,) = (await shop.ainfo()).missing
    assert (member.name, member.effect) == (NAME, "1 schedule does not fire")
    await shop.schedule.apause("nightly")
    (member,) = (await shop.ainfo()).missing
    assert member.effect == ""


async def test_health_is_well_again_when_the_member_works(shop: App) -> None:
    async with working(shop, queues=["crm"]):
        await report(shop, SCHEDULER)
        code, said = await read_health(shop)
        assert (code, LINE in said) == (1, True)
        await report(shop, GroupReport(kind="scheduler", name="default", declared=1))
        code, said = await read_health(shop)
        assert (code, NAME in said) == (0, False), said


async def test_alert_of_a_missing_member_ends_when_it_works_again(shop: App) -> None:
    shop.configure(**QUICK)
    declare(shop, member_missing())
    await report(shop, SCHEDULER, WORKERS)
    async with working(shop, queues=["crm"]):

        async def fires() -> bool:
            return await get_changes(shop) == [("fired", "group scheduler-default")]

        await until_async(fires)
        assert await get_statuses(shop) == {("tested", "group scheduler-default"): "firing"}
        (state,) = [state for state in await shop.alerts.alist() if state.fires]
        assert state.description.startswith(LINE)
        assert REMEDY in state.description
        page = await Surfaces(shop).look("")
        assert page.count(LINE.split()[0]) == 2, "the alert is a badge on the line of the member"
        assert "alert: tested" in page

        async def ends() -> bool:
            await report(shop, GroupReport(kind="scheduler", name="default", declared=1))
            return await get_statuses(shop) == {}

        await until_async(ends)


async def test_report_that_outlives_its_controller_counts_nowhere(
    shop: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alerting, "KEPT_UNMEASURED", 0.2)
    shop.configure(**QUICK)
    declare(shop, member_missing())
    await report(shop, SCHEDULER)
    assert (await shop.ainfo()).cluster is not None
    async with working(shop, queues=["crm"]):

        async def fires() -> bool:
            return bool(await get_statuses(shop))

        async def ends() -> bool:
            return await get_statuses(shop) == {}

        await until_async(fires)
        await shop.aperform(calls.end_presence(shop.keys, "controller", CONTROLLER))
        assert (await shop.ainfo()).cluster is None
        await until_async(ends)
        assert await shop.aperform(calls.read_members_report(shop.keys)) is not None


async def test_report_of_a_controller_that_is_gone_expires(shop: App, redis_client: "redis.Redis") -> None:
    await report(shop, SCHEDULER)
    assert 0 < redis_client.pttl(shop.keys.members_report) <= REPORT_TTL * 1000
    redis_client.set(shop.keys.members_report, b"{no report", ex=5)
    assert (await shop.ainfo()).missing == ()
    found: Any = (await shop.metrics.aoverview()).missing
    assert found == ()
