"""Boxed tasks in the tests of a Django project: no box reaches a database, or sends a mail, outside of the test."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from tests.story.django import projects
from tests.story.django.projects import Project

DATABASES = """
DATABASES["default"] = {{"ENGINE": "django.db.backends.sqlite3", "NAME": "shop.db", "TEST": {test}}}
DATABASES["replica"] = {{**DATABASES["default"], "TEST": {{"MIRROR": "default"}}}}
EMAIL_BACKEND, EMAIL_FILE_PATH = "django.core.mail.backends.filebased.EmailBackend", "mails"
DATABASES["archive"] = {{"ENGINE": "django.db.backends.sqlite3", "NAME": "archive.db"}}
"""
MODELS = """
from django.db import models

class Order(models.Model):
    customer = models.TextField()

    class Meta:
        app_label = "orders"
"""
TASKS = """
from django.core.mail import send_mail
from celery5 import task
from orders.models import Order

@task(boxed=True, max_retries=0)
def purge(database: str = "default") -> int:
    return Order.objects.using(database).all().delete()[0]

@task(boxed=True)
def write() -> int:
    return send_mail("subject", "text", "shop@example.com", ["ada@example.com"])

@task(boxed=True, loop="asyncio", max_retries=0)
async def apurge(database: str = "default") -> int:
    return (await Order.objects.using(database).all().adelete())[0]
"""
TESTS = """
from django.test import TestCase, TransactionTestCase
from celery5 import TaskFailed
from celery5.contrib.django import get_app
from celery5.testing import in_memory, running_worker
from orders.models import Order
from orders.tasks import apurge, purge, write

def refuse(case, jobs, task, database, reason):
    task.delay(database)
    with case.assertRaisesRegex(TaskFailed, reason):
        jobs.run()

"""
IN_MEMORY = """
REASON = "'default' is in the memory of another process.* give .* a file for tests"

class Inside(TestCase):
    def test_it(self):
        Order.objects.create(customer="ada")
        with in_memory(get_app()) as jobs:
            refuse(self, jobs, purge, "default", REASON)
            refuse(self, jobs, apurge, "default", REASON)
            sent = write.delay()
            jobs.run()
            assert sent.get() == 1
        assert Order.objects.count() == 1

class Outside(TransactionTestCase):
    def test_it(self):
        Order.objects.create(customer="ada")
        with running_worker(get_app()):
            with self.assertRaisesRegex(TaskFailed, REASON):
                purge.delay().get()
        assert Order.objects.count() == 1
"""
IN_FILE = """
class Outside(TransactionTestCase):
    databases = {"default", "replica"}

    def add(self):
        Order.objects.bulk_create([Order(customer=name) for name in ("ada", "bob", "eve")])

    def test_it(self):
        with in_memory(get_app()) as jobs:
            refuse(self, jobs, purge, "archive", "'archive' is the real one: this test has no test database for it")
            for task in (purge, apurge):
                for database in ("default", "replica"):
                    self.add()
                    result = task.delay(database)
                    jobs.run()
                    assert (result.get(), Order.objects.count()) == (3, 0)
        self.add()
        with running_worker(get_app()):
            assert (purge.delay().get(), Order.objects.count()) == (3, 0)
"""


@pytest.mark.parametrize(
    ("test", "cases"), [({}, IN_MEMORY), ({"NAME": "test.db"}, IN_FILE)], ids=["memory", "file"]
)
def test_boxed_tasks_in_tests_leave_the_databases_and_mail_of_the_project_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, test: dict[str, str], cases: str
) -> None:
    monkeypatch.setattr(projects, "LIMIT", 120.0)  # it starts four processes, one after another
    project = Project(tmp_path)
    project.configure('"orders"')
    settings = tmp_path / "shop/settings.py"
    settings.write_text(settings.read_text() + DATABASES.format(test=test))
    project.write("orders/models.py", MODELS)
    project.write("orders/tasks.py", TASKS)
    project.write("orders/tests.py", TESTS + cases)
    files = [tmp_path / "shop.db", tmp_path / "archive.db"]
    for file in files:
        with closing(sqlite3.connect(file)) as database, database:
            database.execute("CREATE TABLE orders_order (id INTEGER PRIMARY KEY, customer TEXT NOT NULL)")
            database.executemany("INSERT INTO orders_order (customer) VALUES (?)", ["x"] * 5)
    ended = project.manage("test", "orders", CELERY5_BROKER="")
    assert ended.code == 0, ended.err
    assert not (tmp_path / "mails").exists()
    for file in files:
        with closing(sqlite3.connect(file)) as database:
            assert database.execute("SELECT count(*) FROM orders_order").fetchone() == (5,), file
