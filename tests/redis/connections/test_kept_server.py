"""Kept server: a server of one's own starts, keeps its data, is never two, and is nobody else's."""

import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from celery5.broker.servers import kept_server
from celery5.broker.servers.embedded import find_binary
from celery5.broker.servers.kept_server import KeptServer, ServerState
from celery5.errors import BrokerUnavailable, Misconfigured, ServerNotFound
from celery5.protocol.cluster.own_broker import OwnBroker
from tests.redis.commands.staff import is_alive

Keep = Callable[..., KeptServer]


@pytest.fixture
def keep(short_path: Path, server_binary: str | None) -> Iterator[Keep]:
    """Makes the keeper of a server; all of them are ended."""
    made: list[KeptServer] = []

    def one(**said: Any) -> KeptServer:
        told = {"server": server_binary or "auto", "folder": str(short_path / "data"), **said}
        made.append(KeptServer(OwnBroker(**told)))
        return made[-1]

    yield one
    for server in made:
        server.stop()


def forsake(server: KeptServer) -> int:
    """What is left when whoever keeps it dies: the server, without its keeper's locks. Gives its process."""
    for descriptor in (server._server_lock, server._lock):
        if descriptor >= 0:
            os.close(descriptor)
    pid, server._server_lock, server._lock = server.pid, -1, -1
    if server._child is not None:
        server._child.returncode = 0  # it is to be no child of ours
    server.pid, server._child = 0, None
    return pid


def client(server: KeptServer) -> "redis.Redis":
    """A connection to it."""
    return redis.Redis.from_url(server.url)


def test_what_was_written_is_there_again_and_nobody_else_can_look(keep: Keep) -> None:
    server = keep()
    assert server.start() is False
    with client(server) as line:
        line.set("a", "b")
        assert line.config_get("appendfsync") == {"appendfsync": "everysec"}
    server.kill()
    assert not server.is_running
    server.start()
    with client(server) as line:
        assert line.get("a") == b"b"
    assert stat.S_IMODE(server.folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(server.socket.stat().st_mode) == 0o700
    assert (server.folder / "url").read_text().strip() == server.url
    pid = server.pid
    server.stop()
    server.stop()
    assert not is_alive(pid)


def test_left_server_is_reused_unless_another_is_wanted(keep: Keep) -> None:
    server = keep()
    server.start()
    with client(server) as line:
        line.set("a", "b")
    pid = forsake(server)
    second = keep()
    assert second.start() is True
    assert second.pid == pid
    forsake(second)
    third = keep(fsync="always")
    assert third.start() is False
    assert third.pid != pid
    assert not is_alive(pid)
    with client(third) as line:
        assert (line.get("a"), line.config_get("appendfsync")) == (b"b", {"appendfsync": "always"})


def test_one_that_was_left_frozen_is_killed_before_another_begins(
    keep: Keep, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_server, "ANSWER_LIMIT", 0.3)
    server = keep()
    server.start()
    pid = forsake(server)
    os.kill(pid, signal.SIGSTOP)
    monkeypatch.setattr(kept_server, "STOP_LIMIT", 0.5)
    second = keep()
    assert second.start() is False
    assert not is_alive(pid)


def test_it_has_one_keeper(keep: Keep) -> None:
    server = keep()
    server.start()
    with pytest.raises(Misconfigured, match=rf"another Controller \(process {os.getpid()}\) runs the broker"):
        keep()
    server.stop()
    keep().start()


def test_a_port_has_a_password(keep: Keep) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = keep(port=port)
    server.start()
    with client(server) as line:
        assert line.ping()
    with redis.Redis(port=port) as line, pytest.raises(redis.AuthenticationError):
        line.ping()
    for name in ("url", "password", "redis.conf"):
        assert stat.S_IMODE((server.folder / name).stat().st_mode) == 0o600
    command = subprocess.run(
        ["ps", "-o", "args=", "-p", str(server.pid)], capture_output=True, text=True, check=False
    )
    assert (server.folder / "password").read_text() not in command.stdout
    forsake(server)
    assert keep(port=port).start() is True


def test_broker_keeps_jobs_is_no_unit_of_systemd_and_ends_in_order(
    keep: Keep, server_binary: str | None, short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", "/run/systemd/notify")
    monkeypatch.setattr(kept_server, "MAX_LOG_BYTES", 10)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program, surroundings = short_path / "program", short_path / "surroundings"
    binary = find_binary(server_binary)
    program.write_text(f'#!/bin/sh\nenv > {surroundings}\nexec {binary} "$@"\n')
    program.chmod(0o755)
    server = keep(port=port, server=str(program))
    server.start()
    with client(server) as line:
        assert line.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
        assert line.config_get("bind") == {"bind": "127.0.0.1"}
    assert "NOTIFY_SOCKET" not in surroundings.read_text()
    assert os.getsid(server.pid) == server.pid, "Ctrl-C is for the Controller, which ends it last"
    server.stop()
    log = server.folder / "server.log"
    assert "SIGTERM" in log.read_text()
    keep(port=port).start()
    assert "SIGTERM" not in log.read_text()
    assert "SIGTERM" in (server.folder / "server.log.1").read_text()


def test_one_that_still_reads_its_data_is_waited_for(keep: Keep, monkeypatch: pytest.MonkeyPatch) -> None:
    server = keep()
    server.start()
    loading, serving = ServerState(server.pid, False), ServerState(server.pid, True)
    states = [loading, None, loading, serving]
    monkeypatch.setattr(server, "_inspect", lambda: states.pop(0))
    server._wait_until_ready(lambda: False)
    assert states == []
    monkeypatch.undo()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to another user")
def test_another_users_folder_is_let_alone(keep: Keep, short_path: Path) -> None:
    theirs = short_path / "theirs"
    theirs.mkdir(mode=0o755)
    os.chown(theirs, 12345, 12345)
    with pytest.raises(Misconfigured, match="is another user's"):
        keep(folder=str(theirs))
    assert list(theirs.iterdir()) == []


def test_a_port_that_is_taken_is_told_of(keep: Keep) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        server = keep(port=taken.getsockname()[1])
        with pytest.raises(BrokerUnavailable, match="ended: "):
            server.start()
        server.stop()


def test_another_ones_server_is_let_alone(keep: Keep, short_path: Path) -> None:
    other = keep()
    other.start()
    server = keep(folder=str(short_path / "second"), socket=str(other.socket))
    with pytest.raises(Misconfigured, match=r"a server answers at .* that is not the one of"):
        server.start()
    server.stop()
    assert other.is_responding()


def test_a_folder_with_other_things_in_it_is_let_alone(keep: Keep, short_path: Path) -> None:
    theirs = short_path / "theirs"
    theirs.mkdir(mode=0o755)
    (theirs / "redis.conf").write_text("mine")
    with pytest.raises(
        Misconfigured, match=r"has other things in it \(redis.conf\): name a new or an empty one"
    ):
        keep(folder=str(theirs))
    assert (theirs / "redis.conf").read_text() == "mine"
    assert stat.S_IMODE(theirs.stat().st_mode) == 0o755


def test_data_of_a_backup_is_gone_on_with(keep: Keep, short_path: Path) -> None:
    server = keep()
    server.start()
    with client(server) as line:
        line.set("a", "b")
    server.stop()
    other = short_path / "other"
    other.mkdir()
    for path in server.folder.glob("appendonly*"):
        path.rename(other / path.name)
    second = keep(folder=str(other))
    second.start()
    with client(second) as line:
        assert line.get("a") == b"b"


def test_a_number_that_was_written_down_for_a_former_server_ends_nobody(keep: Keep) -> None:
    server = keep()
    server.start()
    pid = forsake(server)
    with subprocess.Popen(["sleep", "1000"]) as bystander:
        (server.folder / "server.lock").write_text(f"{bystander.pid:<20}\n")
        second = keep()
        assert second.start() is True
        assert second.pid == pid
        second.stop()
        assert bystander.poll() is None
        bystander.kill()
    assert not is_alive(pid)


def test_server_started_by_hand_on_the_data_stays_the_only_one(
    keep: Keep,
) -> None:
    server = keep()
    server.start()
    server.stop()
    file = str(server.folder / "redis.conf")
    with subprocess.Popen([str(server.binary), file], stdout=subprocess.DEVNULL) as by_hand:
        second = keep()
        while not second.is_responding():
            assert by_hand.poll() is None
        with pytest.raises(Misconfigured, match=rf"runs already \(process {by_hand.pid}\), which no"):
            second.start()
        second.stop()
        assert by_hand.poll() is None
        by_hand.kill()


def test_the_socket_of_another_one_who_says_nothing_is_let_alone(keep: Keep, short_path: Path) -> None:
    path = short_path / "theirs.sock"
    code = f"""
import socket
with socket.socket(socket.AF_UNIX) as line:
    line.bind({str(path)!r})
    line.listen()
    print(flush=True)
    while True:
        line.accept()[0].close()
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        there = path.stat().st_ino
        server = keep(socket=str(path))
        with pytest.raises(Misconfigured, match="is not the one of"):
            server.start()
        assert path.stat().st_ino == there
        other.kill()


def test_what_the_system_refuses_is_told_in_one_line(keep: Keep, short_path: Path) -> None:
    program = short_path / "program"
    program.write_bytes(b"\0")
    program.chmod(0o755)
    with pytest.raises(BrokerUnavailable, match=r"cannot be started: .*Exec format error"):
        keep(server=str(program)).start()
    server = keep(folder=str(short_path / "second"))
    (server.folder / "redis.conf.new").mkdir()
    with pytest.raises(BrokerUnavailable, match=r"cannot be started: .*Is a directory"):
        server.start()
    (server.folder / "password").mkdir()
    server.stop()
    with pytest.raises(Misconfigured, match="its password cannot be kept"):
        keep(folder=str(server.folder), port=1)


def test_what_cannot_be_is_told_in_one_line(keep: Keep, short_path: Path) -> None:
    (short_path / "file").write_text("mine")
    for said, wrong in (
        ({"socket": str(short_path / ("long" * 30))}, "is too long for a socket"),
        ({"socket": str(short_path / "file")}, "is there, and is no socket"),
        ({"socket": str(short_path / "no" / "redis.sock")}, "there is no folder"),
        ({"folder": str(short_path / "file" / "data")}, "cannot be used"),
    ):
        with pytest.raises(Misconfigured, match=wrong):
            keep(**said)
    with pytest.raises(ServerNotFound):
        keep(server="/nowhere/redis-server")
    assert (short_path / "file").read_text() == "mine"


def test_who_has_given_up_does_not_wait(keep: Keep, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_server, "ANSWER_LIMIT", 0.3)
    server = keep()
    server.start()
    os.kill(server.pid, signal.SIGSTOP)
    try:
        with pytest.raises(BrokerUnavailable, match="does not answer yet"):
            server._wait_until_ready(lambda: True)
    finally:
        os.kill(server.pid, signal.SIGCONT)
