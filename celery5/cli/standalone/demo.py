"""Index files with real jobs on a private server, and compare the result with a plain count (`demo`).

The application is `celery5.examples.index_files`. This module has its flags, its display and its cleanup.
"""

import sys
import sysconfig
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

import click

from celery5.cli.terminal.errors import require_rich
from celery5.cli.terminal.output import echo, to_json
from celery5.errors import CeleryError, Misconfigured
from celery5.processes.lifecycle.signals import Interruption
from celery5.protocol.counts import format_count

if TYPE_CHECKING:
    from rich.progress import TaskID

    from celery5.app import App
    from celery5.examples.index_files.folder import Folder, Totals
    from celery5.examples.index_files.index import Index, Outcome

LINE_INTERVAL = 2.0
"""Seconds between two lines of progress where there is no terminal."""


class ProgressDisplay(Protocol):
    """Shows the progress of jobs inside its `with` block."""

    def __enter__(self) -> Self: ...
    def __exit__(self, *_exc: object) -> None: ...
    def job_ended(self, task: str) -> None:
        """Count a job of the task named `task`, which has ended."""


class NoDisplay:
    """Shows nothing: for `--json`."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        pass

    def job_ended(self, task: str) -> None:
        """Do nothing."""


class LineDisplay:
    """Prints a line every LINE_INTERVAL seconds, for a log or a pipe."""

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
        """Count the job, and print the number if a line is due."""
        self._ended += 1
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + LINE_INTERVAL
            click.echo(f"{self._ended} of {format_count(self._all, 'job')}", err=True)


class ProgressBars:
    """Shows a progress bar for each task. Raises RichMissing when rich is not installed."""

    def __init__(self, expected: Mapping[str, int]) -> None:
        require_rich("the demo's table", extra="demo")
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
        """Advance the bar of the task."""
        self._progress.advance(self._bars[task])


def make_display(tasks: Sequence[str], *, silent: bool) -> ProgressDisplay:
    """Return the display for jobs of these tasks, one name for each job."""
    if silent:
        return NoDisplay()
    return ProgressBars(Counter(tasks)) if sys.stderr.isatty() else LineDisplay(Counter(tasks))


def show_table(title: str, rows: Mapping[str, str]) -> None:
    """Print a table of results."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column(justify="left")
    table.add_column(justify="right")
    for name, value in rows.items():
        table.add_row(name, value)
    Console().print(table)


GRACE_PERIOD = 2.0
"""Seconds that running jobs get after Ctrl-C: reading a file again costs nothing."""
CLEANUP_LIMIT = 5.0
"""Seconds that removing the keys from a shared broker may take."""
_WHAT_NEXT = """\
Jobs were sent by the thousand, so nearly all of the latency is waiting for a turn: a single job, sent
to an idle worker, takes about a millisecond.

What next
  read the five tasks that ran     python -m pydoc celery5.examples.index_files.tasks
  an application of your own       write shop.py: celery5 docs tour, in ten minutes
  run it, with nothing to install  celery5 -A shop controller start --development
  see its queues and dead jobs     celery5 -A shop info; celery5 -A shop dlq read; celery5 -A shop doctor"""
WAIT_LIMIT = 10.0
"""Seconds of cleanup after which one more signal ends the process at once."""


class CountsDiffer(CeleryError):
    """The jobs counted something else than a plain count."""


# By hand, since it runs an application of its own.
@click.command()
@click.argument("folder", required=False, type=click.Path(path_type=Path))
@click.option("--json", "wants_json", is_flag=True, help="For programs: no bars, one JSON object.")
@click.option("--concurrency", type=int, metavar="N", help="Async jobs that run at once.")
@click.option("--max-files", type=click.IntRange(min=1), metavar="N", help="Index no more files than this.")
@click.option("--streams", is_flag=True, help="Count log lines on ordered streams instead.")
def demo(
    folder: Path | None,
    *,
    wants_json: bool,
    concurrency: int | None,
    max_files: int | None,
    streams: bool,
) -> None:
    """Index the files of FOLDER with real jobs, by default those of Python's standard library.

    Everything runs in this process over a private server, which ends with it; CELERY5_BROKER names another one.
    Exits with 1 when the jobs do not count what a plain count of the same files counts.

    With --streams the log lines of FOLDER, where each host has a folder, are counted by host and minute on ordered
    streams; by default those of files that are made for it.
    """
    with Interruption(duplicate_window=WAIT_LIMIT) as interruption:
        if streams:
            if concurrency is not None or max_files is not None:
                raise click.UsageError("--concurrency and --max-files are not for --streams")
            from celery5.cli.standalone.demo_streams import run_streams_demo

            run_streams_demo(folder, interruption, wants_json=wants_json)
            return
        if not wants_json:
            require_rich("the demo's table", extra="demo")
        files = _find_files(folder or Path(sysconfig.get_path("stdlib")), max_files)
        app = _make_app(concurrency)
        try:
            outcome, seconds = _index_files(app, files, interruption, wants_json=wants_json)
        except Exception:
            if not interruption.was_requested:
                raise
            raise click.Abort from None  # for example, the same signal ended the server while it started
        plain = None if outcome is None else _count_plainly(files, interruption, wants_json=wants_json)
        if outcome is None or plain is None:
            raise click.Abort
        differences = _find_differences(outcome, plain, jobs=3 * len(files.files) + 2)
        _report(files, outcome, seconds, differences, wants_json=wants_json)
    if differences:
        raise CountsDiffer(f"the jobs and a plain count differ: {'; '.join(differences)}")


def _find_files(path: Path, max_files: int | None) -> "Folder":
    from celery5.examples.index_files.folder import look_into

    try:
        files = look_into(path.absolute(), at_most=max_files)
    except OSError as error:
        raise Misconfigured(f"FOLDER {path}: {(error.strerror or str(error)).lower()}") from None
    if not files.files:
        raise Misconfigured(f"FOLDER {path}: there are no files in it")
    return files


def _make_app(concurrency: int | None) -> "App":
    """Return an application with a unique name, so that it shares no keys with others on its broker."""
    from celery5.app import App
    from celery5.protocol.job.job import new_id

    app = App(
        f"demo-{new_id()}",
        metrics_interval=0,  # it leaves nothing on a broker that others use
        include=["celery5.examples.index_files.tasks"],
        concurrency=concurrency,
        grace_period=GRACE_PERIOD,
    )
    app.load()
    return app


def _index_files(
    app: "App", folder: "Folder", interruption: Interruption, *, wants_json: bool
) -> "tuple[Outcome | None, float]":
    """Return the outcome of the jobs, None when a signal interrupted them, and the seconds that they took."""
    import trio

    from celery5.examples.index_files.index import EXTRA_JOBS, JOBS_FOR_A_FILE, Index
    from celery5.processes.development import provide_broker

    tasks = [task.name for task in JOBS_FOR_A_FILE for _ in folder.files]
    display = make_display([*tasks, *[task.name for task, _ in EXTRA_JOBS]], silent=wants_json)
    index = Index(app, folder, told=display.job_ended)
    with provide_broker(app, interruption):
        return trio.run(_run, app, index, display, interruption)


def _count_plainly(folder: "Folder", interruption: Interruption, *, wants_json: bool) -> "Totals | None":
    """Return the result of a plain count; None when a signal interrupted it."""
    from celery5.examples.index_files.folder import plain_count

    if not wants_json:
        echo("Counting the same files once more, plainly.", err=True)
    totals = plain_count(folder, is_over=lambda: interruption.was_requested)
    return None if interruption.was_requested else totals


async def _run(
    app: "App", index: "Index", display: ProgressDisplay, interruption: Interruption
) -> "tuple[Outcome | None, float]":
    import trio

    from celery5.processes.development import run_in_background
    from celery5.processes.foreground import ServeOptions

    outcome, seconds = None, 0.0
    try:
        with trio.CancelScope() as scope:
            token = trio.lowlevel.current_trio_token()
            interruption.on_stop(lambda _number: _cancel_soon(token, scope))
            async with run_in_background(app, ServeOptions()):
                with display:
                    start = time.perf_counter()
                    outcome = await index.run()
                    seconds = time.perf_counter() - start
    finally:
        with trio.move_on_after(CLEANUP_LIMIT, shield=True):
            await _erase_keys(app, index)
    return outcome, seconds


def _cancel_soon(token: Any, scope: Any) -> None:
    import trio

    with suppress(trio.RunFinishedError):
        token.run_sync_soon(scope.cancel)


async def _erase_keys(app: "App", index: "Index") -> None:
    """Delete the application's keys, since the broker may be shared. On a private server this takes a millisecond."""
    from celery5.broker.calls.health import erase_app
    from celery5.errors import BrokerError

    with suppress(BrokerError):
        for call in erase_app(app.keys, [app.queue(app.settings.default_queue)], index.under_way):
            await app.aperform(call)


def _find_differences(outcome: "Outcome", plain: "Totals", *, jobs: int) -> list[str]:
    """Return in words each result that is not the expected one."""
    from celery5.examples.index_files.index import EXPECTED_DEAD, EXPECTED_RETRIES

    compared: dict[str, tuple[object, object]] = {
        name: (getattr(outcome.totals, name), getattr(plain, name)) for name in plain.__struct_fields__
    }
    compared["jobs"] = (outcome.jobs, jobs)
    compared["retries"] = (outcome.retries, EXPECTED_RETRIES)
    compared["dead"] = (outcome.dead, EXPECTED_DEAD)
    compared["in the dead-letter queue"] = (outcome.in_dead_letter_queue, EXPECTED_DEAD)
    differences = [
        f"{name} {actual} instead of {expected}"
        for name, (actual, expected) in compared.items()
        if actual != expected
    ]
    return differences + [outcome.first_failure] * bool(outcome.first_failure)


def _report(
    folder: "Folder", outcome: "Outcome", seconds: float, differences: list[str], *, wants_json: bool
) -> None:
    totals, rate = outcome.totals, outcome.jobs / seconds
    p50, p99 = (_percentile(outcome.latencies, share) * 1000 for share in (0.50, 0.99))
    if wants_json:
        from msgspec.structs import asdict

        counts = {"jobs": outcome.jobs, "retries": outcome.retries, "dead": outcome.dead}
        speed = {"seconds": round(seconds, 3), "jobs_per_second": round(rate, 1)}
        latency = {"latency_ms": {"p50": round(p50, 1), "p99": round(p99, 1)}}
        check = {"matches": not differences, "differences": differences}
        echo(to_json({"folder": str(folder.path), **asdict(totals), **counts, **speed, **latency, **check}))
        return
    rows = {
        "files": f"{totals.files:,}",
        **({"unreadable": f"{totals.unreadable:,}"} if totals.unreadable else {}),
        "bytes": f"{totals.bytes:,}",
        "lines": f"{totals.lines:,}",
        "words": f"{totals.words:,}",
        "jobs": f"{outcome.jobs:,}",
        "retries": f"{outcome.retries:,}",
        "dead": f"{outcome.dead:,}",
        "jobs per second": f"{rate:,.0f}",
        "latency p50 / p99, sent to ended": f"{p50:,.0f} / {p99:,.0f} ms",
        "a plain count of the same files": "differs" if differences else "agrees",
    }
    show_table(f"{folder.path}, indexed in {seconds:.2f} s", rows)
    echo(_WHAT_NEXT)


def _percentile(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]
