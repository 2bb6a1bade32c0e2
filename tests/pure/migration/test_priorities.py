"""Priorities of Celery are in opposite order on Redis and on RabbitMQ: `celery5 migrate` names the level."""

from pathlib import Path

import pytest

from celery5.migration.rewrite import migrate_project

TASKS = 'from celery import Celery\n\napp = Celery("shop", broker="{}")\n\n\n@app.task(priority={})\ndef add(x): ...\n'


@pytest.mark.parametrize(
    ("broker", "number", "level"),
    [
        *[
            ("redis://h/0", number, level)
            for number, level in ((0, "high"), (3, "normal"), (6, "low"), (9, "low"))
        ],
        *[("amqp://h//", number, level) for number, level in ((0, "low"), (4, "normal"), (9, "high"))],
        ("sentinel://h/0", 0, "high"),
        ("pyamqp://h//", 10, "high"),
    ],
)
def test_level_of_a_priority_is_named_by_the_broker_of_the_project(
    tmp_path: Path, broker: str, number: int, level: str
) -> None:
    call = f"\n\nadd.apply_async((1,), priority={number})\n"
    (tmp_path / "tasks.py").write_text(TASKS.format(broker, number) + call)
    (report,) = migrate_project(tmp_path).report.files
    found = {
        use.advice.partition(":")[0] for use in report.of_kind("by hand") if use.name == f"priority={number}"
    }
    assert found == {f'priority="{level}"', f'options(priority="{level}")'}


def test_priority_without_a_known_broker_names_the_order_of_both(tmp_path: Path) -> None:
    (tmp_path / "tasks.py").write_text(TASKS.format("", "number"))
    (report,) = migrate_project(tmp_path).report.files
    (advice,) = [use.advice for use in report.of_kind("by hand") if use.name == "priority"]
    assert advice.endswith("Celery takes 0 first on Redis, and 9 first on RabbitMQ")
