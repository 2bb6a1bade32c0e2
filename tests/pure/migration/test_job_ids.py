"""Ids of jobs are no UUIDs: `celery5 migrate` lists code that expects a UUID."""

from pathlib import Path

import pytest

from celery5.migration.rewrite import migrate_project

HEAD = """
from celery import Celery
from celery.result import AsyncResult
from uuid import UUID

app = Celery("shop")


@app.task
def add(x, y=1): ...


def status(request, task_id): return AsyncResult(str(task_id)).id


def look(request, number): return AsyncResult(number).id


class Status:
    def get(self, request): return app.AsyncResult(self.kwargs["key"]).id


"""


def find_ids(folder: Path, text: str) -> list[str]:
    """Return what expects a UUID in a module, and check that a run after `--write` lists the same."""
    file = folder / "views.py"
    file.write_text(HEAD + text)
    runs: list[list[str]] = []
    for _ in range(2):
        (report,) = migrate_project(folder).report.files
        runs.append([use.name for use in report.of_kind("decide") if "no UUID" in use.advice])
        file.write_text(report.text or file.read_text())
    assert runs[0] == runs[1]
    return runs[0]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ('path("jobs/<uuid:task_id>/", status)\n', ["<uuid:task_id>"]),
        ('path("jobs/<uuid:celery_id>/", other)\n', ["<uuid:celery_id>"]),
        ('path("jobs/<uuid:number>/", views.look, name="look")\n', ["<uuid:number>"]),
        ('path("jobs/<uuid:key>/", Status.as_view())\n', ["<uuid:key>"]),
        (
            '@bp.route("/jobs/<uuid:number>")\ndef show(number): return AsyncResult(number).id\n',
            ["<uuid:number>"],
        ),
        ('path("jobs/{task_id:uuid}", status)\n', ["{task_id:uuid}"]),
        (
            r're_path(r"^jobs/(?P<task_id>[0-9a-f-]{36})/$", status)' + "\n",
            ["^jobs/(?P<task_id>[0-9a-f-]{36})/$"],
        ),
        ("def show(job_id: UUID): return AsyncResult(str(job_id)).id\n", ["job_id: UUID"]),
        ("def show(task_id): return UUID(task_id)\n", ["UUID(task_id)"]),
        ("class Row:\n    task_id = models.UUIDField(null=True)\n", ["task_id = models.UUIDField(...)"]),
        ('path("jobs/<str:task_id>/", status)\n', []),
        ('path("orders/<uuid:pk>/", order)\n', []),
        ('path("orders/<uuid:mask>/", status)\n', []),
        ("def show(order_id: UUID): return UUID(order_id)\n", []),
        ('NUMBER = re.compile("order [0-9a-f]{36}")\n', []),
    ],
)
def test_code_that_takes_the_id_of_a_job_for_a_uuid_is_to_decide(
    tmp_path: Path, text: str, names: list[str]
) -> None:
    assert find_ids(tmp_path, text) == names
