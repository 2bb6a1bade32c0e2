"""Take in files that are put into a folder, each once, when it is complete: a Data Source.

A file is taken when it has not changed for a while, so that none is taken half written. It is published, and only then
moved away. If the watcher is killed in between it publishes the file again, under the same id, which makes no new
document. So the watcher need not store which files it took.
"""

import hashlib
import os
import stat
from pathlib import Path
from typing import NamedTuple

import trio

from celery5.events import Emit

UNFINISHED = (".part", ".tmp", ".crdownload", "~")
"""The ends of the names of files that are still being written."""


class Seen(NamedTuple):
    """The state of a file."""

    inode: int
    # In bytes.
    size: int
    # When it changed last, in ns.
    changed: int


class FolderWatcher:
    """Scans `folder` every `every` seconds, and takes files that have not changed for `quiet` seconds.

    `quiet` is by default twice `every`. Files that were taken are moved to `done` in the folder, files of more than
    `largest` bytes to `refused`.
    """

    def __init__(
        self, folder: Path, *, every: float = 1.0, quiet: float | None = None, largest: int = 512 * 1024
    ) -> None:
        self._folder = folder
        self._largest = largest
        self._every = every
        self._quiet = 2 * every if quiet is None else quiet
        self._since: dict[str, tuple[Seen, float]] = {}

    async def run(self, emit: Emit) -> None:
        """Watch until cancelled."""
        for name in ("done", "refused"):
            (self._folder / name).mkdir(parents=True, exist_ok=True)
        self._since.clear()
        while True:
            for name in self.ripe(await trio.to_thread.run_sync(self.look), trio.current_time()):
                await self._take(name, emit)
            await trio.sleep(self._every)

    def look(self) -> dict[str, Seen]:
        """Return the files in the folder by name, without links and names that are no UTF-8."""
        files: dict[str, Seen] = {}
        with os.scandir(self._folder) as entries:
            for entry in entries:
                if entry.name.startswith(".") or entry.name.endswith(UNFINISHED) or not _is_text(entry.name):
                    continue
                try:
                    state = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                if stat.S_ISREG(state.st_mode):
                    files[entry.name] = Seen(state.st_ino, state.st_size, state.st_mtime_ns)
        return files

    def ripe(self, seen: dict[str, Seen], now: float) -> list[str]:
        """Return the names of files that have not changed for long enough. `now` is in seconds."""
        self._since = {
            name: self._since[name] if self._since.get(name, (None,))[0] == file else (file, now)
            for name, file in seen.items()
        }
        return sorted(name for name, (_, since) in self._since.items() if now - since >= self._quiet)

    async def _take(self, name: str, emit: Emit) -> None:
        path, seen = self._folder / name, self._since.pop(name)[0]
        if seen.size > self._largest:
            await trio.to_thread.run_sync(os.replace, path, self._folder / "refused" / name)
            return
        body = await trio.to_thread.run_sync(_whole, path, seen)
        if body is None:  # it has changed, or was removed: the next scan decides
            return
        digest = hashlib.sha256(f"{name}\0{seen.changed}\0{seen.size}\0".encode() + body).hexdigest()[:40]
        # If Redis is unreachable this raises, the source is started again, and the file is still in the folder.
        await emit(body, id=digest, attributes={"name": name, "size": str(seen.size)})
        await trio.to_thread.run_sync(
            _move_unchanged, path, seen, self._folder / "done" / f"{digest[:8]}-{name}"
        )


def _whole(path: Path, seen: Seen) -> bytes | None:
    """Return the content of a file; None if the file has changed since it was `seen`."""
    try:
        with path.open("rb") as file:
            body = file.read(seen.size + 1)
            state = os.fstat(file.fileno())
    except FileNotFoundError:
        return None
    unchanged = Seen(state.st_ino, state.st_size, state.st_mtime_ns) == seen and len(body) == seen.size
    return body if unchanged else None


def _move_unchanged(path: Path, seen: Seen, to: Path) -> None:
    """Move a file that was taken. If it has changed since, it stays and is taken again."""
    try:
        state = path.stat(follow_symlinks=False)
    except FileNotFoundError:
        return
    if Seen(state.st_ino, state.st_size, state.st_mtime_ns) == seen:
        path.replace(to)


def _is_text(name: str) -> bool:
    try:
        return bool(name.encode())
    except UnicodeEncodeError:
        return False
