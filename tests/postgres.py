"""A private PostgreSQL, where it is installed, for tests that need a server which ends connections."""

import os
import pwd
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from tests.pace import Pace

LIMIT = 60.0
"""Seconds that a start may take."""


def find_missing() -> str:
    """Return why there is no PostgreSQL for tests; '' where there is one."""
    missing = [name for name in ("postgres", "initdb") if _find(name) is None]
    if missing:
        return f"no {missing[0]} on PATH or below /usr/lib/postgresql"
    return "" if find_spec("psycopg") else "psycopg is not installed"


@contextmanager
def running_postgres() -> Iterator[str]:
    """Run a server while the block lasts; yield the folder of its socket. It does not run as root: see `_get_user`."""
    user = _get_user()
    postgres, initdb = _find("postgres"), _find("initdb")
    assert postgres is not None
    assert initdb is not None
    with tempfile.TemporaryDirectory(prefix="c5-pg-", dir="/tmp", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        if user is not None:
            os.chown(folder, pwd.getpwnam(user).pw_uid, -1)
        data = folder / "data"
        made = subprocess.run(
            [initdb, "-D", data, "-A", "trust", "-U", "postgres", "--no-sync"],
            user=user,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=LIMIT,
            check=False,
        )
        assert made.returncode == 0, made.stderr
        words: list[str | Path] = [postgres, "-D", data, "-k", folder, "-h", "", "-F"]
        with (folder / "log").open("wb") as log:
            server = subprocess.Popen(words, user=user, cwd=folder, stdout=log, stderr=log)
        try:
            _await_start(server, data / "postmaster.pid", folder / "log")
            yield str(folder)
        finally:
            server.terminate()
            try:
                server.wait(10)  # SIGTERM waits for clients, of which a failed test may leave some
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def _await_start(server: "subprocess.Popen[bytes]", pid_file: Path, log: Path) -> None:
    """Wait until the server has written that it is ready."""
    end, pace = time.monotonic() + LIMIT, Pace()
    while not pace.look(lambda: pid_file.exists() and "ready" in pid_file.read_text()):
        assert server.poll() is None, log.read_text()
        assert time.monotonic() < end, log.read_text()
        time.sleep(pace.pause)


def _find(name: str) -> str | None:
    """Return the path of a program of PostgreSQL; Debian has the server's outside of PATH."""
    places = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))
    return shutil.which(name) or (str(places[-1]) if places else None)


def _get_user() -> str | None:
    """Return the user to run the server as: PostgreSQL refuses root."""
    if sys.platform == "win32" or os.geteuid() != 0:
        return None
    names = {entry.pw_name for entry in pwd.getpwall()}
    return "postgres" if "postgres" in names else "nobody"
