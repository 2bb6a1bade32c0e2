"""Without code: the commands that look at what is in Redis work where the application's code is not, or is broken."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest

from celery5 import App
from celery5.cli.main import cli
from celery5.cli.terminal import loading
from celery5.cli.terminal.errors import EXIT_USAGE, run_reporting_errors
from tests.story.cli.commands import Ended, Serving, celery5
from tests.story.conftest import Desk

HINT = (
    "this command does not need the application's code: "
    "CELERY5_BROKER=redis://HOST:6379/0 celery5 --app-name NAME COMMAND"
)
Here = Callable[..., Ended]


@pytest.fixture
def here(desk: Desk, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Here:
    """Runs a command in this process, in a folder that has no code, for the application of `desk` by its name."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.setenv("CELERY5_BROKER", url)
    monkeypatch.delenv("CELERY5_APP", raising=False)

    made: list[App] = []

    def remembered(name: str) -> App:
        made.append(App(name))
        return made[-1]

    monkeypatch.setattr(loading, "app_without_code", remembered)

    def run(*words: object, by: tuple[str, ...] = ("--app-name", desk.app.name)) -> Ended:
        capsys.readouterr()
        code = run_reporting_errors(
            lambda: cli.main([*by, *map(str, words)], "celery5", standalone_mode=False)
        )
        printed = capsys.readouterr()
        while made:
            made.pop().close()
        return Ended(code, printed.out, printed.err)

    return run


def test_unknown_application_is_warned_of_with_the_names_in_redis(desk: Desk, here: Here) -> None:
    desk.app.signature("shop.add", 2, 3).delay()
    misspelt = f"{desk.app.name}x"
    for words in (["info"], ["queue", "list"], ["queue", "list", "--json"]):
        ended = here(*words, by=("--app-name", misspelt))
        assert ended.code == 0
        warning = (
            f"Warning: this Redis has no keys of application {misspelt!r}; did you mean {desk.app.name!r}?\n"
        )
        assert ended.err == warning
        assert here(*words).err == ""


def test_commands_need_only_the_name_of_the_application(desk: Desk, here: Here) -> None:
    app: App = desk.app
    dead = app.signature("shop.hopeless").delay()
    desk("worker", "start", "--burst")
    app.schedule.add(app.signature("shop.add", 2, 3), 3600, name="sum")
    app.signature("shop.add", 1, 1).delay()

    listed = json.loads(here("queue", "list", "--json").out)
    # Not the queue `slow`, which only the worker has named that has left.
    assert [(queue["queue"], queue["waiting"], queue["dead"]) for queue in listed] == [("default", 1, 1)]
    assert "default" in here("info").out
    assert json.loads(here("info", "--json").out)["app"] == app.name
    assert json.loads(here("dlq", "count", "--by", "task", "--json").out) == {"shop.hopeless": 1}
    assert "ValueError: never" in here("dlq", "read").out
    assert dead.id in here("task", "show", dead.id).out
    assert here("dlq", "replay", "--json").code == 0
    assert app.info().queues["default"].waiting == 2
    assert [entry["name"] for entry in json.loads(here("schedule", "list", "--json").out)] == ["sum"]
    assert here("schedule", "pause", "sum").code == 0
    assert app.schedule.show("sum").state == "paused"
    assert here("schedule", "trigger", "sum").code == 0
    assert app.info().queues["default"].waiting == 3
    assert here("schedule", "remove", "sum", "--yes").code == 0
    status = here("controller", "status")
    assert (status.code, status.out) == (1, "")
    assert f"no Controller of application {app.name!r} is running" in status.error


def test_unread_queue_is_listed_with_a_similar_name(desk: Desk, here: Here) -> None:
    app: App = desk.app
    app.tasks["shop.add"].options(queue="solw").delay(1, 2)
    app.signature("shop.add", 1, 2).delay()
    mark = "solw (1 job, no worker, did you mean slow?)"
    listed = desk("queue", "list")
    assert f"\nunread  default (1 job, no worker); {mark}\n" in listed
    assert f"unread  default (1 job, no worker); {mark}" in desk("info")
    by_queue = {entry["queue"]: entry["workers"] for entry in json.loads(desk("queue", "list", "--json"))}
    assert by_queue == {"default": 0, "solw": 0}
    with Serving("-A", "shop", "worker", "start", cwd=desk.folder).ready():
        told = here("queue", "list").out
        assert f"\nunread  {mark}\n" in told
    desk("worker", "start", "--burst", "--queues", "solw")
    assert "unread" not in desk("queue", "list")


def test_the_name_may_be_in_the_environment_and_the_code_comes_first(
    desk: Desk, here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CELERY5_APP_NAME", desk.app.name)
    assert here("queue", "list", by=()).code == 0
    assert "no module 'gone'" in here("queue", "list", by=("-A", "gone")).error
    monkeypatch.setenv("CELERY5_APP", "gone")
    assert "no module 'gone'" in here("queue", "list", by=()).error
    assert here("queue", "list").code == 0  # what is said on the command line counts
    both = here("queue", "list", by=("-A", "gone", "--app-name", "shop"))
    assert (both.code, both.out) == (EXIT_USAGE, "")
    assert "give only one of them" in both.error


NEEDS_CODE = [
    *(
        "worker start",
        "router start",
        "scheduler start",
        "publisher start",
        "controller start",
        "config show",
    ),
    *("worker run shop.add --to w", "schedule add sum shop.add --every 5", "event send E"),
    *("task limit shop.add 5", "task suspend shop.add", "task resume shop.add", "config check"),
]


@pytest.mark.parametrize("words", NEEDS_CODE)
def test_a_command_that_needs_the_code_says_so(here: Here, desk: Desk, words: str) -> None:
    told = here(*words.split())
    assert told.code != 0
    assert "this command needs the application's code: write celery5 -A module[:app]" in told.out + told.err
    assert "--app-name NAME" not in here(*words.split(), by=("-A", "gone")).err


def test_a_name_that_no_application_can_have_is_refused(here: Here) -> None:
    assert "application name 'a b'" in here("info", by=("--app-name", "a b")).error


@pytest.mark.parametrize("words", ["controller stop", "dlq count", "info", "queue list", "schedule list"])
def test_a_command_that_can_do_without_code_that_is_broken_or_missing_says_how(
    here: Here, desk: Desk, words: str
) -> None:
    for by in ((), ("-A", "gone"), ("-A", "gone:app")):
        told = here(*words.split(), by=by)
        assert told.code == EXIT_USAGE
        assert told.error.endswith(f"; {HINT}")


def test_code_that_does_not_import_gets_one_line_that_suggests_the_name(desk: Desk, url: str) -> None:
    (desk.folder / "shop.py").write_text("import nothing_of_the_kind\n")
    told = celery5("-A", "shop", "dlq", "count", cwd=desk.folder)
    assert told.code == EXIT_USAGE
    assert "module 'shop' fails while it is imported: ModuleNotFoundError" in told.error
    assert told.error.endswith(HINT)
    name = desk.app.name
    told = celery5("--app-name", name, "dlq", "count", cwd=desk.folder, env={"CELERY5_BROKER": url})
    assert (told.code, told.err) == (0, "")


def test_every_command_says_that_there_is_such_a_flag() -> None:
    assert "--app-name NAME" in cli.get_help(click.Context(cli))


READ_ONLY = (
    *(
        "info",
        "doctor",
        "queue list",
        "queue show default",
        "worker list",
        "dlq groups",
        "dlq count",
        "alert list",
    ),
    *("schedule list", "workflow list", "stream list", "metrics show", "audit list"),
    *("task search", "bulk list", "health", "controller status"),
)
"""Commands that only look, and need a name and a broker."""


@pytest.mark.parametrize("words", READ_ONLY)
def test_command_that_only_looks_needs_no_code(desk: Desk, here: Here, words: str) -> None:
    desk.app.signature("shop.add", 2, 3).delay()
    ended = here(*words.split())
    assert "application's code" not in ended.err
    assert ended.code != EXIT_USAGE, ended.err


def examine(here: Here, *by: str) -> dict[str, dict[str, Any]]:
    """Return the findings of doctor, by their checks."""
    return {finding["check"]: finding for finding in json.loads(here("doctor", "--json", by=by).out)}


def test_doctor_examines_redis_and_names_the_error_of_code_that_fails(
    desk: Desk, here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("broken.py").write_text("import math\n\nmath.no_such_thing\n")
    by_name = ("--app-name", desk.app.name)
    assert examine(here, *by_name)["application"]["state"] == "ok"
    monkeypatch.setenv("CELERY5_APP", "broken")
    monkeypatch.setenv("CELERY5_APP_NAME", desk.app.name)
    for by in (by_name, ("-A", "broken"), ()):
        found = examine(here, *by)
        assert found["server"]["state"] == "ok"
        assert {"queues", "workers", "dead jobs", "alerts"} & set(found) >= {"workers", "dead jobs", "alerts"}
        assert found["application"]["state"] == "fail"
        assert "module 'broken' fails while it is imported" in found["application"]["summary"]
        assert "broken.py:3)" in found["application"]["summary"]
        assert "--app-name" not in found["application"]["remedy"]
    monkeypatch.delenv("CELERY5_APP_NAME")
    found = examine(here, "-A", "broken")
    assert "server" not in found
    assert "celery5 --app-name NAME doctor looks at Redis" in found["application"]["remedy"]


def test_doctor_examines_an_application_of_which_a_module_of_tasks_fails(desk: Desk, here: Here) -> None:
    Path("halves.py").write_text(
        f"from celery5 import App\napp = App({desk.app.name!r}, include=['broken_half'])\n"
    )
    Path("broken_half.py").write_text("import no_such_module\n")
    found = examine(here, "-A", "halves")
    assert found["server"]["state"] == "ok"
    assert "broken_half.py:1)" in found["application"]["summary"]
    assert found["application"]["state"] == "fail"
