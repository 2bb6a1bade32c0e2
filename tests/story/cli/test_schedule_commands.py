"""Schedule commands: what people type about periodic tasks, and what they are told."""

import json

import pytest

from tests.story.cli.commands import Serving, celery5, until
from tests.story.conftest import Desk


def test_a_schedule_is_added_runs_and_is_removed_from_the_command_line(desk: Desk) -> None:
    assert "no schedules" in desk("schedule", "list")
    added = json.loads(
        desk("schedule", "add", "sums", "shop.add", "--every", "0.2", "--args", "[1, 2]", "--json")
    )
    assert (added["state"], added["task"], added["when"]) == ("active", "shop.add", "every 0.2 s")
    with (
        Serving("-A", "shop", "worker", "start", cwd=desk.folder).ready(),
        Serving("-A", "shop", "scheduler", "start", cwd=desk.folder) as scheduler,
    ):
        until(lambda: bool(scheduler.logged("schedule:fired")))
        name = scheduler.logged("scheduler:boot-started")[0]["name"]
        assert f"schedulers  {name}" in desk("info")
        assert json.loads(desk("info", "--json"))["schedulers"] == [name]
        job = scheduler.logged("schedule:fired")[0]["jobs"][0]
        assert desk.app.result(job).get(timeout=30) == 3
        paused = desk("schedule", "pause", "sums")
        assert paused == "schedule sums is paused; every 0.2 s\n"
        assert desk("schedule", "resume", "sums").startswith("schedule sums goes on; every 0.2 s, next 2")
        sent = desk("schedule", "trigger", "sums").strip()
        assert desk.app.result(sent).get(timeout=30) == 3
        assert "triggered    1" in desk("schedule", "show", "sums")
    (listed,) = json.loads(desk("schedule", "list", "--json"))
    assert listed["fired"] >= 1
    assert desk("schedule", "remove", "sums", "--yes") == "removed sums.\n"


def test_schedules_that_nobody_fires_are_told_of(desk: Desk) -> None:
    desk("schedule", "add", "often", "shop.add", "--every", "1", "--args", "[1, 2]")
    desk("schedule", "add", "later", "shop.add", "--cron", "@yearly", "--args", "[1, 2]")

    def listed() -> dict[str, str]:
        ended = celery5("-A", "shop", "schedule", "list", cwd=desk.folder)
        assert (ended.code, ended.err) == (
            0,
            f"no Scheduler of {desk.app.name} is running, and nothing fires: celery5 -A shop scheduler start\n",
        )
        return {line.split()[0]: line for line in ended.out.splitlines()}

    assert "overdue" not in listed()["later"]
    until(lambda: "Z overdue " in listed()["often"])
    assert "overdue" in desk("schedule", "show", "often")


def test_declared_schedules_are_shown_before_a_scheduler_takes_them_up(desk: Desk) -> None:
    with (desk.folder / "shop.py").open("a") as file:
        file.write("\napp.schedule(add.s(1, 2), '0 3 * * *', name='nightly')\n")
    ended = celery5("-A", "shop", "schedule", "list", cwd=desk.folder)
    assert ended.out.splitlines()[1].split() == [
        *("nightly", "cron", "0", "3", "*", "*", "*", "UTC", "declared", "0", "0", "0")
    ]
    assert (
        ended.err
        == f"no Scheduler of {desk.app.name} is running, and nothing fires: celery5 -A shop scheduler start\n"
    )
    assert json.loads(desk("schedule", "list", "--json"))[0]["state"] == "declared"
    assert "state        declared" in desk("schedule", "show", "nightly")
    for words in ("trigger nightly", "pause nightly", "resume nightly", "remove nightly --yes"):
        refused = celery5("-A", "shop", "schedule", *words.split(), cwd=desk.folder)
        said = "schedule 'nightly' is declared, and no Scheduler has taken it up: celery5 -A shop scheduler start"
        assert (refused.code, refused.error) == (2, f"Error: {said}")
    with Serving("-A", "shop", "scheduler", "start", cwd=desk.folder):
        until(lambda: "active" in celery5("-A", "shop", "schedule", "list", cwd=desk.folder).out)
        assert "declared by  code" in desk("schedule", "show", "nightly")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("show", "nightly"), "no schedule 'nightly'; there are: none"),
        (("add", "n", "shop.add"), "say when: --cron, --every or --at, one of them"),
        (("add", "n", "shop.nothing", "--every", "1"), "shop.nothing"),
        (("add", "n", "shop.add", "--cron", "often", "--args", "[1, 2]"), "is no line of a crontab"),
        (("add", "n", "shop.add", "--cron", "99 * * * *", "--args", "[1, 2]"), "99"),
        (("add", "n", "shop.add", "--at", "tomorrow", "--args", "[1, 2]"), "is not a time"),
        (
            ("add", "n", "shop.add", "--at", "2030-01-01T00:00:00", "--args", "[1, 2]"),
            "such as 2030-01-01T00:00:00+00:00",
        ),
        (
            ("add", "n", "shop.add", "--at", "9999-12-31T23:59:59-05:00", "--args", "[1, 2]"),
            "after the year 9999",
        ),
        (
            ("add", "n", "shop.add", "--every", "nan", "--args", "[1, 2]"),
            "'nan' is not a duration",
        ),
        (("add", "n", "shop.add", "--every", "1e11", "--args", "[1, 2]"), "not in the range 0<=x<=36500d"),
        (
            ("add", "n", "shop.add", "--cron", "@daily", "--timezone", "", "--args", "[1, 2]"),
            "--timezone '' is no",
        ),
        (("add", "n", "shop.add", "--every", "1", "--args", "1, 2"), "--args is not JSON"),
        (("add", "n", "shop.add", "--every", "1", "--args", '["a"]'), "shop.add"),
        (("add", "n", "shop.add", "--every", "1", "--timezone", "Europe/Berlin"), "--timezone is for --cron"),
    ],
)
def test_what_makes_no_sense_is_refused_in_a_line(desk: Desk, words: tuple[str, ...], said: str) -> None:
    ended = celery5("-A", "shop", "schedule", *words, cwd=desk.folder)
    assert ended.code != 0
    assert said in ended.err
    assert "Traceback" not in ended.err


def test_schedules_that_make_no_sense_are_told_of_before_a_scheduler_is_up(desk: Desk) -> None:
    (desk.folder / "bad.py").write_text(
        "from celery5 import App\n"
        f"app = App({desk.app.name!r}, broker={desk.app.settings.broker!r})\n"
        "@app.task(schedule={'cron': '0 5 * * *', 'timezone': 'Mars/Base'})\n"
        "async def one() -> None: ...\n"
        "app.schedule(one.s(1), 5, name='two')\n"
    )
    ended = celery5("-A", "bad", "scheduler", "start", cwd=desk.folder)
    assert ended.code != 0
    assert "task bad.one: schedule: time zone 'Mars/Base'" in ended.err
    assert "Traceback" not in ended.err
