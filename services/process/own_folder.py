"""Keep files in a temporary folder that is removed after the end of its process, even if that is killed.

Each process holds a lock in its folder, which the kernel releases when the process ends. The next process of the same
user removes the folders whose lock is free.
"""

import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from celery5.errors import Misconfigured

LOCK_NAME = "lock"


@contextmanager
def temporary_folder(kind: str) -> Generator[str, None, None]:
    """Yield the path of a folder that is removed after the block. Its name begins with `kind`.

    Removes the folders of that kind whose processes have ended.

    Raises:
        Misconfigured: Nothing can be written to a temporary folder.
    """
    try:
        remove_stale_folders(kind)
        folder = tempfile.mkdtemp(prefix=f"{kind}-")
    except OSError as error:
        raise Misconfigured(
            f"no temporary folder can be made: {error}; set TMPDIR to a folder that can be written, "
            "or mount one: docker run --tmpfs /tmp"
        ) from error
    lock = -1
    try:
        lock = os.open(
            os.path.join(folder, LOCK_NAME), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600
        )
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.write(lock, b"held\n")  # only a folder with this line may be removed when its lock is free
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if lock >= 0:
            os.close(lock)


def remove_stale_folders(kind: str) -> None:
    """Remove this user's folders of one kind whose processes have ended."""
    for folder in Path(tempfile.gettempdir()).glob(f"{kind}-*"):
        with suppress(OSError):
            status = folder.lstat()
            if (
                stat.S_ISDIR(status.st_mode)
                and status.st_uid == os.geteuid()
                and _is_abandoned(folder / LOCK_NAME)
            ):
                shutil.rmtree(folder, ignore_errors=True)


def _is_abandoned(path: Path) -> bool:
    """Return whether a lock was held and is free now. Raises OSError if there is none, or a process holds it."""
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.fstat(file).st_size > 0
    finally:
        os.close(file)
