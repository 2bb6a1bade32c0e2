"""Folder: which files there are, and what a plain count of them gives, with no queue and in one process.

The plain count shares no line with the tasks: it is what their results are held against.
"""

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

LEFT_OUT = frozenset({"__pycache__", "site-packages", "dist-packages"})
"""Folders that are not looked into: caches, and other people's files beside the standard library."""


class Folder(msgspec.Struct, frozen=True):
    """The files of a folder. A name that is no UTF-8 cannot travel in a message: such a file counts as unreadable."""

    path: Path
    files: Sequence[Path]
    unnameable: int = 0


class Totals(msgspec.Struct, frozen=True):
    """What is counted, of all files together. `digest` is one hash over the names and hashes of all of them."""

    files: int
    unreadable: int
    bytes: int
    lines: int
    words: int
    digest: str


def look_into(path: Path, *, at_most: int | None = None) -> Folder:
    """The regular files below `path`, by name. Raises OSError when the folder itself cannot be read."""
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
            if file.is_file():  # and no socket, pipe or dangling link
                yield file


def _is_nameable(path: Path) -> bool:
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return False
    return True


def plain_count(folder: Folder, *, is_over: Callable[[], bool] = lambda: False) -> Totals:
    """Count everything here and now. Stops early, with whatever it has, once `is_over` says so."""
    unreadable, size, lines, words = folder.unnameable, 0, 0, 0
    digests: dict[Path, str] = {}
    for path in folder.files:
        digest = hashlib.sha256()
        counted = [0, 0, 0]
        try:
            with path.open("rb") as file:
                for line in file:
                    if is_over():
                        break
                    digest.update(line)
                    counted[0] += len(line)
                    counted[1] += line.endswith(b"\n")
                    counted[2] += len(line.split())
        except OSError:
            unreadable += 1
            continue
        size, lines, words = size + counted[0], lines + counted[1], words + counted[2]
        digests[path] = digest.hexdigest()
    files = len(folder.files) + folder.unnameable
    return Totals(files, unreadable, size, lines, words, digest_of_all(digests))


def digest_of_all(digests: dict[Path, str]) -> str:
    """One hash for many files: their names and hashes, in order."""
    listed = "".join(f"{digest}  {path}\n" for path, digest in sorted(digests.items()))
    return hashlib.sha256(listed.encode()).hexdigest()
