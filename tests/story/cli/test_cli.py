"""Command line: what each command does, as a person at a terminal sees it."""

import json
import os
import re
import subprocess
import sys
import textwrap
from functools import partial
from pathlib import Path

import click
import pytest
import trio

import celery5 as package
from celery5 import BrokerUnavailable, TaskFailed, default_app
from celery5.cli.main import cli
from celery5.cli.terminal.errors import explain_error
from celery5.cli.terminal.loading import CannotLoad, load_app
from tests.story.cli import commands
from tests.story.conftest import Desk

celery5 = partial(commands.celery5, command=commands.COMMAND)
"""A command in its own interpreter, as a person starts it."""

# Which application


@pytest.mark.parametrize(
    ("target", "source", "said"),
    [
        ("shop", None, "no module 'shop'"),
        ("shop.deep", None, "no module 'shop.deep': 'shop' was not found"),
        ("shop.py", "", "it takes a module, not a file: -A shop"),
        ("./sub/shop.py", "", "it takes a module, not a file: -A sub.shop"),
        (":app", "", "write module or module:app"),
        ("shop:", "", "write module or module:app"),
        ("shop..deep", "", "write module or module:app"),
        ("shop:ap", "from celery5 import App\napp = App('x')", "did you mean shop:app?"),
        ("shop:zzz", "from celery5 import App\napp = App('x')", "its applications: shop:app"),
        ("shop:other", "other = 7", "shop:other is a int, not a celery5 App"),
        ("shop:App", "from celery5 import App", "shop:App is a class, not a celery5 App"),
        ("shop", "x = 1", "has no celery5 App and no tasks"),
        ("shop", "from celery5 import App\na = App('a')\nb = App('b')", "say which: -A shop:a or -A shop:b"),
        ("shop", "import no_such_thing", "ModuleNotFoundError: No module named 'no_such_thing' (HERE:1)"),
        ("shop", "\n{}['key']", "KeyError: 'key' (HERE:2)"),
        ("shop", "import json\njson.loads('{')", "(HERE:2)"),
        ("shop", "def (:", "SyntaxError: invalid syntax (HERE:1)"),
        ("shop", "raise SystemExit('no')", "fails while it is imported: SystemExit: no (HERE:1)"),
        ("shop", "from celery5 import App\napp = App('a b')", "application name 'a b'"),
        (
            "shop",
            "from celery5 import App\napp = App('a', include=['no_such'])",
            "no module 'no_such' to include",
        ),
    ],
)
@pytest.mark.usefixtures("fresh_modules")
def test_what_is_no_application_is_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str, source: str | None, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    if source is not None:
        (tmp_path / "shop.py").write_text(source)
    with pytest.raises(CannotLoad) as caught:
        load_app(target)
    assert said.replace("HERE", str(tmp_path / "shop.py")) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("fresh_modules")
def test_an_included_module_that_fails_is_told_with_its_name_and_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "market").mkdir()
    (tmp_path / "market" / "__init__.py").write_text(
        "from celery5 import App\napp = App('m', include='market.**.tasks')"
    )
    (tmp_path / "market" / "tasks.py").write_text("\nimport no_such_library")
    with pytest.raises(CannotLoad) as caught:
        load_app("market")
    assert str(caught.value) == (
        "application 'm' cannot load its tasks: included module 'market.tasks' fails while it is imported: "
        f"ModuleNotFoundError: No module named 'no_such_library' ({tmp_path}/market/tasks.py:2)"
    )


@pytest.mark.parametrize("target", ["shop", "shop:app", "shop:inside.app"])
@pytest.mark.usefixtures("fresh_modules")
def test_an_application_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    (tmp_path / "shop.py").write_text(
        textwrap.dedent("""
            from celery5 import App, task

            app = App("found")

            class inside:
                app = app

            @task
            async def free() -> None: ...
        """)
    )
    monkeypatch.chdir(tmp_path)
    app = load_app(target)
    assert app.name == "found"
    assert list(app.tasks) == ["shop.free"]


@pytest.mark.usefixtures("fresh_modules")
def test_free_tasks_without_an_application_belong_to_the_default_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lonely.py").write_text("from celery5 import task\n@task\ndef one() -> int: return 1")
    monkeypatch.chdir(tmp_path)
    app = load_app("lonely")
    assert app is default_app()
    assert "lonely.one" in app.tasks


def test_the_application_is_named_by_a_flag_or_by_the_environment(desk: Desk) -> None:
    flag = celery5("-A", "shop:app", "queue", "list", cwd=desk.folder)
    environment = celery5("queue", "list", cwd=desk.folder, env={"CELERY5_APP": "shop"})
    neither = celery5("queue", "list", cwd=desk.folder)
    assert (
        (flag.code, flag.out)
        == (environment.code, environment.out)
        == (0, "no queues yet: nothing was sent\n")
    )
    assert neither.code == 2
    assert neither.error == (
        "Error: which application? write celery5 -A module[:app] COMMAND, or set CELERY5_APP; "
        "this command does not need the application's code: "
        "CELERY5_BROKER=redis://HOST:6379/0 celery5 --app-name NAME COMMAND"
    )


def test_the_hint_on_a_command_without_code_works_as_it_is_written(desk: Desk, tmp_path: Path) -> None:
    sys.modules["shop"].add.delay(1, 2)
    hint = celery5("queue", "list", cwd=tmp_path, env={"CELERY5_BROKER": ""}).error
    words = hint.rpartition("code: ")[2]
    assert words.count("NAME") == words.count("COMMAND") == 1
    broker = desk.app.settings.broker
    line = words.replace("redis://HOST:6379/0", broker)
    line = line.replace("NAME", desk.app.name).replace("COMMAND", "queue list")
    program = f"{sys.executable} -m celery5"
    ended = subprocess.run(
        ["sh", "-c", line.replace("celery5 --app-name", f"{program} --app-name")],
        cwd=tmp_path, env={"PATH": os.environ["PATH"]}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.splitlines()[1].split()[:2] == ["default", "1"]


def test_each_list_of_commands_has_whole_sentences() -> None:
    context = click.Context(cli, info_name="celery5")
    groups = {name: cli.get_command(context, name) for name in cli.list_commands(context)}
    helps = {
        name: group.get_help(click.Context(group))
        for name, group in groups.items()
        if isinstance(group, click.Group)
    }
    assert len(helps) >= 15
    helps[""] = cli.get_help(context)
    lists = {name: text.partition("Commands:")[2] for name, text in helps.items()}
    assert [name for name, text in lists.items() if re.search(r"\.\.\.$", text, re.MULTILINE)] == []


# Words alone


def test_the_version(tmp_path: Path) -> None:
    assert celery5("--version", cwd=tmp_path).out == f"celery5 {package.__version__}\n"


def test_no_command_shows_the_commands(tmp_path: Path) -> None:
    ended = celery5(cwd=tmp_path)
    assert ended.code == 2
    for command in ("worker", "controller", "queue", "task", "dlq", "demo"):
        assert f"\n  {command} " in ended.err


@pytest.mark.parametrize(
    "words", ["worker", "no-such-command", "worker start --no-such-flag", "worker start --processes 0"]
)
def test_what_is_no_command_exits_with_2_and_says_where_help_is(tmp_path: Path, words: str) -> None:
    ended = celery5(*words.split(), cwd=tmp_path)
    assert ended.code == 2
    assert ended.error.startswith("Error: ")
    assert "--help'" in ended.error


def test_help_imports_neither_trio_nor_redis(tmp_path: Path) -> None:
    script = (
        "import sys; from celery5.cli.terminal.errors import run_reporting_errors; from celery5.cli.main import cli;"
        "run_reporting_errors(lambda: cli.main(['worker', 'start', '--help'], standalone_mode=False));"
        "print([name for name in ('trio', 'redis', 'asyncio', 'rich', 'eliot') if name in sys.modules])"
    )
    ended = celery5(cwd=tmp_path, command=(sys.executable, "-c", script))
    assert ended.out.splitlines()[-1] == "[]"


def test_the_first_error_of_ours_inside_a_group_is_what_counts() -> None:
    inner = ExceptionGroup("nursery", [BrokerUnavailable("redis\nis away"), ValueError("bug")])
    assert explain_error(ExceptionGroup("nursery", [inner])) == ("Error: redis is away", 1)
    assert explain_error(BaseExceptionGroup("nursery", [KeyboardInterrupt()])) == ("Interrupted.", 130)
    assert explain_error(click.UsageError("what?")) == ("Error: what?", 2)
    assert explain_error(ValueError("a bug shows its traceback")) is None
    assert explain_error(ExceptionGroup("nursery", [trio.ClosedResourceError()])) is None


# Looking


def test_queues_and_their_jobs(desk: Desk) -> None:
    shop = sys.modules["shop"]
    desk.app.send_many([shop.add.s(1, 2), shop.add.options(countdown=60).s(1, 2), shop.multiply.s(2, 3)])
    rows = json.loads(desk("queue", "list", "--json"))
    assert all(0 < row.pop("oldest") < 60 for row in rows)
    nothing = dict.fromkeys(("high", "low", "running", "held", "overdue", "dead", "workers"), 0)
    row = {**nothing, "backlog": 1, "waiting": 1, "scheduled": 0, "held_by": "", "lacks": "", "awaits": ""}
    assert [row.pop("verdict")["text"] for row in rows] == ["nobody works on it"] * 2
    row |= {"flow": None, "idle": None, "paused": False}
    assert rows == [{**row, "queue": "default", "scheduled": 1}, {**row, "queue": "slow"}]
    heads, first, *_ = [line.split() for line in desk("queue", "list").splitlines()]
    assert heads == [
        "queue",
        "backlog",
        "oldest",
        "waiting",
        *("in", "out", "over"),
        "running",
        *("at", "limits"),
        "scheduled",
        "dead",
        "verdict",
        "paused",
    ]
    assert (first[:2], first[-9:-4]) == (["default", "1"], ["1", "0", "0", "1", "0"])


def test_one_job_and_the_dead_letter_queue(desk: Desk) -> None:
    shop = sys.modules["shop"]
    good, waiting, bad = shop.add.delay(1, 2), shop.multiply.delay(2, 3), shop.hopeless.delay()
    assert desk("dlq", "read") == "no dead jobs\n"
    desk("worker", "start", "--burst", "--queues", "default")
    shown = json.loads(desk("task", "show", good.id, "--json"))
    assert (shown["state"], shown["value"], shown["queue"]) == ("SUCCESS", 3, "default")
    assert json.loads(desk("task", "show", waiting.id, "--queue", "slow", "--json"))["state"] == "SENT"
    assert "SUCCESS" in desk("task", "show", good.id)
    with pytest.raises(TaskFailed):
        bad.get(timeout=1)
    (dead,) = json.loads(desk("dlq", "read", "--json"))
    assert (dead["job"], dead["task"], dead["reason"]) == (bad.id, "shop.hopeless", "not-retried")
    assert dead["error"] == "ValueError: never"
    assert "ValueError: never" in desk("dlq", "read", "--queue", "default")


def test_a_job_of_which_nothing_is_known(desk: Desk) -> None:
    ended = celery5("-A", "shop", "task", "show", "nobody", cwd=desk.folder)
    assert ended.code == 1
    assert ended.error.startswith("Error: nothing is known of job 'nobody' on any queue")


def test_the_tasks_that_are_declared_are_listed(desk: Desk) -> None:
    head, *rows = desk("task", "list", "--prefix", "shop.m").splitlines()
    assert head.split() == ["task", "queue", "kind", "description", "limits"]
    assert [row.split() for row in rows] == [
        ["shop.moody", "default", "trio"],
        ["shop.multiply", "slow", "thread"],
    ]


def test_a_job_is_sent_by_hand(desk: Desk) -> None:
    app = sys.modules["shop"].app
    sent = desk(
        "task", "send", "shop.add", "--args", "[2]", "--kwargs", '{"b": 3}', "--queue", "slow"
    ).strip()
    later = desk("task", "send", "shop.add", "--args", "[2, 3]", "--countdown", "2h", "--key", "k").strip()
    assert (app.result(sent, queue="slow").status(), app.result(later).status()) == ("SENT", "SCHEDULED")
    again = celery5(
        "-A", "shop", "task", "send", "shop.add", "--args", "[1, 1]", "--key", "k", cwd=desk.folder
    )
    assert (again.code, again.out.strip()) == (0, later)
    assert again.err == "nothing was sent: the job with this id already has the key\n"
    for words, error in (
        (("shop.ad",), "no task 'shop.ad' here; did you mean 'shop.add'?"),
        (("shop.add", "--args", '[2, "x"]'), "parameter 'b' takes int, got str"),
        (("shop.add", "--args", "2"), "--args must be a JSON array"),
    ):
        ended = celery5("-A", "shop", "task", "send", *words, cwd=desk.folder)
        assert ended.code != 0
        assert error in ended.error


def test_a_job_is_sent_and_its_result_waited_for(desk: Desk) -> None:
    with commands.Serving("-A", "shop", "worker", "start", cwd=desk.folder).ready():
        assert desk("task", "send", "shop.multiply", "--args", "[2, 3]", "--wait") == "6\n"
        told = json.loads(desk("task", "send", "shop.add", "--args", "[2, 3]", "--wait", "20s", "--json"))
        assert told == {"id": told["id"], "state": "SUCCESS", "result": 5}
        for words, out in (
            ((), ""),
            (("--json",), r'\{"id":"[^"]+","state":"DEAD","result":null\}\n'),
        ):
            failed = celery5("-A", "shop", "task", "send", "shop.hopeless", "--wait", *words, cwd=desk.folder)
            assert (failed.code, len(failed.err.splitlines())) == (1, 1)
            assert "ValueError: never" in failed.error
            assert re.fullmatch(out, failed.out)
    late = celery5("-A", "shop", "task", "send", "shop.whose", "--wait", "0.1", cwd=desk.folder)
    assert (late.code, late.out, len(late.err.splitlines())) == (1, "", 1)


def test_a_queue_is_purged_when_that_is_confirmed(desk: Desk) -> None:
    shop = sys.modules["shop"]
    waiting = shop.app.send_many([shop.multiply.s(1, 2)] * 3)
    unknown = celery5(
        "-A", "shop", "queue", "purge", "slwo", cwd=desk.folder
    )  # nothing is asked, only to fail then
    assert unknown.code == 1
    assert unknown.error.startswith("Error: no queue 'slwo' here")
    asked = celery5("-A", "shop", "queue", "purge", "slow", cwd=desk.folder)
    assert (asked.code, "add --yes" in asked.error) == (2, True)
    assert desk("queue", "purge", "slow", "--yes") == "slow: 3 jobs revoked\n"
    assert {job.status() for job in waiting} == {"REVOKED"}
