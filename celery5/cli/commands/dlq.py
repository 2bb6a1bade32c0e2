"""Read, count, replay and purge dead-letter queues (`dlq`)."""

import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import click

from celery5.cli.commands.dead_records import (
    dead_record_flags,
    is_for_records,
    purge_dead_records,
    read_dead_records,
    replay_dead_records,
)
from celery5.cli.terminal.errors import ReachedBrokers, interrupted_by_sigterm, skip_unreachable
from celery5.cli.terminal.filters import (
    is_narrowed,
    parse_selection,
    selected_queues,
    selection_flags,
    warn_of_unknown_sinks,
    warn_of_unknown_tasks,
)
from celery5.cli.terminal.flags import parse_rate_flag as rate_of
from celery5.cli.terminal.output import (
    clean_lines,
    echo,
    format_cell,
    format_fields,
    format_table,
    format_time,
    to_json,
)
from celery5.cli.terminal.target import Target
from celery5.errors import CeleryError, Misconfigured
from celery5.protocol.job.dead_letters import format_position

if TYPE_CHECKING:
    from celery5.app import App
    from celery5.dead_letters.queues import DeadLetterTally
    from celery5.protocol.job.dead_letters import DeadJob, DeadJobFilter
    from celery5.protocol.job.failure_groups import DeadJobGroup

LIMIT_TYPE = click.IntRange(min=1)
REACHABLE_FLAG = click.option(
    "--reachable", is_flag=True, help="When a broker is away: do what is on the others; else nothing is done."
)
_WITHOUT_UNREACHABLE = "--reachable does what is on the others, and so does --queue with theirs"
LEFT_REASONS = {
    "key-taken": "another live job has its key",
    "alive": "a job of its id is alive again",
    "corrupt": "there is no message to replay",
    "gone": "somebody else was first",
    "run-ended": "its run has ended: if the run failed, celery5 workflow retry RUN; else start a new run",
}
"""The reasons for which a job is left unchanged, in words."""


class IncompleteOperation(CeleryError):
    """Some of the selected jobs could not be replayed or purged."""


@click.group(no_args_is_help=False)
def dlq() -> None:
    """Dead-letter queues keep the jobs that failed for good."""


@dlq.command()
@dead_record_flags
@selection_flags
@click.option("--limit", type=LIMIT_TYPE, default=100, show_default=True, help="Jobs at most.")
@click.option(
    "--newest-first", is_flag=True, help="The newest first, of all queues; default: by queue, oldest first."
)
@click.option("--after", metavar="QUEUE:ENTRY", help="Begin after this job: the next page.")
@click.option("--traceback", is_flag=True, help="All that is known of each job.")
@click.option("--json", "wants_json", is_flag=True, help="For programs.")
@click.pass_obj
def read(target: Target, /, *, limit: int, traceback: bool, wants_json: bool, **flags: Any) -> None:
    """Show dead jobs and why they are dead; with --stream and --group, dead records."""
    if is_for_records(flags):
        app, flags = target.load(), {**flags, "limit": limit}
        with skip_unreachable(app, wants_json=wants_json):
            read_dead_records(app, flags, traceback=traceback, wants_json=wants_json)
        return
    app, choice = target.load(), parse_selection({**flags, "limit": limit + 1})
    with skip_unreachable(app, wants_json=wants_json, queues=selected_queues(flags)):
        _read(app, choice, limit=limit, traceback=traceback, wants_json=wants_json)


def _read(app: "App", choice: "DeadJobFilter", *, limit: int, traceback: bool, wants_json: bool) -> None:
    from celery5.observability.shown_values import mask_dead_job

    unknown = _find_unknown_ids(app, choice)
    page = _Page((mask_dead_job(app, job) for job in app.dlq.read(**choice)), limit)
    if wants_json:
        _print_json(page)
    elif traceback:
        _print_details(page)
    else:
        echo(format_table([_row(job) for job in page], empty=_describe_none(choice)))
    if not page.last:
        _warn_of_unknown_names(app, choice)
    if page.has_more:
        echo(f"only the first {limit}; the next ones: --after {format_cell(page.last)}", err=True)
    _raise_for_unknown(unknown)


def _describe_none(choice: "DeadJobFilter") -> str:
    """Return what is said when no dead job was found: a condition may be misspelt."""
    conditions = ("task", "error", "message", "group", "reason")
    has_some = any(value for name, value in choice.items() if name in conditions)
    return "no dead jobs match; celery5 dlq count shows those that there are" if has_some else "no dead jobs"


class _Page:
    """The first `limit` jobs.

    After the iteration `last` is the position of the last of them, and `has_more` is true if more follow.
    """

    def __init__(self, jobs: "Iterable[DeadJob]", limit: int) -> None:
        self._jobs = jobs
        self._limit = limit
        self.last = ""
        self.has_more = False

    def __iter__(self) -> "Iterator[DeadJob]":
        for number, job in enumerate(self._jobs):
            if number == self._limit:
                self.has_more = True
                return
            self.last = format_position(job)
            yield job


@dlq.command()
@selection_flags
@click.option(
    "--by",
    type=click.Choice(["cause", "reason", "task", "error", "queue"]),
    default="cause",
    show_default=True,
    help="What jobs are put together by; a cause is task, reason and error.",
)
@click.option("--json", "wants_json", is_flag=True, help="For programs.")
@click.pass_obj
def count(target: Target, /, *, by: Any, wants_json: bool, **flags: Any) -> None:
    """Count dead jobs by what they have in common."""
    app, choice = target.load(), parse_selection(flags)
    with skip_unreachable(app, wants_json=wants_json, queues=selected_queues(flags)):
        counts = app.dlq.count(by, **choice)
        rows = [{by: name, "count": number} for name, number in counts.items()]
        echo(to_json(counts) if wants_json else format_table(rows, empty=_describe_none(choice)))
        if not counts:
            _warn_of_unknown_names(app, choice)
        _raise_for_unknown(_find_unknown_ids(app, choice))


@dlq.command()
@selection_flags
@click.option("--limit", type=LIMIT_TYPE, help="Dead jobs to look at, at most; default: 100000.")
@click.option("--newest-first", is_flag=True, help="Look at the newest jobs first.")
@click.option("--after", metavar="QUEUE:ENTRY", help="Begin after this job: the next page.")
@click.option("--json", "wants_json", is_flag=True, help="For programs.")
@click.pass_obj
def groups(target: Target, /, *, wants_json: bool, **flags: Any) -> None:
    """Show dead jobs by what made them fail: task, error, and message without numbers, ids and the like."""
    from celery5.observability.shown_values import mask_groups

    app, choice = target.load(), parse_selection(flags)
    with skip_unreachable(app, wants_json=wants_json, queues=selected_queues(flags)):
        found = mask_groups(app, app.dlq.groups(**choice))
        rows = [_format_group(group) for group in found.groups]
        echo(to_json(found) if wants_json else format_table(rows, empty=_describe_none(choice)))
        if not rows:
            _warn_of_unknown_names(app, choice)
        if found.next:
            more = f"looked at {found.looked_at} of {found.total} dead jobs"
            echo(f"{more}; the next ones: --after {format_cell(found.next)}", err=True)
        if found.ungrouped:
            echo(f"{found.ungrouped} jobs are of further groups: narrow the selection", err=True)


def _format_group(group: "DeadJobGroup") -> dict[str, object]:
    return {
        "group": group.id,
        "count": group.count,
        "task": group.task,
        "error": f"{group.type}: {group.pattern}" if group.pattern else group.type,
        "first": format_time(group.first_died),
        "last": format_time(group.last_died),
        "queues": ", ".join(group.queues),
    }


@dlq.command()
@dead_record_flags
@selection_flags
@click.option("--limit", type=LIMIT_TYPE, help="Jobs at most, the oldest of each queue first.")
@click.option("--rate", type=rate_of, metavar="N/s", help="No more jobs than this: 50/s, 100/m.")
@click.option("--dry-run", is_flag=True, help="Say what would be done, and do nothing.")
@REACHABLE_FLAG
@click.option("--json", "wants_json", is_flag=True, help="For programs.")
@click.pass_obj
def replay(
    target: Target, /, *, rate: float | None, dry_run: bool, reachable: bool, wants_json: bool, **flags: Any
) -> None:
    """Put dead jobs back on their queues, with all their attempts again.

    With --stream and --group, send the dead records of the group again, to the end of the stream: all groups get them.
    """
    if is_for_records({**flags, "rate": rate, "reachable": reachable}):
        app = target.load(needs_code=True)
        with skip_unreachable(app, wants_json=wants_json):
            replay_dead_records(app, flags, dry_run=dry_run, wants_json=wants_json)
        return
    app, choice = target.load(), parse_selection(flags)
    with (
        interrupted_by_sigterm(),
        skip_unreachable(app, wants_json=wants_json, queues=selected_queues(flags)) as reached,
    ):
        operation = _BulkOperation(
            app, choice, "replayed", dry_run=dry_run, wants_json=wants_json, reached=reached
        )
        if operation.begin(reachable=reachable):
            operation.end(
                lambda: app.dlq.replay(rate=rate, dry_run=dry_run, progress=operation.progress, **choice)
            )


@dlq.command()
@dead_record_flags
@selection_flags
@click.option("--limit", type=LIMIT_TYPE, help="Jobs at most, the oldest of each queue first.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--dry-run", is_flag=True, help="Say what would be done, and do nothing.")
@REACHABLE_FLAG
@click.option("--json", "wants_json", is_flag=True, help="For programs.")
@click.pass_obj
def purge(
    target: Target, /, *, yes: bool, dry_run: bool, reachable: bool, wants_json: bool, **flags: Any
) -> None:
    """Remove dead jobs for good, or with --stream and --group dead records. Asks first when nothing says which."""
    if is_for_records({**flags, "reachable": reachable}):
        app = target.load()
        with skip_unreachable(app, wants_json=wants_json):
            purge_dead_records(app, flags, yes=yes, dry_run=dry_run, wants_json=wants_json)
        return
    choice = parse_selection(flags)
    must_confirm = not (is_narrowed(choice) or yes or dry_run)
    if must_confirm and not sys.stdin.isatty():
        raise Misconfigured("this would purge all dead jobs: say which (--task, --reason, ...), or add --yes")
    app = target.load()
    with (
        interrupted_by_sigterm(),
        skip_unreachable(app, wants_json=wants_json, queues=selected_queues(flags)) as reached,
    ):
        operation = _BulkOperation(
            app, choice, "purged", dry_run=dry_run, wants_json=wants_json, reached=reached
        )
        if operation.begin(reachable=reachable):
            if must_confirm and not click.confirm(f"Purge all {operation.selected} for good?", err=True):
                raise IncompleteOperation("nothing was purged")
            operation.end(lambda: app.dlq.purge(dry_run=dry_run, progress=operation.progress, **choice))


class _BulkOperation:
    """One replay or purge: counts its jobs first, then shows its progress and its result."""

    def __init__(
        self,
        app: "App",
        choice: "DeadJobFilter",
        participle: str,  # `replayed` or `purged`
        *,
        dry_run: bool,
        wants_json: bool,
        reached: ReachedBrokers,
    ) -> None:
        self._app = app
        self._reached = reached
        self._choice = choice
        self._participle = participle
        self._dry_run = dry_run
        self._wants_json = wants_json
        self._counts: Mapping[str, int] = {}
        self._unknown: list[str] = []
        self._tally: DeadLetterTally | None = None
        self._shows_progress = sys.stderr.isatty()

    @property
    def selected(self) -> str:
        """The number of selected jobs, in words."""
        return _format_count(sum(self._counts.values()))

    def begin(self, *, reachable: bool) -> bool:
        """Count and print the selected jobs; return whether there are any.

        Raises IncompleteOperation when a relevant broker is unreachable, unless `reachable`.
        """
        self._counts = self._app.dlq.count("cause", **self._choice)
        if self._reached.relevant_errors and not reachable:
            raise IncompleteOperation(
                f"nothing was {self._participle}, since not all brokers can be reached: {_WITHOUT_UNREACHABLE}"
            )
        self._unknown = _find_unknown_ids(self._app, self._choice)
        if not self._counts:
            echo(to_json(self._get_summary()) if self._wants_json else _describe_none(self._choice))
            _warn_of_unknown_names(self._app, self._choice)
            _raise_for_unknown(self._unknown)
            return False
        if not self._wants_json:
            would = f", would be {self._participle}" if self._dry_run else ""
            echo(f"{self.selected}{would}:\n{_format_causes(self._counts)}")
        return True

    def progress(self, tally: "DeadLetterTally") -> None:
        """Show the progress on a terminal."""
        self._tally = tally
        if self._shows_progress:
            click.echo(f"\r{tally.matched} of {self.selected} ", err=True, nl=False)

    def end(self, run: Any) -> None:
        """Run the operation and print what was done, also when it is interrupted."""
        try:
            self._tally = run()
        except BaseException:
            self._clear_progress()
            done = self._tally.done if self._tally else 0
            echo(
                f"{done} of {self.selected} {self._participle} so far; the others are as they were", err=True
            )
            raise
        self._clear_progress()
        if self._wants_json:
            echo(to_json(self._get_summary()))
        elif not self._dry_run:
            self._print_result()
        self._raise_for_unchanged()

    def _clear_progress(self) -> None:
        if self._shows_progress:
            click.echo("\r\x1b[K", err=True, nl=False)

    def _print_result(self) -> None:
        assert self._tally is not None
        echo(f"{_format_count(self._tally.done)} {self._participle}" + (":" if self._tally.done else ""))
        if self._tally.causes:
            echo(_format_causes(self._tally.causes))

    def _get_summary(self) -> dict[str, object]:
        tally = self._tally
        return {
            "matched": tally.matched if tally else 0,
            self._participle: tally.done if tally else 0,
            "dry_run": self._dry_run,
            "before": self._counts,
            "causes": tally.causes if tally else {},
            "left": tally.left if tally else {},
            "unreachable": self._reached.unreachable(),
        }

    def _raise_for_unchanged(self) -> None:
        assert self._tally is not None
        unchanged = {reason: number for reason, number in self._tally.left.items() if reason != "gone"}
        if unchanged:
            reasons = ", ".join(
                f"{number} {reason} ({LEFT_REASONS[reason]})" for reason, number in unchanged.items()
            )
            would = "would not be" if self._dry_run else "were not"
            also = f"; {_format_find_unknown_ids(self._unknown)}" if self._unknown else ""
            raise IncompleteOperation(
                f"{sum(unchanged.values())} of {self.selected} {would} {self._participle}: {reasons}{also}"
            )
        _raise_for_unknown(self._unknown)


def _find_unknown_ids(app: "App", choice: "DeadJobFilter") -> list[str]:
    """Return the ids that were named and that no dead job has. A dead job that a filter leaves out still counts."""
    ids = choice.get("ids") or ()
    if not ids:
        return []
    jobs = app.dlq.read(ids=ids, queue=choice.get("queue"))
    existing = {job_id for job in jobs for job_id in (job.id, job.entry)}
    return [job_id for job_id in dict.fromkeys(ids) if job_id not in existing]


def _warn_of_unknown_names(app: "App", choice: "DeadJobFilter") -> None:
    """Warn of selected tasks and sinks that the code does not have."""
    warn_of_unknown_tasks(app, choice.get("task") or ())
    warn_of_unknown_sinks(app, choice.get("sink") or ())


def _raise_for_unknown(unknown: list[str]) -> None:
    if unknown:
        raise IncompleteOperation(_format_find_unknown_ids(unknown))


def _format_find_unknown_ids(unknown: list[str]) -> str:
    return f"no dead job has the id {', '.join(map(format_cell, unknown))} (an entry's id needs its --queue)"


def _print_json(page: _Page) -> None:
    """Print one array, job by job, since there may be many."""
    number = 0
    for number, job in enumerate(page, 1):
        echo(("[" if number == 1 else ",") + to_json(_fields(job)), nl=False)
    echo("]" if number else "[]")


def _print_details(page: _Page) -> None:
    for number, job in enumerate(page, 1):
        echo(("\n" if number > 1 else "") + _format_details(job))
    if not page.last:
        echo("no dead jobs")


def _format_details(job: "DeadJob") -> str:
    fields = {"args": job.args, "kwargs": job.kwargs, "worker": job.worker, "replays": job.replays}
    text = format_fields({**_row(job), **{name: value for name, value in fields.items() if value}})
    return f"{text}\n\n{clean_lines(job.traceback)}" if job.traceback else text


def _row(job: "DeadJob") -> dict[str, object]:
    return {
        "queue": job.queue,
        "entry": job.entry,
        "died": format_time(job.died),
        "job": job.id,
        "task": job.task,
        "attempt": job.attempt,
        "reason": job.reason if not job.sink else f"{job.reason} ({job.sink})",
        "error": job.error,
    }


def _fields(job: "DeadJob") -> dict[str, object]:
    """Return all fields of a job but the raw message, which may not be text."""
    fields = {
        name: getattr(job, name)
        for name in job.__struct_fields__
        if name not in ("id", "raw", "queue", "entry")
    }
    return {"queue": job.queue, "entry": job.entry, "job": job.id, **fields, "error": job.error}


def _format_causes(counts: Mapping[str, int]) -> str:
    width = max(len(str(number)) for number in counts.values())
    return "\n".join(f"  {number:{width}}  {format_cell(cause)}" for cause, number in counts.items())


def _format_count(number: int) -> str:
    return f"{number} dead job{'' if number == 1 else 's'}"
