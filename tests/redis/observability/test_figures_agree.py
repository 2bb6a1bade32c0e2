"""The figures and texts of one row are of one age, and a task that fails has its last error everywhere."""

import re
from collections.abc import Iterator
from contextlib import closing

import pytest
import trio

from celery5 import App, RetryPolicy
from celery5.observability.overview import DEAD_READ
from celery5.protocol.observability.overview import Overview, WorkerOverview
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
