"""Sidecar: it speaks for a worker that cannot, puts back at once what a dead one held, and ends with it, always."""

import json
import os
import re
import signal
import sys
import time
from pathlib import Path

import msgspec
import pytest
import redis

from celery5 import App, AsyncResult, JobState, gather
from celery5.broker.servers.embedded import EmbeddedServer
from celery5.processes.watch.sidecar import BeatReport, Sidecar
from celery5.processes.watch.sidecar_log import SidecarLog
from celery5.services.process.shared_memory import SidecarMemory
from tests.redis.commands.staff import Employee, Staff, is_alive, wait_until
from tests.redis.worker.workers import entries, held

CELERY5 = [sys.executable, "-m", "celery5", "-A", "tests.redis.events.historian:app"]


def send(staff: Staff, task: str, *args: object) -> AsyncResult[int]:
    """Send one job."""
    return staff.app.send_many([staff.app.signature(task, *args)])[0]


def start(staff: Staff, **settings: float) -> Employee:
    """Start a worker that says which process its sidecar is."""
    said: dict[str, object] = {**settings}
    return staff.start("--log-level", "debug", ready=1, **said)


def test_jobs_that_block_the_loop_or_hold_the_lock_of_a_live_worker_run_once(staff: Staff) -> None:
    workers = [staff.start(lease=1.0) for _ in range(5)]  # one more than there are jobs
    began, sent = time.monotonic(), []
    for number, task in enumerate(("block", "hold", "hold_thread", "churn"), 1):
        sent.append(send(staff, task, 4.0))
        wait_until(lambda number=number: len(staff.notes()) == number)  # type: ignore[misc]
    pids = [job.get(timeout=30) for job in sent]
    assert time.monotonic() - began > 4.0
    assert [note.job for note in staff.notes()] == [job.id for job in sent]
    assert [note.pid for note in staff.notes()] == pids
    for worker in workers:
        assert worker.lines("recoverer:recovered") == []
        assert worker.lines("worker:restarted") == []


@pytest.mark.parametrize("threads", [0, 200])
def test_a_worker_that_hangs_for_long_is_given_up(staff: Staff, threads: int) -> None:
    script = (
        "import threading, time\n"
        "def wait():\n"  # for the lock, as soon as it is held: each a little, together more than one that works
        "    while True: time.sleep(0.2)\n"
        f"for _ in range({threads}): threading.Thread(target=wait, daemon=True).start()\n"
        "from celery5.processes import foreground\n"
        "from celery5.processes.watch import sidecar\n"
        "from tests.redis.events.historian import app\n"
        "sidecar.HUNG_AFTER = 1.0\n"
        "foreground.serve(app, foreground.ServeOptions())\n"
    )
    two = [staff.launch([sys.executable, "-c", script], lease=0.5) for _ in range(2)]
    wait_until(lambda: all(process.lines("worker:started") for process in two))
    send(staff, "hold", 120.0)
    wait_until(lambda: len(staff.notes()) == 1)
    hung, other = sorted(two, key=lambda started: started.process.pid != staff.notes()[0].pid)
    wait_until(lambda: len(staff.notes()) == 2, within=60)
    assert staff.notes()[1].pid == other.process.pid
    wait_until(lambda: len(hung.lines("worker:hung")) == 1)
    (line,) = hung.lines("worker:hung")
    assert (line["level"], line["process"], line["pid"]) == ("error", "sidecar", hung.process.pid)
    for worker in two:
        worker.signal(signal.SIGKILL)


@pytest.mark.parametrize("ending", ["SIGKILL", "two SIGTERM", "bequeath"])
def test_jobs_of_a_dead_worker_are_requeued_without_another_worker(
    staff: Staff, redis_client: "redis.Redis", tmp_path: Path, ending: str
) -> None:
    worker = start(staff, grace_period=30)  # with a lease of 10 s
    gate = send(staff, "gate", str(tmp_path / "gate"))
    wait_until(lambda: len(staff.notes()) == 1)
    assert list(held(redis_client, staff.app).values()) == [1]
    if ending == "bequeath":
        send(staff, "bequeath")  # a process that it forks keeps its end of the pipe open
    elif ending == "SIGKILL":
        worker.signal(signal.SIGKILL)
    else:
        worker.signal(signal.SIGTERM)
        wait_until(lambda: len(worker.lines("process:stop-requested")) == 1)
        worker.signal(signal.SIGTERM)
    assert worker.wait() != 0
    wait_until(lambda: held(redis_client, staff.app) == {})  # there is nobody else who could have
    assert gate.status() is JobState.SENT
    wait_until(lambda: not is_alive(worker.sidecar))
    (line,) = worker.lines("worker:died")
    assert line["worker"] == worker.lines("worker:started")[0]["worker"]
    named = ("level", "process", "pid", "dead_lettered")
    assert [line[name] for name in named] == ["warning", "sidecar", worker.process.pid, 0]
    assert line["requeued"] >= 1


def test_sidecar_notices_a_death_by_its_pipe_without_pidfd_and_proc(
    staff: Staff, redis_client: "redis.Redis", tmp_path: Path
) -> None:
    script = (
        "from celery5.processes import foreground\n"
        "from celery5.processes.watch import sidecar\n"
        "from celery5.protocol.process.liveness import ProcessSample\n"
        "from tests.redis.events.historian import app\n"
        "sidecar._open_pidfd = lambda pid: -1\n"
        "sidecar._sample_process = lambda pid: ProcessSample(sidecar.now())\n"
        "foreground.serve(app, foreground.ServeOptions())\n"
    )
    worker = staff.launch([sys.executable, "-c", script], lease=0.8)
    (sent,) = staff.app.send_many([staff.app.signature("block", 1.6)])
    wait_until(lambda: len(staff.notes()) == 1)
    other = staff.start(lease=0.8)
    assert sent.get(timeout=30) == worker.process.pid  # it counts as alive because it is there
    assert len(staff.notes()) == 1
    other.signal(signal.SIGTERM)
    other.wait()
    gate = send(staff, "gate", str(tmp_path / "gate"))
    wait_until(lambda: len(staff.notes()) == 2)
    worker.signal(signal.SIGKILL)
    worker.wait()
    wait_until(lambda: held(redis_client, staff.app) == {})  # there is nobody else who could have
    assert gate.status() is JobState.SENT


def test_a_death_counts_for_what_had_begun_and_not_for_what_was_only_held(
    staff: Staff, redis_client: "redis.Redis"
) -> None:
    worker = start(staff, concurrency=2)
    task = staff.app.tasks["act_trio"]
    gather(
        staff.app.send_many([task.s(["return"]) for _ in range(40)]), timeout=30
    )  # jobs are short, it learns
    sent = staff.app.send_many([task.s(acts) for acts in (["die"], *[["return"]] * 60)])
    worker.wait()
    wait_until(lambda: held(redis_client, staff.app) == {})
    counted = {}
    for fields in entries(redis_client, staff.app.queue("default").stream):
        counted[json.loads(fields[b"job"])["id"]] = int(fields.get(b"deliveries", b"-1"))
    assert counted.pop(sent[0].id) == 1
    was_held = [count for count in counted.values() if count >= 0]
    assert len(was_held) > 5
    assert set(was_held) == {0}


def test_no_signal_but_sigkill_hurts_it_and_it_ends_with_its_worker(staff: Staff) -> None:
    worker = start(staff, lease=0.6)
    hurtful = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGTSTP, signal.SIGUSR1}
    for signal_number in hurtful:
        os.kill(worker.sidecar, signal_number)
    assert os.getsid(worker.sidecar) != os.getsid(worker.process.pid)  # Ctrl-C in a terminal is not for it
    assert send(staff, "nap", 0.5).get(timeout=30) == worker.process.pid  # two beats later
    assert is_alive(worker.sidecar)
    assert worker.lines("sidecar:lost") == []
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0
    wait_until(lambda: not is_alive(worker.sidecar))
    assert worker.lines("worker:died") == []


def read_open_files(folder: Path) -> dict[int, str]:
    """Return what the numbers of open files lead to, without those that lead nowhere."""
    opened = {int(path.name): os.readlink(path) for path in folder.iterdir()}
    return {number: target for number, target in opened.items() if target != os.devnull}


def test_it_keeps_open_nothing_but_the_pipe_and_what_it_says_things_on(staff: Staff) -> None:
    worker = start(staff)
    folder = Path(f"/proc/{worker.sidecar}/fd")
    # The worker may be ready before its sidecar has tidied up.
    wait_until(lambda: os.readlink(folder / "0") == os.devnull and len(read_open_files(folder)) <= 6)
    opened = read_open_files(folder)
    assert {opened.pop(number) for number in (1, 2)} == {str(worker.output)}
    kinds = sorted(target.partition(":")[0] for target in opened.values())
    stacks = "/memfd"  # and a pipe for what the worker is asked
    assert kinds in ([stacks, "anon_inode", "pipe", "pipe"], [stacks, "pidfd", "pipe", "pipe"])


def test_a_worker_whose_sidecar_was_killed_goes_on_and_says_so_once(staff: Staff) -> None:
    worker = start(staff, lease=0.6)
    os.kill(worker.sidecar, signal.SIGKILL)
    wait_until(lambda: len(worker.lines("sidecar:lost")) == 1)
    assert send(staff, "nap", 1.5).get(timeout=30) == worker.process.pid
    assert len(worker.lines("sidecar:lost")) == 1
    assert worker.lines("worker:restarted") == []
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0


def test_lease_is_not_renewed_for_a_worker_that_has_left(staff: Staff) -> None:
    script = (
        "from celery5.processes import foreground\n"
        "from celery5.wiring import StepPart\n"
        "from tests.redis.events.historian import app\n"
        "StepPart.get_stop_limit = lambda part, made: 0.5\n"
        "foreground.serve(app, foreground.ServeOptions())\n"
    )
    worker = staff.launch([sys.executable, "-c", script], lease=0.5, grace_period=0.1)
    wait_until(lambda: len(worker.lines("worker:started")) == 1)
    sent = send(staff, "deaf", 120.0)
    wait_until(lambda: len(staff.notes()) == 1)
    worker.signal(signal.SIGTERM)
    wait_until(lambda: len(worker.lines("queues:left")) == 1)
    assert worker.lines("queues:left")[0]["left_behind"] == 1
    other = staff.start(lease=0.5)  # some beats later
    wait_until(lambda: len(staff.notes()) == 2)
    assert [note.job for note in staff.notes()] == [sent.id, sent.id]
    assert staff.notes()[1].pid == other.process.pid
    assert worker.process.poll() is None
    other.signal(signal.SIGKILL)  # its sidecar puts the job back
    assert worker.lines("worker:restarted") == []


def test_sidecar_that_does_not_read_blocks_nobody() -> None:
    app = App("somewhere", broker="redis://nobody@nowhere/3")
    ear, mouth = os.pipe()
    one = Sidecar(app, write_fd=mouth, sidecar_memory=SidecarMemory(slots=1))
    for number in range(2000):
        assert one.report_beat(f"worker-{number}", ("q" * 100,))
    heard = os.read(ear, 1 << 20)
    assert one.report_beat("the last", ())
    assert one.report_beat("the very last", ())
    heard += os.read(ear, 1 << 20)
    lines = [msgspec.json.decode(line, type=BeatReport) for line in heard.splitlines()]
    assert lines[0].worker == "worker-0"
    assert lines[-1] == BeatReport("the very last", (), app.connections.endpoint)
    os.close(ear)
    assert not one.report_beat("nobody", ())
    assert one.report_beat("nobody", ())  # it is told once
    one.close()


def test_lines_of_a_sidecar_have_the_form_that_is_set(staff: Staff) -> None:
    worker = staff.launch(
        [*CELERY5, "worker", "start", "--log-format", "console"], log_level="info", no_color="1"
    )
    wait_until(lambda: " worker:started " in worker.output.read_text())
    worker.signal(signal.SIGKILL)
    worker.wait()
    wait_until(lambda: re.search("worker:died.*\n", worker.output.read_text()) is not None)
    (line,) = [line for line in worker.output.read_text().splitlines() if "worker:died" in line]
    name = r"\S+:\d+:[\w-]+"
    when = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}Z"
    assert re.fullmatch(
        rf"{when} warning {name} worker:died +process=sidecar  pid=\d+  requeued=0  dead_lettered=0", line
    )


def test_lines_of_a_sidecar_go_to_the_outlet_of_a_detector(tmp_path: Path) -> None:
    found: list[dict[str, object]] = []

    class Outlet:
        def write(self, messages: list[dict[str, object]]) -> int:
            found.extend(messages)
            return len(messages)

    app = App("somewhere", log_detectors=[lambda around: Outlet()], log_level="warning")
    log = SidecarLog(app)
    log.event("worker:died", "warning", pid=1)
    log.event("broker:reconnected")  # below the level
    log.close()
    assert [line["message_type"] for line in found] == ["celery5:worker:died"]


def test_an_outage_of_redis_is_no_silence_of_the_worker(own_staff: Staff, own_server: EmbeddedServer) -> None:
    script = (
        "from celery5.processes import foreground\n"
        "from celery5.processes.watch import sidecar\n"
        "from tests.redis.events.historian import app\n"
        "sidecar.HUNG_AFTER = 0.5\n"
        "foreground.serve(app, foreground.ServeOptions())\n"
    )
    worker = own_staff.launch([sys.executable, "-c", script], lease=0.6, log_level="debug")
    wait_until(lambda: len(worker.lines("worker:started")) == 1)

    def get_lines(event: str) -> list[dict[str, object]]:
        return [line for line in worker.lines(f"broker:{event}") if line.get("process") == "sidecar"]

    os.kill(own_server.pid, signal.SIGSTOP)
    try:
        wait_until(lambda: len(get_lines("disconnected")) == 1)
        time.sleep(1.5)  # three times as long as a worker may be silent
    finally:
        os.kill(own_server.pid, signal.SIGCONT)
    wait_until(lambda: len(get_lines("reconnected")) == 1)
    (lost,), (back,) = get_lines("disconnected"), get_lines("reconnected")
    assert lost["level"] == back["level"] == "debug", "the worker has said it"
    assert lost["where"] == back["where"] == worker.lines("broker:disconnected")[0]["where"]
    assert worker.lines("worker:hung") == []
    assert worker.lines("lease:renewal-failed") == []


def test_a_worker_without_a_sidecar_logs_why(staff: Staff) -> None:
    script = (
        "import errno, os\n"
        "from celery5.processes import foreground\n"
        "from tests.redis.events.historian import app\n"
        "def fork(): raise OSError(errno.EAGAIN, 'no more processes')\n"
        "os.fork = fork\n"
        "foreground.serve(app, foreground.ServeOptions())\n"
    )
    worker = staff.launch([sys.executable, "-c", script])
    wait_until(lambda: len(worker.lines("worker:started")) == 1)
    (line,) = worker.lines("sidecar:start-failed")
    assert (line["level"], "no more processes" in line["why"]) == ("warning", True)
