"""Log commands: a worker's log by its inbox: its level, what it could not write; and traces from process to process."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from celery5 import App
from celery5.logs import tracing
from tests.redis.commands.staff import Employee, Staff, wait_until

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
TALK = """
import logging, os
from celery5 import App, current_job

app = App(os.environ["HISTORY_APP"])
logger = logging.getLogger("talk")

@app.task(name="say")
async def say() -> None:
    logger.debug("quietly")
    logger.info("aloud")

@app.task(name="hear")
def hear() -> str:
    return current_job().trace

@app.task(name="pass_on")
async def pass_on() -> str:
    return await (await hear.adelay()).aget(timeout=30)
"""


@pytest.fixture
def talker(staff: Staff, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Employee, App]]:
    """A worker that talks, under its own name, and the application."""
    (tmp_path / "talk.py").write_text(TALK)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    command = [sys.executable, "-m", "celery5", "-A", "talk", "worker", "start", "--name", "one"]
    worker = staff.launch(command, keys=tmp_path / "keys")
    wait_until(lambda: worker.lines("worker:started") != [] or worker.process.poll() is not None)
    assert worker.process.poll() is None, worker.output.read_text()
    app = App(staff.app.name, broker=staff.app.settings.broker, keys=str(tmp_path / "keys"))
    for name in ("say", "hear", "pass_on"):
        app.task(name=name)(_elsewhere)
    yield worker, app
    app.close()


def _elsewhere() -> Any:
    """What runs is the worker's."""


def told(app: App, command: str, **parameters: Any) -> Any:
    """What the one worker answers."""
    (reply,) = app.control.send(command, parameters)
    assert reply.ok, reply
    return reply.answer


def test_the_level_of_the_log_is_set_while_the_worker_runs(talker: tuple[Employee, App]) -> None:
    worker, app = talker

    def said() -> list[str]:
        return [line["message"] for line in worker.lines("log") if line["logger"] == "talk"]

    app.signature("say").delay().get(timeout=30)
    wait_until(lambda: said() == ["aloud"])
    assert told(app, "set-log-level", level="debug") == {"level": "debug", "before": "info"}
    app.signature("say").delay().get(timeout=30)
    wait_until(lambda: said() == ["aloud", "quietly", "aloud"])
    assert told(app, "set-log-level", level="warning")["before"] == "debug"
    app.signature("say").delay().get(timeout=30)
    assert told(app, "set-log-level", level="info")["before"] == "warning"
    wait_until(lambda: worker.lines("log:level-changed") != [])
    assert said() == ["aloud", "quietly", "aloud"]
    (refused,) = app.control.send("set-log-level", {"level": "loud"})
    assert (refused.ok, "give one of debug, info, warning, error" in refused.why) == (False, True)
    counts = told(app, "stats")["log"]
    assert counts["written"] > 3
    assert (counts["lost"], counts["retried"]) == (0, 0)


def test_a_trace_goes_from_the_producer_through_one_job_to_the_next(talker: tuple[Employee, App]) -> None:
    worker, app = talker
    with tracing(TRACE):
        job = app.signature("pass_on").delay()
    assert job.get(timeout=30) == TRACE
    wait_until(lambda: len(worker.lines("job")) == 2)
    assert {line["trace"] for line in worker.lines("job")} == {TRACE}
    assert app.signature("hear").delay().get(timeout=30) == ""
