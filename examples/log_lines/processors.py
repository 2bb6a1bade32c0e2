"""Read parts of files into lines, and count the lines. Start reading with this module.

A record that a processor sends, and its keyed state, are committed together with the record that it has read: after a
crash it reads that again, and nothing is there twice.
"""

from typing import NamedTuple

import msgspec

from celery5 import App
from celery5.examples.log_lines.folder import ALERT_AT, ErrorAlert, FilePart, LogLine, MinuteCount, read_lines
from celery5.streams import BlockingEvents, Keep, Stream, StreamEvents


class LogStreams(NamedTuple):
    """The streams, all ordered by host."""

    parts: Stream[FilePart]
    lines: Stream[LogLine]
    counts: Stream[MinuteCount]
    alerts: Stream[ErrorAlert]


class Position(msgspec.Struct):
    """How far a file has been read, and the minute of its last line."""

    end: int = 0
    minute: str = ""


def declare(app: App) -> LogStreams:
    """Declare the streams and the processors of an application."""
    parts = app.stream("parts", FilePart, by="host", partitions=8)
    lines = app.stream("lines", LogLine, by="host", partitions=8)
    # Nobody processes these two: what is kept of them is what `check` can read.
    counts = app.stream("counts", MinuteCount, by="host", partitions=4, keep=Keep(records=1_000_000))
    alerts = app.stream("alerts", ErrorAlert, by="host", partitions=4)

    # A `def` runs in a thread, where files may be read. One part makes hundreds of lines, so each is committed alone.
    @app.processor(parts, into=lines, commit_every=1)
    def read(events: BlockingEvents[FilePart]) -> None:
        for part in events.records():
            name = f"{part.path} {part.inode}"
            position = events.state.get(name, Position(), type=Position)
            if not part.start <= position.end < part.end:
                continue  # the parts of this file were sent twice
            minute = position.minute
            for line in read_lines(part.replace(start=position.end), minute):
                minute = line.minute
                events.send(line)
            events.state.set(name, Position(part.end, minute))

    @app.processor(lines, into=counts)
    async def count(events: StreamEvents[LogLine]) -> None:
        async for batch in events.take(500, within=0.1).records():
            changed: dict[str, MinuteCount] = {}
            for line in batch:
                name = f"{line.host} {line.minute}"
                before = changed.get(name) or await events.state.get(
                    name, MinuteCount(host=line.host, minute=line.minute), type=MinuteCount
                )
                after = before.replace(lines=before.lines + 1, errors=before.errors + line.is_error)
                if before.errors < ALERT_AT <= after.errors:
                    events.send(ErrorAlert(host=line.host, minute=line.minute), to=alerts)
                changed[name] = after
            for name, minute_count in changed.items():
                events.state.set(name, minute_count)
                events.send(minute_count)

    return LogStreams(parts, lines, counts, alerts)
