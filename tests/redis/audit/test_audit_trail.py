"""Audit trail: what an entry says, who reads which, and that no action fails because of it."""

import logging
import time
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import redis
import trio

from celery5 import App, Misconfigured, arevoke
from celery5.broker.call import Call
from celery5.broker.calls import audit as audit_calls
from celery5.errors import BrokerUnavailable, CeleryError
from celery5.protocol.audit import AuditEntry
from tests.redis.dead_letters.many_dead_letters import add_dead_letters, numbered
from tests.redis.worker.workers import Lines, until, working


def test_a_replay_says_which_jobs_how_many_and_what_came_of_it(app: App, redis_client: "redis.Redis") -> None:
    add_dead_letters(app, redis_client, *numbered(5))
    add_dead_letters(app, redis_client, "other", error="KeyError")
    began = time.time()
    with app.audit.acting_as("anna", source="dashboard"):
        app.dlq.replay(error="ValueError", queue="default", dry_run=True)
        app.dlq.replay(error="ValueError", limit=3, rate="1000/s")
    app.dlq.purge(where=lambda job: job.type == "KeyError")
    purge, replay = app.audit.list()
    assert (replay.who, replay.source, replay.action, replay.target) == (
        "anna",
        "dashboard",
        "dlq:replay",
        "all queues",
    )
    assert replay.filter == {"errors": ["ValueError"], "limit": 3, "rate": 1000.0}
    assert (replay.count, replay.outcome) == (3, "done")
    assert (purge.source, purge.count) == ("python", 1)
    assert "lambda" in purge.filter["where"]
    assert began - 1 <= replay.at <= purge.at <= time.time() + 1


def test_the_trail_is_read_page_by_page(app: App, redis_client: "redis.Redis") -> None:
    for number in range(7):
        add_dead_letters(app, redis_client, f"j{number}")
        with app.audit.acting_as("bob" if number % 2 else "anna"):
            app.dlq.purge()
    whole = app.audit.list()
    pages, before = list[list[AuditEntry]](), ""
    while page := app.audit.list(limit=3, before=before):
        pages.append(page)
        before = page[-1].id
    assert [len(page) for page in pages] == [3, 3, 1]
    assert [entry for page in pages for entry in page] == whole
    older = app.audit.list(who="anna", before=whole[2].id)
    assert older == [entry for entry in whole[3:] if entry.who == "anna"]
    for wrong in ("+", "yesterday", "1-2-3"):
        with pytest.raises(Misconfigured, match="give the id of an entry"):
            app.audit.list(before=wrong)


def test_an_action_that_is_interrupted_says_how_far_it_came(app: App, redis_client: "redis.Redis") -> None:
    add_dead_letters(app, redis_client, *numbered(5))

    def stop(_tally: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        app.dlq.purge(progress=stop)
    (entry,) = app.audit.list()
    assert (entry.outcome, entry.count) == ("interrupted: KeyboardInterrupt", 5)


def test_an_action_that_is_cancelled_on_trio_is_in_the_trail(app: App, redis_client: "redis.Redis") -> None:
    add_dead_letters(app, redis_client, *numbered(20))

    async def replay() -> None:
        with trio.CancelScope() as scope:
            await app.dlq.areplay(rate=10, progress=lambda _tally: scope.cancel())
        assert scope.cancelled_caught

    trio.run(replay)
    (entry,) = app.audit.list()
    assert entry.outcome.startswith("interrupted: Cancelled")
    assert entry.count == 1


def test_an_error_is_the_outcome(app: App) -> None:
    with pytest.raises(Misconfigured):
        app.schedule.pause("nightly")
    (entry,) = app.audit.list()
    assert entry.outcome == "failed: NoSuchSchedule: no schedule 'nightly'; there are: none"


def test_an_entry_that_cannot_be_written_is_one_warning_and_the_action_stands(
    app: App, redis_client: "redis.Redis", caplog: pytest.LogCaptureFixture
) -> None:
    @app.task(name="t")
    async def task() -> None: ...

    redis_client.set(app.keys.audit, "another program's", ex=60)
    sent = task.delay()
    with caplog.at_level(logging.WARNING, "celery5"):
        assert sent.revoke()
    assert sent.status() == "REVOKED"
    (record,) = caplog.records
    assert record.getMessage().startswith("audit:write-failed  action=task:revoke  why=")


def test_an_unreachable_broker_raises_as_before_and_is_not_tried_again_for_the_trail(
    app_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    app = App(app_name, broker="redis://127.0.0.1:1/0")
    with caplog.at_level(logging.WARNING, "celery5"), pytest.raises(BrokerUnavailable):
        app.dlq.purge()
    assert not caplog.records


async def test_a_job_that_revokes_one_job_costs_no_more_and_many_are_one_entry(app: App) -> None:
    @app.task(name="t", queue="unread")
    async def task() -> None: ...

    @app.task(name="one")
    async def one(acting: bool) -> bool:
        sent = await task.adelay()
        if acting:
            with app.audit.acting_as("anna"):
                return await sent.arevoke()
        return await sent.arevoke()

    @app.task(name="many")
    async def many() -> int:
        return sum(await arevoke(await app.asend_many([task.s() for _ in range(3)])))

    async with working(app, queues=("default",)):
        assert await (await one.adelay(False)).aget(30)
        assert await app.audit.alist() == []
        assert await (await one.adelay(True)).aget(30)
        bulk = await many.adelay()
        assert await bulk.aget(30) == 3
    entries = await app.audit.alist()
    assert [(entry.action, entry.count) for entry in entries] == [("task:revoke", 3), ("task:revoke", 1)]
    assert (entries[0].job, entries[0].source) == (bulk.id, "python")
    assert entries[1].who == "anna"


async def test_a_worker_logs_that_an_entry_of_its_job_could_not_be_written(
    app: App, redis_client: "redis.Redis"
) -> None:
    @app.task
    async def purge() -> int:
        return (await app.dlq.apurge()).done

    await trio.to_thread.run_sync(add_dead_letters, app, redis_client, "j1")
    redis_client.set(app.keys.audit, "another program's", ex=60)
    with Lines() as lines:
        async with working(app):
            sent = await purge.adelay()
            assert await sent.aget(30) == 1
            await until(lambda: bool(lines.of("audit:write-failed")))
        (warning,) = lines.of("audit:write-failed")
    assert (warning["action"], warning["level"]) == ("dlq:purge", "warning")


async def test_each_action_is_a_line_of_the_log(app: App, redis_client: "redis.Redis") -> None:
    @app.task
    async def purge() -> int:
        return (await app.dlq.apurge()).done

    await trio.to_thread.run_sync(add_dead_letters, app, redis_client, "j1")
    with Lines() as lines:
        async with working(app):
            await (await purge.adelay()).aget(30)
            await until(lambda: bool(lines.of("audit:recorded")))
        (line,) = lines.of("audit:recorded")
    assert (line["action"], line["count"], line["outcome"], line["source"]) == (
        "dlq:purge",
        1,
        "done",
        "python",
    )
    assert line["who"] == (await app.audit.alist())[0].who


async def test_a_line_of_the_log_has_no_fields_that_say_nothing(app: App) -> None:
    @app.task
    async def suspend() -> None:
        await app.limits.asuspend(suspend.name)
        await app.limits.aresume(suspend.name)

    with Lines() as lines:
        async with working(app):
            await (await suspend.adelay()).aget(30)
            await until(lambda: len(lines.of("audit:recorded")) == 2)
        line, _ = lines.of("audit:recorded")
    assert (line["target"], line["filter"]) == (suspend.name, {})


def test_what_changes_nothing_has_no_entry(app: App, redis_client: "redis.Redis") -> None:
    add_dead_letters(app, redis_client, *numbered(2))
    for _ in range(30):
        app.dlq.purge(queue="default", reason="exhausted", error="NoSuchError")
        app.dlq.purge(dry_run=True)
        app.alerts.unsilence("nothing")
        app.result("unknown", queue="default").revoke()
    assert app.audit.list() == []
    with pytest.raises(CeleryError):
        app.schedule.pause("unknown")
    assert [entry.outcome[:6] for entry in app.audit.list()] == ["failed"]


def test_nobody_washes_out_what_others_have_done(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_calls, "MAX_ENTRIES", 20)
    monkeypatch.setattr(audit_calls, "MAX_ENTRIES_OF_ONE", 8)
    fill(app, *((f"dlq:{number}", "anna") for number in range(5)))
    fill(app, *((f"task:{number}", "bob") for number in range(7)))
    fill(app, *(("queue:purge", "eve") for _ in range(300)))
    trail = app.audit.list()
    assert [entry.action for entry in trail if entry.who == "anna"] == [f"dlq:{n}" for n in range(4, -1, -1)]
    assert [entry.action for entry in trail if entry.who == "bob"] == [f"task:{n}" for n in range(6, -1, -1)]
    assert len(trail) == 20
    # Those who have less than their share displace the oldest entry, and an index that was lost harms nobody.
    app.connections.get_blocking_driver().perform(Call(("DEL", app.keys.audit_entries), int))
    fill(app, *((f"dlq:later-{number}", "anna") for number in range(6)))
    assert [entry.action for entry in app.audit.list(limit=6)] == [f"dlq:later-{n}" for n in range(5, -1, -1)]
    assert len(app.audit.list()) == 20


def fill(app: App, *entries: tuple[str, str]) -> None:
    """Entries with these actions and actors."""
    app.connections.get_blocking_driver().perform_all(
        [
            audit_calls.record_action(app.keys, AuditEntry(id="", who=who, source="cli", action=action))
            for action, who in entries
        ]
    )


def test_entries_are_read_by_action_noun_person_and_time(app: App) -> None:
    fill(app, ("dlq:replay", "anna@web"), ("dlq:purge", "bob@web"), ("worker:reload", "anna@db"))
    cut = app.audit.list(limit=1)[0].at
    assert [entry.action for entry in app.audit.list(action="dlq")] == ["dlq:purge", "dlq:replay"]
    assert [entry.who for entry in app.audit.list(action="dlq:replay")] == ["anna@web"]
    assert [entry.action for entry in app.audit.list(who="anna")] == ["worker:reload", "dlq:replay"]
    assert [entry.action for entry in app.audit.list(who="anna@db")] == ["worker:reload"]
    assert app.audit.list(who="ann") == []
    assert len(app.audit.list(limit=2)) == 2
    assert app.audit.list(since=cut + 60) == []
    assert len(app.audit.list(since=cut - 60)) == 3
    assert len(app.audit.list(since=datetime.fromtimestamp(cut, UTC) - timedelta(minutes=1))) == 3


def test_rare_ones_are_found_behind_many_others(app: App) -> None:
    fill(app, ("queue:purge", "anna@web"), *[("task:revoke", "bob@web")] * 1100)
    assert [entry.who for entry in app.audit.list(action="queue", limit=5)] == ["anna@web"]
    assert len(app.audit.list(limit=2000)) == 1101


def test_the_trail_is_capped_and_expires(
    app: App, redis_client: "redis.Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit_calls, "MAX_ENTRIES", 100)
    fill(app, *[("task:revoke", "bob@web")] * 1000)
    looked: Any = redis_client
    assert 100 <= looked.xlen(app.keys.audit) <= 300  # Redis trims whole nodes
    assert 89 * 86400 < looked.ttl(app.keys.audit) <= 90 * 86400


def test_what_another_program_has_written_is_shown(app: App, redis_client: "redis.Redis") -> None:
    redis_client.xadd(app.keys.audit, {"action": "a:b", "count": "many", "filter": "{", "\xff": "?"})
    redis_client.expire(app.keys.audit, 60)
    (entry,) = app.audit.list()
    assert (entry.action, entry.who, entry.count, entry.filter) == ("a:b", "", None, {"unreadable": "{"})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"limit": 0}, "limit is 0: give 1 or more"),
        ({"action": "dlq:reply"}, "no action 'dlq:reply'; did you mean 'dlq:replay'?"),
        ({"since": datetime(2026, 1, 1)}, "give a datetime with a zone"),
        ({"since": -1}, "since is -1"),
    ],
)
def test_what_makes_no_sense_is_refused(app: App, options: dict[str, Any], message: str) -> None:
    with pytest.raises(Misconfigured, match=message.replace("?", r"\?")):
        app.audit.list(**options)


@pytest.mark.parametrize("who", ["", "  ", "x" * 201, None])
def test_somebody_without_a_name_does_not_act(app: App, who: Any) -> None:
    with pytest.raises(Misconfigured, match="acting_as: who is"), app.audit.acting_as(who):
        pass
    with pytest.raises(Misconfigured, match="acting_as: source is"), app.audit.acting_as("a", source="x"):  # type: ignore[arg-type]
        pass


def test_of_several_brokers_the_default_one_has_the_trail(paired: App, second: "redis.Redis") -> None:
    sent = paired.tasks["post"].delay(1)
    assert sent.revoke()
    (entry,) = paired.audit.list()
    assert (entry.action, entry.filter) == ("task:revoke", {"queue": ["post"]})
    assert not second.exists(paired.keys.audit)
