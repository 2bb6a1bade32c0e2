"""Dlq commands: dead jobs looked at, replayed and purged by a person at a terminal, and by scripts."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any

import pytest
import redis

from celery5 import JobState
from celery5.broker.calls import leases, queues
from celery5.cli.terminal.output import clean_lines, format_cell, format_time
from celery5.protocol.durations import format_duration
from celery5.protocol.job.states import FINISHED
from tests.redis.dead_letters.many_dead_letters import add_dead_letters, sent, state
from tests.story.cli.commands import COMMAND, LIMIT, Ended, Serving, celery5, environment, until
from tests.story.conftest import Desk

# Words on a command line


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("dlq read --older-than soon", "'soon' is not a duration: write 30s, 15m, 2h"),
        ("dlq replay --rate 0/s", "'0/s' is not a rate: write 50/s, 100/m, 3/10s or 1000/h"),
        ("dlq read --reason exhuasted", "did you mean 'exhausted'?"),
        ("dlq read --limit 0", "0 is not in the range"),
        ("dlq count --by day", "'day' is not one of"),
        ("dlq purge", "this would delete dead jobs for good: add --yes"),
        ("dlq purge --error-group f52de1ad1ef0", "this would delete dead jobs for good: add --yes"),
    ],
)
def test_what_makes_no_sense_is_told_before_anything_is_done(desk: Desk, words: str, said: str) -> None:
    ended = celery5("-A", "shop", *words.split(), cwd=desk.folder)
    assert ended.code == 2
    assert said in ended.error


def test_times_for_people() -> None:
    assert [format_duration(seconds) for seconds in (0.085, 12.34, 60, 7260, 180_000)] == [
        *("85 ms", "12.3 s", "1 min", "2 h 1 min", "2 d 2 h"),
    ]
    assert (format_time(1763713000.5), format_time(0), format_time(1e300)) == ("2025-11-21 08:16:40Z", "", "")
    assert (format_cell("\x1b[31mred\n\x9b"), clean_lines("a\x1b\n b\n")) == (
        r"\x1b[31mred \x9b",
        "a\\x1b\n b",
    )
    assert "... (300 characters) ..." in format_cell("x\ny" * 100)


def test_long_text_is_cut_in_the_middle_and_keeps_its_end() -> None:
    remedy = "the webhook has not taken the last notification: python manage.py celery5 alert list"
    shown = format_cell(f"{'worker-lost (worker w), ' * 20}{remedy}")
    assert shown.startswith("worker-lost (worker w)")
    assert shown.endswith(f" {remedy}")
    assert len(shown) < 280


# Looking


def test_dead_jobs_are_read_and_counted(desk: Desk, redis_client: "redis.Redis") -> None:
    add_dead_letters(desk.app, redis_client, *(f"j{number}" for number in range(3)))
    time.sleep(0.002)  # entries of one millisecond in two queues have no order
    (entry,) = add_dead_letters(
        desk.app, redis_client, "p", task="bank.pay", error="OSError", reason="poisoned", queue="slow"
    )
    head, *rows = desk("dlq", "read").splitlines()
    assert head.split() == ["queue", "entry", "died", "id", "task", "attempt", "reason", "error"]
    assert len(rows) == 4
    assert re.search(
        rf"slow +{entry} +\d{{4}}-\S+ \S+Z +p +bank\.pay +4 +poisoned +OSError: OSError of bank", rows[-1]
    )
    (one,) = json.loads(desk("dlq", "read", "--task", "bank.*", "--json"))
    assert (one["job"], one["entry"], one["error"], one["type"], one["args"], one["failures"][0]["type"]) == (
        *(one["id"], entry, "OSError: OSError of bank.pay", "OSError", [], "OSError"),
    )
    assert [entry["job"] for entry in json.loads(desk("dlq", "read", "--json"))] == ["j0", "j1", "j2", "p"]
    assert json.loads(desk("dlq", "read", "--older-than", "1h", "--json")) == []
    assert desk("dlq", "read", "--id", "p", "--id", "j1", "--newer-than", "1h", "--json").count('"job"') == 2
    # In two queues two entries may have the same id.
    assert desk("dlq", "read", "--id", entry, "--queue", "slow", "--json").count('"job":"p"') == 1
    missing = celery5("-A", "shop", "dlq", "read", "--id", entry, cwd=desk.folder)
    assert (missing.code, missing.out) == (1, "no dead jobs\n")
    assert desk("dlq", "count").split() == [
        *("cause", "count", "shop.t", "exhausted", "ValueError", "3", "bank.pay", "poisoned", "OSError", "1"),
    ]
    assert json.loads(desk("dlq", "count", "--by", "queue", "--json")) == {"default": 3, "slow": 1}
    first = celery5("-A", "shop", "dlq", "read", "--limit", "2", cwd=desk.folder)
    assert (first.code, len(first.out.splitlines())) == (0, 3)
    entry = first.out.splitlines()[-1].split()[1]
    assert first.err == f"only the first 2; the next ones: --after default:{entry}\n"
    words = first.err.split()[-2:]
    assert [letter["job"] for letter in json.loads(desk("dlq", "read", *words, "--json"))] == ["j2", "p"]
    newest = celery5("-A", "shop", "dlq", "read", "--newest-first", "--limit", "2", "--json", cwd=desk.folder)
    assert [letter["job"] for letter in json.loads(newest.out)] == ["p", "j2"]
    words = newest.err.split()[-2:]
    assert [
        letter["job"] for letter in json.loads(desk("dlq", "read", "--newest-first", *words, "--json"))
    ] == [
        "j1",
        "j0",
    ]


def test_dead_jobs_of_any_number_and_age_are_read(desk: Desk, redis_client: "redis.Redis") -> None:
    """A page of the dashboard has a bound, what is written to a file has none."""
    add_dead_letters(desk.app, redis_client, "a", "b")
    assert desk("dlq", "read", "--limit", "100000", "--json").count('"job"') == 2
    assert desk("dlq", "read", "--newer-than", "400d", "--json").count('"job"') == 2
    assert desk("dlq", "count", "--queue", "default,default", "--by", "queue", "--json") == '{"default":2}\n'


def test_a_queue_that_does_not_exist_is_told_from_one_without_dead_jobs(desk: Desk) -> None:
    shop = sys.modules["shop"]
    shop.add.delay(1, 2)
    assert desk("dlq", "read", "--queue", "default") == "no dead jobs\n"
    for words in (("dlq", "read"), ("dlq", "count"), ("dlq", "replay"), ("dlq", "purge", "--yes"), ("info",)):
        ended = celery5("-A", "shop", *words, "--queue", "defualt", cwd=desk.folder)
        assert (ended.code, ended.error) == (1, "Error: no queue 'defualt' here; did you mean 'default'?")


def test_a_sink_that_does_not_exist_is_told_from_one_without_dead_documents(desk: Desk) -> None:
    told = "Error: no sink 'bda' here; "
    for words in (("read",), ("count",), ("replay",), ("purge", "--yes")):
        ended = celery5("-A", "shop", "dlq", *words, "--sink", "bda", cwd=desk.folder)
        assert (ended.code, ended.out, ended.err) == (1, "no dead jobs\n", f"{told}known: none\n")
    desk.folder.joinpath("books.py").write_text(
        "import shop\nfrom celery5.results import FileSink\napp = shop.app\n"
        "@app.task(sinks=[FileSink('bdb.jsonl', name='bdb')])\ndef book() -> int: return 1\n"
    )
    ended = celery5("-A", "books", "dlq", "count", "--sink", "bda", cwd=desk.folder)
    assert (ended.out, ended.err) == ("no dead jobs\n", f"{told}did you mean 'bdb'?\n")
    assert celery5("-A", "books", "dlq", "count", "--sink", "bdb", cwd=desk.folder).err == ""


def test_the_whole_story_of_a_dead_job(desk: Desk) -> None:
    shop = sys.modules["shop"]
    bad = shop.hopeless.delay()
    desk("worker", "start", "--burst")
    told = desk("dlq", "read", "--traceback")
    assert "Traceback (most recent call last):\n" in told
    assert told.endswith("ValueError: never\n")
    shown = desk("task", "show", bad.id)
    assert re.search(r"(?m)^state +DEAD\ntask +shop.hopeless\nattempt +1 of 1$", shown)
    assert re.search(r"(?m)^sent +\d{4}-\d\d-\d\d \d\d:\d\d:\d\dZ \((just now|.* ago)\)$", shown)
    assert re.search(r"(?m)^took +\d+ ms$", shown)
    assert "\nTraceback (most recent call last):\n" in shown
    assert 'raise ValueError("never")\nValueError: never\n' in shown
    desk.app.result(bad.id).forget()
    assert "ValueError: never" in desk("task", "show", bad.id)  # as long as it is dead


def test_a_job_is_shown_wherever_it_is(desk: Desk) -> None:
    shop = sys.modules["shop"]
    later = shop.multiply.options(countdown=90).delay(6, 7)
    shown = desk("task", "show", later.id)
    assert re.search(r"(?m)^queue +slow\nstate +SCHEDULED\ntask +shop.multiply$", shown)
    assert re.search(r"(?m)^arguments +a=6, b=7$", shown)
    assert re.search(r"(?m)^due +.*\(in (1|2) min\)|\(in 90 s\)$", shown)
    whole = json.loads(desk("task", "show", later.id, "--json"))
    assert (whole["id"], whole["queue"], whole["state"], whole["args"]) == (
        later.id,
        "slow",
        "SCHEDULED",
        [6, 7],
    )
    moody = shop.moody.delay()
    desk("worker", "start", "--burst", "--queues", "default")
    story = json.loads(desk("task", "show", moody.id, "--json"))
    assert (story["state"], story["value"], story["attempt"]) == ("SUCCESS", 3, 3)


def test_a_job_that_was_revoked_or_expired_says_so(desk: Desk) -> None:
    shop = sys.modules["shop"]
    revoked, expired = shop.add.options(countdown=90).delay(1, 2), shop.add.options(expires=0.01).delay(1, 2)
    running = shop.stuck.delay()
    assert revoked.revoke()
    with Serving("-A", "shop", "worker", "start", cwd=desk.folder) as worker:
        until(lambda: (desk.folder / "stuck").exists() and expired.status() in FINISHED)
        running.revoke()
        until(lambda: running.status() in FINISHED)
        name = until(lambda: worker.logged("worker:started"))[0]["worker"]
    assert re.search(r"(?m)^reason +revoked before a worker had it$", desk("task", "show", revoked.id))
    assert re.search(rf"(?m)^reason +revoked while {name} had it$", desk("task", "show", running.id))
    assert re.search(r"(?m)^reason +no worker began it before it expired$", desk("task", "show", expired.id))


# Replaying and purging


def test_dead_jobs_are_replayed(desk: Desk, redis_client: "redis.Redis") -> None:
    add_dead_letters(desk.app, redis_client, "a", "b")
    add_dead_letters(desk.app, redis_client, "c", task="bank.pay")
    assert desk("dlq", "replay", "--task", "shop.*", "--dry-run") == (
        "2 dead jobs, would be replayed:\n  2  shop.t exhausted ValueError\n"
    )
    assert json.loads(desk("dlq", "replay", "--dry-run", "--json")) == {
        "matched": 3,
        "replayed": 0,
        "dry_run": True,
        "causes": {},
        "left": {},
        "before": {"shop.t exhausted ValueError": 2, "bank.pay exhausted ValueError": 1},
        "unreachable": [],
    }
    assert sent(redis_client, desk.app) == []
    assert desk("dlq", "replay", "--dry-run", "--rate", "") == desk("dlq", "replay", "--dry-run")
    assert desk("dlq", "replay", "--task", "shop.*", "--limit", "1", "--rate", "100/s") == (
        "1 dead job:\n  1  shop.t exhausted ValueError\n"
        "1 dead job replayed:\n  1  shop.t exhausted ValueError\n"
    )
    told = json.loads(desk("dlq", "replay", "--json"))
    assert (told["matched"], told["replayed"], told["left"]) == (2, 2, {})
    assert sent(redis_client, desk.app) == ["a", "b", "c"]
    assert desk("dlq", "replay") == "no dead jobs\n"


def test_what_cannot_be_replayed_is_an_error(desk: Desk, redis_client: Any) -> None:
    add_dead_letters(desk.app, redis_client, "a", "b", key="k")
    redis_client.xadd(desk.app.queue("default").dead, {"job": b"\xff", "document": b""})
    ended = celery5("-A", "shop", "dlq", "replay", cwd=desk.folder)
    assert ended.code == 1
    assert ended.error == (
        "Error: 2 of 3 dead jobs were not replayed: 1 corrupt (there is no message to replay), "
        "1 key-taken (another live job has its key)"
    )
    assert "1 dead job replayed:" in ended.out
    both = celery5("-A", "shop", "dlq", "replay", "--id", "b", "--id", "nobody", cwd=desk.folder)
    assert both.error.startswith("Error: 1 of 1 dead job was not replayed: 1 key-taken (")
    assert both.error.endswith(
        "has its key); no dead job has the id nobody (an entry's id needs its --queue)"
    )


@pytest.mark.parametrize("verb", ["read", "count", "replay", "purge"])
def test_missing_id_is_an_error_but_an_empty_filter_is_not(desk: Desk, redis_client: Any, verb: str) -> None:
    add_dead_letters(desk.app, redis_client, "a", "b")
    words = ("--task", "nobody.*") if verb in ("read", "purge") else ("--id", "a", "--error", "KeyError")
    said = "no dead jobs match; celery5 -A shop dlq count shows all dead jobs\n"
    yes = ("--yes",) if verb == "purge" else ()
    assert desk("dlq", verb, *words, *yes) == said
    ids = ("--id", "c", "--id", "a", "--id", "d")
    missing = celery5("-A", "shop", "dlq", verb, *ids, *yes, cwd=desk.folder)
    assert (missing.code, missing.error) == (
        1,
        "Error: no dead job has the id c, d (an entry's id needs its --queue)",
    )
    assert "1" in missing.out, "the job that is there was looked at, or done"
    assert redis_client.xlen(desk.app.queue("default").dead) == (2 if verb in ("read", "count") else 1)


def test_dead_jobs_are_purged(desk: Desk, redis_client: "redis.Redis") -> None:
    add_dead_letters(desk.app, redis_client, "a", "b")
    add_dead_letters(desk.app, redis_client, "c", reason="poisoned")
    assert desk("dlq", "purge", "--dry-run").startswith("3 dead jobs, would be purged:\n")
    told = json.loads(desk("dlq", "purge", "--reason", "poisoned", "--yes", "--json"))
    assert (told["matched"], told["purged"], told["causes"]) == (1, 1, {"shop.t poisoned ValueError": 1})
    assert desk("dlq", "purge", "--yes").splitlines()[-2:] == [
        *("2 dead jobs purged:", "  2  shop.t exhausted ValueError"),
    ]
    assert desk("dlq", "count", "--json") == "{}\n"


@pytest.mark.parametrize(
    ("words", "answer", "code", "left"),
    [([], b"y\n", 0, 0), (["--task", "shop.*"], b"n\n", 1, 1), ([], b"\n", 1, 1)],
)
def test_a_purge_asks_first(
    desk: Desk, redis_client: Any, words: list[str], answer: bytes, code: int, left: int
) -> None:
    add_dead_letters(desk.app, redis_client, "a")
    parent, child = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, "-A", "shop", "dlq", "purge", *words],
        cwd=desk.folder,
        env=environment(),
        stdin=child,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.write(parent, answer)
    out, err = process.communicate(timeout=LIMIT)
    os.close(parent)
    os.close(child)
    assert process.returncode == code, err
    assert "Purge 1 dead job for good? [y/N]" in err
    assert ("1 dead job purged" in out) is (code == 0)
    assert ("Error: nothing was purged" in err) is (code == 1)
    assert redis_client.xlen(desk.app.queue("default").dead) == left


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def test_a_signal_in_the_middle_says_how_far_it_came(
    desk: Desk, redis_client: Any, number: signal.Signals
) -> None:
    ids = [f"j{number}" for number in range(100)]
    add_dead_letters(desk.app, redis_client, *ids)
    process = subprocess.Popen(
        [*COMMAND, "-A", "shop", "dlq", "replay", "--rate", "20/s"],
        cwd=desk.folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    until(lambda: len(sent(redis_client, desk.app)) >= 4)
    time.sleep(0.05)
    process.send_signal(number)
    out, err = process.communicate(timeout=LIMIT)
    ended = Ended(process.returncode, out, err)
    assert ended.code == 130
    so_far, last = filter(None, ended.err.splitlines())
    assert last == "Interrupted."
    found = re.fullmatch(r"(\d+) of 100 dead jobs replayed so far; the others are as they were", so_far)
    assert found
    alive = sent(redis_client, desk.app)
    assert 4 <= len(alive) < 100
    assert abs(int(found[1]) - len(alive)) <= 2  # what was under way when it came
    assert alive == ids[: len(alive)]
    assert state(desk.app, ids[-1]) is JobState.DEAD


def test_at_a_terminal_one_sees_how_far_it_has_come(desk: Desk, redis_client: Any) -> None:
    add_dead_letters(desk.app, redis_client, *[f"j{number}" for number in range(25)])
    parent, child = pty.openpty()
    done = subprocess.run(
        [*COMMAND, "-A", "shop", "dlq", "purge", "--yes"],
        cwd=desk.folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=child,
        timeout=LIMIT,
        check=True,
    )
    os.close(child)
    shown = os.read(parent, 4096)
    os.close(parent)
    assert b"\r10 of 25 dead jobs \r25 of 25 dead jobs \r\x1b[K" in shown
    assert b"25 dead jobs purged" in done.stdout


# The whole


def test_the_application_at_a_glance(desk: Desk, redis_client: "redis.Redis") -> None:
    shop = sys.modules["shop"]
    empty = desk("info")
    assert empty.splitlines()[0].startswith(f"{desk.app.name} at ")
    assert empty.endswith("\nno queues yet: nothing was sent\n")
    desk.app.send_many([shop.add.s(1, 2), shop.add.options(countdown=60).s(1, 2), shop.multiply.s(2, 3)])
    add_dead_letters(desk.app, redis_client, "a")
    told = desk("info")
    due, ago = r"in (60 s|5\d(\.\d)? s|1 min)", r"(just now|\S+ \S+ ago)"
    assert re.search(rf"(?m)^default +1 +{ago} +1 +0 +0 +1 +{due} +1 +{ago} +0 +0 +nobody works on it$", told)
    assert told.endswith("\n\nno workers\n")
    whole = json.loads(desk("info", "--json"))
    assert (whole["app"], sorted(whole["queues"])) == (desk.app.name, ["default", "slow"])
    default = whole["queues"]["default"]
    assert (default["waiting"], default["scheduled"], default["dead"], default["workers"]) == (1, 1, 1, [])
    assert list(json.loads(desk("info", "--queue", "slow", "--json"))["queues"]) == ["slow"]


def show_on_terminal(desk: Desk, *words: str) -> list[str]:
    """The lines that a command writes to a terminal of 80 columns."""
    parent, child = pty.openpty()
    with subprocess.Popen(
        [*COMMAND, "-A", "shop", *words], cwd=desk.folder, env=environment(), stdout=child
    ) as process:
        os.close(child)
        written = b""
        with suppress(OSError):  # raised at its end
            while part := os.read(parent, 65536):
                written += part
    os.close(parent)
    assert process.returncode == 0
    return written.decode().splitlines()


def test_at_80_columns_no_name_that_is_copied_is_cut(desk: Desk, redis_client: "redis.Redis") -> None:
    worker = "warehouse-of-the-north.example.com:4242:0123456789ab"
    names = [f"parcels-from-{place}" for place in ("lisbon", "oporto", "faro")]
    for queue in names:
        desk.app.perform(leases.join_queue(desk.app.queue(queue), worker, lease=60))
        desk.app.perform(queues.register_queue(desk.app.keys, queue))
    lines = show_on_terminal(desk, "info")
    assert any(line.startswith(worker) and f"  {names[2]}," in line for line in lines)
    assert max(map(len, lines[1:])) <= 80
    for queue in names:
        assert any(line.startswith(f"{queue} ") for line in lines)
    job = "1" * 260
    add_dead_letters(desk.app, redis_client, job)
    assert f"  {job}" in show_on_terminal(desk, "dlq", "read")[1]


def test_group_of_dead_jobs_shows_the_message_of_its_newest_job(
    desk: Desk, redis_client: "redis.Redis"
) -> None:
    for job, key in (("a", "LIS"), ("b", "OPO")):
        add_dead_letters(desk.app, redis_client, job, error="KeyError", message_of_error=f"'{key}'")
    header, row = desk("dlq", "groups").splitlines()
    assert header.split()[4:6] == ["error", "example"]
    assert row.split()[3:6] == ["KeyError:", "'*'", "'OPO'"]


def test_dead_jobs_are_shown_by_what_made_them_fail(desk: Desk, redis_client: "redis.Redis") -> None:
    add_dead_letters(desk.app, redis_client, "a", "b")
    add_dead_letters(desk.app, redis_client, "c", error="OSError", queue="slow")
    first, second = desk("dlq", "groups").splitlines()[1:]
    assert first.split()[1:5] == ["2", "shop.t", "ValueError:", "ValueError"]
    assert second.split()[-1] == "slow"
    assert "example" not in desk("dlq", "groups").splitlines()[0], "the patterns hide nothing"
    part = celery5("-A", "shop", "dlq", "groups", "--limit", "1", "--json", cwd=desk.folder)
    found = json.loads(part.out)
    assert (found["looked_at"], found["total"], found["groups"][0]["id"]) == (1, 3, first.split()[0])
    assert f"looked at 1 of 3 dead jobs; the next ones: --after {found['next']}" in part.err
    replayed = desk("dlq", "replay", "--error-group", second.split()[0], "--json")
    assert json.loads(replayed)["replayed"] == 1
    assert sent(redis_client, desk.app, "slow") == ["c"]
