"""Units: a member as a service of systemd, as values."""

import subprocess
from shutil import which

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery5.protocol.cluster.members import Ended, Ready, Stopping
from celery5.protocol.cluster.units import (
    format_environment_file,
    get_member_events,
    get_unit_name,
    get_unit_path,
    get_unit_pattern,
    make_ended,
    parse_member_name,
    parse_state,
)

UNIT = "celery5-shop-worker-a-1.service"


def test_a_unit_is_named_after_its_cluster_and_its_member() -> None:
    assert get_unit_name("shop", "worker-mail-1") == "celery5-shop-worker-mail-1.service"
    assert get_unit_name("my-shop", "worker-mail-1") == "celery5-my\\x2dshop-worker-mail-1.service"
    assert get_unit_pattern("my-shop") == "celery5-my\\\\x2dshop-*.service"


@given(st.text(min_size=1), st.text(min_size=1))
def test_whose_a_unit_is_can_be_read_from_its_name(app: str, member: str) -> None:
    assert parse_member_name(app, get_unit_name(app, member)) == member


@given(st.text(min_size=1), st.text(min_size=1))
def test_another_clusters_units_are_nobodys_here(app: str, other: str) -> None:
    if app != other:
        assert parse_member_name(app, get_unit_name(other, "worker-a-1")) == ""


def test_names_are_escaped_as_systemd_does_it() -> None:
    if which("systemd-escape"):
        said = subprocess.run(["systemd-escape", "mähl box-1"], capture_output=True, text=True, check=True)
        assert get_unit_name(said_app := "mähl box-1", "w") == f"celery5-{said.stdout.strip()}-w.service", (
            said_app
        )


def test_a_unit_is_shown_where_systemd_shows_it() -> None:
    assert get_unit_path("celery5-my\\x2dshop-worker-a-1.service") == (
        "/org/freedesktop/systemd1/unit/celery5_2dmy_5cx2dshop_2dworker_2da_2d1_2eservice"
    )


def test_an_environment_is_written_so_that_systemd_reads_what_was_meant() -> None:
    left_out = {"no-name": "x", "LISTEN_FDS": "1", "CELERY5_PARENT": "1"}
    text = format_environment_file({"A": 'x "y" $z `w` \\', "B": "two\nlines", **left_out})
    assert text == 'A="x \\"y\\" \\$z \\`w\\` \\\\"\nB="two\nlines"\n'


@pytest.mark.parametrize(
    ("said", "how", "code"),
    [
        ({"Result": "success", "ExecMainCode": 1, "ExecMainStatus": 0}, "ended as it was asked to", 0),
        ({"Result": "success", "ExecMainCode": 2, "ExecMainStatus": 9}, "ended by SIGKILL", -9),
        ({"Result": "exit-code", "ExecMainCode": 1, "ExecMainStatus": 3}, "ended with exit code 3", 3),
        ({"Result": "signal", "ExecMainCode": 2, "ExecMainStatus": 24}, "ended by SIGXCPU", -24),
        ({"Result": "oom-kill", "ExecMainCode": 2, "ExecMainStatus": 9}, "no memory left", -9),
        ({"Result": "protocol", "ExecMainCode": 1, "ExecMainStatus": 0}, "before it was ready", None),
        ({"Result": "watchdog", "ExecMainCode": 2, "ExecMainStatus": 9}, "hung", -9),
        ({"Result": "resources"}, f"journalctl -u {UNIT}", None),
        ({}, "ended", None),
        ({"Result": "something-new", "ExecMainCode": 1, "ExecMainStatus": 4}, "something-new", 4),
    ],
)
def test_how_a_member_ended_is_told_in_words(said: dict[str, object], how: str, code: int | None) -> None:
    word = make_ended("a", UNIT, said)
    assert how in word.how
    assert word.code == code


def test_changes_of_a_unit_are_words_about_its_member() -> None:
    assert list(get_member_events("a", UNIT, {"ActiveState": "activating"}, "starting")) == []
    assert list(get_member_events("a", UNIT, {"ActiveState": "active"}, "starting")) == [Ready("a")]
    assert list(get_member_events("a", UNIT, {"ActiveState": "active"}, "up")) == []
    assert list(get_member_events("a", UNIT, {"ActiveState": "reloading"}, "up")) == []
    assert list(get_member_events("a", UNIT, {"ActiveState": "deactivating"}, "up")) == [Stopping("a")]
    assert list(get_member_events("a", UNIT, {"ActiveState": "failed"}, "stopping")) == [Ended("a", "ended")]
    assert list(get_member_events("a", UNIT, {"SubState": "running"}, "up")) == []
    assert parse_state("inactive") is None
