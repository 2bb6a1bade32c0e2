"""Throw-away Machine: a real systemd as the first process of a machine that is nothing but namespaces.

DANGER: an init system that boots empties /tmp. So it is booted only in its own root, with its own /tmp, and only
after both sides have seen that canaries which were written inside are not to be seen outside. throwaway_machine.sh
makes the root; only units that it names exist there, and nothing that tidies up. It is run when it is asked for alone.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

_HERE = Path(__file__).parent
_CHECKOUT = _HERE.parents[1]
_GROUPS = (Path("/sys/fs/cgroup/unified"), Path("/sys/fs/cgroup"))
_APART = "unshare --mount --propagation private --pid --fork --kill-child --ipc --uts --net --cgroup"
_INSIDE = ("-m", "-p", "-i", "-u", "-n", "-C")
_CANARIES = ("tmp", "var/tmp", "run", "etc", "usr", "root", "opt")
_NEEDED = ("unshare", "nsenter", "setpriv", "pivot_root", "dbus-daemon", "redis-server")
_SYSTEMD = "/usr/lib/systemd/systemd"
_TARGET = "throwaway.target"
_FIRST = f"{_SYSTEMD} --system --unit={_TARGET} --show-status=no --log-target=journal"
_UNITS = {
    _TARGET: "[Unit]\nRequires=basic.target\nAfter=basic.target\nWants=dbus.socket systemd-journald.service\n",
    "redis-server.service": (
        "[Service]\nExecStart=/usr/bin/env redis-server --port 0 --unixsocket /run/redis.sock --save ''\n"
    ),
}


class Machine:
    """One machine that has booted."""

    def __init__(self, init: int) -> None:
        self._init = init

    def run(self, script: str, *, limit: float = 60.0, check: bool = True) -> str:
        """What a shell inside says on stdout. Fails the test when the script fails, unless `check` is False."""
        done = subprocess.run(
            ["nsenter", "-t", str(self._init), *_INSIDE, *_CLEAN, "sh", "-euc", script],
            capture_output=True,
            text=True,
            timeout=limit,
            check=False,
        )
        assert not check or done.returncode == 0, f"{script}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def until(self, script: str, *, within: float = 60.0) -> None:
        """Run it until it does not fail."""
        limit = time.monotonic() + within
        while self.run(f"{script} >/dev/null 2>&1 && echo yes || true") != "yes":
            assert time.monotonic() < limit, f"not so after {within} s: {script}\n{self.journal()}"
            time.sleep(0.2)

    def journal(self) -> str:
        """The last of what was logged."""
        return self.run("journalctl --no-pager -n 60 -o short", check=False)


@contextmanager
def throwaway_machine() -> Iterator[Machine]:
    """A machine whose systemd has booted, with the units of systemd/ and a Redis; it is gone with the block."""
    lacking = [program for program in _NEEDED if not shutil.which(program)]
    if os.geteuid() != 0 or lacking or not Path(_SYSTEMD).exists():
        pytest.skip(f"a throw-away machine wants root, systemd, and {', '.join(lacking) or 'no more'}")
    token = uuid.uuid4().hex
    with tempfile.TemporaryDirectory(prefix="m-", dir="/tmp") as folder, _group(token) as group:
        space, units = Path(folder, "space"), Path(folder, "units")
        space.mkdir()
        units.mkdir()
        for path in (_CHECKOUT / "systemd").iterdir():
            shutil.copy(path, units)
        for name, text in _UNITS.items():
            (units / name).write_text(text)
        machine = [
            "sh",
            str(_HERE / "throwaway_machine.sh"),
            str(space),
            token,
            str(units),
            str(_CHECKOUT),
            _FIRST,
        ]
        script = f'echo 0 > "{group}/cgroup.procs"; exec {_APART} "$@"'
        with subprocess.Popen(
            ["sh", "-euc", script, "sh", *machine],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process:
            try:
                _let_it_boot(process, space, token)
                children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
                one = Machine(int(children[0]))
                one.until(f"systemctl is-active {_TARGET}")
                yield one
            finally:
                process.kill()  # and by --kill-child all that is inside


def _let_it_boot(process: "subprocess.Popen[str]", space: Path, token: str) -> None:
    """Look for the canaries outside; it waits for our word."""
    assert process.stdin is not None
    assert process.stdout is not None
    said = process.stdout.readline().strip()
    assert said == "canaries are out", said + process.stdout.read()
    seen = [canary for canary in _CANARIES if Path("/", canary, token).exists()]
    assert not seen, f"what is written inside is seen outside, in {seen}: nothing is booted"
    assert not list(space.iterdir()), "its root is seen outside: nothing is booted"
    process.stdin.write("boot\n")
    process.stdin.flush()


@contextmanager
def _group(token: str) -> Iterator[Path]:
    """A control group of its own, which is the root of its control groups."""
    root = next(candidate for candidate in _GROUPS if (candidate / "cgroup.procs").exists())
    group = root / f"celery5-test-{token[:8]}"
    group.mkdir()
    try:
        yield group
    finally:
        limit = time.monotonic() + 10
        while group.exists() and time.monotonic() < limit:
            for folder in sorted((Path(path) for path, _, _ in os.walk(group)), reverse=True):
                with suppress(OSError):  # its processes are about to end
                    folder.rmdir()
            time.sleep(0.05)


_CLEAN = ("env", "-i", f"PATH={Path(sys.executable).parent}:/usr/bin:/bin:/usr/sbin:/sbin", "LANG=C.UTF-8")
