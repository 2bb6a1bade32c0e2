"""Completion: a real bash completes commands, flags, and the names that the application's code has."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.story.cli.commands import LIMIT, celery5, environment

SHOP = """
import sys
from celery5 import App
print("noise")
print("noise", file=sys.stderr)
app = App("shop")

@app.event(name="shop.Paid")
class Paid:
    order: int

@app.task
def add(a: int) -> int:
    return a

@app.task(queue="slow")
def multiply(a: int) -> int:
    return a
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "shop.py").write_text(SHOP)
    command = tmp_path / "celery5"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m celery5 "$@"\n')
    command.chmod(0o755)
    return tmp_path


def completed(folder: Path, *words: str) -> list[str]:
    """What bash offers at the end of these words, after it has read our script."""
    assert shutil.which("bash")
    array = " ".join(f"'{word}'" for word in words)
    script = f"""
    eval "$(celery5 completion bash)"
    complete -p celery5 >/dev/null || exit 3
    COMP_WORDS=({array}); COMP_CWORD={len(words) - 1}
    _celery5_completion celery5
    printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "--norc", "-c", script],
        cwd=folder,
        env=environment(PATH=path),
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done
    return done.stdout.split()


def test_bash_completes_commands_and_flags(folder: Path) -> None:
    assert completed(folder, "celery5", "do") == ["docs", "doctor"]
    assert completed(folder, "celery5", "event", "unsub") == ["unsubscribe"]
    assert "--concurrency" in completed(folder, "celery5", "-A", "shop", "worker", "start", "--conc")


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (("task", "suspend", "shop."), ["shop.add", "shop.multiply"]),
        (("queue", "pause", "s"), ["slow"]),
        (("event", "unsubscribe", "shop"), ["shop.Paid"]),
        (("event", "unsubscribe", "shop.Paid", "shop.m"), ["shop.multiply"]),
    ],
)
def test_bash_completes_the_names_that_the_code_has(
    folder: Path, words: tuple[str, ...], offered: list[str]
) -> None:
    assert completed(folder, "celery5", "-A", "shop", *words) == offered


def test_an_application_that_fails_or_takes_long_completes_nothing(folder: Path) -> None:
    (folder / "shop.py").write_text("try:\n    while True: pass\nexcept Exception:\n    pass\n")
    begun = time.monotonic()
    assert completed(folder, "celery5", "-A", "shop", "task", "suspend", "a") == []
    assert time.monotonic() - begun < LIMIT
    (folder / "shop.py").write_text("1 / 0\n")
    assert completed(folder, "celery5", "-A", "shop", "task", "suspend", "a") == []
    assert completed(folder, "celery5", "task", "suspend", "a") == []


@pytest.mark.parametrize(("shell", "word"), [("zsh", "#compdef celery5"), ("fish", "--command celery5")])
def test_other_shells_have_their_script(folder: Path, shell: str, word: str) -> None:
    said = celery5("completion", shell, cwd=folder)
    assert (said.code, said.err, word in said.out) == (0, "", True)
