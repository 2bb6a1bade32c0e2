"""Tests of a Django project: jobs sent outside of the testing kit never reach the broker of the settings."""

from pathlib import Path

import pytest

from celery5 import App, Misconfigured
from celery5.broker.servers.embedded import EmbeddedServer
from celery5.protocol.job.job import new_id
from celery5.testing import running_worker
from tests.story.django.projects import Project

TASKS = """
from celery5 import event, task

@event
class Paid:
    order: int

@task
def charge(order: int) -> int:
    return order
"""
TESTS = """
from django.test import SimpleTestCase, override_settings
from celery5 import BrokerUnavailable, Misconfigured, chain
from celery5.contrib.django import get_app
from celery5.testing import in_memory, recorded
from orders.tasks import Paid, charge

class Sending(SimpleTestCase):
    def test_it(self):
        app = get_app()
        REFUSED
        with recorded(app) as sent:
            charge.delay(1)
            assert len(sent.jobs) == 1
        with in_memory(app) as jobs:
            result, run = charge.delay(2), chain(charge.s(3)).start()
            jobs.run()
            assert (result.get(), run.get()) == (2, 3)
        REFUSED
        with override_settings(CELERY5={"broker_in_tests": True}), self.assertRaises(BrokerUnavailable):
            charge.delay(1)
        REFUSED
        app.use_broker("redis://127.0.0.1:2/0")  # chosen on purpose: it is tried
        with self.assertRaises(BrokerUnavailable):
            charge.delay(1)
"""
REFUSED = """
        for send in (lambda: charge.delay(1), lambda: Paid.delay(order=1), lambda: chain(charge.s(1)).start()):
            with self.assertRaisesRegex(Misconfigured, "^a test must not use the broker .* in_memory"):
                send()
"""


def test_what_a_test_sends_outside_of_the_testing_kit_is_refused_in_one_line(tmp_path: Path) -> None:
    project = Project(tmp_path, CELERY5_BROKER="")
    project.configure('"orders"', '"broker": "redis://127.0.0.1:1/0", "backlog": 0')
    project.write("orders/tasks.py", TASKS)
    project.write("orders/tests.py", TESTS.replace("REFUSED", REFUSED.strip()))
    ended = project.manage("test", "orders")
    assert ended.code == 0, ended.err


PARTS = """
from celery5 import App, BootStep

async def open_session() -> None: ...

async def serve() -> None: ...

app = App("shop", bootsteps=[BootStep("session", open_session)], services=[serve])
"""
CHECKED = (
    TESTS
    + """
    def test_check(self):
        from django.core.management import call_command

        with in_memory(get_app()) as jobs:
            call_command("check")
            charge.delay(2)
            assert len(jobs.run()) == 1
        REFUSED
"""
)


def test_the_check_before_the_tests_may_wire_boot_steps_and_services(tmp_path: Path) -> None:
    project = Project(tmp_path, CELERY5_BROKER="")
    project.configure('"orders"', '"broker": "redis://127.0.0.1:1/0", "backlog": 0')
    project.write("shop/celery5.py", PARTS)
    project.write("orders/tasks.py", TASKS)
    project.write("orders/tests.py", CHECKED.replace("REFUSED", REFUSED.strip()))
    ended = project.manage("test", "orders")
    assert ended.code == 0, ended.err
    assert "Ran 2 tests" in ended.err


def test_worker_of_a_test_may_have_the_broker_of_the_settings_on_purpose(server: EmbeddedServer) -> None:
    app = App(f"chosen-{new_id()}", broker=server.url)

    @app.task
    def add(a: int) -> int:
        return a + 1

    def refuse() -> None:
        raise Misconfigured("not here")

    app.guard_broker(refuse)
    with running_worker(app, broker=server.url):
        assert add.delay(1).get() == 2
    with pytest.raises(Misconfigured, match="not here"):
        add.delay(1)
