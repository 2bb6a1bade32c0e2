"""Commands as the first process of a container: orphans, signals, the terminal and the exit code."""

import os
import pty
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO

import pytest

from celery5 import JobState
from tests.story.cli.commands import COMMAND, environment, until
from tests.story.conftest import Desk

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux has PID namespaces"),
]

NAMESPACE = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
TERMINAL = ("setsid", "--ctty")
"""Makes the next process the leader of a session whose terminal is its stdin."""
ORPHANS = "for n in 1 2 3; do sleep 1 & done"
"""Three processes that end later than who has started them."""
LEAVES_ORPHANS = f"""
import subprocess

@app.task
def leave_orphans() -> None:
    subprocess.run({ORPHANS!r}, shell=True, check=True)
"""
MEMBERS = "platform = 'processes'\n[workers.default]\n[routers.default]\n[schedulers.default]\n"


class Container:
    """A command as the first process of a namespace."""

    def __init__(self, process: "subprocess.Popen[bytes]", output: Path) -> None:
        self.process = process
        self._output = output
        until(lambda: children(process.pid) or process.poll() is not None)
        (self.first,) = children(process.pid) or [0]

    @property
    def text(self) -> str:
        """What it has printed, on stdout and stderr."""
        return self._output.read_text()

    @property
    def child(self) -> int:
        """The process that does the work."""
        return children(self.first)[0]

    def wait_ready(self, sign: str = "celery5:worker:started") -> "Container":
        until(lambda: sign in self.text or self.process.poll() is not None)
        assert self.process.poll() is None, self.text
        return self

    def find_orphans(self) -> list[int]:
        """The processes that ORPHANS has left, also zombies."""
        return [pid for pid in children(self.first) if read_name(pid) == "sleep"]

    def end(self) -> int:
        """Wait for its end, and return its exit code."""
        return self.process.wait(30)


Run = Callable[..., Container]


def children(pid: int) -> list[int]:
    """The children of a process, in the order of their start; zombies are some of them."""
    try:
        return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
    except (FileNotFoundError, ProcessLookupError):
        return []


def read_name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


@pytest.fixture
def run(desk: Desk, url: str) -> Iterator[Run]:
    """Runs `celery5 -A shop ...` in its own namespace, in the folder of the desk."""
    denied = subprocess.run([*NAMESPACE, "true"], capture_output=True, text=True, check=False)
    if denied.returncode:
        pytest.skip(f"no PID namespace can be made here: {denied.stderr.strip()}")
    with ExitStack() as stack:
        state = stack.enter_context(tempfile.TemporaryDirectory())  # short enough for a socket in it
        count = 0

        def start(
            *words: str,
            target: str = "shop",
            stdin: IO[bytes] | int = subprocess.DEVNULL,
            outside: tuple[str, ...] = (),
            inside: tuple[str, ...] = (),
        ) -> Container:
            nonlocal count
            count += 1
            output = desk.folder / f"output-{count}"
            with output.open("wb") as file:
                process = subprocess.Popen(
                    [*outside, *NAMESPACE, *inside, *COMMAND, "-A", target, *words],
                    cwd=desk.folder,
                    env=environment(CELERY5_BROKER=url, XDG_STATE_HOME=state),
                    stdin=stdin,
                    stdout=file,
                    stderr=file,
                    start_new_session=not outside,
                )
            stack.callback(process.wait, 30)
            stack.callback(process.kill)
            return Container(process, output)

        yield start


def test_orphans_that_jobs_leave_are_no_zombies_afterwards(desk: Desk, run: Run) -> None:
    shop = desk.folder / "shop.py"
    shop.write_text(shop.read_text() + LEAVES_ORPHANS)
    container = run("worker", "start").wait_ready()
    job_id = desk("task", "send", "shop.leave_orphans").strip()
    until(lambda: (job := desk.app.find(job_id)) is not None and job.state is JobState.SUCCESS)
    until(lambda: not container.find_orphans(), within=10)
    os.kill(container.first, signal.SIGTERM)
    assert container.end() == 0, container.text


@pytest.mark.parametrize(
    ("words", "sign"),
    [
        (("worker", "start", "--processes", "2"), "celery5:worker:started"),
        (("router", "start"), "celery5:router:started"),
        (("scheduler", "start"), "celery5:scheduler:started"),
        (("publisher", "start", "--backlog", "memory"), "celery5:publisher:started"),
        (("dashboard", "start", "--port", "0"), "http://"),
        (("controller", "start", "--development"), "celery5:worker:started"),
        (("controller", "start", "--cluster", "cluster.toml"), "celery5:controller:started"),
    ],
    ids=["workers", "router", "scheduler", "publisher", "dashboard", "development", "controller"],
)
def test_each_process_ends_orphans_and_stops_in_order_at_the_first_sigterm(
    desk: Desk, run: Run, words: tuple[str, ...], sign: str
) -> None:
    (desk.folder / "cluster.toml").write_text(MEMBERS)
    container = run(*words).wait_ready(sign)
    long = ORPHANS.replace("sleep 1", "sleep 60")
    subprocess.run(["nsenter", "-t", str(container.first), "-p", "sh", "-c", long], check=True)
    until(lambda: len(container.find_orphans()) == 3, within=10)
    for orphan in container.find_orphans():
        os.kill(orphan, signal.SIGKILL)
    until(lambda: not container.find_orphans(), within=10)
    os.kill(container.first, signal.SIGTERM)
    assert container.end() == 0, container.text
    assert "second time" not in container.text


def test_signals_that_do_not_stop_a_worker_reach_it(run: Run) -> None:
    container = run("worker", "start").wait_ready()
    os.kill(container.first, signal.SIGUSR1)
    container.wait_ready("celery5:process:stacks-dumped")
    os.kill(container.first, signal.SIGHUP)
    container.wait_ready("celery5:configuration:re")


def test_the_exit_code_is_that_of_the_command(run: Run) -> None:
    assert run("worker", "start", "--burst").end() == 0
    container = run("worker", "start", target="nowhere")
    assert container.end() == 2
    assert container.text.startswith("Error: ")
    assert len(container.text.splitlines()) == 1
    container = run("worker", "start").wait_ready()
    os.kill(container.first, signal.SIGALRM)
    assert container.end() == 128 + signal.SIGALRM


def test_the_jobs_of_a_killed_worker_are_put_back_before_the_container_ends(desk: Desk, run: Run) -> None:
    shop = sys.modules["shop"]
    container = run("worker", "start").wait_ready()
    result = shop.stuck.delay()
    until((desk.folder / "stuck").exists)
    os.kill(container.child, signal.SIGKILL)
    assert container.end() == 128 + signal.SIGKILL
    assert result.status() is JobState.SENT


@pytest.mark.parametrize(
    ("outside", "inside", "hangs_up"),
    [
        pytest.param((), TERMINAL, False, id="docker, Ctrl-C"),
        pytest.param((), TERMINAL, True, id="docker, hang-up"),
        pytest.param(TERMINAL, (), False, id="below a shell, Ctrl-C"),
    ],
)
def test_a_terminal_stops_the_worker_once(
    run: Run, outside: tuple[str, ...], inside: tuple[str, ...], hangs_up: bool
) -> None:
    master, slave = pty.openpty()
    try:
        container = run("worker", "start", stdin=slave, outside=outside, inside=inside).wait_ready()
        os.close(slave)
        if not hangs_up:
            os.write(master, b"\x03")
    finally:
        if hangs_up:
            os.close(master)
    assert container.end() == 0, container.text
    assert "second time" not in container.text
    if not hangs_up:
        os.close(master)
