"""Demo screen: what `celery5 demo` shows while it runs, and its table at the end.

Floor: cli. Reads: nothing. Writes: stderr while it runs, stdout at the end.
"""

import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Protocol, Self

import click

from celery5.errors import CeleryError

if TYPE_CHECKING:
    from rich.progress import TaskID

LINE_INTERVAL = 2.0
"""Seconds between two lines where there is no terminal to draw on."""


class RichMissing(CeleryError):
    """The extra that the demo's screen needs is not installed."""


class ProgressDisplay(Protocol):
    """Shows how jobs go on, from the beginning of its `with` block to the end."""

    def __enter__(self) -> Self: ...
    def __exit__(self, *_exc: object) -> None: ...
    def job_ended(self, task: str) -> None:
        """A job of the task named `task` has ended."""


class NoDisplay:
    """No screen: for `--json`."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        pass

    def job_ended(self, task: str) -> None:
        """Nothing to show."""


class LineDisplay:
    """A line now and then, for a log or a pipe."""

    def __init__(self, expected: Mapping[str, int]) -> None:
        self._all = sum(expected.values())
        self._ended = 0
        self._next = 0.0

    def __enter__(self) -> Self:
        self._next = time.monotonic() + LINE_INTERVAL
        return self

    def __exit__(self, *_exc: object) -> None:
        pass

    def job_ended(self, task: str) -> None:
        """Count it, and say so when it is time."""
        self._ended += 1
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + LINE_INTERVAL
            click.echo(f"{self._ended} of {self._all} jobs", err=True)


class ProgressBars:
    """A progress bar for each task. Raises RichMissing when rich is not installed."""

    def __init__(self, expected: Mapping[str, int]) -> None:
        require_rich()
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=Console(stderr=True),
        )
        self._bars: dict[str, TaskID] = {
            task: self._progress.add_task(task.rpartition(".")[2], total=jobs)
            for task, jobs in expected.items()
        }

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._progress.stop()

    def job_ended(self, task: str) -> None:
        """One step on for its bar."""
        self._progress.advance(self._bars[task])


def require_rich() -> None:
    """Raises RichMissing when rich is not installed."""
    if find_spec("rich") is None:
        raise RichMissing("the demo's table needs rich: pip install 'celery5[demo]', or use --json")


def make_display(tasks: Sequence[str], *, silent: bool) -> ProgressDisplay:
    """The screen for jobs of these tasks, one name for each job."""
    if silent:
        return NoDisplay()
    return ProgressBars(Counter(tasks)) if sys.stderr.isatty() else LineDisplay(Counter(tasks))


def show_table(title: str, rows: Mapping[str, str]) -> None:
    """Print the result."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column(justify="left")
    table.add_column(justify="right")
    for name, value in rows.items():
        table.add_row(name, value)
    Console().print(table)
