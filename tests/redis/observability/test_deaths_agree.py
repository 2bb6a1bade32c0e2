"""A job that takes workers down is told of on every surface: how many, which, when, and that it was given up."""

import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from typing import Any

import pytest
import trio

from celery5 import App
from celery5.broker.calls.dead_letters import read_causes
from celery5.cli.top.sources import TopSources
from celery5.cli.top.tables import View
from tests.redis.commands.staff import Staff
from tests.redis.observability.surfaces import TARGET, Surfaces, find_queue, find_row, get
from tests.redis.observability.surfaces_app import SETTINGS, declare
from tests.redis.observability.test_surfaces_agree import Read, ask_all, show
from tests.redis.worker.workers import until_async

TASK, QUEUE = "crash", "deadly"
FIRED = "task crash"


@pytest.fixture
def deadly(url: str, app_name: str) -> Iterator[App]:
    """The application, with nothing on its queues."""
    with closing(declare(App(app_name, broker=url, **SETTINGS))) as app:
        yield app


async def kill_workers(app: App, staff: Staff, count: int) -> set[int]:
    """Have so many workers die of the job on the queue. Return their process ids."""
    command = [sys.executable, "-m", "celery5", "-A", TARGET, "worker", "start", "--queues", QUEUE]
    pids = set[int]()
    for _ in range(count):
        deaths = await count_deaths(app)
        worker = await trio.to_thread.run_sync(lambda: staff.launch(command, metrics_interval=0))

        async def is_recovered(before: int = deaths) -> bool:
            return await count_deaths(app) == before + 1

        await until_async(is_recovered)
        pids.add(worker.process.pid)
    return pids


async def count_deaths(app: App) -> int:
    """How many workers the job took down."""
    queues = (await app.ainfo()).queues
    return queues[QUEUE].deaths.get(TASK, 0)


def pick_words(text: str) -> tuple[int, int]:
    """The numbers of `4 workers died with its jobs, the last 3 s ago; 1 given up`."""
    found = re.search(
        r"(\d+) workers? died with (?:its jobs|jobs of (?:task )?\S+) ?, the last [^.;]*(?:; (\d+) (?:job )?given up)?",
        text,
    )
    assert found, text
    return int(found[1]), int(found[2] or 0)


def read_counts() -> dict[str, Read]:
    """How each surface is asked how many workers the jobs of the task took down, and how many were given up."""

    def pick(tasks: Iterable[Mapping[str, Any]]) -> tuple[int, int]:
        return next((task["deaths"], task["poisoned"]) for task in tasks if task["name"] == TASK)

    def pick_queue(queue: Mapping[str, Any]) -> tuple[int, int]:
        return queue["deaths"].get(TASK, 0), queue["poisoned"].get(TASK, 0)

    def pick_metrics(found: Mapping[str, float]) -> tuple[int, int]:
        labels = f'{{queue="{QUEUE}",task="{TASK}"}}'
        deaths, poisoned = (
            found.get(f"celery5_{name}{labels}") for name in ("worker_deaths", "jobs_poisoned")
        )
        return int(deaths or 0), int(poisoned or 0)

    return {
        "app.metrics.overview": lambda s: get(
            s.app.metrics.aoverview(),
            lambda shown: next((task.deaths, task.poisoned) for task in shown.tasks if task.name == TASK),
        ),
        "info --json": lambda s: get(s.run_json("info"), lambda info: pick_queue(info["queues"][QUEUE])),
        "top --json": lambda s: get(s.run_json("top"), lambda top: pick(top["tasks"])),
        "JSON API, top:show": lambda s: get(s.ask("top:show"), lambda top: pick(top["tasks"])),
        "JSON API, queue:list": lambda s: get(
            s.ask("queue:list"), lambda rows: pick_queue(find_queue(rows, QUEUE))
        ),
        "/metrics": lambda s: get(s.measure(), pick_metrics),
        "/metrics/cluster": lambda s: get(s.measure("/metrics/cluster"), pick_metrics),
        "alert list": lambda s: get(s.run("alert", "list"), pick_words),
        "JSON API, alert:list": lambda s: get(
            s.ask("alert:list"),
            lambda rows: pick_words(next(row["description"] for row in rows if row["subject"] == FIRED)),
        ),
        "overview page": lambda s: get(s.look(""), pick_words),
        "queue page": lambda s: get(s.look(f"queues/{QUEUE}"), pick_words),
    }


async def check_story(surfaces: Surfaces, job: str, workers: set[int]) -> None:
    """The story of the job names each worker that it took down, and when."""
    texts = {
        "task show": await surfaces.run("task", "show", job),
        "job page": await surfaces.look(f"jobs/{job}"),
    }
    for name, text in texts.items():
        assert [pid for pid in workers if f"vm:{pid}:" not in re.sub(r"\S+(?=:\d+:)", "vm", text)] == [], name
    for details in (await surfaces.run_json("task", "show", job), await surfaces.ask("task:show", id=job)):
        assert details["deliveries"] == len(workers)
        assert {int(detail["worker"].split(":")[-2]) for detail in details["deaths"]} == workers
        times = [detail["at"] for detail in details["deaths"]]
        assert times == sorted(times)
        assert times[0] > details["sent"]


async def test_the_first_worker_that_a_job_takes_down_is_told_of_everywhere(
    deadly: App, staff: Staff
) -> None:
    sent = await deadly.tasks[TASK].adelay()
    workers = await kill_workers(deadly, staff, 1)
    # It reads another queue, so the job lives on.
    surfaces = await show(deadly, staff, "crm", QUEUE, reads=["crm"], alert_worker_deaths=1)

    async def fires() -> bool:
        states = await deadly.alerts.alist()
        return [state.severity for state in states if (state.subject, state.status) == (FIRED, "firing")] == [
            "critical"
        ]

    await until_async(fires)
    table = {name: read for name, read in read_counts().items() if name != "/metrics"}
    await ask_all(surfaces, (1, 0), table)
    await check_story(surfaces, sent.id, workers)
    assert find_row(await surfaces.run("top", "--once"), TASK)[1] == "1"
    assert "1, the last" in await surfaces.look("tasks")
    await deadly.aempty(QUEUE)


async def test_a_poisoned_job_is_counted_by_task_and_by_cause_everywhere(deadly: App, staff: Staff) -> None:
    sent = await deadly.tasks[TASK].adelay()
    workers = await kill_workers(deadly, staff, 4)
    surfaces = await show(deadly, staff, QUEUE, alert_worker_deaths=1)

    async def fires() -> bool:
        states = await deadly.alerts.alist()
        return any(state.subject == FIRED and state.status == "firing" for state in states)

    await until_async(fires)
    await ask_all(surfaces, (4, 1), read_counts())
    await check_story(surfaces, sent.id, workers)
    shown = await surfaces.run("task", "show", sent.id)
    assert "4 workers died with it" in shown
    assert "0 ms" not in shown + await surfaces.look(f"jobs/{sent.id}")
    (group,) = (await deadly.dlq.agroups()).groups
    assert (group.task, group.type, group.count) == (TASK, "WorkerDied", 1)
    causes = await deadly.aperform(read_causes(deadly.queue(QUEUE)))
    assert {name: cause.dead for name, cause in causes.items()} == {group.id: 1}
    reading = await trio.to_thread.run_sync(lambda: TopSources(deadly, since=3600).read(View.DEAD, ""))
    assert [(dead_group.id, dead_group.count) for dead_group in reading.dead or ()] == [(group.id, 1)]
    assert json.dumps(await surfaces.ask("dlq:groups")).count(group.id) == 1
    await deadly.dlq.apurge()
