"""Read, replay and purge the dead records of a stream's group: `dlq` with `--stream` and `--group`."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from celery5.cli.terminal.errors import skip_unreachable
from celery5.cli.terminal.operation_commands import Started, check_answerable, make_row
from celery5.cli.terminal.output import (
    echo,
    format_details,
    format_table,
    print_array,
    print_details,
    to_json,
)
from celery5.errors import CeleryError, Misconfigured
from celery5.operations.streams import READ_DEAD_RECORDS
from celery5.protocol.counts import format_count

if TYPE_CHECKING:
    from celery5.streams.dead_records import DeadRecordQuery, DeadRecordTally, StoredDeadRecord

DEAD_RECORD_FLAGS = (
    click.Option(["--stream"], metavar="STREAM", help="Dead records of this stream instead of jobs."),
    click.Option(["--group", "stream_group"], metavar="GROUP", help="With --stream: of this group."),
)
"""The flags that name the group whose dead records are meant."""
_OF_RECORDS = frozenset(
    {
        *("stream", "stream_group", "ids", "message", "older_than", "newer_than"),
        *("limit", "traceback", "dry_run", "yes", "wants_json"),
    }
)
"""The flags that dead records have, too, by their names."""
Run = Callable[[Started], object]
_COLUMNS = READ_DEAD_RECORDS.shown_columns


class NotReplayed(CeleryError):
    """Some dead records could not be replayed."""


def or_of_records(of_jobs: Run, of_records: Run) -> Run:
    """Return what is done for dead jobs, or for dead records where their group is named.

    Raises Misconfigured for half of its names, and for flags that dead records do not have.
    """

    def run(started: Started) -> None:
        names = (started.flags["stream"], started.flags["stream_group"])
        if not any(names):
            of_jobs(started)
            return
        if not all(names):
            raise Misconfigured("dead records: give both --stream and --group")
        context = click.get_current_context()
        for flag in context.command.params:
            source = context.get_parameter_source(flag.name or "")
            if source is click.core.ParameterSource.COMMANDLINE and flag.name not in _OF_RECORDS:
                raise Misconfigured(f"{flag.opts[0]} is for jobs: leave it out with --stream")
        with skip_unreachable(started.app, wants_json=started.wants_json):
            of_records(started)

    return run


def _make_query(started: Started, limit: int | None) -> "DeadRecordQuery":
    from celery5.streams.dead_records import DeadRecordQuery

    asked = started.asked
    return DeadRecordQuery(
        entries=asked.ids,
        older_than=asked.older_than,
        newer_than=asked.newer_than,
        error=asked.message,
        limit=limit,
    )


def read_dead_records(started: Started) -> None:
    """Print dead records, with --json one array."""
    from celery5.observability.shown_values import mask_dead_record

    app, flags = started.app, started.flags
    query = _make_query(started, flags["limit"])
    read = app.streams.dead_records.read(flags["stream"], flags["stream_group"], query)
    found = (mask_dead_record(app, dead) for dead in read)
    if started.wants_json:
        print_array(map(_fields, found))
    elif flags["traceback"]:
        print_details(map(_format_details, found), empty="no dead records")
    else:
        echo(format_table([make_row(_COLUMNS, dead) for dead in found], empty="no dead records"))


def replay_dead_records(started: Started) -> None:
    """Send dead records again, to the end of their stream. Raises NotReplayed."""
    asked, flags = started.asked, started.flags
    tally = started.app.streams.dead_records.replay(
        flags["stream"], flags["stream_group"], _make_query(started, asked.limit), dry_run=asked.dry_run
    )
    _print_tally(started, tally, "replayed")
    if tally.left:
        entry, why = next(iter(tally.left.items()))
        raise NotReplayed(
            f"{len(tally.left)} of {format_count(tally.matched, 'dead record')} cannot be replayed; "
            f"the first is {entry}: {why}"
        )


def purge_dead_records(started: Started) -> None:
    """Remove dead records for good. Asks first."""
    asked, flags, records = started.asked, started.flags, started.app.streams.dead_records
    names, query = (flags["stream"], flags["stream_group"]), _make_query(started, asked.limit)
    if started.asks:
        check_answerable("delete dead records for good")
        matched = records.purge(*names, query, dry_run=True).matched
        click.confirm(f"Purge {format_count(matched, 'dead record')} for good?", err=True, abort=True)
    _print_tally(started, records.purge(*names, query, dry_run=asked.dry_run), "purged")


def _print_tally(started: Started, tally: "DeadRecordTally", participle: str) -> None:
    dry_run = started.asked.dry_run
    if started.wants_json:
        counts = {"matched": tally.matched, participle: tally.done}
        echo(to_json({**counts, "dry_run": dry_run, "left": tally.left}))
    elif dry_run:
        echo(f"{format_count(tally.matched, 'dead record')} would be {participle}")
    else:
        echo(f"{format_count(tally.done, 'dead record')} {participle}")


def _format_details(dead: "StoredDeadRecord") -> str:
    return format_details(make_row(_COLUMNS, dead), dead.traceback)


def _fields(dead: "StoredDeadRecord") -> dict[str, object]:
    """Return all fields but the raw ones, which may not be text."""
    fields: dict[str, object] = {
        name: getattr(dead, name) for name in dead.__struct_fields__ if name != "fields"
    }
    return {**fields, "died": dead.died}
