"""Remote hosts: members on another machine, by the user's own ssh and a systemd there.

That systemd is `systemctl_there.py`, since machines that test have none. Sshd, ssh and the members' processes are real.
"""

import json
import os
import signal
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
import trio

from celery5.errors import PlatformError
from celery5.platform import Beat, Ended, Member, MemberEvent, Platform, Ready, State, Stopping, Unknown
from celery5.protocol.cluster.remote_units import RemoteSetup, UnitCommand, get_unit_name, make_command_script
from celery5.services.controller.multi_host_platform import MultiHostPlatform
from celery5.services.controller.remote_host import RemoteHost
from tests.trio.cluster import sshd
from tests.trio.cluster.sshd import OtherHost

pytestmark = pytest.mark.skipif(bool(sshd.why_not()), reason=sshd.why_not())

MEMBER = Path(__file__).with_name("member_there.py")
NAME = "worker-default-1@web2"
HARD = 'it\'s "$HOME" `id` \\ %h; $(touch /nowhere)\nnext = ü'


@pytest.fixture
def host(tmp_path: Path) -> Iterator[OtherHost]:
    """Another machine."""
    with sshd.other_host(tmp_path) as one:
        yield one


class Heard:
    """What a platform has said, to be waited for."""

    def __init__(self) -> None:
        self.words: list[MemberEvent] = []

    def __call__(self, word: MemberEvent) -> None:
        self.words.append(word)

    async def until(self, fits: Callable[[MemberEvent], bool], what: str, since: int = 0) -> MemberEvent:
        with trio.move_on_after(30):
            while True:
                for word in self.words[since:]:
                    if fits(word):
                        return word
                await trio.sleep(0.02)
        raise AssertionError(f"not heard: {what}; heard: {self.words[-5:]}")

    async def of(self, kind: type[MemberEvent], since: int = 0) -> MemberEvent:
        return await self.until(lambda word: isinstance(word, kind), str(kind), since)

    async def status(self, begins: str, since: int = 0) -> None:
        await self.until(lambda w: isinstance(w, Beat) and w.status.startswith(begins), begins, since)

    async def unknown(self, begins: str, since: int = 0) -> None:
        await self.until(
            lambda w: isinstance(w, Unknown) and w.why.startswith(begins), f"unknown: {begins}", since
        )


def command_lines() -> Iterator[bytes]:
    """Of all processes of this machine, as anybody sees them."""
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            yield (entry / "cmdline").read_bytes()


def place(host: OtherHost, **changed: object) -> RemoteSetup:
    command = f"python3 -IS {MEMBER}"
    given = {"app": "shop", "command": command, "directory": str(host.home), "hung_after": 30.0, **changed}
    return RemoteSetup(**given)  # type: ignore[arg-type]


def member(name: str = NAME, *more: str, **environment: str) -> Member:
    arguments = ("worker", "start", "--name", name, *more)
    return Member(name=name, kind="worker", host="web2", arguments=arguments, environment=environment)


@asynccontextmanager
async def platform(host: OtherHost, heard: Heard, **changed: object) -> AsyncGenerator[RemoteHost]:
    """One that lives for as long."""
    one = RemoteHost(name="web2", setup=place(host, **changed), connection=host.line(), interval=0.1)
    async with trio.open_nursery() as nursery:
        await nursery.start(one.live, heard)
        yield one
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def cut_off(host: OtherHost, heard: Heard) -> AsyncGenerator[RemoteHost]:
    """One whose member was ready there before the host went away."""
    async with platform(host, heard) as one:
        await one.start(member())
        await heard.of(Ready)
        since = len(heard.words)
        host.down()
        await heard.unknown("", since)
        yield one


async def test_a_member_starts_speaks_reloads_and_stops_there(host: OtherHost) -> None:
    heard = Heard()
    async with platform(host, heard) as one:
        await one.start(member())
        await heard.of(Ready)
        await heard.status("at work")
        await one.reload(NAME)
        await heard.status("read again")
        await one.stop(NAME)
        ended = await heard.of(Ended)
    assert ended == Ended(NAME, "exit code 0", 0)
    order = [type(word) for word in heard.words if not isinstance(word, Beat | Unknown | Stopping)]
    assert order == [Ready, Ended]


async def test_arguments_and_environment_arrive_as_they_are_and_are_on_no_command_line(
    host: OtherHost,
) -> None:
    heard = Heard()
    async with platform(host, heard, environment={"CELERY5_BROKER": "theirs", "HARD": "not this"}) as one:
        await one.start(member(NAME, "--queues", HARD, HARD=HARD, CELERY5_CONTROLLER_EPOCH="7"))
        await heard.of(Ready)
        told = json.loads((host.home / f"{NAME}.json").read_text())
        unit = get_unit_name("shop", NAME)
        units = host.runtime / "systemd" / "user" / unit
        secrets = host.runtime / "celery5" / f"{unit}.env"
        assert "HARD" not in units.read_text()
        assert secrets.stat().st_mode & 0o777 == 0o600
        assert secrets.parent.stat().st_mode & 0o777 == 0o700
    assert told["arguments"] == ["worker", "start", "--name", NAME, "--queues", HARD]
    assert told["environment"]["HARD"] == HARD
    assert told["environment"]["CELERY5_CONTROLLER_EPOCH"] == "7"
    assert told["environment"]["CELERY5_BROKER"] == "theirs"


async def test_what_goes_over_is_never_on_a_command_line(host: OtherHost) -> None:
    (host.runtime / "slow").write_text("0.3")
    seen: set[bytes] = set()

    async def watch() -> None:
        while True:
            seen.update(command_lines())
            await trio.sleep(0.01)

    heard = Heard()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch)
        async with platform(host, heard) as one:
            await one.start(member(SECRET="a-very-secret-password"))
            await heard.of(Ready)
        nursery.cancel_scope.cancel()
    assert any(b"systemctl" in line for line in seen)
    assert not [line for line in seen if b"a-very-secret-password" in line]


async def test_a_member_that_dies_is_told_of_with_its_signal(host: OtherHost) -> None:
    heard = Heard()
    async with platform(host, heard) as one:
        await one.start(member())
        await heard.of(Ready)
        pid = int((host.home / f"{NAME}.pids").read_text())
        assert one.pid_of(NAME) == pid
        os.kill(pid, signal.SIGKILL)
        assert await heard.of(Ended) == Ended(NAME, "signal 9", -9)
        await one.start(member())
        before = len(heard.words)
        await heard.of(Ready, before)
        await one.kill(NAME)
        assert await heard.of(Ended, before) == Ended(NAME, "signal 9", -9)


async def test_a_hung_member_is_ended_by_the_watchdog_of_its_host(host: OtherHost) -> None:
    (host.home / f"{NAME}.hang").touch()
    heard = Heard()
    async with platform(host, heard, hung_after=1.0) as one:
        await one.start(member())
        ended = await heard.of(Ended)
    assert ended == Ended(NAME, "hung: its event loop said nothing for too long", -9)


async def test_one_that_cannot_start_says_why(host: OtherHost) -> None:
    heard = Heard()
    async with platform(host, heard) as one:
        await one.start(member(NAME, "--fail"))
        assert await heard.of(Ended) == Ended(NAME, "exit code 78: boot step 'db' crashed", 78)
    heard = Heard()
    async with platform(host, heard, command="celery5-that-is-not-there") as one:
        await one.start(member())
        ended = await heard.of(Ended)
    assert ended == Ended(NAME, "exit code 127: celery5 is not found there, say `command` of the host", 127)


async def test_a_host_that_logs_its_users_off_starts_nothing_and_says_what_to_do(host: OtherHost) -> None:
    (host.runtime / "no-linger").touch()
    heard = Heard()
    async with platform(host, heard) as one:
        await one.start(member())
        ended = await heard.of(Ended)
    assert isinstance(ended, Ended)
    assert ended.how.endswith("run `loginctl enable-linger` there")
    assert not host.units()


async def test_members_outlive_the_connection_are_unknown_meanwhile_and_known_again(host: OtherHost) -> None:
    heard = Heard()
    async with cut_off(host, heard):
        await heard.unknown("host web2 (web2) is unreachable: ")
        since = len(heard.words)
        await heard.of(Unknown, since)  # and again: a Foreman that hears nothing would take them for hung
        host.up()
        await heard.status("at work", since)
    assert len((host.home / f"{NAME}.pids").read_text().split()) == 1
    assert not [word for word in heard.words if isinstance(word, Ended)]
    assert len([word for word in heard.words if isinstance(word, Ready)]) == 1


async def test_what_is_asked_of_a_host_that_is_away_is_done_when_it_is_back(host: OtherHost) -> None:
    heard, other = Heard(), "worker-default-2@web2"
    async with cut_off(host, heard) as one:
        await one.stop(NAME)
        await one.start(member(other))
        await heard.until(lambda w: isinstance(w, Unknown) and w.name == other, "unknown")
        assert not [word for word in heard.words if isinstance(word, Ended)]
        host.up()
        assert await heard.of(Ended) == Ended(NAME, "exit code 0", 0)
        await heard.until(lambda w: w == Ready(other), "the other is ready")


async def test_member_of_an_unreachable_host_is_killed_when_it_is_back(
    host: OtherHost,
) -> None:
    heard = Heard()
    async with cut_off(host, heard) as one:
        await one.kill(NAME)
        ended = await heard.of(Ended)
        assert isinstance(ended, Ended)
        assert ended.how.startswith("unknown: host web2 is unreachable")
        await one.start(member())
        since = len(heard.words)
        host.up()
        await heard.of(Ready, since)
    assert len((host.home / f"{NAME}.pids").read_text().split()) == 2


async def test_stop_request_is_repeated_when_the_host_is_back(
    host: OtherHost,
) -> None:
    heard, left = Heard(), host.home / f"{NAME}.left"
    async with cut_off(host, heard) as one:
        await one.stop(NAME)
        await one.kill(NAME)  # who ends all has waited long enough
        await heard.of(Ended)
        host.up()
        with trio.fail_after(60):
            while not left.exists():
                await trio.sleep(0.02)


async def test_member_that_is_stopped_before_its_start_never_starts(host: OtherHost) -> None:
    host.down()
    heard = Heard()
    async with platform(host, heard) as one:
        await one.start(member())
        await heard.unknown("")
        await one.stop(NAME)
        assert await heard.of(Ended) == Ended(NAME, "had not been started", 0)
    host.up()


async def test_another_controller_finds_what_runs_and_does_not_start_it_again(host: OtherHost) -> None:
    heard = Heard()
    async with platform(host, heard) as one:
        assert await one.living() == {}
        await one.start(member())
        await heard.of(Ready)
    heard = Heard()
    async with platform(host, heard) as another:
        assert await another.living() == {NAME: "up"}
        await heard.status("at work")
        await another.start(member())  # as one does who could not ask, for the host was away
        since = len(heard.words)
        await heard.of(Ready, since)
        assert len((host.home / f"{NAME}.pids").read_text().split()) == 1
        await another.stop(NAME)
        await heard.of(Ended)
    async with platform(host, Heard()) as third:
        assert await third.living() == {}


async def test_other_applications_on_the_same_host_are_let_be(host: OtherHost) -> None:
    heard = Heard()
    async with platform(host, heard) as one:
        await one.start(member())
        await heard.of(Ready)
        async with platform(host, Heard(), app="shop-2") as another:
            assert await another.living() == {}


async def test_a_host_without_a_user_manager_is_away_and_says_so(host: OtherHost) -> None:
    (host.runtime / "broken").touch()
    heard = Heard()
    async with platform(host, heard) as one:
        await one.start(member())
        await heard.unknown("host web2 (web2) reports an error: Failed to connect to bus: No medium found")
        (host.runtime / "broken").unlink()
        await heard.of(Ready)


async def test_members_are_divided_among_here_and_there(host: OtherHost, tmp_path: Path) -> None:
    class Here(Platform):
        """A platform that notes what it is asked for."""

        def __init__(self) -> None:
            self.asked: list[str] = []

        async def live(
            self, _report: object, /, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
        ) -> None:
            task_status.started()
            await trio.sleep_forever()

        async def start(self, member: Member) -> None:
            self.asked.append(f"start {member.name}")

        async def stop(self, name: str) -> None:
            self.asked.append(f"stop {name}")

        async def kill(self, name: str) -> None:
            self.asked.append(f"kill {name}")

        async def reload(self, name: str) -> None:
            self.asked.append(f"reload {name}")

        async def living(self) -> dict[str, State]:
            return {"router-default-1": "up"}

    here, heard = Here(), Heard()
    there = RemoteHost(name="web2", setup=place(host), connection=host.line(), interval=0.1)
    both = MultiHostPlatform(local=here, remote={"web2": there})
    local = Member(name="worker-default-1", kind="worker", arguments=("worker", "start"))
    lost = Member(name="worker-default-1@web3", kind="worker", host="web3", arguments=("worker", "start"))
    async with trio.open_nursery() as nursery:
        await nursery.start(both.live, heard)
        assert await both.living() == {"router-default-1": "up"}
        await both.start(local)
        await both.start(member())
        with pytest.raises(PlatformError, match="no host 'web3' here: known are web2"):
            await both.start(lost)
        await heard.until(lambda w: w == Ready(NAME), "ready")
        await both.reload(local.name)
        await both.stop(local.name)
        await both.kill("router-default-1")
        await both.stop(NAME)
        await heard.of(Ended)
        nursery.cancel_scope.cancel()
    names = [f"start {local.name}", f"reload {local.name}", f"stop {local.name}", "kill router-default-1"]
    assert here.asked == names


def test_a_script_is_one_group() -> None:
    said = make_command_script(
        RemoteSetup(app="shop"), [UnitCommand(verb="start", name=NAME, member=member())]
    )
    size, _, text = said.partition(b"\n")
    assert int(size) == len(text)
    assert text.startswith(b"{\n")
    assert text.endswith(b"}")
