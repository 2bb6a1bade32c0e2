"""Hostile words: what a box, a host or a log of others may say, and what celery5 makes of it."""

import time
from typing import Any

import pytest

from celery5 import Misconfigured
from celery5.config.include import is_included
from celery5.logs.journald import format_entry
from celery5.protocol.boxes.frames import BoxLogLine
from celery5.protocol.cluster.remote_units import get_unit_name, parse_start_replies, parse_unit_statuses
from celery5.runners.boxes.box_process import MAX_LOG_LINES, BoxOutput
from celery5.tasks import Box


@pytest.mark.parametrize("name", ["a_zz", "a_", "a_ff", "_", "a_6", "a_61", "a b", "\ufffd", "a_e2_82"])
def test_a_unit_that_no_controller_has_named_is_passed_over(name: str) -> None:
    good, bad = get_unit_name("shop", "mail"), f"celery5.shop.{name}.service"
    lines = [f"Id={bad}", "ActiveState=active", "", f"Id={good}", "ActiveState=active", ""]
    assert list(parse_unit_statuses("shop", lines)) == ["mail"]
    assert list(parse_start_replies("shop", [f"celery5: begun {bad} x", f"celery5: begun {good} y"])) in (
        ["mail"],
        [],
    )


def test_each_member_keeps_its_name() -> None:
    for name in ("mail", "mail-1", "mail.1", "größe", "a_b", "a b"):
        assert list(parse_unit_statuses("shop", [f"Id={get_unit_name('shop', name)}", ""])) == [name]


def _voice() -> tuple[BoxOutput, list[dict[str, Any]]]:
    told = list[dict[str, Any]]()

    def tell(what: str, _level: Any = "info", /, **fields: Any) -> None:
        told.append({"what": what, **fields})

    return BoxOutput(tell, 1), told


def test_a_box_that_logs_without_end_is_counted_from_some_line_on() -> None:
    voice, told = _voice()
    for _ in range(2):
        voice.start_job(None)
        for _ in range(MAX_LOG_LINES + 7):
            voice.log_line(BoxLogLine(level="info", message="again"))
        voice.end_job()
    assert [line["what"] for line in told].count("log") == 2 * MAX_LOG_LINES
    assert [line["lines"] for line in told if line["what"] == "box:output-truncated"] == [7, 7]


@pytest.mark.parametrize("name", ["job", "JOB", "Task", "WORKER", "task-uuid", "Message_Type", "task.UUID"])
def test_no_field_of_a_box_takes_the_place_of_ours_in_the_journal(name: str) -> None:
    voice, told = _voice()
    voice.log_line(BoxLogLine(level="info", message="hello", fields={name: "forged", "mine": 1}))
    assert "forged" not in str(told)
    assert told[0]["mine"] == 1


@pytest.mark.parametrize("name", ["JOB", "Job", "TASK-UUID", "task.uuid"])
@pytest.mark.parametrize("ours_first", [True, False])
def test_a_name_that_the_journal_takes_for_ours_does_not_make_a_second_field(
    name: str, ours_first: bool
) -> None:
    ours = {"job": "j1", "task_uuid": "u1"}
    fields = {**ours, name: "forged"} if ours_first else {name: "forged", **ours}
    said = format_entry({"message_type": "celery5:x", **fields})
    assert said.count(b"CELERY5_JOB=") == said.count(b"CELERY5_TASK_UUID=") == 1
    assert b"CELERY5_JOB=j1\n" in said
    assert b"CELERY5_TASK_UUID=u1\n" in said


def test_a_box_with_a_command_gets_the_variables_it_needs_and_those_that_are_named() -> None:
    environ = {
        "PATH": "/bin",
        "LC_ALL": "C",
        "SECRET_TOKEN": "t",
        "CELERY5_BROKER": "redis://:p@h",
        "MINE": "m",
    }
    assert Box(["x"]).get_variables(environ) == {"PATH": "/bin", "LC_ALL": "C"}
    assert Box(["x"], environment=["MINE"]).get_variables(environ) == {
        "PATH": "/bin",
        "LC_ALL": "C",
        "MINE": "m",
    }
    assert Box().get_variables(environ) is None
    for wrong in ("MINE", [1], [""]):
        with pytest.raises(Misconfigured, match="give names of variables"):
            Box(["x"], environment=wrong)  # type: ignore[arg-type]
    with pytest.raises(Misconfigured, match="one in Python has all"):
        Box(environment=["MINE"])


def test_a_pattern_of_many_words_takes_no_longer_for_each_way_to_share_them() -> None:
    began = time.process_time()
    assert not is_included([".".join(["shop", *["**"] * 40, "tasks"])], ".".join(["shop", *["a"] * 60]))
    assert not is_included([".".join(["shop", *["**", "*"] * 30, "tasks"])], ".".join(["shop", *["a"] * 60]))
    assert is_included(
        [".".join(["shop", *["**", "*"] * 5, "tasks"])], ".".join(["shop", *["a"] * 60, "tasks"])
    )
    assert time.process_time() - began < 1  # it did not end
