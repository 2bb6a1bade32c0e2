"""Own Folder: a folder for files that are worth nothing when their process is gone, however it goes.

A process that is killed takes nothing with it. So each has a lock in its folder, which the kernel lets go of, and the
next process of this user takes away the folders that nobody has a lock in.
"""

import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

LOCK_NAME = "lock"


@contextmanager
def temporary_folder(kind: str) -> Generator[str, None, None]:
    """A folder for as long as the block lasts; `kind` begins its name. Takes away what was left of that kind."""
    remove_stale_folders(kind)
    folder = tempfile.mkdtemp(prefix=f"{kind}-")
    lock = -1
    try:
        lock = os.open(
            os.path.join(folder, LOCK_NAME), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600
        )
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.write(lock, b"held\n")  # from now on it is somebody's, or was
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if lock >= 0:
            os.close(lock)


def remove_stale_folders(kind: str) -> None:
    """Take away the folders of that kind which are this user's, and whose process is gone."""
    for folder in Path(tempfile.gettempdir()).glob(f"{kind}-*"):
        with suppress(OSError):
            found = folder.lstat()
            if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and _is_left(folder / LOCK_NAME):
                shutil.rmtree(folder, ignore_errors=True)


def _is_left(path: Path) -> bool:
    """Whether somebody had that lock, and nobody has. One that is just being made is not left, and one without a lock
    is none of ours."""
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.fstat(file).st_size > 0
    finally:
        os.close(file)
