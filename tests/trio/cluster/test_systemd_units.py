"""Systemd Units: members as services of systemd: a real dbus-daemon, and a peer that says what a real systemd has
said."""

import os
import stat
import sys
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import trio

from celery5.errors import PlatformError
from celery5.platform import Platform
from celery5.protocol.cluster.description import Cluster
from celery5.protocol.cluster.members import (
    Beat,
    Ended,
    Member,
    MemberEvent,
    Ready,
    Stopping,
    format_failure_status,
)
from celery5.protocol.cluster.units import SLICE
from celery5.services.controller import systemd_bus, systemd_units
from celery5.services.controller.systemd_units import SystemdUnits
from tests.trio.cluster.scripted_systemd import ScriptedSystemd, dbus_daemon, scripted_systemd

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="systemd is Linux only")

LIMIT = 30.0
READY = "ready; 0 attempts ended, 0 jobs dead"


@pytest.fixture
def bus() -> Iterator[str]:
    with dbus_daemon() as path:
        yield path


@dataclass
class Scene:
    """A platform, the systemd that it talks to, and what it has said."""

    platform: SystemdUnits
    systemd: ScriptedSystemd
    words: list[MemberEvent]
    folder: Path

    async def until(self, holds: Callable[[], bool]) -> None:
        with trio.fail_after(LIMIT):
            while not holds():
                await trio.sleep(0.005)

    async def heard(self, *words: MemberEvent) -> None:
        """Wait until it has said just these, beats of nothing aside; then forget them."""

        def said() -> list[MemberEvent]:
            return [word for word in self.words if not (isinstance(word, Beat) and not word.status)]

        await self.until(lambda: len(said()) >= len(words))
        assert said() == list(words)
        self.words.clear()

    async def up(self, name: str = "worker-a-1") -> None:
        await self.platform.start(member(name))
        await self.heard(Ready(name), Beat(name, READY))


def member(name: str = "worker-a-1", **environment: str) -> Member:
    return Member(
        name=name,
        kind="worker",
        arguments=("worker", "start", "--name", name, "--queues", "$x"),
        environment={"CELERY5_CONTROLLER_EPOCH": "3", **environment},
        stop_after=20.0,
    )


def platform_on(bus: str, folder: Path, *, hung_after: float = 60.0, **environ: str) -> SystemdUnits:
    return SystemdUnits(
        cluster=Cluster(hung_after=hung_after),
        app="shop",
        bus=bus,
        environ={"RUNTIME_DIRECTORY": str(folder / "run"), "PATH": "/bin", **environ},
    )


@asynccontextmanager
async def scene_of(bus: str, folder: Path, **said: object) -> AsyncGenerator[Scene, None]:
    words: list[MemberEvent] = []
    platform = platform_on(bus, folder, **said)  # type: ignore[arg-type]
    async with scripted_systemd(bus) as systemd, trio.open_nursery() as nursery:
        with trio.fail_after(LIMIT):
            await nursery.start(platform.live, words.append)
        yield Scene(platform, systemd, words, folder)
        nursery.cancel_scope.cancel()


async def test_it_is_a_platform(bus: str, tmp_path: Path) -> None:
    assert isinstance(platform_on(bus, tmp_path), Platform)


async def test_a_member_is_ready_when_its_unit_is_and_says_how_it_does(bus: str, tmp_path: Path) -> None:
    async with scene_of(bus, tmp_path) as scene:
        await scene.platform.start(member())
        await scene.heard(Ready("worker-a-1"), Beat("worker-a-1", READY))
        await scene.systemd.change("celery5-shop-worker-a-1.service", StatusText=("s", "12 jobs"))
        await scene.heard(Beat("worker-a-1", "12 jobs"))
        assert await scene.platform.living() == {"worker-a-1": "up"}


async def test_a_member_that_ends_with_an_error_has_reported_it_in_its_status(
    bus: str, tmp_path: Path
) -> None:
    async with scene_of(bus, tmp_path) as scene:
        await scene.platform.start(member())
        await scene.heard(Ready("worker-a-1"), Beat("worker-a-1", READY))
        unit = "celery5-shop-worker-a-1.service"
        await scene.systemd.change(unit, MainPID=("u", 4711))
        await scene.systemd.change(unit, StatusText=("s", format_failure_status("boot step 'db' crashed")))
        await scene.until(lambda: scene.platform.pid_of("worker-a-1") == 4711)
        await scene.systemd.play("killed", unit)
        how = "ended by SIGKILL: boot step 'db' crashed"
        await scene.heard(Stopping("worker-a-1"), Ended("worker-a-1", how=how, code=-9))
        assert scene.platform.pid_of("worker-a-1") is None


async def test_a_member_is_a_transient_unit_with_its_command_its_limits_and_hardened(
    bus: str, tmp_path: Path
) -> None:
    async with scene_of(bus, tmp_path, hung_after=7.0) as scene:
        await scene.up()
        ((unit, mode, properties, more),) = [
            body for method, body in scene.systemd.asked if method == "StartTransientUnit"
        ]
        told = {name: value for name, (_, value) in properties}
        assert (unit, mode, more) == ("celery5-shop-worker-a-1.service", "fail", [])
        ((program, words, ignored),) = told["ExecStart"]
        assert (program, ignored) == (sys.executable, False)
        assert words == [sys.executable, "-m", "celery5", *member().arguments[:-1], "$$x"]
        assert (told["Type"], told["NotifyAccess"], told["Restart"]) == ("notify", "main", "no")
        assert (told["KillMode"], told["KillSignal"], told["Slice"]) == ("mixed", 15, SLICE)
        assert told["CollectMode"] == "inactive-or-failed", "what has ended can be started again"
        assert told["WatchdogUSec"] == 7_700_000
        assert told["TimeoutStopUSec"] > 20_000_000, "the Foreman's limit comes first"
        assert told["WorkingDirectory"] == os.getcwd()
        assert (told["NoNewPrivileges"], told["ProtectSystem"]) == (True, "full")


async def test_environment_of_a_unit_is_in_a_file_not_in_its_properties(bus: str, tmp_path: Path) -> None:
    secret = 'redis://:pass"$`\\word@h\nx'
    async with scene_of(bus, tmp_path, CELERY5_BROKER=secret, NOTIFY_SOCKET="/its/own") as scene:
        await scene.up()
        assert "pass" not in repr(scene.systemd.asked)
        (file,) = (tmp_path / "run").iterdir()
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
        text = file.read_text()
        assert 'CELERY5_BROKER="redis://:pass\\"\\$\\`\\\\word@h\nx"\n' in text
        assert 'CELERY5_CONTROLLER_EPOCH="3"\n' in text
        assert "NOTIFY_SOCKET" not in text
        await scene.platform.stop("worker-a-1")
        await scene.until(lambda: not file.exists())


async def test_late_notice_of_an_end_removes_nothing_of_the_next(bus: str, tmp_path: Path) -> None:
    async with scene_of(bus, tmp_path) as first:
        await first.up()
        second = platform_on(bus, tmp_path)
        async with trio.open_nursery() as nursery:
            await nursery.start(second.live, lambda _word: None)
            assert await second.living() == {
                "worker-a-1": "up"
            }  # it leads by now, and the first does not know
            (old,) = (tmp_path / "run").iterdir()
            known = first.platform._units["worker-a-1"]
            await second.kill("worker-a-1")
            await first.until(lambda: not old.exists())
            await second.start(member())
            (new,) = (tmp_path / "run").iterdir()
            assert new != old
            first.platform._units["worker-a-1"] = known  # as if it had been frozen until now
            first.platform._remove_unit("worker-a-1")
            assert new.exists()
            await second.stop("worker-a-1")
            await first.until(lambda: not new.exists())
            nursery.cancel_scope.cancel()


async def test_a_member_that_is_asked_to_stop_is_stopping_and_ends_well(bus: str, tmp_path: Path) -> None:
    async with scene_of(bus, tmp_path) as scene:
        await scene.up()
        await scene.platform.stop("worker-a-1")
        await scene.heard(Stopping("worker-a-1"), Ended("worker-a-1", how="ended as it was asked to", code=0))
        assert await scene.platform.living() == {}
        await scene.platform.stop("worker-a-1")
        await scene.platform.kill("worker-a-1")
        assert [method for method, _ in scene.systemd.asked].count("StopUnit") == 1, "it does not run"


async def test_a_member_that_is_killed_has_ended_and_can_be_started_again(bus: str, tmp_path: Path) -> None:
    async with scene_of(bus, tmp_path) as scene:
        await scene.up()
        await scene.platform.kill("worker-a-1")
        assert ("KillUnit", ("celery5-shop-worker-a-1.service", "main", 9)) in scene.systemd.asked
        await scene.heard(Stopping("worker-a-1"), Ended("worker-a-1", how="ended by SIGKILL", code=-9))
        await scene.up()


async def test_a_member_that_hangs_is_ended_by_systemd_which_says_so(bus: str, tmp_path: Path) -> None:
    async with scene_of(bus, tmp_path) as scene:
        await scene.up()
        await scene.systemd.play("hung", "celery5-shop-worker-a-1.service")
        how = "its event loop hung: systemd killed it"
        await scene.heard(Stopping("worker-a-1"), Ended("worker-a-1", how=how, code=-9))


async def test_a_member_that_cannot_start_has_ended_and_why(bus: str, tmp_path: Path) -> None:
    async with scene_of(bus, tmp_path) as scene:
        await scene.platform.start(member("worker-bad-1"))
        await scene.heard(
            Stopping("worker-bad-1"), Ended("worker-bad-1", how="ended with exit code 2", code=2)
        )
        await scene.platform.start(member("worker-ghost-1"))
        await scene.until(lambda: len(scene.words) == 2)
        ended = scene.words[-1]
        assert isinstance(ended, Ended)
        assert (ended.code, "systemd could not start it" in ended.how) == (203, True)


async def test_reloading_is_sighup_for_the_process_itself(bus: str, tmp_path: Path) -> None:
    async with scene_of(bus, tmp_path) as scene:
        await scene.up()
        await scene.platform.reload("worker-a-1")
        assert scene.systemd.asked[-1] == ("KillUnit", ("celery5-shop-worker-a-1.service", "main", 1))


async def test_each_beat_of_the_watchdog_is_told_once(bus: str, tmp_path: Path) -> None:
    async with scene_of(bus, tmp_path, hung_after=0.1) as scene:
        await scene.up()
        for beat in (1000, 2000):
            scene.words.clear()
            scene.systemd.beats = beat
            await scene.until(lambda: scene.words != [])
            looks = len(scene.systemd.asked)
            await scene.until(lambda looks=looks: len(scene.systemd.asked) > looks + 3)  # type: ignore[misc]
            assert scene.words == [Beat("worker-a-1")]


async def test_a_controller_that_takes_over_finds_what_runs_and_goes_on_with_it(
    bus: str, tmp_path: Path
) -> None:
    async with scripted_systemd(bus) as systemd:
        await systemd_member(systemd)
        words: list[MemberEvent] = []
        platform = platform_on(bus, tmp_path)
        async with trio.open_nursery() as nursery:
            await nursery.start(platform.live, words.append)
            assert await platform.living() == {"worker-a-1": "up"}
            await platform.kill("worker-a-1")
            with trio.fail_after(LIMIT):
                while not words or not isinstance(words[-1], Ended):
                    await trio.sleep(0.005)
            assert words[-1] == Ended("worker-a-1", how="ended by SIGKILL", code=-9)
            nursery.cancel_scope.cancel()


async def systemd_member(systemd: ScriptedSystemd) -> None:
    """A member that another Controller has started; another cluster's, and the user's own, beside it."""
    for unit in ("celery5-shop-worker-a-1.service", "celery5-shop\\x2dtwo-worker-a-1.service", "my.service"):
        await systemd.play("start", unit)


async def test_members_go_on_when_the_platform_ends(bus: str, tmp_path: Path) -> None:
    async with scripted_systemd(bus) as systemd:
        platform = platform_on(bus, tmp_path)
        async with trio.open_nursery() as nursery:
            await nursery.start(platform.live, lambda _word: None)
            await platform.start(member())
            nursery.cancel_scope.cancel()
        assert platform.outlives("worker-a-1")
        assert {method for method, _ in systemd.asked} & {"StopUnit", "KillUnit"} == set()


async def test_standby_reports_no_members_before_it_leads(bus: str, tmp_path: Path) -> None:
    async with scene_of(bus, tmp_path / "first") as first:
        words: list[MemberEvent] = []
        second = platform_on(bus, tmp_path / "second")
        async with trio.open_nursery() as nursery:
            await nursery.start(second.live, words.append)
            await first.up()
            await first.platform.kill("worker-a-1")
            await first.heard(Stopping("worker-a-1"), Ended("worker-a-1", how="ended by SIGKILL", code=-9))
            await first.up()
            assert words == []
            assert await second.living() == {"worker-a-1": "up"}
            await first.platform.stop("worker-a-1")
            await first.until(lambda: any(isinstance(word, Ended) for word in words))
            nursery.cancel_scope.cancel()


async def test_when_systemd_begins_anew_what_happened_meanwhile_is_told(bus: str, tmp_path: Path) -> None:
    words: list[MemberEvent] = []
    platform = platform_on(bus, tmp_path)
    async with trio.open_nursery() as nursery:
        async with scripted_systemd(bus) as systemd:
            await nursery.start(platform.live, words.append)
            await platform.start(member("worker-a-1"))
            await platform.start(member("worker-a-2"))
            with trio.fail_after(LIMIT):
                while sum(isinstance(word, Ready) for word in words) < 2:
                    await trio.sleep(0.005)
        words.clear()
        async with scripted_systemd(bus) as systemd:
            await systemd.play("start", "celery5-shop-worker-a-2.service")
            with trio.fail_after(LIMIT):
                while not any(isinstance(word, Ended) for word in words):
                    await trio.sleep(0.005)
            assert [word for word in words if not isinstance(word, Beat)] == [
                Ended("worker-a-1", how="ended")
            ]
            assert await platform.living() == {"worker-a-2": "up"}
            nursery.cancel_scope.cancel()


async def test_a_start_that_systemd_refuses_is_told_in_one_line(
    bus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(systemd_units, "START_ATTEMPTS", 2)
    async with scene_of(bus, tmp_path) as scene:
        scene.systemd.units["celery5-shop-worker-a-1.service"] = {}
        with pytest.raises(
            PlatformError, match=r"worker-a-1: systemd refuses StartTransientUnit: .* already loaded"
        ):
            await scene.platform.start(member())
        assert not list((tmp_path / "run").iterdir())


async def test_a_systemd_that_does_not_answer_holds_nobody_up(
    bus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(systemd_bus, "REPLY_LIMIT", 0.2)
    async with scene_of(bus, tmp_path) as scene:
        scene.systemd.deaf.add("StartTransientUnit")
        with pytest.raises(PlatformError, match="has not answered to StartTransientUnit"):
            await scene.platform.start(member())


@pytest.mark.parametrize("there", [True, False])
async def test_without_a_systemd_on_the_bus_it_does_not_come_up(
    bus: str, tmp_path: Path, there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(systemd_bus, "REPLY_LIMIT", 5.0)
    platform = platform_on(bus if there else f"{bus}-none", tmp_path)
    with trio.fail_after(LIMIT), pytest.raises(PlatformError, match="bus"):
        await platform.live(lambda _word: None)
