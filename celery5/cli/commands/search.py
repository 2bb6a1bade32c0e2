"""Search jobs that live or have ended (`task search`), and show the attempts of one."""

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from celery5.cli.terminal.filters import warn_of_unknown_tasks
from celery5.cli.terminal.flags import Duration
from celery5.cli.terminal.output import echo, format_cell, format_table, format_time, to_json
from celery5.cli.terminal.target import Target
from celery5.protocol.durations import format_duration

if TYPE_CHECKING:
    from celery5.protocol.job.history import JobRecord


@click.command()
@click.option("--id", metavar="ID", default="", help="The job with this id.")
@click.option("--task", metavar="TASK", default="", help="Jobs of this task: 'shop.*' for several.")
@click.option("--queue", metavar="QUEUE", default="", help="Jobs of this queue.")
@click.option(
    "--state", metavar="STATE", default="", help="Jobs in this state, or attempts that ended in it."
)
@click.option(
    "--error", metavar="ERROR", default="", help="Failed with this error: its class, or a part of its text."
)
@click.option("--worker", metavar="WORKER", default="", help="This worker had it: 'web-1*' for several.")
@click.option("--argument", metavar="PATH=VALUE", default="", help="An argument has this value: order.id=7.")
@click.option(
    "--since", type=Duration(min=0), metavar="SPAN", help="Ended, or sent, in the last 90 (seconds), 15m, 2h."
)
@click.option("--until", type=Duration(min=0), metavar="SPAN", help="Ended, or sent, so long ago or longer.")
@click.option(
    "--limit", type=click.IntRange(1, 1000), default=100, show_default=True, help="Jobs on a page, at most."
)
@click.option("--cursor", metavar="CURSOR", help="Where the page before has ended.")
@click.option("--json", "wants_json", is_flag=True, help="For programs.")
@click.pass_obj
def search(
    target: Target, /, *, since: float | None, until: float | None, wants_json: bool, **filters: Any
) -> None:
    """Find jobs that wait, run, are dead or have ended. Of successes only the slowest and samples are kept."""
    app, now = target.load(), time.time()
    page = app.jobs.search(
        since=None if since is None else max(0.0, now - since),
        until=None if until is None else max(0.0, now - until),
        **filters,
    )
    if wants_json:
        echo(to_json(page))
        return
    echo(format_table([_make_row(job) for job in page.jobs], empty="no jobs were found"))
    if not page.jobs and filters["task"]:
        warn_of_unknown_tasks(app, [filters["task"]])
    if page.not_looked_at:
        echo(f"not looked at: {page.not_looked_at}", err=True)
    if page.cursor is not None:
        echo(f"{page.looked_at} jobs were looked at; go on with --cursor {page.cursor}", err=True)


def _make_row(job: "JobRecord") -> dict[str, object]:
    return {
        "at": format_time(job.at),
        "state": f"{job.state} (replayed or purged since)" if job.has_left else job.state,
        "id": job.id,
        "task": job.task,
        "queue": job.queue,
        "attempt": job.attempt,
        "waited": _format_seconds(job.waited),
        "ran": _format_seconds(job.ran),
        "worker": job.worker,
        "error": job.error or job.reason,
        "arguments": format_arguments(job),
    }


def format_arguments(job: "JobRecord") -> str:
    """Return the arguments of a job on one line."""
    return ", ".join(f"{name}={to_json(value)}" for name, value in job.arguments.items())


def format_attempts(attempts: "Sequence[JobRecord]") -> Iterator[str]:
    """Yield the attempts of a job for people, a line for each."""
    rows: list[dict[str, object]] = [
        {
            "attempt": job.attempt,
            "ended": format_time(job.ended),
            "state": job.state,
            "waited": _format_seconds(job.waited),
            "ran": _format_seconds(job.ran),
            "worker": job.worker,
            "limit": job.limit,
            "error": format_cell(job.error or job.reason),
        }
        for job in attempts
    ]
    empty = {name for name in rows[0] if all(row[name] == "" for row in rows)}
    shown = [{name: value for name, value in row.items() if name not in empty} for row in rows]
    yield from (f"  {line}" for line in format_table(shown, empty="").splitlines())


def _format_seconds(seconds: float | None) -> str:
    return "" if seconds is None else format_duration(seconds)
