"""The overview of an application: what waits, what fails and who works, in a few trips."""

import re
import time
from typing import Any

import pytest
import redis
import trio
from click.testing import CliRunner

from celery5 import App
from celery5.broker.calls import cluster as cluster_calls
from celery5.broker.calls import leases as lease_calls
from celery5.broker.calls import observability as report_calls
from celery5.broker.calls import queues as queue_calls
from celery5.broker.servers.embedded import EmbeddedServer
from celery5.cli.commands.queue import queue as queue_group
from celery5.cli.standalone.info import info
from celery5.cli.top.tables import make_queue_table
from celery5.doctor.examination import get_checks, run_checks
from celery5.errors import BrokerUnavailable, Misconfigured
from celery5.observability import overview as overview_module
from celery5.protocol.cluster.members import MemberEnd
from celery5.protocol.observability.overview import Overview
from celery5.protocol.observability.report import Measurements, MetricsReport, ReportOrigin, Series
from celery5.protocol.scaling.slot_use import SlotUse, format_slots, read_slots
from celery5.results.job_details import read_app_state
from tests.redis.dashboard.client import looking_at
from tests.redis.worker.workers import until_async, working

FAST: dict[str, Any] = {"metrics_interval": 0.1}


def declare(app: App) -> None:
    """Two tasks on one queue, and one on a queue without workers."""

    @app.task(name="pay", queue="slow")
    async def pay() -> None: ...

    @app.task(name="fail", queue="slow", max_retries=0)
    async def fail() -> None:
        raise ValueError("no money")

    @app.task(name="mail", queue="letters")
    async def mail() -> None: ...


async def until_seen(app: App, ended: int) -> Overview:
    """The overview, once so many attempts are in it."""
    found: list[Overview] = []

    async def is_seen() -> bool:
        found[:] = [await app.metrics.aoverview()]
        return sum(task.ended for task in found[0].tasks) == ended

    await until_async(is_seen)
    return found[0]


async def test_an_overview_shows_tasks_queues_and_workers(app: App) -> None:
    app.configure(**FAST)
    declare(app)
    await app.asend_many([app.tasks["pay"].s() for _ in range(30)])
    await app.asend_many([app.tasks["fail"].s() for _ in range(10)])
    await app.tasks["mail"].adelay()
    async with working(app, name="one", queues=("slow",)):
        seen = await until_seen(app, 40)

        async def is_well() -> bool:
            nonlocal seen
            seen = await app.metrics.aoverview()
            flows = {queue.name: queue.flow for queue in seen.queues}
            ends = flows["slow"] is not None and flows["slow"].outgoing > 0  # counted a second later, at most
            return ends and [worker.health for worker in seen.workers] == ["ok"]

        await until_async(is_well)
    (letters, slow) = seen.queues
    assert (letters.name, letters.waiting, letters.workers) == ("letters", 1, 0)
    assert letters.verdict.text == "nobody works on it"
    assert letters.verdict.needs_attention
    assert (slow.name, slow.waiting, slow.dead, slow.workers) == ("slow", 0, 10, 1)
    assert slow.verdict.text == "steady"
    assert slow.flow is not None, slow
    assert slow.flow.outgoing > 0
    tasks = {task.name: task for task in seen.tasks}
    assert (tasks["pay"].ended, tasks["pay"].failed, tasks["pay"].failing_since) == (30, 0, None)
    assert tasks["pay"].queues == ("slow",)
    assert tasks["pay"].run is not None
    assert tasks["pay"].ended_per_minute > 0
    failing = tasks["fail"]
    assert failing.failed_share == 1.0
    assert failing.failing_since is not None
    assert failing.failing_since <= time.time() <= failing.failing_since + 120
    assert failing.last_error is not None
    assert (failing.last_error.type, failing.last_error.message) == ("ValueError", "no money")
    (worker,) = seen.workers
    assert worker.name == "one"
    assert worker.queues == ("slow",)
    assert worker.ended == 40
    assert worker.slots
    assert worker.memory
    assert worker.host
    assert worker.uptime is not None
    assert 0 <= worker.uptime < 600
    assert seen.totals.dead == 10
    assert seen.totals.waiting == 1
    assert seen.totals.ended_per_second > seen.totals.failed_per_second > 0
    assert [start.processes for start in seen.starts] == [1]


async def test_the_slots_of_a_worker_are_shown_by_kind_and_up_to_how_many(app: App) -> None:
    app.configure(**FAST, budgets="trio=3..40")
    declare(app)
    may_end = trio.Event()

    @app.task(name="stay", queue="slow")
    async def stay() -> None:
        await may_end.wait()

    async def is_shown() -> bool:
        seen = await app.metrics.aoverview()
        return [worker.slots_text for worker in seen.workers] == ["trio 1 of 3 (up to 40)"]

    await stay.adelay()
    async with working(app, name="one", queues=("slow",)):
        await until_async(is_shown)  # no kind of which it has no tasks
        (worker,) = (await app.metrics.aoverview()).workers
        assert worker.slots_by_kind == {"trio": SlotUse(1, 3, 40)}
        (reply,) = await app.control.asend("stats", to="one")
        assert format_slots(read_slots(reply.answer["slots"])).startswith("trio 1 of 3 (up to 40), ")
        may_end.set()


def test_an_application_without_anything_has_an_empty_overview(app: App) -> None:
    seen = app.metrics.overview()
    assert (seen.queues, seen.tasks, seen.workers, seen.unreachable) == ((), (), (), ())


def test_a_time_that_is_too_long_is_refused(app: App) -> None:
    with pytest.raises(Misconfigured, match="60 to 21600"):
        app.metrics.overview(since=86400)


def test_a_broker_that_is_unreachable_is_named_and_the_other_one_is_shown(
    paired: App, own_server: EmbeddedServer
) -> None:
    own_server.stop()
    seen = paired.metrics.overview()
    assert len(seen.unreachable) == 1


def test_without_any_broker_the_error_is_raised(app_name: str) -> None:
    app = App(app_name, broker="redis://127.0.0.1:1/0")
    with pytest.raises(BrokerUnavailable):
        app.metrics.overview()


async def test_overview_knows_all_workers_over_many_pages_of_reports(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overview_module, "REPORTS_AT_ONCE", 3)
    driver = await app.connections.get_async_driver()
    await driver.perform(queue_calls.register_queue(app.keys, "mail"))
    gauges: dict[Series, float] = {
        ("celery5_process_ready",): 1.0,
        ("celery5_loop_lag_seconds",): 0.25,
        ("celery5_slots", "task", "pay"): 3.0,
        ("celery5_slots", "task", "mail"): 4.0,
        ("celery5_breaker_state", "of", "pay"): 1.0,
    }
    counters: dict[Series, float] = {("celery5_jobs_total", "queue", "mail"): 5.0}
    for number in range(10):
        name = f"worker-{number}:1"
        await driver.perform(lease_calls.join_queue(app.queue("mail"), name, lease=60))
        report = MetricsReport(
            f"host:{number}:1", "worker", 1, Measurements(counters, gauges), origin=ReportOrigin(name, 1.0, 7)
        )
        await driver.perform(report_calls.send_report(app.keys, report.process, 1, report.pack()))
    workers = (await app.metrics.aoverview()).workers
    assert len(workers) == 10
    for worker in workers:
        assert (worker.health, worker.lag, worker.slots, worker.ended, worker.host) == (
            "breaker open: pay", 0.25, 7, 7, "host",
        )  # fmt: skip


async def test_a_worker_that_began_again_is_not_what_it_was_when_it_ended(app: App) -> None:
    """As after the restart of a Controller, whose members keep their names."""
    driver = await app.connections.get_async_driver()
    await driver.perform(queue_calls.register_queue(app.keys, "mail"))

    async def report(word: str, started: float, ready: float) -> None:
        gauges: dict[Series, float] = {("celery5_process_ready",): ready}
        sent = MetricsReport(
            f"host:1:{word}",
            "worker",
            1,
            Measurements({}, gauges),
            origin=ReportOrigin(f"worker-1:{word}", started, 0),
        )
        await driver.perform(report_calls.send_report(app.keys, sent.process, 1, sent.pack()))

    async def read_health(reader: overview_module.WorkerReader) -> list[str]:
        return [worker.health for worker in (await reader.read()).workers]

    reader = overview_module.WorkerReader(app)
    await report("old", 1.0, 0.0)
    await driver.perform(lease_calls.join_queue(app.queue("mail"), "worker-1:new", lease=60))
    assert await read_health(reader) == ["no report yet"]
    await report("new", 2.0, 1.0)
    assert await read_health(reader) == ["ok"]
    assert await read_health(overview_module.WorkerReader(app)) == ["ok"], "whoever has read nothing before"


def test_all_lost_workers_are_counted_and_the_state_is_read_once(
    app: App, redis_client: "redis.Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    app.perform(queue_calls.register_queue(app.keys, "mail"))
    lost = {f"host:{number}:x": (time.time() - number) * 1000 for number in range(1, 26)}
    redis_client.zadd(app.queue("mail").lost_workers, lost)
    redis_client.expire(app.queue("mail").lost_workers, 3600)
    reads: list[str] = []

    def read_and_count(*args: Any, **options: Any) -> Any:
        reads.append("read")
        return read_app_state(*args, **options)

    monkeypatch.setattr(overview_module, "read_app_state", read_and_count)
    shown = app.metrics.overview()
    assert (shown.totals.lost, len(shown.lost), shown.left_out.lost) == (25, 25, 0)
    assert len(reads) == 1
    printed = CliRunner().invoke(info, [], obj=_Loaded(app)).output
    assert re.search(r"(?m)^20 more +celery5 (-A \S+ )?worker list shows all$", printed), printed
    (found,) = run_checks([check for check in get_checks(app) if check.name == "workers"])
    assert "host:1" in found.summary
    assert len(reads) == 1  # both give what they have read themselves
    redis_client.delete(app.queue("mail").lost_workers)


@pytest.mark.parametrize(("said", "told"), [("w-1:old", "w-1:old"), ("", "w-1:new")])
def test_the_end_of_a_process_is_told_of_that_one_and_else_of_the_last_of_its_name(
    app: App, redis_client: "redis.Redis", said: str, told: str
) -> None:
    app.perform(queue_calls.register_queue(app.keys, "mail"))
    now = time.time() * 1000
    redis_client.zadd(app.queue("mail").lost_workers, {"w-1:old": now - 9000, "w-1:new": now - 1000})
    app.perform(
        cluster_calls.note_member_end(app.keys, MemberEnd("w-1", "fell", "it is started again", said))
    )
    lost = {process.worker: process.controller for process in app.metrics.workers().lost}
    assert lost == {"w-1:old": "", "w-1:new": ""} | {told: "w-1 fell; it is started again"}
    redis_client.delete(app.queue("mail").lost_workers, app.keys.member_end("w-1"))


async def test_the_columns_of_queues_have_one_order_in_commands_top_and_the_dashboard(app: App) -> None:
    declare(app)
    await app.asend_many([app.tasks["pay"].s()])
    async with looking_at(app) as client:
        page = await client.load("queues")
    overview = await app.metrics.aoverview()

    def read_header(*command: str) -> list[str]:
        group = {"info": info, "queue": queue_group}[command[0]]
        printed = CliRunner().invoke(group, command[1:], obj=_Loaded(app)).output
        return next(re.split("  +", line) for line in printed.splitlines() if line.startswith("queue  "))

    marks = {"keeps up?": "verdict", "in/s": "in", "out/s": "out"}
    titles = [title.lower() for title in re.findall(r'<th scope="col"[^>]*>([^<]*)<', page)]
    found = {
        "queue list": await trio.to_thread.run_sync(read_header, "queue", "list"),
        "top": [column.title for column in make_queue_table(overview).columns],
        "dashboard": [marks.get(title, title) for title in titles],
    }
    shown = await trio.to_thread.run_sync(read_header, "info")
    for name, columns in found.items():
        both = set(shown) & set(columns)
        assert {"queue", "backlog", "in", "running", "dead", "verdict"} <= both, (name, columns)
        assert [title for title in columns if title in both] == [title for title in shown if title in both]
    await app.aempty("slow")


class _Loaded:
    """What a command is given, whose application is loaded."""

    def __init__(self, app: App) -> None:
        self._app = app

    def load(self, **_options: object) -> App:
        """Return the application."""
        return self._app


async def test_each_headline_figure_says_its_time_and_both_rates_have_the_same_one(app: App) -> None:
    async with looking_at(app) as client:
        page = await client.look("")
    window = r"(\d\d:\d\d(?::\d\d)? to \d\d:\d\d(?::\d\d)? UTC)"
    figures = rf"Ended per second, {window} \d+ Failed per second, \1 \d+ Backlog now \d+ Running now \d+ Dead now \d+"
    assert re.search(figures, page), page
