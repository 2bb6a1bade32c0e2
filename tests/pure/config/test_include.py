"""Include: names and patterns mean the modules that they say, and no other module is touched."""

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from celery5 import App, Misconfigured
from celery5.config.include import find_modules, is_included

FREE = "from celery5 import task\n@task\ndef one(): ...\n"
SHOP = {
    "__init__": "",
    "__main__": "raise SystemExit('nobody runs this')",
    "tasks": FREE,
    "settings": "raise RuntimeError('nobody includes this')",
    "mail/__init__": "",
    "mail/tasks": FREE,
    "mail/tasks_old": "raise RuntimeError('nor this')",
    "mail/deep/__init__": "",
    "mail/deep/tasks/__init__": FREE,
    "mail/deep/tasks/more": "",
    "venv/lib/tasks": "raise RuntimeError('no package: no __init__.py above it')",
    "broken/__init__": "",
    "broken/jobs": "import no_such_library",
    "broken/ends": "raise SystemExit('no')",
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the package `emporium`, on the import path for as long as the test runs."""
    for name, source in SHOP.items():
        path = tmp_path / "emporium" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    (tmp_path / "emporium" / "mail" / "again").symlink_to(tmp_path / "emporium")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in [module for module in sys.modules if module.startswith("emporium")]:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("include", "modules"),
    [
        ("emporium.tasks", "emporium.tasks"),
        ("emporium.**.tasks", "emporium.mail.deep.tasks emporium.mail.tasks emporium.tasks"),
        ("emporium.*.tasks", "emporium.mail.tasks"),
        ("emporium.mail.**", "mail mail.deep mail.deep.tasks mail.deep.tasks.more mail.tasks mail.tasks_old"),
        ("emporium.mail.tasks*", "emporium.mail.tasks emporium.mail.tasks_old"),
        ("emporium.mail.*", "mail.deep mail.tasks mail.tasks_old"),
        ("emporium.*", "broken mail settings tasks"),
    ],
)
def test_a_pattern_means_the_modules_that_fit_it_each_by_one_name(include: str, modules: str) -> None:
    names = [module if module.startswith("emporium") else f"emporium.{module}" for module in modules.split()]
    found = find_modules([include, include])
    assert sorted(found) == names
    assert [module for module in found if not is_included([include], module)] == []


def test_looking_for_modules_imports_none_of_them() -> None:
    find_modules(["emporium.**"])
    assert [module for module in sys.modules if module.startswith("emporium")] == []


def test_autodiscover_includes_the_tasks_of_packages() -> None:
    app = App("discovers", include="emporium.mail.tasks_older")
    app.autodiscover("emporium.mail")
    app.autodiscover(["emporium.mail", "emporium"], module="jobs")
    assert app.include == (
        "emporium.mail.tasks_older",
        "emporium.mail.**.tasks",
        "emporium.mail.**.jobs",
        "emporium.**.jobs",
    )
    found = App("discovers")
    found.autodiscover("emporium")
    found.load()
    assert sorted(found.tasks) == [
        "emporium.mail.deep.tasks.one",
        "emporium.mail.tasks.one",
        "emporium.tasks.one",
    ]


def test_autodiscover_tolerates_packages_without_tasks_that_include_refuses() -> None:
    app = App("discovers")
    app.autodiscover(["emporium.mail", "emporium.broken"])
    app.load()
    assert sorted(app.tasks) == ["emporium.mail.deep.tasks.one", "emporium.mail.tasks.one"]
    strict = App("strict", include="emporium.broken.**.tasks")
    strict.autodiscover("emporium.broken")  # what is included by name stays checked
    with pytest.raises(Misconfigured, match=r"no module of package 'emporium\.broken' fits"):
        strict.load()


@pytest.mark.parametrize(
    ("package", "said"),
    [
        ("emporum", "there is no package 'emporum'; did you mean 'emporium'?"),
        ("emporium.mial", "there is no package 'emporium.mial'; did you mean 'emporium.mail'?"),
        ("emporium.tasks", "but a module: include='emporium.tasks' includes that"),
    ],
)
def test_autodiscover_refuses_what_is_no_package_and_names_a_similar_one(package: str, said: str) -> None:
    app = App("discovers")
    app.autodiscover([package, "emporium.mail"])
    with pytest.raises(Misconfigured) as caught:
        app.load()
    assert said in str(caught.value)


def test_autodiscover_searches_the_applications_own_package_by_default(folder: Path) -> None:
    (folder / "emporium" / "app.py").write_text(OWN_PACKAGE)
    app = importlib.import_module("emporium.app").app
    app.load()
    assert "emporium.mail.deep.tasks.one" in app.tasks
    (folder / "alone.py").write_text(OWN_PACKAGE)
    with pytest.raises(
        Misconfigured, match=r"^module 'alone' is in no package: name those that are searched"
    ):
        importlib.import_module("alone")
    with pytest.raises(Misconfigured, match=r"it takes modules, not files"):
        App("discovers").autodiscover("src/emporium")


OWN_PACKAGE = "from celery5 import App\napp = App('own')\napp.autodiscover()\n"


def test_the_tasks_of_a_package_are_loaded_by_one_line() -> None:
    app = App("includes", include="emporium.**.tasks")
    app.load()
    app.load()
    assert sorted(app.tasks) == [
        "emporium.mail.deep.tasks.one",
        "emporium.mail.tasks.one",
        "emporium.tasks.one",
    ]
    assert {task.app for task in app.tasks.values()} == {app}


def test_a_free_task_finds_the_application_whose_pattern_covers_it(folder: Path) -> None:
    # A package of its own: applications of other tests that are not collected yet cover the other one.
    (folder / "emporium").rename(folder / "emporium_of_its_own")
    app = App("includes", include=["emporium_of_its_own.**.tasks"])
    task = importlib.import_module("emporium_of_its_own.mail.tasks").one
    assert task.app is app
    assert list(app.tasks) == [task.name]  # the others were not loaded


@pytest.mark.parametrize(
    ("include", "said"),
    [
        ("no_such.**.tasks", "include 'no_such.**.tasks': there is no package 'no_such'"),
        ("no_such.deep.*", "there is no module 'no_such' to include"),
        ("emporium.tasks.*", "there is no package 'emporium.tasks'"),
        ("emporium.tasks.deep.*", "there is no package 'emporium.tasks.deep'"),
        (
            "emporium.**.jobz",
            "no module of package 'emporium' fits; a folder with modules needs an __init__.py",
        ),
        ("emporium.nothing", "there is no module 'emporium.nothing' to include"),
        (
            "emporium.broken.jobs",
            "'emporium.broken.jobs' fails while it is imported: ModuleNotFoundError: No module",
        ),
        ("emporium.broken.ends", "'emporium.broken.ends' fails while it is imported: SystemExit: no"),
    ],
)
def test_what_cannot_be_included_is_told_in_one_line(include: str, said: str) -> None:
    with pytest.raises(Misconfigured) as caught:
        App("includes", include=[include]).load()
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("include", "said"),
    [
        ("**.tasks", "a pattern begins with a package, such as shop.**.tasks"),
        ("*", "a pattern begins with a package"),
        ("shop*.tasks", "a pattern begins with a package"),
        ("**/tasks.py", "it takes modules, not files, such as shop.**.tasks"),
        ("./shop/mail.py", "it takes modules, not files, such as shop.mail"),
        ("", "give the names of modules"),
        ([sys], "give the names of modules, such as shop.mail"),
    ],
)
def test_what_is_no_name_of_a_module_is_refused_at_once(include: Any, said: str) -> None:
    with pytest.raises(Misconfigured, match=re.escape(said)):
        App("includes", include=include)
