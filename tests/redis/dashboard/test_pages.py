"""The pages: each shows what it must, reads without scripts, and its buttons do what they say."""

import re
from html import unescape
from pathlib import Path
from typing import Any, Literal

import pytest
import trio

from celery5 import App, group
from celery5.commands.control import Reply
from celery5.dashboard.pages import PAGES
from celery5.limits import Limit, Range, Rate
from celery5.limits.declaration import LimitOptions
from tests.redis.dashboard.client import find_links
from tests.redis.dashboard.site import browsing, find_form_key, press, read_text
from tests.redis.worker.workers import until_async, working

Kind = Literal["async", "def"]


def declare(app: App) -> None:
    """Tasks that succeed and fail."""

    @app.task(name="pay", queue="money")
    async def pay(order: int) -> int:
        return order

    @app.task(name="fail", queue="money", max_retries=0)
    async def fail(order: int) -> None:
        raise ValueError(f"no <b>money</b> for order {order}")


async def until_dead(app: App, count: int) -> None:
    async def are_dead() -> bool:
        return (await app.ainfo()).dead == count

    await until_async(are_dead)


async def test_every_page_without_parameters_is_shown_to_a_viewer_of_an_empty_application(app: App) -> None:
    async with browsing(app, role="viewer") as client:
        for page in PAGES:
            if "{" in page.path:
                continue
            answer = await client.get(f"/{app.name}/{page.path}".rstrip("/"))
            expected = 403 if page.path == "settings" else 200
            assert answer.status_code == expected, (page.path, read_text(answer.text))
            assert "<h1>" in answer.text


async def test_a_paged_person_finds_what_fails_since_when_and_why_and_replays_it(app: App) -> None:
    app.configure(metrics_interval=0.1)
    declare(app)
    jobs = await app.asend_many([app.tasks["fail"].s(n) for n in range(3)])
    async with working(app, queues=("money",)):
        await until_dead(app, 3)

        async def is_measured() -> bool:
            return any(task.failing_since for task in (await app.metrics.aoverview()).tasks)

        await until_async(is_measured)
    async with browsing(app, role="operator") as client:
        first = await client.get(f"/{app.name}")
        text = read_text(first.text)
        assert "fail fails since" in text
        assert "ValueError: no <b>money</b> for order" in text
        assert "<b>money</b>" not in first.text
        task = await client.get(f"/{app.name}/tasks/fail")
        assert "It fails since" in read_text(task.text)
        assert "Traceback (most recent call last)" in task.text
        job = await client.get(f"/{app.name}/jobs/{jobs[0].id}")
        assert "attempt 1 failed" in read_text(job.text)
        assert "DEAD" in read_text(job.text)
        form = await client.get(f"/{app.name}/do/dlq/replay", params={"task": "fail"})
        assert "Nothing is done; this would be: 3 dead jobs sent again" in read_text(form.text)
        assert "notice" not in form.text  # that is for what was done
        assert (await app.ainfo()).dead == 3
        done = await press(client, app, "dlq:replay", {"task": "fail"})
        assert "3 dead jobs sent again" in read_text(done.text)
    assert (await app.ainfo()).dead == 0
    (entry,) = await app.audit.alist()  # the form showed what it would do, which is no action
    assert (entry.who, entry.source, entry.action, entry.count) == ("anna", "dashboard", "dlq:replay", 3)


async def test_single_dead_jobs_are_chosen_and_deleted(app: App) -> None:
    declare(app)
    jobs = await app.asend_many([app.tasks["fail"].s(n) for n in range(3)])
    async with working(app, queues=("money",)):
        await until_dead(app, 3)
    async with browsing(app) as client:
        listed = await client.get(f"/{app.name}/dead/jobs", params={"message": "order"})
        assert all(job.id in listed.text for job in jobs)
        chosen = [jobs[0].id, jobs[2].id]
        form = await client.get(f"/{app.name}/do/dlq/purge", params={"ids": chosen})
        assert "Nothing is done; this would be: 2 dead jobs deleted" in read_text(form.text)
        values = {"ids": "\n".join(chosen), "form_key": find_form_key(form.text)}
        await client.post(f"/{app.name}/do/dlq/purge", data=values)
    assert [job.id async for job in app.dlq.aread()] == [jobs[1].id]


async def test_first_page_does_not_say_tasks_succeed_beside_dead_jobs(app: App) -> None:
    declare(app)
    await app.tasks["fail"].adelay(1)
    async with working(app, queues=("money",)):
        await until_dead(app, 1)
    async with browsing(app) as client:
        text = read_text((await client.get(f"/{app.name}")).text)
        assert "nobody has sent it again or deleted it" in text
        assert "tasks succeed" not in text


async def test_a_queue_is_paused_and_resumed_by_its_button(app: App) -> None:
    declare(app)
    await app.tasks["pay"].adelay(1)
    async with browsing(app, role="operator") as client:
        answer = await press(client, app, "queue:pause", {"queue": "money"})
        assert "money is paused" in read_text(answer.text)
        assert (await app.ainfo()).queues["money"].paused
        assert "paused" in read_text((await client.get(f"/{app.name}/queues")).text)
        await press(client, app, "queue:resume", {"queue": "money"})
    assert not (await app.ainfo()).queues["money"].paused


async def test_first_page_lists_a_paused_queue_on_which_jobs_wait(app: App) -> None:
    declare(app)
    async with working(app, queues=("money",)), browsing(app, role="operator") as client:
        with app.audit.acting_as("ada@desk"):
            await app.control.asend("pause-queue", {"queue": "money"})
        with app.audit.acting_as("bob@desk"):  # it was paused already
            await app.control.asend("pause-queue", {"queue": "money"})
        await app.tasks["pay"].adelay(1)
        text = read_text((await client.get(f"/{app.name}")).text)
        listed = r"Needs a person .*Queue money : paused since [\d:]+ UTC, .* by ada@desk; backlog 1, the oldest waits"
        assert re.search(listed, text), text
        page = read_text((await client.get(f"/{app.name}/queues/money")).text)
        assert re.search(r"paused since [\d:]+ UTC, .* by ada@desk", page), page
        await press(client, app, "queue:resume", {"queue": "money"})
        await press(client, app, "queue:pause", {"queue": "money"})
        (money,) = [queue for queue in (await app.metrics.aoverview()).queues if queue.name == "money"]
        assert money.pause is not None
        assert "ada" not in money.pause.who
        await app.aempty("money")
        assert "Queue money" not in read_text((await client.get(f"/{app.name}")).text)


async def test_a_viewer_has_no_buttons(app: App) -> None:
    declare(app)
    await app.tasks["pay"].adelay(1)
    async with browsing(app, role="viewer") as client:
        page = await client.get(f"/{app.name}/queues/money")
    assert "/do/" not in page.text
    assert 'action="/sign-out"' in page.text


async def test_a_workers_page_shows_what_it_runs(app: App) -> None:
    app.configure(metrics_interval=0.1)
    declare(app)
    async with working(app, name="one", queues=("money",)), browsing(app) as client:
        page = await client.get(f"/{app.name}/workers/one")
        assert page.status_code == 200
        assert "What runs Nothing." in read_text(page.text)
        assert "one" in read_text((await client.get(f"/{app.name}/workers")).text)


async def test_operators_see_where_the_code_of_a_running_job_stands(app: App) -> None:
    gate, waits = trio.Event(), trio.Event()

    async def wait_for_bank() -> None:
        waits.set()
        await gate.wait()

    @app.task(name="charge")
    async def charge() -> None:
        await wait_for_bank()

    async with working(app, name="one"), browsing(app, role="operator") as client:
        handle = await charge.adelay()
        with trio.fail_after(30):
            await waits.wait()
        for path in (f"/{app.name}/workers/one", f"/{app.name}/jobs/{handle.id}"):
            page = await client.get(path)
            assert "in wait_for_bank" not in page.text
            (link,) = find_links(page.text, "stack=true")
            page = await client.get(link.partition("#")[0])
            assert "in wait_for_bank await gate.wait()" in read_text(page.text)
            assert 'href="' + path.partition("?")[0] in page.text
        answer = await client.get(f"/api/v1/{app.name}/worker/stack", params={"job": handle.id})
        (reply,) = answer.json()
        assert [stack["kind"] for stack in reply["answer"]["stacks"]] == ["trio"]
        for path in ("workers/one", f"jobs/{handle.id}"):
            headers = {"x-test-role": "viewer"}
            page = await client.get(f"/{app.name}/{path}", headers=headers)
            assert "Live stack" not in page.text
            page = await client.get(f"/{app.name}/{path}", params={"stack": "true"}, headers=headers)
            assert (page.status_code, "worker:stack is for operators" in page.text) == (403, True)
        gate.set()
        await handle.aget(timeout=30)
    async with browsing(app, role="operator") as client:
        page = await client.get(f"/{app.name}/jobs/{handle.id}", params={"stack": "true"})
        assert "Live stack" not in page.text


async def test_a_runs_page_draws_its_graph(app: App) -> None:
    declare(app)
    flow: Any = group([app.tasks["pay"].s(n) for n in range(3)])
    run = await flow.astart()
    async with browsing(app) as client:
        page = await client.get(f"/{app.name}/workflows/{run.id}")
        text = read_text(page.text)
        assert page.status_code == 200
        assert page.text.count('class="node') == 3
        assert "pay" in text
        assert "flowchart TD" in text
        answer = await press(client, app, "workflow:cancel", {"id": run.id})
        assert f"run {run.id} is cancelled" in read_text(answer.text)


async def test_a_part_of_a_page_has_no_frame(app: App) -> None:
    async with browsing(app) as client:
        part = await client.get(f"/{app.name}/queues", headers={"x-part": "main"})
    assert "<html" not in part.text
    assert "<h1>Queues</h1>" in part.text


async def test_many_tabs_share_one_look(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0
    read = app.ainfo

    async def count(**options: Any) -> Any:
        nonlocal looks
        looks += 1
        return await read(**options)

    monkeypatch.setattr(app, "ainfo", count)
    monkeypatch.setattr("celery5.dashboard.performing.READ_ONCE", 60.0)
    async with browsing(app) as client:
        for _ in range(10):
            assert (await client.get(f"/{app.name}/events")).status_code == 200
    assert looks == 1


async def test_several_applications_are_on_one_page_and_an_unreachable_broker_is_said_so(app: App) -> None:
    away = App("away", broker="redis://127.0.0.1:1/0")
    async with browsing(app, away) as client:
        page = await client.get("/")
        text = read_text(page.text)
        assert app.name in text
        assert "cannot be reached" in text
        answer = await client.get("/away/queues")
        assert answer.status_code == 503
        assert "cannot be reached" in read_text(answer.text)
        assert "This page shows it as soon as it is back" in read_text(answer.text)
        assert (await client.get("/nowhere/queues")).status_code == 404


@pytest.mark.parametrize(
    ("since", "label"),
    [
        ("", "1 h"),
        ("3600", "1 h"),
        ("1h", "1 h"),
        ("60m", "1 h"),
        ("6h", "6 h"),
        ("900", "15 min"),
        ("2h", None),
    ],
)
async def test_the_chosen_span_of_time_is_marked_however_it_is_written(
    app: App, since: str, label: str | None
) -> None:
    async with browsing(app) as client:
        page = (await client.get(f"/{app.name}/tasks", params={"since": since} if since else {})).text
        marked = re.findall(r'since=\d+" aria-current="true">([^<]+)<', page)
        assert marked == ([] if label is None else [label])


async def test_the_audit_trail_goes_on_on_the_next_page(app: App) -> None:
    for number in range(5):
        await app.alerts.asilence("no-workers", seconds=60, why=f"test {number}")
    async with browsing(app, role="viewer") as client:
        address, found = f"/{app.name}/audit?limit=2&action=alert", list[str]()
        for _ in range(3):
            answer = await client.get(address)
            found += re.findall(r"why=test (\d)", read_text(answer.text))
            following = re.search(r'href="([^"]+)">Next page', answer.text)
            address = unescape(following[1]) if following else ""
    assert (found, address) == (["4", "3", "2", "1", "0"], "")
    async with browsing(app, role="viewer") as client:
        wrong = await client.get(f"/{app.name}/audit?before=yesterday")
    assert "give the id of an entry" in read_text(wrong.text)


async def test_a_frozen_worker_is_asked_once_for_its_page(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    async def send(command: str, *_: Any, to: Any, **__: Any) -> list[Reply]:
        asked.append(command)
        return [Reply(worker=to[0], ok=False, reason="no-answer", why="no answer within 2 s")]

    declare(app)
    monkeypatch.setattr(app.control, "asend", send)
    async with working(app, name="one", queues=("money",)), browsing(app, role="operator") as client:
        answer = await client.get(f"/{app.name}/workers/one?stack=true")
    assert answer.status_code == 200
    assert asked == ["stats"]
    assert "no answer within 2 s" in read_text(answer.text)


async def test_the_cluster_page_says_that_no_controller_runs_and_how_to_get_one(app: App) -> None:
    async with browsing(app, role="viewer") as client:
        text = read_text((await client.get(f"/{app.name}/cluster")).text)
    assert (
        f"no Controller of application {app.name!r} is running; celery5 controller start starts one" in text
    )


DECLARED: tuple[tuple[str, Kind, LimitOptions, str], ...] = (
    ("many", "async", {"rate_limit": "100/m"}, "rate 100/m"),
    ("each", "async", {"rate_limit": Rate("1/10s", per="worker")}, "rate 1/10s per worker"),
    ("few", "async", {"limit": 2}, "limit 2"),
    ("pair", "async", {"limit": Limit(2, per="worker")}, "limit 2 per worker"),
    ("range", "async", {"limit": Range(1, 4, compute=lambda: 3)}, "limit 1 to 4"),
    ("keyed", "async", {"limit": 2, "concurrency_key": "user"}, "limit 2 per key"),
    ("fair", "async", {"fair_key": "user"}, "turns of the keys"),
    ("both", "async", {"limit": 3, "fair_key": "user"}, "limit 3 and turns of the keys"),
    ("kind", "def", {}, "rate 5/s of all thread tasks"),
    ("two", "def", {"rate_limit": "3/s"}, "rate 3/s and rate 5/s of all thread tasks"),
)
"""Tasks, with what each declares, and the words for it."""


async def test_limits_page_shows_every_kind_of_declared_limit(app: App) -> None:
    app.configure(rate_limits="thread=5/s")

    async def run_async(user: str) -> None: ...

    def run(user: str) -> None: ...

    for name, kind, options, _ in DECLARED:
        app.task(name=name, **options)(run_async if kind == "async" else run)
    app.task(name="free")(run_async)
    async with browsing(app, role="viewer") as client:
        text = read_text((await client.get(f"/{app.name}/limits")).text)
        listed = (await client.get(f"/api/v1/{app.name}/task/list")).json()
    assert [words for name, *_, words in DECLARED if f"{name} : {words}" not in text] == []
    assert "free" not in text
    assert {task["task"]: task["limits"] for task in listed} == {
        "free": "",
        **{name: words for name, *_, words in DECLARED},
    }


async def test_limits_page_shows_tasks_that_nobody_has_imported_yet(
    app: App, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = f"notices_{app.name.replace('-', '_')}"
    code = (
        "import celery5\n\n\n@celery5.task(name='push', rate_limit='100/m')\nasync def push() -> None: ...\n"
    )
    (tmp_path / f"{module}.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    late = App(app.name, broker=app.settings.broker, include=[module])
    async with browsing(late, role="viewer") as client:
        text = read_text((await client.get(f"/{app.name}/limits")).text)
    assert "push : rate 100/m" in text


async def test_limits_page_says_why_declarations_cannot_be_shown(app: App) -> None:
    late = App(app.name, broker=app.settings.broker, include=["there_is_none"])
    async with browsing(late, role="viewer") as client:
        answer = await client.get(f"/{app.name}/limits")
    assert answer.status_code == 200
    text = read_text(answer.text)
    assert "what tasks declare cannot be shown: Misconfigured: there is no module 'there_is_none'" in text


@pytest.mark.parametrize("path", ["/queues", "/none/queues", "{app}/queues/nope", "{app}/jobs/nope"])
async def test_a_page_of_what_is_not_there_is_called_not_found(app: App, path: str) -> None:
    async with browsing(app, role="viewer") as client:
        answer = await client.get(path.format(app=f"/{app.name}"))
    assert answer.status_code == 404
    assert "<title>Not found" in answer.text
