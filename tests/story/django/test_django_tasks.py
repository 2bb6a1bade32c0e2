"""Django's own tasks (`django.tasks`, from Django 6) with the backend of celery5."""

from importlib.util import find_spec
from pathlib import Path

import django
import pytest

from celery5.broker.servers.embedded import EmbeddedServer
from tests.story.django.projects import Project

pytestmark = pytest.mark.skipif(
    find_spec("django.tasks") is None,
    reason=f"Django {django.__version__} has no django.tasks, which came with Django 6 (Python 3.12)",
)
TASKS = """
from django.tasks import task

@task
def add(a, b=1):
    return a + b

@task(takes_context=True, queue_name="mails", priority=5)
def describe(context, order):
    result = context.task_result
    return [result.id, context.attempt, result.args, result.kwargs]

@task
async def upper(text):
    return text.upper()

class Refused(Exception): ...

@task
def fail():
    raise ValueError("never")

@task
def refuse():
    raise Refused
"""
SETTINGS = """
USE_TZ = True
DATABASES = {}
INSTALLED_APPS = ["celery5.contrib.django", "orders"]
TASKS = {
    "default": {
        "BACKEND": "celery5.contrib.django.Celery5Backend",
        "QUEUES": ["default", "mails"],
        "OPTIONS": {"max_retries": 0},
    }
}
"""


@pytest.fixture
def project(tmp_path: Path, own_server: EmbeddedServer) -> Project:
    project = Project(tmp_path, CELERY5_BROKER=own_server.url)
    project.write("shop/settings.py", SETTINGS)
    project.write("orders/tasks.py", TASKS)
    return project


RUN = """
import asyncio, time
from datetime import timedelta
from django.tasks import TaskResultStatus, task_backends
from django.tasks.exceptions import TaskResultDoesNotExist, TaskResultMismatch
from django.utils import timezone
from celery5.contrib.django import get_app
from orders.tasks import add, describe, fail, refuse, upper

def finish(result):
    end = time.monotonic() + 20
    while not result.is_finished and time.monotonic() < end:
        time.sleep(0.01)
        result.refresh()
    return result

first = add.enqueue(2, b=3)
assert first.status == TaskResultStatus.READY and first.args == [2] and first.kwargs == {"b": 3}
done = finish(add.get_result(first.id))
print(done.status, done.return_value, done.attempts, done.enqueued_at <= done.finished_at)
context = finish(describe.enqueue(7))
print(context.return_value == [context.id, 1, [7], {}])
print(finish(asyncio.run(upper.aenqueue("ada"))).return_value, finish(upper.enqueue(text="bob")).return_value)
failed = finish(fail.enqueue())
print(failed.status, failed.errors[0].exception_class, "never" in failed.errors[0].traceback)
print(finish(refuse.enqueue()).errors[0].exception_class)
later = add.using(run_after=timezone.now() + timedelta(hours=1), priority=-7).enqueue(1)
details = get_app().find(later.id)
print(details.state, details.priority, asyncio.run(add.aget_result(later.id)).status)
job = get_app().find(describe.enqueue(8).id)
print(job.queue, job.task)
for attempt in (lambda: add.get_result("nothing"), lambda: describe.get_result(later.id)):
    try:
        attempt()
    except (TaskResultDoesNotExist, TaskResultMismatch) as error:
        print(type(error).__name__)
"""


def test_tasks_of_django_are_jobs(project: Project) -> None:
    with project.serve("worker", "start") as worker:
        worker.ready()
        assert project.run(RUN).splitlines() == [
            "SUCCESSFUL 5 1 True",
            "True",
            "ADA BOB",
            "FAILED <class 'ValueError'> True",
            "<class 'orders.tasks.Refused'>",
            "SCHEDULED low READY",
            "mails orders.tasks.describe",
            "TaskResultDoesNotExist",
            "TaskResultMismatch",
        ]
    assert worker.ended().code == 0, worker.err


def test_a_task_that_is_imported_before_the_apps_are_ready_is_one_of_the_application(
    project: Project,
) -> None:
    project.write("orders/models.py", "from orders.tasks import add\n")
    text = "from celery5.contrib.django import get_app\nprint(sorted(get_app().tasks)[:1])"
    assert project.run(text) == "['orders.tasks.add']\n"


def test_signals_of_django_are_sent_around_the_function(project: Project) -> None:
    text = """
    from django.tasks.signals import task_enqueued, task_finished, task_started
    from celery5.contrib.django import get_app
    from celery5.testing import recorded
    from orders.tasks import add, fail
    seen = []
    def note(signal, task_result, **_):
        seen.append(f"{task_result.task.name} {task_result.status}")
    for signal in (task_enqueued, task_started, task_finished):
        signal.connect(note)
    with recorded(get_app()) as sent:
        add.enqueue(1)
        print(sent.run())
        fail.enqueue()
        try:
            sent.run()
        except ValueError as error:
            print(error)
    print(seen)
    """
    said = project.run(text).splitlines()
    assert said[:2] == ["[2]", "never"]
    assert said[2] == str(
        ["add READY", "add RUNNING", "add SUCCESSFUL", "fail READY", "fail RUNNING", "fail FAILED"]
    )


def test_mistakes_are_told(project: Project) -> None:
    project.write("orders/models.py", "from orders.tasks import add\n")
    project.write("shop/settings.py", SETTINGS.replace('"celery5.contrib.django", ', ""))
    assert "TASKS['default'] needs celery5.contrib.django in INSTALLED_APPS" in project.manage("check").err
    project.write("orders/models.py", "")
    project.write("shop/settings.py", SETTINGS.replace("max_retries", "queue"))
    text = "try:\n    import orders.tasks\nexcept Exception as error:\n    print(error)"
    assert project.run(text) == "TASKS['default']: OPTIONS has 'queue', which each task of Django has\n"
