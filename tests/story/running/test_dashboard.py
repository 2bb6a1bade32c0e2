"""`celery5 dashboard`: real processes, on a port, on a socket and beside a worker."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.request import Request, urlopen

import httpx
import pytest

from celery5.dashboard.access import read_tokens
from tests.story.cli.commands import celery5
from tests.story.conftest import Desk

LIMIT = 30.0


@pytest.fixture
def start(desk: Desk) -> Iterator[object]:
    """Starts a command; gives what it has printed up to the address of its dashboard. All end with the test."""
    processes: list[subprocess.Popen[bytes]] = []

    def begin(*words: str, env: dict[str, str] | None = None) -> str:
        output = desk.folder / f"output-{len(processes)}"
        with output.open("wb") as file:
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "celery5", "-A", "shop", *words],
                    cwd=desk.folder,
                    env={**os.environ, **(env or {})},
                    stdout=file,
                    stderr=subprocess.STDOUT,
                )
            )
        deadline = time.monotonic() + LIMIT
        while "dashboard: " not in output.read_text():
            assert time.monotonic() < deadline, output.read_text()
            assert processes[-1].poll() is None, output.read_text()
            time.sleep(0.05)
        return output.read_text()

    yield begin
    for process in processes:
        process.send_signal(signal.SIGTERM)
    for process in processes:
        assert process.wait(20) == 0


def find_address(output: str) -> str:
    found = re.search(r"(http://\S+)/sign-in\?token=\S+", output)
    assert found, output
    return found[0]


def test_the_printed_address_opens_the_dashboard_once(desk: Desk, start: object) -> None:
    assert callable(start)
    address = find_address(start("dashboard", "start", "--port", "0"))
    with httpx.Client(follow_redirects=True) as client:
        assert "Overview" in client.get(address).text
    with httpx.Client(follow_redirects=True) as other:
        assert other.get(address).status_code == 401


def test_development_serves_the_dashboard_beside_the_worker(desk: Desk, start: object) -> None:
    assert callable(start)
    output = start("controller", "start", "--development", env={"CELERY5_BROKER": desk.app.settings.broker})
    with httpx.Client(follow_redirects=True) as client:
        assert "Overview" in client.get(find_address(output)).text


def test_a_dashboard_that_fails_beside_a_worker_is_logged_and_tried_again(desk: Desk) -> None:
    (desk.folder / "h11.py").write_text("raise RuntimeError('this package is broken')\n")
    output = desk.folder / "output"
    with output.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "celery5", "-A", "shop", "controller", "start", "--development"],
            cwd=desk.folder,
            env={**os.environ, "CELERY5_BROKER": desk.app.settings.broker, "PYTHONPATH": str(desk.folder)},
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    try:
        assert desk.app.tasks["shop.add"].delay(1, 2).get(timeout=LIMIT) == 3
        deadline = time.monotonic() + LIMIT
        while output.read_text().count("companion:failed") < 2:
            assert time.monotonic() < deadline, output.read_text()
            time.sleep(0.05)
        assert "this package is broken" in output.read_text()
        assert process.poll() is None
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0


def test_a_socket_can_be_opened_by_its_owner_alone(desk: Desk, start: object) -> None:
    assert callable(start)
    path = desk.folder / "private" / "d.sock"
    output = start("dashboard", "start", "--socket", str(path))
    assert path.stat().st_mode & 0o077 == 0
    assert path.parent.stat().st_mode & 0o077 == 0
    found = re.search(r"http://localhost:PORT(/sign-in\?token=\S+)", output)
    assert found, output
    with httpx.Client(
        transport=httpx.HTTPTransport(uds=str(path)), base_url="http://localhost:9000"
    ) as client:
        assert client.get("/api/v1").status_code == 401
        assert client.get(found[1]).status_code == 303
        assert client.get("/api/v1").json()["user"]["role"] == "admin"
        assert client.get(found[1]).status_code == 401


def test_a_client_that_reads_nothing_does_not_keep_the_dashboard_from_stopping(
    desk: Desk, start: object
) -> None:
    assert callable(start)
    address = find_address(start("dashboard", "start", "--port", "0"))
    host, port = address.removeprefix("http://").partition("/")[0].split(":")
    with socket.create_connection((host, int(port))) as stalled:
        stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        for _ in range(50):
            stalled.sendall(f"GET /sign-in HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n".encode())
        assert urlopen(Request(f"http://{host}:{port}/sign-in"), timeout=10).status == 200


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--host", "0.0.0.0"], "would be open to everybody: add --tokens FILE"),
        (
            ["--host", "192.0.2.7", "--tokens", "none"],
            "the tokens of the dashboard cannot be read: none: No such file or directory\n",
        ),
        (["--tokens", "a", "--proxy-user-header", "b"], "give only one of them"),
        (["--host", "192.0.2.7", "--proxy-user-header", "b"], "cannot listen on 192.0.2.7"),
        (["--socket", "/tmp/d.sock"], "is open to others: chmod 700"),
        (["--public-host", "http://x"], "is no name of a host: write NAME or NAME:PORT"),
        (["--public-url", "x"], "write https://NAME"),
    ],
)
def test_what_cannot_be_served_is_refused_in_one_line(desk: Desk, words: list[str], problem: str) -> None:
    (desk.folder / "a").touch(mode=0o600)
    ended = celery5("-A", "shop", "dashboard", "start", *words, cwd=desk.folder)
    assert ended.code != 0
    assert problem in ended.err
    assert ended.err.count("\n") == 1


def test_a_secret_of_sessions_that_is_too_short_is_refused_in_one_line(desk: Desk) -> None:
    env = {"CELERY5_DASHBOARD_SECRET": "x" * 31}
    ended = celery5("-A", "shop", "dashboard", "start", "--port", "0", cwd=desk.folder, env=env)
    assert ended.code != 0
    assert "CELERY5_DASHBOARD_SECRET) has 31 bytes and needs at least 32" in ended.error


def test_a_token_is_printed_once_and_its_hash_is_kept(desk: Desk) -> None:
    ended = celery5("dashboard", "token", "anna", "--role", "operator", "--add-to", "tokens", cwd=desk.folder)
    file: Path = desk.folder / "tokens"
    assert ended.code == 0
    token = ended.out.strip()
    assert token not in file.read_text()
    assert file.stat().st_mode & 0o077 == 0
    (user,) = read_tokens(file.read_text(), "x").values()
    assert user == (("anna", "operator"), None)
    more = ("dashboard", "token", "bob", "--expires-in", "0.5", "--add-to", "tokens")
    assert celery5(*more, cwd=desk.folder).code == 0
    _, grant = read_tokens(file.read_text(), "x").values()
    assert grant.expires is not None
    assert abs(grant.expires - time.time() - 43_200) < 600
    nowhere = celery5("dashboard", "token", "eve", "--add-to", "missing/tokens", cwd=desk.folder)
    assert (
        nowhere.error == "Error: missing/tokens: the token cannot be added there: No such file or directory"
    )
    file.chmod(0o666)
    assert "others may write it" in celery5(*more, cwd=desk.folder).error
    wrong = celery5("dashboard", "token", "anna lee", cwd=desk.folder)
    assert wrong.code != 0
    assert "write NAME ROLE HASH" in wrong.err
