"""Journal Daemon: a real systemd-journald that lives in its own folder, and journalctl to read what it has kept.

It runs in its own mount namespace, in which its folder is /run and its configuration the one here: neither the
journal of this machine nor anything else sees it. Where that cannot be had there is none.
"""

import json
import shutil
import socket
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.redis.commands.staff import wait_until

DAEMONS = ("/usr/lib/systemd/systemd-journald", "/lib/systemd/systemd-journald")
"""Where distributions have it."""

_CONFIGURATION = """[Journal]
Storage=volatile
Audit=no
ReadKMsg=no
ForwardToSyslog=no
ForwardToWall=no
RateLimitIntervalSec=0
RuntimeMaxUse=64M
"""
_BEGIN = """
mount --bind "$1/run" /run
mount --bind "$1/machine-id" /etc/machine-id
mount --bind "$1/journald.conf" /etc/systemd/journald.conf
exec "$2"
"""
_APART = ("unshare", "--mount", "--propagation", "private")
_AS_JSON = ("--output=json", "--all", "--quiet")
_STREAM = "celery5\n\n6\n1\n0\n0\n0\n"
"""How systemd begins the stream of a service's stderr: its identifier, its unit, the usual priority, flags."""


class JournalDaemon:
    """One daemon. It can be killed, and be started again on the same folder."""

    def __init__(self, folder: Path, program: str) -> None:
        self._folder = folder
        self._program = program
        self._process: subprocess.Popen[bytes] | None = None
        (folder / "run/systemd/journal").mkdir(parents=True)
        (folder / "run/log/journal").mkdir(parents=True)
        (folder / "journald.conf").write_text(_CONFIGURATION)
        (folder / "machine-id").write_text(uuid.uuid4().hex + "\n")

    @property
    def socket(self) -> str:
        """Where it takes entries of the native protocol."""
        return str(self._folder / "run/systemd/journal/socket")

    def start(self) -> None:
        """Start it, and wait until it takes entries. Skips the test where it cannot run."""
        Path(self.socket).unlink(missing_ok=True)
        said = self._folder / "said"
        with said.open("wb") as out:
            self._process = subprocess.Popen(
                [*_APART, "sh", "-euc", _BEGIN, "sh", str(self._folder), self._program],
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        process = self._process
        wait_until(lambda: process.poll() is not None or Path(self.socket).exists())
        if process.poll() is not None:
            pytest.skip(f"systemd-journald does not run here: {' '.join(said.read_text().split())}")

    def kill(self) -> None:
        """End it at once."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(30)
            self._process = None

    @contextmanager
    def stream(self) -> Iterator[tuple[int, str]]:
        """A stream to be a service's stderr, as systemd makes it: its descriptor, and its name in JOURNAL_STREAM."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
            line.connect(str(self._folder / "run/systemd/journal/stdout"))
            line.sendall(_STREAM.encode())
            found = Path(f"/proc/self/fd/{line.fileno()}").stat()
            yield line.fileno(), f"{found.st_dev}:{found.st_ino}"

    def entries(self, *matches: str) -> list[dict[str, Any]]:
        """What journalctl finds."""
        done = subprocess.run(
            ["journalctl", f"--directory={self._folder}/run/log/journal", *_AS_JSON, *matches],
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
        return [json.loads(line) for line in done.stdout.splitlines()]


@contextmanager
def journal_daemon() -> Iterator[JournalDaemon]:
    """A daemon that takes entries; it and its folder are gone with the block. Skips the test where there is none."""
    program = next((daemon for daemon in DAEMONS if Path(daemon).exists()), None)
    if program is None or not shutil.which("unshare") or not shutil.which("journalctl"):
        pytest.skip("systemd-journald, journalctl and unshare are not all installed here")
    with tempfile.TemporaryDirectory(prefix="j-", dir="/tmp") as folder:  # a socket's path is short
        one = JournalDaemon(Path(folder), program)
        try:
            one.start()
            yield one
        finally:
            one.kill()
