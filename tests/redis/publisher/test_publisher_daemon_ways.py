"""Publisher daemon: the ways to it and from it: TLS, a client that forks, and several brokers."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import trustme

from celery5 import App
from celery5.broker.servers.embedded import EmbeddedServer
from celery5.doctor.examination import get_checks, run_checks
from celery5.errors import Misconfigured, PublisherUnavailable
from tests.redis.commands.staff import wait_until
from tests.redis.publisher.publishing import LONG, Daemon, numbers, publishing

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def daemon(url: str, app_name: str, short_path: Path) -> Iterator[Daemon]:
    """A daemon over the shared server."""
    with publishing(app_name, url, short_path) as one:
        yield one


def free_port() -> int:
    """One that nobody has just now."""
    with socket.create_server(("127.0.0.1", 0)) as one:
        return int(one.getsockname()[1])


def test_jobs_go_by_tls_for_clients_with_a_certificate(daemon: Daemon) -> None:
    authority, folder, port = trustme.CA(), daemon.folder, free_port()
    authority.cert_pem.write_to_path(folder / "ca.pem")
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(folder / "server.pem")
    authority.issue_cert("client").private_key_and_cert_chain_pem.write_to_path(folder / "client.pem")
    own = ("--certificate", f"{folder}/server.pem", "--client-ca", f"{folder}/ca.pem")
    daemon.start("--tcp", f"127.0.0.1:{port}", *own)
    where = f"tls://127.0.0.1:{port}?ca={folder}/ca.pem"
    app = daemon.app(publisher=f"{where}&certificate={folder}/client.pem")
    app.tasks["number"].delay(1)
    stranger = daemon.app(publisher=where)
    with pytest.raises(PublisherUnavailable):
        stranger.tasks["number"].delay(2)
    wait_until(lambda: numbers(app) == [1], within=LONG)
    stranger.close()
    app.close()


LISTENING = """
import os, socket, sys
listening = socket.socket(socket.AF_UNIX)
listening.bind(sys.argv[1])
os.chown(sys.argv[1], 12345, 12345)
os.setuid(12345)
listening.listen()
print("ready", flush=True)
for _ in range(100):
    connection, _ = listening.accept()
    received = b""
    while part := connection.recv(65536):
        received += part
    print(len(received), flush=True)
"""
"""A program of another user that opens the socket of a Publisher, and says how many bytes each client has sent."""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("has_file_alone", [False, True], ids=["by the kernel", "by the file"])
def test_no_job_goes_to_a_socket_that_another_user_listens_on(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, has_file_alone: bool
) -> None:
    if has_file_alone:  # a platform without SO_PEERCRED
        monkeypatch.delattr(socket, "SO_PEERCRED", raising=False)
    app = daemon.app()
    with subprocess.Popen(
        [sys.executable, "-c", LISTENING, str(daemon.socket)], stdout=subprocess.PIPE, text=True
    ) as stranger:
        try:
            assert stranger.stdout is not None
            assert stranger.stdout.readline() == "ready\n"
            with pytest.raises(Misconfigured, match="user 12345 listens there, who is neither this user"):
                app.tasks["number"].delay(1)
            assert stranger.stdout.readline() == "0\n"
            (finding,) = run_checks([check for check in get_checks(app) if check.name == "publisher"])
            assert (finding.state, "user 12345 listens there" in finding.summary) == ("fail", True)
        finally:
            stranger.kill()
    daemon.socket.unlink()
    daemon.start()
    app.tasks["number"].delay(2)
    wait_until(lambda: numbers(app) == [2], within=LONG)
    app.close()


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (("--tcp", "0.0.0.0:7070"), "what comes from other hosts speaks TLS"),
        (("--tcp", "7070"), "is not HOST:PORT"),
        (("--tcp", "127.0.0.1:0", "--certificate", "/nowhere.pem"), "TLS files cannot be used"),
        (("--client-ca", "/nowhere.pem"), "give a publisher_certificate"),
        (("--socket", "p.sock"), "an absolute path"),
        (("--backlog", "sqlit"), "give sqlite, memory, a folder"),
        (("--backlog", "/dev/null/x"), "no backlog at"),
        (("--connections", "4..1"), "give 1, or 1..4"),
    ],
)
def test_what_makes_no_publisher_is_said_in_one_line(
    daemon: Daemon, flags: tuple[str, ...], why: str
) -> None:
    daemon.launch(*flags)
    assert daemon.process is not None
    assert daemon.process.wait(LONG) == 2
    said = daemon.output.read_text()
    assert why in said
    assert "Traceback" not in said
    assert len([line for line in said.splitlines() if line.startswith("Error: ")]) == 1


def test_a_forked_child_has_a_connection_of_its_own(daemon: Daemon) -> None:
    daemon.start()
    app = daemon.app()
    task: Any = app.tasks["number"]
    task.delay(0)
    child = os.fork()
    if child == 0:
        try:
            task.delay(1)
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    task.delay(2)
    wait_until(lambda: numbers(app) == [0, 1, 2], within=LONG)
    app.close()


def test_each_broker_has_a_publisher_and_one_that_is_away_holds_up_no_other(
    daemon: Daemon, own_server: EmbeddedServer, app_name: str
) -> None:
    several: dict[str, Any] = {"brokers": {"mails": own_server.url}, "routes": {"post": "mails"}}
    own_server.kill()
    daemon.start(**{name: json.dumps(said) for name, said in several.items()})
    app = daemon.app(**several)
    task: Any = app.tasks["number"]
    app.send_many([task.options(queue="post" if n % 2 else "near").s(n) for n in range(10)])
    wait_until(lambda: numbers(app, "near") == [0, 2, 4, 6, 8], within=LONG)
    daemon.kill()
    own_server.revive()
    daemon.start(**{name: json.dumps(said) for name, said in several.items()})
    far_end = App(app_name, broker=own_server.url)
    wait_until(lambda: numbers(far_end, "post") == [1, 3, 5, 7, 9], within=LONG)
    with redis.Redis.from_url(daemon.url) as client:
        assert not client.exists(app.queue("post").stream)
    far_end.close()
    app.close()
