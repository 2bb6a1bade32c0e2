"""Show, send and revoke single jobs (`task`)."""

import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import click

from celery5.cli.commands.limit import COMMANDS as LIMIT_COMMANDS
from celery5.cli.commands.limit import format_suspension
from celery5.cli.commands.search import format_arguments, format_attempts, search
from celery5.cli.terminal.flags import Duration
from celery5.cli.terminal.output import (
    clean_lines,
    echo,
    format_cell,
    format_fields,
    format_progress,
    format_table,
    format_time,
    to_json,
)
from celery5.cli.terminal.target import Target
from celery5.errors import BrokerUnavailable, CeleryError
from celery5.protocol.durations import format_age, format_duration
from celery5.protocol.job.story import describe_deaths, explain_awaited_code
from celery5.protocol.text_values import parse_json_array, parse_json_object
from celery5.protocol.workflows.member_ids import MemberId, parse_member_id
from celery5.sending.sender import without_backlog

if TYPE_CHECKING:
    from celery5.app import App
    from celery5.protocol.job.messages import Failure, WorkerDeath
    from celery5.protocol.job.story import JobDetails
    from celery5.results.async_result import AsyncResult


class UnknownJob(CeleryError):
    """Nothing is known of the id: it was never sent, or its result has expired."""


class NotRevoked(CeleryError):
    """A job had ended before it could be revoked, or nothing is known of it."""


@click.group(no_args_is_help=False)
def task() -> None:
    """Jobs that were sent, and what is imposed on tasks."""


for _command in (*LIMIT_COMMANDS, search):
    task.add_command(_command)


@task.command()
@click.argument("job_id", metavar="ID")
@click.option("--queue", help="The queue it was sent to; default: looked for on all.")
@click.option("--json", "wants_json", is_flag=True, help="For programs.")
@click.pass_obj
def show(target: Target, job_id: str, queue: str | None, *, wants_json: bool) -> None:
    """Show all that is known of the job ID, and each of its attempts. Exits with 1 when nothing is known of it."""
    from celery5.observability.shown_values import mask_job

    app = target.load()
    details = app.jobs.story(job_id, queue=queue)
    if details is None and (member := parse_member_id(job_id)):
        _show_member(app, member, wants_json=wants_json)
        return
    if details is None:
        where = f"on queue {queue!r}" if queue else "on any queue"
        raise UnknownJob(
            f"nothing is known of job {job_id!r} {where}: it was never sent, or its result has expired"
        )
    details = mask_job(app, details)
    if wants_json:
        echo(to_json(details))
        return
    is_waiting = not details.has_ended and not details.worker
    with app.brokers.reachable():
        suspension = format_suspension(app.limits.list().get(details.task), time.time()) if is_waiting else ""
    echo("\n".join(format_job_details(details, time.time(), suspension)))


def _show_member(app: "App", member: MemberId, *, wants_json: bool) -> None:
    """Show a job of a workflow that has no document of its own: the run keeps its result."""
    run = app.workflows.find(member.run)
    node = next((each for each in run.graph().nodes if each.id == member.node), None) if run else None
    if run is None or node is None:
        raise UnknownJob(f"nothing is known of job {str(member)!r}, nor of its run {member.run}")
    fields = {
        "id": str(member),
        "task": node.name,
        "run": member.run,
        "node": member.node,
        "state": "" if node.kind == "map" else node.state.value,
        "state of the run": run.status().state.value,
    }
    shown = {name: value for name, value in fields.items() if value != ""}
    echo(to_json(shown) if wants_json else format_fields(shown))


@task.command()
@click.argument("name", metavar="TASK")
@click.option("--args", "arguments", default="[]", metavar="JSON", help="Its arguments: '[2, 3]'.")
@click.option("--kwargs", "named", default="{}", metavar="JSON", help="Its named arguments: '{\"n\": 2}'.")
@click.option("--queue", help="The queue to send it to; default: the task's.")
@click.option(
    "--countdown",
    type=Duration(min=0),
    metavar="SPAN",
    help="Delay until it is due: 90 (seconds), 15m, 2h, 1d12h.",
)
@click.option("--key", help="Idempotency key: sent only if no live job of the task has it.")
@click.pass_obj
def send(target: Target, /, name: str, *, arguments: str, named: str, **options: Any) -> None:
    """Send a job of TASK. Prints the job's id."""
    app = target.load(needs_code=True)
    args, kwargs = parse_json_array(arguments, "--args"), parse_json_object(named, "--kwargs")
    declared = app.signature(name).task
    sender = declared.options(**{option: value for option, value in options.items() if value is not None})
    with without_backlog():  # this process ends: it says that the job is sent only if it is
        handle = sender.delay(*args, **kwargs)
    echo(handle.id)
    if handle.duplicate:
        echo("nothing was sent: the job with this id already has the key", err=True)
    else:
        how = {"job": handle.id, **options}
        app.audit.record_sending("task:send", name, how)


@task.command()
@click.argument("job_ids", metavar="ID...", nargs=-1, required=True)
@click.option("--queue", help="The queue they were sent to; default: looked for on all.")
@click.option("--json", "wants_json", is_flag=True, help="For programs.")
@click.pass_obj
def revoke(target: Target, job_ids: tuple[str, ...], queue: str | None, *, wants_json: bool) -> None:
    """Have the jobs ID... not run, or stop if they run. Exits with 1 when one of them had ended before, or nothing is
    known of it; the others are revoked all the same."""
    from celery5.results.async_result import revoke as revoke_all

    app = target.load()
    jobs, error = _find_jobs(app, job_ids, queue)
    handles: list[AsyncResult[Any]] = [
        app.result(job_id, queue=details.queue) for job_id, details in jobs if details
    ]
    outcomes = {
        handle.id: (was_revoked, handle)
        for was_revoked, handle in zip(revoke_all(handles), handles, strict=True)
    }
    rows: list[dict[str, object]] = []
    for job_id, _details in jobs:
        was_revoked, handle = outcomes.get(job_id, (False, None))
        state = handle.status().value if handle else "UNKNOWN"
        rows.append(
            {"id": job_id, "queue": handle.queue if handle else "", "revoked": was_revoked, "state": state}
        )
    echo(to_json(rows) if wants_json else format_table(rows, empty=""))
    not_revoked = [f"{row['id']} ({row['state']})" for row in rows if not row["revoked"]]
    if not_revoked:
        raise NotRevoked(
            f"not revoked: {', '.join(not_revoked)}: it had ended before, or nothing is known of it"
            + (f"; {error}" if error else "")
        )


def _find_jobs(
    app: "App", job_ids: Iterable[str], queue: str | None
) -> "tuple[list[tuple[str, JobDetails | None]], str]":
    """Return the details of each job, None where there are none, and the error of an unreachable broker, '' for none.

    Raises that error when there are no details of any job.
    """
    jobs, errors = list[tuple[str, "JobDetails | None"]](), list[BrokerUnavailable]()
    for job_id in dict.fromkeys(job_ids):
        try:
            jobs.append((job_id, app.find(job_id, queue=queue)))
        except BrokerUnavailable as error:
            errors.append(error)
            jobs.append((job_id, None))
    if errors and not any(details for _, details in jobs):
        raise errors[0]
    return jobs, str(errors[0]) if errors else ""


def format_job_details(details: "JobDetails", now: float, suspension: str = "") -> Iterator[str]:
    """Yield the details of a job for people, part by part.

    `now` is seconds since 1970. `suspension` is a text about that of its task, '' for none.
    """
    fields = [*_fields(details, now), ("suspended", suspension)]
    yield format_fields({name: value for name, value in fields if value not in ("", None)})
    if details.failure is not None and details.failure.traceback:
        yield f"\n{clean_lines(details.failure.traceback)}"
    if details.deaths:
        yield "\nworkers that died with it"
        yield from (f"  {format_cell(_format_death(death, now))}" for death in details.deaths)
    earlier = [failure for failure in details.failures if failure != details.failure]
    if details.attempts:
        yield "\nattempts in the history"
        yield from format_attempts(details.attempts)
    elif earlier:
        yield "\nattempts that failed"
        yield from (f"  {failure.attempt}  {format_cell(_format_failure(failure))}" for failure in earlier)


def _fields(details: "JobDetails", now: float) -> Iterator[tuple[str, object]]:
    yield "id", details.id
    yield "run", member.run if (member := parse_member_id(details.id)) else ""
    yield "queue", details.queue
    yield "state", details.state.value + (", revoked" if details.revoked and not details.has_ended else "")
    yield "task", details.task
    yield "attempt", _format_attempt(details)
    yield "sections", ", ".join(f"{count} for {name}" for name, count in (details.sections or {}).items())
    yield "replays", details.replays or None
    yield "deliveries", describe_deaths(details.deliveries) or None
    yield "event", details.event
    yield "key", details.key
    yield "priority", details.priority if details.priority != "normal" else ""
    yield "worker", details.worker
    yield "args", format_cell(details.args) if details.args else None
    yield "kwargs", format_cell(details.kwargs) if details.kwargs else None
    yield "sent", _format_moment(details.sent, now)
    yield "due", _format_moment(details.due, now)
    yield "waits at", _format_waiting(details)
    yield "waits for", format_cell(explain_awaited_code(details, _format_moment(details.due, now)))
    yield "expires", _format_moment(details.expires, now)
    yield "taken", _format_moment(details.taken, now)
    yield "started", _format_moment(details.started, now)
    yield "progress", _format_job_progress(details, now)
    yield "finished", _format_moment(details.finished, now)
    yield "took", format_duration(max(0.0, details.finished - details.started)) if details.started else None
    yield "reason", details.reason or _explain_end(details)
    yield "entry", details.dead_entry
    yield "error", f"{details.failure.type}: {details.failure.message}" if details.failure else None
    yield "value", format_cell(to_json(details.value)) if details.has_result else None
    yield "arguments", format_arguments(details.attempts[-1]) if details.is_from_history else ""
    yield "trace", details.trace
    yield "log", f"journalctl CELERY5_JOB={details.id}" if details.attempts else ""


def _explain_end(details: "JobDetails") -> str:
    """Return why a job expired or was revoked; '' for other states."""
    if details.state == "EXPIRED":
        return "no worker began it before it expired"
    if details.state == "REVOKED":
        return (
            f"revoked while {details.worker} had it" if details.worker else "revoked before a worker had it"
        )
    return ""


def _format_waiting(details: "JobDetails") -> str:
    """Return at which limit a held job waits, and its place; '' for other jobs."""
    if not details.limit or details.jobs_ahead is None:
        return ""
    return f"the limit of {details.limit}; jobs ahead of it: {details.jobs_ahead}"


def _format_attempt(details: "JobDetails") -> str:
    for_sections = sum((details.sections or {}).values())
    limit = "" if details.max_retries is None else f" of {details.max_retries + 1 + for_sections}"
    return f"{details.attempt}{limit}"


def _format_job_progress(details: "JobDetails", now: float) -> str:
    progress = details.progress
    if progress is None:
        return ""
    age = format_age(min(progress.at, now), now)
    return f"{format_progress(progress.done, progress.total, progress.note)} ({age})"


def _format_moment(moment: float, now: float) -> str:
    time_text = format_time(moment)
    if not time_text:
        return ""
    return f"{time_text} ({format_age(moment, now)})"


def _format_death(death: "WorkerDeath", now: float) -> str:
    why = f": {death.why}" if death.why else ""
    return f"{_format_moment(death.at, now)}  {death.worker}{why}"


def _format_failure(failure: "Failure") -> str:
    place = " ".join(filter(None, (format_time(failure.at), failure.worker)))
    return f"{failure.type}: {failure.message}" + (f" ({place})" if place else "")
