"""Any source: no text that Python takes, and none that it does not, makes `celery5 migrate` fail."""

import random
import sysconfig
from pathlib import Path

import pytest

from celery5.errors import Misconfigured
from celery5.migration.files import source as sources
from celery5.migration.files.source import is_whole, read_project
from celery5.migration.project.index import make_index
from celery5.migration.rewrite import migrate_file, migrate_project
from tests.night import NIGHTLY

STDLIB = Path(sysconfig.get_paths()["stdlib"])
FOLDERS: tuple[str, ...] = ("json", "logging", "concurrent")
if NIGHTLY:
    FOLDERS += ("asyncio", "email", "importlib", "multiprocessing", "unittest")
NAMES = (
    "task",
    "apply_async",
    "delay",
    "s",
    "si",
    "chain",
    "group",
    "chord",
    "conf",
    "update",
    "request",
    "retry",
)


@pytest.mark.parametrize("folder", FOLDERS)
def test_standard_library_is_read_whole_and_nothing_of_it_is_changed(folder: str) -> None:
    migration = migrate_project(STDLIB / folder)
    assert migration.report.files == ()
    assert len(migration.files) > 2


@pytest.mark.parametrize("folder", FOLDERS)
def test_library_that_is_taken_for_a_celery_project_stays_python(folder: str, tmp_path: Path) -> None:
    # Names are replaced at random, so that there are calls of Celery's in all places where a call can be.
    chance = random.Random(folder)
    for number, path in enumerate(sorted((STDLIB / folder).rglob("*.py"))):
        text = path.read_text(encoding="utf-8", errors="replace")
        words = sorted(
            {word for word in text.replace("(", " ").replace(".", " ").split() if word.isidentifier()}
        )
        for word in chance.sample(words, min(12, len(words))):
            if word not in ("def", "class", "import", "from", "if", "else", "in", "is", "not", "None"):
                text = text.replace(f".{word}(", f".{chance.choice(NAMES)}(")
        head = "from celery import *\nfrom celery import chain, group, chord, shared_task, signature, Task\n"
        head += "from celery import Celery, current_app as self, shared_task as os, chain as sys\n"
        (tmp_path / f"m{number}.py").write_text(head + text.replace("from __future__ import annotations", ""))
    project = read_project(tmp_path)
    index = make_index(project.files)
    for file in project.files:
        report = migrate_file(file, index)
        assert not report.text or is_whole(report.text), file.name


def test_what_cannot_be_read_has_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "MAX_FILE", 3000)
    files = {
        "broken.py": b"from celery import (\n",
        "zero.py": b"import celery\0\n",
        "latin.py": b"# \xe9\nimport celery\n",
        "coding.py": b"# -*- coding: none -*-\nimport celery\n",
        "large.py": b"x = 1  # celery\n" * 1000,
        "deep.py": b"x = " + b"(" * 900 + b"1" + b")" * 900,
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "folder.py").mkdir()
    (tmp_path / "good.py").write_text("from celery import shared_task\n\n@shared_task\ndef a(): ...\n")
    report = migrate_project(tmp_path).report
    assert set(report.unreadable) == set(files)
    assert all(why and "\n" not in why for why in report.unreadable.values())
    assert [file.path for file in report.files] == ["good.py"]


def test_links_hidden_folders_and_environments_are_left_out(tmp_path: Path) -> None:
    text = "from celery import shared_task\n\n@shared_task\ndef a(): ...\n"
    for folder in (".git", "venv39", "node_modules", "shop"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "tasks.py").write_text(text)
    (tmp_path / "venv39" / "pyvenv.cfg").write_text("")
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "linked.py").symlink_to(tmp_path / "shop" / "tasks.py")
    assert [file.path for file in migrate_project(tmp_path).report.files] == ["shop/tasks.py"]


def test_bounds_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Misconfigured, match="there is no such file or folder"):
        migrate_project(tmp_path / "none")
    monkeypatch.setattr(sources, "MAX_DEPTH", 1)
    (tmp_path / "a" / "b" / "c").mkdir(parents=True)
    (tmp_path / "a" / "b" / "c" / "tasks.py").write_text("import celery\n")
    assert migrate_project(tmp_path).report.unreadable == {"a": "folders are searched 1 deep"}
    monkeypatch.setattr(sources, "MAX_FILES", 1)
    for name in ("x.py", "y.py"):
        (tmp_path / name).write_text("")
    with pytest.raises(Misconfigured, match="has more than 1 files"):
        migrate_project(tmp_path)
