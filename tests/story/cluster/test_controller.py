"""Controller: a cluster of real processes stands up, stays up and says so."""

import json
import os
import signal
import socket
from pathlib import Path

import pytest

from tests.redis.commands.staff import is_alive
from tests.story.cli.commands import celery5
from tests.story.cluster.controlling import LIMIT, Controlling, is_group_leader, until
from tests.story.conftest import Desk

pytestmark = pytest.mark.timeout(500)
CLUSTER = """
hung_after = 30
[schedulers.default]
[workers.default]
count = 2
"""


def test_a_cluster_stands_up_stays_up_and_says_so(desk: Desk) -> None:
    with Controlling(desk.folder, CLUSTER).up() as controller:
        before = controller.pids()
        assert sorted(before) == ["scheduler-default-1", "worker-default-1", "worker-default-2"]
        assert all(map(is_group_leader, before.values()))
        assert {member["phase"] for member in controller.members().values()} == {"up"}
        assert desk.app.send_many([desk.app.signature("shop.add", 2, 3)])[0].get(timeout=LIMIT) == 5
        os.kill(before["worker-default-1"], signal.SIGKILL)
        assert controller.replaced("worker-default-1", before["worker-default-1"])
        told = controller.members()["worker-default-1"]
        assert (told["deaths"], told["restarts"]) == (1, 0)
        refused = controller.tell("restart", "nobody")
        assert (refused.code, refused.out) == (1, "")
        assert "did not do it (refused): no member 'nobody' here" in refused.error
        assert "3 of 3 members up" in controller.tell("status").out
        assert controller.tell("stop").out == "stopped\n"
        assert controller.ended().code == 0
        assert not any(map(is_alive, before.values()))
    order = [line["name"].split("-")[0] for line in controller.logged("member:ended")]
    assert order == ["worker", "scheduler", "worker", "worker"]


def test_a_member_whose_loop_hangs_is_replaced(desk: Desk) -> None:
    with Controlling(desk.folder, "hung_after = 5\n[workers.default]\n").up() as controller:
        before = controller.pids()["worker-default-1"]
        os.kill(before, signal.SIGSTOP)
        controller.replaced("worker-default-1", before)
        assert "its event loop has said nothing for 5 s" in [
            line["why"] for line in controller.logged("member:killed")
        ]
        controller.process.send_signal(signal.SIGSTOP)
        words = ("-A", "shop", "controller", "status", "--timeout", 0.5)
        silent = celery5(*words, cwd=desk.folder)
        controller.process.send_signal(signal.SIGCONT)
        assert (silent.code, silent.out) == (1, "")
        assert "(no-answer): this Controller has not answered within 0.5 s" in silent.error


def test_members_end_with_their_controller_and_its_folder_is_removed(desk: Desk) -> None:
    with Controlling(desk.folder, CLUSTER).up() as controller:
        members = controller.pids()
        left = Path(controller.environment_of(members["worker-default-1"])["NOTIFY_SOCKET"]).parent
        controller.process.kill()
        until(lambda: not any(map(is_alive, members.values())))
        assert left.exists()
    with Controlling(desk.folder, CLUSTER).up():
        assert not left.exists()


def test_what_somebody_else_says_on_a_members_socket_means_nothing(desk: Desk) -> None:
    with Controlling(desk.folder, CLUSTER).up() as controller:
        surroundings = controller.environment_of(controller.pids()["worker-default-1"])
        path = Path(surroundings["NOTIFY_SOCKET"])
        assert path.parent.stat().st_mode & 0o777 == 0o700
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line:
            line.sendto(b"STATUS=forged\nSTOPPING=1", str(path))
        told = controller.members()["worker-default-1"]
        assert (told["phase"], "forged" in told["status"]) == ("up", False)
        assert controller.tell("stop").code == 0
        until(lambda: not path.parent.exists())


def test_systemd_hears_ready_when_the_whole_cluster_is_up_and_how_many_members_are(
    desk: Desk, short_path: Path
) -> None:
    path = str(short_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ear:
        ear.bind(path)
        ear.settimeout(LIMIT)
        with Controlling(desk.folder, CLUSTER, env={"NOTIFY_SOCKET": path}) as controller:
            said = [ear.recv(4096).decode()]
            while "READY=1" not in said[-1]:
                said.append(ear.recv(4096).decode())
            assert "STATUS=3 of 3 members up" in said[-1]
            assert said[0] == "STATUS=0 of 3 members up"
            os.kill(controller.pids()["worker-default-1"], signal.SIGKILL)
            said = [ear.recv(4096).decode()]
            while "members up" not in said[-1]:  # a machine that stands still is another message
                said.append(ear.recv(4096).decode())
            assert said[-1].startswith(
                "STATUS=2 of 3 members up; worker-default-1: ended by SIGKILL; it is started again"
            )


def test_reload_restarts_only_members_that_changed(desk: Desk) -> None:
    with Controlling(desk.folder, CLUSTER).up() as controller:
        before = controller.pids()
        file = desk.folder / "cluster.toml"
        file.write_text(CLUSTER.replace("count", "cuont"))
        told = controller.tell("reload")
        assert told.code == 1
        assert "workers.default.cuont is not known; did you mean 'count'?" in told.err
        controller.process.send_signal(signal.SIGHUP)
        until(lambda: controller.logged("cluster:rejected"))
        file.write_text(CLUSTER + "log_level = 'debgu'\n[environment]\nCELERY5_CONCURENCY = 4\n")
        told = controller.tell("reload")
        assert (told.code, told.out) == (1, "")
        assert "environment.CELERY5_CONCURENCY is no setting: did you mean CELERY5_CONCURRENCY?" in told.error
        assert "workers.default.log_level: 'debgu' is none of " in told.error
        file.unlink()
        assert controller.tell("reload").code == 1  # it is not there: nothing is ended for that
        file.write_text(CLUSTER + "concurrency = 7\n")
        controller.process.send_signal(signal.SIGHUP)
        until(lambda: controller.logged("cluster:reloaded"))
        for name in ("worker-default-1", "worker-default-2"):
            controller.replaced(name, before[name])
        assert controller.pids()["scheduler-default-1"] == before["scheduler-default-1"]


def test_waiting_for_a_restart_ends_when_it_is_done_or_refused(desk: Desk) -> None:
    with Controlling(desk.folder, "restart_limit = 2\n[workers.default]\ncount = 2\n").up() as controller:
        before = controller.pids()
        told = controller.tell("restart", "--wait", "300")
        assert (told.code, told.out.splitlines()[-1]) == (0, "done")
        after = controller.pids()
        assert sorted(after) == sorted(before)
        assert not set(after.values()) & set(before.values())
        file = desk.folder / "cluster.toml"
        file.write_text("restart_limit = 2\n[workers.default]\n")
        assert controller.tell("reload", "--wait", "300", "--json").code == 0
        assert sorted(controller.pids()) == ["worker-default-1"]
        late = controller.tell("restart", "--wait", "0.001")
        assert late.code == 1
        assert "the command was sent, and is not done after 0.001 s" in late.error
        file.write_text("restart_limit = 2\n[workers.default]\nenvironment = { PYTHONHOME = '/nowhere' }\n")
        broken = controller.tell("reload", "--wait", "300")
        assert broken.code == 1
        assert "given up" in broken.error


def test_a_failed_change_says_which_version_runs_where_and_how_to_go_back(desk: Desk) -> None:
    good = "restart_limit = 2\n[workers.default]\ncount = 2\n[workers.other]\nqueues = ['slow']\n"
    bad = good.replace("count = 2", "count = 2\nenvironment = { PYTHONHOME = '/nowhere' }")
    again = "put the former cluster description back, then celery5 -A shop controller reload --wait 5m"
    with Controlling(desk.folder, good).up() as controller:
        before = controller.pids()
        (desk.folder / "cluster.toml").write_text(bad)
        broken = controller.tell("reload", "--wait", "300")
        assert (broken.code, broken.out.splitlines()[1:]) == (
            1,
            [
                "the old version runs in: worker-default-1, worker-default-2",
                "not running: worker-default-3",
                "not changed: worker-other-1",
                f"to go back: {again}",
            ],
        )
        assert {name: controller.pids().get(name) for name in before} == before
        late = controller.tell("restart", "worker-other-1", "--wait", "0.001", "--json")
        (told,) = json.loads(late.out)
        assert (late.code, told["outcome"]["is_done"]) == (1, False)
        assert told["outcome"]["failure"] in late.error
        broken = controller.tell("reload", "--wait", "1", "--json")  # what was given up holds up the others
        (told,) = json.loads(broken.out)
        assert told["outcome"]["to_go_back"] == again.replace("5m", "1")
        assert told["outcome"]["versions"]["not_running"] == ["worker-default-3"]
        (desk.folder / "cluster.toml").write_text(good)
        mended = controller.tell("reload", "--wait", "300", "--json")
        (told,) = json.loads(mended.out)
        assert (mended.code, told["outcome"]["is_done"]) == (0, True)
        assert list(told["outcome"]["code"].values()) == [3]


def test_a_reload_that_shrinks_and_breaks_a_group_ends_one_member_only_and_says_so(desk: Desk) -> None:
    whole = "restart_limit = 2\n[workers.default]\ncount = 4\n"
    with Controlling(desk.folder, whole).up() as controller:
        before = controller.pids()
        file = desk.folder / "cluster.toml"
        file.write_text(whole.replace("4", "2") + "environment = { PYTHONHOME = '/nowhere' }\n")
        assert controller.tell("reload").code == 0
        until(lambda: controller.logged("member:abandoned"))
        (given_up,) = controller.logged("member:abandoned")
        assert (given_up["name"], given_up["kept"]) == (
            "worker-default-1",
            ["worker-default-3", "worker-default-4"],
        )
        assert {name: controller.pids().get(name) for name in before} == {**before, "worker-default-1": None}
        status = controller.tell("status")
        assert status.code == 1
        assert "worker-default-3, worker-default-4: not wanted any more, and kept" in status.err
        file.write_text(whole.replace("4", "2"))
        assert controller.tell("reload").code == 0
        until(lambda: sorted(controller.pids()) == ["worker-default-1", "worker-default-2"])
        assert controller.pids()["worker-default-2"] == before["worker-default-2"]
        file.write_text(whole.replace("4", "2").replace("restart_limit = 2", "restart_limit = 3"))
        assert controller.tell("reload").out.endswith("  changed in the description: restart_limit\n")


BROKEN = """
import os
from celery5 import App, BootStep

how = os.environ.get("BREAK", "")
if how == "import":
    raise ImportError("no module of mine")

if how == "crash":  # a bug of celery5's, say
    from celery5.processes import worker

    worker.check = lambda app: 1 / 0
    from celery5.processes import foreground

    foreground.WORKER = foreground.ProcessKind("worker", worker.run, worker.check)
    foreground.serve.__defaults__ = (foreground.WORKER,)


async def database() -> None:
    if how == "step":
        raise RuntimeError("database is\\x1b[2J down\\nfor today")


app = App({name!r}, broker={url!r}, grace_period=5, bootsteps=[BootStep("db", database)])


@app.task
async def add(a: int, b: int) -> int:
    return a + b
"""
BROKEN_CLUSTER = """
restart_limit = 2
[workers.fine]
[workers.step]
environment = { BREAK = "step" }
[workers.import]
environment = { BREAK = "import" }
[workers.crash]
environment = { BREAK = "crash" }
"""
REASONS = {
    "worker-step-1": "boot step 'db' did not come up: RuntimeError: database is [2J down for today",
    "worker-import-1": "module 'shop' fails while it is imported: ImportError: no module of mine",
    "worker-crash-1": "ZeroDivisionError: division by zero",
}


def test_a_member_that_is_given_up_names_the_step_or_error_that_ended_it(
    desk: Desk, url: str, app_name: str
) -> None:
    (desk.folder / "shop.py").write_text(BROKEN.format(name=app_name, url=url))
    with Controlling(desk.folder, BROKEN_CLUSTER) as controller:
        until(lambda: len(controller.logged("member:abandoned")) == len(REASONS))
        logged = {line["name"]: line["why"] for line in controller.logged("member:abandoned")}
        until(lambda: controller.of("worker-fine-1", "started"))
        members = controller.members()
        status = controller.tell("status")
        pids = controller.pids()
    shown = {name: member["trouble"] for name, member in members.items() if member["trouble"]}
    assert set(logged) == set(shown) == set(REASONS)
    for name, reason in REASONS.items():
        begin = "it has died 2 times within 300 s: ended with "
        assert logged[name].startswith(begin)
        assert reason in logged[name]
        assert shown[name] == f"given up: {logged[name]}"
        assert reason in status.out
        assert logged[name] in status.err
        assert [reason in line["how"] for line in controller.of(name, "ended")] == [True]
    assert {name: member["pid"] for name, member in members.items()} == {
        **dict.fromkeys(REASONS),
        "worker-fine-1": pids["worker-fine-1"],
    }
    assert f" {pids['worker-fine-1']} " in status.out
    assert "\x1b" not in status.out + status.err


def test_a_start_that_fails_again_and_again_is_logged_once_with_its_reason(
    desk: Desk, url: str, app_name: str
) -> None:
    (desk.folder / "shop.py").write_text(BROKEN.format(name=app_name, url=url))
    broken = BROKEN_CLUSTER.replace("restart_limit = 2", "restart_limit = 4")
    wrong = "[workers.host]\nbroker = 'redis://no-such-host.invalid/0'\n"
    with Controlling(desk.folder, broken + wrong, "--log-level", "debug") as controller:
        names = [*REASONS, "worker-host-1"]
        until(lambda: len(controller.logged("member:abandoned")) == len(names))
    for name in names:
        ends = controller.of(name, "ended")
        assert [(line["level"], line["failures"]) for line in ends] == [
            *(("warning", 1), ("debug", 2), ("debug", 3))
        ]
        assert all(0 <= line["next_try"] < 10 for line in ends)
        starts = [line["level"] for line in controller.of(name, "start-requested")]
        assert starts == ["info", "debug", "debug", "debug"]
    (ended, *_) = controller.of("worker-import-1", "ended")
    assert f"ImportError: no module of mine ({desk.folder}/shop.py:" in ended["how"]
    (crashed,) = [json.loads(line) for line in controller.err.splitlines()]
    assert (crashed["message_type"], crashed["level"]) == ("celery5:process:crashed", "error")
    assert (crashed["worker"], crashed["why"]) == ("worker-crash-1", REASONS["worker-crash-1"])
    assert crashed["traceback"].endswith("ZeroDivisionError: division by zero\n")


PRINTING = """
import sys
from celery5 import App

print("imported")
app = App({name!r}, broker={url!r}, grace_period=5)


@app.task
def speak(text: str) -> None:
    print(text, end="")
    print(" on\\ntwo lines")
    sys.stderr.write("to stderr: " + text + "\\n")
"""


@pytest.mark.parametrize("form", ["json", "console"])
def test_each_line_that_a_member_prints_names_it(desk: Desk, url: str, app_name: str, form: str) -> None:
    (desk.folder / "shop.py").write_text(PRINTING.format(name=app_name, url=url))
    surroundings = {"CELERY5_LOG_FORMAT": form}

    @desk.app.task(name="shop.speak")
    def speak(text: str) -> None: ...

    with Controlling(desk.folder, "[workers.default]\n", env=surroundings) as controller:
        assert speak.delay("héllo").get(timeout=LIMIT) is None
        controller.tell("stop")
    out, err = controller.out, controller.err
    if form == "console":
        printed = [line for line in out.splitlines() if line.startswith("worker-default-1: ")]
        assert [line.removeprefix("worker-default-1: ") for line in printed] == [
            *("imported", "héllo on", "two lines")
        ]
        assert "worker-default-1: to stderr: héllo\n" in err
        return
    found = [json.loads(line) for line in (out + err).splitlines() if "process:printed" in line]
    assert [(line["worker"], line["stream"], line["line"]) for line in found] == [
        ("worker-default-1", "stdout", "imported"),
        ("worker-default-1", "stdout", "héllo on"),
        ("worker-default-1", "stdout", "two lines"),
        ("worker-default-1", "stderr", "to stderr: héllo"),
    ]


def test_a_second_signal_ends_all_at_once(desk: Desk) -> None:
    with Controlling(desk.folder, "[workers.default]\n", "--grace-period", "1000").up() as controller:
        members = controller.pids()
        desk.app.send_many([desk.app.signature("shop.stuck")])
        until((desk.folder / "stuck").exists)
        controller.process.terminate()
        until(lambda: controller.of("worker-default-1", "stop-requested"))
        controller.process.terminate()
        assert controller.ended().code == 128 + signal.SIGTERM
        until(lambda: not any(map(is_alive, members.values())))


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        (("start", "--burst"), "--burst is for workers"),
        (("start", "--cluster", "nowhere.toml"), "nowhere.toml"),
        (("start", "--development", "--cluster", "x"), "leave --cluster and --broker out"),
        (("status",), "no Controller of application"),
        (("restart",), "no Controller of application"),
    ],
)
def test_what_cannot_be_is_told_in_one_line(desk: Desk, words: tuple[str, ...], wrong: str) -> None:
    ended = celery5("-A", "shop", "controller", *words, cwd=desk.folder)
    assert ended.code != 0
    assert wrong in ended.error


def test_values_that_no_member_could_begin_with_are_told_before_any_is_started(desk: Desk) -> None:
    (desk.folder / "cluster.toml").write_text("[workers.default]\nenvironment = { CELERY5_LEASE = 'long' }\n")
    for words in (("controller", "start"), ("config", "check")):
        ended = celery5("-A", "shop", *words, cwd=desk.folder)
        assert (ended.code, ended.out) == (2, "")
        assert "workers.default.environment.CELERY5_LEASE is 'long': 'long' is not a duration" in ended.error


def test_a_member_that_cannot_live_is_given_up_loudly(desk: Desk) -> None:
    broken = "[workers.broken]\nenvironment = { PYTHONHOME = '/nowhere' }\n"
    cluster = f"restart_limit = 2\n[workers.default]\n{broken}"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    with Controlling(desk.folder, cluster, "--status-port", str(port)) as controller:
        until(lambda: controller.logged("member:abandoned"))
        status = controller.tell("status")
        assert status.code == 1
        assert "worker-broken-1: given up: it has died 2 times" in status.err
        assert not controller.logged("controller:started")
        restart = controller.tell("restart", "worker-default-1", "--wait", "60")
        assert (restart.code, restart.out.splitlines()[-1]) == (0, "done"), "the other one is not its matter"
        probe = celery5("health", "--port", str(port), cwd=desk.folder)
        assert probe.code == 1
        assert "worker-broken-1: given up" in probe.out + probe.err
        controller.process.terminate()
        assert controller.ended().code == 0


def test_the_number_of_workers_is_set_by_a_command_that_asks_first(desk: Desk) -> None:
    with Controlling(desk.folder, "[workers.default]\ncount = 2\n").up() as controller:
        unsure = controller.tell("scale", "--workers", "1")
        assert (unsure.code, "add --yes" in unsure.error) == (2, True)
        scaled = controller.tell("scale", "--workers", "1", "--yes", "--wait", "60")
        assert (scaled.code, scaled.out.splitlines()[-1]) == (0, "done")
        assert "worker-default: 1\n" in scaled.out
        until(lambda: list(controller.members()) == ["worker-default-1"])
