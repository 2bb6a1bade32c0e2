"""Control commands: workers are asked and told from a terminal, and each of them has its line."""

import json
import stat
import sys
from pathlib import Path
from typing import Any

import pytest

from celery5.broker.call import Call
from tests.story.cli.commands import Ended, Serving, celery5, until
from tests.story.conftest import Desk

pytestmark = pytest.mark.timeout(180)
"""Seconds: a test here is a score of processes, one after the other."""


def told(desk: Desk, *words: object, **env: str) -> Ended:
    """One command to the workers of the shop."""
    return celery5("-A", "shop", *words, cwd=desk.folder, env=env)


def answers(desk: Desk, *words: object) -> Any:
    """What the workers answer, as values."""
    ended = told(desk, "worker", *words, "--json")
    assert ended.code == 0, ended
    return {entry["worker"]: entry["answer"] for entry in json.loads(ended.out)}


def assert_tables(desk: Desk) -> None:
    """People are shown tables of what two idle workers say."""
    assert told(desk, "worker", "active").out == "no job runs\n"
    lines = told(desk, "worker", "stats").out.splitlines()
    assert [line.split()[:2] for line in lines] == [["worker", "kind"], ["w1", "worker"], ["w2", "worker"]]


def test_workers_are_asked_paused_and_ended(desk: Desk) -> None:
    shop = sys.modules["shop"]
    with (
        Serving("-A", "shop", "worker", "start", "--name", "w1", cwd=desk.folder) as one,
        Serving("-A", "shop", "worker", "start", "--name", "w2", cwd=desk.folder) as two,
    ):
        one.ready()
        two.ready()
        pinged = told(desk, "worker", "ping")
        assert pinged.code == 0
        first, second = pinged.out.splitlines()
        assert first.startswith('w1  ok  {"pong":"w1:')
        assert second.startswith('w2  ok  {"pong":"w2:')
        assert answers(desk, "active", "--to", "w2") == {"w2": []}
        assert set(answers(desk, "stats")) == {"w1", "w2"}
        assert_tables(desk)

        told(desk, "queue", "pause", "default")
        handle = shop.add.delay(1, 2)
        asked = answers(desk, "stats")
        assert [reply["queues"]["default"] for reply in asked.values()] == ["paused", "paused"]
        assert handle.status() == "SENT"
        told(desk, "queue", "resume", "default")
        assert handle.get(timeout=30) == 3

        ran = told(desk, "worker", "run", "shop.add", "--args", "[20, 22]", "--to", "w2")
        assert ran.code == 0, ran
        assert shop.app.result(ran.out.strip(), queue="default").get(timeout=30) == 42

        said = {"level": "debug", "before": "info"}
        assert answers(desk, "set-log-level", "debug", "--to", "w1") == {"w1": said}
        assert answers(desk, "tell", "set-log-level", "level=info", "--to", "w1")["w1"]["before"] == "debug"
        loud = told(desk, "worker", "set-log-level", "loud")
        assert (loud.code, "'loud' is not one of" in loud.error) == (2, True)
        refused = told(desk, "worker", "retry-boot-step", "redis", "--to", "w1", "--to", "w2")
        assert refused.code == 1
        assert refused.error == "Error: 2 of 2 did not do it"
        assert refused.out.count("mandatory") == 1
        alone = told(desk, "worker", "retry-boot-step", "redis", "--to", "w1")
        assert (alone.code, alone.out) == (1, "")
        assert alone.error.startswith("Error: w1 did not do it (refused): ")

        assert answers(desk, "shutdown", "--to", "w2", "--cold") == {"w2": {"how": "cold", "running": 0}}
        assert two.ended().code == 0
        assert list(answers(desk, "ping")) == ["w1"]
    gone = told(desk, "worker", "ping")
    assert (gone.code, gone.out) == (1, "")
    assert "celery5 -A shop worker start" in gone.error


def test_a_queue_is_paused_and_resumed_while_no_worker_lives(desk: Desk) -> None:
    shop = sys.modules["shop"]
    handle = shop.add.delay(1, 2)
    paused = told(desk, "queue", "pause", "default")
    assert (paused.code, paused.err) == (0, "")
    assert (
        paused.out
        == "no worker of this application is running; workers that start later find default paused\n"
    )
    header, row = told(desk, "queue", "list").out.splitlines()[:2]  # then that nobody reads it
    assert (header.split()[-1], row.split()[-1]) == ("paused", "yes")
    header, row = told(desk, "info").out.splitlines()[2:4]
    assert (header.split()[-1], row.split()[-1]) == ("paused", "yes")
    assert json.loads(told(desk, "queue", "list", "--json").out)[0]["paused"] is True
    assert json.loads(told(desk, "info", "--json").out)["queues"]["default"]["paused"] is True
    with Serving("-A", "shop", "worker", "start", "--name", "w1", cwd=desk.folder) as one:
        one.ready()
        assert until(lambda: one.logged("queue:paused"))[0]["queues"] == ["default"]
        assert handle.status() == "SENT"
    resumed = told(desk, "queue", "resume", "default", "--json")
    assert (resumed.code, json.loads(resumed.out)) == (0, [])
    assert resumed.error.endswith("workers that start later find default resumed")
    unknown = told(desk, "queue", "pause", "defualt")
    assert (unknown.code, "did you mean 'default'?" in unknown.error) == (1, True)
    told(desk, "worker", "start", "--burst")
    assert handle.get(timeout=30) == 3


def test_the_budget_of_workers_is_shown_and_set(desk: Desk) -> None:
    with Serving("-A", "shop", "worker", "start", "--name", "w1", cwd=desk.folder) as one:
        one.ready()
        assert answers(desk, "budget")["w1"]["trio"]["maximum"] == 100
        changed = answers(desk, "budget", "trio", "--minimum", "2", "--maximum", "7")["w1"]
        assert (changed["kind"], changed["minimum"], changed["maximum"]) == ("trio", 2, 7)
        of_which = told(desk, "worker", "budget", "--maximum", "7")
        assert (of_which.code, "say of which kind: trio, asyncio, thread, boxed" in of_which.err) == (2, True)
        wrong = told(desk, "worker", "budget", "threads")
        assert (wrong.code, "did you mean 'thread'?" in wrong.err) == (2, True)
        assert [entry.action for entry in desk.app.audit.list()] == ["worker:budget"]  # a look is no action


def test_what_workers_read_ahead_and_run_at_once_is_multiplied_and_shown(desk: Desk) -> None:
    with Serving("-A", "shop", "worker", "start", "--name", "w1", cwd=desk.folder) as one:
        one.ready()
        for command in ("prefetch", "concurrency"):
            assert answers(desk, command, "2.5", "--seconds", "30", "--to", "w1")["w1"]["factor"] == 2.5
            assert answers(desk, command)["w1"]["factor"] == 2.5
            wrong = told(desk, "worker", command, "17")
            assert (wrong.code, "17.0 is not in the range 1.0<=x<=16.0" in wrong.error) == (2, True)
        shown = told(desk, "worker", "health").out.splitlines()
        assert shown[0].split() == ["worker", "what", "name", "state", "why"]


def test_a_worker_that_has_yet_to_start_is_waited_for(desk: Desk) -> None:
    nobody = told(desk, "worker", "ping", "--to", "w1", "--timeout", "0.1", "--json")
    (reply,) = json.loads(nobody.out)
    assert (nobody.code, reply["worker"], reply["ok"], reply["reason"]) == (1, "w1", False, "no-answer")
    assert "no worker 'w1' lives" in reply["why"]
    with Serving("-A", "shop", "worker", "start", "--name", "w1", cwd=desk.folder):
        assert answers(desk, "ping", "--to", "w1", "--timeout", "25")["w1"]["pong"].startswith("w1:")


def test_the_budget_of_a_task_is_shown_and_set(desk: Desk) -> None:
    budgets = {"CELERY5_BUDGETS": "trio=4..9 shop.add=0..2"}
    with Serving("-A", "shop", "worker", "start", "--name", "w1", cwd=desk.folder, env=budgets) as one:
        one.ready()
        assert answers(desk, "budget")["w1"]["shop.add"]["maximum"] == 2
        changed = answers(desk, "budget", "shop.add", "--minimum", "1", "--maximum", "3")["w1"]
        assert [changed[name] for name in ("kind", "task", "minimum", "maximum")] == [
            "trio",
            "shop.add",
            1,
            3,
        ]
        assert answers(desk, "stats")["w1"]["slots"]["shop.add"]["minimum"] == 1


def test_a_sender_whom_nobody_knows_is_told_what_to_do_and_then_trusted(desk: Desk, tmp_path: Path) -> None:
    ours = {"CELERY5_KEYS": str(tmp_path / "ours")}
    theirs = {"CELERY5_KEYS": str(tmp_path / "theirs")}
    assert told(desk, "keys", "new", **ours).code == 0
    with Serving("-A", "shop", "worker", "start", "--name", "w1", cwd=desk.folder, env=ours) as one:
        one.ready()
        refused = told(desk, "worker", "ping", **theirs)
        assert refused.code == 1
        assert refused.error.startswith("Error: w1 did not do it (unknown-issuer): ")
        assert "celery5 -A shop keys trust" in refused.error
        assert until(lambda: one.logged("inbox:command-refused"))
        run_checks = told(desk, "doctor", **theirs)
        assert (run_checks.code, "fail  workers" in run_checks.out) == (1, True), run_checks.out
        assert "celery5 -A shop keys trust, on the worker's host" in run_checks.out

        authority = tmp_path / "theirs" / "ca.pem"
        trusted = told(desk, "keys", "trust", authority, **ours)
        assert trusted.out.startswith("trusted: ")
        assert told(desk, "worker", "ping", **theirs).code == 0

        assert told(desk, "keys", "revoke", tmp_path / "theirs" / "mine.pem", **ours).code == 0
        denied = told(desk, "worker", "ping", **theirs)
        assert (denied.code, "w1 did not do it (revoked)" in denied.error) == (1, True)
        lifted = told(desk, "keys", "trust", tmp_path / "theirs" / "mine.pem", **ours)
        assert lifted.out.endswith("(it was revoked: that is lifted)\n")
        assert told(desk, "worker", "ping", **theirs).code == 0
        own = told(desk, "keys", "revoke", tmp_path / "ours" / "mine.pem", **ours)
        assert own.out.endswith("are refused here from now on, until: celery5 -A shop keys new\n")


def test_keys_are_for_their_user_alone(desk: Desk, tmp_path: Path) -> None:
    env = {"CELERY5_KEYS": str(tmp_path / "keys")}
    assert told(desk, "keys", "show", **env).out.endswith("the first command that is signed makes them\n")
    told(desk, "keys", "new", **env)
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "keys").rglob("*") if path.is_file()}
    assert modes <= {0o600}
    assert stat.S_IMODE((tmp_path / "keys").stat().st_mode) == 0o700
    shown = json.loads(told(desk, "keys", "show", "--json", **env).out)
    assert {certificate["role"] for certificate in shown["certificates"]} == {"mine", "authority", "trusted"}
    (tmp_path / "keys").chmod(0o755)
    assert "chmod 700" in told(desk, "keys", "new", **env).error
    assert "chmod 700" in told(desk, "keys", "show", **env).error  # workers refuse all commands then


@pytest.mark.parametrize(
    ("flag", "kind", "lost"),
    [
        ("--no-inbox", "inbox:disabled", "celery5 worker ping"),
        ("--no-inbox-signatures", "inbox:signatures-disabled", "can command this worker"),
    ],
)
def test_a_worker_that_is_less_careful_says_what_is_lost(desk: Desk, flag: str, kind: str, lost: str) -> None:
    with Serving("-A", "shop", "worker", "start", flag, cwd=desk.folder) as one:
        one.ready()
        (warned,) = until(lambda: one.logged(kind))
        assert lost in warned["lost"]


@pytest.mark.parametrize(
    ("place", "why"), [("open", "chmod 700"), ("file/none", "set CELERY5_KEYS"), ("new", "")]
)
def test_a_worker_whose_keys_cannot_be_used_says_so_as_it_begins(
    desk: Desk, tmp_path: Path, place: str, why: str
) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    (tmp_path / "file").write_text("")
    keys = {"CELERY5_KEYS": str(tmp_path / place)}
    with Serving("-A", "shop", "worker", "start", "--name", "w1", cwd=desk.folder, env=keys) as one:
        one.ready()
        if why:
            (warned,) = until(lambda: one.logged("inbox:keys-rejected"))
            assert (warned["level"], why in warned["why"]) == ("warning", True)
        else:  # the first command makes them
            assert told(desk, "worker", "ping", **keys).code == 0
            assert not one.logged("inbox:keys-rejected")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("worker", "run", "shop.add", "--args", "{", "--to", "w1"), "--args is not JSON"),
        (("worker", "run", "shop.add", "--args", "{}", "--to", "w1"), "--args must be a JSON array"),
        (("worker", "tell", "ping", "what"), "write name=value"),
        (("keys", "trust", "nowhere.pem"), "nowhere.pem cannot be read"),
        (("keys", "revoke", "abc"), "abc"),
    ],
)
def test_what_makes_no_sense_is_told_in_one_line(desk: Desk, words: tuple[str, ...], why: str) -> None:
    ended = told(desk, *words)
    assert ended.code == 2
    assert why in ended.error


def test_a_misspelt_queue_is_refused_in_one_line_and_a_pause_has_one_line(desk: Desk) -> None:
    shop = sys.modules["shop"]
    shop.add.options(countdown=3600).delay(1, 2)
    names = ("one", "two")
    starts = [Serving("-A", "shop", "worker", "start", "--name", name, cwd=desk.folder) for name in names]
    with starts[0].ready(), starts[1].ready():
        for verb in ("pause", "resume"):
            wrong = celery5("-A", "shop", "queue", verb, "defualt", cwd=desk.folder)
            assert (wrong.code, wrong.out) == (1, "")
            assert wrong.err == "Error: no queue 'defualt' here; did you mean 'default'?\n"
        assert desk("queue", "pause", "default") == "default is paused: 2 of 2 processes\n"
        assert desk("queue", "resume", "default") == "default is read again: 2 of 2 processes\n"
        assert len(json.loads(desk("queue", "resume", "default", "--json"))) == 2


def test_a_misspelt_worker_is_refused_at_once_and_nothing_is_sent(desk: Desk) -> None:
    with Serving("-A", "shop", "worker", "start", "--name", "one", cwd=desk.folder).ready():
        keys = desk.app.keys
        for words in (
            ("worker", "ping"),
            ("worker", "shutdown"),
            ("queue", "pause", "default"),
            ("worker", "run", "shop.add"),
        ):
            wrong = celery5("-A", "shop", *words, "--to", "oen", cwd=desk.folder)
            assert (wrong.code, wrong.out) == (1, "")
            assert wrong.err == "Error: no worker 'oen' lives: did you mean 'one'?\n"
        assert not desk.app.perform(Call(("EXISTS", keys.inbox("oen")), int))
        waited = celery5("-A", "shop", "worker", "ping", "--to", "oen", "--timeout", "0.2", cwd=desk.folder)
        assert "no answer after 0.2 s" in waited.err


def test_info_has_one_row_for_each_worker_with_all_of_its_queues(desk: Desk) -> None:
    words = ("worker", "start", "--name", "one", "--queues", "default,slow")
    with Serving("-A", "shop", *words, cwd=desk.folder).ready():
        shown = desk("info")
    rows = [line for line in shown.splitlines() if line.startswith("one:")]
    assert len(rows) == 1
    assert "default, slow" in rows[0]
