"""The connections of Django around each job: their age, their health checks, and which stay open."""

from pathlib import Path

import pytest

from tests.story.django.projects import Project

JOBS = """
import asyncio, time
from asgiref.sync import sync_to_async
from django.db import connection, connections
from celery5.contrib.django import DjangoConnections
from celery5.runners.surrounding import make_surround

surround = make_surround([DjangoConnections().calling])
connection.settings_dict.update({settings})

def use():
    for _ in range(2):
        with connection.cursor() as cursor:
            cursor.execute("select 1")
    return connection.connection

def run(job=use):
    return surround(job, "thread")()
"""


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


def run(project: Project, script: str, **settings: object) -> str:
    """Return the output of a script whose jobs use a connection with these settings."""
    return project.run(JOBS.format(settings=settings) + script)


def test_without_an_age_no_connection_stays_open_after_a_job(project: Project) -> None:
    script = "run()\nprint(connection.connection)\nconnection.ensure_connection()\nrun()\nprint(connection.connection)"
    assert run(project, script, CONN_MAX_AGE=0) == "None\nNone\n"


def test_a_connection_is_used_until_its_age_and_no_longer(project: Project) -> None:
    script = """
first, second = run(), run()
print(first is second)
connection.close_at = time.monotonic() - 1  # it was idle meanwhile
third = run()
print(third is second)

def grow_old():
    use()
    connection.close_at = time.monotonic() - 1

run(grow_old)
print(connection.connection)
"""
    assert run(project, script, CONN_MAX_AGE=60) == "True\nFalse\nNone\n"


def test_the_health_of_a_connection_is_checked_once_for_each_job(project: Project) -> None:
    script = """
first = run()
checks = []
connection.is_usable = lambda: checks.append(1) or True
print(run() is first, len(checks), run() is first, len(checks))
connection.is_usable = lambda: False
print(run() is first)
"""
    settings = {"CONN_MAX_AGE": None, "CONN_HEALTH_CHECKS": True}
    assert run(project, script, **settings) == "True 1 True 2\nFalse\n"


def test_an_asyncio_job_leaves_no_connection_whatever_its_settings(project: Project) -> None:
    script = """
opened = []

async def job():
    opened.append(await sync_to_async(lambda: (use(), connections["default"])[1])())

async def work():
    for _ in range(2):
        await surround(job, "asyncio")()
    while any(connection.connection for connection in opened):  # its thread closes it
        await asyncio.sleep(0.01)

asyncio.run(work())
print(opened[0] is opened[1])
"""
    assert run(project, script, CONN_MAX_AGE=None, CONN_HEALTH_CHECKS=True) == "False\n"
