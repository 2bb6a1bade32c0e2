"""Write the changes of a report into the files, where they can be undone."""

import os
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path

from celery5.errors import CeleryError
from celery5.migration.files.findings import FileReport
from celery5.migration.files.source import SourceFile

_GIT_LIMIT = 60.0
"""Seconds that git may take."""


class NotWritten(CeleryError):
    """The changes of `celery5 migrate` were not written."""


def write_changes(
    root: Path, files: Iterable[SourceFile], reports: Iterable[FileReport], *, backup: bool = False
) -> list[str]:
    """Write the changes, all of them or none, and return the names of the files.

    Args:
        root: The folder that the names of the files begin at.
        files: The files as they were read.
        reports: What becomes of them.
        backup: Keep each file as `NAME.orig`. Else each has to be in git, without changes that are not committed.

    Raises:
        NotWritten: A change could not be undone, or a file has changed since it was read, or cannot be written.
    """
    known = {file.name: file for file in files}
    changed = [(known[report.path], report.text) for report in reports if report.text]
    for file, _ in changed:
        why = _find_obstacle(root, file, backup=backup)
        if why:
            raise NotWritten(f"nothing is written: {file.name} {why}")
    for file, text in changed:
        try:
            if backup:
                _replace(Path(f"{file.path}.orig"), file.raw, file.path)
            _replace(file.path, file.encode(text), file.path)
        except OSError as error:
            raise NotWritten(f"{file.name} cannot be written: {error.strerror}") from None
    return [file.name for file, _ in changed]


def _find_obstacle(root: Path, file: SourceFile, *, backup: bool) -> str:
    """Return why a file is not to be changed; '' if nothing speaks against it."""
    try:
        if file.path.read_bytes() != file.raw:
            return "has changed since it was read: run the command again"
    except OSError as error:
        return f"cannot be read any more: {error.strerror}"
    if not os.access(file.path, os.W_OK):
        return "may not be written"
    if backup:
        there = Path(f"{file.path}.orig").exists()
        return f"has a backup already: remove {file.name}.orig" if there else ""
    status = _run_git(root, "status", "--porcelain", "--ignored", "--", str(file.path.resolve()))
    if (
        status is None
        or _run_git(root, "ls-files", "--error-unmatch", "--", str(file.path.resolve())) is None
    ):
        return "is not in git: add and commit it, or give --backup"
    return "has changes that are not committed: commit them, or give --backup" if status.strip() else ""


def _run_git(root: Path, *words: str) -> str | None:
    """Return what git prints; None when it fails, or is not installed."""
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *words], capture_output=True, text=True, timeout=_GIT_LIMIT, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _replace(path: Path, content: bytes, like: Path) -> None:
    """Write a file in one step, with the permissions of another."""
    mode = like.stat().st_mode
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.chmod(name, mode & 0o7777)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
