"""Results of Celery: rows of django-celery-results become results, of which only a batch is in memory."""

import json
import time
import tracemalloc
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from celery5 import App, TaskFailed
from celery5.errors import Misconfigured
from celery5.migration.rows.results import ResultCounts, import_results, read_result_rows


def row(task_id: str, result: Any = 1, *, age: float = 10, **fields: Any) -> dict[str, Any]:
    """Return a row of TaskResult, as dumpdata prints it."""
    done = datetime.now(UTC) - timedelta(seconds=age)
    known = {
        "task_id": task_id,
        "task_name": "shop.charge",
        "status": "SUCCESS",
        "content_type": "application/json",
        "content_encoding": "utf-8",
        "result": json.dumps(result),
        "date_done": done.isoformat().replace("+00:00", "Z"),
        "traceback": None,
        "worker": None,
    }
    return {"model": "django_celery_results.taskresult", "pk": 1, "fields": {**known, **fields}}


def store(app: App, file: Path, text: str, *, is_stored: bool = True) -> tuple[ResultCounts, list[str]]:
    file.write_text(text)
    left: list[str] = []
    return import_results(app, read_result_rows(file), time.time(), left.append, store=is_stored), left


@pytest.fixture
def shop(app: App) -> App:
    @app.task(name="shop.charge", queue="apart", results_ttl=600)
    async def charge() -> None: ...

    return app


def test_results_of_celery_are_found_by_their_ids(shop: App, tmp_path: Path) -> None:
    error = {"exc_type": "KeyError", "exc_message": ["a", 2], "exc_module": "builtins"}
    stamped = {"at": {"__type__": "datetime", "__value__": "2026-01-02T03:04:05"}}
    rows = [
        row("one", {"x": [1, None]}),
        row("stamped", stamped, task_name="gone"),
        row("bad", error, status="FAILURE", traceback="Traceback: KeyError"),
        row("revoked", {"exc_type": "TaskRevokedError"}, status="REVOKED"),
    ]
    counts, left = store(shop, tmp_path / "rows.json", json.dumps(rows))
    assert (counts.wanted, counts.known, left) == (4, 0, [])
    assert shop.result("one").get(timeout=5) == {"x": [1, None]}
    assert shop.result("stamped").get(timeout=5) == {"at": "2026-01-02T03:04:05"}
    with pytest.raises(TaskFailed, match="KeyError: a, 2"):
        shop.result("bad").get(timeout=5)
    assert shop.result("revoked").status() == "REVOKED"
    assert store(shop, tmp_path / "rows.json", json.dumps(rows))[0].known == 4


def test_results_are_kept_for_what_is_left_of_their_time(
    shop: App, tmp_path: Path, redis_client: Any
) -> None:
    store(shop, tmp_path / "rows.json", json.dumps([row("one", age=400)]))
    ttl = redis_client.pttl(shop.queue("apart").result("one"))
    assert 150_000 < ttl <= 200_000


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"status": "PENDING"}, "it is PENDING: it has not ended"),
        ({"content_type": "application/x-python-serialize"}, "only JSON is read"),
        ({"result": "{"}, "its result is no JSON"),
        ({"result": "[" * 100_000}, "its result is no JSON"),
        ({"date_done": None}, "which is no time"),
        ({"date_done": "2020-01-01T00:00:00Z"}, "results are kept for 600 s"),
        ({"result": json.dumps("x" * 2_000_000)}, "over the limit"),
        ({"task_id": None}, "it has no task_id"),
    ],
)
def test_row_that_is_not_wanted_is_named_and_the_others_are_stored(
    shop: App, tmp_path: Path, fields: dict[str, Any], why: str
) -> None:
    bad = row("bad")
    bad["fields"] |= fields
    rows = [bad, {"model": "auth.user", "pk": 1, "fields": {}}, row("good", 7)]
    counts, (line,) = store(shop, tmp_path / "rows.json", json.dumps(rows))
    assert why in line
    assert (counts.wanted, counts.left_out) == (1, 1)
    assert shop.result("good").get(timeout=5) == 7


def test_lines_of_json_are_read_too_and_nothing_is_stored_unasked(shop: App, tmp_path: Path) -> None:
    text = "\n".join(json.dumps(row(str(number))) for number in range(500))
    counts, _ = store(shop, tmp_path / "rows.jsonl", text, is_stored=False)
    assert counts.wanted == 500
    assert shop.find("7") is None


def test_a_large_file_is_read_in_little_memory(tmp_path: Path) -> None:
    line = json.dumps(row("one", "x" * 5_000))
    file = tmp_path / "rows.json"
    with file.open("w") as out:
        out.write("[" + ",".join([line] * 100))
        for _ in range(99):
            out.write("," + ",".join([line] * 100))
        out.write("]")
    tracemalloc.start()
    try:
        assert sum(1 for _ in read_result_rows(file)) == 10_000
        assert tracemalloc.get_traced_memory()[1] < 4_000_000, "of 53 MB"
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("content", ["[{", "[1]", '{"a": 1}', "[" + "{" * 100, '[{"fields": {}', "nothing"])
def test_file_that_is_no_fixture_is_refused_in_one_line(tmp_path: Path, content: str) -> None:
    file = tmp_path / "rows.json"
    file.write_text(content)
    with pytest.raises(Misconfigured) as caught:
        list(read_result_rows(file))
    assert "\n" not in str(caught.value)


def test_storing_needs_an_application(tmp_path: Path) -> None:
    with pytest.raises(Misconfigured, match="which application"):
        import_results(None, [], 0.0, print, store=True)
