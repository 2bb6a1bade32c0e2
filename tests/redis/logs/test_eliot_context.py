"""Eliot's context: what a job logs is in the tree of what has sent it, in whatever thread or process it runs."""

import json
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import eliot
import pytest

from celery5 import App
from tests.story.cli.commands import Ended, celery5

MODULE = """
import time

import eliot
import trio

from celery5 import App, RetryPolicy, current_job

app = App({name!r})


def say(what):
    eliot.log_message("user:" + what)
    with eliot.start_action(action_type="user:step"):
        eliot.log_message("user:inside")


@app.task
async def on_trio() -> None:
    say("trio")


@app.task(loop="asyncio")
async def on_asyncio() -> None:
    say("asyncio")


@app.task
def in_thread() -> None:
    say("thread")


@app.task(boxed=True)
def in_box() -> None:
    say("box")


@app.task(boxed=True)
async def in_async_box() -> None:
    say("box")


@app.task(retry_policy=RetryPolicy(max_retries=2, backoff=0.05))
async def fails_once() -> None:
    say("attempt")
    if current_job().attempt == 1:
        raise ValueError("once")


@app.task
async def parent() -> None:
    say("parent")
    await on_trio.adelay()


@app.task
async def silent() -> None: ...


@app.task(boxed=True)
def sends_from_a_box() -> None:
    silent.delay()


@app.task
def prints() -> None:
    for number in range(8):
        print("printed", number, end=" ")
        time.sleep(0.06)  # lines of the log are written meanwhile
        print("by", "a", "task!")


@app.task
async def naps(seconds: float) -> None:
    await trio.sleep(seconds)
"""
NAMES = ("on_trio", "on_asyncio", "in_thread", "in_box", "in_async_box")


@pytest.fixture
def shop(tmp_path: Path, app_name: str, url: str) -> Iterator[App]:
    """The application, whose module is in `tmp_path`."""
    (tmp_path / "shop.py").write_text(MODULE.format(name=app_name))
    sys.path.insert(0, str(tmp_path))
    module = import_module("shop")
    module.app.configure(broker=url)
    try:
        yield module.app
    finally:
        module.app.close()
        sys.path.remove(str(tmp_path))
        del sys.modules["shop"]


@contextmanager
def listening() -> Generator[list[dict[str, Any]], None, None]:
    """The messages of eliot in this process."""
    messages: list[dict[str, Any]] = []
    eliot.add_destinations(messages.append)
    try:
        yield messages
    finally:
        eliot.remove_destination(messages.append)


def burst(folder: Path, url: str, *more: str) -> Ended:
    """Run a worker until all is done."""
    words = ("-A", "shop", "worker", "start", "--burst", "--log-format", "json", *more)
    ended = celery5(*words, cwd=folder, env={"CELERY5_BROKER": url})
    assert ended.code == 0, ended
    return ended


def lines_of(ended: Ended) -> list[dict[str, Any]]:
    """The messages in a worker's log."""
    return [json.loads(line) for line in ended.out.splitlines()]


def of_user(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        line for line in lines if str(line.get("message_type") or line.get("action_type")).startswith("user:")
    ]


def places(lines: list[dict[str, Any]]) -> list[tuple[str, tuple[int, ...]]]:
    return [(line["task_uuid"], tuple(line["task_level"])) for line in lines]


@pytest.mark.parametrize("name", NAMES)
def test_a_job_runs_inside_the_action_that_has_sent_it(
    shop: App, tmp_path: Path, url: str, name: str
) -> None:
    with listening() as sent, eliot.start_action(action_type="producer:request"):
        shop.tasks[f"shop.{name}"].delay()
    lines = lines_of(burst(tmp_path, url))
    said = of_user(lines)
    assert len(said) == 4
    (ended,) = [line for line in lines if line.get("message_type") == "celery5:job"]
    begun, *_, finished = [line for line in lines if line.get("action_type") == "celery5:job"]
    tree = {line["task_uuid"] for line in [*sent, *said, ended, begun, finished]}
    assert tree == {sent[0]["task_uuid"]}
    assert begun["task_level"][0] == 2, "inside of the producer's action"
    assert {line["job"] for line in said} == {ended["job"]}
    assert (begun["action_status"], finished["action_status"]) == ("started", "succeeded")
    found = places([*sent, *said, ended, begun, finished])
    assert len(set(found)) == len(found)


@pytest.mark.parametrize("name", NAMES)
def test_what_a_job_logs_is_one_action_where_nobody_has_sent_any(
    shop: App, tmp_path: Path, url: str, name: str
) -> None:
    shop.tasks[f"shop.{name}"].delay()
    lines = lines_of(burst(tmp_path, url))
    said = of_user(lines)
    (ended,) = [line for line in lines if line.get("message_type") == "celery5:job"]
    assert {line["task_uuid"] for line in said} == {ended["task_uuid"]}
    assert {line["job"] for line in said} == {ended["job"]}
    (begun,) = [
        line
        for line in lines
        if line.get("action_type") == "celery5:job" and line["action_status"] == "started"
    ]
    level = begun["task_level"][:-1]
    assert all(line["task_level"][: len(level)] == level for line in said)


def test_a_job_that_logs_nothing_has_no_action_of_its_own(shop: App, tmp_path: Path, url: str) -> None:
    shop.tasks["shop.silent"].delay()
    lines = lines_of(burst(tmp_path, url))
    assert [line for line in lines if line.get("action_type") == "celery5:job"] == []
    assert [line["state"] for line in lines if line.get("message_type") == "celery5:job"] == ["SUCCESS"]


def test_each_attempt_has_a_place_of_its_own_in_the_tree(shop: App, tmp_path: Path, url: str) -> None:
    with listening() as sent, eliot.start_action(action_type="producer:request"):
        shop.tasks["shop.fails_once"].delay()
    lines = lines_of(burst(tmp_path, url))
    about = [line for line in lines if "job" in line or line.get("action_type") == "celery5:job"]
    assert {line["task_uuid"] for line in about} == {sent[0]["task_uuid"]}
    found = places(about)
    assert len(set(found)) == len(found)
    ends = [
        line
        for line in lines
        if line.get("action_type") == "celery5:job" and line["action_status"] != "started"
    ]
    assert [line["action_status"] for line in ends] == ["failed", "succeeded"]
    assert ends[0]["reason"] == "ValueError: once"


@pytest.mark.parametrize("name", ["parent", "sends_from_a_box"])
def test_a_job_that_a_job_sends_is_in_the_same_tree(shop: App, tmp_path: Path, url: str, name: str) -> None:
    with listening() as sent, eliot.start_action(action_type="producer:request"):
        shop.tasks[f"shop.{name}"].delay()
    lines = lines_of(burst(tmp_path, url))
    ends = [line for line in lines if line.get("message_type") == "celery5:job"]
    assert len(ends) == 2
    assert {line["task_uuid"] for line in ends} == {sent[0]["task_uuid"]}
    found = places([line for line in lines if line["task_uuid"] == sent[0]["task_uuid"]])
    assert len(set(found)) == len(found)


def test_steps_of_a_workflow_are_in_the_tree_that_has_started_it(shop: App, tmp_path: Path, url: str) -> None:
    with listening() as sent, eliot.start_action(action_type="producer:request"):
        (shop.tasks["shop.on_trio"].s() >> shop.tasks["shop.in_thread"].s()).start()
    lines = lines_of(burst(tmp_path, url))
    said = of_user(lines)
    assert len(said) == 8
    assert {line["task_uuid"] for line in said} == {sent[0]["task_uuid"]}
    assert len(set(places(said))) == len(said)


def test_who_else_listens_to_eliot_gets_an_action_for_each_job(shop: App, tmp_path: Path, url: str) -> None:
    with (tmp_path / "shop.py").open("a") as module:
        module.write('eliot.to_file(open("heard.jsonl", "a"))\n')
    shop.tasks["shop.silent"].delay()
    burst(tmp_path, url)
    heard = [json.loads(line) for line in (tmp_path / "heard.jsonl").read_text().splitlines()]
    jobs = [line for line in heard if "celery5:job" in (line.get("action_type"), line.get("message_type"))]
    assert [line.get("action_status", "message") for line in jobs] == ["started", "message", "succeeded"]
    assert len({line["task_uuid"] for line in jobs}) == 1


def test_what_a_task_prints_splits_no_line_of_the_log(shop: App, tmp_path: Path, url: str) -> None:
    naps = [shop.tasks["shop.naps"].s(number / 100) for number in range(60)]
    shop.send_many([shop.tasks["shop.prints"].s() for _ in range(8)] + naps)
    lines = burst(tmp_path, url, "--cpu-slots", "8").out.splitlines()
    printed = [line for line in lines if "printed" in line]
    assert printed == [
        line for line in printed if line.startswith("printed ") and line.endswith(" by a task!")
    ]
    assert len(printed) == 64
    assert all(json.loads(line) for line in lines if line not in set(printed))
