"""Every line of every kind of process says who wrote it, when, how bad it is and what it is."""

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.story.cli.commands import Serving, until
from tests.story.conftest import Desk

FIELDS = ("worker", "level", "timestamp", "message_type")
SOURCE = """
import logging
import eliot

logging.getLogger("shop").warning("loaded")


def speak() -> None:
    logging.getLogger("shop").warning("said")
    with eliot.start_action(action_type="shop:step"):
        eliot.log_message(message_type="shop:message")
"""
KINDS = [
    ("worker", ("worker", "start")),
    ("router", ("router", "start")),
    ("scheduler", ("scheduler", "start")),
    ("publisher", ("publisher", "start", "--backlog", "memory")),
    ("controller", ("controller", "start")),
    ("dashboard", ("dashboard", "start", "--port", "0")),
]


def start(desk: Desk, short_path: Path, words: tuple[str, ...], form: str) -> Serving:
    shop = desk.folder / "shop.py"
    source = shop.read_text().replace("    return a + b", "    speak()\n    return a + b")
    shop.write_text(f"{source}\n{SOURCE}")
    (desk.folder / "cluster.toml").write_text("[workers.default]\n")
    env = {
        "CELERY5_LOG_FORMAT": form,
        "CELERY5_LOG_LEVEL": "debug",
        "CELERY5_BROKER": desk.app.settings.broker,
        "XDG_RUNTIME_DIR": str(short_path),  # where a Publisher opens its socket
    }
    return Serving("-A", "shop", *words, cwd=desk.folder, env=env)


def run(desk: Desk, short_path: Path, words: tuple[str, ...], form: str) -> list[str]:
    """Return all lines of a process from its start to its end; a worker runs a job."""
    with start(desk, short_path, words, form) as serving:
        until(lambda: f"{words[0]}:started" in serving.out or serving.process.poll() is not None)
        assert serving.process.poll() is None, serving.err
        if words[0] == "worker":
            desk.app.tasks["shop.add"].delay(2, 3).get(timeout=30)
        serving.signal(signal.SIGTERM)
        ended = serving.ended()
    assert ended.code == 0, ended.err
    return ended.out.splitlines()


@pytest.mark.parametrize(("kind", "words"), KINDS, ids=[kind for kind, _ in KINDS])
def test_every_json_line_of_a_process_has_the_common_fields(
    desk: Desk, short_path: Path, kind: str, words: tuple[str, ...]
) -> None:
    lines: list[dict[str, Any]] = [
        json.loads(line) for line in run(desk, short_path, words, "json") if line.startswith("{")
    ]
    assert [line for line in lines if not all(line.get(field) for field in FIELDS)] == []
    own = [line for line in lines if line.get("action_type") == "celery5:process"]
    assert (own[0]["message_type"], own[0]["process"]) == ("celery5:process:started", kind)
    assert own[-1]["message_type"] == "celery5:process:succeeded"


def test_every_console_line_of_a_process_names_it(desk: Desk, short_path: Path) -> None:
    lines = run(desk, short_path, ("worker", "start"), "console")
    form = re.compile(r"\d{4}-\d\d-\d\d [\d:.]+Z (debug|info|warning|error) +\S+:\d+\S* \S+ ")
    assert [line for line in lines if not form.match(line) and not line.startswith("    ")] == []
    assert any(" process:started " in line for line in lines)


def test_every_line_of_a_sidecar_has_the_common_fields(desk: Desk, short_path: Path) -> None:
    with start(desk, short_path, ("worker", "start"), "json") as serving:
        serving.ready()
        serving.signal(signal.SIGKILL)
        until(lambda: bool(serving.logged("worker:died")))
        lines = [line for line in serving.messages if line.get("process") == "sidecar"]
    assert [line for line in lines if not all(line.get(field) for field in FIELDS)] == []
