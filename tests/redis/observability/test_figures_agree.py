"""The figures and texts of one row are of one age, and a task that fails has its last error everywhere."""

import json
import re
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
import redis
import trio
from click.testing import CliRunner

from celery5 import App, RetryPolicy
from celery5.broker.calls import alerts as alert_calls
from celery5.broker.calls import leases as lease_calls
from celery5.broker.calls import observability as report_calls
from celery5.broker.calls import queues as queue_calls
from celery5.cli.commands.metrics import metrics
from celery5.observability import dead_letters
from celery5.observability.overview import DEAD_READ
from celery5.protocol.observability.overview import Overview, WorkerOverview
from celery5.protocol.observability.report import Measurements, MetricsReport, ReportOrigin
from tests.redis.dashboard.client import looking_at
from tests.redis.observability.surfaces import Surfaces
from tests.redis.worker.workers import until_async, working

QUEUE = "slow"


@pytest.fixture
def failing(url: str, app_name: str) -> Iterator[App]:
    """An application with a task whose attempts are retried, and one whose jobs are dead at once."""
    with closing(App(app_name, broker=url, metrics_interval=0.1)) as app:
        policy = RetryPolicy(max_retries=9, backoff=600)

        @app.task(name="flaky", queue=QUEUE, retry_policy=policy, autoretry_for=[OSError])
        async def flaky() -> None:
            raise OSError("no route")

        @app.task(name="loud", queue=QUEUE, max_retries=0)
        async def loud() -> None:
            raise ValueError("no money")

        yield app


async def until_all_fail(app: App, *names: str) -> Overview:
    """The overview, once so many tasks fail and their errors are known."""
    found: list[Overview] = []

    async def do_fail() -> bool:
        found[:] = [await app.metrics.aoverview()]
        failing = {task.name for task in found[0].tasks if task.failing_since and task.last_error}
        return failing == {*names}

    await until_async(do_fail)
    return found[0]


async def check_texts(surfaces: Surfaces, task: str, error: str) -> None:
    """Each surface says when the last error of a task was, and which it is."""
    texts = {
        "top --once": await surfaces.run("top", "--once"),
        "overview page": await surfaces.look(""),
        "tasks page": await surfaces.look("tasks"),
        "task page": await surfaces.look(f"tasks/{task}"),
    }
    pattern = rf"(just now|\d+ m?s ago) ?(, first (just now|\d+ m?s ago) ?)?: {error}"
    assert {name: bool(re.search(pattern, text)) for name, text in texts.items()} == dict.fromkeys(
        texts, True
    ), texts


async def test_a_task_whose_attempts_are_retried_has_its_last_error_everywhere(failing: App) -> None:
    await failing.tasks["flaky"].adelay()
    async with working(failing, queues=[QUEUE]):
        seen = await until_all_fail(failing, "flaky")
        (error,) = [task.last_error for task in seen.tasks]
        assert error is not None
        assert (error.text, error.queue, error.first) == ("OSError: no route", QUEUE, None)
        await check_texts(Surfaces(failing), "flaky", "OSError: no route")


async def test_dead_jobs_of_one_task_do_not_hide_the_last_error_of_another(failing: App) -> None:
    async with working(failing, queues=[QUEUE]):
        await failing.tasks["flaky"].adelay()
        await until_all_fail(failing, "flaky")
        await failing.asend_many([failing.tasks["loud"].s() for _ in range(DEAD_READ + 1)])
        seen = await until_all_fail(failing, "flaky", "loud")
        texts = {task.name: task.last_error.text for task in seen.tasks if task.last_error}
        assert texts == {"flaky": "OSError: no route", "loud": "ValueError: no money"}
        await check_texts(Surfaces(failing), "loud", "ValueError: no money")


async def test_a_firing_alert_says_with_what_it_fired_and_when_it_was_measured(failing: App) -> None:
    failing.alert("many-dead", dead_letters(above=2), for_=0.0, keep_firing_for=600.0)
    async with working(failing, queues=[QUEUE]), looking_at(failing) as client:

        async def read(value: int) -> dict[str, Any]:
            found: list[dict[str, Any]] = []

            async def is_measured() -> bool:
                rows = await client.ask("alert:list")
                found[:] = [row for row in rows if row["name"] == "many-dead" and row["value"] == value]
                return bool(found)

            await until_async(is_measured)
            return found[0]

        async def has_been_measured() -> bool:  # what was dead before is not new
            return (await failing.aperform(alert_calls.read_alerts(failing.keys))).evaluated is not None

        await until_async(has_been_measured)
        await failing.asend_many([failing.tasks["loud"].s() for _ in range(3)])
        fired = await read(3)
        words = f"queue {QUEUE} has 3 new dead letters in 10 min, and 3 in all"
        assert (fired["status"], fired["description"], fired["fired_value"]) == ("firing", words, 3)
        await failing.dlq.apurge()
        held = await read(0)
        assert held["description"] == (
            f"queue {QUEUE} has 0 new dead letters in 10 min, and 0 in all; "
            "it fired at 3 new dead letters, and resolves when that has lasted 10 min"
        )
        assert held["measured_at"] > fired["measured_at"] >= fired["fired_at"]
        for path in ("", "alerts"):
            page = await client.look(path)
            assert re.search(r"has lasted 10 min \(measured (just now|\d+ m?s ago) ?\)", page), page


async def test_all_figures_of_a_worker_are_of_its_last_report_or_of_its_answer(
    url: str, app_name: str
) -> None:
    with closing(App(app_name, broker=url, metrics_interval=0.2)) as app:
        may_end = trio.Event()

        @app.task(name="stay", queue=QUEUE)
        async def stay() -> None:
            await may_end.wait()

        async with working(app, name="one", queues=[QUEUE]), looking_at(app) as client:
            seen: list[WorkerOverview] = []

            async def has_reported() -> bool:
                seen[:] = (await app.metrics.aoverview()).workers
                return [worker.reported is not None for worker in seen] == [True]

            await until_async(has_reported)
            await app.asend_many([app.tasks["stay"].s() for _ in range(4)])

            shown: list[tuple[int, int]] = []  # running, and the slots that are used

            async def all_run() -> bool:
                (worker,) = (await app.metrics.aoverview()).workers
                shown.append((worker.running or 0, sum(use.used for use in worker.slots_by_kind.values())))
                (row,) = (await client.ask("top:show"))["workers"]
                shown.append((row["running"], row["slots_by_kind"]["trio"]["used"]))
                page = await client.look("workers")
                figures = re.search(r"one ok slow \S+ (?:just now|\d+ m?s ago) .*? (\d+) trio (\d+) of", page)
                assert figures is not None, page
                shown.append((int(figures[1]), int(figures[2])))
                return shown[-3:] == [(4, 4)] * 3

            await until_async(all_run)
            assert [row for row in shown if row[0] != row[1]] == []
            may_end.set()


async def test_the_page_of_a_worker_has_the_figures_of_its_answer_not_of_its_report(
    url: str, app_name: str
) -> None:
    with closing(App(app_name, broker=url, metrics_interval=60)) as app:
        may_end = trio.Event()

        @app.task(name="stay", queue=QUEUE)
        async def stay() -> None:
            await may_end.wait()

        async with working(app, name="one", queues=[QUEUE]), looking_at(app) as client:
            await app.asend_many([app.tasks["stay"].s() for _ in range(4)])

            async def all_run() -> bool:
                (reply,) = await app.control.asend("stats", to="one")
                return bool(reply.ok and reply.answer["running"] == 4)

            await until_async(all_run)
            (worker,) = (await app.metrics.aoverview()).workers
            assert not worker.running
            page = await client.look("workers/one")
            assert re.search(r"Figures as it answers now .*Running 4 Slots .*trio 4 of", page), page
            may_end.set()


async def test_metrics_say_how_old_the_report_of_each_process_is_and_which_is_stale(
    url: str, app_name: str, redis_client: "redis.Redis"
) -> None:
    with closing(App(app_name, broker=url, metrics_interval=0.1)) as app:

        @app.task(name="pay", queue=QUEUE)
        async def pay() -> None: ...

        driver = await app.connections.get_async_driver()
        await driver.perform(queue_calls.register_queue(app.keys, QUEUE))
        for name in ("late:1", "new:1"):
            await driver.perform(lease_calls.join_queue(app.queue(QUEUE), name, lease=600))
        for name in ("late:1", "gone:1"):
            report = MetricsReport(
                f"host:{name}", "worker", 1, Measurements({}, {}), origin=ReportOrigin(name, 1.0)
            )
            await driver.perform(report_calls.send_report(app.keys, report.process, 1, report.pack()))
        async with working(app, name="one", queues=[QUEUE]), looking_at(app) as client:
            await app.tasks["pay"].adelay()
            shown: list[dict[str, tuple[bool, bool, bool]]] = []

            async def is_stale() -> bool:
                asked = (await client.ask("metrics:show")).get(QUEUE, {"processes": []})
                printed = json.loads(await trio.to_thread.run_sync(run_metrics, app, "--json"))
                shown[:] = [pick_reports(asked), *map(pick_reports, printed)]
                return [found.get("late") for found in shown] == [(True, True, True)] * 2

            await until_async(is_stale)
            text = await trio.to_thread.run_sync(run_metrics, app)
        expected = {"late": (True, True, True), "new": (False, True, False), "one": (True, True, False)}
        assert shown == [expected, expected]
        lines = {line.split()[0]: " ".join(line.split()) for line in text.splitlines() if "worker" in line}
        assert re.fullmatch(r"late worker \d+ s ago stale: its next report is overdue", lines["late"]), text
        assert re.fullmatch(r"gone worker \d+ s ago not live: these are its last figures", lines["gone"]), (
            text
        )
        assert re.fullmatch(r"one worker \d s ago", lines["one"]), text
        assert lines["new"] == "new worker no report yet", text
        redis_client.delete(app.queue(QUEUE).leases)


def run_metrics(app: App, *options: str) -> str:
    """What the command prints."""
    return CliRunner().invoke(metrics, ["show", *options], obj=Loaded(app)).output


def pick_reports(summary: dict[str, Any]) -> dict[str, tuple[bool, bool, bool]]:
    """Of each process of a queue whether it has reported, lives, and its report is stale."""
    return {
        row["name"]: (row["reported"] is not None, row["is_live"], row["is_stale"])
        for row in summary["processes"]
    }


class Loaded:
    """The target of a command that has this application."""

    def __init__(self, app: App) -> None:
        self._app = app

    def load(self) -> App:
        """Return the application."""
        return self._app
