"""The folder of a kept server: its data, its locks, and its password.

A lock is the system's, on an open file: it ends with the last process that has the file open, however that ends. The
file contains the id of the process that the lock was taken for.
"""

import fcntl
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from celery5.errors import Misconfigured
from celery5.similar_names import join_names

FILES_OF_NEW_FOLDER = frozenset({"appendonlydir", "appendonly.aof", "lost+found"})
"""What may be in a folder that is used for the first time: the data of a backup, and what a new disk has."""


def make_private(folder: Path) -> os.stat_result:
    """Make a folder and its missing parents, for this user alone, whatever the umask; return its `stat`.

    An existing folder is not changed: the caller checks its owner and mode. Raises OSError.
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    for path in reversed(missing):
        path.mkdir(mode=0o700, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)  # raises where there is something else of that name
    return folder.stat()


def check_owned(found: os.stat_result, name: str) -> None:
    """Raise Misconfigured unless a file or folder is of this user or of root, and nobody else can change it.

    Others may add to a folder such as /tmp (its sticky bit is set), since they can replace nothing in it.
    """
    if found.st_uid not in (os.geteuid(), 0):
        raise Misconfigured(f"{name}: it is another user's: chown it to {os.geteuid()}, or name another one")
    is_shared_folder = stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_ISVTX
    if found.st_mode & 0o022 and not is_shared_folder:
        mode = "700" if stat.S_ISDIR(found.st_mode) else "600"
        raise Misconfigured(f"{name}: others may write it: chmod {mode} {name}")


def lock_folder(folder: Path) -> int:
    """Take the lock of the Controller that keeps the server in this folder; return its file. Raises Misconfigured."""
    try:
        if make_private(folder).st_uid != os.geteuid():
            raise Misconfigured(f"broker: the folder {folder} is another user's")
        _check_is_ours(folder)
        folder.chmod(0o700)
        lock = open_lock(folder / "controller.lock")
    except OSError as error:
        raise Misconfigured(f"broker: the folder {folder} cannot be used: {error.strerror}") from None
    if not try_lock(lock):
        other_pid = os.pread(lock, 20, 0).decode(errors="replace").strip()
        os.close(lock)
        raise Misconfigured(
            f"broker: another Controller (process {other_pid}) runs the broker in {folder}: with [broker] there is one "
            "Controller; for several, name a broker that they share"
        )
    write_pid(lock, os.getpid())
    return lock


def open_lock(path: Path) -> int:
    """Open the file of a lock; create it if it does not exist."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def try_lock(file: int) -> bool:
    """Take the lock; return False when another process has it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def write_pid(lock: int, pid: int) -> None:
    """Write into the file of a lock for which process it was taken."""
    os.pwrite(lock, f"{pid:<20}\n".encode(), 0)


def _check_is_ours(folder: Path) -> None:
    """Raise Misconfigured when something else is in the folder: it may be another server's."""
    names = {path.name for path in folder.iterdir()}
    if "controller.lock" not in names and (others := sorted(names - FILES_OF_NEW_FOLDER)):
        raise Misconfigured(
            f"broker: the folder {folder} has other things in it ({join_names(others, 3)}): name a new or an empty one"
        )


class LockHolder(NamedTuple):
    """The process that has a lock."""

    pid: int  # as the file says; 0 when it does not
    file: os.stat_result


def find_lock_holder(path: Path) -> LockHolder | None:
    """Return what is known of the process that has the lock; None when none has."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        if try_lock(file):
            return None
        pid = os.pread(file, 20, 0).strip()
        return LockHolder(int(pid) if pid.isdigit() else 0, os.fstat(file))
    finally:
        os.close(file)


def has_file_open(pid: int, file: os.stat_result) -> bool:
    """Return whether a process has a file open; False when that cannot be known."""
    with suppress(OSError):
        for number in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                if os.path.samestat(os.stat(f"/proc/{pid}/fd/{number}"), file):
                    return True
    return False


def ensure_password(path: Path) -> str:
    """Return the password in a file; write a new one when there is none, or when a lost disk has left it empty."""
    if not path.exists() or not path.read_text().strip():
        write_private(path, secrets.token_hex(24))
    return path.read_text().strip()


def write_private(path: Path, text: str) -> None:
    """Write a file for this user alone, in whole or not at all."""
    new = path.with_name(f"{path.name}.new")
    file = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(file, "w") as stream:
        stream.write(text)
    new.replace(path)
