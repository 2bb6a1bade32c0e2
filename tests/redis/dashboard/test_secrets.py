"""No surface shows a password: not in arguments, results, errors, records, stacks, nor in what people have sent."""

from functools import partial
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import trio

from celery5 import App, RetryPolicy, chain, progress
from celery5.operations.table import OPERATIONS
from celery5.streams import StreamEvents
from tests.redis.dashboard.client import looking_at
from tests.redis.worker.workers import until_async, working
from tests.story.cli.commands import celery5

SECRET = "hunter2"
"""What nobody may read."""
TEXTS = (
    f"ledger at https://ann:{SECRET}@ledger.example refused 11 api_key={SECRET}",
    f"refused, token: {SECRET}",
    f"refused Authorization: Bearer {SECRET}",
    f'refused {{"user": "ann", "password": "{SECRET}"}}',
    f'it\'s refused: {{"private_key": "{SECRET}"}}',
    f"refused:\n  client_secret={SECRET}\n  by the ledger",
)
"""Texts of one error, each with a password in another form."""
SOURCE = "# SOURCE"
"""Ends the lines of source that viewers may not read."""


class Order(msgspec.Struct):
    """A record with a password."""

    user: str
    token: str


def declare(app: App) -> None:
    """Tasks and a processor that put a password wherever there is place for one."""

    @app.task(name="sign-in", max_retries=0)
    async def sign_in(user: str, password: str, url: str, options: dict[str, Any]) -> dict[str, Any]:
        if user == "eve":
            raise ValueError(f"refused: password={password!r} at {url}")  # SOURCE
        return {"user": user, "token": password, "url": url}

    @app.task(name="refuse", retry_policy=RetryPolicy(max_retries=1, backoff=0.01))
    async def refuse(text: int) -> None:
        raise ConnectionError(TEXTS[text])

    @app.task(name="later")
    async def later(user: str, password: str) -> None: ...

    @app.task(name="stuck")
    async def stuck(user: str, password: str) -> None:
        progress(1, 2, f"signing in with password={password}")
        await trio.sleep_forever()

    once = RetryPolicy(max_retries=0)

    @app.processor(app.stream("orders", Order, partitions=1), then="ignore", on_error=once)
    async def bill(events: StreamEvents[Order]) -> None:
        async for order in events.records():
            raise ValueError(f"refused: token={order.token}")  # SOURCE

    parked = app.stream("parked", Order, by=lambda order: order.user, partitions=1)

    @app.processor(parked, then="park-key", on_error=once)
    async def park(events: StreamEvents[Order]) -> None:
        async for order in events.records():
            raise ValueError(f"refused: token={order.token}")


async def fill(app: App) -> dict[str, str]:
    """Jobs, runs and records with a password in each; the ids of some."""
    tasks: Any = app.tasks
    url = f"https://bob:{SECRET}@example.org/?token={SECRET}"
    options = {"api_key": SECRET, "deep": [{"secret": SECRET}]}
    dead = await tasks["sign-in"].adelay("eve", SECRET, url, options)
    named = await tasks["sign-in"].adelay(user="eve", password=SECRET, url=url, options=options)
    done = await tasks["sign-in"].adelay("bob", SECRET, url, options)
    stuck = await tasks["stuck"].adelay("bob", SECRET)
    waiting = await tasks["later"].options(queue="nobody").adelay("bob", password=SECRET)
    run: Any = await cast("Any", chain)(
        tasks["sign-in"].s("eve", SECRET, url, options), tasks["later"].partial("x")
    ).astart(id="run-1")
    refused = {f"refused {text}": (await tasks["refuse"].adelay(text)).id for text in range(len(TEXTS))}
    for stream in ("orders", "parked"):
        await app.streams[stream].asend(Order("bob", SECRET))
    return {
        **refused,
        "dead": dead.id,
        "named": named.id,
        "done": done.id,
        "stuck": stuck.id,
        "waiting": waiting.id,
        "run": run.id,
    }


async def until_filled(app: App, ids: dict[str, str]) -> None:
    """Wait until all of it has happened, and is in the history."""

    async def are_there() -> bool:
        details = await app.afind(ids["stuck"])
        groups = {group.group: group for state in await app.streams.ainfo() for group in state.groups}
        return (
            (await app.ainfo()).dead == 3 + len(TEXTS)
            and details is not None
            and details.progress is not None
            and groups["bill"].dead == 1
            and groups["park"].parked_keys == 1
            and bool((await app.jobs.asearch(id=ids["done"])).jobs)
        )

    await until_async(are_there)


def list_questions(ids: dict[str, str]) -> dict[str, list[dict[str, Any]]]:
    """The parameters of each operation that needs some to show what lies there."""
    bill, park = {"stream": "orders", "group": "bill"}, {"stream": "parked", "group": "park"}
    return {
        "task:show": [{"id": job} for name, job in ids.items() if name != "run"],
        "task:search": [{}, {"queue": "nobody"}],
        "dlq:groups": [{}, {"limit": 10}],
        "stream:tail": [{"stream": "orders"}, {"stream": "parked"}],
        "stream:show": [{"stream": "orders"}, {"stream": "parked"}],
        "stream:parked": [park],
        "dlq:read-records": [bill],
        "workflow:show": [{"id": ids["run"]}],
        "workflow:graph": [{"id": ids["run"]}],
        "event:show": [],
        "controller:status": [],
        "schedule:show": [],
        "alert:history": [{}],
        "bulk:show": [],
        "queue:show": [{"queue": "nobody"}],
    }


def list_pages(app: App, ids: dict[str, str]) -> list[str]:
    """Every page that shows jobs, records or runs."""
    return [
        "dead",
        "dead/jobs",
        "jobs",
        "streams/orders/bill",
        "streams/parked/park",
        f"workflows/{ids['run']}",
        "tasks/sign-in",
        "",
        "tasks",
        "tasks/refuse",
        "dead?task=refuse",
        "audit",
        "schedules",
        "workers/one",
        *(f"jobs/{job}" for name, job in ids.items() if name != "run"),
    ]


MODULE = """
from celery5 import App

app = App({name!r}, broker={url!r})

@app.task(name="sign-in")
async def sign_in(user, password, url, options): ...

@app.task(name="refuse")
async def refuse(text): ...

@app.task(name="later")
async def later(user, password): ...

@app.task(name="stuck")
async def stuck(user, password): ...
"""
"""The application as commands load it: a process must know a task to know the names of its positional arguments."""
COMMANDS = (
    "dlq read",
    "dlq read --json",
    "dlq read --traceback",
    "dlq groups",
    "dlq groups --json",
    "dlq read --stream orders --group bill",
    "dlq read --stream orders --group bill --json",
    "dlq read --stream orders --group bill --traceback",
    "stream tail orders",
    "stream parked parked park",
    "stream show parked",
    "task search",
    "task search --json",
    "task search --task refuse --json",
    "workflow list",
    "workflow show run-1",
    "worker active",
    "worker stack",
    "top --once",
    "top --json",
    "audit list --json",
    "info --json",
)
"""What a person may type to see jobs, records and runs."""


@pytest.mark.parametrize("role", ["viewer", "operator", "admin"])
async def test_no_operation_and_no_page_shows_a_password(app: App, role: str) -> None:
    app.configure(metrics_interval=0.1, grace_period=0.1)
    declare(app)
    async with working(app, name="one"), looking_at(app, role=role) as client:
        ids = await fill(app)
        await until_filled(app, ids)
        questions = list_questions(ids)
        for operation in OPERATIONS.values():
            if operation.is_change or not operation.allows(role):  # type: ignore[arg-type]
                continue
            for parameters in questions.get(operation.name, [{}]):
                answer = msgspec.json.encode(await client.ask(operation.name, **parameters)).decode()
                assert SECRET not in answer, (operation.name, parameters, answer)
                assert role != "viewer" or SOURCE not in answer, (operation.name, parameters)
        pages = list_pages(app, ids)
        if role != "viewer":
            pages += ["workers/one?stack=true", f"jobs/{ids['stuck']}?stack=true"]
        for page in pages:
            html = await client.load(page)
            assert SECRET not in html, page
            assert role != "viewer" or SOURCE not in html, page
        dead = await client.ask("dlq:read")
        assert [job["kwargs"]["user"] for job in dead if job["kwargs"]] == ["eve"]


async def test_no_command_shows_a_password_unless_a_setting_says_so(
    app: App, url: str, tmp_path: Path
) -> None:
    app.configure(metrics_interval=0.1, grace_period=0.1)
    declare(app)
    (tmp_path / "shown.py").write_text(MODULE.format(name=app.name, url=url))

    async def run(command: str, **settings: str) -> str:
        words = ("-A", "shown", *command.split())
        ended = await trio.to_thread.run_sync(partial(celery5, *words, cwd=tmp_path, env=settings))
        assert ended.code == 0, (command, ended)
        return ended.out + ended.err

    async with working(app, name="one"):
        ids = await fill(app)
        await until_filled(app, ids)
        shows = [
            f"task show {job}{flag}" for name, job in ids.items() if name != "run" for flag in ("", " --json")
        ]
        for command in (*COMMANDS, *shows):
            shown = await run(command)
            at = shown.find(SECRET)
            assert at < 0, (command, shown[max(0, at - 200) : at + 20])
        for command in ("dlq read --json", "stream tail orders", f"task show {ids['done']}"):
            assert SECRET in await run(command, CELERY5_SHOW_RAW_VALUES="true"), command
