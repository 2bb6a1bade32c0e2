"""Remote units: what is written for the systemd of another host, and what is understood of its answers."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery5.protocol.cluster.members import Member
from celery5.protocol.cluster.remote_units import (
    RemoteSetup,
    UnitStatus,
    describe_exit,
    format_unit_file,
    get_unit_name,
    parse_start_replies,
    parse_unit_statuses,
)

MEMBER = Member(
    name="worker-default-1@web2",
    kind="worker",
    host="web2",
    arguments=("worker", "start", "--queues", 'a "b" $HOME %h; \\x'),
    stop_after=80.0,
)
PLACE = RemoteSetup(
    app="shop", command="~/venv/bin/celery5", directory="~/shop 50%", environment_file="~/.config/shop.env"
)


@given(st.text(st.characters(codec="utf-8"), min_size=1), st.text(st.characters(codec="utf-8"), min_size=1))
def test_a_member_is_known_by_its_unit_whatever_it_is_called(app: str, name: str) -> None:
    unit = get_unit_name(app, name)
    assert set(unit) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.")
    assert list(parse_unit_statuses(app, [f"Id={unit}", "ActiveState=active"])) == [name]
    assert not parse_unit_statuses(f"{app}x", [f"Id={unit}", "ActiveState=active"])


@pytest.fixture(autouse=True)
def runtime(monkeypatch: pytest.MonkeyPatch, short_path: Path) -> None:
    """A user's systemd wants a folder for sockets, whose paths are short."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_path))


def test_a_unit_is_as_systemd_wants_it(tmp_path: Path) -> None:
    text = format_unit_file(PLACE, MEMBER)
    assert 'ExecStart=/usr/bin/env "%h/venv/bin/celery5" "worker" "start" "--queues" ' in text
    assert "WatchdogSec=62\n" in text, "a minute, and what its last word may be older than its silence"
    assert '"a \\"b\\" $$HOME %%h; \\\\x"' in text
    assert "WorkingDirectory=%h/shop 50%%\n" in text
    assert "EnvironmentFile=%h/.config/shop.env\n" in text
    assert "TimeoutStopSec=80\n" in text
    if shutil.which("systemd-analyze") is None:
        pytest.skip("there is no systemd-analyze on this machine: nobody else can tell")
    unit = tmp_path / get_unit_name("shop", MEMBER.name)
    unit.write_text(text)
    command = ["systemd-analyze", "verify", "--user", "--man=no", str(unit)]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert completed.stdout + completed.stderr == ""


def test_what_a_login_shell_says_besides_is_passed_over() -> None:
    lines = ["Welcome!", "", "PATH=/bin", "", "Id=cron.service", "ActiveState=active", ""]
    assert parse_unit_statuses(
        "shop",
        [
            *lines,
            f"Id={get_unit_name('shop', 'a-1')}",
            "ActiveState=failed",
            "StatusText=a=b",
            "MainPID=12",
            "",
        ],
    ) == {"a-1": UnitStatus(member="a-1", active="failed", status_text="a=b", pid=12)}
    said = [
        "Last login: today",
        f"celery5:begun {get_unit_name('shop', 'a-1')} f00",
        "celery5:begun other.service f11",
    ]
    assert parse_start_replies(
        "shop", [*said, f"celery5:refused {get_unit_name('shop', 'a-2')} no such unit "]
    ) == {
        "a-1": ("begun", "f00"),
        "a-2": ("refused", "no such unit"),
    }


@pytest.mark.parametrize(
    ("unit", "how"),
    [
        ({"code": "1", "status": "0", "active": "inactive"}, ("exit code 0", 0)),
        ({"code": "1", "status": "3", "result": "exit-code"}, ("exit code 3", 3)),
        ({"code": "2", "status": "9", "result": "signal"}, ("signal 9", -9)),
        (
            {"code": "2", "status": "9", "result": "watchdog"},
            ("hung: its event loop said nothing for too long", -9),
        ),
        ({"code": "0", "status": "0", "result": "resources"}, ("systemd says resources", None)),
        ({"code": "", "status": "?", "result": ""}, ("systemd says nothing", None)),
    ],
)
def test_how_one_ended(unit: dict[str, str], how: tuple[str, int | None]) -> None:
    said: dict[str, Any] = {"member": "a-1", "active": "", **unit}
    assert describe_exit(UnitStatus(**said)) == how
