"""Careful: a strategy that takes one more slot at a time, and a maximum that is asked of somebody else."""

from pathlib import Path

from celery5.scaling import Demand


class OneByOne:
    """A budget strategy: one slot more while jobs wait, one slot fewer while there are more slots than jobs."""

    def __call__(self, demand: Demand) -> int:
        """The new number of slots."""
        if demand.queued:
            return demand.current + 1
        if demand.executing < demand.current:
            return demand.current - 1
        return demand.current


class Licences:
    """A maximum: as many jobs as a file says that there are licences for. It is asked in a thread, so it may block."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __call__(self, demand: Demand) -> int:
        """The maximum now; what runs already may go on when there is no file."""
        return int(self._path.read_text()) if self._path.exists() else demand.executing
