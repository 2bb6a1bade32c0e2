"""List, follow, stop and resume bulk actions, and begin them (`bulk`)."""

import sys
import time
from typing import TYPE_CHECKING

import click

from celery5.cli.terminal.errors import EXIT_FAILED, interrupted_by_sigterm
from celery5.cli.terminal.operation_commands import CommandView, Finished, make_group
from celery5.cli.terminal.output import echo_hint, format_cell, format_time
from celery5.operations.bulk import BULK_OPERATIONS
from celery5.operations.operation import Changed
from celery5.protocol.bulk import DONE, INTERRUPTED, BulkStatus

if TYPE_CHECKING:
    from celery5.app import App

PAUSE = 0.2
"""Seconds between two looks at an action that this process performs."""


def _make_row(status: BulkStatus) -> dict[str, object]:
    progress = status.progress
    return {
        "id": status.id,
        "action": status.action.verb,
        "state": "stopping" if status.stopping else status.state,
        "done": progress.done,
        "failed": progress.failed,
        "skipped": progress.skipped,
        "total": progress.total if progress.is_exact else f"at least {progress.total}",
        "who": status.who,
        "since": format_time(status.created),
        "last progress": format_time(status.changed) if status.changed else "",
        "filter": ", ".join(f"{name}={format_cell(value)}" for name, value in status.action.filter.items()),
    }


def _make_fields(status: BulkStatus) -> dict[str, object]:
    details = {"rate": status.action.rate, "dry run": status.action.dry_run, "error": status.progress.error}
    return {**_make_row(status), **{name: value for name, value in details.items() if value}}


def _follow(app: "App", changed: Changed) -> Changed | BulkStatus | None:
    """Wait until a bulk action has ended that this process performs; return how it has ended."""
    from celery5.services.bulk.bulk_thread import get_bulk_thread

    if not changed.bulk:
        return changed
    try:
        with interrupted_by_sigterm():
            status = _wait(app, changed.bulk)
            get_bulk_thread(app).wait_until_idle()  # this process ends: all must be in the audit trail
            return status
    except KeyboardInterrupt:
        echo_hint(f"interrupted; to go on: celery5 bulk resume {changed.bulk}", err=True)
        raise


def _wait(app: "App", action_id: str) -> BulkStatus | None:
    shows_progress = sys.stderr.isatty()
    while (status := app.bulk.get(action_id)) is not None and not status.has_ended:
        if status.state == INTERRUPTED:  # Redis was away for longer than the action waits
            break
        if shows_progress:
            click.echo(f"\r{status.progress.done} of {status.progress.total} ", err=True, nl=False)
        time.sleep(PAUSE)
    if shows_progress:
        click.echo("\r\x1b[K", err=True, nl=False)
    return status


def _exit_unless_done(finished: Finished) -> None:
    status = finished.result
    if not isinstance(status, Changed) and (status is None or status.state != DONE or status.progress.failed):
        click.get_current_context().exit(EXIT_FAILED)


_PERFORMED = CommandView(row=_make_fields, follow=_follow, after=_exit_unless_done)

bulk = make_group(
    "bulk",
    "Bulk actions replay, purge, revoke or retry many jobs or runs by themselves.",
    BULK_OPERATIONS,
    {
        "list": CommandView(row=_make_row, empty="no bulk actions"),
        "show": CommandView(row=_make_fields),
        "resume": _PERFORMED,
        "revoke": _PERFORMED,
        "retry": _PERFORMED,
    },
)
