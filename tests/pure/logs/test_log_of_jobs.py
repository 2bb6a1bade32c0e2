"""What is said of jobs: the same line for whoever listens, at a third of the cost where nobody but the journal does."""

import io
import json
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import eliot
import pytest

from celery5.logs.log import Level, Log, LogWriter


def written(stream: io.StringIO) -> list[dict[str, Any]]:
    """The messages on a stream, eliot's own action messages left out."""
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    return [line for line in lines if "action_type" not in line]


ENDED: dict[str, Any] = {
    "job": "j1",
    "task": "shop.charge",
    "queue": "default",
    "state": "SUCCESS",
    "attempt": 2,
    "seconds": 0.25,
}


def ended_lines(
    journal: LogWriter, stream: io.StringIO, *, trace: str = "", level: Level = "info"
) -> list[dict[str, Any]]:
    """What is written when two jobs end, without when."""
    with journal:
        journal._buffer.clear()
        log = Log(worker="w1", app="shop", writer=journal)
        log.log_job_end(level, **ENDED, trace=trace)
        log.log_job_end(level, **ENDED, trace=trace)
    lines = written(stream)
    for line in lines:
        assert time.time() - 60 < line.pop("timestamp") <= time.time()
    return lines


@pytest.mark.parametrize("trace", ["", "abc@/2"])
@pytest.mark.parametrize("level", ["info", "warning"])
def test_log_of_a_job_is_the_same_with_other_eliot_destinations(trace: str, level: Level) -> None:
    alone, beside = io.StringIO(), io.StringIO()
    heard: list[dict[str, Any]] = []
    expected = ended_lines(LogWriter(alone), alone, trace=trace, level=level)
    eliot.add_destinations(heard.append)
    try:
        lines = ended_lines(LogWriter(beside), beside, trace=trace, level=level)
    finally:
        eliot.remove_destination(heard.append)
    assert [line.pop("task_level")[-1] for line in expected] == [1, 2]
    assert [line.pop("task_level")[-1] for line in lines] == [1, 2]
    assert (
        len({line.pop("task_uuid") for line in expected})
        == len({line.pop("task_uuid") for line in lines})
        == 1
    )
    assert lines == expected
    assert expected[0] == ENDED | {"worker": "w1", "level": level, "message_type": "celery5:job"} | (
        {"trace": trace} if trace else {}
    )
    assert [line["job"] for line in heard if line.get("message_type") == "celery5:job"] == ["j1", "j1"]


def test_a_journal_that_nobody_shares_with_eliot_is_given_no_dicts() -> None:
    stream = io.StringIO()
    journal = LogWriter(stream)
    assert not journal.is_only_destination
    with journal:
        assert journal.is_only_destination
        eliot.add_destinations(print)
        try:
            assert not journal.is_only_destination
        finally:
            eliot.remove_destination(print)
        assert journal.is_only_destination


def test_what_eliot_adds_to_each_message_is_in_a_jobs_line() -> None:
    fields = vars(eliot.Logger)["_destinations"]._globalFields  # there is no other way to take one out again
    stream = io.StringIO()
    eliot.add_global_fields(region="north")
    try:
        lines = ended_lines(LogWriter(stream), stream)
    finally:
        fields.clear()
    assert [line["region"] for line in lines] == ["north", "north"]


def test_where_eliot_keeps_its_listeners_elsewhere_everything_goes_through_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = io.StringIO()
    journal = LogWriter(stream)

    class Elsewhere(eliot.Logger):
        _destinations = SimpleNamespace(send=lambda message, _logger: journal(message))

    monkeypatch.setattr(eliot, "Logger", Elsewhere)
    lines = ended_lines(journal, stream)
    assert not journal.is_only_destination
    assert [line["job"] for line in lines] == ["j1", "j1"]


def test_what_else_there_is_to_say_of_a_job_is_said() -> None:
    stream = io.StringIO()
    with LogWriter(stream) as journal:
        journal._buffer.clear()
        assert journal.is_only_destination
        Log(worker="w1", app="shop", writer=journal).log_job_end(
            "error", **ENDED, extra={"reason": "exhausted"}
        )
    (line,) = written(stream)
    assert line["reason"] == "exhausted"
    assert line | ENDED == line


def test_the_level_holds_for_what_is_said_of_jobs() -> None:
    stream = io.StringIO()
    assert ended_lines(LogWriter(stream, level="warning"), stream, level="info") == []
    assert len(ended_lines(LogWriter(stream, level="warning"), stream, level="warning")) == 2


def test_what_is_said_of_jobs_is_shed_and_counted_like_all_else() -> None:
    journal = LogWriter(io.StringIO(), capacity=0)
    ended_lines(journal, io.StringIO())
    assert journal.counts.lost >= 2


class Dicts:
    """An outlet as users write it."""

    def __init__(self) -> None:
        self.taken: list[dict[str, Any]] = []
        self.broken = False

    def write(self, messages: Sequence[dict[str, Any]]) -> int:
        if self.broken:
            raise OSError("gone")
        self.taken += [dict(message) for message in messages]
        return len(messages)


def test_an_outlet_of_the_users_own_is_given_dicts() -> None:
    outlet = Dicts()
    ended_lines(LogWriter(outlet), io.StringIO())
    jobs = [line for line in outlet.taken if line.get("message_type") == "celery5:job"]
    assert [job["job"] for job in jobs] == ["j1", "j1"]
    assert all(isinstance(job["task_level"], list) and "trace" not in job for job in jobs)


def test_people_are_told_of_jobs_that_ended() -> None:
    stream = io.StringIO()
    ended_lines(LogWriter(stream, line_format="console"), io.StringIO())
    assert stream.getvalue().count("job=j1") == 2


def test_what_could_not_be_said_of_a_job_is_brought_again_as_a_dict() -> None:
    outlet = Dicts()
    outlet.broken = True
    journal = LogWriter(outlet)
    journal.start_retries()
    ended_lines(journal, io.StringIO())
    jobs = [line for line in journal.take_unwritten(100) if line.get("message_type") == "celery5:job"]
    assert [job["job"] for job in jobs] == ["j1", "j1"]
