"""Raw producer: whoever has a Redis client and the page about the protocol can send jobs and read how they ended."""

import json
import re
import shlex
from importlib.resources import files
from pathlib import Path
from typing import Any

import trio

from celery5 import App, RetryPolicy
from celery5.broker.keys import EVENTS
from celery5.events.event import Event
from celery5.processes.development import run_in_background
from celery5.processes.foreground import ServeOptions

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "protocol.md"


def commands(app_name: str, part: int = 0) -> list[list[str]]:
    """The commands on the page, up to what it says of events or after that, for an application of
    another name, with the scripts' text in its place."""
    lines = [
        line
        for block in re.findall(
            r"```redis\n(.*?)```", PAGE.read_text().split("\n## The Event\n")[part], re.DOTALL
        )
        for line in block.splitlines()
    ]
    found = [shlex.split(line.replace("{shop", "{" + app_name)) for line in lines]
    for words in found:
        if words[0] == "EVAL":
            words[1] = "".join(map(script_text, words[1].strip("<>").split("+")))
    return found


def script_text(name: str) -> str:
    """The text of a script, or of a part of scripts."""
    folder = "lib" if name in ("clock.lua", "sending.lua", "timing.lua") else "job"
    return files("celery5.broker").joinpath("lua", folder, name).read_text()


async def document(client: Any, key: str) -> dict[str, Any]:
    """A job's document, once it is there."""
    with trio.fail_after(30):
        while (raw := client.get(key)) is None:
            await trio.sleep(0.01)
    found: dict[str, Any] = json.loads(raw)
    return found


async def test_the_commands_on_the_page_send_jobs(url: str, app_name: str, redis_client: Any) -> None:
    app = App(app_name, broker=url, unknown_task_grace=0)
    done: list[tuple[int, str]] = []

    @app.task(name="shop.charge")
    async def charge(order: int, amount: str) -> str:
        done.append((order, amount))
        return f"charged {order}"

    keys = app.queue("default")
    sent = commands(app_name)
    assert [words[0] for words in sent] == ["XADD", "GET", "SADD", "EVAL", "EVAL", "EVAL"]
    for words in sent:
        if words[0] != "GET":
            redis_client.execute_command(*words)
    again = [redis_client.execute_command(*words) for words in sent[2:]]
    assert again == [0, 0, 0, [b"order-10"]], "safe to repeat"
    other = [
        word.replace('"id":"order-10"', '"id":"other"') if word != "order-10" else "other" for word in sent[5]
    ]
    assert redis_client.execute_command(*other) == [b"order-10"], "it was in the way"
    async with run_in_background(app, ServeOptions()):
        found = [await document(redis_client, keys.result(f"order-{n}")) for n in (7, 8, 9, 10)]
    assert {document_fields["state"] for document_fields in found} == {"SUCCESS"}
    assert [found_document["value"] for found_document in found] == [
        "charged 7",
        "charged 8",
        "charged 9",
        "charged 10",
    ]
    assert sorted(done) == [(7, "9.90"), (8, "1.50"), (9, "3"), (10, "2")]
    assert json.loads(redis_client.execute_command(*sent[1]))["id"] == "order-7"


async def test_a_job_in_plain_json_fails_retries_and_dies_as_any_other(
    url: str, app_name: str, redis_client: Any
) -> None:
    app = App(app_name, broker=url, unknown_task_grace=0, retry_policy=RetryPolicy(max_retries=9))

    @app.task(name="shop.fail")
    def fail() -> None:
        raise ValueError("no")

    keys = app.queue("default")
    command = {
        "v": 1,
        "id": "x",
        "task": "shop.fail",
        "retry": {"max_retries": 1, "backoff": 0},
        "ours": [1.10],
    }
    redis_client.xadd(keys.stream, {"job": json.dumps(command)})
    redis_client.xadd(keys.stream, {"job": json.dumps({"v": 1, "id": "y", "task": "shop.unheard"})})
    redis_client.xadd(keys.stream, {"job": json.dumps({"v": 1, "id": "z", "task": "shop.fail", "args": {}})})
    redis_client.xadd(keys.stream, {"job": "[" * 100_000})
    redis_client.xadd(keys.stream, {"job": b'{"v":1,"id":"\xff","task":"t"}'})
    async with run_in_background(app, ServeOptions()):
        found = [await document(redis_client, keys.result(job_id)) for job_id in "xyz"]
        with trio.fail_after(30):
            while redis_client.xlen(keys.dead) < 5:
                await trio.sleep(0.01)
    assert {found_document["state"] for found_document in found} == {"DEAD"}
    assert [found_document["reason"] for found_document in found] == [
        "exhausted",
        "unknown-task",
        "bad-arguments",
    ]
    assert (found[0]["attempt"], found[0]["failure"]["type"], found[0]["failure"]["message"]) == (
        2,
        "ValueError",
        "no",
    )
    dead_letters = {
        json.loads(fields[b"document"])["reason"]: fields for _, fields in redis_client.xrange(keys.dead)
    }
    assert set(dead_letters) == {"exhausted", "unknown-task", "bad-arguments", "corrupt"}
    dead_job = json.loads(dead_letters["exhausted"][b"job"])
    assert dead_job["ours"] == [1.10]
    assert [failure.get("attempt", 1) for failure in dead_job["failures"]] == [1, 2]


async def test_the_command_on_the_page_sends_an_event(url: str, app_name: str, redis_client: Any) -> None:
    app, paid = App(app_name, broker=url, unknown_task_grace=0), list[int]()

    @app.event(name="shop.Paid")
    class Paid(Event):
        order: int
        email: str

    @Paid.subscribe
    @app.task
    async def note(order: int) -> None:
        paid.append(order)

    async with run_in_background(app, ServeOptions()):
        (words,) = commands(app_name, 1)
        redis_client.execute_command(*words)
        redis_client.execute_command(*words)
        with trio.fail_after(30):
            while redis_client.xlen(app.queue(EVENTS).stream) or not paid:
                await trio.sleep(0.01)
    assert paid == [7], "sent twice, made once"
