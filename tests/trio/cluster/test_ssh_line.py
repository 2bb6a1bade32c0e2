"""One host over the user's own ssh: what it says of trouble, and that nothing is left running."""

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trio

from celery5.errors import PlatformError
from celery5.protocol.cluster.remote_units import frame_script
from celery5.services.controller.ssh_line import HostUnreachable, SSHConnection
from tests.trio.cluster import sshd
from tests.trio.cluster.sshd import OtherHost

pytestmark = pytest.mark.skipif(bool(sshd.why_not()), reason=sshd.why_not())


@pytest.fixture
def host(tmp_path: Path) -> Iterator[OtherHost]:
    """Another machine."""
    with sshd.other_host(tmp_path) as one:
        yield one


async def until(fits: Callable[[], object]) -> None:
    with trio.fail_after(30):
        while not fits():
            await trio.sleep(0.02)


async def connect(line: SSHConnection) -> None:
    """And hear it out."""
    async with line.stream_lines(frame_script("true\n")) as lines:
        while await lines.read_line() is not None:
            pass


async def test_a_host_key_that_is_another_or_not_known_is_told_of_in_one_line(host: OtherHost) -> None:
    for key, what in (
        (
            (host.folder / "user.pub").read_text(),
            "its key differs from the one in known_hosts: find out why first",
        ),
        ("", "its key is not in known_hosts: log in once by hand, and compare the key"),
    ):
        sshd.known(host.folder, host.port, key)
        with pytest.raises(HostUnreachable) as caught:
            await connect(host.line())
        assert str(caught.value) == f"host web2 (web2): {what}"


async def test_refused_login_and_missing_ssh_are_one_line_errors(
    host: OtherHost,
) -> None:
    (host.folder / "user.pub").write_text("")
    with pytest.raises(HostUnreachable, match="may not log in without a password"):
        await connect(host.line())
    nothing = SSHConnection(name="web2", destination="web2", program=("ssh-that-is-not-there",))
    with pytest.raises(PlatformError, match="install an OpenSSH client"):
        await connect(nothing)


def left_behind() -> Path:
    """What a Controller leaves that is killed."""
    left = Path(tempfile.mkdtemp(prefix="celery5-ssh-"))
    (left / "lock").write_text("held\n")
    return left


async def test_what_a_controller_that_was_killed_has_left_is_taken_away(host: OtherHost) -> None:
    left = left_behind()
    with pytest.raises(PlatformError):
        await connect(host.line())
    assert left.name not in os.listdir(left.parent)


async def test_a_cancelled_call_leaves_nothing_running_at_either_end(host: OtherHost) -> None:
    line = host.line()
    async with line.stream_lines(frame_script("while :; do echo celery5:seen; sleep 0.1; done\n")) as lines:
        await lines.read_line()
        with trio.move_on_after(20) as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(line.run_script, frame_script("exec sleep 987.654\n"))
                await until(lambda: host.processes("sleep 987.654"))
                nursery.cancel_scope.cancel()
        assert not scope.cancelled_caught
        await until(lambda: not host.processes("sleep 987.654"))
    await until(lambda: not host.processes(str(host.folder / "ssh_config")))
    await until(lambda: not host.processes("echo celery5:seen"))


async def test_half_a_script_does_nothing(host: OtherHost) -> None:
    said = frame_script("touch half\nsleep 5\n")
    size, _, text = said.partition(b"\n")
    cut = b"%d\n%s" % (int(size), text[:-4])
    line = host.line()
    async with line.stream_lines(frame_script("while :; do echo celery5:seen; sleep 0.1; done\n")) as lines:
        await lines.read_line()
        with trio.move_on_after(1):
            await line.run_script(cut)
    assert not (host.home / "half").exists()


async def test_a_call_that_takes_too_long_is_given_up_at_both_ends(
    host: OtherHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("celery5.services.controller.ssh_line.CALL_LIMIT", 0.5)
    line = host.line()
    async with line.stream_lines(frame_script("while :; do echo celery5:seen; sleep 0.1; done\n")) as lines:
        await lines.read_line()
        with pytest.raises(PlatformError, match=r"host web2 has not finished within 0\.5 seconds"):
            await line.run_script(frame_script("sleep 987.321\n"))
        await until(lambda: not host.processes("sleep 987.321"))
