"""Watching: a development controller runs the code as it is now."""

import os
import re
import signal
from pathlib import Path

import pytest

from celery5 import App
from celery5.processes.code_watch import find_changed_files, read_file_states
from tests.story.cli.commands import Serving, celery5, until

CODE = """
from celery5 import App

app = App("watched", grace_period=2)


@app.task(name="answer")
def answer() -> int:
    return {answer}
"""
WATCH = ("-A", "shop", "controller", "start", "--development", "--watch")


def test_a_change_is_a_python_file_that_is_new_gone_or_otherwise(tmp_path: Path) -> None:
    (tmp_path / "deep" / "er").mkdir(parents=True)
    file = tmp_path / "deep" / "er" / "a.py"
    file.write_text("1")
    before = read_file_states(tmp_path)
    for name in (".git", ".venv", "__pycache__", "env/lib", "node_modules"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "x.py").write_text("")
    (tmp_path / "env" / "pyvenv.cfg").write_text("")
    (tmp_path / "notes.txt").write_text("")
    assert find_changed_files(before, read_file_states(tmp_path)) == []
    file.write_text("22")
    (tmp_path / "b.py").write_text("")
    assert find_changed_files(before, now := read_file_states(tmp_path)) == [
        str(tmp_path / "b.py"),
        str(file),
    ]
    file.unlink()
    assert find_changed_files(now, read_file_states(tmp_path)) == [str(file)]


@pytest.mark.timeout(180)
def test_the_code_that_runs_is_the_code_that_is_there_now(tmp_path: Path) -> None:
    module = tmp_path / "shop.py"
    module.write_text(CODE.format(answer=1))
    with Serving(*WATCH, cwd=tmp_path) as serving:
        serving.ready()
        found = re.search("CELERY5_BROKER='(.*?)'", serving.err)
        assert found
        app = App("watched", broker=found[1])
        answer = app.task(name="answer")(_answer)
        assert answer.delay().get(timeout=30) == 1

        module.write_text("this is no Python")
        until(lambda: "waiting for a change of the code" in serving.err)
        assert "shop.py changed: starting again" in serving.err
        waiting = answer.delay()
        module.write_text(CODE.format(answer=22))
        assert waiting.get(timeout=30) == 22  # the server, and what waits there, has stayed

        serving.process.send_signal(signal.SIGTERM)
        ended = serving.ended()
        assert ended.code == 0, ended
        app.close()
    assert not Path(found[1].removeprefix("unix://").partition("?")[0]).exists()


@pytest.mark.skipif(
    not os.path.exists("/proc/self/stat"), reason="only Linux tells a child of its parent's death"
)
def test_whoever_kills_the_watching_process_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(CODE.format(answer=1))
    with Serving(*WATCH, cwd=tmp_path) as serving:
        serving.ready()
        children = (
            Path(f"/proc/{serving.process.pid}/task/{serving.process.pid}/children").read_text().split()
        )
        serving.process.kill()
        serving.process.wait(30)
        until(lambda: not any(Path(f"/proc/{child}").exists() for child in children))


def test_watching_is_for_development(tmp_path: Path) -> None:
    ended = celery5("-A", "shop", "controller", "start", "--watch", cwd=tmp_path)
    assert (ended.code, "--watch needs --development" in ended.err) == (2, True)


def _answer() -> int:
    return 0
