"""Log lines on streams: the example counts each line once, whatever process is killed meanwhile."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from celery5 import App
from celery5.broker.servers.embedded import EmbeddedServer
from celery5.examples import log_lines
from celery5.examples.log_lines.folder import (
    FilePart,
    LogTotals,
    count_plainly,
    find_minute,
    list_files,
    list_parts,
    make_files,
    read_lines,
)
from celery5.examples.log_lines.processors import declare
from celery5.examples.log_lines.totals import read_totals, wait_for_totals
from celery5.testing import running_worker
from tests.night import NIGHTLY
from tests.story.cli.commands import celery5, environment
from tests.story.cluster.controlling import Controlling, until
from tests.story.examples.killing import run_example

TARGET = "celery5.examples.log_lines"
DESCRIPTION = """
[workers.default]
count = 2
"""
HALF_SENDER = """
import itertools, os, signal, sys
from pathlib import Path
from celery5.examples.log_lines import streams
from celery5.examples.log_lines.folder import list_parts
parts = list(list_parts(Path(sys.argv[1])))
for part in parts[: len(parts) // 2]:
    streams.parts.send(part)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_demo_counts_what_a_plain_count_does(tmp_path: Path) -> None:
    ended = celery5("demo", "--streams", "--json", cwd=tmp_path)
    result = json.loads(ended.out)
    assert (ended.code, ended.err, result["matches"], result["differences"]) == (0, "", True, [])
    assert result["lines"] > 10_000
    assert result["alerts"] > 0


def test_the_demo_shows_a_table_and_takes_a_folder_of_ones_own(tmp_path: Path) -> None:
    make_files(tmp_path / "logs", hosts=2, minutes=3, lines=20)
    (tmp_path / "logs" / "syslog").write_text(
        "Jan 31 12:00:59 host cron: error\nJan  1 00:00:00 host: well\n"
    )
    ended = celery5("demo", "--streams", tmp_path / "logs", cwd=tmp_path)
    assert ended.code == 0
    assert "hosts                            3" in ended.out
    assert "a plain count of the same files  agrees" in ended.out
    for folder, why in ((tmp_path / "none", "it is no folder"), (tmp_path / "empty", "there are no lines")):
        (tmp_path / "empty").mkdir(exist_ok=True)
        assert why in celery5("demo", "--streams", folder, cwd=tmp_path).error
    refused = celery5("demo", "--streams", "--max-files", 3, cwd=tmp_path)
    assert (refused.code, "are not for --streams" in refused.err) == (2, True)


@contextmanager
def cluster(url: str, folder: Path) -> Iterator[tuple[Controlling, dict[str, str], App]]:
    """Two workers under a Controller, and the application here."""
    app = log_lines.app
    app.use_broker(url)
    with TemporaryDirectory(prefix="l-", dir="/tmp") as home:  # a socket's path is short
        homes = dict.fromkeys(("XDG_RUNTIME_DIR", "XDG_STATE_HOME"), home)
        env = {"CELERY5_BROKER": url, **homes}
        controller = Controlling(folder, DESCRIPTION, target=TARGET, env=env)
        try:
            with controller.up():
                yield controller, env, app
        finally:
            app.close()


@pytest.mark.timeout(300)
def test_each_line_counts_once_although_every_process_is_killed_in_turn(
    own_server: EmbeddedServer, tmp_path: Path
) -> None:
    logs = tmp_path / "logs"
    make_files(logs, hosts=8, minutes=40 if NIGHTLY else 20, lines=200)
    expected = count_plainly(logs)
    whole = expected.lines.total()

    with cluster(own_server.url, tmp_path) as (controller, env, app):

        def wait_for_share(share: float) -> None:
            until(lambda: read_totals(app).lines.total() >= share * whole)

        sender = [sys.executable, "-c", HALF_SENDER, str(logs)]
        killed = subprocess.run(sender, env=environment(**env), timeout=60, check=False)
        assert killed.returncode == -signal.SIGKILL
        for name, share in (("worker-default-1", 0.05), ("worker-default-2", 0.15)):
            wait_for_share(share)
            pid = controller.pids()[name]
            os.kill(pid, signal.SIGKILL)
            controller.replaced(name, pid)
        sent = run_example(TARGET, "send", logs, env=env)
        assert (sent.code, sent.err) == (0, "")
        wait_for_share(0.4)
        os.kill(controller.process.pid, signal.SIGKILL)
        controller.process.wait()
        again = Controlling(tmp_path, DESCRIPTION, target=TARGET, env=env)
        with again.up():
            checked = run_example(TARGET, "check", logs, env=env)
            assert (checked.code, checked.err) == (0, "")
            assert checked.out.startswith(f"{whole} lines, {expected.errors.total()} errors, ")
            assert run_example(TARGET, "send", logs, env=env).code == 0
            until(lambda: app.streams.info("parts")[0].groups[0].lag == 0)
            assert read_totals(app).find_differences(expected) == []


def test_what_is_not_counted_is_said(server: EmbeddedServer, tmp_path: Path) -> None:
    make_files(tmp_path / "logs", hosts=1, minutes=2, lines=5)
    env = {"CELERY5_BROKER": server.url}
    checked = run_example(TARGET, "check", tmp_path / "logs", "--within", 0.1, env=env)
    assert checked.code == 1
    assert "lines of host-0 at 2026-01-31T12:00: 0 instead of " in checked.out
    assert "totals differ from a plain count" in checked.err


def test_a_file_that_grows_is_read_on_where_it_ended(server: EmbeddedServer, tmp_path: Path) -> None:
    app = App("log-lines-that-grow", broker=server.url)
    streams = declare(app)
    log = tmp_path / "web.log"
    with running_worker(app, broker=server.url):
        for _ in range(3):
            with log.open("a") as file:
                file.write("2026-01-31T12:00:59 ERROR one\n" * 700 + "2026-01-31T12:00:59 ERR")
            streams.parts.send(*list_parts(tmp_path))
            assert wait_for_totals(app, count_plainly(tmp_path), within=20) == []
            with log.open("a") as file:
                file.write("OR two\n")
        streams.parts.send(*list_parts(tmp_path))
        assert wait_for_totals(app, count_plainly(tmp_path), within=20) == []
        noon = ("web", "2026-01-31T12:00")
        assert (read_totals(app).lines[noon], read_totals(app).errors[noon]) == (2103, 2103)
        assert read_totals(app).alerts == {noon: 1}
        log.rename(tmp_path / "old")
        log.write_text("2026-01-31T12:01:00 INFO after the rotation\n")
        (tmp_path / "old").unlink()
        streams.parts.send(*list_parts(tmp_path))
        until(lambda: read_totals(app).lines["web", "2026-01-31T12:01"] == 1)


def test_files_are_split_where_lines_end_and_lines_have_the_time_of_the_last_one(tmp_path: Path) -> None:
    log = tmp_path / "db" / "slow.log"
    log.parent.mkdir()
    log.write_bytes(
        b"first\n2026-01-31 12:00:01 query\n  error \xff\n" + b"x" * 40_000 + b"\nlast\nnot whole"
    )
    (tmp_path / "gone").symlink_to("nowhere")
    assert list_files(tmp_path) == [("db", log)]
    parts = list(list_parts(tmp_path))
    assert [(part.start, part.end) for part in parts] == [(0, 40_043), (40_043, 40_048)]
    assert [(line.minute, line.is_error) for line in read_lines(parts[0], "")] == [
        ("", False),
        ("2026-01-31 12:00", False),
        ("2026-01-31 12:00", True),
        ("2026-01-31 12:00", False),
    ]
    one = FilePart(host="db", path=str(log), inode=1, start=40_043, end=40_048)
    assert [line.minute for line in read_lines(one, "noon")] == ["noon"]
    for line, minute in (
        ('10.0.0.1 - - [31/Jan/2026:12:00:59 +0000] "GET /"', "31/Jan/2026:12:00"),
        ("Jan 31 12:00:59 host", "Jan 31 12:00"),
        ("no time", ""),
    ):
        assert find_minute(line) == minute


def test_differences_are_said_in_words() -> None:
    one, other = LogTotals(), LogTotals()
    one.lines["a", "noon"] = 2
    other.alerts["b", ""] = 1
    assert one.find_differences(other) == [
        "lines of a at noon: 2 instead of 0",
        "alerts of b at no time: 0 instead of 1",
    ]
