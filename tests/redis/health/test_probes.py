"""Probes: what real worker processes answer on their status ports, and what `celery5 health` makes of it."""

import json
import re
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from celery5.broker.servers.embedded import EmbeddedServer
from celery5.cli.standalone.health import ProbeResponse, send_probe
from tests.redis.commands.staff import Employee, Staff, wait_until
from tests.story.cli.commands import celery5
from tests.trio.health.test_status_port import free_port, neighbours

LINE = re.compile(r'([a-z_0-9]+)(\{(?:[a-z_]+="(?:[^"\\\n]|\\.)*",?)+\})? ([+-]Inf|NaN|[0-9.e+-]+)')


def probe(port: int, path: str = "/readyz") -> ProbeResponse:
    """What is answered there."""
    return send_probe("127.0.0.1", port, path, timeout=30)


def cluster_numbers(port: int) -> dict[str, float]:
    """The metrics of the whole cluster."""
    return numbers(port, "/metrics/cluster")


def numbers(port: int, path: str = "/metrics") -> dict[str, float]:
    """All metrics, by name and labels. Every line must be one that Prometheus reads."""
    found: dict[str, float] = {}
    for line in probe(port, path).body.decode().splitlines():
        if not line.startswith(("# HELP ", "# TYPE ")):
            match = LINE.fullmatch(line)
            assert match, line
            name = match[1] + (match[2] or "")
            assert name not in found, f"{name} twice"
            found[name] = float(match[3])
    return found


def start(staff: Staff, *flags: str, **settings: Any) -> tuple[Employee, int]:
    """A worker with a status port, and the port."""
    port = free_port()
    worker = staff.start(*flags, status_port=port, **settings)
    return worker, port


def health(tmp_path: Path, *words: object, **env: str) -> tuple[int, Any]:
    """The exit code of `celery5 health --json`, and what it says."""
    ended = celery5("health", *words, "--json", cwd=tmp_path, env=env)
    assert ended.err == ""
    return ended.code, json.loads(ended.out)


def test_a_worker_lives_without_redis_and_is_ready_only_with_it(
    own_staff: Staff, own_server: EmbeddedServer
) -> None:
    _, port = start(own_staff, lease=2)
    assert (probe(port, "/livez").ok, probe(port).ok) == (True, True)
    own_server.kill()
    wait_until(lambda: probe(port).status == 503)
    wrong = {name: why for name, why in json.loads(probe(port).body)["conditions"].items() if why}
    assert wrong
    for _ in range(30):  # also when the lease has run out, and another incarnation tries to begin
        assert probe(port, "/livez").ok
        assert probe(port).status == 503
        assert probe(port, "/metrics").ok
        time.sleep(0.1)
    own_server.revive()
    wait_until(lambda: probe(port).ok)
    assert numbers(port)["celery5_process_ready"] == 1


def test_metrics_count_jobs_by_task_and_state_and_how_long_they_took(staff: Staff) -> None:
    worker, port = start(staff, concurrency=7)
    app = staff.app
    for n in range(20):
        app.tasks["quiet"].delay(n)
    app.tasks["nap"].delay(0.2)
    app.tasks["fail"].options(max_retries=0).delay()
    wait_until(lambda: len(worker.lines("job")) == 22)
    found = numbers(port)
    assert found['celery5_jobs_total{queue="default",task="quiet",state="SUCCESS"}'] == 20
    assert found['celery5_jobs_total{queue="default",task="fail",state="DEAD"}'] == 1
    assert found['celery5_job_run_seconds_bucket{queue="default",task="nap",le="0.125"}'] == 0
    assert found['celery5_job_run_seconds_bucket{queue="default",task="nap",le="+Inf"}'] == 1
    assert 0.2 <= found['celery5_job_run_seconds_sum{queue="default",task="nap"}'] < 30
    assert found['celery5_job_run_seconds_count{queue="default",task="quiet"}'] == 20
    assert found['celery5_slots{kind="trio"}'] == 7
    assert found['celery5_slots_used{kind="trio"}'] == 0
    assert found['celery5_slots_max{kind="trio"}'] == 7
    assert found["celery5_jobs_running"] == 0
    assert found["celery5_log_written_total"] >= 22
    assert found["celery5_log_lost_total"] == 0
    assert found["process_resident_memory_bytes"] > 1_000_000
    assert found["process_cpu_seconds_total"] > 0


def test_a_port_that_is_taken_is_told_of_in_one_line_and_the_worker_works(staff: Staff) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        worker = staff.start("--status-port", str(port))
        assert staff.app.tasks["quiet"].delay(5).get(timeout=30) == 5
        (told,) = worker.lines("status:open-failed")
        assert (told["level"], told["port"]) == ("error", port)
        assert "--status-port" in told["hint"]
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0


def test_without_a_port_nothing_listens_and_with_one_only_this_machine_is_let_in(staff: Staff) -> None:
    silent = staff.start()
    assert listening(silent.process.pid) == []
    worker, port = start(staff)
    assert listening(worker.process.pid) == [f"0100007F:{port:04X}"]


def listening(pid: int) -> list[str]:
    """The TCP addresses that a process listens on, as the kernel spells them."""
    inodes = {
        found[1]
        for path in Path(f"/proc/{pid}/fd").iterdir()
        if (found := re.fullmatch(r"socket:\[(\d+)\]", str(path.readlink())))
    }
    rows = [
        line.split()
        for table in ("tcp", "tcp6")
        if Path(f"/proc/net/{table}").exists()
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
    ]
    return [row[1] for row in rows if row[3] == "0A" and row[9] in inodes]


def test_a_worker_that_is_stopping_is_not_ready_until_its_last_job_is_done(
    staff: Staff, tmp_path: Path
) -> None:
    worker, port = start(staff)
    gate = tmp_path / "gate"
    job = staff.app.tasks["gate"].delay(str(gate))
    wait_until(lambda: len(staff.notes()) == 1)
    worker.signal(signal.SIGTERM)
    wait_until(lambda: probe(port).status == 503)
    assert probe(port, "/livez").ok
    assert json.loads(probe(port).body)["phase"] == "stopping"
    gate.touch()
    assert worker.wait() == 0
    assert job.get(timeout=30)
    assert probe(port, "/livez").status == 0


def test_stopped_worker_is_reported_as_not_alive_in_time(staff: Staff, tmp_path: Path) -> None:
    worker, port = start(staff)
    worker.signal(signal.SIGSTOP)
    ended = celery5("health", "--port", port, "--live", "--timeout", 0.3, cwd=tmp_path)
    assert ended.code == 1
    assert f"127.0.0.1:{port} is not alive: 127.0.0.1:{port} did not answer within 0.3 s\n" == ended.out
    worker.signal(signal.SIGCONT)
    assert health(tmp_path, "--port", port, "--live")[0] == 0


def test_health_says_by_its_exit_code_how_each_process_of_a_fleet_does(staff: Staff, tmp_path: Path) -> None:
    port = neighbours()
    staff.start("--processes", "2", ready=2, status_port=port)
    wait_until(lambda: probe(port).ok and probe(port + 1).ok)
    code, said = health(tmp_path, "--processes", 2, CELERY5_STATUS_PORT=str(port))
    assert (code, said["ok"]) == (0, True)
    assert len({process["worker"] for process in said["processes"]}) == 2
    ended = celery5("health", "--url", f"http://127.0.0.1:{port}", cwd=tmp_path)
    assert ended.code == 0
    assert ended.out.endswith(" is ready\n")
    code, said = health(tmp_path, "--port", port, "--processes", 3)
    assert code == 1
    assert [process["ok"] for process in said["processes"]] == [True, True, False]
    assert "refused" in said["processes"][2]["why"]


def test_health_without_a_port_asks_redis_who_lives(staff: Staff, tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(
        f"from celery5 import App\napp = App({staff.app.name!r}, broker={staff.app.settings.broker!r})\n"
    )
    code, said = health_of(tmp_path)
    assert (code, said) == (
        1,
        {
            "ok": False,
            "workers": {},
            "routers": [],
            "schedulers": [],
            "missing": [],
            "unreachable": [],
            "full": {},
        },
    )
    staff.start("--name", "one")
    code, said = health_of(tmp_path)
    assert (code, said["ok"]) == (0, True)
    assert list(said["workers"].values()) == [True]


def health_of(folder: Path) -> tuple[int, Any]:
    """The same, of the application `shop`."""
    ended = celery5("-A", "shop", "health", "--json", cwd=folder)
    return ended.code, json.loads(ended.out)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "celery5 health --port N"),
        (("--url", "https://x:1"), "give http://HOST:PORT"),
        (("--url", "http://x"), "give http://HOST:PORT"),
        (("--url", "http://x:1/livez"), "give http://HOST:PORT"),
        (("--port", "0"), "'--port'"),
        (("--port", "65535", "--processes", "2"), "65535 is the last"),
        (("--port", "1", "--timeout", "0"), "'--timeout'"),
    ],
)
def test_what_health_cannot_ask_is_told_in_one_line(
    tmp_path: Path, words: tuple[str, ...], says: str
) -> None:
    ended = celery5("health", *words, cwd=tmp_path)
    assert ended.code == 2
    assert says in ended.error


def test_the_metrics_of_the_whole_cluster_are_the_same_on_each_worker(staff: Staff) -> None:
    interval = {"metrics_interval": 0.2}
    (_, first), (_, second) = start(staff, **interval), start(staff, **interval)
    for n in range(40):
        staff.app.tasks["quiet"].delay(n)
    name = 'celery5_jobs_total{queue="default",state="SUCCESS",task="quiet"}'
    wait_until(lambda: cluster_numbers(first).get(name) == cluster_numbers(second).get(name) == 40)
    found = cluster_numbers(second)
    assert found['celery5_job_wait_seconds_count{queue="default",task="quiet"}'] == 40
    assert found["celery5_process_ready"] == 2
    # Both workers measure the queue for their own /metrics, and the one that rolls up does for the cluster.
    wait_until(lambda: 'celery5_queue_dead{queue="default"}' in numbers(first))
    wait_until(lambda: 'celery5_queue_dead{queue="default"}' in cluster_numbers(first))
    assert not [name for name in found if "pid=" in name or "worker=" in name]


def test_the_metrics_of_the_cluster_are_not_there_without_redis(
    own_staff: Staff, own_server: EmbeddedServer
) -> None:
    _, port = start(own_staff)
    wait_until(lambda: probe(port, "/metrics/cluster").ok)
    own_server.kill()
    wait_until(lambda: probe(port, "/metrics/cluster").status == 503)
    assert probe(port, "/metrics").ok
    own_server.revive()
    wait_until(lambda: probe(port, "/metrics/cluster").ok)
