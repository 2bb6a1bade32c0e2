"""Load settings from an SQLite table of names and values: a configuration backend.

A backend has three parts: its name for errors, a function that loads settings, and one that waits for a change.
"""

import sqlite3
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import trio

from celery5 import Misconfigured

EVERY = 0.5
"""Seconds between two checks."""


class TableConfiguration:
    """The table `settings(name, value)` of an SQLite file."""

    def __init__(self, path: Path) -> None:
        self.where = f"table settings of {path}"
        self._path = path
        self._version = 0

    def load(self) -> Mapping[str, Any]:
        """Return all rows. Called in a thread, so it may block."""
        if not self._path.exists():
            return {}
        try:
            with closing(sqlite3.connect(self._path)) as table:
                self._version = self._read_version(table)
                return dict(table.execute("SELECT name, value FROM settings"))
        except sqlite3.Error as error:
            raise Misconfigured(f"{self.where}: {error}") from None

    async def watch(self) -> None:
        """Return when the table has changed. Called under Trio, so it must not block."""
        while True:
            await trio.sleep(EVERY)
            if await trio.to_thread.run_sync(self._changed):
                return

    def say(self, **settings: Any) -> None:
        """Write settings, for all workers that use this table."""
        with closing(sqlite3.connect(self._path)) as table, table:
            table.execute("CREATE TABLE IF NOT EXISTS settings (name PRIMARY KEY, value)")
            rows = list(settings.items())
            table.executemany("INSERT OR REPLACE INTO settings VALUES (?, ?)", rows)
            table.execute(f"PRAGMA user_version = {self._read_version(table) + 1}")

    def _changed(self) -> bool:
        if not self._path.exists():
            return False
        with closing(sqlite3.connect(self._path)) as table:
            return self._read_version(table) != self._version

    def _read_version(self, table: sqlite3.Connection) -> int:
        (version,) = table.execute("PRAGMA user_version").fetchone()
        return int(version)
