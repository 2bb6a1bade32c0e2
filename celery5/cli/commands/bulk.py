"""List, follow and stop bulk actions (`bulk`)."""

import click

from celery5.cli.terminal.output import echo, format_cell, format_fields, format_table, format_time, to_json
from celery5.cli.terminal.target import Target
from celery5.errors import CeleryError
from celery5.protocol.bulk import BulkStatus


class UnknownBulkAction(CeleryError):
    """There is no bulk action of that id, or it has ended."""


@click.group(no_args_is_help=False)
def bulk() -> None:
    """Bulk actions replay, purge, revoke or retry many jobs or runs by themselves."""


@bulk.command("list")
@click.option("--count", type=click.IntRange(min=1), default=50, show_default=True, help="Actions at most.")
@click.option("--json", "wants_json", is_flag=True, help="For programs.")
@click.pass_obj
def list_actions(target: Target, /, *, count: int, wants_json: bool) -> None:
    """Show the bulk actions of the last day, the newest first."""
    statuses = target.load().bulk.list(count=count)
    if wants_json:
        echo(to_json(statuses))
    else:
        echo(format_table([_make_row(status) for status in statuses], empty="no bulk actions"))


@bulk.command()
@click.argument("action_id", metavar="ID")
@click.option("--json", "wants_json", is_flag=True, help="For programs.")
@click.pass_obj
def show(target: Target, /, *, action_id: str, wants_json: bool) -> None:
    """Show one bulk action, and how far it has come."""
    status = target.load().bulk.get(action_id)
    if status is None:
        raise UnknownBulkAction(f"no bulk action {action_id}: they are kept for a day")
    if wants_json:
        echo(to_json(status))
        return
    details = {"rate": status.action.rate, "dry run": status.action.dry_run, "error": status.progress.error}
    echo(format_fields({**_make_row(status), **{name: value for name, value in details.items() if value}}))


@bulk.command()
@click.argument("action_id", metavar="ID")
@click.pass_obj
def stop(target: Target, /, *, action_id: str) -> None:
    """Stop a bulk action. What is done stays done."""
    if not target.load().bulk.stop(action_id):
        raise UnknownBulkAction(f"no bulk action {action_id} runs or waits")
    echo(f"{action_id} is asked to stop")


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
