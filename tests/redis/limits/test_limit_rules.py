"""Limit rules: what a Scheduler imposes holds on all workers before what operators set, and lapses with it."""

from collections import Counter
from collections.abc import Iterator

import pytest
import redis
import trio

from celery5 import App, agather
from celery5.broker.call import Call
from celery5.broker.calls import limits as limit_calls
from celery5.broker.keys import Keys
from celery5.broker.servers.embedded import EmbeddedServer
from celery5.processes.scheduler import SCHEDULER
from celery5.protocol.limit_rules import ImposedLimits
from celery5.protocol.limits import LimitOverride
from celery5.scaling import ClusterSnapshot
from celery5.services.limits import limit_rule_evaluator
from celery5.services.scaling import reporter
from tests.redis.worker.workers import Lines, start, until, until_async, working


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluations and reports follow each other soon."""
    monkeypatch.setattr(limit_rule_evaluator, "INTERVAL", 0.1)
    monkeypatch.setattr(reporter, "REPORT_INTERVAL", 0.1)


@pytest.fixture
def app(url: str, app_name: str) -> Iterator[App]:
    """An application whose workers have many slots."""
    app = App(app_name, broker=url, lease=2.0, concurrency=20, cpu_slots=4, grace_period=1.0)
    yield app
    app.perform(Call(("DEL", app.keys.limits, app.keys.imposed_limits, app.keys.limit_rules_turn), int))
    app.close()


async def is_limited(app: App, task: str, limit: int | None, *rules: str) -> bool:
    """Return whether that limit holds, by these rules."""
    imposed = (await app.limits.alist()).get(task)
    if imposed is None:
        return limit is None and not rules
    return (imposed.limit, imposed.rules) == (limit, rules)


async def test_a_rule_beats_what_an_operator_sets_on_every_worker(app: App) -> None:
    running = most = 0

    @app.task(limit=9)
    async def work() -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await trio.sleep(0.02)
        running -= 1

    app.limits.rule("always", task=work, limit=2)
    await app.limits.aset(work, 6, by="ann")
    with Lines() as lines:
        async with trio.open_nursery() as nursery:
            scheduler = await start(nursery, app, page=SCHEDULER, name="one")
            await until_async(lambda: is_limited(app, work.name, 2, "always"))
            workers = [await start(nursery, app, name=name) for name in ("a", "b")]
            await app.limits.aset(work, 7, by="ann")
            await agather(await app.asend_many([work.s() for _ in range(40)]))
            assert most == 2
            (listed,) = (await app.limits.alist()).values()
            assert (listed.limit, listed.limited_by, listed.set_limit, listed.set_by) == (
                2,
                "rule always",
                7,
                "ann",
            )
            for process in (*workers, scheduler):
                await process.stop()
    (imposed,) = lines.of("limit-rule:imposed")
    assert (imposed["rule"], imposed["task"], imposed["limit"]) == ("always", work.name, 2)
    assert any(line["by"] == "rule always" for line in lines.of("task:limited"))


async def test_a_rule_holds_while_a_shared_check_is_in_its_states(app: App) -> None:
    state = "healthy"

    @app.health_check(period=0.1, scope="global", allowed={"unhealthy": 1000})
    async def database() -> str:
        return state

    @app.task
    async def work() -> None: ...

    app.limits.rule("spare-database", task=work, rate="1/m", when=database)
    with Lines() as lines:
        async with trio.open_nursery() as nursery:
            both = [await start(nursery, app), await start(nursery, app, page=SCHEDULER, name="one")]
            await until(lambda: database.state == "healthy")
            state = "unhealthy"
            await until(lambda: bool(lines.of("limit-rule:imposed")))
            await until(lambda: any(line.get("rate") == "1/m" for line in lines.of("task:limited")))
            state = "healthy"
            await until(lambda: bool(lines.of("limit-rule:lifted")))
            await until(lambda: lines.of("task:limited")[-1]["limit"] == "its own")
            for process in both:
                await process.stop()
    assert len(lines.of("limit-rule:imposed")) == len(lines.of("limit-rule:lifted")) == 1


async def test_the_hours_of_a_rule_are_those_of_the_broker(app: App, redis_client: "redis.Redis") -> None:
    @app.task
    async def now() -> None: ...

    @app.task
    async def later() -> None: ...

    seconds, _ = redis_client.time()
    hour = seconds // 3600 % 24
    app.limits.rule("now", task=now, limit=1, during=f"{(hour - 1) % 24:02}:00-{(hour + 2) % 24:02}:00")
    app.limits.rule("later", task=later, limit=1, during=f"{(hour + 3) % 24:02}:00-{(hour + 5) % 24:02}:00")
    async with working(app, page=SCHEDULER, name="one"):
        await until_async(lambda: is_limited(app, now.name, 1, "now"))
        assert await is_limited(app, later.name, None)


async def test_a_function_decides_by_the_state_of_the_cluster(app: App) -> None:
    go = trio.Event()
    snapshots: list[ClusterSnapshot] = []

    @app.task
    async def work() -> None:
        await go.wait()

    @app.limit_rule(every=0.1)
    async def by_load(snapshot: ClusterSnapshot) -> dict[str, int] | None:
        snapshots.append(snapshot)
        return {work.name: 3} if any(load.running for load in snapshot.task_loads) else None

    @app.limit_rule(every=0.1)
    def in_a_thread(snapshot: ClusterSnapshot) -> dict[object, str]:
        return {work: "500/s"}

    async with trio.open_nursery() as nursery:
        both = [await start(nursery, app), await start(nursery, app, page=SCHEDULER, name="one")]
        await until_async(lambda: is_limited(app, work.name, None, "in_a_thread"))
        sent = await app.asend_many([work.s() for _ in range(5)])
        await until_async(lambda: is_limited(app, work.name, 3, "by_load", "in_a_thread"))
        assert (await app.limits.alist())[work.name].rate == "500/s"
        assert snapshots[-1].slots("trio") == 20
        go.set()
        await agather(sent)
        await until_async(lambda: is_limited(app, work.name, None, "in_a_thread"))
        for process in both:
            await process.stop()


async def test_what_a_function_returned_stays_while_it_fails(app: App) -> None:
    fails = False

    @app.task
    async def work() -> None: ...

    @app.limit_rule(every=0.05)
    async def shaky(snapshot: ClusterSnapshot) -> dict[str, int]:
        if fails:
            raise OSError("no answer")
        return {work.name: 4}

    with Lines() as lines:
        async with working(app, page=SCHEDULER, name="one"):
            await until_async(lambda: is_limited(app, work.name, 4, "shaky"))
            fails = True
            await until(lambda: bool(lines.of("limit-rule:failed")))
            assert await is_limited(app, work.name, 4, "shaky")
    (failed,) = lines.of("limit-rule:failed")
    assert "no answer" in failed["why"]


async def test_the_rules_of_a_dead_scheduler_lapse_on_workers(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limit_calls, "IMPOSED_TTL", 1.0)
    app.configure(lease=300.0)  # no heartbeat finds it

    @app.task
    async def work() -> None: ...

    imposed = ImposedLimits("dead", {"r": {work.name: LimitOverride(limit=1)}})
    with Lines() as lines:
        async with working(app):
            assert await app.aperform(limit_calls.impose_limits(app.keys, "dead", imposed))
            await until(lambda: bool(lines.of("task:limited")))
            assert lines.of("task:limited")[0]["limit"] == 1
            await until(lambda: lines.of("task:limited")[-1]["limit"] == "its own")
    assert await app.limits.alist() == {}


async def test_one_scheduler_at_a_time_evaluates_and_the_next_continues(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    claims: Counter[str] = Counter()
    claim = limit_calls.claim_rules_turn
    calls = 0

    def count_claims(keys: Keys, scheduler: str, *, seconds: float = 10.0) -> Call[limit_calls.RulesTurn]:
        claims[scheduler.split("@")[0]] += 1
        return claim(keys, scheduler, seconds=seconds)

    monkeypatch.setattr(limit_calls, "claim_rules_turn", count_claims)

    @app.task
    async def work() -> None: ...

    @app.limit_rule(every=3600)
    async def once(snapshot: ClusterSnapshot) -> dict[str, int]:
        nonlocal calls
        calls += 1
        if calls > 1:
            raise OSError("no answer")
        return {work.name: 4}

    with Lines() as lines:
        async with trio.open_nursery() as nursery:
            one = await start(nursery, app, page=SCHEDULER, name="one")
            await until_async(lambda: is_limited(app, work.name, 4, "once"))
            before = set(claims)
            two = await start(nursery, app, page=SCHEDULER, name="two")
            await until(lambda: sum(claims[name] for name in claims if name not in before) > 5)
            assert calls == 1
            await one.stop()
            await until(lambda: calls == 2)
            claimed = claims.total()
            await until(lambda: claims.total() > claimed + 2)
            assert await is_limited(app, work.name, 4, "once"), (
                "the next one continues, though it knows no better"
            )
            await two.stop()
    assert len(lines.of("limit-rules:lock-acquired")) == 2
    assert len(lines.of("limit-rule:imposed")) == 1
    assert not lines.of("limit-rule:lifted")


def test_a_scheduler_that_lost_its_turn_imposes_nothing(app: App) -> None:
    imposed = ImposedLimits("late", {"r": {"t": LimitOverride(limit=1)}})
    assert app.perform(limit_calls.claim_rules_turn(app.keys, "first")).mine
    assert not app.perform(limit_calls.claim_rules_turn(app.keys, "late")).mine
    assert not app.perform(limit_calls.impose_limits(app.keys, "late", imposed))
    app.perform(limit_calls.claim_rules_turn(app.keys, "first", seconds=0))
    assert app.perform(limit_calls.claim_rules_turn(app.keys, "late")).mine
    assert app.perform(limit_calls.impose_limits(app.keys, "late", imposed))
    assert app.perform(limit_calls.claim_rules_turn(app.keys, "late")).imposed == imposed


async def test_what_another_program_wrote_is_as_if_nothing_were_imposed(
    app: App, redis_client: "redis.Redis"
) -> None:
    for words in (
        "no JSON",
        "[]",
        '{"rules": {"r": {"t": {"rate": "often"}}}}',
        '{"rules": {"r": {"t": {"limit": -1}}}}',
    ):
        redis_client.set(app.keys.imposed_limits, words)
        assert await app.limits.alist() == {}


async def test_a_rule_holds_on_every_broker(url: str, own_server: EmbeddedServer, app_name: str) -> None:
    running = most = 0
    app = App(
        app_name,
        broker=url,
        brokers={"mails": own_server.url},
        routes={"post": "mails"},
        concurrency=9,
        grace_period=1.0,
    )

    @app.task(queue="post")
    async def post() -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await trio.sleep(0.02)
        running -= 1

    app.limits.rule("always", task=post, limit=2)
    with redis.Redis.from_url(own_server.url) as far:
        async with trio.open_nursery() as nursery:
            scheduler = await start(nursery, app, page=SCHEDULER, name="one")
            await until(lambda: bool(far.exists(app.keys.imposed_limits)))
            both = [await start(nursery, app), scheduler]
            await agather(await app.asend_many([post.s() for _ in range(20)]))
            for process in both:
                await process.stop()
    assert most == 2
    app.close()
