"""Comments and variables about the visibility timeout: `celery5 migrate` lists them."""

from pathlib import Path

import pytest

from celery5.migration.rewrite import migrate_project

TASKS = 'from celery import Celery\n\napp = Celery("shop")\n\n\n@app.task\ndef add(x): ...\n'


@pytest.mark.parametrize(
    ("file", "text", "lines"),
    [
        ("settings.py", "A = 1\n# Unacked messages are handed out again after this.\nB = 2\n", [2]),
        ("settings.py", "VISIBILITY_TIMEOUT = 3600\n", [1]),
        ("settings.py", 'A = """\n# the visibility timeout\n"""\n', []),
        ("settings.py", "CELERY_TASK_ACKS_LATE = True\n", []),
        ("settings.py", "# settings of jobs\n", []),
        (".env.example", "A=1\nCELERY_VISIBILITY_TIMEOUT=3600\n", [2]),
        ("compose.yml", "    - VISIBILITY_TIMEOUT=3600\n    # above the visibility timeout\n", [1, 2]),
        ("README.md", "the visibility timeout\n", []),
    ],
)
def test_comments_and_variables_of_the_visibility_timeout_can_be_removed(
    tmp_path: Path, file: str, text: str, lines: list[int]
) -> None:
    (tmp_path / "tasks.py").write_text(TASKS)
    (tmp_path / file).write_text(text)
    reports = [report for report in migrate_project(tmp_path).report.files if report.path == file]
    found = [use for report in reports for use in report.of_kind("decide")]
    assert [use.line for use in found if use.advice.startswith("it can be removed")] == lines
