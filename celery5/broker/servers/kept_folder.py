"""The folder of a kept server: its data, its locks, and its password.

A lock is the system's, on an open file: it goes with the last process that has that file open, however that ends. In
the file stands the number of the process that it was taken for.
"""

import fcntl
import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from celery5.errors import Misconfigured

KNOWN_FILES = frozenset({"appendonlydir", "appendonly.aof", "lost+found"})
"""What may be in a folder that is new to us: the data of a backup, and what a disk has."""


def make_private(folder: Path) -> os.stat_result:
    """Make a folder and its missing parents, for this user alone, whatever the umask; return its `stat`.

    An existing folder is not changed: the caller checks its owner and mode. Raises OSError.
    """
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    for each in reversed(missing):
        each.mkdir(mode=0o700, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)  # raises where there is something else of that name
    return folder.stat()


def lock_folder(folder: Path) -> int:
    """The lock of whoever keeps the server in that folder. Raises Misconfigured."""
    try:
        if make_private(folder).st_uid != os.geteuid():
            raise Misconfigured(f"broker: the folder {folder} is another user's")
        _check_is_ours(folder)
        folder.chmod(0o700)
        lock = open_lock(folder / "controller.lock")
    except OSError as error:
        raise Misconfigured(f"broker: the folder {folder} cannot be used: {error.strerror}") from None
    if not try_lock(lock):
        other = os.pread(lock, 20, 0).decode(errors="replace").strip()
        os.close(lock)
        raise Misconfigured(
            f"broker: another Controller (process {other}) runs the broker in {folder}: with [broker] there is one "
            "Controller; for several, name a broker that they share"
        )
    write_pid(lock, os.getpid())
    return lock


def open_lock(path: Path) -> int:
    """The file of a lock, open, and made if it is not there."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def try_lock(file: int) -> bool:
    """Whether this process has the lock now."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def write_pid(lock: int, pid: int) -> None:
    """Say in the file of a lock for which process it was taken."""
    os.pwrite(lock, f"{pid:<20}\n".encode(), 0)


def _check_is_ours(folder: Path) -> None:
    """Raises Misconfigured when something else is in the folder: it might be another server's, and we write there."""
    found = {each.name for each in folder.iterdir()}
    if "controller.lock" not in found and (strange := sorted(found - KNOWN_FILES)):
        raise Misconfigured(
            f"broker: the folder {folder} has other things in it ({', '.join(strange[:3])}): name a new or an empty one"
        )


class LockHolder(NamedTuple):
    """A lock that somebody has: who it says that this is (0: it does not), and the file itself."""

    pid: int
    file: os.stat_result


def find_lock_holder(path: Path) -> LockHolder | None:
    """What is known of whoever has the lock; None when nobody does."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        if try_lock(file):
            return None
        said = os.pread(file, 20, 0).strip()
        return LockHolder(int(said) if said.isdigit() else 0, os.fstat(file))
    finally:
        os.close(file)


def has_file_open(pid: int, file: os.stat_result) -> bool:
    """Whether that process has that file open; no when nobody can tell."""
    with suppress(OSError):
        for each in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                if os.path.samestat(os.stat(f"/proc/{pid}/fd/{each}"), file):
                    return True
    return False


def ensure_password(path: Path) -> str:
    """What is in that file, which is made when it is not there, or when a lost disk has left nothing in it."""
    if not path.exists() or not path.read_text().strip():
        write_private(path, secrets.token_hex(24))
    return path.read_text().strip()


def write_private(path: Path, text: str) -> None:
    """A file for this user alone, all of it or none."""
    new = path.with_name(f"{path.name}.new")
    file = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(file, "w") as to:
        to.write(text)
    new.replace(path)
