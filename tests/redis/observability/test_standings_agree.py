"""A frozen, a blocked and a killed worker are shown as such by every surface; one that ends in order is not."""

import os
import re
import signal
import socket
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import redis
import trio

from celery5 import App
from celery5.broker.calls import leases as lease_calls
from celery5.broker.calls import queues as queue_calls
from celery5.broker.keys import EVENTS
from celery5.protocol.observability.overview import IS_BACK, NO_REPORT_YET, LostWorker, select_unrepaired
from tests.redis.commands.staff import Employee, Staff
from tests.redis.observability.surfaces import TARGET, Surfaces, get
from tests.redis.observability.surfaces_app import SETTINGS, declare
from tests.redis.observability.test_surfaces_agree import Read, ask_all, show
from tests.redis.worker.workers import until, until_async

QUEUE = "frail"


@pytest.fixture
def frail(url: str, app_name: str) -> Iterator[App]:
    """The application, with nothing on its queues."""
    with closing(declare(App(app_name, broker=url, **SETTINGS))) as app:
        yield app


async def start(staff: Staff, *words: str) -> Employee:
    """Start a worker that reads the queue; its reports come as seldom as by default."""
    command = [sys.executable, "-m", "celery5", "-A", TARGET, *(words or ("worker", "start"))]
    command += [] if words else ["--queues", QUEUE]
    worker = await trio.to_thread.run_sync(lambda: staff.launch(command))

    async def works() -> bool:
        assert worker.process.poll() is None, worker.output.read_text()
        return bool(worker.lines("worker:started") or words)

    await until_async(works)
    return worker


async def begin(app: App, staff: Staff, task: str, *args: Any) -> str:
    """Send a job and wait until it has begun; return its id."""
    before = staff.history.stat().st_size
    sent = await app.tasks[task].adelay(*args)

    async def runs() -> bool:
        return staff.history.stat().st_size > before

    await until_async(runs)
    return sent.id


def name_of(worker: Employee) -> str:
    """The name of the inbox of a worker."""
    return f"{socket.gethostname()}:{worker.process.pid}"


async def until_lost(app: App) -> LostWorker:
    """The worker that was lost, once one is."""
    found: list[LostWorker] = []

    async def is_lost() -> bool:
        found[:] = (await app.metrics.aworkers()).lost
        return bool(found)

    await until_async(is_lost)
    (lost,) = found
    return lost


async def until_fires(app: App, *subjects: str) -> None:
    """Wait until the rule has fired for these, and for nothing else."""

    async def fires() -> bool:
        states = await app.alerts.alist()
        return {state.subject for state in states if state.name == "worker-lost" and state.fires} == set(
            subjects
        )

    await until_async(fires)


def read_lost() -> dict[str, Read]:
    """How each surface is asked which workers were lost."""

    def pick(lost: Iterable[Mapping[str, Any]]) -> list[str]:
        return [process["name"] for process in lost]

    def find(text: str) -> list[str]:
        """The names in a text before or after the word."""
        names = re.findall(r"(\S+:\d+)(?::[\w-]+)? (?:\(worker\) )?(?:was )?lost ", " ".join(text.split()))
        return sorted(set(names))

    return {
        "app.metrics.workers": lambda s: get(
            s.app.metrics.aworkers(), lambda found: [process.name for process in found.lost]
        ),
        "app.metrics.overview": lambda s: get(
            s.app.metrics.aoverview(), lambda shown: [process.name for process in shown.lost]
        ),
        "worker list": lambda s: get(s.run("worker", "list", "--timeout", "1"), find),
        "worker list --json": lambda s: get(
            s.run_json("worker", "list", "--timeout", "1"),
            lambda rows: [row["worker"] for row in rows if row["state"] == "lost"],
        ),
        "info": lambda s: get(s.run("info"), find),
        "info --json": lambda s: get(s.run_json("info"), lambda info: pick(info["lost"])),
        "top --json": lambda s: get(s.run_json("top"), lambda top: pick(top["lost"])),
        "top --once": lambda s: get(
            s.run("top", "--once"),
            lambda text: [
                line.split()[0]
                for line in text.splitlines()
                if " lost " in line[3:] and ":" in line.split()[0]
            ],
        ),
        "JSON API, top:show": lambda s: get(s.ask("top:show"), lambda top: pick(top["lost"])),
        "JSON API, doctor:run": lambda s: get(
            s.ask("doctor:run"),
            lambda found: find(
                next(finding["summary"] for finding in found if finding["check"] == "workers")
            ),
        ),
        "JSON API, alert:list": lambda s: get(
            s.ask("alert:list"),
            lambda rows: [
                row["subject"].split()[1] for row in rows if row["name"] == "worker-lost" and row["subject"]
            ],
        ),
        "overview page": lambda s: get(s.look(""), find),
        "workers page": lambda s: get(s.look("workers"), find),
    }


def read_metrics() -> dict[str, Read]:
    """How the metrics are asked how many workers of the queue were lost."""
    name = f'celery5_queue_workers_lost{{queue="{QUEUE}"}}'
    return {
        "/metrics/cluster": lambda s: get(s.measure("/metrics/cluster"), lambda found: found.get(name)),
        "measured": lambda s: get(
            s.app.aperform(queue_calls.get_queue_depth(s.app.queue(QUEUE))), lambda depth: depth.lost
        ),
    }


async def check_held(surfaces: Surfaces, lost: LostWorker, words: str) -> None:
    """Every surface that has words says what the worker held and what became of that."""
    texts = {
        "worker list": await surfaces.run("worker", "list", "--timeout", "1"),
        "info": await surfaces.run("info"),
        "top": await surfaces.run("top", "--once"),
        "overview": await surfaces.look(""),
    }
    assert {name: words in text for name, text in texts.items()} == dict.fromkeys(texts, True), texts
    for path in ("workers", f"workers/{lost.name}"):
        text = await surfaces.look(path)
        assert lost.worker in text
        assert re.search(r"lost (just now|\d)", text), text


async def test_a_killed_worker_is_lost_everywhere_with_what_it_held(
    frail: App, staff: Staff, redis_client: "redis.Redis"
) -> None:
    worker = await start(staff)
    job = await begin(frail, staff, "linger")
    worker.signal(signal.SIGKILL)
    lost = await until_lost(frail)
    assert (lost.put_back, lost.held, lost.queues) == (1, 0, (QUEUE,))
    assert [(lost_job.id, lost_job.task, lost_job.fate) for lost_job in lost.jobs] == [
        (job, "linger", "put back")
    ]
    surfaces = await show(frail, staff, "crm", QUEUE, reads=["crm"], alert_worker_lost=600)
    await until_fires(frail, f"worker {name_of(worker)}")
    await ask_all(surfaces, [name_of(worker)], read_lost())
    await ask_all(surfaces, 1, read_metrics())
    await check_held(surfaces, lost, "1 job put back")
    assert job in await surfaces.look("workers")
    keys = frail.queue(QUEUE)
    for key in (keys.lost_workers, keys.lost_work):
        assert 0 < redis_client.ttl(key) <= 3600
    await frail.aempty(QUEUE)


async def test_frozen_worker_is_lost_on_all_surfaces_after_its_lease(frail: App, staff: Staff) -> None:
    worker = await start(staff)
    await begin(frail, staff, "linger")
    worker.signal(signal.SIGSTOP)
    lost = await until_lost(frail)
    assert (lost.name, lost.held, lost.is_back) == (name_of(worker), 1, False)
    surfaces = await show(frail, staff, "crm", QUEUE, reads=["crm"], alert_worker_lost=600)
    await until_fires(frail, f"worker {name_of(worker)}")
    await ask_all(surfaces, [name_of(worker)], read_lost())
    await ask_all(surfaces, 1, read_metrics())
    await check_held(surfaces, lost, "1 job not put back yet")
    other = await start(staff)  # it puts the job back, and runs it

    async def is_recovered() -> bool:
        return [(process.held, process.put_back) for process in (await frail.metrics.aworkers()).lost] == [
            (0, 1)
        ]

    await until_async(is_recovered)
    worker.signal(signal.SIGCONT)

    async def is_back() -> bool:
        found = await frail.metrics.aworkers()
        return [process.is_back for process in found.lost] == [True] and len(found.workers) == 3

    await until_async(is_back)
    assert other.process.poll() is None


async def test_a_worker_whose_loop_is_blocked_is_silent_everywhere_and_not_lost(
    frail: App, staff: Staff
) -> None:
    worker = await start(staff)
    surfaces = await show(
        frail,
        staff,
        "crm",
        QUEUE,
        reads=["crm"],
        alert_worker_lost=600,
        alert_loop_lag=1,
        metrics_interval=0.1,
    )
    await begin(frail, staff, "stick", 120.0)

    async def is_silent() -> bool:
        found = (await frail.metrics.aworkers()).workers
        return [row.standing for row in found if row.name == name_of(worker)] == ["silent"]

    await until_async(is_silent, within=60)
    texts = {
        "worker list": await surfaces.run("worker", "list", "--timeout", "1"),
        "info": await surfaces.run("info"),
        "top --once": await surfaces.run("top", "--once"),
        "top --json": str(await surfaces.run_json("top")),
        "top:show": str(await surfaces.ask("top:show")),
        "doctor:run": str(await surfaces.ask("doctor:run")),
        "overview page": await surfaces.look(""),
        "workers page": await surfaces.look("workers"),
        "worker page": await surfaces.look(f"workers/{name_of(worker)}"),
    }
    said = {
        name: bool(re.search(r"silent for \d+ s: its event loop is blocked", text))
        for name, text in texts.items()
    }
    assert said == dict.fromkeys(texts, True), texts
    await ask_all(
        surfaces, [], {name: read for name, read in read_lost().items() if name != "JSON API, alert:list"}
    )
    silent = 'celery5_queue_workers_silent{queue="frail"}'

    async def is_told_of() -> bool:
        alerts = {alert.subject: alert for alert in await frail.alerts.alist() if alert.name == "loop-lag"}
        found = await surfaces.measure("/metrics/cluster")
        return f"worker {name_of(worker)}" in alerts and found.get(silent) == 1

    await until_async(is_told_of, within=60)
    worker.signal(signal.SIGKILL)


async def test_a_killed_scheduler_and_router_are_lost_and_fire_the_alert(frail: App, staff: Staff) -> None:
    killed = [await start(staff, "scheduler", "start"), await start(staff, "router", "start")]

    async def live() -> bool:
        state = await frail.ainfo()
        return bool(state.schedulers and state.routers)

    await until_async(live)
    for process in killed:
        process.signal(signal.SIGKILL)

    async def are_lost() -> bool:
        return {lost_process.kind for lost_process in (await frail.metrics.aworkers()).lost} == {
            "scheduler",
            "router",
        }

    await until_async(are_lost)
    surfaces = await show(frail, staff, "crm", alert_worker_lost=600)
    names = [
        f"{kind} {name_of(process)}" for kind, process in zip(("scheduler", "router"), killed, strict=True)
    ]
    await until_fires(frail, *names)
    for name, read in read_lost().items():
        if name != "JSON API, doctor:run":  # it names one, and how many more there are
            assert sorted(await read(surfaces)) == sorted(map(name_of, killed)), name
    assert "2 lost in the last hour" in str(await surfaces.ask("doctor:run"))
    await start(staff, "scheduler", "start")

    async def scheduler_has_successor() -> bool:
        lost = {process.kind for process in select_unrepaired((await frail.metrics.aworkers()).lost)}
        return lost == {"router"}

    await until_async(scheduler_has_successor)
    await until_fires(frail, names[1])  # at once


async def test_lost_worker_that_is_back_and_held_no_jobs_is_counted_in_one_line(
    frail: App, staff: Staff
) -> None:
    words = ("worker", "start", "--queues", QUEUE, "--name", "till")

    async def is_live() -> bool:
        return [worker.name for worker in (await frail.metrics.aworkers()).workers] == ["till"]

    first = await start(staff, *words)
    await until_async(is_live)
    first.signal(signal.SIGKILL)
    await until_lost(frail)
    await start(staff, *words)
    await until_async(is_live)
    surfaces = Surfaces(frail)
    texts = [await surfaces.run("info"), await surfaces.look("")]
    assert ["ost in the last hour: 1, repaired" in text for text in texts] == [True, True], texts
    assert [IS_BACK in text for text in texts] == [False, False], texts
    assert "nothing needs attention" in await surfaces.run("top", "--once")
    assert "lost in the last hour" not in str(await surfaces.ask("doctor:run"))
    assert "till" in await surfaces.run("worker", "list", "--timeout", "1")


async def check_repaired(surfaces: Surfaces, name: str) -> None:
    """Every surface says of the one loss that it is repaired, or nothing."""
    assert "1, repaired" in await surfaces.run("info")
    top = await surfaces.ask("top:show")
    assert [process["is_repaired"] for process in top["lost"]] == [True]
    assert top["totals"]["lost"] == 0
    assert [process["is_repaired"] for process in (await surfaces.run_json("info"))["lost"]] == [True]
    assert "lost in the last hour" not in str(await surfaces.ask("doctor:run"))
    assert "not repaired" not in await surfaces.look("")
    rows = await surfaces.run_json("worker", "list", "--timeout", "1")
    assert [row["state"] for row in rows if row["worker"] == name] == ["repaired"]


@pytest.mark.parametrize("kind", ["worker", "router", "scheduler"])
async def test_repaired_loss_stays_repaired_when_its_successor_leaves(
    frail: App, staff: Staff, redis_client: "redis.Redis", kind: str
) -> None:
    words = (kind, "start", "--name", "till", *(("--queues", QUEUE) if kind == "worker" else ()))

    async def has_live(count: int) -> bool:
        state = await frail.ainfo()
        live = {"worker": state.workers, "router": state.routers, "scheduler": state.schedulers}[kind]
        return sum("till:" in str(process) for process in live) == count

    async def has_losses(*are_repaired: bool) -> bool:
        return [process.is_repaired for process in (await frail.metrics.aworkers()).lost] == list(
            are_repaired
        )

    async def has_noted(key: str) -> bool:
        return redis_client.zcard(key) == 1

    first = await start(staff, *words)
    await until_async(lambda: has_live(1))
    first.signal(signal.SIGKILL)
    assert not (await until_lost(frail)).is_repaired
    second = await start(staff, *words)
    await until_async(lambda: has_live(1))
    await until_async(lambda: has_losses(True))
    if kind != "scheduler":
        key = frail.keys.for_queue(QUEUE if kind == "worker" else EVENTS).lost_workers
        await until_async(lambda: has_noted(key))
    second.signal(signal.SIGTERM)
    assert await trio.to_thread.run_sync(second.wait) == 0
    await until_async(lambda: has_live(0))

    # Nothing of that name is up, as in a deploy.
    queues = ("crm", QUEUE) if kind == "worker" else ("crm",)
    surfaces = await show(frail, staff, *queues, reads=["crm"], alert_worker_lost=600, alert_worker_deaths=1)
    lost = [(process.worker, process.is_repaired) for process in (await frail.metrics.aworkers()).lost]
    assert [is_repaired for _, is_repaired in lost] == [True], (lost, second.output.read_text()[-3000:])
    assert [state.name for state in await frail.alerts.alist() if state.status != "inactive"] == []
    await check_repaired(surfaces, "till")

    # The next death of that name is another loss.
    third = await start(staff, *words)
    await until_async(lambda: has_live(1))
    third.signal(signal.SIGKILL)
    await until_async(lambda: has_losses(False, True))
    assert (await surfaces.look_again().ask("top:show"))["totals"]["lost"] == 1


async def test_worker_that_has_made_no_report_yet_needs_no_person(frail: App) -> None:
    await frail.aperform(queue_calls.register_queue(frail.keys, QUEUE))
    await frail.aperform(lease_calls.join_queue(frail.queue(QUEUE), "till:new", lease=60))
    (worker,) = (await frail.metrics.aworkers()).workers
    assert (worker.health, worker.needs_attention) == (NO_REPORT_YET, False)
    surfaces = Surfaces(frail)
    assert f"Worker till : {NO_REPORT_YET}" not in await surfaces.look("")
    assert "nothing needs attention" in await surfaces.run("top", "--once")


async def test_how_a_process_stands_is_one_word_in_json_and_health_says_more(
    frail: App, staff: Staff
) -> None:
    worker = await start(staff)
    worker.signal(signal.SIGKILL)
    await until_lost(frail)
    surfaces = await show(frail, staff, "crm")
    found = {
        "worker list": await surfaces.run_json("worker", "list", "--timeout", "1"),
        "info": (await surfaces.run_json("info"))["lost"],
        "top": [*(top := await surfaces.run_json("top"))["workers"], *top["lost"]],
        "top:show": [*(top := await surfaces.ask("top:show"))["workers"], *top["lost"]],
    }
    for name, rows in found.items():
        words = {row["standing"]: row["health"] for row in rows}
        assert set(words) <= {"working", "lost"}, name
        assert words["lost"].startswith("lost "), name
    assert {row["state"] for row in found["worker list"]} == {"working", "lost"}


async def test_a_worker_that_ends_in_order_is_not_lost(frail: App, staff: Staff) -> None:
    worker = await start(staff)
    await begin(frail, staff, "linger")
    worker.signal(signal.SIGTERM)
    await until(lambda: bool(worker.lines("process:stop-requested")))
    worker.signal(signal.SIGTERM)  # at once, though a job runs
    await trio.to_thread.run_sync(lambda: worker.wait(60))
    found = await frail.metrics.aworkers()
    assert found.lost == (), worker.output.read_text()
    overview = await frail.metrics.aoverview()
    assert [task for task in overview.tasks if task.deaths] == []  # no job has taken it down
    surfaces = await show(frail, staff, "crm", QUEUE, reads=["crm"], alert_worker_lost=600)
    await ask_all(surfaces, [], read_lost())
    await ask_all(surfaces, 0, read_metrics())
    await frail.aempty(QUEUE)


async def test_loss_that_a_controller_has_repaired_is_shown_as_history_only(
    frail: App, staff: Staff, tmp_path: Path
) -> None:
    description = tmp_path / "cluster.toml"
    description.write_text(f'[workers.frail]\ncount = 1\nqueues = ["{QUEUE}"]\n')
    controller = await start(staff, "controller", "start", "--cluster", str(description))
    await begin(frail, staff, "linger")
    (name,) = (worker.name for worker in (await frail.metrics.aworkers()).workers)
    (reply,) = await frail.control.asend("stats", to=[name])
    pid = reply.answer["process"]["pid"]
    os.kill(pid, signal.SIGKILL)
    lost = await until_lost(frail)
    assert lost.name == name

    async def is_repaired() -> bool:
        found = (await frail.metrics.aworkers()).lost
        return [process.is_repaired for process in found] == [True] and "started again" in found[0].controller

    await until_async(is_repaired)
    surfaces = await show(
        frail, staff, "crm", QUEUE, reads=["crm"], alert_worker_lost=600, alert_worker_deaths=1
    )
    assert [state.name for state in await frail.alerts.alist() if state.status != "inactive"] == []
    history = "lost in the last hour: 1, repaired"
    now = {
        "info": await surfaces.run("info"),
        "top": await surfaces.run("top", "--once"),
        "doctor": str(await surfaces.ask("doctor:run")),
        "overview page": await surfaces.look(""),
    }
    for surface, text in now.items():
        found = re.search(rf"SIGKILL|started again|\b{pid}\b|died with|worker-lost", text)
        assert found is None, (surface, text)
    shown = {surface for surface, text in now.items() if history in text.lower()}
    assert shown == {"info", "overview page", "top"}
    top = await surfaces.ask("top:show")
    assert [(process["is_repaired"], process["name"]) for process in top["lost"]] == [(True, name)]
    assert (top["totals"]["lost"], [task["kills"] for task in top["tasks"]]) == (0, [""])
    for text in (
        await surfaces.run("worker", "list", "--timeout", "1"),
        await surfaces.look("workers"),
        await surfaces.look(f"workers/{name}"),
    ):
        assert "repaired" in text
        assert "SIGKILL; started again" in text
        assert "process " + str(pid) not in text
    controller.signal(signal.SIGTERM)
