"""Migrate a Django project: what `celery5 migrate` writes and names is all that a project of ten tasks needs."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.story.cli.commands import celery5, environment
from tests.story.migrating.projects import unpack

BY_HAND = [
    (
        "proj/celery.py",
        """from celery.signals import task_failure
""",
        """from contextlib import contextmanager

from celery5 import BootStep
from celery5.observability import Dead, Middleware
""",
    ),
    (
        "proj/celery.py",
        """@task_failure.connect
def note_failure(sender=None, task_id=None, exception=None, **kwargs):
    failures.append(f"{sender.name}: {exception}")
""",
        """class Failures(Middleware):
    @contextmanager
    def running(self, job):
        yield
        if isinstance(job.outcome, Dead):
            failures.append(f"{job.task}: {job.exception}")


app.add_middleware(Failures())
""",
    ),
    ("shop/tasks.py", "from celery.signals import worker_process_init\n", ""),
    (
        "shop/tasks.py",
        """@worker_process_init.connect
def open_client(**kwargs):
    global client
""",
        """async def open_client():
    global client
""",
    ),
    (
        "proj/celery.py",
        'app = App("proj", ',
        """async def open_client():
    from shop import tasks

    await tasks.open_client()


app = App("proj", bootsteps=[BootStep("client", open_client)], """,
    ),
    ("shop/tasks.py", "import_row.chunks(zip(rows), 10)", "import_row.chunks(rows, 10)"),
    ("shop/views.py", '"state": result.state', '"state": result.status()'),
    (
        "shop/views.py",
        'charge.apply_async(kwargs={"order_id": order_id}, priority=9)',
        'charge.options(priority="high").delay(order_id=order_id)',
    ),
    ("proj/settings.py", '    "django_celery_results",\n', ""),
]
"""What a person changes after `--write`: the file, what is there, and what is to be there."""
RUN = """
import json, os, time
import django
os.environ["DJANGO_SETTINGS_MODULE"] = "proj.settings"
django.setup()
from django.core.management import call_command
call_command("migrate", run_syncdb=True, verbosity=0)
from celery5 import TaskFailed
from celery5.testing import running_worker
from proj.celery import app, failures
from shop import tasks, views
from shop.models import Order


def wait_for(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


with running_worker(app):
    order = views.create("ada")
    wait_for(lambda: Order.objects.get(pk=order).state == "receipt sent")
    found = {
        "total": tasks.total([1, 2, 3]).get(timeout=20),
        "monthly": tasks.monthly([1, 2]).get(timeout=20),
        "rows": tasks.import_rows([1, 2, 3]),
        "paid": views.pay(order),
        "state": json.loads(views.status(None, tasks.price.delay(2).id).content)["state"] != "",
        "later": tasks.later(order).id,
        "limit": app.settings.time_limit,
        "queue": app.tasks["shop.tasks.send_receipt"].queue,
    }
    try:
        views.cancel(order).get(timeout=20)
    except TaskFailed as error:
        found["refund"] = str(error)
    wait_for(lambda: failures)
    wait_for(lambda: Order.objects.filter(state="built").exists())
    found["failures"] = failures
    found["schedules"] = sorted(schedule.name for schedule in app.schedule.list())
print(json.dumps(found))
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return unpack("django_shop", tmp_path / "project")


def test_django_project_of_ten_tasks_runs_after_write_and_the_changes_by_hand(project: Path) -> None:
    migrated = celery5("migrate", ".", "--write", "--backup", "--json", cwd=project)
    assert migrated.code == 0, migrated
    report = json.loads(migrated.out)
    named = {
        file["path"]: {use["line_after"] for kind in ("by_hand", "no_counterpart") for use in file[kind]}
        for file in report["files"]
    }
    written = {path: (project / path).read_text() for path, _, _ in BY_HAND}
    for path, before, after in BY_HAND:
        # The receivers of signals are named, with what is written at the import and at the App instead of them.
        is_named_elsewhere = before.startswith(("from celery.signals", "app = App"))
        assert is_named_elsewhere or named[path] & _find_lines(written[path], before), before
        file = project / path
        file.write_text(file.read_text().replace(before, after))
    for file in project.rglob("*.py"):
        assert "celery." not in file.read_text().replace("proj.celery", "").replace("from .celery", "")

    done = subprocess.run(
        [sys.executable, "-c", RUN],
        cwd=project,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    refused = found.pop("refund")
    assert "failed at attempt 1" in refused  # Celery tries a job once, and so does the migrated one
    assert found == {
        "total": 6,
        "monthly": "month reported",
        "rows": [2, 4, 6],
        "paid": 1,
        "state": True,
        "later": "receipt-1",
        "limit": 20,
        "queue": "mail",
        "failures": ["shop.tasks.refund: order 1: not wanted"],
        "schedules": ["clean up at night", "rebuild the index"],
    }


def _find_lines(text: str, part: str) -> set[int]:
    """Return the numbers of the lines of a part that is there once."""
    assert text.count(part) == 1, part
    first = text[: text.index(part)].count("\n") + 1
    return set(range(first, first + part.rstrip("\n").count("\n") + 1))


def test_write_refuses_files_that_git_does_not_keep(project: Path) -> None:
    refused = celery5("migrate", ".", "--write", cwd=project)
    assert refused.code == 1
    assert (
        refused.error
        == "Error: nothing is written: proj/celery.py is not in git: add and commit it, or give --backup"
    )
    assert not list(project.rglob("*.orig"))

    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    for words in (
        ["init", "-q"],
        ["add", "."],
        ["-c", "user.name=a", "-c", "user.email=a@b.c", "commit", "-q", "-m", "as it was"],
    ):
        subprocess.run(["git", *words], cwd=project, check=True, timeout=30)
    settings = project / "proj" / "settings.py"
    settings.write_text(settings.read_text() + "\n")
    refused = celery5("migrate", ".", "--write", cwd=project)
    assert (
        "proj/settings.py has changes that are not committed: commit them, or give --backup" in refused.error
    )
    assert "from celery import" in (project / "proj" / "celery.py").read_text()

    subprocess.run(["git", "checkout", "-q", "."], cwd=project, check=True, timeout=30)
    written = celery5("migrate", ".", "--write", cwd=project)
    assert written.code == 0, written
    assert "changes are written" in written.out
    assert "from celery5 import" in (project / "proj" / "celery.py").read_text()


def test_diff_of_the_report_is_what_write_does(project: Path, tmp_path: Path) -> None:
    report = json.loads(celery5("migrate", ".", "--json", cwd=project).out)
    other = unpack("django_shop", tmp_path / "other")
    celery5("migrate", ".", "--write", "--backup", cwd=other)
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    diff = "".join(file["diff"] for file in report["files"])
    subprocess.run(["git", "apply", "-"], cwd=project, input=diff, text=True, check=True, timeout=30)
    for file in project.rglob("*.py"):
        assert file.read_text() == (other / file.relative_to(project)).read_text()
