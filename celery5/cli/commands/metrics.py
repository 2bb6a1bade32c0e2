"""Show how jobs of each task end, run and wait, and print what Prometheus and Grafana need (`metrics`)."""

from collections import Counter
from importlib.resources import files
from typing import TYPE_CHECKING

import click

from celery5.cli.terminal.flags import Duration
from celery5.cli.terminal.operation_commands import CommandView, make_command
from celery5.cli.terminal.output import CommandGroup, echo, format_table, format_time, to_json
from celery5.cli.terminal.target import Target
from celery5.operations.queues import HISTORY
from celery5.protocol.durations import format_duration
from celery5.protocol.observability.overview import format_share

if TYPE_CHECKING:
    from celery5.observability.metrics import HistoryPoint, TaskNumbers
    from celery5.protocol.observability.overview import ReportingProcess


@click.group(cls=CommandGroup, no_args_is_help=False)
def metrics() -> None:
    """How jobs end, run and wait; rules for Prometheus and a dashboard for Grafana."""


@metrics.command()
@click.argument("queue", default="")
@click.option(
    "--since",
    type=Duration(min=0),
    metavar="SPAN",
    default="1h",
    show_default=True,
    help="Begin 90 (seconds), 15m, 2h or 7d ago, on the full hour.",
)
@click.option("--json", "wants_json", is_flag=True, help="For programs.")
@click.pass_obj
def show(target: Target, queue: str, *, since: float, wants_json: bool) -> None:
    """Show how the jobs of each task ended, ran and waited, on QUEUE or on all queues.

    Below, it says how old the last report of each process is, and which is stale.
    """
    app = target.load()
    summaries = app.metrics.summary(queue, since=since)
    if wants_json:
        echo(to_json([{"queue": name, **_get_fields(summary)} for name, summary in summaries.items()]))
        return
    rows = [_make_row(name, task) for name, summary in summaries.items() for task in summary.tasks]
    echo(format_table(rows, empty="no jobs have ended in that time, as far as metrics are stored"))
    if processes := app.metrics.processes():
        echo("\n" + format_table([_make_process_row(process) for process in processes], empty=""))


def _make_process_row(process: "ReportingProcess") -> dict[str, object]:
    return {
        "process": process.name,
        "kind": process.kind,
        "last report": "" if process.reported is None else f"{process.reported:.0f} s ago",
        "state": process.state,
    }


def _get_fields(summary: "HistoryPoint") -> dict[str, object]:
    fields: dict[str, object] = {name: getattr(summary, name) for name in summary.__struct_fields__}
    tasks = [
        {"failed_share": task.failed_share, **{name: getattr(task, name) for name in task.__struct_fields__}}
        for task in summary.tasks
    ]
    return {**fields, "tasks": tasks}


def _make_row(queue: str, task: "TaskNumbers") -> dict[str, object]:
    share = task.failed_share
    return {
        "queue": queue,
        "task": task.task,
        "attempts": ", ".join(f"{count} {state}" for state, count in sorted(task.counts.items())),
        "failed": "" if share is None else format_share(share),
        "run p50, p95, p99": _format_percentiles(task.run),
        "wait p50, p95, p99": _format_percentiles(task.wait),
    }


def _format_percentiles(percentiles: dict[str, float] | None) -> str:
    return ", ".join(format_duration(seconds) for seconds in (percentiles or {}).values())


def _make_history_row(point: "HistoryPoint") -> dict[str, object]:
    counts = Counter[str]()
    for task in point.tasks:
        counts.update(task.counts)
    return {
        "at": format_time(point.at),
        "backlog": f"{point.depth:g}",
        "oldest": format_duration(point.oldest),
        "dead": f"{point.dead:g}",
        "held": f"{point.held:g}",
        "scheduled": f"{point.scheduled:g}",
        "attempts": ", ".join(f"{count} {state}" for state, count in sorted(counts.items())),
    }


metrics.add_command(
    make_command(
        HISTORY,
        CommandView(
            row=_make_history_row, empty="nothing was measured in that time, as far as metrics are stored"
        ),
    )
)


@metrics.command()
def rules() -> None:
    """Print recording rules and alerts for Prometheus, as YAML."""
    echo(_read("celery5-rules.yml"), nl=False)


@metrics.command()
def dashboard() -> None:
    """Print a dashboard for Grafana, as JSON to import. It needs the rules."""
    echo(_read("celery5-dashboard.json"), nl=False)


def _read(name: str) -> str:
    return (files("celery5.observability") / "monitoring" / name).read_text(encoding="utf-8")
