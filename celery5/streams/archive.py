"""Archives: where records go that a full stream does not keep, though a group has not read them."""

import gzip
import hashlib
import inspect
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from secrets import token_hex
from typing import Any, cast
from urllib.parse import quote

import msgspec

from celery5.errors import Misconfigured
from celery5.protocol.annotations import refuse_injected
from celery5.streams.entry import StoredRecord

Archive = Callable[[str, int, Sequence[StoredRecord]], Any]
"""Takes the name of a stream, a partition and records of it; `def` in a thread or `async def` on Trio.

It returns when the records are stored, and raises when they may not be. Records may come again: then they are the same
ones, from the same first to the same last.
"""

MAX_NAME = 100
"""Bytes of a stream's name in the name of a file; a longer one is shortened."""


class FileArchive:
    """An archive that writes each portion of records to its own file, JSON lines in gzip.

    The name of a file is that of the stream, the partition, and the ids of the first and the last record. It is
    written under another name, synced to the disk and renamed: a file that is there is whole, and a portion that
    comes again replaces itself. `celery5 stream send STREAM --file FILE` sends the records again.

    Args:
        folder: Where the files are; it is made when it is missing. Each application needs its own folder.
        private: Create files with mode 0600 and the folder with 0700; else the umask decides.
    """

    def __init__(self, folder: str | os.PathLike[str], *, private: bool = False) -> None:
        self.folder: Path = Path(folder)
        self._private = private

    def __repr__(self) -> str:
        return f"FileArchive({str(self.folder)!r})"

    def __call__(self, stream: str, partition: int, entries: Sequence[StoredRecord], /) -> None:
        """Write records. Raises OSError, and then they may not be there."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700 if self._private else 0o777)
        path = self.get_path(stream, partition, entries[0].id, entries[-1].id)
        lines = b"".join(msgspec.json.encode(entry.record) + b"\n" for entry in entries)
        written = path.with_name(f".{path.name}.{token_hex(4)}")
        try:
            file = os.open(
                written,
                os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC,
                0o600 if self._private else 0o666,
            )
            with os.fdopen(file, "wb") as opened:
                opened.write(gzip.compress(lines, 6, mtime=0))
                opened.flush()
                os.fsync(file)
            written.replace(path)
        except BaseException:
            written.unlink(missing_ok=True)
            raise
        _sync_folder(self.folder)

    def get_path(self, stream: str, partition: int, first: str, last: str) -> Path:
        """Return the file of a portion."""
        name = quote(stream, safe="")
        if len(name) > MAX_NAME:
            name = f"{name[: MAX_NAME - 17]}~{hashlib.sha256(stream.encode()).hexdigest()[:16]}"
        return self.folder / f"{name}.{partition}.{first}.{last}.jsonl.gz"


def _sync_folder(folder: Path) -> None:
    """Have the disk know the new name, too."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def check_archive(archive: object) -> None:
    """Raise Misconfigured for what cannot be called as an archive."""
    if isinstance(archive, type) or not callable(archive):
        raise Misconfigured(
            f"Keep(archive={archive!r}): give FileArchive(folder), or a function of the stream's name, the partition "
            "and the records"
        )
    refuse_injected(archive, f"Keep(archive={describe_archive(archive)})")
    try:
        inspect.signature(archive).bind("", 0, ())
    except TypeError:
        raise Misconfigured(
            f"Keep(archive={describe_archive(archive)}): it must take the stream's name, the partition and the records"
        ) from None
    except ValueError:
        pass  # it does not tell


def describe_archive(archive: object) -> str:
    """Return how an archive is called in logs; '' for none."""
    if archive is None:
        return ""
    name = getattr(archive, "__qualname__", None)
    return f"{getattr(archive, '__module__', '')}.{name}" if isinstance(name, str) else repr(archive)


def is_async_archive(archive: Archive) -> bool:
    """Return whether an archive is awaited."""
    call: Any = cast("Any", archive).__call__
    return inspect.iscoroutinefunction(archive) or inspect.iscoroutinefunction(call)
