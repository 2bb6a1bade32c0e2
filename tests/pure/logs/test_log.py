"""Log: a bounded buffer that never blocks whoever writes, counts what it sheds, and survives any value and any
stream."""

import fcntl
import io
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from celery5.logs.lines import LineWriter
from celery5.logs.log import Log, LogWriter, NullLog


def message(**fields: Any) -> dict[str, Any]:
    """A message as eliot hands it on."""
    return {
        "timestamp": 1700000000.25,
        "task_uuid": "u",
        "task_level": [1],
        "message_type": "celery5:job",
        **fields,
    }


def written(stream: io.StringIO) -> list[dict[str, Any]]:
    """The messages on a stream, eliot's own action messages left out."""
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    return [line for line in lines if "action_type" not in line]


class Gate(io.StringIO):
    """A stream that holds its writer up, or breaks, as long as it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.open = threading.Event()
        self.broken = False
        self.waiting = threading.Event()

    def write(self, text: str, /) -> int:
        self.waiting.set()
        assert self.open.wait(30)
        if self.broken:
            raise BrokenPipeError("nobody reads")
        return super().write(text)


def test_every_message_is_one_json_line_inside_the_process_action() -> None:
    stream = io.StringIO()
    with LogWriter(stream) as journal:
        journal._buffer.clear()  # what eliot had kept for the first who would listen
        log = Log(worker="w1", app="shop", writer=journal)
        log.event("worker:started", queues=["a"])
        log.log_job("error", job="j1", state="DEAD", error="ValueError: no")
        log.finish()
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [(line["message_type"], line["level"]) for line in lines] == [
        ("celery5:process:started", "info"),
        ("celery5:worker:started", "info"),
        ("celery5:job", "error"),
        ("celery5:process:succeeded", "info"),
    ]
    assert {line["worker"] for line in lines} == {"w1"}
    assert len({line["task_uuid"] for line in lines}) == 1
    assert (lines[0]["worker"], lines[0]["app"]) == ("w1", "shop")
    assert (lines[2]["level"], lines[2]["job"], lines[2]["state"]) == ("error", "j1", "DEAD")


def test_a_silent_log_writes_nothing() -> None:
    stream = io.StringIO()
    with LogWriter(stream) as journal:
        journal._buffer.clear()
        log = NullLog()
        log.set_worker("w1")
        log.event("worker:started", queues=["a"])
        log.log_job("error", job="j1")
        log.finish()
    assert stream.getvalue() == ""


def test_the_action_of_a_process_that_failed_says_why() -> None:
    stream = io.StringIO()
    with LogWriter(stream):
        log = Log(worker="w1", app="shop")
        log.finish(ExceptionGroup("", [ExceptionGroup("", [OSError("nobody answers")])]))
    last = json.loads(stream.getvalue().splitlines()[-1])
    assert (last["action_status"], last["reason"]) == ("failed", "nobody answers")


class Terminal(io.StringIO):
    """A stream that people look at."""

    def isatty(self) -> bool:
        return True


def test_people_get_a_time_a_level_a_name_and_the_fields() -> None:
    stream = io.StringIO()
    with LogWriter(stream, line_format="console"):
        log = Log(worker="w1", app="shop")
        log.log_job("warning", job="j1", state="RETRY")
    line = stream.getvalue().splitlines()[1]
    date, clock, level, who, what, *fields = line.split()
    assert datetime.strptime(f"{date} {clock}", "%Y-%m-%d %H:%M:%S.%f%z").utcoffset() == timedelta(0)
    assert (level, who, what, fields) == ("warning", "w1", "job", ["job=j1", "state=RETRY"])
    assert "task_uuid" not in line


@pytest.fixture
def far_zone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process whose time zone is far from UTC, as Django sets it for its `TIME_ZONE`."""
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "Asia/Tokyo")
        time.tzset()
        yield
    time.tzset()


@pytest.mark.usefixtures("far_zone")
def test_people_read_times_in_utc_whatever_the_zone_of_the_process_is() -> None:
    stream = io.StringIO()
    with LogWriter(stream, line_format="console") as journal:
        journal(message(job="j1"))
    assert stream.getvalue().splitlines()[-1].startswith("2023-11-14 22:13:20.250Z info")


def test_people_see_on_every_line_which_process_it_is_from() -> None:
    stream = io.StringIO()
    with LogWriter(LineWriter(stream, form="console", process="web:7")) as journal:
        Log(worker="w1", app="shop").event("worker:started")
        journal({"message_type": "celery5:log", "logger": "shop", "message": "hello", "timestamp": 0.0})
        journal.count_lost(1)
    lines = [line.split()[2:] for line in stream.getvalue().splitlines()[1:]]
    assert lines == [
        ["info", "w1", "worker:started"],
        ["info", "web:7", "shop", "hello"],
        ["warning", "web:7", "log:dropped", "count=1"],
    ]


def test_people_get_a_message_of_several_lines_on_one() -> None:
    stream = io.StringIO()
    with LogWriter(stream, line_format="console"):
        Log(worker="w1", app="shop").log_job("warning", job="j1", error="ValueError: one\ntwo\r\nthree")
    (_, line) = stream.getvalue().splitlines()
    assert line.endswith(r"error=ValueError: one\ntwo\r\nthree")


def test_people_get_the_traceback_of_a_failed_job_below_its_line() -> None:
    stream = io.StringIO()
    with LogWriter(stream, line_format="console"):
        log = Log(worker="w1", app="shop")
        log.log_job(
            "error", job="j1", traceback="Traceback (most recent call last):\n  ...\nValueError: no\n"
        )
        log.log_job("info", job="j2")
    line, *trace, after = stream.getvalue().splitlines()[1:]
    assert "traceback" not in line
    assert trace == ["    Traceback (most recent call last):", "      ...", "    ValueError: no"]
    assert after.endswith("job=j2")


def test_a_terminal_shows_how_bad_it_is_in_colour_unless_it_is_asked_not_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for no_color, level in (("", "\x1b[31merror  \x1b[0m w1 job"), ("1", " error   w1 job")):
        monkeypatch.setenv("NO_COLOR", no_color)
        stream = Terminal()
        with LogWriter(stream, line_format="console"):
            Log(worker="w1", app="shop").log_job("error", job="j1")
        assert level in stream.getvalue()
        assert ("\x1b" in stream.getvalue()) == (not no_color)


@pytest.mark.parametrize(("level", "count"), [("debug", 4), ("info", 3), ("warning", 2), ("error", 1)])
def test_what_is_below_the_level_is_not_kept(level: Any, count: int) -> None:
    stream = io.StringIO()
    with LogWriter(stream, level=level) as journal:
        for level_name in ("debug", "info", "warning", "error"):
            journal(message(level=level_name))
    assert len(written(stream)) == count


def test_the_buffer_is_bounded_and_what_is_shed_is_counted_and_told() -> None:
    stream = Gate()
    with LogWriter(stream, capacity=10) as journal:
        journal(message(n=0))
        assert stream.waiting.wait(30)  # the writer has taken one and is held up
        for n in range(1, 31):
            journal(message(n=n))
        assert journal.unreported_losses == 20
        stream.open.set()
    lines = written(stream)
    assert [line["n"] for line in lines if "n" in line] == list(range(11))
    assert [line["count"] for line in lines if line["message_type"] == "celery5:log:dropped"] == [20]
    assert journal.unreported_losses == 0


def test_a_stalled_stream_holds_nobody_up() -> None:
    stream = Gate()
    journal = LogWriter(stream, capacity=100)
    with journal:
        for n in range(10_000):
            journal(message(n=n))
        assert journal.counts.lost >= 9_000  # it has waited for nobody
        stream.open.set()


class Slow:
    """An outlet that says what befalls it, and takes a message when it is told to."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.open = threading.Event()

    def write(self, messages: Sequence[Any], /) -> int:
        self.notes.append("writes")
        assert self.open.wait(30)
        self.notes.append("has written")
        return len(messages)

    def close(self) -> None:
        self.notes.append("closed")


def test_an_outlet_is_not_closed_while_it_is_written_to() -> None:
    outlet = Slow()
    with LogWriter(outlet) as journal:
        journal(message())
        eventually(lambda: outlet.notes == ["writes"])
    assert outlet.notes == ["writes"], "and nobody was held up for long"
    outlet.open.set()
    eventually(lambda: outlet.notes == ["writes", "has written", "closed"])


CHATTERBOX = """
import sys
from celery5.logs.log import Log, LogWriter
with LogWriter():
    log = Log(worker=sys.argv[1], app="shop")
    for n in range(1000):
        log.log_job("info", n=n, padding="." * (n % 800))
    sys.stdin.read()
"""


def test_processes_that_write_to_one_pipe_leave_each_others_lines_whole() -> None:
    ours, theirs = os.pipe()
    talking = [
        subprocess.Popen([sys.executable, "-c", CHATTERBOX, name], stdin=subprocess.PIPE, stdout=theirs)
        for name in ("w1", "w2")
    ]
    os.close(theirs)
    said = b""
    try:
        # Slowly, so that the pipe is full most of the time, and no longer than there is a writer.
        while said.count(b"\n") < 2 * 1001 and (more := os.read(ours, 3000)):
            said += more
    finally:
        for process in talking:
            process.communicate(timeout=30)
        os.close(ours)
    lines = [json.loads(line) for line in said.splitlines()]
    for name in ("w1", "w2"):
        assert [line["n"] for line in lines if line["worker"] == name and "n" in line] == list(range(1000))


@pytest.mark.skipif(not Path("/proc/locks").exists(), reason="the kernel tells here who waits for a lock")
def test_a_process_does_not_write_while_another_is_in_the_middle_of_a_line() -> None:
    ours, theirs = os.pipe()
    fcntl.lockf(theirs, fcntl.LOCK_EX)
    os.write(theirs, b'{"half":')
    child = subprocess.Popen([sys.executable, "-c", CHATTERBOX, "w1"], stdin=subprocess.PIPE, stdout=theirs)
    try:
        eventually(lambda: waits_for_a_lock(child.pid))
        os.write(theirs, b"1}\n")
    finally:
        fcntl.lockf(theirs, fcntl.LOCK_UN)
        os.close(theirs)
        said = b""
        while said.count(b"\n") < 1002 and (more := os.read(ours, 65536)):
            said += more
        child.communicate(timeout=30)
        os.close(ours)
    half, _began, *lines = [json.loads(line) for line in said.splitlines()][:1002]
    assert half == {"half": 1}
    assert [line["n"] for line in lines] == list(range(1000))


def waits_for_a_lock(pid: int) -> bool:
    waiting = [line.split() for line in Path("/proc/locks").read_text().splitlines() if "->" in line]
    return any(str(pid) in words for words in waiting)


def test_a_stream_that_breaks_costs_its_messages_and_every_one_is_counted() -> None:
    stream = Gate()
    stream.broken = True
    stream.open.set()
    with LogWriter(stream, capacity=1000) as journal:
        for n in range(300):
            journal(message(n=n))
            if n == 100:
                eventually(lambda: journal.unreported_losses > 0)
        eventually(lambda: journal.unreported_losses == 300)
        stream.broken = False
        journal(message(n="last"))
        eventually(lambda: "last" in stream.getvalue())
    lines = written(stream)
    assert [line["count"] for line in lines if line["message_type"] == "celery5:log:dropped"] == [300]


def test_a_closed_stream_costs_nothing_but_the_messages() -> None:
    stream = io.StringIO()
    with LogWriter(stream) as journal:
        stream.close()
        journal(message())
        eventually(lambda: journal.unreported_losses == 1)
    assert journal.unreported_losses == 1


class Rude:
    """Has no text, and says so badly."""

    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


@pytest.mark.parametrize("form", ["json", "console"])
def test_a_value_that_has_no_text_does_not_silence_the_log(form: Any) -> None:
    stream = io.StringIO()
    loop: list[Any] = []
    loop.append(loop)
    with LogWriter(stream, line_format=form) as journal:
        journal(message(job="before"))
        for value in (Rude(), {(1, 2): Rude()}, loop, 2**100, "\udcff", b"\xff", {1: 2}):
            journal(message(value=value))
        journal(message(job="after"))
    lines = stream.getvalue().splitlines()
    assert len(lines) == 9
    assert "before" in lines[0]
    assert "after" in lines[-1]
    assert any("log:format-failed" in line and "RuntimeError" in line for line in lines)
    assert any("udcff" in line for line in lines)
    if form == "json":
        assert all(json.loads(line) for line in lines)


def test_a_stream_of_few_characters_gets_every_line() -> None:
    raw = io.BytesIO()
    with LogWriter(
        io.TextIOWrapper(raw, encoding="ascii", write_through=True), line_format="console"
    ) as journal:
        journal(message(name="Zoë\udcff"))
    assert b"name=Zo\\xeb\\udcff" in raw.getvalue()


def test_after_the_block_nothing_more_is_taken() -> None:
    stream = io.StringIO()
    with LogWriter(stream):
        pass
    Log(worker="w", app="a").finish()
    assert not stream.getvalue()


def eventually(condition: Callable[[], bool], limit: float = 30.0) -> None:
    """Wait for a condition that another thread brings about."""
    end = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


EVIL = "x\x1b]52;c;QUJD\x07\x9b31m\x7f\u202e\r\n2026-11-22 job FORGED"


@pytest.mark.parametrize("form", ["json", "console"])
@pytest.mark.parametrize(
    "fields",
    [
        {"job": EVIL, "why": EVIL, "level": EVIL},
        {EVIL: 1},
        {"why": [EVIL, {EVIL: EVIL}]},
        {"message_type": EVIL},
        {"message_type": "celery5:log", "logger": EVIL, "message": EVIL},
        {"traceback": f"Traceback\n{EVIL}"},
    ],
    ids=["value", "name", "nested", "event", "of others", "traceback"],
)
def test_no_line_commands_a_terminal_or_looks_like_another_line(fields: dict[str, Any], form: Any) -> None:
    stream = io.StringIO()
    lines = LineWriter(stream, form=form)
    lines.write([message(**fields)])
    shown = stream.getvalue()
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x80-\x9f\u202e]", shown)
    assert not re.search(r"(?m)^2026", shown)
    if form == "json":
        assert json.loads(shown)["timestamp"] == 1700000000.25
