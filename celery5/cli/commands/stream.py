"""List, send to, read and operate ordered streams (`stream`)."""

import gzip
import os
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any

import click
import msgspec

from celery5.cli.terminal.errors import interrupted_by_sigterm
from celery5.cli.terminal.operation_commands import CommandView, make_group
from celery5.cli.terminal.output import echo, format_cell, format_fields, format_table, format_time, to_json
from celery5.cli.terminal.target import Target
from celery5.errors import BadRecord, CeleryError, Misconfigured, UnknownName
from celery5.operations.operation import Changed
from celery5.operations.streams import PLACE, STREAM_OPERATIONS, Reset
from celery5.protocol.counts import format_count
from celery5.protocol.durations import format_duration
from celery5.similar_names import suggest_known

if TYPE_CHECKING:
    from celery5.streams.lags import GroupLag, StreamState
    from celery5.streams.parked_keys import ParkedKeyState
    from celery5.streams.stream import Stream

PORTION = 500
"""Records that are checked and sent at once."""
GZIP_MAGIC = b"\x1f\x8b"
"""What a gzip file begins with. No JSON does."""
MAX_LINE = 64 * 1024 * 1024
"""The most bytes of a line."""
NO_STREAMS = "no streams: none is declared, and nothing was sent"
TAIL_COUNT = 10
"""Records that `tail` shows unless it is told otherwise."""
PARTITION_FLAG = click.option(
    "--partition", type=click.IntRange(min=0), metavar="N", help="This partition alone."
)
JSON_FLAG = click.option("--json", "wants_json", is_flag=True, help="For programs.")


class SendingStopped(CeleryError):
    """Not all records were sent; says which were, and why not the others."""


def _format_cursors(changed: Changed) -> str:
    """Return where a group continues, or that it is forgotten."""
    if "cursors" not in changed.value:
        name, group = format_cell(changed.value["stream"]), format_cell(changed.value["group"])
        return f"group {group} of stream {name} is forgotten"
    rows: list[dict[str, object]] = [
        {"partition": partition, "continues behind": cursor}
        for partition, cursor in changed.value["cursors"].items()
    ]
    return format_table(rows, empty="no partitions")


def _format_resharding(changed: Changed) -> str:
    value = changed.value
    before = format_count(value["before"], "partition")
    return f"stream {format_cell(value['stream'])}: {before} before, {value['partitions']} now"


def _check_keys(given: dict[str, Any], flags: Mapping[str, Any]) -> dict[str, Any]:
    if bool(given.get("keys")) == flags["all"]:
        raise click.UsageError("give keys, or --all")
    return given


def _make_parked_row(key: "ParkedKeyState") -> dict[str, object]:
    return {
        "key": key.key,
        "records": key.records,
        "since": format_time(key.since),
        "action": key.action,
        "why": key.why,
    }


def _get_parked_fields(found: "list[ParkedKeyState]") -> list[dict[str, object]]:
    return [{**_make_parked_row(parked_key), "since": parked_key.since} for parked_key in found]


def _describe_reset(asked: Reset) -> str:
    what = "forget" if asked.forget else "begin again, without their state," if asked.state else "begin again"
    return f"{what} group {asked.group} of stream {asked.stream}"


stream = make_group(
    "stream",
    "A stream keeps records in the order of their keys; processors read it.",
    [operation for operation in STREAM_OPERATIONS if operation.verb not in ("send", "tail", "quarantine")],
    {
        "list": CommandView(
            text=lambda states: format_table(make_rows(states), empty=NO_STREAMS),
            value=lambda states: make_summaries(states),
            skips_unreachable=True,
        ),
        "show": CommandView(
            text=lambda state: "\n\n".join(_format_stream(state)),
            skips_unreachable=True,
        ),
        "seek": CommandView(
            text=_format_cursors,
            asks=False,
            help="Have GROUP continue elsewhere in STREAM. Refuses while workers run it.",
        ),
        "reset": CommandView(
            text=_format_cursors,
            would=_describe_reset,
            help="Have GROUP begin again: all partitions of STREAM, without quarantines. "
            "Refuses while workers run it.",
        ),
        "parked": CommandView(row=_make_parked_row, value=_get_parked_fields, empty="no key is parked"),
        "release": CommandView(
            text=lambda changed: f"{changed.summary} by the workers that own them",
            prepare=_check_keys,
            flags=(click.Option(["--all"], is_flag=True, help="All keys."),),
            asks=False,
            help="""Have the parked records of KEYs processed, in their order and before later ones.

The workers that own the keys do it. What fails again stays parked.""",
        ),
        "reshard": CommandView(
            text=_format_resharding,
            asks=False,
            help="""Change the number of partitions of STREAM, while all runs. The records of each key keep their order.

Refuses while a group has open windows.""",
        ),
    },
)


# By hand, since it sends files of any size in portions, and shows how far it is.
@stream.command()
@click.argument("name", metavar="STREAM")
@click.argument("records", metavar="[JSON]...", nargs=-1)
@click.option(
    "--file", "files", type=click.File("rb"), multiple=True, help="Its lines, also in gzip; - for stdin."
)
@JSON_FLAG
@click.pass_obj
def send(
    target: Target, /, name: str, records: tuple[str, ...], files: tuple[Any, ...], *, wants_json: bool
) -> None:
    """Send records to STREAM: each a JSON text, as an argument, a line of a file, or a line of stdin for -.

    Files may be in gzip, as those of an archive are. Lines are sent in portions of 500. A portion with a line that is
    no record of the stream is not sent, and nothing behind it.
    """
    app = target.load(needs_code=True)
    if not records and not files:
        raise Misconfigured(
            "nothing to send: give records as JSON, - for the lines of stdin, or --file with the name of a file"
        )
    with interrupted_by_sigterm():
        sending = _Sending(app.streams[name], wants_json=wants_json)
        try:
            sending.send(_iterate_lines(records, files))
        finally:
            if sending.sent:
                app.audit.record_sending("stream:send", name, count=sending.sent)


class _Sending:
    """Sends records in portions, shows progress on a terminal, and says how many were sent when it stops.

    Attributes:
        sent: How many were sent so far.
    """

    def __init__(self, to: "Stream[Any]", *, wants_json: bool) -> None:
        self._stream = to
        self._wants_json = wants_json
        self._shows_progress = sys.stderr.isatty()
        self.sent = 0

    def send(self, lines: Iterable[tuple[str, bytes]]) -> None:
        """Send records; each comes with where it stands. Raises SendingStopped."""
        iterator = iter(lines)
        try:
            while portion := list(islice(iterator, PORTION)):
                self._send_portion(portion)
        except CeleryError as error:
            self._clear_progress()
            raise SendingStopped(f"{error}; {self._count} sent before") from error
        except BaseException:
            self._clear_progress()
            echo(f"{self._count} sent so far", err=True)
            raise
        self._clear_progress()
        if not self._wants_json:
            echo(f"{self._count} sent")

    def _send_portion(self, portion: list[tuple[str, bytes]]) -> None:
        records = [self._parse(where, line) for where, line in portion]
        for place in self._stream.send(*records):
            if self._wants_json:
                echo(to_json({"partition": place.partition, "id": place.id}))
        self.sent += len(records)
        if self._shows_progress:
            click.echo(f"\r{self._count} sent ", err=True, nl=False)

    def _parse(self, where: str, line: bytes) -> Any:
        try:
            record = self._stream.codec.parse(line)
            self._stream.encode(record)
        except (BadRecord, CeleryError) as error:
            raise Misconfigured(f"{where}: {error}") from error
        return record

    @property
    def _count(self) -> str:
        return format_count(self.sent, "record")

    def _clear_progress(self) -> None:
        if self._shows_progress:
            click.echo("\r\x1b[K", err=True, nl=False)


def _iterate_lines(records: Iterable[str], files: Iterable[Any]) -> Iterator[tuple[str, bytes]]:
    """Yield records as JSON, each with where it stands; empty lines are left out."""
    for number, record in enumerate(records, 1):
        if record == "-":
            yield from _iterate_file(sys.stdin.buffer, "stdin")
        else:
            yield f"record {number}", record.encode(errors="surrogateescape")
    for file in files:
        yield from _iterate_file(file, "stdin" if file is sys.stdin.buffer else str(file.name))


def _iterate_file(file: Any, name: str) -> Iterator[tuple[str, bytes]]:
    start = file.peek(2)[:2] if hasattr(file, "peek") else b""
    lines: Any = gzip.GzipFile(fileobj=file) if start == GZIP_MAGIC else file
    number = 0
    try:
        while line := lines.readline(MAX_LINE):
            number += 1
            if len(line) == MAX_LINE:
                raise Misconfigured(f"line {number} of {name}: it has more than {MAX_LINE:,} bytes")
            if line.strip():
                yield f"line {number} of {name}", line
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise Misconfigured(f"{name} behind line {number}: it is no whole gzip file: {error}") from None


# By hand, since it prints records one by one, as many as are asked for, and follows.
@stream.command()
@click.argument("name", metavar="STREAM")
@PARTITION_FLAG
@click.option("--from", "start", metavar=PLACE, help="Where to begin; default: with the last records.")
@click.option(
    "--limit", type=click.IntRange(min=1), metavar="N", help="Records at most; default: 10 of the last."
)
@click.option("--follow", "-f", is_flag=True, help="Wait for more, until Ctrl-C.")
@click.option("--json", "wants_json", is_flag=True, help="For programs: it is JSON anyway.")
@click.pass_obj
def tail(
    target: Target,
    /,
    name: str,
    *,
    partition: int | None,
    start: str | None,
    limit: int | None,
    follow: bool,
    wants_json: bool,
) -> None:
    """Print records of STREAM as JSON lines: the last 10, or those from a place on.

    Nothing is acknowledged, and the class of the records is not needed. With --follow it begins with the last ones as
    well, and ends with exit code 0 at Ctrl-C.
    """
    from celery5.observability.shown_values import mask_value

    app = target.load()
    del wants_json
    if start is None and limit is None:
        limit = TAIL_COUNT
    try:
        for stored in app.streams.read(name, start, partition=partition, limit=limit, follow=follow):
            echo(to_json(msgspec.structs.replace(stored, record=mask_value(app, stored.record))))
    except KeyboardInterrupt:
        if not follow:
            raise
    except BrokenPipeError:  # whoever read this has ended, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


# By hand, since it shows quarantines, too, and ends those of all partitions.
@stream.command()
@click.argument("name", metavar="STREAM")
@click.argument("group")
@PARTITION_FLAG
@click.option("--why", metavar="TEXT", help="Quarantine the partition, for this reason.")
@click.option("--clear", is_flag=True, help="End its quarantine.")
@click.option("--all", "is_all", is_flag=True, help="With --clear: of all partitions.")
@JSON_FLAG
@click.pass_obj
def quarantine(
    target: Target,
    /,
    name: str,
    group: str,
    *,
    partition: int | None,
    why: str | None,
    clear: bool,
    is_all: bool,
    wants_json: bool,
) -> None:
    """Show which partitions of GROUP are quarantined, since when and why; quarantine one; or end that.

    A quarantined partition is not processed by any worker, also after a restart.
    """
    streams = target.load().streams
    _check_quarantine_flags(partition=partition, why=why, clear=clear, is_all=is_all)
    found = _find_group(streams.info(name), group)
    if why is not None or clear:
        quarantined = [listed.partition for listed in found.partitions if listed.condition]
        for number in quarantined if is_all else [partition or 0]:
            if not streams.set_quarantine(name, group, number, why or ""):
                raise Misconfigured(f"group {group} of stream {name} has no partition {number}")
        found = _find_group(streams.info(name), group)
    rows: list[dict[str, object]] = [
        {
            "partition": listed.partition,
            "since": listed.since if wants_json else format_time(listed.since),
            "lag": listed.lag,
            "cursor": listed.cursor,
            "why": listed.why,
        }
        for listed in found.partitions
        if listed.condition
    ]
    echo(to_json(rows) if wants_json else format_table(rows, empty="no partition is quarantined"))


def _check_quarantine_flags(*, partition: int | None, why: str | None, clear: bool, is_all: bool) -> None:
    if why is not None and clear:
        raise Misconfigured("--why quarantines a partition, and --clear ends that: give one of them")
    if why is not None and (partition is None or not why.strip()):
        raise Misconfigured("to quarantine a partition give --partition N and --why TEXT")
    if clear and (partition is None) != is_all:
        raise Misconfigured("--clear: give --partition N or --all")
    if not clear and is_all:
        raise Misconfigured("--all goes with --clear alone")
    if partition is not None and why is None and not clear:
        raise Misconfigured("--partition: give --why TEXT to quarantine it, or --clear to end that")


def _find_group(states: "list[StreamState]", group: str) -> "GroupLag":
    (state,) = states
    for found in state.groups:
        if found.group == group:
            return found
    names = [found.group for found in state.groups]
    raise UnknownName(f"stream {state.stream} has no group {group!r}; {suggest_known(group, names)}")


def make_rows(states: "list[StreamState]") -> list[dict[str, object]]:
    """Return streams and their groups as the rows of a table: one for each group, or for a stream without groups."""
    rows: list[dict[str, object]] = []
    for state in states:
        head: dict[str, object] = {
            "stream": state.stream,
            "partitions": state.partitions,
            "records": state.records,
        }
        empty = dict.fromkeys(
            ("group", "members", "lag", "behind", "without owner", "quarantined", "parked", "dead"), ""
        )
        rows += [
            {
                **head,
                "group": group.group,
                "members": len(group.members),
                "lag": group.lag,
                "behind": format_duration(group.age) if group.lag else "",
                "without owner": sum(not partition.owner for partition in group.partitions),
                "quarantined": sum(bool(partition.condition) for partition in group.partitions),
                "parked": group.parked_keys,
                "dead": group.dead,
            }
            for group in state.groups
        ] or [{**head, **empty}]
    return rows


def make_summaries(states: "list[StreamState]") -> list[dict[str, object]]:
    """Return streams and their groups for programs."""
    return [
        {
            "stream": state.stream,
            "partitions": state.partitions,
            "records": state.records,
            "dropped": state.dropped,
            "archived": state.archived,
            "waiting_for_archive": sum(state.waiting_for_archive.values()),
            "groups": _groups(state),
        }
        for state in states
    ]


def _summary(state: "StreamState") -> dict[str, object]:
    return {
        "stream": state.stream,
        "partitions": state.partitions,
        "records": state.records,
        "dropped": state.dropped,
        "archived": state.archived,
        "waiting for archive": sum(state.waiting_for_archive.values()),
    }


def _groups(state: "StreamState") -> list[dict[str, object]]:
    return [
        {
            "group": group.group,
            "members": group.members,
            "lag": group.lag,
            "age": group.age,
            "owned": sum(bool(partition.owner) for partition in group.partitions),
            "quarantined": [partition.partition for partition in group.partitions if partition.condition],
            "lost": sum(partition.lost for partition in group.partitions),
            "archived": sum(partition.archived for partition in group.partitions),
            "dead": group.dead,
            "parked_keys": group.parked_keys,
            "parked_records": group.parked_records,
            "late": sum(partition.late for partition in group.partitions),
        }
        for group in state.groups
    ]


def _format_stream(state: "StreamState") -> Iterator[str]:
    yield format_fields(_summary(state))
    if not state.groups:
        yield "no groups: no processor has read it"
    for group in state.groups:
        members = ", ".join(group.members) or "none is alive"
        fields = {
            "group": group.group,
            "members": members,
            "lag": group.lag,
            "dead records": group.dead,
            "late records": sum(partition.late for partition in group.partitions),
        }
        rows: list[dict[str, object]] = [
            {
                "partition": partition.partition,
                "owner": partition.owner or "none",
                "cursor": partition.cursor,
                "lag": partition.lag,
                "behind": format_duration(partition.age) if partition.lag else "",
                "lost": partition.lost,
                "archived": partition.archived,
                "deaths": partition.deaths,
                "condition": partition.condition,
                "why": partition.why,
            }
            for partition in group.partitions
        ]
        yield f"{format_fields(fields)}\n{format_table(rows, empty='no partitions')}"
