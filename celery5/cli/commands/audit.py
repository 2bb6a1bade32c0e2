"""Show who has done what (`audit`)."""

import time

import click

from celery5.cli.terminal.flags import Duration
from celery5.cli.terminal.output import echo, format_cell, format_table, format_time, to_json
from celery5.cli.terminal.target import Target
from celery5.protocol.audit import AuditEntry


@click.group(no_args_is_help=False)
def audit() -> None:
    """See what operators and programs have done to queues, tasks and processes."""


@audit.command("list")
@click.option("--count", type=click.IntRange(min=1), default=50, show_default=True, help="Actions at most.")
@click.option(
    "--action", metavar="ACTION", default="", help="This action: dlq:replay, or dlq for all of dlq."
)
@click.option("--who", metavar="NAME", default="", help="Those of this person: anna, or anna@host.")
@click.option(
    "--since", type=Duration(min=0), metavar="SPAN", help="Those of the last 90 (seconds), 15m, 2h, 7d."
)
@click.option("--before", metavar="ID", default="", help="Those older than this one: the next page.")
@click.option("--json", "wants_json", is_flag=True, help="For programs.")
@click.pass_obj
def list_actions(
    target: Target,
    /,
    *,
    count: int,
    action: str,
    who: str,
    since: float | None,
    before: str,
    wants_json: bool,
) -> None:
    """Show who has done what, from where, and what came of it: the newest first."""
    app = target.load()
    moment = None if since is None else max(0.0, time.time() - since)
    entries = app.audit.list(count=count, action=action, who=who, since=moment, before=before)
    if wants_json:
        echo(to_json([{"at": entry.at, **_get_fields(entry)} for entry in entries]))
    else:
        echo(format_table([_make_row(entry) for entry in entries], empty="no actions are recorded"))
        if len(entries) == count:
            echo(f"for older actions: --before {entries[-1].id}", err=True)


def _get_fields(entry: AuditEntry) -> dict[str, object]:
    return {name: getattr(entry, name) for name in entry.__struct_fields__}


def _make_row(entry: AuditEntry) -> dict[str, object]:
    return {
        "at": format_time(entry.at),
        "who": entry.who,
        "from": entry.source if not entry.job else f"{entry.source}, job {entry.job}",
        "action": entry.action,
        "target": entry.target,
        "filter": ", ".join(f"{name}={format_cell(value)}" for name, value in entry.filter.items()),
        "count": "" if entry.count is None else entry.count,
        "outcome": entry.outcome,
    }
