"""The log of a dashboard process: who did what, what was refused, what failed, and outages of the broker."""

import json
import os
import re
import signal
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from celery5.broker.servers.embedded import EmbeddedServer
from celery5.dashboard.access import hash_token
from celery5.logs.log import Level, NullLog
from celery5.processes.dashboard import MAX_REFUSALS, RefusalLog
from tests.redis.commands.staff import Employee, Staff, wait_until

TOKEN = "a-token-of-anna"
START = [
    *(sys.executable, "-m", "celery5", "-A", "tests.redis.events.historian:app"),
    *("dashboard", "start", "--port", "0"),
]


def start(staff: Staff, *flags: str) -> Employee:
    """Start a dashboard, and wait until it listens."""
    one = staff.launch([*START, *flags])
    wait_until(lambda: bool(one.lines("dashboard:started")) or one.process.poll() is not None)
    assert one.process.poll() is None, one.output.read_text()
    return one


def ask(
    dashboard: Employee,
    path: str,
    body: object = None,
    *,
    token: str = TOKEN,
    headers: Mapping[str, str] | None = None,
) -> int:
    """Return the status of the answer to a request."""
    address = dashboard.lines("dashboard:started")[0]["address"]
    request = urllib.request.Request(
        f"{address}{path}",
        None if body is None else json.dumps(body).encode(),
        {"Content-Type": "application/json", **(headers or {"Authorization": f"Bearer {token}"})},
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    file = tmp_path / "tokens"
    file.write_text(f"anna operator {hash_token(TOKEN)}\n")
    file.chmod(0o600)
    return file


def test_flags_choose_the_form_and_the_level_of_the_log_of_a_dashboard(staff: Staff) -> None:
    plain = staff.launch([*START, "--log-format", "console", "--log-level", "info"])
    wait_until(lambda: "dashboard:started" in plain.output.read_text() or plain.process.poll() is not None)
    assert (plain.process.poll(), plain.lines("dashboard:started")) == (None, [])  # it is no JSON
    quiet = staff.launch([*START, "--log-level", "warning"])
    wait_until(lambda: "dashboard: http" in quiet.output.read_text() or quiet.process.poll() is not None)
    quiet.process.send_signal(signal.SIGTERM)
    assert quiet.process.wait(20) == 0
    assert "dashboard:st" not in quiet.output.read_text()  # it has neither started nor stopped for the log


def test_a_dashboard_logs_its_start_actions_refusals_errors_and_stop(staff: Staff, tokens: Path) -> None:
    dashboard, app = start(staff, "--tokens", str(tokens)), staff.app.name
    (started,) = dashboard.lines("dashboard:started")
    assert started["address"].startswith("http://127.0.0.1:")
    assert (started["apps"], started["sign_in"], started["level"]) == ([app], "token of a file", "info")
    assert ask(dashboard, f"/api/v1/{app}/queue/pause", {"queue": "default"}) == 200
    wait_until(lambda: bool(dashboard.lines("audit:recorded")))
    (done,) = dashboard.lines("audit:recorded")
    assert [done[name] for name in ("who", "source", "action", "filter")] == [
        *("anna", "dashboard", "worker:pause-queue"),
        {"queue": "default"},
    ]
    assert ask(dashboard, "/api/v1", token="of nobody") == 401
    wait_until(lambda: bool(dashboard.lines("dashboard:sign-in-refused")))
    (refused,) = dashboard.lines("dashboard:sign-in-refused")
    assert (refused["level"], refused["client"]) == ("warning", "127.0.0.1")
    assert "of nobody" not in dashboard.output.read_text()
    tokens.unlink()
    assert ask(dashboard, f"/{app}") == 500
    wait_until(lambda: bool(dashboard.lines("dashboard:request-failed")))
    (failed,) = dashboard.lines("dashboard:request-failed")
    assert (failed["level"], failed["path"]) == ("error", f"/{app}")
    assert "tokens" in failed["why"]
    assert "Traceback" in failed["traceback"]
    dashboard.signal(signal.SIGTERM)
    assert dashboard.wait() == 0
    assert len(dashboard.lines("dashboard:stopped")) == 1


def test_a_dashboard_logs_an_outage_of_the_broker_in_two_lines(
    own_staff: Staff, own_server: EmbeddedServer, tokens: Path
) -> None:
    dashboard = start(own_staff, "--tokens", str(tokens))
    path = f"/api/v1/{own_staff.app.name}/info/show"
    assert ask(dashboard, path) == 200
    os.kill(own_server.pid, signal.SIGSTOP)
    try:
        wait_until(lambda: ask(dashboard, path) == 503)
        wait_until(lambda: bool(dashboard.lines("broker:disconnected")))
    finally:
        os.kill(own_server.pid, signal.SIGCONT)
    wait_until(lambda: ask(dashboard, path) == 200)
    wait_until(lambda: bool(dashboard.lines("broker:reconnected")))
    lost, back = dashboard.lines("broker:disconnected"), dashboard.lines("broker:reconnected")
    assert [line["level"] for line in (*lost, *back)] == ["warning", "info"]


def test_the_link_that_signs_in_is_not_in_the_log(staff: Staff) -> None:
    dashboard = start(staff)
    (line,) = dashboard.lines("dashboard:started")
    (token,) = re.findall(r"token=([\w-]+)", dashboard.output.read_text())  # on stderr
    assert dashboard.output.read_text().count(token) == 1
    assert line["sign_in"] == "link that signs in once"


def test_refused_sign_ins_are_logged_ten_times_a_minute_at_most() -> None:
    lines: list[dict[str, Any]] = []
    now = 0.0

    class Lines(NullLog):
        def event(self, name: str, level: Level = "info", /, **fields: Any) -> None:
            lines.append({"name": name, **fields})

    refusals = RefusalLog(Lines(), clock=lambda: now)
    for number in range(MAX_REFUSALS + 5):
        refusals("10.0.0.9", f"no {number}")
    assert len(lines) == MAX_REFUSALS
    now = 60.0
    refusals("10.0.0.9", "again")
    assert lines[-1] == {
        "name": "dashboard:sign-in-refused",
        "client": "10.0.0.9",
        "why": "again",
        "omitted": 5,
    }


def test_a_proxy_without_its_secret_is_a_refused_sign_in(
    staff: Staff, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CELERY5_DASHBOARD_PROXY_SECRET", "x" * 32)
    dashboard = start(staff, "--proxy-user-header", "X-User")
    assert ask(dashboard, "/api/v1", headers={"X-User": "anna"}) == 401
    wait_until(lambda: bool(dashboard.lines("dashboard:sign-in-refused")))
    assert dashboard.lines("dashboard:started")[0]["sign_in"] == "header of a proxy"
