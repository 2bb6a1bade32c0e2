"""The import path: PYTHONPATH goes before the current folder, and both before what is installed."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from celery5.__main__ import drop_folder_of_interpreter
from celery5.config.import_path import (
    add_current_folder,
    describe_import_path,
    read_python_path,
)

LIBRARY, HERE = os.path.dirname(os.__file__), "HERE"
INSTALLED = [LIBRARY, "/site-packages"]


@pytest.mark.parametrize(
    ("python_path", "before", "after"),
    [
        ("", ["/bin"], [HERE, "/bin"]),
        ("", ["/added", HERE], ["/added", HERE]),
        ("/v2", ["/bin", "/v2"], ["/bin", "/v2", HERE]),
        ("/v2:/lib", ["/bin", "/v2", "/lib"], ["/bin", "/v2", "/lib", HERE]),
        ("/v2", ["/v2"], ["/v2", HERE]),
        ("/v2", ["/bin"], [HERE, "/bin"]),
        ("/v2", [HERE, "/v2"], [HERE, "/v2"]),
        (f"/v2:{HERE}", ["/bin", "/v2", HERE], ["/bin", "/v2", HERE]),
        (f"{HERE}:/v2", ["/bin", HERE, "/v2"], ["/bin", HERE, "/v2"]),
        (":/v2", ["/bin", HERE, "/v2"], ["/bin", HERE, "/v2"]),
    ],
)
@pytest.mark.parametrize("behind", [[], [HERE]], ids=["", "editable"])
def test_the_current_folder_stands_behind_pythonpath_and_before_what_is_installed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    python_path: str,
    before: list[str],
    after: list[str],
    behind: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)

    def place(entries: list[str]) -> list[str]:
        return [str(tmp_path) if entry == HERE else entry for entry in entries]

    monkeypatch.setenv("PYTHONPATH", python_path.replace(HERE, str(tmp_path)))
    monkeypatch.setattr(sys, "path", place([*before, *INSTALLED, *behind]))
    for _ in range(2):  # a second time nothing changes
        assert add_current_folder() == str(tmp_path)
        assert sys.path == place([*after, *INSTALLED, *behind])


def test_the_folder_that_python_puts_first_is_dropped_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(tmp_path), "/v2"])
    drop_folder_of_interpreter()
    assert sys.path == [str(tmp_path), "/v2"]
    monkeypatch.setattr(sys, "path", ["/v2", str(tmp_path)])
    drop_folder_of_interpreter()
    assert sys.path == ["/v2", str(tmp_path)]


def test_an_error_says_where_modules_are_searched_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    assert describe_import_path("/shop") == "looked in /shop and where Python is installed"
    monkeypatch.setenv("PYTHONPATH", "/v2:/lib")
    assert describe_import_path("/shop") == "looked in /v2, /lib, /shop and where Python is installed"
    assert describe_import_path("/lib") == "looked in /v2, /lib and where Python is installed"


MODULE, SCRIPT = ["-m", "celery5"], [str(Path(sys.executable).with_name("celery5"))]


@pytest.mark.parametrize(
    ("command", "python_path", "version"),
    [(MODULE, "", "here"), (MODULE, "v2", "v2"), (MODULE, "v2:", "v2"), (SCRIPT, "v2", "v2")],
    ids=["nothing", "module", "module, and the current folder later", "script"],
)
def test_the_command_loads_the_application_that_pythonpath_names(
    tmp_path: Path, command: list[str], python_path: str, version: str
) -> None:
    for folder, name in ((tmp_path, "here"), (tmp_path / "v2", "v2")):
        folder.mkdir(exist_ok=True)
        (folder / "shop.py").write_text(
            f"from celery5 import App\napp = App('shop')\nprint('code', {name!r})"
        )
    shown = subprocess.run(
        [sys.executable, *command, "-A", "shop", "config", "show"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": python_path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert shown.stdout.splitlines()[0] == f"code {version}", shown.stderr


def test_pythonpath_is_not_read_where_python_ignores_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/v2")
    assert read_python_path() == ["/v2"]
    monkeypatch.setattr(sys, "flags", SimpleNamespace(ignore_environment=True))
    assert read_python_path() == []
