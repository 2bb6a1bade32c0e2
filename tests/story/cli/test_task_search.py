"""Task search: what people and programs read of jobs that are looked for, and where the next page begins."""

import json
import re
import sys

from tests.story.cli.commands import Serving, celery5, until
from tests.story.conftest import Desk


def test_jobs_that_wait_are_found_page_by_page(desk: Desk) -> None:
    shop = sys.modules["shop"]
    assert json.loads(desk("task", "search", "--json"))["jobs"] == []
    sent = [shop.add.delay(number, 1) for number in range(3)]
    words = ("task", "search", "--task", "shop.*", "--limit", 2, "--since", "1h")
    first = celery5("-A", "shop", *words, cwd=desk.folder)
    assert first.code == 0
    head, *rows = first.out.splitlines()
    assert head.split()[:5] == ["at", "state", "id", "task", "queue"]
    assert [row.split()[3] for row in rows] == [sent[2].id, sent[1].id]
    assert all(row.split()[2] == "SENT" for row in rows)
    cursor = re.search(r"--cursor (\S+)", first.err)
    assert cursor
    second = json.loads(desk(*words, "--cursor", cursor[1], "--json"))
    assert [job["id"] for job in second["jobs"]] == [sent[0].id]
    assert second["cursor"] is None
    found = json.loads(desk("task", "search", "--argument", "a=1", "--since", "1h", "--json"))
    assert [job["id"] for job in found["jobs"]] == [sent[1].id]
    assert json.loads(desk("task", "search", "--until", "1h", "--json"))["jobs"] == []


def test_slow_jobs_are_found_by_the_command_and_by_the_documentation(desk: Desk) -> None:
    shop = sys.modules["shop"]
    environment = {"CELERY5_METRICS_INTERVAL": "0.2"}
    with Serving("-A", "shop", "worker", "start", cwd=desk.folder, env=environment).ready():
        fine = shop.add.delay(1, 2)
        fine.get(timeout=30)
        until(lambda: bool(shop.app.jobs.search(id=fine.id, state="SUCCESS").jobs))
    later = shop.add.options(countdown=3600).delay(3, 4)
    ran = json.loads(desk("task", "search", "--sort", "ran", "--json"))["jobs"]
    assert [job["id"] for job in ran] == [fine.id]
    slow = celery5("-A", "shop", "task", "search", "--longer-than", "1h", cwd=desk.folder)
    assert slow.out.startswith("no jobs were found")
    assert "not looked at: successes" in slow.err
    head, *rows = celery5("-A", "shop", "task", "search", cwd=desk.folder).out.splitlines()
    assert head.split()[:2] == ["at", "due"]
    assert [later.id in row for row in rows] == [False, True]
    found = celery5("docs", "slow", "job", cwd=desk.folder).out
    assert "Slow jobs" in found.splitlines()[1]


def test_a_filter_that_makes_no_sense_is_refused_in_one_line(desk: Desk) -> None:
    refused = celery5("-A", "shop", "task", "search", "--state", "SUCESS", cwd=desk.folder)
    assert (refused.code, refused.out) == (2, "")
    assert refused.err.count("\n") == 1
    assert "did you mean 'SUCCESS'?" in refused.err


def test_a_job_whose_result_has_expired_is_shown_with_its_attempts(desk: Desk) -> None:
    shop = sys.modules["shop"]
    environment = {"CELERY5_METRICS_INTERVAL": "0.2"}
    with Serving("-A", "shop", "worker", "start", cwd=desk.folder, env=environment).ready():
        fine = shop.add.delay(1, 2)
        fine.get(timeout=30)
        until(lambda: bool(shop.app.jobs.search(id=fine.id, state="SUCCESS").jobs))
    fine.forget()
    assert "journalctl" not in desk("task", "show", fine.id, CELERY5_JOURNAL_SOCKET=str(desk.folder / "none"))
    shown = desk("task", "show", fine.id, CELERY5_JOURNAL_SOCKET=str(desk.folder / "shop.py"))
    head, _, attempts = shown.partition("\n\nattempts in the history\n")
    fields = dict(line.split(maxsplit=1) for line in head.splitlines())
    assert (fields["state"], fields["task"], fields["arguments"]) == ("SUCCESS", "shop.add", "a=1, b=2")
    assert fields["log"] == f"journalctl CELERY5_JOB={fine.id}"
    assert "value" not in fields
    names, row = attempts.splitlines()
    assert names.split() == ["attempt", "ended", "state", "waited", "ran", "worker"]
    assert row.split()[0] == "1"
