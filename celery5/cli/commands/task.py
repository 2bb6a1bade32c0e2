"""Task: the commands about single jobs."""

import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import click

from celery5.cli.commands.limit import COMMANDS as LIMITING
from celery5.cli.commands.limit import format_suspension
from celery5.cli.terminal.flags import Duration
from celery5.cli.terminal.output import (
    clean_lines,
    echo,
    format_cell,
    format_duration,
    format_fields,
    format_table,
    format_time,
    to_json,
)
from celery5.cli.terminal.target import Target
from celery5.errors import BrokerUnavailable, CeleryError
from celery5.protocol.text_values import parse_json_array, parse_json_object

if TYPE_CHECKING:
    from celery5.app import App
    from celery5.protocol.job.envelope import Failure
    from celery5.protocol.job.story import JobDetails
    from celery5.results.async_result import AsyncResult


class UnknownJob(CeleryError):
    """Nothing is known of the id: it was never sent, or its result has expired."""


class NotRevoked(CeleryError):
    """A job had ended before it could be revoked, or nothing is known of it."""


@click.group(no_args_is_help=False)
def task() -> None:
    """Jobs that were sent, and what is imposed on tasks."""


for _each in LIMITING:
    task.add_command(_each)


@task.command()
@click.argument("job_id", metavar="ID")
@click.option("--queue", help="The queue it was sent to; default: looked for on all.")
@click.option("--json", "wants_json", is_flag=True, help="For programs.")
@click.pass_obj
def show(target: Target, job_id: str, queue: str | None, *, wants_json: bool) -> None:
    """Show all that is known of the job ID. Exits with 1 when nothing is known of it."""
    app = target.load()
    story = app.find(job_id, queue=queue)
    if story is None:
        where = f"on queue {queue!r}" if queue else "on any queue"
        raise UnknownJob(
            f"nothing is known of job {job_id!r} {where}: it was never sent, or its result has expired"
        )
    if wants_json:
        echo(to_json(story))
        return
    waits = not story.has_ended and not story.worker
    with app.brokers.reachable():
        imposed = format_suspension(app.limits.list().get(story.task), time.time()) if waits else ""
    echo("\n".join(format_story(story, time.time(), imposed)))


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
    handle = declared.options(**{word: each for word, each in options.items() if each is not None}).delay(
        *args, **kwargs
    )
    echo(handle.id)
    if handle.duplicate:
        echo("nothing was sent: the job with this id already has the key", err=True)


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
    stories, why = _found(app, job_ids, queue)
    handles: list[AsyncResult[Any]] = [
        app.result(each, queue=story.queue) for each, story in stories if story
    ]
    done = {handle.id: (told, handle) for told, handle in zip(revoke_all(handles), handles, strict=True)}
    rows: list[dict[str, object]] = []
    for job_id, _story in stories:
        told, handle = done.get(job_id, (False, None))
        state = handle.status().value if handle else "UNKNOWN"
        rows.append({"id": job_id, "queue": handle.queue if handle else "", "revoked": told, "state": state})
    echo(to_json(rows) if wants_json else format_table(rows, empty=""))
    left = [f"{row['id']} ({row['state']})" for row in rows if not row["revoked"]]
    if left:
        raise NotRevoked(
            f"not revoked: {', '.join(left)}: it had ended before, or nothing is known of it"
            + (f"; {why}" if why else "")
        )


def _found(
    app: "App", job_ids: Iterable[str], queue: str | None
) -> "tuple[list[tuple[str, JobDetails | None]], str]":
    """What is known of each job; and why nothing is of one that may be on a broker that is away. Raises that, when
    nothing is of any."""
    stories, away = list[tuple[str, "JobDetails | None"]](), list[BrokerUnavailable]()
    for each in dict.fromkeys(job_ids):
        try:
            stories.append((each, app.find(each, queue=queue)))
        except BrokerUnavailable as error:
            away.append(error)
            stories.append((each, None))
    if away and not any(story for _, story in stories):
        raise away[0]
    return stories, str(away[0]) if away else ""


def format_story(story: "JobDetails", now: float, imposed: str = "") -> Iterator[str]:
    """The story for people, part by part. `now` is seconds since 1970, `imposed` says that its task is suspended."""
    fields = [*_fields(story, now), ("suspended", imposed)]
    yield format_fields({name: value for name, value in fields if value not in ("", None)})
    if story.failure is not None and story.failure.traceback:
        yield f"\n{clean_lines(story.failure.traceback)}"
    earlier = [each for each in story.failures if each != story.failure]
    if earlier:
        yield "\nattempts that failed"
        yield from (f"  {each.attempt}  {format_cell(_attempt(each))}" for each in earlier)


def _fields(story: "JobDetails", now: float) -> Iterator[tuple[str, object]]:
    yield "id", story.id
    yield "queue", story.queue
    yield "state", story.state.value + (", revoked" if story.revoked and not story.has_ended else "")
    yield "task", story.task
    yield "attempt", _of(story)
    yield "sections", ", ".join(f"{many} for {name}" for name, many in (story.sections or {}).items())
    yield "replays", story.replays or None
    yield "deliveries", f"{story.deliveries} workers died with it" if story.deliveries else None
    yield "key", story.key
    yield "priority", story.priority if story.priority != "normal" else ""
    yield "worker", story.worker
    yield "args", format_cell(story.args) if story.args else None
    yield "kwargs", format_cell(story.kwargs) if story.kwargs else None
    yield "sent", _moment(story.sent, now)
    yield "due", _moment(story.due, now)
    yield "waits at", _gate(story)
    yield "expires", _moment(story.expires, now)
    yield "taken", _moment(story.taken, now)
    yield "started", _moment(story.started, now)
    yield "finished", _moment(story.finished, now)
    yield "took", format_duration(max(0.0, story.finished - story.started)) if story.started else None
    yield "reason", story.reason or _why(story)
    yield "entry", story.dead_entry
    yield "error", f"{story.failure.type}: {story.failure.message}" if story.failure else None
    yield "value", format_cell(to_json(story.value)) if story.state == "SUCCESS" else None


def _why(story: "JobDetails") -> str:
    """Why a job has ended that was not to be run, or not to its end."""
    if story.state == "EXPIRED":
        return "no worker began it before it expired"
    if story.state == "REVOKED":
        return f"revoked while {story.worker} had it" if story.worker else "revoked before a worker had it"
    return ""


def _gate(story: "JobDetails") -> str:
    """Before which gate a job waits that is held there."""
    if not story.gate or story.before is None:
        return ""
    return f"the gate of {story.gate}; {story.before} stand before it in its line"


def _of(story: "JobDetails") -> str:
    for_sections = sum((story.sections or {}).values())
    most = "" if story.max_retries is None else f" of {story.max_retries + 1 + for_sections}"
    return f"{story.attempt}{most}"


def _moment(moment: float, now: float) -> str:
    if not format_time(moment):
        return ""
    return f"{format_time(moment)} ({f'in {format_duration(moment - now)}' if moment > now else f'{format_duration(now - moment)} ago'})"  # noqa: E501


def _attempt(failure: "Failure") -> str:
    where = " ".join(filter(None, (format_time(failure.at), failure.worker)))
    return f"{failure.type}: {failure.message}" + (f" ({where})" if where else "")
