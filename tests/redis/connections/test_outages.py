"""Outages: Redis is frozen, killed, emptied or cuts its clients off while jobs run; the workers go on by themselves."""

import json
import os
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import redis

from celery5 import AsyncResult, gather
from celery5.broker.servers.embedded import EmbeddedServer
from celery5.errors import BrokerReplied
from tests.redis.commands.staff import _TARGET, Employee, Staff, wait_until

BACK = 30.0
"""Seconds after its return within which workers consume again, on a machine that may stand still. It is 2 s on one that
does not, by the pauses of their connections: faults/test_outage.py."""


REFUSES = "min-replicas-to-write"
"""The setting by which a server refuses every write. One whose memory is full refuses some."""


def send(staff: Staff, task: str, *args: object, count: int = 1) -> list[AsyncResult[int]]:
    """Send jobs."""
    return staff.app.send_many([staff.app.signature(task, *args) for _ in range(count)])


def assert_back_in_time(staff: Staff, since: float | None = None) -> None:
    """A job that is sent now ends soon: soon after Redis came back, when that is known."""
    began = time.monotonic() if since is None else since
    send(staff, "nap", 0.0)[0].get(timeout=30)
    assert time.monotonic() - began < BACK


def assert_none_doubled(staff: Staff, sent: list[AsyncResult[int]]) -> None:
    """Each job ran once: its worker lived all the time."""
    runs = Counter(note.job for note in staff.notes("begin"))
    assert {job.id: runs[job.id] for job in sent} == {job.id: 1 for job in sent}


def test_workers_go_on_after_their_connections_were_killed(
    own_staff: Staff, own_server: EmbeddedServer
) -> None:
    for _ in range(2):
        own_staff.start(lease=1.0, concurrency=4)
    sent = send(own_staff, "nap", 0.01, count=300)
    with redis.Redis.from_url(own_server.url) as client:
        for _ in range(5):
            ended = len(own_staff.notes("end"))
            wait_until(lambda ended=ended: len(own_staff.notes("end")) > ended + 10)  # type: ignore[misc]
            client.client_kill_filter(_type="normal", skipme=True)
    own_staff.app.close()
    gather(sent, timeout=30)
    assert_none_doubled(own_staff, sent)
    assert_back_in_time(own_staff)


def test_workers_go_on_after_the_server_was_frozen(own_staff: Staff, own_server: EmbeddedServer) -> None:
    workers = [own_staff.start(lease=1.0, concurrency=4) for _ in range(2)]
    sent = send(own_staff, "nap", 0.01, count=200)
    wait_until(lambda: len(own_staff.notes("end")) > 20)
    os.kill(own_server.pid, signal.SIGSTOP)
    time.sleep(1.5)  # longer than all leases
    os.kill(own_server.pid, signal.SIGCONT)
    assert_back_in_time(own_staff)
    gather(sent, timeout=30)
    assert_none_doubled(own_staff, sent)
    assert [worker.lines("worker:restarted") for worker in workers] == [[], []]


def test_outcomes_are_kept_while_the_server_is_away_and_settled_when_it_is_back(
    own_staff: Staff, own_server: EmbeddedServer
) -> None:
    worker = own_staff.start(lease=0.6, concurrency=4)
    sent = send(own_staff, "nap", 0.3, count=4)
    wait_until(lambda: len(own_staff.notes("begin")) == 4)
    with redis.Redis.from_url(own_server.url) as client:
        client.waitaof(1, 0, 1000) if client.info("server")["redis_version"] >= "7.2" else time.sleep(1.1)
    own_server.kill()
    wait_until(lambda: len(own_staff.notes("end")) == 4)
    time.sleep(0.6)  # the lease lapses meanwhile
    own_server.revive()
    own_staff.app.close()
    gather(sent, timeout=BACK, return_exceptions=False)
    assert_back_in_time(own_staff)
    assert_none_doubled(own_staff, sent)
    assert worker.lines("worker:restarted") == []


@pytest.mark.parametrize("how", ["flushed", "restarted"])
def test_a_worker_begins_again_when_the_server_has_lost_its_data(
    own_staff: Staff, own_server: EmbeddedServer, how: str
) -> None:
    worker = own_staff.start(lease=1.0)
    send(own_staff, "nap", 0.0)[0].get()
    if how == "flushed":
        with redis.Redis.from_url(own_server.url) as client:
            client.flushall()
    else:
        own_server.kill()
        for file in own_server.folder.rglob("*.aof*"):
            if file.is_file():
                file.unlink()
        for file in own_server.folder.rglob("appendonlydir/*"):
            file.unlink()
        own_server.revive()
    back = time.monotonic()
    own_staff.app.close()
    assert_back_in_time(own_staff, back)
    wait_until(lambda: len(worker.lines("worker:restarted")) >= 1)
    assert_back_in_time(own_staff)


def test_a_worker_without_a_lease_begins_again_only_when_the_server_takes_writes(
    own_staff: Staff, own_server: EmbeddedServer
) -> None:
    worker = own_staff.start(lease=0.6)
    with redis.Redis.from_url(own_server.url) as client:
        client.config_set(REFUSES, "1")
        wait_until(lambda: bool(worker.lines("broker:refused")))
        client.config_set(REFUSES, "0")
        client.zremrangebyrank(own_staff.app.queue("default").leases, 0, -1)  # it counts as dead
        wait_until(lambda: bool(worker.lines("worker:restarted")))
        with client.pipeline() as both:
            both.zremrangebyrank(own_staff.app.queue("default").leases, 0, -1)
            both.config_set(REFUSES, "1")
            both.execute()
        before = int(client.info("stats")["total_connections_received"])
        refused = []
        try:
            wait_until(lambda: any("NOREPLICAS" in line["why"] for line in worker.lines("worker:restarted")))
            time.sleep(4.0)  # it would begin a dozen times
            refused = worker.lines("worker:restarted")
            assert int(client.info("stats")["total_connections_received"]) - before < 25
        finally:
            client.config_set(REFUSES, "0")
    assert len([line for line in refused if "NOREPLICAS" in line["why"]]) <= 2
    back = time.monotonic()
    assert send(own_staff, "nap", 0.0)[0].get(timeout=30) == worker.process.pid
    assert time.monotonic() - back < BACK


def test_a_worker_waits_while_the_server_refuses_to_write(
    own_staff: Staff, own_server: EmbeddedServer
) -> None:
    workers = [own_staff.start(lease=0.6) for _ in range(2)]
    sent = send(own_staff, "nap", 0.3)
    wait_until(lambda: len(own_staff.notes("begin")) == 1)
    with redis.Redis.from_url(own_server.url) as client:
        client.config_set(REFUSES, "1")
        try:
            wait_until(lambda: all(worker.lines("broker:refused") for worker in workers))
            time.sleep(0.6)
        finally:
            client.config_set(REFUSES, "0")
    back = time.monotonic()
    gather(sent, timeout=BACK, return_exceptions=False)
    assert_back_in_time(own_staff, back)
    assert_none_doubled(own_staff, sent)
    assert [worker.process.poll() for worker in workers] == [None, None]


def test_a_worker_keeps_its_lease_and_ends_its_jobs_while_memory_is_full(
    own_staff: Staff, own_server: EmbeddedServer
) -> None:
    workers = [own_staff.start(lease=0.6) for _ in range(2)]
    sent = send(own_staff, "nap", 0.05, count=60)
    with redis.Redis.from_url(own_server.url) as client:
        client.config_set("maxmemory", "1")
        try:
            gather(sent, timeout=BACK, return_exceptions=False)
            time.sleep(1.2)  # two leases
            with pytest.raises(BrokerReplied, match="memory is full"):
                send(own_staff, "nap", 0.0)
        finally:
            client.config_set("maxmemory", "0")
    assert_none_doubled(own_staff, sent)
    assert_back_in_time(own_staff)
    for worker in workers:
        assert worker.process.poll() is None
        assert worker.lines("heartbeat:missed") == worker.lines("worker:restarted") == []


def list_shown(process: Employee, *, since: str) -> list[dict[str, Any]]:
    """Return the log above debug from the first event of this name until the stop, without the lines of jobs."""
    written = [json.loads(line) for line in process.output.read_text().splitlines() if line[:1] == "{"]
    kinds = [str(line.get("message_type")) for line in written]
    first, last = kinds.index(f"celery5:{since}"), kinds.index("celery5:process:stop-requested")
    shown = [line for line in written[first:last] if line.get("level") != "debug"]
    return [line for line in shown if line["message_type"] != "celery5:job"]


def start(staff: Staff, kind: str, folder: Path) -> Employee:
    """Start a process of this kind, and wait until it is ready."""
    command = [sys.executable, "-m", "celery5", *_TARGET, kind, "start"]
    command += ["--socket", str(folder / "socket"), "--backlog", "memory"] if kind == "publisher" else []
    process = staff.launch(command, log_level="debug", lease=6.0)
    wait_until(lambda: bool(process.lines(f"{kind}:started")))
    return process


@pytest.mark.parametrize("kind", ["worker", "router", "scheduler", "publisher"])
def test_outage_is_two_lines_above_debug_in_each_process(
    own_staff: Staff, own_server: EmbeddedServer, kind: str, short_path: Path
) -> None:
    process = start(own_staff, kind, short_path)
    if kind == "worker":  # with a job that ends meanwhile
        send(own_staff, "nap", 3.0)
        wait_until(lambda: bool(own_staff.notes("begin")))
    own_server.kill()
    wait_until(lambda: len(process.lines("redis:breaker-opened")) >= 2)
    if kind == "worker":
        wait_until(lambda: bool(process.lines("heartbeat:missed")))
        wait_until(lambda: bool(process.lines("results:interrupted")))
        wait_until(lambda: bool(process.lines("history:write-failed")))
    own_server.revive()
    # The sidecar of a worker has the same outage, at level debug: its end may come first.
    wait_until(lambda: any(line["level"] == "info" for line in process.lines("broker:reconnected")))
    process.signal(signal.SIGTERM)
    assert process.wait() == 0
    shown = list_shown(process, since="broker:disconnected")
    assert [line["message_type"] for line in shown] == [
        "celery5:broker:disconnected",
        "celery5:broker:reconnected",
    ]
    assert [line["level"] for line in shown] == ["warning", "info"]
    assert shown[1]["connections"] == len(process.lines("redis:disconnected")) >= 2


def refuse_logins(admin: Any) -> None:
    """Have the server want a password that no process has, and close all connections."""
    admin.config_set("requirepass", "changed")
    for kind in ("normal", "pubsub"):
        admin.execute_command("CLIENT", "KILL", "TYPE", kind, "SKIPME", "yes")


@pytest.mark.parametrize("kind", ["worker", "router", "scheduler", "publisher"])
def test_refused_login_is_one_error_and_its_end_in_each_process(
    own_staff: Staff, own_server: EmbeddedServer, kind: str, short_path: Path
) -> None:
    process = start(own_staff, kind, short_path)

    def list_own(name: str) -> list[dict[str, Any]]:
        return [line for line in process.lines(name) if line.get("process") != "sidecar"]

    with redis.Redis.from_url(own_server.url) as admin:
        for times in (1, 2):  # the second time is an error for the breaker of each connection
            refuse_logins(admin)
            wait_until(lambda times=times: len(list_own("broker:refused")) == times)  # type: ignore[misc]
            failed, opened = len(process.lines("redis:connect-failed")), 2 * times
            wait_until(lambda opened=opened: len(process.lines("redis:breaker-opened")) >= opened)  # type: ignore[misc]
            wait_until(lambda failed=failed: len(process.lines("redis:connect-failed")) >= failed + 12)  # type: ignore[misc]
            admin.config_set("requirepass", "")
            wait_until(lambda times=times: len(list_own("broker:reconnected")) == times)  # type: ignore[misc]
    process.signal(signal.SIGTERM)
    assert process.wait() == 0
    lines = list_shown(process, since="broker:disconnected")
    shown = [line for line in lines if line.get("process") != "sidecar"]
    of_sidecar = [line["message_type"] for line in lines if line not in shown]
    assert of_sidecar in ([], ["celery5:lease:renewal-failed"], ["celery5:lease:renewal-failed"] * 2)
    assert [(line["message_type"], line["level"]) for line in shown] == [
        ("celery5:broker:disconnected", "warning"),
        ("celery5:broker:refused", "error"),
        ("celery5:broker:reconnected", "info"),
    ] * 2
    assert "wants a password; put user and password into the broker URL" in shown[1]["why"]
    assert "celery5 docs trust" in shown[1]["hint"]


@pytest.mark.parametrize("kind", ["worker", "scheduler"])
def test_full_server_is_two_lines_above_debug_in_each_process(
    own_staff: Staff, own_server: EmbeddedServer, kind: str
) -> None:
    command = [sys.executable, "-m", "celery5", *_TARGET, kind, "start"]
    process = own_staff.launch(command, log_level="debug", metrics_interval=0.2)
    wait_until(lambda: bool(process.lines(f"{kind}:started")))
    with redis.Redis.from_url(own_server.url) as client:
        client.config_set("maxmemory", 1)
        wait_until(lambda: bool(process.lines("metrics:report-failed")))
        wait_until(lambda: bool(process.lines("metrics:rollup-interrupted")) or kind == "scheduler")
        client.config_set("maxmemory", 0)
        wait_until(lambda: bool(process.lines("broker:writable")))
    process.signal(signal.SIGTERM)
    assert process.wait() == 0
    shown = list_shown(process, since="broker:full")
    assert [(line["message_type"], line["level"]) for line in shown] == [
        ("celery5:broker:full", "error"),
        ("celery5:broker:writable", "info"),
    ]
    assert shown[0]["why"].startswith("Redis is full: ")
    assert 0 <= shown[1]["after"] < 60


TROUBLES: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "replicas": ("error", ("CONFIG", "SET", REFUSES, "1"), ("CONFIG", "SET", REFUSES, "0")),
    "read-only": ("warning", ("REPLICAOF", "127.0.0.1", "1"), ("REPLICAOF", "NO", "ONE")),
}


@pytest.mark.parametrize("kind", ["worker", "router", "scheduler"])
@pytest.mark.parametrize("trouble", sorted(TROUBLES))
def test_refused_calls_are_one_line_and_its_end_in_each_process(
    own_staff: Staff, own_server: EmbeddedServer, kind: str, trouble: str
) -> None:
    level, begin, end = TROUBLES[trouble]
    command = [sys.executable, "-m", "celery5", *_TARGET, kind, "start"]
    process = own_staff.launch(command, log_level="debug", metrics_interval=0.2, lease=6.0)
    wait_until(lambda: bool(process.lines(f"{kind}:started")))
    if kind == "worker":  # with a job that ends meanwhile
        send(own_staff, "nap", 1.0)
        wait_until(lambda: bool(own_staff.notes("begin")))
    with redis.Redis.from_url(own_server.url) as client:
        admin: Any = client
        admin.execute_command(*begin)
        failed = "presence:renew-failed" if kind == "scheduler" else "heartbeat:missed"
        wait_until(lambda: bool(process.lines(failed)))
        wait_until(lambda: bool(process.lines("metrics:report-failed")))
        wait_until(lambda: bool(process.lines("metrics:rollup-interrupted")))
        if kind == "worker":
            wait_until(lambda: bool(process.lines("consumer:interrupted")))
        admin.execute_command(*end)
        wait_until(lambda: bool(process.lines("broker:accepted")))
    process.signal(signal.SIGTERM)
    assert process.wait() == 0
    lines = [json.loads(line) for line in process.output.read_text().splitlines() if line[:1] == "{"]
    shown = [
        (line["message_type"].removeprefix("celery5:"), line["level"])
        for line in lines
        if line.get("level", "debug") != "debug" and line.get("process") != "sidecar"
    ]
    of_broker = [
        found
        for found in shown
        if found[0].startswith(("broker:", "heartbeat:", "presence:", "metrics:", "results:", "flow:"))
    ]
    # A server that becomes a replica closes all connections first, and ends blocked reads.
    around = {"broker:disconnected", "broker:reconnected"} if trouble == "read-only" else set[str]()
    assert [found for found in of_broker if found[0] not in around] == [
        ("broker:refused", level),
        ("broker:accepted", "info"),
    ]
    assert len([found for found in of_broker if found[0] in around]) <= 2
    if trouble != "read-only":
        assert not [name for name, _ in shown if name.endswith((":interrupted", ":resumed"))]
    (refused,) = process.lines("broker:refused")
    assert "this process goes on by itself then" in refused["hint"]
