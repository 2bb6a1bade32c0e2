"""List the files of a folder, and count them in one process without a queue.

The plain count shares no code with the tasks, since their results are compared with it.
"""

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

LEFT_OUT = frozenset({"__pycache__", "site-packages", "dist-packages"})
"""Folders that are skipped: caches, and packages installed beside the standard library."""


class Folder(msgspec.Struct, frozen=True):
    """The files of a folder."""

    path: Path
    files: Sequence[Path]
    # Files whose names are no UTF-8, so no message can have them. They count as unreadable.
    unnameable: int = 0


class Totals(msgspec.Struct, frozen=True):
    """The counts of all files together."""

    files: int
    unreadable: int
    bytes: int
    lines: int
    words: int
    # One hash of the names and hashes of all files.
    digest: str


def look_into(path: Path, *, at_most: int | None = None) -> Folder:
    """Return the regular files below `path`, sorted by name. Raises OSError if the folder cannot be read."""
    os.listdir(path)
    files: list[Path] = []
    unnameable = 0
    for file in _walk(path):
        if len(files) == at_most:
            break
        if _is_nameable(file):
            files.append(file)
        else:
            unnameable += 1
    return Folder(path, files, unnameable)


def _walk(path: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(path):
        folders[:] = sorted(set(folders) - LEFT_OUT)
        for name in sorted(names):
            file = Path(folder, name)
            if file.is_file():  # no socket, pipe or dangling link
                yield file


def _is_nameable(path: Path) -> bool:
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return False
    return True


def plain_count(folder: Folder, *, is_over: Callable[[], bool] = lambda: False) -> Totals:
    """Count all files in this process. Stops early, with what it has counted, when `is_over` returns true."""
    unreadable, size, lines, words = folder.unnameable, 0, 0, 0
    digests: dict[Path, str] = {}
    for path in folder.files:
        digest = hashlib.sha256()
        counts = [0, 0, 0]
        try:
            with path.open("rb") as file:
                for line in file:
                    if is_over():
                        break
                    digest.update(line)
                    counts[0] += len(line)
                    counts[1] += line.endswith(b"\n")
                    counts[2] += len(line.split())
        except OSError:
            unreadable += 1
            continue
        size, lines, words = size + counts[0], lines + counts[1], words + counts[2]
        digests[path] = digest.hexdigest()
    files = len(folder.files) + folder.unnameable
    return Totals(files, unreadable, size, lines, words, digest_of_all(digests))


def digest_of_all(digests: dict[Path, str]) -> str:
    """Return one hash of the names and hashes of many files, in order."""
    listing = "".join(f"{digest}  {path}\n" for path, digest in sorted(digests.items()))
    return hashlib.sha256(listing.encode()).hexdigest()
