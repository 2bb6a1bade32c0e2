"""Health checks: what a worker's tasks and services report, and what all workers of an application share."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import trio

from celery5 import App, Misconfigured, service
from celery5.broker.servers.embedded import EmbeddedServer
from celery5.doctor.examination import get_checks, run_checks
from celery5.health import BreakerPolicy, HealthCheck
from celery5.processes import worker
from celery5.services.health import health_checks
from tests.redis.worker.workers import Lines, until, until_async, working


@pytest.fixture
def app(url: str, app_name: str) -> Iterator[App]:
    """An application whose workers keep their lease, and with it what they know, on a machine that stands still."""
    one = App(app_name, broker=url, lease=30)
    yield one
    one.close()


@pytest.fixture
def other(url: str, app_name: str) -> Iterator[App]:
    """The same application, as another process has it: its checks are objects of their own."""
    one = App(app_name, broker=url, lease=30)
    yield one
    one.close()


async def is_held(job: Any) -> bool:
    return bool((await job.astatus()) == "HELD")


def needing(app: App, check: HealthCheck, name: str = "needs") -> Any:
    """A task that needs what the check looks at."""

    async def needs() -> str:
        return "done"

    return app.task(name=name, checks=[check], breaker=BreakerPolicy(threshold=None, reset=1.0))(needs)


@pytest.mark.parametrize("kind", ["trio", "asyncio", "thread"])
async def test_what_a_task_finds_out_it_reports_and_others_are_held(app: App, kind: str) -> None:
    check = HealthCheck("bank", allowed={"unhealthy": 0})
    needs = needing(app, check)

    async def ask() -> None:
        if kind == "asyncio":
            await asyncio.sleep(0)
        check.report("unhealthy", "no answer")

    def ask_in_a_thread() -> None:
        check.report("unhealthy", "no answer")

    where: Any = {"loop": "asyncio"} if kind == "asyncio" else {}
    asking: Any = app.task(name="ask", **where)(ask_in_a_thread if kind == "thread" else ask)
    with Lines() as lines:
        async with working(app):
            assert await (await needs.adelay()).aget(timeout=30) == "done"
            await (await asking.adelay()).aget(timeout=30)
            await until(lambda: check.state == "unhealthy")
            held = await needs.adelay()
            await until_async(lambda: is_held(held))
            assert await held.aget(timeout=30) == "done"
    (tripped,) = lines.of("breaker:tripped")
    assert tripped["why"] == "health check bank is unhealthy: no answer"
    # The worker has checks of its own, too, which find a machine unhealthy that stands still.
    assert [line["state"] for line in lines.of("health:changed") if line["check"] == "bank"] == ["unhealthy"]


async def test_a_service_watches_and_reports(url: str, app_name: str) -> None:
    check = HealthCheck("room", allowed={"degraded": 1}, window=60)

    async def watch_room() -> None:
        for _ in range(2):
            check.report("degraded", "it gets tight")
        await trio.sleep_forever()

    app = App(app_name, broker=url, services=[watch_room])
    needs = needing(app, check)
    async with working(app):
        held = await needs.adelay()
        await until_async(lambda: is_held(held))
        assert await held.aget(timeout=30) == "done"
    app.close()


async def test_a_check_that_looks_by_itself_holds_jobs_and_its_recovery_frees_them(app: App) -> None:
    well = False

    @app.health_check(period=0.05, allowed={"unhealthy": 0})
    async def bank() -> bool:
        return well

    needs = app.task(checks=[bank])(_nothing)  # and nothing said: its checks hold it, for 30 s
    needing(app, bank)
    with Lines() as lines:
        async with working(app):
            await until(lambda: len(lines.of("breaker:tripped")) >= 2)
            long, short = await needs.adelay(), await app.tasks["needs"].adelay()
            await until_async(lambda: is_held(long))
            well = True
            assert await short.aget(timeout=30) == "done"
            assert await is_held(long)
            await long.arevoke()


async def test_a_check_that_failed_is_an_error_and_jobs_go_on(app: App) -> None:
    looks: list[str] = []

    @app.health_check(period=0.02, timeout=30, allowed={"unhealthy": 0})  # slow is not what is wrong with it
    def bank() -> None:
        looks.append("bank")
        raise OSError("the check itself is broken")

    needs = needing(app, bank)
    with Lines() as lines:
        async with working(app):
            await until(lambda: len(looks) > 3)
            assert await (await needs.adelay()).aget(timeout=30) == "done"
    assert [line["level"] for line in lines.of("health:check-failed")] == ["error"]  # at each look the same


async def test_a_local_check_is_each_workers_own(app: App, other: App, redis_client: "redis.Redis") -> None:
    looked: list[str] = []
    for which, named_app in (("a", app), ("b", other)):

        async def look(which: str = which) -> bool:
            looked.append(which)
            return which == "a"

        named_app.health_check(name="own", period=0.05)(look)
    async with working(app, name="a"), working(other, name="b"):
        await until(lambda: looked.count("a") > 2 and looked.count("b") > 2)
    assert app.health_check.known["own"].state == "healthy"
    assert other.health_check.known["own"].state == "unhealthy"
    assert not redis_client.exists(app.keys.check("own"))


async def test_of_a_global_check_one_worker_looks_for_all(
    app: App, other: App, redis_client: "redis.Redis"
) -> None:
    looked: list[float] = []
    period = 0.1

    async def look() -> str:
        looked.append(trio.current_time())
        return "degraded"

    for sharer in (app, other):
        sharer.health_check(name="all", period=period, scope="global")(look)
    async with working(app, name="a"), working(other, name="b"):
        await until(
            lambda: (
                all(sharer.health_check.known["all"].state == "degraded" for sharer in (app, other))
                and len(looked) >= 20
            )
        )
        periods = (looked[-1] - looked[0]) / period
        left: Any = redis_client.pttl(app.keys.check("all"))
        assert left != -1, "it is believed for a while only"
        assert left <= 3 * period * 1000
    # Once in a period, not once for each worker. After the machine has stood still each may look at once.
    assert len(looked) <= 1.5 * periods + 2


async def test_what_one_worker_reports_of_a_global_check_holds_the_jobs_of_all(app: App, other: App) -> None:
    checks = [HealthCheck("bank", period=0.1, scope="global", allowed={"unhealthy": 0}) for _ in (app, other)]
    mine, theirs = needing(app, checks[0], "mine"), needing(other, checks[1], "theirs")
    app.task(name="theirs")(_nothing)
    other.task(name="mine")(_nothing)
    with Lines() as lines:
        async with working(app, name="a"), working(other, name="b"):
            checks[0].report("unhealthy", "seen by one")
            await until(lambda: checks[1].state == "unhealthy")
            await until(lambda: len({line["breaker"] for line in lines.of("breaker:tripped")}) == 2)
            del mine, theirs
            checks[1].report("healthy")
            await until(lambda: checks[0].state == "healthy")
    assert {line["why"] for line in lines.of("breaker:tripped")} == {
        "health check bank is unhealthy: seen by one"
    }


async def _nothing() -> None: ...


async def test_group_check_runs_in_one_worker_of_each_group(
    url: str, app_name: str, redis_client: "redis.Redis", tmp_path: Path
) -> None:
    ran: list[str] = []
    apps = [
        App(app_name, broker=url, lease=30, worker_group=group, keys=str(tmp_path))
        for group in ("paris", "paris", "rome")
    ]
    apps[0].control.keyring.get_signer()
    for index, member in enumerate(apps):
        group = member.settings.worker_group

        async def check(index: int = index, group: str = group) -> str:
            ran.append(f"{group} {index}")
            return "unhealthy" if group == "paris" else "healthy"

        member.health_check(name="vpn", period=0.2, scope="group")(check)
    reports = [
        sharer.health_check.add(HealthCheck("line", period=0.2, stale_after=500, scope="group"))
        for sharer in apps
    ]
    async with working(apps[0], name="a"), working(apps[1], name="b"), working(apps[2], name="c"):
        await until(
            lambda: (
                [sharer.health_check.known["vpn"].state for sharer in apps] == ["unhealthy"] * 2 + ["healthy"]
            )
        )
        reports[0].report("unhealthy", "cut")
        await until(lambda: reports[1].state == "unhealthy")
        await until(lambda: len(ran) >= 30)
        assert reports[2].state == "unknown", "that is another group's"
        (reply,) = await apps[0].control.asend("health", to="a")
        (reading,) = [report for report in reply.answer["checks"] if report["check"] == "line"]
        assert (reading["scope"], reading["group"], reading["why"]) == ("group", "paris", "cut")
    assert redis_client.exists(apps[0].keys.check("line paris"))
    assert not redis_client.exists(apps[0].keys.check("line rome"))
    in_paris, in_rome = (sum(name.startswith(group) for name in ran) for group in ("paris", "rome"))
    assert in_paris <= 1.5 * in_rome + 2, "one worker runs it for both"
    for member in apps:
        member.close()


async def test_a_state_that_nobody_saw_again_goes_by_itself(app: App, redis_client: "redis.Redis") -> None:
    check = HealthCheck("bank", period=0.5, stale_after=2, scope="global")
    app.health_check.add(check)
    async with working(app):
        check.report("unhealthy")
        await until(lambda: bool(redis_client.exists(app.keys.check("bank"))))
        await until(lambda: not redis_client.exists(app.keys.check("bank")))


async def test_global_checks_are_off_without_a_store_and_that_is_logged_once(url: str, app_name: str) -> None:
    looked: list[int] = []
    app = App(app_name, broker=url, health_store="none", services=[_stays])

    @app.health_check(period=0.05, scope="global")
    async def everywhere() -> None:
        looked.append(1)

    @app.health_check(period=0.05, scope="group")
    async def in_group() -> None:
        looked.append(1)

    @app.health_check(period=0.05)
    async def here() -> None:
        looked.append(2)

    with Lines() as lines:
        async with working(app):
            await until(lambda: looked.count(2) > 3)
    assert 1 not in looked
    (off,) = lines.of("health:disabled")
    assert (off["level"], sorted(off["checks"])) == ("warning", ["everywhere", "in_group"])
    app.close()


async def _stays() -> None:
    await trio.sleep_forever()


def test_an_application_without_a_place_for_states_is_checked_before_it_starts(
    url: str, app_name: str
) -> None:
    app = App(app_name, broker=url, health_store="none", services=[_stays])
    app.health_check(scope="global")(_nothing)
    worker.check(app)
    app.close()


async def test_a_report_while_redis_is_away_is_told_to_others_later(
    own_server: EmbeddedServer, app_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health_checks, "RETRY_DELAY", 0.1)
    app = App(app_name, broker=own_server.url)
    check = app.health_check.add(HealthCheck("bank", scope="global"))
    with Lines() as lines:
        async with working(app):
            own_server.kill()
            check.report("unhealthy", "also the bank")
            assert check.state == "unhealthy"  # here it is known at once
            await until(lambda: bool(lines.of("health:share-failed")), within=30)
            own_server.revive()
            with redis.Redis.from_url(own_server.url) as client:
                await until(lambda: bool(client.exists(app.keys.check("bank"))), within=30)
                raw: Any = client.get(app.keys.check("bank"))
                assert b"also the bank" in raw
    app.close()


@pytest.mark.plants
async def test_what_others_wrote_that_is_no_state_is_ignored(app: App, redis_client: "redis.Redis") -> None:
    check = app.health_check.add(HealthCheck("bank", scope="global", period=0.05))
    with Lines() as lines:
        async with working(app):
            for wrong in (b"\xff", b"[]", b'{"check":"bank","state":"odd","is_good":true}'):
                redis_client.set(app.keys.check("bank"), wrong)
                await trio.sleep(0.12)
            assert check.state == "unknown"
            redis_client.set(
                app.keys.check("bank"), b'{"check":"bank","state":"healthy","is_good":true,"at":1}'
            )
            await until(lambda: check.state == "healthy")
    assert lines.of("health:check-failed") == []


def test_two_checks_of_one_name_are_refused_before_a_worker_starts(app: App) -> None:
    needing(app, HealthCheck("bank"), "one")
    needing(app, HealthCheck("bank"), "two")
    with pytest.raises(Misconfigured, match=r"two health checks are named 'bank': one of them is task two's"):
        worker.check(app)


async def test_a_services_check_is_looked_at_too(url: str, app_name: str) -> None:
    looked = trio.Event()

    async def look() -> None:
        looked.set()

    app = App(app_name, broker=url, services=[service(_stays, checks=[HealthCheck("own", look)])])
    async with working(app):
        with trio.fail_after(30):
            await looked.wait()
    app.close()


async def test_worker_reports_when_its_inbox_says_a_period_lapsed(
    url: str, app_name: str, tmp_path: Path
) -> None:
    app = App(app_name, broker=url, keys=str(tmp_path / "keys"), own_checks=False)
    well = True

    @app.health_check(period=0.5, allowed={"unhealthy": 0})
    async def bank() -> bool:
        return well

    needs = app.task(name="needs", checks=[bank])(_nothing)
    app.control.keyring.get_signer()
    async with working(app, name="w"):
        await until(lambda: bank.state == "healthy")
        well = False
        await trio.sleep(0.3)  # half of the period: sooner it would not look again
        (reply,) = await app.control.asend("check-expired", {"check": "bank"}, to="w")
        assert (reply.ok, reply.answer["state"], reply.answer["is_good"]) == (True, "unhealthy", False)
        (reply,) = await app.control.asend("health", to="w")
        assert [report["state"] for report in reply.answer["checks"]] == ["unhealthy"]
        (breaker,) = reply.answer["breakers"]
        assert (breaker["of"], breaker["state"], breaker["trips"]) == (needs.name, "open", 1)
        (reply,) = await app.control.asend("check-expired", {"check": "disk"}, to="w")
        assert not reply.ok
    app.close()


async def test_the_doctor_names_the_open_circuit_breakers_of_a_worker(url: str, app_name: str) -> None:
    app = App(app_name, broker=url, own_checks=False, metrics_interval=0.1)

    @app.task(name="charge", max_retries=0, breaker=BreakerPolicy(threshold=1, reset=600.0))
    async def charge() -> None:
        raise OSError("the bank is away")

    (check,) = [check for check in get_checks(app) if check.name == "workers"]

    async def find() -> str:
        (found,) = await trio.to_thread.run_sync(lambda: list(run_checks([check])))
        return found.summary

    async def names_it() -> bool:
        return "open circuit breakers: charge of w" in await find()

    async with working(app, name="w"):
        assert "breaker" not in await find()
        await charge.adelay()
        await until_async(names_it)
    app.close()
