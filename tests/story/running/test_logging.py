"""Logging: what tasks log with the standard library is in the log of a real worker, with the job that logged it."""

import json
import re
import subprocess
from typing import Any

import pytest

from celery5.cli.terminal.loading import load_app
from tests.story.cli.commands import COMMAND, LIMIT, Serving, celery5, environment, until
from tests.story.conftest import Desk

TALK = """
import asyncio
import logging
{own}
from shop import app

logger = logging.getLogger(__name__)

@app.task
async def on_trio() -> None:
    logger.info("on %s", "trio")
    logger.debug("not at this level")

@app.task(loop="asyncio")
async def on_asyncio() -> None:
    await asyncio.sleep(0)
    logger.info("on %s", "asyncio")

@app.task
def in_a_thread() -> None:
    logger.warning("on %s", "thread")
    print("plainly")
"""


@pytest.mark.parametrize(
    "words", [("worker",), ("controller", "--development")], ids=["worker", "controller"]
)
def test_what_a_task_logs_is_in_the_log_with_its_job(desk: Desk, url: str, words: tuple[str, ...]) -> None:
    (desk.folder / "talk.py").write_text(TALK.format(own=""))
    load_app("talk")
    talk = __import__("talk")
    jobs = [task.delay() for task in (talk.on_trio, talk.on_asyncio, talk.in_a_thread)]
    group, *more = words
    ended = celery5(
        "-A", "talk", group, "start", "--burst", *more, cwd=desk.folder, env={"CELERY5_BROKER": url}
    )
    assert ended.code == 0
    # A development Controller tells of the keys that it makes.
    assert re.fullmatch(r"(commands are signed with new keys, in .*\n)?(dashboard: .*\n)?", ended.err), (
        ended.err
    )
    assert "plainly\n" in ended.out
    lines = [json.loads(line) for line in ended.out.splitlines() if line.startswith("{")]
    said = {line["message"]: line for line in lines if line.get("message_type") == "celery5:log"}
    assert sorted(said) == ["on asyncio", "on thread", "on trio"]
    for job, text, level in zip(
        jobs, ("on trio", "on asyncio", "on thread"), ("info", "info", "warning"), strict=True
    ):
        one = said[text]
        assert (one["job"], one["logger"], one["level"]) == (job.id, "talk", level)
        assert one["task"] == f"talk.{text.replace('on thread', 'in a thread').replace(' ', '_')}"
        (done,) = [
            line for line in lines if line.get("job") == job.id and line["message_type"] == "celery5:job"
        ]
        assert done["worker"] == one["worker"]


def test_an_application_that_has_set_logging_up_has_it_its_way(desk: Desk) -> None:
    own = "logging.basicConfig(level='INFO', format='mine: %(message)s')"
    (desk.folder / "talk.py").write_text(TALK.format(own=own))
    load_app("talk")
    __import__("talk").on_trio.delay()
    ended = celery5("-A", "talk", "worker", "start", "--burst", cwd=desk.folder)
    assert (ended.code, ended.err) == (0, "mine: on trio\n")
    assert "celery5:log" not in ended.out


STREAM_TALK = """
import logging
import eliot
from celery5 import App
from celery5.streams import BlockingEvents, StreamEvents

app = App("talk")
words = app.stream("words", dict, partitions=1)
logger = logging.getLogger(__name__)

@app.processor(words)
async def on_trio(events: StreamEvents[dict]) -> None:
    async for _ in events.records():
        logger.info("on trio")
        eliot.log_message(message_type="talk", message="by eliot")

@app.processor(words, loop="asyncio")
async def on_asyncio(events: StreamEvents[dict]) -> None:
    async for _ in events.records():
        logger.info("on asyncio")

@app.processor(words)
def in_a_thread(events: BlockingEvents[dict]) -> None:
    for _ in events.records():
        logger.info("in a thread")
"""


def test_what_a_processor_logs_is_in_the_log_with_its_stream_and_partition(desk: Desk, url: str) -> None:
    (desk.folder / "talk_of_streams.py").write_text(STREAM_TALK)
    flags = ("-A", "talk_of_streams")
    with Serving(*flags, "worker", "start", cwd=desk.folder, env={"CELERY5_BROKER": url}) as worker:
        sent = celery5(*flags, "stream", "send", "words", "{}", cwd=desk.folder, env={"CELERY5_BROKER": url})
        assert sent.code == 0, sent.err

        def find_lines() -> dict[str, dict[str, Any]]:
            found = {message.get("message", ""): message for message in worker.messages}
            return {
                text: found_line
                for text, found_line in found.items()
                if text in ("on trio", "by eliot", "on asyncio", "in a thread")
            }

        until(lambda: len(find_lines()) == 4 and len(worker.logged("worker:started")) == 1)
        (started,) = worker.logged("worker:started")
        for text, line in find_lines().items():
            processor = text.replace("by eliot", "on trio").replace(" ", "_")
            fields = ("worker", "stream", "processor", "partition")
            assert [line[field] for field in fields] == [started["worker"], "words", processor, 0]


@pytest.mark.parametrize("form", ["json", "console"])
@pytest.mark.parametrize("kind", ["worker", "router", "scheduler", "controller"])
def test_final_error_is_the_last_line_where_log_and_stderr_are_the_same(
    desk: Desk, url: str, kind: str, form: str
) -> None:
    (desk.folder / "cluster.toml").write_text("[workers.default]\n")
    scheme, _, rest = url.partition("://")
    shop = desk.folder / "shop.py"
    shop.write_text(shop.read_text().replace(url, f"{scheme}://nobody:wrong@{rest}"))
    words = [*COMMAND, "-A", "shop", kind, "start", "--log-format", form]
    ended = subprocess.run(
        words,
        cwd=desk.folder,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=LIMIT,
        text=True,
    )
    lines = ended.stdout.splitlines()
    assert ended.returncode == 1
    (*logged, last) = [line for line in lines if "refuses this user or password" in line]
    assert last == lines[-1]
    assert last.startswith("Error: broker ")
    assert [('"exception":' in line) for line in logged] == ([True] if form == "json" else []), lines
