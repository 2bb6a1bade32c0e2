"""Impose limits on tasks, suspend tasks and resume them (commands of `task`)."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import click

from celery5.cli.terminal.errors import skip_unreachable
from celery5.cli.terminal.output import echo, format_cell, format_table, format_time, to_json
from celery5.cli.terminal.target import Target
from celery5.errors import Misconfigured
from celery5.protocol.durations import format_age
from celery5.protocol.text_values import COUNT

if TYPE_CHECKING:
    from celery5.app import App
    from celery5.limits.overrides import TaskLimits

NO_LIMIT = "none"
"""The LIMIT that removes an imposed limit."""


@click.command(context_settings={"ignore_unknown_options": True})  # else -1 would be an option
@click.argument("name", metavar="TASK")
@click.argument("limit", metavar="LIMIT")
@click.option(
    "--kind", "is_kind", is_flag=True, help="TASK is a kind of task, such as thread; LIMIT is a rate."
)
@click.pass_obj
def limit(target: Target, name: str, limit: str, *, is_kind: bool) -> None:
    """Impose LIMIT on TASK, for all workers, which hear of it in moments: a number of jobs that may run at the same
    time (0 rejects them), a rate such as 200/m, or none, which takes back what was imposed."""
    if is_kind:
        _limit_kind(target, name, limit)
        return
    app = target.load(needs_code=True)
    limits = app.limits
    with skip_unreachable(app):
        if limit == NO_LIMIT:
            done = limits.lift(name)
            echo(f"{format_cell(name)}: {'its own limit again' if done else 'nothing was imposed'}")
        elif "/" in limit:
            limits.set(name, limit)
            echo(f"{format_cell(name)}: rate {format_cell(limit)}")
        else:
            try:
                count = COUNT.parse(limit)
            except Misconfigured:
                raise Misconfigured(
                    f"limit {limit!r}: give a number from 0, a rate such as 200/m, or none"
                ) from None
            limits.set(name, count)
            echo(f"{format_cell(name)}: limit {format_cell(limit)}")
        if (imposed := limits.list().get(name)) is not None and imposed.rules:
            echo(f"for now the Scheduler's comes first: {format_rule_limit(imposed)}")


def _limit_kind(target: Target, kind: str, rate: str) -> None:
    app = target.load()
    with skip_unreachable(app):
        if rate == NO_LIMIT:
            done = app.limits.lift_kind_rate(kind)
            echo(
                f"kind {format_cell(kind)}: {'no rate but that of the setting' if done else 'nothing was imposed'}"
            )
        else:
            app.limits.set_kind_rate(kind, rate)
            echo(f"kind {format_cell(kind)}: rate {format_cell(rate)}")


@click.command()
@click.argument("name", metavar="TASK")
@click.option("--why", default="", help="The reason, which `limit list` and `info` show.")
@click.pass_obj
def suspend(target: Target, name: str, why: str) -> None:
    """Begin no job of TASK on any worker until it is resumed. Its jobs wait in Redis; what runs is run to its end.

    Workers hear of it in moments: until then some jobs may still begin."""
    app = target.load(needs_code=True)
    with skip_unreachable(app):
        app.limits.suspend(name, why=why)
        echo(f"{format_cell(name)}: suspended")


@click.command()
@click.argument("name", metavar="TASK")
@click.pass_obj
def resume(target: Target, name: str) -> None:
    """Let the jobs of TASK, which was suspended, run again in their order."""
    app = target.load(needs_code=True)
    with skip_unreachable(app):
        done = app.limits.resume(name)
        echo(f"{format_cell(name)}: {'resumed' if done else 'was not suspended'}")


@click.command("limits")
@click.option("--json", "wants_json", is_flag=True, help="For programs.")
@click.pass_obj
def show_limits(target: Target, *, wants_json: bool) -> None:
    """Show what is imposed on tasks, and which are suspended."""
    app = target.load()
    with skip_unreachable(app, wants_json=wants_json):
        _show(app.limits.list(), wants_json=wants_json)


def _show(limits_by_task: "Mapping[str, TaskLimits]", *, wants_json: bool) -> None:
    if wants_json:
        echo(to_json(list(limits_by_task.values())))
        return
    rows: list[dict[str, object]] = [
        {
            "task": limits.task,
            "limit": "" if limits.limit is None else limits.limit,
            "rate": limits.rate,
            "suspended": limits.why or ("yes" if limits.suspended else ""),
            "until": format_time(limits.until) if limits.until else "",
            "by": ", ".join(dict.fromkeys(filter(None, (limits.limited_by, limits.suspended_by)))),
        }
        for limits in limits_by_task.values()
    ]
    echo(format_table(rows, empty="nothing is imposed on any task"))


def format_suspensions(app: "App") -> str:
    """Return which tasks are suspended, and why; '' when none is."""
    suspended = [limits for limits in app.limits.list().values() if limits.suspended]
    descriptions = [f"{limits.task} ({limits.why})" if limits.why else limits.task for limits in suspended]
    return format_cell(", ".join(descriptions))


def format_rule_limit(limits: "TaskLimits") -> str:
    """Return the limit that the Scheduler imposes on a task, and by which rules."""
    values = (
        f"limit {limits.limit}" if limits.limit is not None else "",
        limits.rate and f"rate {limits.rate}",
    )
    return f"{limits.task} {', '.join(filter(None, values))} by rule {', '.join(limits.rules)}"


def format_rule_limits(app: "App") -> str:
    """Return which tasks the Scheduler limits, and by which rules; '' when none is."""
    limited = [limits for limits in app.limits.list().values() if limits.rules]
    return format_cell("; ".join(format_rule_limit(limits) for limits in limited))


def format_suspension(limits: "TaskLimits | None", now: float) -> str:
    """Return since when a task is suspended, who suspended it and why; '' when it is not suspended."""
    if limits is None or not limits.suspended:
        return ""
    start = limits.suspended_since
    since = f"since {format_time(start)} ({format_age(min(start, now), now)})"
    details = (
        since if format_time(start) else "",
        limits.suspended_by and f"by {limits.suspended_by}",
    )
    why = f": {limits.why}" if limits.why else ""
    return f"{' '.join(filter(None, ('its task is', *details)))}{why}; to go on: celery5 task resume {limits.task}"


COMMANDS = (limit, suspend, resume, show_limits)
"""The commands that the group `task` adds."""
