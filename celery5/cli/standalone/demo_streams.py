"""Count log lines on ordered streams, and compare the totals with a plain count (`demo --streams`).

The application is `celery5.examples.log_lines`. This module has its display and its cleanup.
"""

import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from celery5.cli.terminal.output import echo, format_fields, to_json
from celery5.errors import BrokerError, CeleryError, Misconfigured
from celery5.processes.lifecycle.signals import Interruption
from celery5.similar_names import join_names

if TYPE_CHECKING:
    from celery5.app import App
    from celery5.examples.log_lines.folder import LogTotals
    from celery5.examples.log_lines.processors import LogStreams

QUIET_LIMIT = 60.0
"""Seconds for which nothing may change."""
GRACE_PERIOD = 2.0
"""Seconds that records in hand get after Ctrl-C."""
CLEANUP_LIMIT = 5.0
"""Seconds that removing the keys from a shared broker may take."""
_WHAT_NEXT = """\
What next
  read the two processors that ran   python -m pydoc celery5.examples.log_lines.processors
  kill what you like                 python -m celery5.examples.log_lines --help; each process is one command
  streams of your own                celery5 docs streams"""


class TotalsDiffer(CeleryError):
    """The processors counted something else than a plain count."""


def run_streams_demo(folder: Path | None, interruption: Interruption, *, wants_json: bool) -> None:
    """Count the lines of a folder's log files, by default of files that are made for it.

    Raises:
        Misconfigured: The folder cannot be read, or has no lines.
        TotalsDiffer: The totals are not those of a plain count.
        click.Abort: A signal has interrupted it.
    """
    with _provide_files(folder) as files:
        expected = _count(files)
        app, streams = _make_app()
        start = time.perf_counter()
        differences = _run(app, streams, files, expected, interruption)
        seconds = time.perf_counter() - start
    if interruption.was_requested:
        raise click.Abort
    _report(folder, expected, seconds, differences, wants_json=wants_json)
    if differences:
        raise TotalsDiffer(
            f"the processors and a plain count differ: {join_names(differences, 5, separator='; ')}"
        )


@contextmanager
def _provide_files(folder: Path | None) -> Generator[Path, None, None]:
    from celery5.examples.log_lines.folder import make_files

    if folder is not None:
        yield folder.absolute()
        return
    with tempfile.TemporaryDirectory(prefix="celery5-logs-") as made:
        make_files(Path(made))
        yield Path(made)


def _count(files: Path) -> "LogTotals":
    from celery5.examples.log_lines.folder import count_plainly

    try:
        if not files.is_dir():
            raise Misconfigured(f"FOLDER {files}: it is no folder")
        expected = count_plainly(files)
    except OSError as error:
        raise Misconfigured(f"FOLDER {files}: {(error.strerror or str(error)).lower()}") from None
    if not expected.lines:
        raise Misconfigured(f"FOLDER {files}: there are no lines in its files")
    return expected


def _make_app() -> "tuple[App, LogStreams]":
    """Return an application with a unique name, so that it shares no keys with others on its broker."""
    from celery5.app import App
    from celery5.examples.log_lines.processors import declare
    from celery5.protocol.job.job import new_id

    app = App(f"demo-{new_id()}", grace_period=GRACE_PERIOD, metrics_interval=0)
    return app, declare(app)


def _run(
    app: "App", streams: "LogStreams", files: Path, expected: "LogTotals", interruption: Interruption
) -> list[str]:
    """Send the files to a worker in this process; return in words what differs from what is expected."""
    import trio

    from celery5.examples.log_lines.folder import list_parts
    from celery5.examples.log_lines.totals import wait_for_totals
    from celery5.processes.development import provide_broker, run_in_background
    from celery5.processes.foreground import ServeOptions

    def send_and_wait() -> list[str]:
        for _ in streams.parts.send_many(list_parts(files)):
            if interruption.was_requested:
                return []
        return wait_for_totals(app, expected, within=QUIET_LIMIT, is_over=lambda: interruption.was_requested)

    async def run() -> list[str]:
        try:
            async with run_in_background(app, ServeOptions()):
                return await trio.to_thread.run_sync(send_and_wait)
        finally:
            with trio.move_on_after(CLEANUP_LIMIT, shield=True):
                await _erase_keys(app)

    with provide_broker(app, interruption):
        return trio.run(run)


async def _erase_keys(app: "App") -> None:
    """Delete the application's keys, since the broker may be shared."""
    from celery5.broker.calls.health import erase_app
    from celery5.streams.operations import erase_streams

    with suppress(BrokerError):
        await erase_streams(app, await app.connections.get_async_driver())
        for call in erase_app(app.keys, [app.queue(app.settings.default_queue)]):
            await app.aperform(call)


def _report(
    folder: Path | None, expected: "LogTotals", seconds: float, differences: list[str], *, wants_json: bool
) -> None:
    lines, errors, alerts = (count.total() for count in (expected.lines, expected.errors, expected.alerts))
    hosts = len({host for host, _ in expected.lines})
    if wants_json:
        counts = {"hosts": hosts, "lines": lines, "errors": errors, "alerts": alerts}
        check = {"matches": not differences, "differences": differences[:100]}
        echo(to_json({**counts, "seconds": round(seconds, 3), **check}))
        return
    rows = {
        "hosts": f"{hosts:,}",
        "minutes": f"{len(expected.lines):,}",
        "lines": f"{lines:,}",
        "errors": f"{errors:,}",
        "alerts": f"{alerts:,}",
        "lines per second": f"{lines / seconds:,.0f}",
        "a plain count of the same files": "differs" if differences else "agrees",
    }
    name = "Log lines that were made for this" if folder is None else str(folder)
    echo(f"{name}, counted by host and minute in {seconds:.2f} s\n\n{format_fields(rows)}\n\n{_WHAT_NEXT}")
