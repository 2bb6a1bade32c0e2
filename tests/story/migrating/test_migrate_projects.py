"""Migrate projects rebuilt after public ones: what is changed, what is named, and that the result is Python."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.story.cli.commands import celery5
from tests.story.migrating.projects import unpack

WRITTEN = {
    "commerce": {
        "commerce/celeryconf.py": [
            'app = App("commerce", task_cls=',
            'app.autodiscover(["commerce.discount"], module="migrations.tasks")',
        ],
        "commerce/settings.py": [
            'INSTALLED_APPS = ["commerce.order", "django_celery_beat", "celery5.contrib.django"]',
            'CELERY5 = {"timezone": "UTC"}',
            'CELERY5["results_ttl"] = timedelta(hours=2)',
            '"every": timedelta(days=1)',
            '"cron": "*/5 * * * 1,2"',
        ],
        "commerce/order/tasks.py": [
            "log = logging.getLogger(__name__)",
            "max_retries=1000",
            "backoff=60,\n    max_retries=5,\n    dont_autoretry_for=[Exception],\n)\ndef recalculate",
            "tasks = [consume.s(path) for path in paths]",
            "group(tasks).apply_async(link_error=backup)",
            "app.result(job).revoke()",
        ],
    },
    "analytics": {
        "analytics/celery.py": [
            'app = App("analytics", broker=os.environ["REDIS_URL"], retry_policy=RetryPolicy(max_retries=0))',
            'app.configure(default_queue="analytics", max_memory=200_000 * 1024)',
            "app.configure(ignore_result=True)",
            'app.autodiscover(["analytics.usage", "analytics.exports"])',
        ],
        "analytics/usage/tasks.py": [
            "from celery5 import SoftTimeLimitExceeded, chain, task",
            "@app.task(ignore_result=True, autoretry_for=(Exception,), max_retries=3)",
            'chain(gather_usage.s(7), send_report.s("team")).start()',
            '@task(rate_limit=Rate("5/s", per="worker"), time_limit=60)',
            'app.signature("analytics.other").task.options(queue="slow").delay(team, usage=usage)',
            'app.signature("analytics.other", team).delay()',
        ],
    },
    "reports": {
        "reports/app.py": ["celery_app = App(__name__, retry_policy=RetryPolicy(max_retries=0))"],
        "reports/scheduler.py": [
            "execute.options(expires=3600, time_limit=30, id=str(number)).delay(number)",
            "def execute(self: CurrentJob, number: int) -> None:",
            'logger.info("%s %s", self.id, self.task)',
            "result = celery_app.result(job)",
            "from celery5.tasks import CurrentJob",
        ],
    },
}
"""What stands in the files after `--write`."""
NAMED = {
    "commerce": {
        ("commerce/celeryconf.py", "@setup_logging.connect of setup_celery_logging"),
        ("commerce/celeryconf.py", "Celery(task_cls=)"),
        ("commerce/settings.py", "django_celery_beat"),
        ("commerce/settings.py", "CELERY_TASK_ALWAYS_EAGER"),
        ("commerce/order/tasks.py", "class TrackedTask(Task)"),
        ("commerce/order/tasks.py", "base"),
        ("commerce/order/tasks.py", "self.request.delivery_info"),
        ("commerce/order/tasks.py", "self.max_retries"),
        ("commerce/order/tasks.py", "self.update_state"),
        ("commerce/order/tasks.py", "signature"),
        ("commerce/order/tasks.py", "link_error"),
        ("commerce/order/tasks.py", "set"),
        ("commerce/order/tasks.py", "headers"),
        ("commerce/order/tasks.py", "control.inspect"),
        ("docker-compose.yml", "celery -A commerce.celeryconf inspect active"),
    },
    "analytics": {
        ("analytics/celery.py", "@task_prerun.connect of note_start"),
        ("analytics/celery.py", "@task_postrun.connect of note_end"),
        ("analytics/celery.py", "@worker_process_init.connect of on_worker_start"),
        ("analytics/celery.py", "@on_after_configure.connect of setup_periodic_tasks"),
        ("analytics/celery.py", "add_periodic_task"),
        ("analytics/usage/tasks.py", 'serializer="pickle"'),
        ("analytics/usage/tasks.py", "eta=datetime.utcnow() + timedelta(hours=1)"),
        ("analytics/usage/tasks.py", "delay in async def"),
        ("tests/test_usage.py", "task_always_eager"),
        ("tests/test_usage.py", "apply()"),
    },
    "reports": {
        ("reports/app.py", "config_from_object"),
        ("reports/app.py", "app.Task"),
        ("reports/config.py", "CeleryConfig.broker_url"),
        ("reports/config.py", "CeleryConfig.beat_schedule"),
        ("reports/config.py", "CELERY_ANNOTATIONS"),
        ("reports/scheduler.py", "self.update_state"),
        ("reports/scheduler.py", "result.ready()"),
        ("reports/scheduler.py", "result.successful()"),
        ("reports/scheduler.py", "result.result"),
    },
}
"""What is named to be changed by hand."""


@pytest.mark.parametrize("name", WRITTEN)
def test_project_is_written_and_the_rest_is_named(name: str, tmp_path: Path) -> None:
    project = unpack(name, tmp_path / name)
    done = celery5("migrate", ".", "--write", "--backup", "--json", cwd=project)
    assert done.code == 0, done
    report: dict[str, Any] = json.loads(done.out)
    for path, parts in WRITTEN[name].items():
        text = (project / path).read_text()
        compile(text, path, "exec")
        assert [part for part in parts if part not in text] == [], text
    named = {(file["path"], use["name"]) for file in report["files"] for use in file["by_hand"]}
    assert NAMED[name] - named == set()
    for file in report["files"]:
        for use in file["by_hand"]:
            assert use["advice"] != "see celery5 docs from-celery", use


def test_second_run_finds_nothing_more_to_write(tmp_path: Path) -> None:
    for name in (*WRITTEN, "django_shop"):
        project = unpack(name, tmp_path / name)
        celery5("migrate", ".", "--write", "--backup", cwd=project)
        for backup in project.rglob("*.orig"):
            backup.unlink()
        again = json.loads(celery5("migrate", ".", "--json", cwd=project).out)
        assert [file["diff"] for file in again["files"] if file["diff"]] == []


DISCOVERED = """
from celery import Celery

app = Celery("proj", broker="redis://localhost:1/0")
app.autodiscover_tasks(["withtasks", "plain"])
"""


def test_project_that_discovers_packages_without_tasks_loads_when_migrated(tmp_path: Path) -> None:
    (tmp_path / "proj.py").write_text(DISCOVERED)
    for package in ("withtasks", "plain"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("")
    (tmp_path / "withtasks" / "tasks.py").write_text(
        "from celery import shared_task\n\n\n@shared_task\ndef add(a, b):\n    return a + b\n"
    )
    assert celery5("migrate", ".", "--write", "--backup", cwd=tmp_path).code == 0
    assert 'autodiscover(["withtasks", "plain"])' in (tmp_path / "proj.py").read_text()
    listed = celery5("-A", "proj", "task", "list", cwd=tmp_path)
    assert (listed.code, listed.err) == (0, "")
    assert "withtasks.tasks.add" in listed.out
