"""Log runtime: where the log goes, by what is asked for, what an application knows, and what stderr is."""

import io
import json
import os
import socket
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from celery5 import Misconfigured
from celery5.logs import journald as native
from celery5.logs.destination import RuntimeEnvironment, is_journal_stream, make_destination
from celery5.logs.journald import JournaldDestination, format_entry
from celery5.logs.lines import LineWriter, Message
from celery5.logs.log import LogDestination, LogWriter


class Kept:
    """An outlet that keeps what it is given."""

    def __init__(self) -> None:
        self.messages: list[Message] = []

    def write(self, messages: Sequence[Message]) -> int:
        self.messages += messages
        return len(messages)


class Recorder:
    """A journal's end of the socket, which understands the native protocol."""

    def __init__(self, path: Path, line: socket.socket) -> None:
        self.path = path
        self.line = line
        self.line.bind(str(path))
        self.line.settimeout(30)

    def entry(self) -> dict[str, bytes]:
        """The next one."""
        data, fds, _, _ = socket.recv_fds(self.line, 300_000, 1)
        for descriptor in fds:
            with os.fdopen(descriptor, "rb") as file:
                file.seek(0)  # as it is shared, it is where the sender stopped
                data = file.read()
        return parsed(data)


def parsed(data: bytes) -> dict[str, bytes]:
    """The fields of an entry."""
    found: dict[str, bytes] = {}
    while data:
        line, _, data = data.partition(b"\n")
        name, equals, value = line.partition(b"=")
        if not equals:
            (size,) = struct.unpack("<Q", data[:8])
            value, data = data[8 : 8 + size], data[8 + size + 1 :]
        found[name.decode()] = value
    return found


@pytest.fixture
def recorder(short_path: Path) -> Iterator[Recorder]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line:
        yield Recorder(short_path / "socket", line)


def around(stderr: Any = None, **environ: str) -> RuntimeEnvironment:
    """Surroundings with nothing in them but this."""
    return RuntimeEnvironment(environ, io.StringIO(), stderr or io.StringIO())


def test_a_runtime_that_nobody_knows_gets_json_lines_on_stdout() -> None:
    place = around()
    found = make_destination("auto", place)
    found.write([{"message_type": "celery5:x"}])
    assert isinstance(place.stdout, io.StringIO)
    assert place.stdout.getvalue() == '{"message_type":"celery5:x"}\n'


def test_an_applications_own_detectors_are_asked_before_the_built_in_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept, built_in = Kept(), Kept()
    monkeypatch.setattr("celery5.logs.destination.BUILT_IN_DETECTORS", [lambda _around: built_in])
    assert make_destination("auto", around()) is built_in
    assert make_destination("auto", around(), [lambda _around: kept]) is kept


def test_an_applications_own_detectors_are_asked_first_and_in_order() -> None:
    kept, asked = Kept(), []

    def not_mine(_around: RuntimeEnvironment) -> LogDestination | None:
        asked.append("first")
        return None

    def broken(_around: RuntimeEnvironment) -> LogDestination | None:
        asked.append("second")
        raise RuntimeError("what is this place")

    def mine(_around: RuntimeEnvironment) -> LogDestination | None:
        asked.append("third")
        return kept

    place = around()
    assert make_destination("auto", place, [not_mine, broken, mine, not_mine]) is kept
    assert asked == ["first", "second", "third"]
    assert isinstance(place.stderr, io.StringIO)
    assert "log detector" in place.stderr.getvalue()
    assert "RuntimeError: what is this place" in place.stderr.getvalue()


@pytest.mark.parametrize("form", ["json", "console"])
def test_who_says_a_format_gets_it_whatever_the_runtime(form: Any) -> None:
    assert isinstance(make_destination(form, around(), [lambda _around: Kept()]), LineWriter)


def test_stderr_is_the_journal_when_its_device_and_inode_are_those_that_are_named(
    tmp_path: Path, short_path: Path, recorder: Recorder
) -> None:
    with (tmp_path / "a").open("w") as stream, (tmp_path / "b").open("w") as other:
        found = os.fstat(stream.fileno())
        named = f"{found.st_dev}:{found.st_ino}"
        assert is_journal_stream(named, stream)
        assert not is_journal_stream(named, other)  # inherited, and redirected since
        assert not is_journal_stream("", stream)
        assert not is_journal_stream(named, io.StringIO())
        environ = {"JOURNAL_STREAM": named, "CELERY5_JOURNAL_SOCKET": str(recorder.path)}
        place = make_destination("auto", around(stream, **environ))
        assert isinstance(place, JournaldDestination)
        place.close()
        assert isinstance(make_destination("auto", around(other, **environ)), LineWriter)
        gone = {"JOURNAL_STREAM": named, "CELERY5_JOURNAL_SOCKET": str(short_path / "nobody")}
        assert isinstance(make_destination("auto", around(stream, **gone)), LineWriter)


def test_a_journal_that_is_asked_for_and_not_there_is_told_in_a_line(short_path: Path) -> None:
    with pytest.raises(Misconfigured, match=r"no journal listens at .*nobody .*use --log-format json"):
        make_destination("journal", around(CELERY5_JOURNAL_SOCKET=str(short_path / "nobody")))


def test_an_entry_has_the_fields_that_people_search_for() -> None:
    job = {
        "job": "j1",
        "task": "shop.add",
        "queue": "q",
        "state": "DEAD",
        "attempt": 2,
        "seconds": 0.25,
        "error": "ValueError: no",
        "traceback": "line 1\nline 2",
        "worker": "w",
        "timestamp": 1.0,
        "level": "error",
        "message_type": "celery5:job",
        "task_level": [1],
    }
    fields = parsed(format_entry(job))
    assert fields["PRIORITY"] == b"3"
    assert fields["SYSLOG_IDENTIFIER"] == b"celery5"
    assert fields["CELERY5_EVENT"] == b"celery5:job"
    assert fields["MESSAGE"] == b"shop.add DEAD in 0.25 s (job=j1 attempt=2): ValueError: no\nline 1\nline 2"
    assert fields["CELERY5_TRACEBACK"] == b"line 1\nline 2"
    for name, value in {
        "JOB": b"j1",
        "TASK": b"shop.add",
        "QUEUE": b"q",
        "WORKER": b"w",
        "ATTEMPT": b"2",
        "DURATION": b"0.25",
        "STATE": b"DEAD",
        "ERROR": b"ValueError: no",
    }.items():
        assert fields[f"CELERY5_{name}"] == value
    assert fields["CELERY5_TASK_LEVEL"] == b"/1", "its place in its action, on one line"
    assert not {"CELERY5_LEVEL", "CELERY5_TIMESTAMP"} & set(fields)


class Rude:
    """Has no text."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


def test_names_and_values_of_any_kind_make_an_entry_that_can_be_read() -> None:
    odd = {
        "ünï-côde name": "x",
        "y" * 200: 1,
        "half": "\udcff",
        "zero": "a\0b",
        "list": [1, "\n"],
        "none": None,
    }
    fields = parsed(format_entry({"message_type": "celery5:x", **odd}))
    assert fields["CELERY5__N__C_DE_NAME"] == b"x"
    assert max(map(len, fields)) == native.MAX_NAME_LENGTH
    assert fields["CELERY5_HALF"] == b"\\udcff"
    assert fields["CELERY5_ZERO"] == b"a\0b"
    assert "CELERY5_NONE" not in fields
    rude = parsed(format_entry({"message_type": "celery5:x", "value": Rude()}))
    assert rude["CELERY5_EVENT"] == b"celery5:log:format-failed"


def test_what_is_too_large_for_a_datagram_is_passed_in_a_file(recorder: Recorder) -> None:
    place = JournaldDestination(str(recorder.path))
    assert place.write([{"message_type": "celery5:x", "blob": "y" * 1_000_000}]) == 1
    assert recorder.entry()["CELERY5_BLOB"] == b"y" * 1_000_000
    place.close()


def test_a_journal_that_is_busy_takes_the_rest_later_and_nothing_is_lost(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "SEND_TIMEOUT", 0.02)
    journal = LogWriter(JournaldDestination(str(recorder.path)))
    with journal:
        journal._buffer.clear()
        for n in range(50):
            journal({"message_type": "celery5:x", "n": n, "worker": "w"})
        seen = [recorder.entry() for _ in range(50)]
    assert [int(environment["CELERY5_N"]) for environment in seen] == list(range(50))
    assert journal.counts.lost == 0


def test_restarted_journal_is_found_and_a_missing_one_reported(
    recorder: Recorder,
) -> None:
    place = JournaldDestination(str(recorder.path))
    recorder.line.close()
    with pytest.raises(OSError, match="refused"):
        place.write([{"message_type": "celery5:x"}])
    recorder.path.unlink()
    with pytest.raises(FileNotFoundError):
        place.write([{"message_type": "celery5:x"}])
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line:
        again = Recorder(recorder.path, line)
        assert place.write([{"message_type": "celery5:x"}]) == 1
        assert again.entry()["CELERY5_EVENT"] == b"celery5:x"
    place.close()


class Terminal(io.StringIO):
    """A stream that people look at."""

    def isatty(self) -> bool:
        return True


def test_people_at_a_terminal_get_lines_for_people_and_programs_get_json() -> None:
    said = {"message_type": "celery5:worker:started", "worker": "w1", "level": "info", "timestamp": 0.0}

    def written(form: Any, stdout: io.StringIO) -> str:
        make_destination(form, RuntimeEnvironment({}, stdout, Terminal())).write([dict(said)])
        return stdout.getvalue()

    assert "w1 worker:started" in written("auto", Terminal())
    assert json.loads(written("auto", io.StringIO())) == said  # although stderr is a terminal
    assert json.loads(written("json", Terminal())) == said
    closed = Terminal()
    closed.close()
    assert isinstance(make_destination("auto", RuntimeEnvironment({}, closed, Terminal())), LineWriter)
