"""Jobs that are sent after the commit of Django's transaction: `delay_on_commit`, also on event loops."""

from pathlib import Path

import pytest

from celery5 import App, Misconfigured
from celery5.tasks import on_commit
from tests.story.django.projects import Project

SETTINGS = """
USE_TZ = True
DATABASES = {
    name: {"ENGINE": "django.db.backends.sqlite3", "NAME": f"{name}.db"} for name in ("default", "archive")
}
INSTALLED_APPS = ["celery5.contrib.django"]
"""
START = """
import asyncio, trio
from django.db import transaction
from celery5.contrib.django import get_app
from celery5.testing import recorded

@get_app().task
def send(order: int) -> None: ...

def show(sent):
    print([(job.arguments["order"], job.priority) for job in sent.jobs])
    sent.clear()

def attempt(function, *arguments):
    try:
        function(*arguments)
    except Exception as error:
        print(f"{type(error).__name__}: {error}")

with recorded(get_app()) as sent:
"""


@pytest.fixture
def project(tmp_path: Path) -> Project:
    project = Project(tmp_path)
    project.write("shop/settings.py", SETTINGS)
    return project


def run(project: Project, script: str) -> list[str]:
    lines = [f"    {line}" for line in script.strip().splitlines()]
    return project.run("\n".join([START, *lines])).splitlines()


def test_a_job_is_sent_after_the_commit_and_never_after_a_rollback(project: Project) -> None:
    script = """
send.delay_on_commit(1)
show(sent)
with transaction.atomic():
    send.delay_on_commit(2)
    send.options(priority="high").delay_on_commit(order=3)
    try:
        with transaction.atomic():
            send.delay_on_commit(4)
            raise ValueError
    except ValueError:
        pass
    show(sent)
show(sent)
with transaction.atomic():
    send.delay_on_commit(5)
    transaction.set_rollback(True)
show(sent)
"""
    assert run(project, script) == ["[(1, '')]", "[]", "[(2, ''), (3, 'high')]", "[]"]


def test_the_transaction_may_be_one_of_another_database(project: Project) -> None:
    script = """
with transaction.atomic(using="archive"):
    send.s(1).delay_on_commit(using="archive")
    send.s(2).delay_on_commit()
    show(sent)
show(sent)
"""
    assert run(project, script) == ["[(2, '')]", "[(1, '')]"]


def test_arguments_are_checked_and_encoded_inside_of_the_transaction(project: Project) -> None:
    script = """
@get_app().task
def note(words: list[str]) -> None: ...

words = ["a"]
with transaction.atomic():
    attempt(send.delay_on_commit, "no number")
    note.delay_on_commit(words)
    words.append("b")
print([job.arguments for job in sent.jobs])
"""
    refused, jobs = run(project, script)
    assert refused.startswith("BadArguments: ")
    assert jobs == "[{'words': ['a']}]"


def test_an_error_of_the_sending_is_raised_after_the_commit_or_logged(project: Project) -> None:
    script = """
def fail(self, jobs):
    raise OSError("no broker")

import logging
logging.getLogger("django.db.backends.base").setLevel(logging.CRITICAL)
type(get_app()).dispatch = fail

def place(robust):
    with transaction.atomic():
        send.s(1).delay_on_commit(robust=robust)
    print("committed")

attempt(place, False)
attempt(place, True)
"""
    assert run(project, script) == ["OSError: no broker", "committed"]


def test_a_coroutine_on_asyncio_sends_after_the_commit_of_its_thread(project: Project) -> None:
    script = """
from asgiref.sync import sync_to_async

async def place():
    def begin():
        block = transaction.atomic()
        block.__enter__()
        return block
    block = await sync_to_async(begin)()
    await send.adelay_on_commit(1)
    await send.s(2).adelay_on_commit()
    show(sent)
    await sync_to_async(block.__exit__)(None, None, None)
    show(sent)
    await send.adelay_on_commit(3)
    show(sent)

asyncio.run(place())
"""
    assert run(project, script) == ["[]", "[(1, ''), (2, '')]", "[(3, '')]"]


def test_a_call_that_would_block_a_loop_or_has_no_connection_is_refused(project: Project) -> None:
    script = """
async def block():
    send.delay_on_commit(1)

attempt(asyncio.run, block())
attempt(trio.run, block)
attempt(trio.run, send.adelay_on_commit, 1)
show(sent)
"""
    on_asyncio, blocking, on_trio, jobs = run(project, script)
    awaited = "BlockingInEventLoop: this would block the {} event loop: await adelay_on_commit(...) instead"
    assert on_asyncio == awaited.format("asyncio")
    assert blocking == awaited.format("trio")
    assert on_trio.startswith("Misconfigured: adelay_on_commit: Django has no connections on Trio")
    assert jobs == "[]"


def test_without_django_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_commit, "find_spec", lambda _name: None)
    app = App("on-commit")

    @app.task
    def send(order: int) -> None: ...

    with pytest.raises(
        Misconfigured, match="Django is not installed: with another database, make the signature"
    ):
        send.delay_on_commit(1)
