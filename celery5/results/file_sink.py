"""A sink that writes documents as lines of JSON to a file, which may be rotated each day or by size.

Several Routers may write to one file: each batch is one write to its end, under a lock of the file, so no line is
torn, and none is lost when another process rotates the file.
"""

import fcntl
import os
from collections.abc import Collection, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from celery5.broker.servers.kept_folder import make_private
from celery5.errors import Misconfigured
from celery5.protocol.events.documents import ResultDocument
from celery5.protocol.events.sinks import BATCH, TIMEOUT


class FileSink:
    """A Data Sink that appends a line of JSON for each document to the file `path`.

    A document may be written twice, with the same `id`.

    Args:
        name: The name of the sink; by default that of the file.
        rotate: "day" adds the day in UTC to the name (`orders.2026-11-21.jsonl`). A number of bytes: a file of that
            size is renamed, with the time in its name. None for a single file.
        fsync: Return from `write` only when the disk has the lines.
        private: Create files with mode 0600 and folders with 0700; else the umask decides.
        on: As for `Sink`.
        batch: As for `Sink`.
        timeout: As for `Sink`.
        retry: As for `Sink`.

    Raises:
        Misconfigured: `rotate` is invalid.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        name: str = "",
        rotate: Literal["day"] | int | None = None,
        fsync: bool = False,
        private: bool = False,
        on: str | Collection[str] = ("SUCCESS",),
        batch: int = BATCH,
        timeout: float = TIMEOUT,
        retry: Any = None,
    ) -> None:
        value: object = rotate
        if not (value is None or value == "day" or (type(value) is int and value > 0)):
            raise Misconfigured(f"sink file {path}: rotate is {rotate!r}; give 'day' or a number of bytes")
        self.path: Path = Path(path)
        self.name: str = name or self.path.name
        self.on: str | Collection[str] = on
        self.batch: int = batch
        self.timeout: float = timeout
        self.retry: Any = retry
        self._rotate = rotate
        self._fsync = fsync
        self._private = private

    def __repr__(self) -> str:
        return f"FileSink({str(self.path)!r})"

    def write(self, documents: Sequence[ResultDocument], /) -> None:
        """Append documents. Raises OSError, and then none of them is in the file."""
        lines = b"".join(document.to_json() + b"\n" for document in documents)
        if self._private:
            make_private(self.path.parent)
        else:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        file = self._opened()
        try:
            _append(file, lines)
            if self._fsync:
                os.fsync(file)
        finally:
            os.close(file)  # the lock goes with it

    def _opened(self) -> int:
        """Open and lock the file that has the current name."""
        while True:
            path = self._current()
            mode = 0o600 if self._private else 0o644
            file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, mode)
            try:
                fcntl.flock(file, fcntl.LOCK_EX)
                if _is_at(file, path) and not self._renamed(file, path):
                    return file
            except BaseException:
                os.close(file)
                raise
            os.close(file)

    def _current(self) -> Path:
        if self._rotate != "day":
            return self.path
        return self.path.with_name(f"{self.path.stem}.{datetime.now(UTC):%Y-%m-%d}{self.path.suffix}")

    def _renamed(self, file: int, path: Path) -> bool:
        """Rename the file if it is large enough; return whether it was. The lock keeps others from doing the same."""
        if not isinstance(self._rotate, int) or os.fstat(file).st_size < self._rotate:
            return False
        stamp = f"{datetime.now(UTC):%Y%m%dT%H%M%S%f}"
        path.rename(path.with_name(f"{path.stem}.{stamp}{path.suffix}"))
        return True


def _is_at(file: int, path: Path) -> bool:
    """Return whether `path` is still this file; another process may have renamed it."""
    try:
        return os.path.samestat(os.fstat(file), os.stat(path))
    except FileNotFoundError:
        return False


def _append(file: int, lines: bytes) -> None:
    """Append all lines or none. The file is locked, so a partial write can be truncated."""
    size = os.fstat(file).st_size
    if size and os.pread(file, 1, size - 1) != b"\n":  # a process was killed in the middle of a line
        lines = b"\n" + lines
    try:
        written = os.write(file, lines)
    except OSError:
        os.ftruncate(file, size)
        raise
    if written < len(lines):
        os.ftruncate(file, size)
        raise OSError(f"only {written} of {len(lines)} bytes could be written: is the disk full?")
