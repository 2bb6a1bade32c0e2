"""Signals: what every process does when it is sent SIGUSR1 and SIGHUP, and what it says when it is root's."""

import os
import pty
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from celery5 import App
from celery5.broker.calls import cluster
from celery5.logs.log import Log
from celery5.processes.foreground import _introduce, check_controller_epoch
from celery5.processes.watch import stacks
from celery5.processes.watch.stacks import StackDump
from celery5.processes.worker import WorkerOptions
from celery5.protocol.cluster.leadership import EPOCH_VARIABLE, NO_RECORD
from celery5.services.process.reloader import ConfigurationChanged, NextIncarnation, Reloader, ReloadSignal
from tests.redis.commands.staff import Employee, Staff, wait_until
from tests.redis.worker.workers import Lines, until

COMMAND = (sys.executable, "-m", "celery5", "-A", "tests.redis.events.historian:app")
LIMIT = 60.0


def launched(staff: Staff, kind: str, *flags: str, ready: int = 1, **settings: Any) -> Employee:
    """A process of that kind which is up, or a parent of which so many are."""
    one = staff.launch([*COMMAND, kind, "start", *flags], **settings)
    wait_until(
        lambda: len(one.lines(f"{kind}:started")) >= ready or one.process.poll() is not None, within=LIMIT
    )
    assert one.process.poll() is None, one.output.read_text()
    return one


def dumped(one: Employee, *, times: int = 1) -> dict[str, Any]:
    """What it says of the last of so many dumps, when that is complete."""

    def complete() -> bool:
        log_lines = one.lines("process:stacks-dumped")
        shown = len(one.lines("process:thread-dumped"))
        return len(log_lines) >= times and shown >= sum(line["threads"] for line in log_lines)

    wait_until(complete, within=LIMIT)
    return one.lines("process:stacks-dumped")[-1]


@pytest.mark.parametrize("kind", ["worker", "router", "scheduler"])
def test_usr1_has_every_process_tell_what_its_tasks_and_threads_do(staff: Staff, kind: str) -> None:
    one = launched(staff, kind)
    one.signal(signal.SIGUSR1)
    said = dumped(one)
    tasks = one.lines("process:task-dumped")
    assert (said["level"], said["loop"]) == ("warning", "turns")
    assert said["tasks"] == sum(task.get("count", 1) for task in tasks)
    assert (max(task.get("count", 1) for task in tasks) >= 100) is (
        kind == "worker"
    )  # its executors are one message
    waiting = [frame for task in tasks for frame in task["frames"]]
    assert any("reloader.py" in frame and frame.endswith(" in run") for frame in waiting)
    assert {"MainThread", "celery5-log"} <= {line["name"] for line in one.lines("process:thread-dumped")}
    one.signal(signal.SIGUSR1)
    dumped(one, times=2)
    one.signal(signal.SIGTERM)
    assert one.wait(LIMIT) == 0


def test_a_dump_names_the_job_that_a_task_runs_and_where_it_waits(staff: Staff, tmp_path: Path) -> None:
    worker = launched(staff, "worker")
    job = staff.app.signature("gate", str(tmp_path / "gate")).delay()
    wait_until(lambda: bool(staff.notes()), within=LIMIT)
    worker.signal(signal.SIGUSR1)
    dumped(worker)
    (task,) = [line for line in worker.lines("process:task-dumped") if line.get("job") == job.id]
    assert task["task"] == "gate"
    assert any("historian.py" in frame and frame.endswith("in gate") for frame in task["frames"])
    (tmp_path / "gate").touch()
    assert job.get(timeout=LIMIT)


def test_a_dump_says_which_job_blocks_the_loop_while_it_does(staff: Staff) -> None:
    worker = launched(staff, "worker")
    job = staff.app.signature("block", 5.0).delay()
    wait_until(lambda: bool(staff.notes()), within=LIMIT)
    worker.signal(signal.SIGUSR1)
    said = dumped(worker)
    assert not staff.notes("end")
    assert said["loop"] == "blocked"
    assert said["main"][-1].endswith("in block")
    (main,) = [line for line in worker.lines("process:thread-dumped") if line["name"] == "MainThread"]
    assert main["frames"][-1].endswith("in block")
    assert job.get(timeout=LIMIT)


async def test_a_dump_is_bounded(app_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "MAX_TASKS", 3)
    monkeypatch.setattr(stacks, "MAX_FRAMES", 5)

    async def deep(left: int) -> None:
        if left:
            await deep(left - 1)
        await trio.sleep_forever()

    with Lines() as lines:
        async with trio.open_nursery() as nursery:
            await nursery.start(StackDump(Log(worker="w", app=app_name)).run)
            for _ in range(9):
                nursery.start_soon(deep, 300)
            await trio.sleep(0.01)
            for _ in range(5):
                os.kill(os.getpid(), signal.SIGUSR1)
            await until(lambda: bool(lines.of("process:stacks-dumped")), within=LIMIT)
            await trio.sleep(2 * stacks.DUMP_INTERVAL)
            nursery.cancel_scope.cancel()
        await until(lambda: len(lines.of("process:thread-dumped")) >= 1, within=LIMIT)
        (said,) = lines.of("process:stacks-dumped")  # five signals in a row are one
        assert str(said["tasks"]).startswith("more than 3")
        assert sum(line.get("count", 1) for line in lines.of("process:task-dumped")) == 3
        assert max(len(line["frames"]) for line in lines.of("process:task-dumped")) <= 5


def test_a_fleet_passes_usr1_and_hup_on_to_its_processes_and_lives(staff: Staff) -> None:
    fleet = launched(staff, "worker", "--processes", "2", ready=2)
    fleet.signal(signal.SIGUSR1)
    wait_until(lambda: len(fleet.lines("process:stacks-dumped")) == 2, within=LIMIT)
    fleet.signal(signal.SIGHUP)
    wait_until(lambda: len(fleet.lines("configuration:reload-refused")) == 2, within=LIMIT)
    fleet.signal(signal.SIGTERM)
    assert fleet.wait(LIMIT) == 0


@pytest.mark.parametrize("kind", ["worker", "router", "scheduler"])
def test_hup_has_every_process_read_its_configuration(staff: Staff, tmp_path: Path, kind: str) -> None:
    config = tmp_path / "celery5.toml"
    config.write_text("concurrency = 2")
    one = launched(staff, kind, config=config)
    one.signal(signal.SIGHUP)
    wait_until(lambda: bool(one.lines("configuration:unchanged")), within=LIMIT)
    config.write_text("concurrency = 0")
    wait_until(lambda: bool(one.lines("configuration:rejected")), within=LIMIT)
    one.signal(signal.SIGHUP)
    wait_until(lambda: bool(one.lines("configuration:reload-refused")), within=LIMIT)
    assert "the old settings stay: concurrency" in one.lines("configuration:reload-refused")[0]["why"]
    config.write_text("concurrency = 3")
    one.signal(signal.SIGHUP)
    wait_until(lambda: len(one.lines(f"{kind}:started")) == 2, within=LIMIT)
    one.signal(signal.SIGTERM)
    assert one.wait(LIMIT) == 0


async def test_hup_takes_up_a_change_that_nobody_watches_for(app_name: str) -> None:
    class Vault:
        where = "the vault"
        concurrency = 1

        def load(self) -> dict[str, object]:
            return {"concurrency": self.concurrency}

        async def watch(self) -> None:
            await trio.sleep_forever()

    vault, bell, next_incarnation = Vault(), ReloadSignal(), NextIncarnation()
    app, log = App(app_name, config=vault), Log(worker="w", app=app_name)
    assert app.settings.concurrency == 1
    vault.concurrency = 7
    one = Reloader(
        app=app,
        configuration=vault,
        reload=True,
        next_incarnation=next_incarnation,
        log=log,
        reload_signal=bell,
    )

    async with trio.open_nursery() as nursery:

        async def run() -> None:
            with pytest.raises(ConfigurationChanged):
                await one.run()

        nursery.start_soon(run)
        await wait_all_tasks_blocked(0.01)
        bell.send()
    next_incarnation.apply_settings()
    assert app.settings.concurrency == 7


@pytest.mark.parametrize("processes", [1, 2])
def test_a_worker_whose_terminal_is_closed_ends_in_order(
    staff: Staff, tmp_path: Path, processes: int
) -> None:
    output = tmp_path / "said"
    environment = {
        **os.environ,
        "CELERY5_BROKER": staff.app.settings.broker,
        "HISTORY": str(staff.history),
        "HISTORY_APP": staff.app.name,
    }
    pid, terminal = pty.fork()
    if pid == 0:
        words = [*COMMAND, "worker", "start", "--processes", str(processes)]
        file = os.open(output, os.O_WRONLY | os.O_CREAT)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.execve(words[0], words, environment)
    one = Employee(None, output)  # type: ignore[arg-type]
    wait_until(lambda: output.exists() and len(one.lines("worker:started")) == processes, within=LIMIT)
    os.kill(pid, signal.SIGHUP)  # while it is there
    wait_until(lambda: len(one.lines("configuration:reload-refused")) == processes, within=LIMIT)
    os.close(terminal)
    wait_until(
        lambda: os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None, within=LIMIT
    )
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert len(one.lines("worker:stopped")) == processes


def test_whoever_runs_as_root_is_warned_once(staff: Staff) -> None:
    fleet = launched(staff, "worker", "--processes", "2", ready=2)
    warnings = fleet.lines("process:run-as-root")
    assert len(warnings) == (os.geteuid() == 0)
    for warning in warnings:
        assert (warning["level"], "User=" in warning["hint"]) == ("warning", True)


@pytest.mark.parametrize(("user", "levels"), [(0, ["warning"]), (1000, [])])
def test_startup_warns_root_and_no_other_user(
    staff: Staff, monkeypatch: pytest.MonkeyPatch, user: int, levels: list[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: user)
    with Lines() as lines:
        _introduce(WorkerOptions(), Log(worker="w", app=staff.app.name))
    assert [line["level"] for line in lines.of("process:run-as-root")] == levels


# ---- started by a Controller


@pytest.mark.parametrize("kind", ["worker", "router", "scheduler"])
def test_what_a_controller_starts_that_leads_no_more_does_not_begin(staff: Staff, kind: str) -> None:
    app = staff.app
    record = app.perform(cluster.claim_leadership(app.keys, "new", replaces=NO_RECORD, epoch=0))
    one = staff.launch([*COMMAND, kind, "start"], controller_epoch=record.epoch - 1)
    assert one.wait(LIMIT) == 1
    (line,) = one.output.read_text().splitlines()
    assert line.startswith(
        "Error: the Controller that started this process leads no more (new leads in epoch "
    )
    one = launched(staff, kind, forked=False, controller_epoch=record.epoch)
    assert one.lines("process:run-as-root") == []  # the Controller has said so
    environment = Path(f"/proc/{one.process.pid}/environ").read_bytes()
    assert EPOCH_VARIABLE.encode() in environment  # of which jobs see nothing


def test_an_epoch_that_makes_no_sense_is_told_of_in_one_line(staff: Staff) -> None:
    one = staff.launch([*COMMAND, "worker", "start"], controller_epoch="soon")
    assert one.wait(LIMIT) == 2
    (line,) = one.output.read_text().splitlines()
    assert line.startswith("Error: CELERY5_CONTROLLER_EPOCH is 'soon'")


def test_jobs_do_not_see_the_epoch_of_their_process(staff: Staff, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(EPOCH_VARIABLE, "1")
    assert check_controller_epoch(staff.app)
    assert EPOCH_VARIABLE not in os.environ
