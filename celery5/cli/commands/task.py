"""Show, find, send and revoke jobs, and impose limits on tasks (`task`)."""

import time
from typing import TYPE_CHECKING

import click

from celery5.cli.commands.job_details import format_job_details, format_seconds
from celery5.cli.commands.limit import format_rule_limit, format_suspension
from celery5.cli.terminal.filters import refuse_unknown_tasks
from celery5.cli.terminal.flags import Duration
from celery5.cli.terminal.operation_commands import CommandView, Finished, Started, make_group, perform
from celery5.cli.terminal.output import echo, format_fields, format_table, format_time, to_json
from celery5.errors import CeleryError
from celery5.operations.jobs import JOB_OPERATIONS, SHOW
from celery5.operations.limits import LIMIT_OPERATIONS, NewLimit
from celery5.operations.operation import Changed, NotFound
from celery5.protocol.counts import format_count
from celery5.protocol.job.history import format_arguments
from celery5.protocol.workflows.member_ids import MemberId, parse_member_id

if TYPE_CHECKING:
    from celery5.app import App
    from celery5.observability.job_search import JobPage
    from celery5.protocol.job.history import JobRecord
    from celery5.protocol.job.story import JobDetails


class NotRevoked(CeleryError):
    """A job had ended before it could be revoked, or nothing is known of it."""


def _show_job(started: Started) -> None:
    """Print what is known of a job; of a job of a workflow without a document of its own, what its run keeps."""
    app, asked = started.app, started.asked
    try:
        details: JobDetails = perform(app, SHOW, asked)
    except NotFound:
        if (member := parse_member_id(asked.id)) is None:
            raise
        fields = _find_in_run(app, member)
        echo(to_json(fields) if started.wants_json else format_fields(fields))
        return
    if started.wants_json:
        echo(to_json(details))
        return
    is_waiting = not details.has_ended and not details.worker
    with app.brokers.reachable():
        suspension = format_suspension(app.limits.list().get(details.task), time.time()) if is_waiting else ""
    echo("\n".join(format_job_details(details, time.time(), suspension)))


def _find_in_run(app: "App", member: MemberId) -> dict[str, object]:
    """Return what the run of a workflow keeps of a job. Raises NotFound."""
    run = app.workflows.find(member.run)
    node = next((node for node in run.graph().nodes if node.id == member.node), None) if run else None
    if run is None or node is None:
        raise NotFound(f"nothing is known of job {str(member)!r}, nor of its run {member.run}")
    fields = {
        "id": str(member),
        "task": node.name,
        "run": member.run,
        "node": member.node,
        "state": "" if node.kind == "map" else node.state.value,
        "state of the run": run.status().state.value,
    }
    return {name: value for name, value in fields.items() if value != ""}


def _make_search_row(job: "JobRecord", *, any_due: bool) -> dict[str, object]:
    ran = format_seconds(job.ran)
    return {
        "at": format_time(job.at),
        **({"due": "" if job.ended else format_time(job.due)} if any_due else {}),
        "state": f"{job.state} (replayed or purged since)" if job.has_left else job.state,
        "id": job.id,
        "task": job.task,
        "queue": job.queue,
        "attempt": job.attempt,
        "waited": format_seconds(job.waited),
        "ran": f"{ran} so far" if ran and not job.ended else ran,
        "worker": job.worker,
        "error": job.error or job.reason,
        "arguments": format_arguments(job.arguments),
    }


def _format_page(page: "JobPage") -> str:
    empty = f"no jobs were found{f'; {_describe_delay(page)}' if page.behind else ''}"
    any_due = any(job.due and not job.ended for job in page.jobs)
    return format_table([_make_search_row(job, any_due=any_due) for job in page.jobs], empty=empty)


def _describe_delay(page: "JobPage") -> str:
    return f"the history may be {format_seconds(page.behind)} behind: what has just ended may be missing"


def _end_search(finished: Finished) -> None:
    """Print what was not looked at, and where the next page begins. Raises UnknownTask where nothing is found."""
    page: JobPage = finished.result
    if not finished.wants_json:
        _show_next_page(page)
    if not page.jobs and finished.asked.task:
        refuse_unknown_tasks(finished.app, [finished.asked.task])


def _show_next_page(page: "JobPage") -> None:
    if page.not_looked_at:
        echo(f"not looked at: {page.not_looked_at}", err=True)
    if page.jobs and page.behind and page.cursor is None:
        echo(_describe_delay(page), err=True)
    if page.cursor is not None:
        echo(
            f"{format_count(page.looked_at, 'job was', 'jobs were')} looked at; go on with --cursor {page.cursor}",
            err=True,
        )


def _show_sent(finished: Finished) -> None:
    """Print the id of the job; with --wait its result. Raises TaskFailed, ResultTimeout and what else `get` raises."""
    from celery5.observability.shown_values import mask_value

    app, job_id, seconds = finished.app, finished.result.value["id"], finished.flags["wait"]
    if seconds is None:
        echo(to_json(finished.result.value) if finished.wants_json else job_id)
        return
    job = app.result(job_id, queue=finished.asked.queue, task=app.tasks[finished.asked.task])
    try:
        value = mask_value(app, job.get(seconds))
    except CeleryError:
        if finished.wants_json:
            echo(to_json({"id": job_id, "state": job.status().value, "result": None}))
        raise
    echo(to_json({"id": job_id, "state": "SUCCESS", "result": value} if finished.wants_json else value))


def _show_duplicate(finished: Finished) -> None:
    if not finished.result.count:
        echo("nothing was sent: the job with this id already has the key", err=True)


def _show_revoked(finished: Finished) -> None:
    """Print what became of each job. Raises NotRevoked."""
    changed: Changed = finished.result
    if changed.dry_run:
        echo(to_json(changed) if finished.wants_json else changed.summary)
        return
    rows = changed.value
    if finished.wants_json:
        echo(to_json(rows))
    else:
        columns = ("id", "queue", "revoked", "state")
        echo(format_table([{name: getattr(row, name) for name in columns} for row in rows], empty=""))
        for row in rows:
            if row.stops_when:
                echo(f"{row.id} still runs: {row.stops_when}", err=True)
    if changed.failure:
        raise NotRevoked(changed.failure)


def _show_rule_limit(finished: Finished) -> None:
    """Print the limit that a rule imposes, as it comes before the one that was set."""
    asked: NewLimit = finished.asked
    imposed = None if finished.wants_json or asked.is_kind else finished.app.limits.list().get(asked.task)
    if imposed is not None and imposed.rules:
        echo(f"for now the Scheduler's comes first: {format_rule_limit(imposed)}")


task = make_group(
    "task",
    "Jobs that were sent, and what is imposed on tasks.",
    [*JOB_OPERATIONS, *LIMIT_OPERATIONS],
    {
        "show": CommandView(
            run=_show_job,
            help="Show all that is known of the job ID, and each of its attempts. "
            "Exits with 1 when nothing is known of it.",
        ),
        "search": CommandView(
            text=_format_page,
            after=_end_search,
            parameters={"at": None},
            help="Find jobs that wait, run, are dead or have ended. "
            "Of successes only the slowest and samples are kept. Slow jobs: --longer-than 5s, --sort ran.",
        ),
        "list": CommandView(empty="no such task is declared", needs_code=True),
        "send": CommandView(
            show=_show_sent,
            after=_show_duplicate,
            needs_code=True,
            flags=(
                click.Option(
                    ["--wait"],
                    is_flag=False,
                    flag_value=30.0,
                    type=Duration(min=0, max=90 * 86400),
                    metavar="[SECONDS]",
                    help="Wait so long for the job's result, 30 unless given, and print that. Write it behind TASK.",
                ),
            ),
            help="Send a job of TASK. Prints the job's id, or with --wait its result. Exits with 1 when the job has "
            "failed, or has not ended in time.",
        ),
        "revoke": CommandView(
            show=_show_revoked,
            asks=False,
            help="Have the jobs ID... not run, or stop if they run. Exits with 1 when one of them had ended before, "
            "or nothing is known of it; the others are revoked all the same.",
        ),
        "limits": CommandView(empty="no task has a limit, and none is suspended", skips_unreachable=True),
        "limit": CommandView(
            after=_show_rule_limit,
            needs_code=lambda values: not values["is_kind"],
            skips_unreachable=True,
            takes_negative_numbers=True,
            help="Impose LIMIT on TASK, for all workers, which hear of it in moments: a number of jobs that may run "
            "at the same time (0 rejects them), a rate such as 200/m, or none, which takes back what was imposed.",
        ),
        "suspend": CommandView(
            done="{task}: suspended",
            needs_code=True,
            skips_unreachable=True,
            help="""Begin no job of TASK on any worker until it is resumed. Its jobs wait in Redis; what runs is run
to its end.

Workers hear of it in moments: until then some jobs may still begin.""",
        ),
        "resume": CommandView(
            needs_code=True,
            skips_unreachable=True,
            help="Let the jobs of TASK, which was suspended, run again in their order.",
        ),
    },
)
