"""Every surface says the same of one cluster: each fact is a row, with how each surface is asked for it."""

import json
import re
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any

import pytest
import redis
import trio

from celery5 import App
from celery5.broker.call import Call
from celery5.broker.calls import leases as lease_calls
from celery5.broker.calls import queues as queue_calls
from celery5.broker.servers.embedded import EmbeddedServer
from celery5.health import BreakerPolicy
from celery5.observability import failures, worker_lost
from celery5.protocol.health.breaker import Mode
from tests.redis.commands.staff import Staff
from tests.redis.dashboard.client import looking_at
from tests.redis.observability.alerted import QUICK, Receiver
from tests.redis.observability.surfaces import TARGET, Surfaces, find_queue, find_row
from tests.redis.observability.surfaces_app import SETTINGS, declare
from tests.redis.worker.workers import until_async, working
from tests.trio.health.test_status_port import free_port

Read = Callable[[Surfaces], Awaitable[Any]]
"""How a surface is asked for a fact."""
MEASURED_EVERY = 60 + 15
"""Seconds by which the age in `/metrics/cluster` may be older: queues are measured once a minute."""
HELD = 7
"""Jobs of each queue that a limit holds."""


@pytest.fixture
def seeded(url: str, app_name: str) -> Iterator[App]:
    """The application, with nothing on its queues."""
    with closing(declare(App(app_name, broker=url, **SETTINGS))) as app:
        yield app


async def show(app: App, staff: Staff, *queues: str, reads: Sequence[str] = (), **settings: Any) -> Surfaces:
    """Start a worker whose reports are rolled up ten times a second; return what shows the application.

    It reads `reads`, by default `queues`, all of which have been measured then.
    """
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "celery5",
        "-A",
        TARGET,
        "worker",
        "start",
        "--queues",
        ",".join(reads or queues),
    ]
    start = partial(staff.launch, command, status_port=port, **{**QUICK, **settings})
    worker = await trio.to_thread.run_sync(start)
    surfaces = Surfaces(app, port)

    async def is_measured() -> bool:
        assert worker.process.poll() is None, worker.output.read_text()
        if not worker.lines("worker:started"):
            return False
        own, cluster = await surfaces.measure(), await surfaces.measure("/metrics/cluster")
        names = [f'celery5_queue_depth{{queue="{queue}"}}' for queue in queues]
        return all(name in cluster and (reads or name in own) for name in names)

    await until_async(is_measured)
    return surfaces.look_again()


async def show_by(kind: str, app: App, staff: Staff) -> Surfaces:
    """Start a Router or a Scheduler; return what shows the application, once it has measured queues."""
    port = free_port()
    command = [sys.executable, "-m", "celery5", "-A", TARGET, kind, "start"]
    start = partial(staff.launch, command, status_port=port, **QUICK)
    process = await trio.to_thread.run_sync(start)
    surfaces = Surfaces(app, port)

    async def is_measured() -> bool:
        assert process.process.poll() is None, process.output.read_text()
        try:
            return any(name.startswith("celery5_queue_depth") for name in await surfaces.measure())
        except OSError:
            return False

    await until_async(is_measured)
    return surfaces


async def ask_all(surfaces: Surfaces, expected: Any, table: Mapping[str, Read]) -> None:
    """Ask every surface for one fact."""
    answers = {name: await read(surfaces) for name, read in table.items()}
    assert answers == dict.fromkeys(table, expected)


def read_backlog(queue: str) -> dict[str, Read]:
    """How each surface is asked for the backlog of a queue."""
    label = f'{{queue="{queue}"}}'

    async def read_alert(surfaces: Surfaces) -> Any:
        return int((await surfaces.app.metrics.ahistory(queue))[-1].depth)

    return {
        "app.info": lambda s: _get(s.app.ainfo(), lambda state: state.queues[queue].backlog),
        "app.metrics.overview": lambda s: _get(
            s.app.metrics.aoverview(),
            lambda shown: next(candidate.backlog for candidate in shown.queues if candidate.name == queue),
        ),
        "app.metrics.history": read_alert,
        "queue list": lambda s: _get(s.run("queue", "list"), lambda out: int(find_row(out, queue)[1])),
        "queue list --json": lambda s: _get(
            s.run_json("queue", "list"), lambda rows: find_queue(rows, queue)["backlog"]
        ),
        "top --once": lambda s: _get(s.run("top", "--once"), lambda out: int(find_row(out, queue)[1])),
        "top --json": lambda s: _get(
            s.run_json("top"), lambda top: find_queue(top["queues"], queue)["backlog"]
        ),
        "info --json": lambda s: _get(
            s.run_json("info"), lambda info: find_queue(list(info["queues"].values()), queue)["backlog"]
        ),
        "JSON API, queue:list": lambda s: _get(
            s.ask("queue:list"), lambda rows: find_queue(rows, queue)["backlog"]
        ),
        "JSON API, top:show": lambda s: _get(
            s.ask("top:show"), lambda top: find_queue(top["queues"], queue)["backlog"]
        ),
        "JSON API, metrics:history": lambda s: _get(
            s.ask("metrics:history", queue=queue), lambda points: int(points[-1]["depth"])
        ),
        "/metrics": lambda s: _get(s.measure(), lambda found: found.get(f"celery5_queue_depth{label}")),
        "/metrics/cluster": lambda s: _get(
            s.measure("/metrics/cluster"), lambda found: found.get(f"celery5_queue_depth{label}")
        ),
        "page of the queue": lambda s: _get(
            s.look(f"queues/{queue}"), lambda text: _number_of(text, "Backlog")
        ),
    }


def read_running(queue: str) -> dict[str, Read]:
    """How each surface is asked how many jobs of a queue workers have."""
    return {
        "app.info": lambda s: _get(s.app.ainfo(), lambda state: state.queues[queue].running),
        "app.metrics.overview": lambda s: _get(
            s.app.metrics.aoverview(),
            lambda shown: next(candidate.running for candidate in shown.queues if candidate.name == queue),
        ),
        "measured": lambda s: _get(
            s.app.aperform(queue_calls.get_queue_depth(s.app.queue(queue))), lambda depth: depth.running
        ),
        "queue list --json": lambda s: _get(
            s.run_json("queue", "list"), lambda rows: find_queue(rows, queue)["running"]
        ),
        "top --json": lambda s: _get(
            s.run_json("top"), lambda top: find_queue(top["queues"], queue)["running"]
        ),
        "info --json": lambda s: _get(
            s.run_json("info"), lambda info: find_queue(list(info["queues"].values()), queue)["running"]
        ),
        "JSON API, queue:list": lambda s: _get(
            s.ask("queue:list"), lambda rows: find_queue(rows, queue)["running"]
        ),
        "JSON API, top:show": lambda s: _get(
            s.ask("top:show"), lambda top: find_queue(top["queues"], queue)["running"]
        ),
    }


async def _get(answer: Awaitable[Any], pick: Callable[[Any], Any]) -> Any:
    return pick(await answer)


def _number_of(text: str, name: str) -> int:
    """The number after the first such word of a page."""
    return int(text.partition(f"{name} ")[2].split()[0])


async def until_held(app: App, **counts: int) -> None:
    """Wait until limits hold so many jobs of these queues."""

    async def are_held() -> bool:
        queues = (await app.ainfo()).queues
        return all(queues[name].held == count for name, count in counts.items())

    await until_async(are_held)


async def send_held(app: App) -> None:
    """Have jobs held by a suspension, a rate, and a limit per key."""
    await app.limits.asuspend("push")
    await app.asend_many([app.tasks["push"].s() for _ in range(HELD)])
    await app.asend_many([app.tasks["crawl"].s() for _ in range(HELD + 1)])
    await app.asend_many([app.tasks["sync"].s("a") for _ in range(HELD + 1)])


QUEUES = ("crm", "web", "keyed")


async def test_held_jobs_are_backlog_on_every_surface_with_their_age(seeded: App, staff: Staff) -> None:
    seeded.configure(metrics_interval=0)
    await send_held(seeded)
    async with working(seeded, queues=QUEUES, name="first"):
        await until_held(seeded, crm=HELD, web=HELD, keyed=HELD)
        surfaces = await show(seeded, staff, *QUEUES)
        for queue in QUEUES:
            await ask_all(surfaces, HELD, read_backlog(queue))
        await ask_all(surfaces, 1, read_running("keyed"))
        ages = await read_ages(surfaces)
        assert min(ages.values()) > 0, ages
        assert max(ages.values()) - min(ages.values()) < MEASURED_EVERY, ages
        await check_alerts(seeded)
        await check_words(surfaces)
    await seeded.limits.aresume("push")


async def test_arguments_of_a_held_job_read_alike_everywhere(seeded: App) -> None:
    call = 'site="a", depth=2, "x", "y"'
    results = await seeded.asend_many([seeded.tasks["crawl"].s("a", 2, "x", "y") for _ in range(2)])
    surfaces = Surfaces(seeded)
    async with working(seeded, queues=["web"], name="first"):
        await until_held(seeded, web=1)
        (held,) = [result for result in results if (await result.astatus()).value == "HELD"]
        texts = {
            "task search": await surfaces.run("task", "search", "--state", "HELD"),
            "task show": await surfaces.run("task", "show", held.id),
            "jobs page": await surfaces.look(f"jobs?id={held.id}"),
            # A line for each, which `look` joins.
            "job page": (await surfaces.look(f"jobs/{held.id}")).replace(
                ' depth=2 "x" "y"', ', depth=2, "x", "y"'
            ),
        }
    assert [name for name, text in texts.items() if call not in text] == [], texts


async def read_ages(surfaces: Surfaces) -> dict[str, float]:
    """The age of the oldest job of each queue, wherever it is shown as a number of seconds."""
    info, shown = (await surfaces.app.ainfo()).queues, await surfaces.app.metrics.aoverview()
    listed, metrics = await surfaces.run_json("queue", "list"), await surfaces.measure()
    cluster, found = await surfaces.measure("/metrics/cluster"), dict[str, float]()
    for queue in QUEUES:
        gauge = f'celery5_queue_oldest_seconds{{queue="{queue}"}}'
        found |= {
            f"{queue}: info": info[queue].oldest_waiting or 0.0,
            f"{queue}: overview": next(
                candidate.oldest or 0.0 for candidate in shown.queues if candidate.name == queue
            ),
            f"{queue}: queue list": find_queue(listed, queue)["oldest"] or 0.0,
            f"{queue}: metrics": metrics[gauge],
            f"{queue}: cluster": cluster[gauge],
        }
    return found


async def check_alerts(app: App) -> None:
    """The alert on the oldest job fires for each queue, and says what holds it."""

    async def fires() -> bool:
        states = {alert.subject: alert for alert in await app.alerts.alist() if alert.status == "firing"}
        return {f"queue {queue}" for queue in QUEUES} <= states.keys() and all(
            HOLDS[queue] in states[f"queue {queue}"].description for queue in QUEUES
        )

    await until_async(fires)


HOLDS = {"crm": "push is suspended", "web": "rate 1/h of crawl", "keyed": "limit 1 per key of sync"}
"""What holds the jobs of each queue."""


async def check_words(surfaces: Surfaces) -> None:
    """What holds the jobs stands on every surface that has words."""
    texts = {
        "queue list": await surfaces.run("queue", "list"),
        "top --once": await surfaces.run("top", "--once"),
        "top --json": await surfaces.run("top", "--json"),
        "queues page": await surfaces.look("queues"),
        "limits page": await surfaces.look("limits"),
    }
    for name, text in texts.items():
        assert [holds for holds in HOLDS.values() if holds not in text] == [], name
    for queue, holds in HOLDS.items():
        assert holds in await surfaces.look(f"queues/{queue}")


async def test_an_overdue_job_of_a_queue_without_workers_is_backlog_on_every_surface(
    seeded: App, staff: Staff
) -> None:
    await seeded.asend_many([seeded.tasks["mail"].options(countdown=0.05).s() for _ in range(3)])
    await seeded.tasks["mail"].options(countdown=3600).adelay()
    await trio.sleep(0.1)  # their time has come
    surfaces = await show(seeded, staff, "nobody", reads=["crm"])
    # This worker measures only the queues that it reads.
    table = {name: read for name, read in read_backlog("nobody").items() if name != "/metrics"}
    await ask_all(surfaces, 3, table)
    shown = await seeded.metrics.aoverview()
    (queue,) = (candidate for candidate in shown.queues if candidate.name == "nobody")
    assert (queue.waiting, queue.scheduled, queue.verdict.condition) == (0, 4, "unserved")
    assert queue.oldest is not None
    assert queue.oldest > 0.0

    async def fires() -> bool:
        states = await seeded.alerts.alist()
        return [
            state.value for state in states if (state.name, state.subject) == ("unread", "queue nobody")
        ] == [3]

    await until_async(fires)


async def test_a_queue_is_said_to_stand_still_everywhere_until_the_first_attempt_has_ended(
    seeded: App, staff: Staff
) -> None:
    keys, driver = seeded.queue("nobody"), await seeded.connections.get_async_driver()
    await seeded.asend_many([seeded.tasks["mail"].options(countdown=3600).s() for _ in range(3)])
    for job in await driver.perform(Call(("ZRANGE", keys.due, 0, -1), list, repeatable=True)):
        await driver.perform(Call(("ZADD", keys.due, (time.time() - 1200) * 1000, job), int, repeatable=True))
    await driver.perform(lease_calls.join_queue(keys, "frozen", lease=600.0))
    await note_end(seeded, ago=1055)
    surfaces = await show(seeded, staff, "nobody", reads=["crm"])
    await ask_all(surfaces, "nothing ends, 18 min", read_verdict("nobody"))
    found = await surfaces.measure("/metrics/cluster")
    assert 1055 <= found['celery5_queue_idle_seconds{queue="nobody"}'] < 1140

    async def alert_says(words: str) -> bool:
        states = {(alert.name, alert.subject): alert for alert in await seeded.alerts.alist()}
        return words in states["old", "queue nobody"].description

    await until_async(partial(alert_says, "; nothing ends, 18 min"))
    await note_end(seeded, ago=0)

    async def is_measured() -> bool:
        flow = (await seeded.ainfo("nobody")).queues["nobody"].flow
        return flow is not None and flow.outgoing > 0

    await until_async(is_measured)
    verdict = (await seeded.ainfo("nobody")).queues["nobody"].verdict.text
    assert "nothing ends" not in verdict
    words = next(word for word in VERDICTS if word in verdict)
    await ask_all(surfaces.look_again(), words, read_verdict("nobody"))
    await until_async(partial(alert_says, " in, "))
    await driver.perform(lease_calls.leave_queue(keys, "frozen"))
    await seeded.aempty("nobody")


async def note_end(app: App, *, ago: float) -> None:
    """Note that another attempt has ended on a queue, so many seconds ago, as a worker does."""
    driver, key = await app.connections.get_async_driver(), app.queue("nobody").flow
    before = await driver.perform(Call(("HGET", key, "ended"), lambda raw: int(raw or 0), repeatable=True))
    at = (time.time() - ago) * 1000
    words = ("HSET", key, "ended", before + 1000, "at", f"{at:.0f}", "since", f"{at - 1e7:.0f}")
    await driver.perform(Call(words, int, repeatable=True))
    await driver.perform(Call(("EXPIRE", key, 3600), int, repeatable=True))


def read_verdict(queue: str) -> dict[str, Read]:
    """How each surface is asked whether a queue keeps up."""

    def find(text: str) -> str:
        return next((word for word in VERDICTS if word in text), text)

    def find_in_row(text: str) -> str:
        return find(" ".join(find_row(text, queue)))

    return {
        "app.info": lambda s: _get(s.app.ainfo(), lambda state: find(state.queues[queue].verdict.text)),
        "app.metrics.overview": lambda s: _get(
            s.app.metrics.aoverview(),
            lambda shown: find(
                next(candidate.verdict.text for candidate in shown.queues if candidate.name == queue)
            ),
        ),
        "queue list": lambda s: _get(s.run("queue", "list"), find_in_row),
        "queue list --json": lambda s: _get(
            s.run_json("queue", "list"), lambda rows: find(find_queue(rows, queue)["verdict"]["text"])
        ),
        "top --once": lambda s: _get(s.run("top", "--once"), find_in_row),
        "top --json": lambda s: _get(
            s.run_json("top"), lambda top: find(find_queue(top["queues"], queue)["verdict"]["text"])
        ),
        "info": lambda s: _get(s.run("info"), find_in_row),
        "info --json": lambda s: _get(
            s.run_json("info"),
            lambda info: find(find_queue(list(info["queues"].values()), queue)["verdict"]["text"]),
        ),
        "JSON API, queue:list": lambda s: _get(
            s.ask("queue:list"), lambda rows: find(find_queue(rows, queue)["verdict"]["text"])
        ),
        "JSON API, top:show": lambda s: _get(
            s.ask("top:show"), lambda top: find(find_queue(top["queues"], queue)["verdict"]["text"])
        ),
        "page of the queues": lambda s: _get(s.look("queues"), find),
        "page of the queue": lambda s: _get(s.look(f"queues/{queue}"), find),
    }


VERDICTS = ("nothing ends, 18 min", "steady", "empties in", "grows by")
"""What is looked for in a text that says more."""


@pytest.mark.parametrize("kind", ["router", "scheduler"])
async def test_a_queue_that_no_worker_reads_is_measured_by_routers_and_schedulers(
    seeded: App, staff: Staff, kind: str
) -> None:
    await seeded.asend_many([seeded.tasks["mail"].s() for _ in range(3)])
    async with working(seeded, queues=["crm"]):
        await seeded.asend_many([seeded.tasks["push"].s()])
        surfaces = await show_by(kind, seeded, staff)
        found = await surfaces.measure()
        shown = {queue.name: queue.workers for queue in (await seeded.metrics.aoverview()).queues}
        listed = {row["queue"]: row["workers"] for row in await surfaces.run_json("queue", "list")}
        metrics = {queue: found[f'celery5_queue_workers{{queue="{queue}"}}'] for queue in ("nobody", "crm")}
        assert metrics == shown == listed == {"nobody": 0, "crm": 1}
        assert found['celery5_queue_depth{queue="nobody"}'] == 3
    await seeded.aempty("nobody")


@pytest.mark.parametrize(("mode", "is_red"), [("watch", False), ("delay", True)])
async def test_a_breaker_is_red_where_it_holds_jobs_back_and_not_where_it_only_watches(
    app: App, mode: Mode, is_red: bool
) -> None:
    app.configure(metrics_interval=0.1)

    @app.task(name="flaky", max_retries=0, breaker=BreakerPolicy(threshold=1, mode=mode))
    async def flaky() -> None:
        raise ConnectionError("away")

    async with working(app, name="one"), looking_at(app) as client:
        await flaky.adelay()

        async def is_open() -> bool:
            rows = await client.ask("worker:health", to=["one"])
            return '"open"' in json.dumps(rows)

        await until_async(is_open)
        for path in ("health", "workers/one"):
            page = await client.load(path)
            (row,) = re.findall(r"<li>flaky: (.*?)</li>", page)
            assert ('class="badge bad"' in row) == is_red, path

        async def is_reported() -> bool:
            return bool((await app.metrics.aoverview()).workers[0].slots)

        await until_async(is_reported)
        if not is_red:
            shown = await app.metrics.aoverview()
            assert [worker.health for worker in shown.workers] == ["ok"]
            assert "circuit breaker of flaky" not in await client.look("")


async def test_a_webhook_says_of_a_queue_a_task_and_a_worker_what_the_api_says(seeded: App) -> None:
    with Receiver() as receiver:
        seeded.configure(**QUICK, **receiver.settings)
        seeded.alert("failing", failures("break", above=0.5, least=4), for_=0.0)
        seeded.alert("lost", worker_lost("crm"), for_=0.0)
        await seeded.asend_many([seeded.tasks["mail"].s() for _ in range(3)])
        driver = await seeded.connections.get_async_driver()
        await driver.perform(lease_calls.join_queue(seeded.queue("crm"), "frozen:1", lease=0.1))
        bodies = dict[str, Any]()

        async def are_sent(*names: str) -> bool:
            bodies.update({request.body["data"]["name"]: request.body for request in receiver.received})
            return {*names} <= bodies.keys()

        async with working(seeded, queues=["crm"], name="first"):
            await until_async(partial(are_sent, "unread", "lost"))
            # What failed before the first evaluation would be no news.
            await seeded.asend_many([seeded.tasks["break"].s("down", "r") for _ in range(4)])
            await until_async(partial(are_sent, "failing"))
            surfaces = Surfaces(seeded)
            await check_bodies(surfaces, bodies)
            top, rows = await surfaces.ask("top:show"), await surfaces.ask("queue:list")
    told = {name: (body["data"]["subject"], body["data"]["value"]) for name, body in bodies.items()}
    (task,) = (candidate for candidate in top["tasks"] if candidate["name"] == "break")
    assert told["unread"] == ("queue nobody", find_queue(rows, "nobody")["backlog"]) == ("queue nobody", 3)
    assert told["failing"] == ("task break", task["failed_share"]) == ("task break", 1.0)
    assert f"{task['failed']} of {task['ended']} attempts" in bodies["failing"]["data"]["description"]
    (lost,) = top["lost"]
    assert told["lost"] == (f"worker {lost['name']}", 1.0)
    assert f"worker {lost['worker']} was lost" in bodies["lost"]["data"]["description"]
    await seeded.aempty("nobody")


async def check_bodies(surfaces: Surfaces, bodies: Mapping[str, Any]) -> None:
    """What a notification says of an alert is what the JSON API and the page of the alerts say of it."""
    states, page = await surfaces.ask("alert:list"), await surfaces.look("alerts")
    for name in ("unread", "failing", "lost"):
        body, data = bodies[name], bodies[name]["data"]
        (state,) = (
            candidate
            for candidate in states
            if (candidate["name"], candidate["subject"]) == (name, data["subject"])
        )
        shown = {field: state[field] for field in ("severity", "status", "value", "above", "since")}
        assert {field: data[field] for field in shown} == shown, name
        assert (body["type"], body["timestamp"], data["app"]) == (
            "alert.fired",
            state["fired_at"],
            surfaces.app.name,
        )
        words = data["description"].partition(" was lost ")[0]  # how long ago is said of now
        assert state["description"].startswith(words)
        assert words in page


LIMIT = 1_000_000_000
"""The maxmemory of the server, in bytes."""
LIMITS: dict[str, Read] = {
    "app.metrics.overview": lambda s: _get(s.app.metrics.aoverview(), lambda shown: shown.memory[0].limit),
    "app.metrics.storage": lambda s: _get(s.app.metrics.astorage(), lambda found: found.servers[0].limit),
    "queue storage --json": lambda s: _get(
        s.run_json("queue", "storage"), lambda found: found["servers"][0]["limit"]
    ),
    "top --json": lambda s: _get(s.run_json("top"), lambda top: top["memory"][0]["limit"]),
    "JSON API, top:show": lambda s: _get(s.ask("top:show"), lambda top: top["memory"][0]["limit"]),
    "JSON API, queue:storage": lambda s: _get(
        s.ask("queue:storage"), lambda found: found["servers"][0]["limit"]
    ),
    "/metrics": lambda s: _get(s.measure(), lambda found: found.get(MEMORY_LIMIT)),
    "/metrics/cluster": lambda s: _get(s.measure("/metrics/cluster"), lambda found: found.get(MEMORY_LIMIT)),
}
"""How each surface is asked for the limit of the memory of Redis."""
MEMORY_LIMIT = 'celery5_broker_memory_limit_bytes{broker="default"}'


async def test_every_surface_has_the_memory_of_the_server(
    own_server: EmbeddedServer, own_staff: Staff, app_name: str
) -> None:
    app = declare(App(app_name, broker=own_server.url, **SETTINGS))
    with redis.Redis.from_url(own_server.url) as client:
        client.config_set("maxmemory", LIMIT)
        await app.tasks["push"].adelay()
        surfaces = await show(app, own_staff, "crm")

        async def is_measured() -> bool:
            return all(
                [MEMORY_LIMIT in await surfaces.measure(path) for path in ("/metrics", "/metrics/cluster")]
            )

        await until_async(is_measured)
        await ask_all(surfaces, LIMIT, LIMITS)
        for path in ("/metrics", "/metrics/cluster"):
            found = await surfaces.measure(path)
            used = found['celery5_broker_memory_used_bytes{broker="default"}']
            share = found['celery5_broker_memory_used_share{broker="default"}']
            assert 0 < used < LIMIT
            assert share == pytest.approx(used / LIMIT, rel=0.01)
    app.close()
