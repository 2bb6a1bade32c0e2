"""Watcher: a Data Source that takes in the files which are put into a folder, each once, when it is whole.

A file is taken when it has not changed for a while, so that none is taken half written. It is published, and only then
moved away: killed in between, the watcher publishes it again, under the same id, which is no new document. So nobody
need remember what was taken.
"""

import hashlib
import os
import stat
from pathlib import Path
from typing import NamedTuple

import trio

from celery5.events import Emit

UNFINISHED = (".part", ".tmp", ".crdownload", "~")
"""How names end of what somebody still writes."""


class Seen(NamedTuple):
    """What a file looked like: which it is, its size, and when it was changed last in ns."""

    inode: int
    size: int
    changed: int


class FolderWatcher:
    """Looks into `folder` each `every` seconds, and takes files that looked the same `quiet` seconds ago (default: two
    looks). What was taken goes to `done` in it, what has more than `largest` bytes to `refused`."""

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
        """The files that are there, by name. Links and what has no proper name are left alone."""
        found: dict[str, Seen] = {}
        with os.scandir(self._folder) as entries:
            for entry in entries:
                if entry.name.startswith(".") or entry.name.endswith(UNFINISHED) or not _is_text(entry.name):
                    continue
                try:
                    state = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                if stat.S_ISREG(state.st_mode):
                    found[entry.name] = Seen(state.st_ino, state.st_size, state.st_mtime_ns)
        return found

    def ripe(self, seen: dict[str, Seen], now: float) -> list[str]:
        """The names of those that have not changed for long enough. `now`: seconds."""
        self._since = {
            name: self._since[name] if self._since.get(name, (None,))[0] == one else (one, now)
            for name, one in seen.items()
        }
        return sorted(name for name, (_, since) in self._since.items() if now - since >= self._quiet)

    async def _take(self, name: str, emit: Emit) -> None:
        path, seen = self._folder / name, self._since.pop(name)[0]
        if seen.size > self._largest:
            await trio.to_thread.run_sync(os.replace, path, self._folder / "refused" / name)
            return
        body = await trio.to_thread.run_sync(_whole, path, seen)
        if body is None:  # it has changed meanwhile, or is gone: the next look will tell
            return
        told = hashlib.sha256(f"{name}\0{seen.changed}\0{seen.size}\0".encode() + body).hexdigest()[:40]
        # Redis may be away: then this raises and begins again, and the file is still there.
        await emit(body, id=told, attributes={"name": name, "size": str(seen.size)})
        await trio.to_thread.run_sync(_put_away, path, seen, self._folder / "done" / f"{told[:8]}-{name}")


def _whole(path: Path, seen: Seen) -> bytes | None:
    """What is in a file, if it is the one that was seen, before and after it was read."""
    try:
        with path.open("rb") as file:
            body = file.read(seen.size + 1)
            state = os.fstat(file.fileno())
    except FileNotFoundError:
        return None
    same = Seen(state.st_ino, state.st_size, state.st_mtime_ns) == seen and len(body) == seen.size
    return body if same else None


def _put_away(path: Path, seen: Seen, to: Path) -> None:
    """Move what was taken. What has changed since stays, and is taken as it is now."""
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
