"""Read, replay and purge the dead records of a stream's group: `dlq` with `--stream` and `--group`."""

import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import click

from celery5.cli.terminal.output import clean_lines, echo, format_fields, format_table, format_time, to_json
from celery5.errors import CeleryError, Misconfigured

if TYPE_CHECKING:
    from celery5.app import App
    from celery5.streams.dead_records import DeadRecordQuery, DeadRecordTally, StoredDeadRecord

F = TypeVar("F", bound=Callable[..., Any])

_FLAGS = (
    click.option("--stream", metavar="STREAM", help="Dead records of this stream instead of jobs."),
    click.option("--group", "stream_group", metavar="GROUP", help="With --stream: of this group."),
)
_OF_JOBS = {
    "queue": "--queue",
    "task": "--task",
    "reason": "--reason",
    "sink": "--sink",
    "error": "--error",
    "group": "--error-group",
    "newest_first": "--newest-first",
    "after": "--after",
    "reachable": "--reachable",
    "rate": "--rate",
}
"""The flags that dead records do not have, by their names."""


class NotReplayed(CeleryError):
    """Some dead records could not be replayed."""


def dead_record_flags(command: F) -> F:
    """Add the flags that name the group whose dead records are meant."""
    for flag in reversed(_FLAGS):
        command = flag(command)
    return command


def is_for_records(flags: Mapping[str, Any]) -> bool:
    """Return whether dead records are meant and not jobs. Raises Misconfigured for half of their names."""
    names = (flags["stream"], flags["stream_group"])
    if not any(names):
        return False
    if not all(names):
        raise Misconfigured("dead records: give both --stream and --group")
    wrong = [flag for name, flag in _OF_JOBS.items() if flags.get(name)]
    if wrong:
        raise Misconfigured(f"{wrong[0]} is for jobs: leave it out with --stream")
    return True


def _make_query(flags: Mapping[str, Any]) -> "DeadRecordQuery":
    from celery5.streams.dead_records import DeadRecordQuery

    return DeadRecordQuery(
        entries=flags["ids"],
        older_than=flags["older_than"],
        newer_than=flags["newer_than"],
        error=flags["message"] or "",
        limit=flags.get("limit"),
    )


def read_dead_records(app: "App", flags: Mapping[str, Any], *, traceback: bool, wants_json: bool) -> None:
    """Print dead records, with --json one array."""
    from celery5.observability.shown_values import mask_dead_record

    read = app.streams.dead_records.read(flags["stream"], flags["stream_group"], _make_query(flags))
    found = (mask_dead_record(app, dead) for dead in read)
    number = 0
    if wants_json:
        for number, dead in enumerate(found, 1):
            echo(("[" if number == 1 else ",") + to_json(_fields(dead)), nl=False)
        echo("]" if number else "[]")
    elif traceback:
        for number, dead in enumerate(found, 1):
            trace = f"\n\n{clean_lines(dead.traceback)}" if dead.traceback else ""
            echo(("\n" if number > 1 else "") + format_fields(_row(dead)) + trace)
        if not number:
            echo("no dead records")
    else:
        echo(format_table([_row(dead) for dead in found], empty="no dead records"))


def replay_dead_records(app: "App", flags: Mapping[str, Any], *, dry_run: bool, wants_json: bool) -> None:
    """Send dead records again, to the end of their stream. Raises NotReplayed."""
    tally = app.streams.dead_records.replay(
        flags["stream"], flags["stream_group"], _make_query(flags), dry_run=dry_run
    )
    _print_tally(tally, "replayed", dry_run=dry_run, wants_json=wants_json)
    if tally.left:
        entry, why = next(iter(tally.left.items()))
        raise NotReplayed(
            f"{len(tally.left)} of {_count(tally.matched)} cannot be replayed; the first is {entry}: {why}"
        )


def purge_dead_records(
    app: "App", flags: Mapping[str, Any], *, yes: bool, dry_run: bool, wants_json: bool
) -> None:
    """Remove dead records for good. Asks first when nothing says which."""
    query = _make_query(flags)
    records, names = app.streams.dead_records, (flags["stream"], flags["stream_group"])
    is_narrowed = bool(query.entries or query.error or query.limit) or query.older_than is not None
    if not (is_narrowed or query.newer_than is not None or yes or dry_run):
        if not sys.stdin.isatty():
            raise Misconfigured(
                "this would purge all dead records of the group: say which (--older-than, --id, ...), or add --yes"
            )
        matched = records.purge(*names, query, dry_run=True).matched
        click.confirm(f"Purge all {_count(matched)} for good?", err=True, abort=True)
    tally = records.purge(*names, query, dry_run=dry_run)
    _print_tally(tally, "purged", dry_run=dry_run, wants_json=wants_json)


def _print_tally(tally: "DeadRecordTally", participle: str, *, dry_run: bool, wants_json: bool) -> None:
    if wants_json:
        counts = {"matched": tally.matched, participle: tally.done}
        echo(to_json({**counts, "dry_run": dry_run, "left": tally.left}))
    elif dry_run:
        echo(f"{_count(tally.matched)} would be {participle}")
    else:
        echo(f"{_count(tally.done)} {participle}")


def _count(number: int) -> str:
    return f"{number} dead record{'' if number == 1 else 's'}"


def _row(dead: "StoredDeadRecord") -> dict[str, object]:
    return {
        "entry": dead.entry,
        "died": format_time(dead.died),
        "partition": dead.partition,
        "record": dead.id,
        "attempts": dead.attempts,
        "error": dead.error,
        "value": dead.record,
    }


def _fields(dead: "StoredDeadRecord") -> dict[str, object]:
    """Return all fields but the raw ones, which may not be text."""
    fields: dict[str, object] = {
        name: getattr(dead, name) for name in dead.__struct_fields__ if name != "fields"
    }
    return {**fields, "died": dead.died}
