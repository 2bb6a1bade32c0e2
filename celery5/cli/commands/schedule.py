"""Show, add and control the schedules of periodic tasks (`schedule`)."""

import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, cast

import click

from celery5.cli.terminal.errors import skip_unreachable
from celery5.cli.terminal.flags import Duration
from celery5.cli.terminal.output import echo, format_fields, format_table, format_time, to_json, to_one_line
from celery5.cli.terminal.target import Target
from celery5.errors import Misconfigured
from celery5.protocol.brokers import DEFAULT_BROKER
from celery5.protocol.text_values import parse_json_array, parse_json_object

if TYPE_CHECKING:
    from celery5.protocol.scheduling.triggers import AnyTrigger
    from celery5.scheduling.schedules import ScheduleState

JSON_FLAG = click.option("--json", "wants_json", is_flag=True, help="For programs.")
NAME_ARGUMENT = click.argument("name")
OVERDUE_AFTER = 5.0
"""Seconds after which an unpublished fire time is overdue: a live Scheduler checks this often."""


@click.group(no_args_is_help=False)
def schedule() -> None:
    """Schedules send the jobs of periodic tasks."""


@schedule.command("list")
@JSON_FLAG
@click.pass_obj
def list_schedules(target: Target, *, wants_json: bool) -> None:
    """Show each schedule: when it fired last, when it fires next, and how often it did, and did not."""
    app = target.load()
    with skip_unreachable(app, wants_json=wants_json) as reached:
        schedules = app.schedule.list()
        if wants_json:
            echo(to_json(schedules))
            return
        active = any(state.state == "active" for state in schedules)
        if active and not app.schedule.schedulers() and DEFAULT_BROKER not in reached.errors:
            echo(
                f"no Scheduler of {app.name} is running: nothing fires until celery5 scheduler start",
                err=True,
            )
        _print_schedules(schedules)


def _print_schedules(schedules: "list[ScheduleState]") -> None:
    rows: list[dict[str, object]] = [
        {
            "schedule": state.name,
            "when": state.when,
            "state": state.state,
            "last": format_time(state.last or 0),
            "next": _format_next(state),
            "fired": state.fired,
            "missed": state.missed,
            "skipped": state.skipped,
        }
        for state in schedules
    ]
    echo(format_table(rows, empty="no schedules: none was added, and no Scheduler has declared any"))


@schedule.command()
@NAME_ARGUMENT
@JSON_FLAG
@click.pass_obj
def show(target: Target, name: str, *, wants_json: bool) -> None:
    """Show all that is known of a schedule."""
    _print_state(target.load().schedule.show(name), wants_json=wants_json)


@schedule.command()
@NAME_ARGUMENT
@click.argument("task")
@click.option("--cron", metavar="LINE", help="A line of a crontab: '0 3 * * *'.")
@click.option("--every", type=Duration(), metavar="SECONDS", help="An interval.")
@click.option("--at", "moment", metavar="TIME", help="Once: 2026-12-24T18:00:00+01:00.")
@click.option("--timezone", metavar="ZONE", help="Of --cron: Europe/Berlin; default: the setting.")
@click.option("--args", "arguments", default="[]", metavar="JSON", help="The task's arguments, as a list.")
@click.option("--kwargs", default="{}", metavar="JSON", help="Those by name, as an object.")
@click.option("--queue", help="The queue of its jobs.")
@click.option("--misfire", type=click.Choice(["skip", "once", "catch-up"]), default="once", show_default=True)
@click.option("--overlap", type=click.Choice(["allow", "skip", "queue"]), default="allow", show_default=True)
@click.option("--jitter", type=Duration(), default=0.0, metavar="SECONDS", help="Put off by up to so much.")
@JSON_FLAG
@click.pass_obj
def add(target: Target, /, name: str, task: str, *, wants_json: bool, **flags: Any) -> None:
    """Add a schedule NAME, which sends jobs of TASK."""
    app = target.load(needs_code=True)
    args = parse_json_array(flags["arguments"], "--args")
    kwargs = parse_json_object(flags["kwargs"], "--kwargs")
    call = app.signature(task, *args, **kwargs)
    if flags["queue"]:
        call = call.task.options(queue=flags["queue"]).s(*args, **kwargs)
    when = _parse_when(flags["cron"], flags["every"], flags["moment"], flags["timezone"])
    policies = {option: flags[option] for option in ("misfire", "overlap", "jitter")}
    _print_state(app.schedule.add(call, when, name=name, **policies), wants_json=wants_json)


@schedule.command()
@NAME_ARGUMENT
@JSON_FLAG
@click.pass_obj
def pause(target: Target, name: str, *, wants_json: bool) -> None:
    """Let a schedule rest until it is resumed."""
    _print_state(target.load().schedule.pause(name), wants_json=wants_json)


@schedule.command()
@NAME_ARGUMENT
@JSON_FLAG
@click.pass_obj
def resume(target: Target, name: str, *, wants_json: bool) -> None:
    """Have a schedule go on, with its next time that is still to come."""
    _print_state(target.load().schedule.resume(name), wants_json=wants_json)


@schedule.command()
@NAME_ARGUMENT
@JSON_FLAG
@click.pass_obj
def remove(target: Target, name: str, *, wants_json: bool) -> None:
    """Remove a schedule; jobs that it has sent stay."""
    app = target.load()
    removed = app.schedule.remove(name)
    if wants_json:
        echo(to_json(removed))
        return
    hint = (
        " It is declared in code: a Scheduler that begins declares it again."
        if removed.origin != "runtime"
        else ""
    )
    echo(f"removed {to_one_line(removed.name)}.{hint}")


@schedule.command()
@NAME_ARGUMENT
@JSON_FLAG
@click.pass_obj
def trigger(target: Target, name: str, *, wants_json: bool) -> None:
    """Send a schedule's job now; its times stay as they are."""
    sent = target.load().schedule.trigger(name)
    echo(to_json({"id": sent.id}) if wants_json else sent.id)


def _parse_when(
    line: str | None, seconds: float | None, moment: str | None, zone: str | None
) -> "AnyTrigger":
    from celery5.protocol.scheduling.declaration import at, cron, every

    if sum(option is not None for option in (line, seconds, moment)) != 1:
        raise Misconfigured("say when: --cron, --every or --at, one of them")
    if zone is not None and line is None:
        raise Misconfigured("--timezone is for --cron")
    if zone == "":
        raise Misconfigured("--timezone '' is no time zone: give a name like Europe/Berlin, or leave it out")
    if line is not None:
        return cron(line, timezone=zone or "")
    if seconds is not None:
        return every(seconds)
    try:
        fire_time = datetime.fromisoformat(cast("str", moment))
    except ValueError:
        raise Misconfigured(f"--at {moment!r} is no time: give one like 2026-12-24T18:00:00+01:00") from None
    if fire_time.utcoffset() is None:
        offset = fire_time.replace(tzinfo=UTC).isoformat()
        raise Misconfigured(f"--at {moment!r} does not say where: give an offset from UTC, such as {offset}")
    return at(fire_time)


def _format_next(state: "ScheduleState") -> str:
    """Return when a schedule fires next, and whether that is overdue; '' when it does not."""
    if state.next is None:
        return ""
    overdue = time.time() - state.next > state.jitter + OVERDUE_AFTER
    return f"{format_time(state.next)}{' overdue' if overdue else ''}"


def _print_state(state: "ScheduleState", *, wants_json: bool) -> None:
    if wants_json:
        echo(to_json(state))
        return
    limit = "" if state.misfire.limit is None else f", {state.misfire.limit:g} s at most"
    echo(
        format_fields(
            {
                "schedule": state.name,
                "task": state.task,
                "queue": state.queue,
                "when": state.when,
                "state": state.state,
                "last": format_time(state.last or 0),
                "next": _format_next(state),
                "fired": state.fired,
                "missed": state.missed,
                "skipped": state.skipped,
                "triggered": state.triggered,
                "last job": state.job,
                "overlap": state.overlap,
                "misfire": f"{state.misfire.policy}, late after {state.misfire.after:g} s{limit}",
                "jitter": f"{state.jitter:g} s",
                "declared by": state.origin,
            }
        )
    )
