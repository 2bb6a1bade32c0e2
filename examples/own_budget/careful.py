"""Add one slot at a time, up to a maximum that is read from a file."""

from pathlib import Path

from celery5.scaling import Demand


class OneByOne:
    """A budget strategy: one slot more while jobs wait, one slot fewer while there are more slots than jobs."""

    def __call__(self, demand: Demand) -> int:
        """Return the new number of slots."""
        if demand.queued:
            return demand.current + 1
        if demand.executing < demand.current:
            return demand.current - 1
        return demand.current


class Licences:
    """A maximum: a file has the number of licences. It is called in a thread, so it may block."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __call__(self, demand: Demand) -> int:
        """Return the maximum now. Without a file running jobs may continue, and no others start."""
        return int(self._path.read_text()) if self._path.exists() else demand.executing
