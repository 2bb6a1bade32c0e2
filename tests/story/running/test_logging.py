"""Logging: what tasks log with the standard library is in the log of a real worker, with the job that logged it."""

import json
import re

import pytest

from celery5.cli.terminal.loading import load_app
from tests.story.cli.commands import celery5
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
    jobs = [each.delay() for each in (talk.on_trio, talk.on_asyncio, talk.in_a_thread)]
    group, *more = words
    ended = celery5(
        "-A", "talk", group, "start", "--burst", *more, cwd=desk.folder, env={"CELERY5_BROKER": url}
    )
    assert ended.code == 0
    # A development Controller tells of the keys that it makes.
    assert re.fullmatch(r"(commands are signed with new keys, in .*\n)?", ended.err), ended.err
    assert "plainly\n" in ended.out
    lines = [json.loads(line) for line in ended.out.splitlines() if line.startswith("{")]
    said = {each["message"]: each for each in lines if each.get("message_type") == "celery5:log"}
    assert sorted(said) == ["on asyncio", "on thread", "on trio"]
    for job, text, level in zip(
        jobs, ("on trio", "on asyncio", "on thread"), ("info", "info", "warning"), strict=True
    ):
        one = said[text]
        assert (one["job"], one["logger"], one["level"]) == (job.id, "talk", level)
        assert one["task"] == f"talk.{text.replace('on thread', 'in a thread').replace(' ', '_')}"
        (done,) = [
            each for each in lines if each.get("job") == job.id and each["message_type"] == "celery5:job"
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
