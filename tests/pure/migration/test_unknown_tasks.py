"""Unknown tasks: a call of what may be a task, and was found by no name, is listed with its place and one advice."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from celery5.cli.standalone.migrate import migrate as migrate_command
from celery5.migration.files.findings import CeleryUse
from celery5.migration.rewrite import migrate_project

TASKS = """
from celery import Celery, shared_task

app = Celery("shop")


@app.task
def add(x, y=1): ...


def _total(values): ...


total = shared_task(name="shop.total")(_total)
plus = add
"""
HEAD = """
from celery import current_app, signature
from shop.api import pay, summed
from shop.tasks import add, app, plus
from mailer.tasks import send_mail
from shop import registry


"""


def write_project(folder: Path, text: str) -> None:
    files = {
        "shop/__init__.py": "",
        "shop/tasks.py": TASKS,
        "shop/api.py": "from .tasks import add as pay, total as summed\n",
        "shop/registry.py": "TASKS = {}\n",
        "shop/views.py": HEAD + text,
    }
    (folder / "shop").mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(content)


def migrate_views(folder: Path, text: str) -> tuple[str, list[CeleryUse]]:
    """Return a module after the changes, and what is left to be done or checked in it."""
    write_project(folder, text)
    (report,) = [file for file in migrate_project(folder).report.files if file.path == "shop/views.py"]
    line = HEAD.count("\n") + 1
    return report.text or HEAD + text, [
        use for use in report.findings if use.kind != "change" and use.line >= line
    ]


UNKNOWN = [
    ("def send(task): task.delay(1)", "decide", "task.delay"),
    ("def send(task): task.run(1)", "decide", "task.run"),
    ("def send(task): task.apply(args=(1,))", "decide", "task.apply"),
    ("def send(task): task.subtask((1,))", "decide", "task.subtask"),
    ("def send(task): task.apply_async((1,))", "by hand", "task.apply_async"),
    ("def send(job): job.si(1)", "by hand", "job.si"),
    ("registry.TASKS['add'].delay(1)", "decide", "registry.TASKS['add'].delay"),
    ("registry.TASKS['add'].run(1)", "decide", "registry.TASKS['add'].run"),
    ("registry.get('add')(1).apply_async()", "by hand", "registry.get('add')(1).apply_async"),
    ("class View:\n    def post(self): self.notify_task.run(1)", "decide", "self.notify_task.run"),
    ("send_mail.delay(1)", "decide", "send_mail.delay"),
    ("send_mail.run(1)", "decide", "send_mail.run"),
    ("current_app.tasks[name].run(1)", "by hand", "run()"),
    ("app.send_task('other.task', (1,))", "by hand", 'the task "other.task"'),
    ("signature('other.task', args=(1,)).delay()", "by hand", 'the task "other.task"'),
    ("app.send_task(name, (1,))", "decide", "the task name"),
    ("signature(name).delay()", "decide", "the task name"),
    ("print(registry.add.apply_async)", "by hand", "registry.add.apply_async"),
]


@pytest.mark.parametrize(("text", "kind", "name"), UNKNOWN)
def test_call_of_what_may_be_a_task_is_listed_with_its_place(
    tmp_path: Path, text: str, kind: str, name: str
) -> None:
    _, (use,) = migrate_views(tmp_path, f"{text}\n")
    assert (use.kind, use.name, use.line) == (kind, name, HEAD.count("\n") + text.count("\n") + 1)
    assert use.advice


KNOWN = [
    ("pay.apply_async((1,), countdown=3)", "pay.options(countdown=3).delay(1)"),
    ("plus.apply_async((1,), countdown=3)", "plus.options(countdown=3).delay(1)"),
    ("summed.apply_async(([1],))", "summed.delay([1])"),
    ("add.delay(1)", "add.delay(1)"),
    ("pay.delay(1)", "pay.delay(1)"),
    ("app.tasks[name].apply_async((1,), queue='q')", "app.tasks[name].options(queue='q').delay(1)"),
    ("one = pay\none.apply_async((1,))", "one = pay\none.delay(1)"),
    ("subprocess.run(['ls'])", "subprocess.run(['ls'])"),
    ("server.run()", "server.run()"),
    ("pool.apply_async(add, (1,))", "pool.apply_async(add, (1,))"),
]


@pytest.mark.parametrize(("before", "after"), KNOWN)
def test_task_is_known_by_its_other_names(tmp_path: Path, before: str, after: str) -> None:
    text, uses = migrate_views(tmp_path, f"{before}\n")
    assert text.endswith(f"\n{after}\n")
    assert uses == []


@pytest.mark.parametrize("call", ["pay.run(1)", "plus.run(1)", "summed.run([1])"])
def test_run_of_a_task_by_another_name_is_a_change_by_hand(tmp_path: Path, call: str) -> None:
    _, (use,) = migrate_views(tmp_path, f"{call}\n")
    assert (use.kind, use.name) == ("by hand", "run()")


def test_file_alone_does_not_list_tasks_of_files_beside_it(tmp_path: Path) -> None:
    write_project(tmp_path, "add.delay(1)\nsend_mail.delay(1)\n")
    (report,) = migrate_project(tmp_path / "shop" / "views.py").report.files
    assert [use for use in report.findings if use.kind == "decide"] == []


def test_event_of_celery5_is_no_unknown_task(tmp_path: Path) -> None:
    text = """
from celery5 import App, Event

app = App("shop")


@app.event
class Paid(Event):
    order: int


Paid(1).delay()
Paid.delay(order=1)
"""
    (tmp_path / "events.py").write_text(text)
    assert migrate_project(tmp_path).report.files == ()


def test_entries_to_decide_have_their_own_list_and_a_comment_settles_them(tmp_path: Path) -> None:
    text = "from celery5 import App\n\napp = App('shop')\n\n\ndef send(task):\n    task.delay(1)\n"
    (tmp_path / "tasks.py").write_text(text)
    done = CliRunner(env={"COLUMNS": "120"}).invoke(migrate_command, [str(tmp_path)])
    assert done.output.startswith(
        "to decide\n---------\n  the program cannot judge these: change the code, or end"
    )
    assert "\n  tasks.py:7  task.delay\n      is this a task? delay(...) stays" in done.output
    assert done.output.endswith("\nnothing left to change, 1 to decide\n")
    done = CliRunner().invoke(migrate_command, [str(tmp_path), "--json"])
    assert '"to_decide":1' in done.output.replace(" ", "")
    (tmp_path / "tasks.py").write_text(text.replace("delay(1)", "delay(1)  # celery5: decided"))
    assert CliRunner().invoke(migrate_command, [str(tmp_path)]).output == "nothing left to do\n"
