"""Migrate a Django project by the command's listing alone: base class, signals, errbacks, retries, eager tests."""

import subprocess
import sys
from pathlib import Path

from celery5.migration.rewrite import migrate_project
from tests.story.cli.commands import environment
from tests.story.migrating.projects import unpack

CLIENT = """def open_client():
    yield BankClient()


Bank = Annotated[BankClient, Resource(open_client)]


@task
def note_bank_failure(failures: list[StepFailure]):
    for failure in failures:
        TaskLog.objects.create(job=failure.id, text=f"bank: {failure.message}")


@task
def record_failure(job: str, text: str):
    TaskLog.objects.create(job=job, text=text)
"""
MIDDLEWARE = """class Notes(Middleware):
    @contextmanager
    def calling(self, call):
        if call.kind == "thread" and call.job is not None:
            from billing.models import TaskLog

            TaskLog.objects.create(job=call.job.id, text=f"start {call.job.task}")
        yield


class Failures(Middleware):
    @asynccontextmanager
    async def running(self, job):
        yield
        from billing.tasks import record_failure

        if isinstance(job.outcome, Dead) and job.task != record_failure.name:
            await record_failure.adelay(job.id, f"failed {job.task}: {job.exception}")


app.add_middleware(Notes())
app.add_middleware(Failures())
"""
TESTS = """from django.test import TestCase

from billing.models import TaskLog
from billing.tasks import charge_linked, charge_safely, refund_all
from celery5.contrib.django import get_app
from celery5.testing import in_memory
from orders.models import Order
from orders.tasks import add_up


class Orders(TestCase):
    def test_place(self):
        with in_memory(get_app()) as jobs:
            with self.captureOnCommitCallbacks(execute=True):
                order = self.client.post("/orders/", {"customer": "ada"}).json()["order"]
            jobs.run()
            job = self.client.get("/rebuild/").json()["job"]
            jobs.run()
            assert self.client.get(f"/jobs/{job}/").json() == {"state": "SUCCESS", "ready": True, "result": None}
        assert Order.objects.get(pk=order).state == "shipped"
        assert TaskLog.objects.filter(text="start orders.tasks.add_up").count() == 1

    def test_failures(self):
        order = Order.objects.create(customer="bob")
        with in_memory(get_app()) as jobs:
            charge_safely(order.pk, 2000)
            charge_linked(0, 2000)
            refund_all([1])
            jobs.run(raise_errors=False)
        texts = [*TaskLog.objects.exclude(text__startswith="start").values_list("text", flat=True)]
        assert sorted(texts) == [
            "billing.tasks.log_bound_error",
            "errback: BankError",
            "failed billing.tasks.charge: 2000 is too much",
            "failed billing.tasks.charge: 2000 is too much",
        ]
        assert TaskLog.objects.filter(text="start billing.tasks.charge").count() == 8
        assert Order.objects.get(pk=order.pk).state == "unpaid"

    def test_add_up(self):
        assert add_up([1, 2]) == {"total": 3}
"""
BASE = """class BankTask(Task):
    _client = None
    abstract = True

    @property
    def client(self):
        if self._client is None:
            self._client = BankClient()
        return self._client

    def on_failure(self, exc, task_id, args, kwargs, einfo):
        TaskLog.objects.create(job=task_id, text=f"bank: {exc}")
        super().on_failure(exc, task_id, args, kwargs, einfo)
"""
RETRY = """        try:
            raise self.retry(exc=exc, countdown=2 ** (self.attempt - 1))
        except MaxRetriesExceededError:
            Order.objects.filter(pk=order_id).update(state="unpaid")
            raise
"""
RETRY_AFTER = """        if self.attempt > 3:
            Order.objects.filter(pk=order_id).update(state="unpaid")
        raise self.retry(exc=exc, countdown=2 ** (self.attempt - 1))
"""
IMPORTS = """from typing import Annotated

from celery5.tasks import INJECTED, Resource
from celery5.workflows import StepFailure
"""
ERRBACK = """def log_error(request, exc, traceback):
    TaskLog.objects.create(job=request.id, text=f"errback: {exc!r}")
"""
ERRBACK_AFTER = """def log_error(failures: list[StepFailure]):
    for failure in failures:
        TaskLog.objects.create(job=failure.id, text=f"errback: {failure.type}")
"""
BOUND = """def log_bound_error(self, task_id):
    TaskLog.objects.create(job=task_id, text=f"{self.task}")
"""
BOUND_AFTER = """def log_bound_error(self, failures: list[StepFailure]):
    for failure in failures:
        TaskLog.objects.create(job=failure.id, text=f"{self.task}")
"""
SIGNALS = """@task_prerun.connect
def on_start(sender=None, task_id=None, task=None, **kwargs):
    from billing.models import TaskLog

    TaskLog.objects.create(job=task_id, text=f"start {task.name}")


@task_failure.connect
def on_failure(sender=None, task_id=None, exception=None, **kwargs):
    from billing.models import TaskLog

    TaskLog.objects.create(job=task_id, text=f"failed {sender.name}: {exception}")
"""
SIGNAL_IMPORTS = """from contextlib import asynccontextmanager, contextmanager

from celery5.observability import Dead, Middleware
"""
CHARGE = "def charge(self, order_id, amount):"
REFUND = "def refund(self, order_id):"
BY_HAND = [
    (
        "billing/tasks.py",
        "from celery import Task\nfrom celery.exceptions import MaxRetriesExceededError\n",
        IMPORTS,
    ),
    ("billing/tasks.py", BASE, CLIENT),
    ("billing/tasks.py", "    base=BankTask,\n    rate", "    on_failure=note_bank_failure,\n    rate"),
    ("billing/tasks.py", "    base=BankTask,\n", "    on_failure=note_bank_failure,\n"),
    ("billing/tasks.py", CHARGE, "def charge(self, order_id, amount, client: Bank = INJECTED):"),
    ("billing/tasks.py", "self.client.pay(order_id, amount)", "client.pay(order_id, amount)"),
    ("billing/tasks.py", RETRY, RETRY_AFTER),
    ("billing/tasks.py", REFUND, "def refund(self, order_id, client: Bank = INJECTED):"),
    ("billing/tasks.py", "self.client.pay(order_id, -1)", "client.pay(order_id, -1)"),
    ("billing/tasks.py", ERRBACK, ERRBACK_AFTER),
    ("billing/tasks.py", BOUND, BOUND_AFTER),
    ("billing/tasks.py", "job.apply_async(link_error=log_error.s())", "job.start(on_failure=log_error)"),
    (
        "billing/tasks.py",
        "charge.s(order_id, amount).on_error(log_error.s()).delay()",
        "charge.options(on_failure=log_error).delay(order_id, amount)",
    ),
    (
        "billing/tasks.py",
        'charge.apply_async((order_id, amount), link_error=log_bound_error.s(), queue="slow")',
        'charge.options(on_failure=log_bound_error, queue="slow").delay(order_id, amount)',
    ),
    ("orders/views.py", '"state": result.state', '"state": result.status()'),
    ("orders/views.py", "result.ready()", "not wait([result], timeout=0)[1]"),
    ("orders/views.py", "result.successful()", 'result.status() == "SUCCESS"'),
    ("orders/views.py", "result.result", "result.get()"),
    (
        "store/celery.py",
        "from celery.signals import task_failure, task_postrun, task_prerun\n",
        SIGNAL_IMPORTS,
    ),
    ("store/celery.py", SIGNALS, MIDDLEWARE),
    ("store/celery.py", "{self.request!r}", "{self!r}"),
]
"""The changes of a person after `--write`, by the advice alone: the file, the old text and the new text."""
WITHOUT_A_LINE = ("def charge", "def refund", "from celery import Task")
"""The parameters and imports that the advice on another line of the same task names."""


TO_DECIDE = {"parameters without annotations", "the backlog", "time limit"}
"""Findings of this project that stay to be decided."""


def find_left(project: Path) -> dict[str, set[int]]:
    """Return the lines of each file that are to be changed by hand, as a run of the command names them."""
    report = migrate_project(project).report
    assert [file.path for file in report.files if file.diff] == []
    return {file.path: {use.line for use in file.findings if use.kind != "change"} for file in report.files}


def test_project_runs_after_the_listed_changes_and_nothing_is_left_to_list(tmp_path: Path) -> None:
    project = unpack("store", tmp_path)
    for file in migrate_project(project).report.files:
        if file.text:
            (project / file.path).write_text(file.text)
    left, written = find_left(project), {path: (project / path).read_text() for path, _, _ in BY_HAND}
    for path, before, after in BY_HAND:
        text = written[path]
        first = text[: text.index(before)].count("\n") + 1
        lines = {*range(first, first + before.rstrip("\n").count("\n") + 1)}
        assert before.startswith(WITHOUT_A_LINE) or left[path] & lines, before
        (project / path).write_text((project / path).read_text().replace(before, after))
    (project / "tests" / "test_orders.py").write_text(TESTS)
    views = project / "orders" / "views.py"
    views.write_text(f"from celery5 import wait\n{views.read_text()}")
    report = migrate_project(project).report
    assert {use.name for file in report.files for use in file.of_kind("decide")} == TO_DECIDE
    for file in report.files:
        if file.of_kind("decide"):
            settled = project / file.path
            settled.write_text(f"{settled.read_text()}\n# celery5: decided\n")
    assert find_left(project) == {"Procfile": {2, 3}}

    done = subprocess.run(
        [sys.executable, "manage.py", "test", "tests"],
        cwd=project,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Ran 3 tests" in done.stderr
