"""Read, count, replay and purge dead-letter queues (`dlq`)."""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING

import click

from celery5.cli.commands.dead_records import (
    DEAD_RECORD_FLAGS,
    or_of_records,
    purge_dead_records,
    read_dead_records,
    replay_dead_records,
)
from celery5.cli.terminal.errors import ReachedBrokers, interrupted_by_sigterm, skip_unreachable
from celery5.cli.terminal.filters import refuse_unknown_sinks, refuse_unknown_tasks
from celery5.cli.terminal.operation_commands import (
    CommandView,
    Finished,
    Started,
    check_answerable,
    get_queues,
    make_group,
    make_row,
)
from celery5.cli.terminal.output import (
    as_called,
    echo,
    format_cell,
    format_details,
    format_table,
    format_time,
    print_array,
    print_details,
    to_json,
)
from celery5.errors import CeleryError
from celery5.operations.dead_letters import DEAD_LETTER_OPERATIONS, READ
from celery5.protocol.counts import choose_form, format_count
from celery5.protocol.job.dead_letters import format_position

if TYPE_CHECKING:
    from celery5.app import App
    from celery5.dead_letters.queues import DeadLetterTally
    from celery5.protocol.job.dead_letters import DeadJob, DeadJobFilter
    from celery5.protocol.job.failure_groups import DeadJobGroup, DeadJobGroups

Perform = Callable[..., "DeadLetterTally"]
_WITHOUT_UNREACHABLE = "--reachable does what is on the others, and so does --queue with theirs"
LEFT_REASONS = {
    "key-taken": "another live job has its key",
    "alive": "a job of its id is alive again",
    "corrupt": "there is no message to replay",
    "gone": "somebody else was first",
    "run-ended": "its run has ended: if the run failed, celery5 workflow retry RUN; else start a new run",
    "run-succeeded": "its run has succeeded, so none is needed; to remove it: celery5 dlq purge --id ID",
    "run-retried": "its run was retried, and another job does its step: a worker of the run removes this one",
}
"""The reasons for which a job is left unchanged, in words."""


class IncompleteOperation(CeleryError):
    """Some of the selected jobs could not be replayed or purged."""


# Reading and counting


def _read(started: Started) -> None:
    """Print dead jobs while they are read: there may be more than memory holds."""
    from celery5.observability.shown_values import mask_dead_job

    app, asked, limit = started.app, started.asked, started.flags["limit"]
    choice: DeadJobFilter = asked.to_filter()
    choice |= {"limit": limit + 1, "newest_first": asked.newest_first, "after": asked.after}
    with skip_unreachable(app, wants_json=started.wants_json, queues=get_queues(asked)):
        unknown = _find_unknown_ids(app, choice)
        page = _Page((mask_dead_job(app, job) for job in app.dlq.read(**choice)), limit)
        if started.wants_json:
            print_array(map(_fields, page))
        elif started.flags["traceback"]:
            print_details(map(_format_details, page), empty="no dead jobs")
        else:
            rows = [make_row(READ.shown_columns, job) for job in page]
            echo(format_table(rows, empty=_describe_none(choice)))
        if not page.last:
            _refuse_unknown_names(app, choice)
        if page.has_more:
            echo(f"only the first {limit}; the next ones: --after {format_cell(page.last)}", err=True)
        _raise_for_unknown(unknown)


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


def _format_details(job: "DeadJob") -> str:
    more = {"args": job.args, "kwargs": job.kwargs, "worker": job.worker, "replays": job.replays}
    fields = {**make_row(READ.shown_columns, job), **{name: value for name, value in more.items() if value}}
    return format_details(fields, job.traceback)


def _fields(job: "DeadJob") -> dict[str, object]:
    """Return all fields of a job but the raw message, which may not be text."""
    names = [name for name in job.__struct_fields__ if name not in ("id", "raw", "queue", "entry")]
    fields = {name: getattr(job, name) for name in names}
    # `job` is the earlier name of the id: programs rely on it.
    return {
        "queue": job.queue,
        "entry": job.entry,
        "id": job.id,
        "job": job.id,
        **fields,
        "error": job.error,
    }


def _show_counts(finished: Finished) -> None:
    counts: dict[str, int] = finished.result
    rows = [{finished.asked.by: name, "count": number} for name, number in counts.items()]
    empty = _describe_none(finished.asked.to_filter())
    echo(to_json(counts) if finished.wants_json else format_table(rows, empty=empty))


def _show_groups(finished: Finished) -> None:
    found: DeadJobGroups = finished.result
    rows = [_make_group_row(group) for group in found.groups]
    if not any(row["example"] for row in rows):
        rows = [{name: value for name, value in row.items() if name != "example"} for row in rows]
    empty = _describe_none(finished.asked.to_filter())
    echo(to_json(found) if finished.wants_json else format_table(rows, empty=empty))
    if found.next:
        more = f"looked at {found.looked_at} of {format_count(found.total, 'dead job')}"
        echo(f"{more}; the next ones: --after {format_cell(found.next)}", err=True)
    if found.ungrouped:
        echo(
            f"{format_count(found.ungrouped, 'job is', 'jobs are')} of further groups: narrow the selection",
            err=True,
        )


def _make_group_row(group: "DeadJobGroup") -> dict[str, object]:
    return {
        "error group": group.id,
        "count": group.count,
        "task": group.task,
        "error": f"{group.type}: {group.pattern}" if group.pattern else group.type,
        "example": group.example,
        "first": format_time(group.first_died),
        "last": format_time(group.last_died),
        "queues": ", ".join(group.queues),
    }


def _explain_count(finished: Finished) -> None:
    """Refuse names that the code does not have when nothing was counted. Raises IncompleteOperation for ids."""
    choice: DeadJobFilter = finished.asked.to_filter()
    if not finished.result:
        _refuse_unknown_names(finished.app, choice)
    _raise_for_unknown(_find_unknown_ids(finished.app, choice))


def _explain_groups(finished: Finished) -> None:
    if not finished.result.groups:
        _refuse_unknown_names(finished.app, finished.asked.to_filter())


# Replaying and purging


def _replay(started: Started) -> None:
    """Replay here, and not as a bulk action: what a person has begun is shown, and ends with Ctrl-C."""
    from celery5.protocol.bulk import check_rate

    rate = check_rate(started.asked.rate)
    _change(started, "replayed", partial(started.app.dlq.replay, rate=rate))


def _purge(started: Started) -> None:
    """Purge here, as `_replay` does. Asks first."""
    if started.asks:
        check_answerable("delete dead jobs for good")
    _change(started, "purged", started.app.dlq.purge, asks=started.asks)


def _change(started: Started, participle: str, perform: Perform, *, asks: bool = False) -> None:
    queues = get_queues(started.asked)
    with (
        interrupted_by_sigterm(),
        skip_unreachable(started.app, wants_json=started.wants_json, queues=queues) as reached,
    ):
        change = _Change(started, participle, reached)
        if not change.begin():
            return
        if asks and not click.confirm(f"Purge {change.selected} for good?", err=True):
            raise IncompleteOperation("nothing was purged")
        change.end(perform)


class _Change:
    """One replay or purge: counts its jobs first, then shows its progress and its result."""

    def __init__(self, started: Started, participle: str, reached: ReachedBrokers) -> None:
        from celery5.dead_letters.queues import DeadLetterTally

        self._choice: DeadJobFilter = started.asked.to_filter()
        self._choice["limit"] = started.asked.limit
        self._app = started.app
        self._is_dry: bool = started.asked.dry_run
        self._wants_json = started.wants_json
        self._needs_all = not started.flags["reachable"]
        self._participle = participle  # `replayed` or `purged`
        self._reached = reached
        self._counts: Mapping[str, int] = {}
        self._unknown: list[str] = []
        self._tally = DeadLetterTally()
        self._shows_progress = sys.stderr.isatty()

    @property
    def selected(self) -> str:
        """The number of selected jobs, in words."""
        return format_count(sum(self._counts.values()), "dead job")

    def begin(self) -> bool:
        """Count and print the selected jobs; return whether there are any.

        Raises IncompleteOperation when a relevant broker is unreachable, unless `--reachable` is given.
        """
        app = self._app
        self._counts = app.dlq.count("cause", **self._choice)
        if self._reached.relevant_errors and self._needs_all:
            raise IncompleteOperation(
                f"nothing was {self._participle}, since not all brokers can be reached: {_WITHOUT_UNREACHABLE}"
            )
        self._unknown = _find_unknown_ids(app, self._choice)
        if not self._counts:
            echo(to_json(self._get_summary()) if self._wants_json else _describe_none(self._choice))
            _refuse_unknown_names(app, self._choice)
            _raise_for_unknown(self._unknown)
            return False
        if not self._wants_json:
            would = f", would be {self._participle}" if self._is_dry else ""
            echo(f"{self.selected}{would}:\n{_format_causes(self._counts)}")
        return True

    def _show_progress(self, tally: "DeadLetterTally") -> None:
        self._tally = tally
        if self._shows_progress:
            click.echo(f"\r{tally.matched} of {self.selected} ", err=True, nl=False)

    def end(self, perform: Perform) -> None:
        """Perform it and print what was done, also when it is interrupted. Raises IncompleteOperation."""
        try:
            self._tally = perform(dry_run=self._is_dry, progress=self._show_progress, **self._choice)
        except BaseException:
            self._clear_progress()
            done = f"{self._tally.done} of {self.selected} {self._participle} so far"
            echo(f"{done}; the others are as they were", err=True)
            raise
        self._clear_progress()
        if self._wants_json:
            echo(to_json(self._get_summary()))
        elif not self._is_dry:
            causes = f":\n{_format_causes(self._tally.causes)}" if self._tally.causes else ""
            echo(f"{format_count(self._tally.done, 'dead job')} {self._participle}{causes}")
        self._raise_for_unchanged()

    def _clear_progress(self) -> None:
        if self._shows_progress:
            click.echo("\r\x1b[K", err=True, nl=False)

    def _get_summary(self) -> dict[str, object]:
        return {
            "matched": self._tally.matched,
            self._participle: self._tally.done,
            "dry_run": self._is_dry,
            "before": self._counts,
            "causes": self._tally.causes,
            "left": self._tally.left,
            "unreachable": self._reached.unreachable(),
        }

    def _raise_for_unchanged(self) -> None:
        unchanged = {reason: number for reason, number in self._tally.left.items() if reason != "gone"}
        if unchanged:
            reasons = ", ".join(
                f"{number} {reason} ({LEFT_REASONS[reason]})" for reason, number in unchanged.items()
            )
            count = sum(unchanged.values())
            would = "would not be" if self._is_dry else f"{choose_form(count, 'was', 'were')} not"
            also = f"; {_format_unknown_ids(self._unknown)}" if self._unknown else ""
            raise IncompleteOperation(
                f"{count} of {self.selected} {would} {self._participle}: {reasons}{also}"
            )
        _raise_for_unknown(self._unknown)


def _format_causes(counts: Mapping[str, int]) -> str:
    width = max(len(str(number)) for number in counts.values())
    return "\n".join(f"  {number:{width}}  {format_cell(cause)}" for cause, number in counts.items())


# What was selected, and is not there


def _describe_none(choice: "DeadJobFilter") -> str:
    """Return what is said when no dead job was found: a condition may be misspelt."""
    conditions = ("task", "error", "message", "group", "reason")
    has_some = any(value for name, value in choice.items() if name in conditions)
    return (
        as_called("no dead jobs match; celery5 dlq count shows all dead jobs") if has_some else "no dead jobs"
    )


def _find_unknown_ids(app: "App", choice: "DeadJobFilter") -> list[str]:
    """Return the ids that were named and that no dead job has. A dead job that a filter leaves out still counts."""
    ids = choice.get("ids") or ()
    if not ids:
        return []
    jobs = app.dlq.read(ids=ids, queue=choice.get("queue"))
    existing = {job_id for job in jobs for job_id in (job.id, job.entry)}
    return [job_id for job_id in dict.fromkeys(ids) if job_id not in existing]


def _refuse_unknown_names(app: "App", choice: "DeadJobFilter") -> None:
    """Raise UnknownTask or NotFound for a selected task or sink that the code does not have."""
    refuse_unknown_tasks(app, choice.get("task") or ())
    refuse_unknown_sinks(app, choice.get("sink") or ())


def _raise_for_unknown(unknown: list[str]) -> None:
    if unknown:
        raise IncompleteOperation(_format_unknown_ids(unknown))


def _format_unknown_ids(unknown: list[str]) -> str:
    return f"no dead job has the id {', '.join(map(format_cell, unknown))} (an entry's id needs its --queue)"


_REACHABLE = click.Option(
    ["--reachable"],
    is_flag=True,
    help="When a broker is away: do what is on the others; else nothing is done.",
)

dlq = make_group(
    "dlq",
    "Dead-letter queues keep the jobs that failed for good.",
    DEAD_LETTER_OPERATIONS,
    {
        "read": CommandView(
            run=or_of_records(_read, read_dead_records),
            parameters={"limit": None},
            defaults={"newest_first": False},
            flags=(
                click.Option(
                    ["--limit"],
                    type=click.IntRange(min=1),
                    default=100,
                    show_default=True,
                    help="Jobs at most.",
                ),
                click.Option(["--traceback"], is_flag=True, help="All that is known of each job."),
                *DEAD_RECORD_FLAGS,
            ),
            help="Show dead jobs and why they are dead; with --stream and --group, dead records.",
        ),
        "count": CommandView(
            show=_show_counts, after=_explain_count, defaults={"by": "cause"}, skips_unreachable=True
        ),
        "groups": CommandView(
            show=_show_groups,
            after=_explain_groups,
            parameters={"within": None},
            defaults={"newest_first": False},
            skips_unreachable=True,
            help="Show dead jobs by what made them fail: task, error, and message without numbers, ids and the like.",
        ),
        "replay": CommandView(
            run=or_of_records(_replay, replay_dead_records),
            flags=(*DEAD_RECORD_FLAGS, _REACHABLE),
            needs_code=lambda values: bool(values["stream"]),
            help="""Put dead jobs back on their queues, with all their attempts again.

With --stream and --group, send the dead records of the group again, to the end of the stream: all groups get them.""",
        ),
        "purge": CommandView(
            run=or_of_records(_purge, purge_dead_records),
            flags=(*DEAD_RECORD_FLAGS, _REACHABLE),
            help="Remove dead jobs for good, or with --stream and --group dead records. "
            "Asks first; without a terminal it needs --yes.",
        ),
    },
)
