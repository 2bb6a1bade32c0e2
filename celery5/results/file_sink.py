"""File Sink: documents as lines of JSON in a file, which may be begun anew each day or when it is large.

Several Routers may write to one file: each batch is one write to its end, made under a lock of the file itself, so that
no line is torn and none is lost when another process begins a new file.
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
from celery5.results.sinks import BATCH, TIMEOUT


class FileSink:
    """A Data Sink that appends a line of JSON for each document to the file `path`.

    `rotate` begins a new file: "day", which adds the day by UTC to the name (`orders.2026-11-21.jsonl`); or so many
    bytes: a file that has them is renamed, with the time in its name. `fsync` returns when the disk has it. With
    `private` only its user can read what is created (files of mode 0600, folders of 0700); else the umask decides.
    `name` is that of the file unless given; `on`, `batch`, `timeout` and `retry` are those of `Sink`. A document may
    come twice, with the same `id`. Raises Misconfigured.
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
        said: object = rotate
        if not (said is None or said == "day" or (type(said) is int and said > 0)):
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
        """Append them. Raises OSError, and then none of them is in the file."""
        lines = b"".join(each.to_json() + b"\n" for each in documents)
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
        """The file, locked: the one that has its name now."""
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
        """Whether it was large enough, and has another name now. Nobody else can do that meanwhile: it is locked."""
        if not isinstance(self._rotate, int) or os.fstat(file).st_size < self._rotate:
            return False
        stamp = f"{datetime.now(UTC):%Y%m%dT%H%M%S%f}"
        path.rename(path.with_name(f"{path.stem}.{stamp}{path.suffix}"))
        return True


def _is_at(file: int, path: Path) -> bool:
    """Whether `path` is this file still; another process may have renamed it."""
    try:
        return os.path.samestat(os.fstat(file), os.stat(path))
    except FileNotFoundError:
        return False


def _append(file: int, lines: bytes) -> None:
    """All of it or nothing. The file is locked, so what was written in part is ours alone to take back."""
    size = os.fstat(file).st_size
    if size and os.pread(file, 1, size - 1) != b"\n":  # somebody was killed in the middle of a line
        lines = b"\n" + lines
    try:
        written = os.write(file, lines)
    except OSError:
        os.ftruncate(file, size)
        raise
    if written < len(lines):
        os.ftruncate(file, size)
        raise OSError(f"only {written} of {len(lines)} bytes could be written: is the disk full?")
