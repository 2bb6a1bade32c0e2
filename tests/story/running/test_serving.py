"""Serving: the commands that run jobs, from their start to their end."""

import json
import os
import pty
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
from contextlib import suppress
from pathlib import Path

import pytest

from celery5 import JobState
from tests.story.cli.commands import COMMAND, Serving, celery5, environment, until
from tests.story.conftest import Desk


def test_a_burst_ends_when_all_is_done(desk: Desk) -> None:
    shop = sys.modules["shop"]
    sums = desk.app.send_many([shop.add.s(number, 1) for number in range(100)])
    product, retried = shop.multiply.delay(6, 7), shop.moody.delay()
    later = shop.add.options(countdown=0.5).delay(20, 22)
    out = desk("worker", "start", "--burst")
    assert [job.get(timeout=30) for job in sums] == list(range(1, 101))
    assert (product.get(timeout=30), retried.get(timeout=30), later.get(timeout=30)) == (42, 3, 42)
    kinds = [json.loads(line).get("message_type") for line in out.splitlines()]
    assert kinds.count("celery5:job") == 105, "100 sums, a product, 3 attempts, and one that was scheduled"


def test_a_burst_of_several_processes(desk: Desk) -> None:
    shop = sys.modules["shop"]
    results = desk.app.send_many([shop.add.s(number, 1) for number in range(500)])
    out = desk("worker", "start", "--burst", "--processes", 2, "--concurrency", 4)
    assert [result.get(timeout=30) for result in results] == list(range(1, 501))
    ready = [line for line in out.splitlines() if '"celery5:worker:started"' in line]
    assert len(ready) == 2


def test_a_burst_of_chosen_queues_leaves_the_others_alone(desk: Desk) -> None:
    shop = sys.modules["shop"]
    total, product = shop.add.delay(1, 2), shop.multiply.delay(6, 7)
    desk("worker", "start", "--burst", "--queues", "slow, slow")
    assert product.get(timeout=30) == 42
    assert total.status() is JobState.SENT


def test_a_queue_that_no_task_uses_and_an_application_without_tasks_are_doubted(desk: Desk, url: str) -> None:
    flags = ("worker", "start", "--burst", "--log-format", "console", "--log-level", "warning")
    for queues, hints in (
        ("slow,defualt", ["queue 'defualt'; did you mean 'default'?"]),
        ("slow,defualt", ["queue 'defualt'; did you mean 'default'?"]),  # it is known by now
        ("mail", ["queue 'mail'; they name default, slow"]),
        ("mail,slow", []),
    ):
        lines = but_for_root(desk(*flags, "--queues", queues))
        assert [
            line.partition("no task or setting of this application names the ")[2] for line in lines
        ] == hints
    assert desk("queue", "list") == "no queues yet: nothing was sent\n"
    for queue, settings in (
        ("post", {"CELERY5_QUEUE_ROUTES": '{"bank.*": "post"}'}),
        ("letters", {"CELERY5_QUEUE_ORDER": "letters > slow"}),
        ("parcels", {"CELERY5_SHARDS": "parcels=2"}),
        ("stamps", {"CELERY5_PRIORITIES": "stamps=4:2:1"}),
    ):
        assert not but_for_root(desk(*flags, "--queues", queue, **settings)), queue
    assert len(but_for_root(desk(*flags, "--queues", "cards"))) == 1
    desk.folder.joinpath("empty.py").write_text(
        f"from celery5 import App\napp = App({desk.app.name!r}, broker={url!r})"
    )
    ended = celery5("-A", "empty", *flags, cwd=desk.folder)
    assert ended.code == 0
    assert [line.split()[2:5:2] for line in but_for_root(ended.out)] == [
        ["warning", "worker:tasks-not-found"]
    ]


def test_a_worker_that_reads_a_queue_with_jobs_has_no_doubt_of_its_name(desk: Desk) -> None:
    result = sys.modules["shop"].add.options(queue="defualt").delay(1, 2)
    flags = ("worker", "start", "--burst", "--log-format", "console", "--log-level", "warning")
    assert not but_for_root(desk(*flags, "--queues", "defualt"))
    assert result.get(timeout=30) == 3


def but_for_root(said: str) -> list[str]:
    """The lines without the warning that there is when it is root who runs the tests."""
    return [line for line in said.splitlines() if "process:run-as-root" not in line]


def test_flags_win_over_the_environment_and_that_over_the_default(desk: Desk, url: str) -> None:
    desk.folder.joinpath("told.py").write_text(
        textwrap.dedent(f"""
            from celery5 import App
            app = App({desk.app.name!r})

            @app.task(name="told")
            def told() -> list[float]:
                settings = app.settings
                return [settings.concurrency, settings.cpu_slots, settings.grace_period]
        """)
    )
    result = desk.app.task(name="told")(_told).delay()
    environment = {
        "CELERY5_CONCURRENCY": "7",
        "CELERY5_CPU_SLOTS": "3",
        "CELERY5_BROKER": "redis://127.0.0.1:1",
    }
    flags = ("--cpu-slots", 2, "--grace-period", 1.5, "--broker", url, "--burst", "--name", "teller")
    ended = celery5("-A", "told", "worker", "start", *flags, cwd=desk.folder, env=environment)
    assert (ended.code, ended.err) == (0, "")
    assert result.get(timeout=30) == [7, 2, 1.5]
    assert '"worker":"teller:' in ended.out


def _told() -> list[float]:
    return []


def test_people_may_have_another_log(desk: Desk) -> None:
    sys.modules["shop"].add.delay(1, 2)
    out = desk("worker", "start", "--burst", "--log-format", "console")
    assert "state=SUCCESS" in out
    assert "{" not in out
    sys.modules["shop"].add.delay(1, 2)
    assert (
        desk("worker", "start", "--burst", "--log-level", "error", "--log-format", "console").count("\n") <= 2
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
@pytest.mark.parametrize("processes", [1, 2])
def test_a_signal_ends_a_worker_in_order(desk: Desk, number: signal.Signals, processes: int) -> None:
    words = ("-A", "shop", "worker", "start", "--processes", processes)
    with Serving(*words, cwd=desk.folder) as worker:
        worker.ready(processes)
        sys.modules["shop"].add.delay(1, 2).get()
        worker.signal(number)
        ended = worker.ended()
    assert (ended.code, ended.err) == (0, "")
    assert len(worker.logged("worker:stopped")) == processes


def test_the_development_controller_brings_its_own_server_and_takes_it_away(
    desk: Desk, tmp_path: Path
) -> None:
    words = ("-A", "shop", "controller", "start", "--development")
    with Serving(*words, cwd=desk.folder) as controller:
        controller.ready()
        said = controller.err
        assert said.startswith("producers reach this server with CELERY5_BROKER='unix:///")
        own = said.split("'")[1]
        path = Path(own.removeprefix("unix://").partition("?")[0])
        desk.app.use_broker(own)
        assert sys.modules["shop"].whose.delay().get() == controller.process.pid
        desk.app.close()
        controller.signal(signal.SIGINT)
        assert controller.ended().code == 0
    assert not path.parent.exists()


def test_a_second_ctrl_c_ends_the_development_controller_and_its_server_at_once(
    desk: Desk, tmp_path: Path
) -> None:
    words = ("-A", "shop", "controller", "start", "--development")
    with Serving(*words, cwd=desk.folder, env={"TMPDIR": str(tmp_path)}) as controller:
        controller.ready()
        own = controller.err.split("'")[1]
        path = Path(own.removeprefix("unix://").partition("?")[0])
        desk.app.use_broker(own)
        sys.modules["shop"].stuck.delay()
        until(lambda: (desk.folder / "stuck").exists())
        desk.app.close()
        controller.signal(signal.SIGINT)
        until(lambda: controller.logged("process:stop-requested"))
        controller.signal(signal.SIGINT)
        ended = controller.ended()
    assert ended.code == 128 + signal.SIGINT
    assert ended.err.splitlines()[-1] == "SIGINT for the second time: exiting at once"
    assert not path.parent.exists()


@pytest.mark.parametrize("moment", ["celery5-*", "*/redis.sock"], ids=["a folder", "a server"])
def test_ctrl_c_while_the_development_controller_starts_leaves_nothing_behind(
    desk: Desk, moment: str
) -> None:
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp") as room:
        words = ("-A", "shop", "controller", "start", "--development")
        with Serving(*words, cwd=desk.folder, env={"TMPDIR": room}) as controller:
            until(lambda: any(Path(room).glob(moment)))
            controller.signal(signal.SIGINT)
            ended = controller.ended()
        assert "Traceback" not in ended.err
        assert list(Path(room).iterdir()) == []


def test_a_worker_logs_under_the_name_that_it_has_in_redis(desk: Desk) -> None:
    sys.modules["shop"].add.delay(1, 2)
    lines = [json.loads(line) for line in desk("worker", "start", "--burst").splitlines()]
    (began,) = [line for line in lines if line.get("message_type") == "celery5:worker:boot-started"]
    (job,) = [line for line in lines if line.get("message_type") == "celery5:job"]
    assert {began["name"], job["worker"], lines[0]["worker"]} == {began["name"]}
    assert began["name"].startswith(f"{socket.gethostname()}:")


def on_a_terminal(desk: Desk, *words: str, **env: str) -> str:
    """Run a command with a terminal as its stdout; return what it shows."""
    ours, theirs = pty.openpty()
    shown = bytearray()
    with subprocess.Popen(
        [*COMMAND, "-A", "shop", *words],
        cwd=desk.folder,
        env=environment(**env),
        stdout=theirs,
        stderr=subprocess.DEVNULL,
        stdin=subprocess.DEVNULL,
    ) as running:
        os.close(theirs)
        with suppress(OSError):  # EIO: it has ended
            while some := os.read(ours, 1 << 16):
                shown += some
        assert running.wait(30) == 0
    os.close(ours)
    return shown.decode()


def test_a_terminal_gets_lines_for_people_that_begin_with_who_says_them(desk: Desk) -> None:
    burst = ("worker", "start", "--burst", "--name", "web1")
    lines = [line for line in on_a_terminal(desk, *burst, NO_COLOR="1").splitlines() if line]
    assert [line for line in lines if "web1" not in line] == []
    assert any(line.split()[4] == "worker:started" for line in lines)
    for words, env in ((("--log-format", "json"), {}), ((), {"CELERY5_LOG_FORMAT": "json"})):
        assert json.loads(on_a_terminal(desk, *burst, *words, **env).splitlines()[0])["worker"]
