"""Modules with tasks that no application would import: `celery5 migrate` includes them, or names them."""

from pathlib import Path

import pytest

from celery5.migration.files.findings import ProjectReport
from celery5.migration.files.writing import write_changes
from celery5.migration.rewrite import migrate_project

SHARED = "from celery import shared_task\n\n\n@shared_task\ndef pay(order_id): ...\n"
MAIN = 'from celery import Celery\n\napp = Celery("proj")\n'
SETTINGS = 'INSTALLED_APPS = ["orders.apps.OrdersConfig", "bills"]\n'


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        path = folder / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def migrate(folder: Path) -> ProjectReport:
    """Return the report, and write the changes."""
    migration = migrate_project(folder)
    write_changes(folder, migration.files, migration.report.files, backup=True)
    return migration.report


def list_left(report: ProjectReport) -> list[tuple[str, str]]:
    return [(file.path, use.name) for file in report.files for use in file.of_kind("by hand")]


@pytest.mark.parametrize("root", ["", "src__"])
def test_django_modules_not_called_tasks_are_included_by_the_app(tmp_path: Path, root: str) -> None:
    files = dict.fromkeys(
        ("orders__jobs", "orders__services__mail", "bills__tasks__late", "orders__tests__test_a"), SHARED
    )
    files |= {"proj__tasks": SHARED, "orders__apps": "", "proj__settings": SETTINGS, "manage": ""}
    write(tmp_path, **{f"{root}{name}": text for name, text in {**files, "proj__celery": MAIN}.items()})
    report = migrate(tmp_path)
    assert list_left(report) == []
    folder = tmp_path / root.replace("__", "/")
    text = (folder / "proj/celery.py").read_text()
    assert 'include=["orders.jobs", "orders.services.mail", "proj.tasks"]' in text
    assert list_left(migrate_project(tmp_path).report) == []
    write(folder, orders__late=SHARED)
    again = migrate_project(tmp_path).report
    assert ("proj/celery.py" if not root else "src/proj/celery.py", "App(include=)") in list_left(again)


def test_django_module_of_a_project_without_an_app_is_named_with_the_import(tmp_path: Path) -> None:
    write(tmp_path, orders__jobs=SHARED, orders__tasks=SHARED, settings=SETTINGS, manage="")
    report = migrate(tmp_path)
    assert list_left(report) == [("orders/jobs.py", "the module orders.jobs")]
    (use,) = (use for file in report.files for use in file.of_kind("by hand"))
    assert "import its tasks in orders.tasks: from orders.jobs import pay; or declare an App" in use.advice


CONFIGS = [
    'imports = ("shop.late", "shop.mail")\n',
    'from shop.main import app\n\napp.conf.imports = ["shop.late", "shop.mail"]\n',
    'from shop.main import app\n\napp.conf.update(imports=["shop.late", "shop.mail"], task_time_limit=3)\n',
]


@pytest.mark.parametrize("config", CONFIGS)
def test_setting_imports_becomes_include_of_the_app(tmp_path: Path, config: str) -> None:
    write(tmp_path, shop__celeryconfig=config, shop__main=MAIN.replace(")", ', include=["shop.a"])'))
    write(tmp_path, shop__late=SHARED)
    assert list_left(migrate(tmp_path)) == []
    assert 'include=["shop.a", "shop.late", "shop.mail"]' in (tmp_path / "shop/main.py").read_text()
    assert "imports" not in (tmp_path / "shop/celeryconfig.py").read_text()


@pytest.mark.parametrize(
    "line",
    [
        'app.autodiscover_tasks(["shop"])',
        "app.autodiscover_tasks(find())",
    ],
)
def test_module_that_is_discovered_is_not_included_again(tmp_path: Path, line: str) -> None:
    write(tmp_path, shop__tasks=SHARED, shop__main=f"{MAIN}{line}\n")
    migrate(tmp_path)
    assert 'App("proj", retry_policy' in (tmp_path / "shop/main.py").read_text()


def test_setting_imports_of_a_project_with_two_apps_is_left_and_named(tmp_path: Path) -> None:
    write(tmp_path, celeryconfig='imports = ["late"]\n', one=MAIN, two=MAIN)
    assert list_left(migrate(tmp_path)) == [("celeryconfig.py", "imports")]
    assert "include" not in (tmp_path / "one.py").read_text()
