"""Events, here: what else happens at events: a Router suspends tasks, a gate counts, a burst waits."""

import json
from typing import Any

import pytest
import trio

from celery5 import App, Misconfigured
from celery5.broker.keys import EVENTS
from celery5.events.event import Event
from celery5.limits import TaskResumed, TaskSuspended
from celery5.logs.log import LogWriter
from celery5.processes.development import run_in_background
from celery5.processes.foreground import ServeOptions
from celery5.processes.router import ROUTER
from tests.redis.worker.workers import LEASE, start, until, until_async


async def test_a_task_is_suspended_and_resumed_by_an_event(url: str, app_name: str) -> None:
    app, heard = App(app_name, broker=url, lease=LEASE), list[str]()

    @app.task(name="charge")
    async def charge() -> None: ...

    @TaskSuspended.subscribe
    @app.task
    async def tell(task: str, why: str) -> None:
        heard.append(f"{task}: {why}")

    with pytest.raises(Misconfigured, match="is of every application"):
        await TaskSuspended.adelay(task="charge")
    async with trio.open_nursery() as nursery:
        each = [await start(nursery, app), await start(nursery, app, page=ROUTER)]
        await app.events.asend([TaskSuspended(task="charge", why="maintenance")])
        await until(lambda: heard == ["charge: maintenance"])

        async def suspended() -> bool:
            return "charge" in await app.limits.alist()

        assert await suspended()
        await app.events.asend([TaskResumed(task="charge")])

        async def resumed() -> bool:
            return not await suspended()

        await until_async(resumed)
        for router in each:
            await router.stop()


async def test_a_jobs_concurrency_key_is_found_in_what_the_event_says(url: str, app_name: str) -> None:
    app = App(app_name, broker=url, lease=LEASE)
    running_now, most, done = dict[int, int](), list[int](), list[int]()

    @app.event(name="Placed")
    class Placed(Event):
        customer: int

    @Placed.subscribe
    @app.task(limit=1, concurrency_key="customer")
    async def charge(customer: int) -> None:
        running_now[customer] = running_now.get(customer, 0) + 1
        most.append(running_now[customer])
        await trio.sleep(0.05)
        running_now[customer] -= 1
        done.append(customer)

    began = trio.current_time()
    async with trio.open_nursery() as nursery:
        each = [await start(nursery, app), await start(nursery, app, page=ROUTER)]
        await app.events.asend([Placed(customer=n % 4) for n in range(16)])
        await until(lambda: len(done) == 16, within=30)
        for router in each:
            await router.stop()
    assert max(most) == 1, "one at a time for each customer"
    assert trio.current_time() - began < 16 * 0.05 + 10, "and customers beside each other"


async def test_in_development_a_burst_waits_for_the_events(
    url: str, app_name: str, redis_client: Any
) -> None:
    app, had = App(app_name, broker=url, lease=LEASE), list[int]()

    @app.event(name="Placed")
    class Placed(Event):
        order: int

    @Placed.subscribe
    @app.task
    async def note(order: int) -> None:
        had.append(order)

    await app.events.asend([Placed(order=n) for n in range(50)])
    async with run_in_background(app, ServeOptions(burst=True)) as done:
        with trio.fail_after(30):
            await done.wait()
    assert sorted(had) == list(range(50))
    assert redis_client.xlen(app.queue(EVENTS).stream) == 0


async def test_a_misspelt_application_is_told_of_once_and_a_known_one_is_not(
    url: str, app_name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shop, mail = App(app_name, broker=url, lease=LEASE), App(f"{app_name}-mail", broker=url, lease=LEASE)
    for name, of in (("Paid", app_name), ("Lost", f"{app_name}p")):

        @mail.event(name=name, of=of)
        class Heard(Event):
            order: int

        @Heard.subscribe
        @mail.task(name=f"note-{name}")
        async def note(order: int) -> None: ...

    @shop.event(name="Paid")
    class Paid(Event):
        order: int

    await Paid.adelay(order=1)
    with LogWriter() as journal:
        async with trio.open_nursery() as nursery:
            one = await start(nursery, mail)
            await one.stop()
        del journal
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    warned = [line for line in told if line.get("message_type") == "celery5:events:application-not-found"]
    assert [(line["of"], line["events"], line["level"]) for line in warned] == [
        (f"{app_name}p", ["Lost"], "warning")
    ]
