"""Twice: what fails once is named, what fails twice fails the session, what is broken is not run again."""

import os
import subprocess
import sys
from pathlib import Path

TWICE = Path(__file__).with_name("twice.py")

STARTLED = """
from pathlib import Path
import pytest

def times(name):
    file = Path(__file__).with_name(name)
    said = file.read_text() if file.exists() else ""
    file.write_text(said + "x")
    return len(said) + 1

def test_sound():
    assert times("sound") == 1

def test_startled():
    assert times("startled") == 2

@pytest.fixture
def late():
    yield
    assert times("late") == 2

def test_leaves_something(late):
    pass
"""
BROKEN = STARTLED + "\n\ndef test_broken():\n    times('broken')\n    assert False\n"
MANY = "import pytest\n\n@pytest.mark.parametrize('n', range(11))\ndef test_broken(n):\n    assert False\n"


def run(folder: Path, source: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    (folder / "test_given.py").write_text(source)
    (folder / "pytest.ini").write_text("[pytest]\n")
    return subprocess.run(
        [sys.executable, str(TWICE), str(folder / "cache"), "-q", *arguments],
        cwd=folder,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )


def test_what_fails_once_passes_by_itself_and_is_named(tmp_path: Path) -> None:
    done = run(tmp_path, STARTLED, "-p", "xdist", "-n", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    said = done.stdout.splitlines()
    assert "failed once, then passed: test_given.py::test_startled" in said[-4:]
    assert "failed once, then passed: test_given.py::test_leaves_something" in said[-4:]
    assert (tmp_path / "sound").read_text() == "x"  # what passed was not run again


def test_what_fails_twice_fails_the_session(tmp_path: Path) -> None:
    done = run(tmp_path, BROKEN)
    assert done.returncode == 1
    said = done.stdout.splitlines()[-5:]
    assert "failed twice: test_given.py::test_broken" in said
    assert "failed once, then passed: test_given.py::test_startled" in said
    assert (tmp_path / "broken").read_text() == "xx"


def test_more_than_ten_failures_are_not_run_again(tmp_path: Path) -> None:
    done = run(tmp_path, MANY)
    assert done.returncode == 1
    assert "11 tests failed; more than 10 are not run again" in done.stdout.splitlines()
    assert done.stdout.count("11 failed") == 1


def test_tests_that_cannot_be_read_fail_at_once(tmp_path: Path) -> None:
    done = run(tmp_path, "import nowhere_to_be_found\n")
    assert done.returncode == 2
    assert "once more" not in done.stdout


def test_old_failures_of_other_tests_are_not_remembered(tmp_path: Path) -> None:
    assert run(tmp_path, BROKEN).returncode == 1
    done = run(tmp_path, BROKEN, "-k", "sound")
    assert "test_broken" not in done.stdout
